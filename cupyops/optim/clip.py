"""clip_grad_norm_: torch.nn.utils' own, with the gradients of a dtype read and scaled by one launch each."""

from __future__ import annotations

import functools
import math
import types
import warnings
import weakref
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .._dispatch.multi_tensor import BLOCK, DEFINE, MovingTables, SameLayout, TableLaunch, why_not
from .._kernel.kernel import FLOATING, Kernel, executors
from .._operator.derivation import distributed
from .._util import torch_private
from .._util.tracing import operator as traced

_WIDE = (torch.float32, torch.float64)
grad_norm_partials = Kernel("grad_norm.cu", "grad_norm_partials<T>", define=DEFINE, T=FLOATING)
grad_norm_finalize = Kernel("grad_norm.cu", "grad_norm_finalize<T>", define=DEFINE, T=_WIDE)
grad_norm_clip = Kernel("grad_norm.cu", "grad_norm_clip<T>", define=DEFINE, T=FLOATING)

# Into how many blocks a launch is cut, at most, does not depend on the GPU: all of them give the same bits.
BLOCKS = 132 * 8
FINALIZERS = 1024  # threads that add up what the blocks found

_NAME = "cupyops.nn.utils.clip_grad_norm_"
_grad = attrgetter("grad")


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Scale gradients in place so that their norm, as of one vector, is at most `max_norm`; as `torch.nn.utils`' own.

    Gradients on one GPU of floating dtypes (fp16, bf16 and fp32, or fp64) are read once for the norm, and written only
    where it is too large, in two launches per dtype and one in all, with no wait: a step in a CUDA graph may have it. The
    norm is summed, and the gradients are scaled, in fp32 (fp64 in fp64). All else, other norms than 2 and inf, and where
    `foreach` is asked for, is PyTorch's.

    Args:
        parameters: the parameters, or one; those without a gradient are left out.
        max_norm: the largest norm allowed.
        norm_type: 2, or `inf` for the largest magnitude; other norms by PyTorch.
        error_if_nonfinite: raise where the norm is NaN or infinite, for which this waits.
        foreach: as in PyTorch, whose function then runs.

    Returns:
        Tensor: the norm as it was, of the gradients' dtype.

    Raises:
        RuntimeError: the norm is not finite, and `error_if_nonfinite`.

    Example:
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> weight.grad = torch.tensor([3.0, 4.0])
        >>> cupyops.nn.utils.clip_grad_norm_(weight, max_norm=1.0)
        tensor(5.)
        >>> weight.grad
        tensor([0.6000, 0.8000])
    """
    if is_dynamo_compiling():  # PyTorch's own, which a graph has
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    if isinstance(parameters, Tensor):
        parameters = [parameters]
    elif isinstance(parameters, types.GeneratorType):
        parameters = list(parameters)
        if not parameters:
            warnings.warn("`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=3)
    else:
        parameters = list(parameters)
    grads = [grad for grad in map(_grad, parameters) if grad is not None]
    norm_type = float(norm_type)
    reason = _why_not_at_all(norm_type, foreach)
    if reason is None and grads and (mesh := _mesh(grads)) is not None:
        with traced(_NAME, "kernel"):
            return _clip_parts(grads, mesh, float(max_norm), norm_type, error_if_nonfinite)
    known = reason or _known_of(parameters, grads, norm_type)
    if isinstance(known, str):
        with traced(_NAME, "reference", note=known):
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    with traced(_NAME, "kernel"):
        return known.clip(grads, float(max_norm), norm_type, error_if_nonfinite)


def norm_and_factor(
    parameters: list[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool
) -> tuple[Tensor, Tensor] | None:
    """The norm of the gradients, and what `clip_grad_norm_` would multiply them by, one number of the type that they are
    computed in; None where PyTorch must do it, or where they are spread over devices."""
    grads = [grad for grad in map(_grad, parameters) if grad is not None]
    if _why_not_at_all(norm_type, None) is not None or not grads or any(map(distributed.is_spread, grads)):
        return None
    known = _known_of(parameters, grads, norm_type)
    if isinstance(known, str):
        return None
    with traced(_NAME, "kernel"):
        total, norm = known.total(grads, norm_type, error_if_nonfinite)
    return total, (max_norm / (norm + 1e-6)).clamp_(max=1.0)


class Clipped:
    """The gradients of parameters at one time, by the first of them."""

    def __init__(self, parameters: list[Tensor]) -> None:
        first = _first(parameters)
        self._grad = None if first is None else weakref.ref(first)
        self._version = None if first is None else torch_private.version(first)

    def changed(self, parameters: list[Tensor]) -> bool | None:
        """Return True if the gradients have since been changed in place; None if the parameters have others by now."""
        first = _first(parameters)
        if first is None or self._grad is None or self._grad() is not first:
            return None
        return torch_private.version(first) != self._version


def _first(parameters: list[Tensor]) -> Tensor | None:
    return next((param.grad for param in parameters if param.grad is not None), None)


def _known_of(parameters: list[Tensor], grads: list[Tensor], norm_type: float) -> _Known | str:
    """Return what is cached for gradients that the kernels serve, or the reason why they do not."""
    key = (id(parameters[0]), len(grads), norm_type) if grads else (0, 0, norm_type)
    known = _known.get(key)
    if known is not None and known.serves(grads):
        return known
    if (reason := _why_not(grads, norm_type)) is not None:
        return reason
    known = _Known(grads)
    if SameLayout.can_tell():
        if len(_known) >= _MOST_KNOWN:
            _known.clear()
        _known[key] = known
    return known


class _Known:
    """Cached tables and dtypes for gradients of one layout at any address; keeps no gradient alive."""

    def __init__(self, grads: list[Tensor], most_blocks: int = BLOCKS) -> None:
        self._most_blocks = most_blocks
        self._alike = SameLayout(grads) if SameLayout.can_tell() else None
        places: dict[torch.dtype, list[int]] = {}
        for place, grad in enumerate(grads):
            places.setdefault(grad.dtype, []).append(place)
        self._groups = [(dtype, at, MovingTables(([grads[i] for i in at],))) for dtype, at in places.items()]
        self._blocks = sum(self._grid(one) for *_, moving in self._groups for one in moving.launches)
        self._wide = torch.float64 if torch.float64 in places else torch.float32
        self._dtype = functools.reduce(torch.promote_types, places)

    def serves(self, grads: list[Tensor]) -> bool:
        """Take over these gradients if they have the layout of the cached ones; return whether they do."""
        if self._alike is None or not self._alike(grads):
            return False
        for _, at, moving in self._groups:
            moving.move(0, grads if len(at) == len(grads) else [grads[i] for i in at])
        return True

    def clip(self, grads: list[Tensor], max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
        """The norm; the gradients are scaled."""
        total, norm = self.total(grads, norm_type, error_if_nonfinite)
        self.scale(grads, max_norm, norm)
        return total

    def total(self, grads: list[Tensor], norm_type: float, error_if_nonfinite: bool) -> tuple[Tensor, Tensor]:
        """The norm, in the gradients' dtype and in the type that it is computed in."""
        norm = self.norm(grads, norm_type)
        total = norm.to(self._dtype)
        if error_if_nonfinite:
            _check_finite(total, norm_type)
        return total, norm

    def norm(self, grads: list[Tensor], norm_type: float) -> Tensor:
        """The norm, in the type that it is computed in."""
        largest = norm_type != 2
        partials = grads[0].new_empty(self._blocks, dtype=self._wide)
        begin = 0
        for dtype, at, moving in self._groups:
            for launch in moving.launches:
                blocks, table, count = self._grid(launch), launch.table, launch.tensors
                here = partials[begin : begin + blocks] if begin else partials
                grad_norm_partials[blocks, BLOCK](grads[at[launch.start]], table, count, here, largest, T=dtype)
                begin += blocks
        norm = partials.new_empty(())
        grad_norm_finalize[1, FINALIZERS](partials, norm, begin, largest, T=self._wide)
        return norm

    def scale(self, grads: list[Tensor], max_norm: float, norm: Tensor) -> None:
        """Multiply the gradients, whose norm may be too large."""
        torch.autograd.graph.increment_version(grads)
        for dtype, at, moving in reversed(self._groups):
            for launch in reversed(moving.launches):
                given = grads[at[launch.start]], launch.table, launch.tensors
                grad_norm_clip[self._grid(launch), BLOCK](*given, max_norm, norm, T=dtype)

    def _grid(self, launch: TableLaunch) -> int:
        return min(launch.blocks, self._most_blocks)


def _check_finite(total: Tensor, norm_type: float) -> None:
    if not math.isfinite(total.item()):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped. To disable this error and scale the gradients by the non-finite norm anyway, set "
            "`error_if_nonfinite=False`"
        )


# --- gradients that are spread over devices, as FSDP2's are ---


def _mesh(grads: list[Tensor]) -> Any:
    """The mesh of gradients that are DTensors on one, split or replicated, on a device with kernels; None of others."""
    if not all(map(distributed.is_spread, grads)):
        return None
    mesh, _ = distributed.placements(grads[0])
    for grad in grads:
        other, lies = distributed.placements(grad)
        if other != mesh or any(one.is_partial() for one in lies):
            return None
    dtypes = {grad.dtype for grad in grads}
    served = dtypes <= set(FLOATING) and (torch.float64 not in dtypes or len(dtypes) == 1)
    return mesh if served and mesh.device_type in executors else None


def _clip_parts(grads: list[Any], mesh: Any, max_norm: float, norm_type: float, error_if_nonfinite: bool) -> Tensor:
    """Each device's parts by its kernels, and one number for each way to lie sent between them."""
    square = norm_type == 2
    found, served = [], []
    for lies in dict.fromkeys(grad.placements for grad in grads):
        parts = [part for grad in grads if grad.placements == lies and (part := distributed.local(grad)).numel()]
        flat = [part if why_not((part,)) is None else part.contiguous() for part in parts]
        known = _Known(flat) if flat else None
        mine = torch.zeros((), device=mesh.device_type) if known is None else known.norm(flat, norm_type)
        mine = mine.double()  # whose square is finite
        found.append(distributed.reduced(mine.square() if square else mine, mesh, lies, "sum" if square else "max"))
        served.append((known, parts, flat))
    each = torch.stack(found)
    norm = each.sum().sqrt() if square else each.max()
    dtype = functools.reduce(torch.promote_types, (grad.dtype for grad in grads))
    total = norm.to(dtype)
    if error_if_nonfinite:
        _check_finite(total, norm_type)
    torch.autograd.graph.increment_version(grads)
    for known, parts, flat in served:
        if known is not None:
            known.scale(flat, max_norm, norm if dtype is torch.float64 else norm.float())
        for part, scaled in zip(parts, flat):
            if part is not scaled:
                part.copy_(scaled)
    return distributed.replicated(total, mesh)


_known: dict[tuple[int, int, float], _Known] = {}  # by the first parameter's id, the count of gradients, and norm_type
_MOST_KNOWN = 64


def _why_not_at_all(norm_type: float, foreach: bool | None) -> str | None:
    """Return why PyTorch must clip, whatever the gradients, or None."""
    if torch.compiler.is_compiling() or torch_private.dispatch_modes():
        return "traced"
    if foreach is not None:
        return "foreach was asked for"
    return None if norm_type in (2.0, math.inf) else f"norm_type {norm_type}"


def _why_not(grads: list[Tensor], norm_type: float) -> str | None:
    """Return why PyTorch must clip these gradients, or None."""
    sizes = [grad.numel() for grad in grads]
    if not any(sizes):
        return "no gradients"
    if norm_type == math.inf and 0 in sizes:
        return "an empty gradient, which has no largest magnitude"
    dtypes = {grad.dtype for grad in grads}
    if torch.float64 in dtypes and len(dtypes) > 1:
        return "float64 beside other dtypes"
    if len({grad.device for grad in grads}) > 1:
        return "gradients on different devices"
    return next((reason for grad in grads if (reason := why_not((grad,))) is not None), None)
