"""Parameters of float32 that layers read in a half type under autocast: in a CUDA graph a model's copies are made at once.

Each layer would make its own, a launch for each parameter. What layers ask for in one forward of the model is copied as the
next one begins, in a launch or two, and dropped as it ends. A copy stands for its parameter while that is as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Module

from .._dispatch.norm_lowered import of_autocast
from .._kernel.graph import capturing, warming
from .._util import torch_private

_ALIGNED = 128  # elements, at whose multiples copies begin: more than vectors and tensor maps ask for


def captured() -> bool:
    """Whether a CUDA graph is being captured: what saves time of the GPU costs the host nothing then.

    On an H100 a graph of a step of GPT-2 takes 0.97 of the time that it takes without the copies, and ViT's 0.98. By itself
    a step keeps the host for longer.
    """
    return capturing()


def graphed() -> bool:
    """The same, or of a call before the capture."""
    return not is_dynamo_compiling() and (capturing() or warming())


class _Thread(threading.local):
    model: Copies | None = None  # whose forward is under way


_thread = _Thread()


class _Half:
    """A parameter's copy, which lies in its `_cupyops_half`; `of`: what the parameter and the thread were."""

    __slots__ = ("half", "of")

    def __init__(self, of: tuple[Any, ...], half: Tensor) -> None:
        self.of, self.half = of, half

    def __reduce__(self) -> Any:
        return _nothing, ()  # a parameter is pickled and copied without it


def _nothing() -> None:
    return None


def _state(parameter: Tensor, half: torch.dtype) -> tuple[Any, ...]:
    """Its version and memory, the type asked for, and the stream, on which the copy was made."""
    stream = torch_private.current_stream(parameter.device.index) if parameter.is_cuda else None
    return parameter._version, parameter.data_ptr(), half, stream


def half_of(parameter: Tensor, half: torch.dtype) -> Tensor | None:
    """A parameter's copy, where there is one and it is the parameter's still; else the next forward has one, if the model
    makes copies."""
    model = _thread.model
    if model is None or torch_private.saved_tensors_hooks(False) is not None:
        return None  # what is recomputed in backward, outside of the model's forward, is to be as it was
    model.asked[parameter] = None
    kept: _Half | None = getattr(parameter, "_cupyops_half", None)
    if kept is None or kept.of != _state(parameter, half):
        return None
    return kept.half


class _FromCopy(torch.autograd.Function):
    """A copy, as what a parameter is cast to."""

    @staticmethod
    def forward(ctx: Any, parameter: Tensor, copy: Tensor) -> Tensor:
        ctx.dtype = parameter.dtype
        return copy.view_as(copy)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad.to(ctx.dtype), None


def from_copy(parameter: Tensor, copy: Tensor) -> Tensor:
    """`parameter.to(copy.dtype)`, which `half_of` has found already."""
    found: Tensor = _FromCopy.apply(parameter, copy)
    return found


class Copies:
    """The copies of one model: hooks of it, `before` and `after` its forward.

    Attributes:
        asked: the parameters that layers have asked for since its forward began.
    """

    def __init__(self) -> None:
        self.asked: dict[Tensor, None] = {}
        self._made: list[Tensor] = []

    def before(self, module: Module, args: Any) -> None:
        """Copy what the forward before has asked for, for a graph. Nothing inside another model's, whose copies serve."""
        if is_dynamo_compiling() or _thread.model is not None:
            return
        if not torch.is_grad_enabled() or torch.is_inference_mode_enabled() or torch_private.dispatch_modes():
            return
        asked, self.asked = self.asked, {}
        _thread.model = self
        if captured():
            self._copy([one for one in asked if _is_there(one)])

    def after(self, module: Module, args: Any, output: Any) -> None:
        """Drop the copies, which backward has where it reads them. Called however the forward ends."""
        if is_dynamo_compiling() or _thread.model is not self:
            return
        _thread.model = None
        for one in self._made:
            vars(one).pop("_cupyops_half", None)
        self._made = []

    def __reduce__(self) -> Any:
        return Copies, ()  # a model is pickled and copied with hooks of its own

    def _copy(self, parameters: Iterable[Tensor]) -> None:
        grouped: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
        for one in parameters:
            if (half := of_autocast(one)) is not None:
                grouped.setdefault((one.device, half), []).append(one)
        for (device, half), together in grouped.items():
            starts, total = [], 0
            for one in together:
                starts.append(total)
                total += -(-one.numel() // _ALIGNED) * _ALIGNED
            with torch.no_grad():
                room = torch.empty(total, dtype=half, device=device)
                halves = [torch.as_strided(room, one.shape, one.stride(), at) for at, one in zip(starts, together)]
                torch._foreach_copy_(halves, together)
            for one, copy in zip(together, halves):
                one._cupyops_half = _Half(_state(one, half), copy)  # type: ignore[attr-defined]
            self._made += together


def _is_there(parameter: Tensor) -> bool:
    """Whether a parameter can be read now: FSDP frees some between the layers that use them."""
    if type(parameter) is not torch.nn.Parameter or parameter.dtype is not torch.float32 or not parameter.numel():
        return False
    dense = parameter.is_contiguous() or parameter.is_contiguous(memory_format=torch.channels_last)
    return dense and bool(parameter.untyped_storage().size())
