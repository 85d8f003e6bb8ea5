"""Linear layers, and the casts that autocast has in front of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .._dispatch.core import library
from .._dispatch.gemm.linear import is_pytorch
from .._util import torch_private
from .._util.arguments import autocast_dtype
from ..ops._linear import linear
from ..ops._linear_lowered import linear_lowered
from .twin import Twin, parameter


class Linear(Twin, torch.nn.Linear):
    """y = x @ weight.T + bias; as `torch.nn.Linear`, by `cupyops.linear`.

    Example:
        >>> cupyops.nn.Linear(3, 2)(torch.zeros(4, 3)).shape
        torch.Size([4, 2])
    """

    def forward(self, input: Tensor) -> Tensor:
        if type(input) is not Tensor and (node := self._cupyops_leaf(input)) is not None:
            return node  # type: ignore[no-any-return]
        weight, bias = parameter(self, "weight"), parameter(self, "bias")
        if is_dynamo_compiling() or type(input) is not Tensor:
            return linear(input, weight, bias)
        half = autocast_dtype(input) if torch_private.any_autocast() else None
        if half is not None:
            input = _in_half(input, half)
        if _is_pytorch(input, weight, half):
            return torch.nn.functional.linear(input, weight, bias)
        if input.dtype is half and _is_lowered(input, weight, bias):
            return linear_lowered(input, weight, bias)
        return linear(input, weight, bias)


def _is_pytorch(x: Tensor, weight: Any, half: torch.dtype | None) -> bool:
    """Return whether `linear` would call PyTorch's own function anyway, so that the layer may call it at once.

    half: to what autocast casts, if it is on.
    """
    if type(weight) is not torch.nn.Parameter or not library.at_once(x):
        return False
    if half is None:
        return x.dtype is weight.dtype and is_pytorch(x, weight, x.dtype)
    cast = half, torch.float32
    return x.dtype in cast and weight.dtype in cast and is_pytorch(x, weight, half)


def _is_lowered(x: Tensor, weight: Any, bias: Any) -> bool:
    """Return whether autocast would cast the parameters alone, the input having its half type, and gradients are wanted."""
    if not x.is_cuda or not x.requires_grad:
        return False
    if type(weight) is not torch.nn.Parameter or not weight.requires_grad:
        return False
    if weight.dtype is not torch.float32 or (bias is not None and bias.dtype is not torch.float32):
        return False
    if not torch.is_grad_enabled() or x.shape[-1:] != weight.shape[1:]:
        return False
    # who counts or chooses operators while they run knows `linear` by name
    return not (torch_private.functorch_active() or torch_private.forward_mode() or torch_private.dispatch_modes())


# --- one cast for all readers ---------------------------------------------------------------------------------------


class _Cast:
    """A tensor's copy in a half type, which lies in the tensor's `_cupyops_cast` and goes when it goes.

    Attributes:
        of: what the tensor and the thread were: see `_state`. The copy stands for the tensor while they are that.
        half: the copy, with a graph that leads to the tensor.
    """

    __slots__ = ("half", "of")

    def __init__(self, of: tuple[Any, ...], half: Tensor) -> None:
        self.of, self.half = of, half

    def __reduce__(self) -> Any:
        return _nothing, ()  # a tensor is pickled and copied without it


def _nothing() -> None:
    return None


def _in_half(x: Tensor, half: torch.dtype) -> Tensor:
    """Cast a float32 tensor that is no leaf, once for all layers that read it; return any other tensor as it is."""
    if x.dtype is not torch.float32 or not x.requires_grad or x.is_leaf:
        return x
    if torch_private.functorch_active() or torch_private.forward_mode():
        return x
    of = _state(x, half)
    kept: _Cast | None = getattr(x, "_cupyops_cast", None)
    if kept is None or kept.of != of:
        kept = _Cast(of, x.to(half))
        x._cupyops_cast = kept  # type: ignore[attr-defined]
    return kept.half


def _state(x: Tensor, half: torch.dtype) -> tuple[Any, ...]:
    """Key of a cached copy: version, memory and history of `x`, the dtype asked for, whether gradients are recorded, and the
    stream, since a copy made on another one would have to be waited for.
    """
    stream = torch_private.current_stream(x.device.index) if x.is_cuda else None
    return x._version, x.data_ptr(), x.grad_fn, half, torch.is_grad_enabled(), stream
