"""Calls recast in another precision, or with other values."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .call import Call
from .tolerance import computable

_NUDGE = 0.05  # of a value, by which a call differs that is much like another
# the finest dtypes, which are as exact as the truth, and what they are narrowed to
FINEST = {torch.float64: torch.float32, torch.complex128: torch.complex64}


def exact(call: Call) -> Call:
    """The call in double precision; a `dtype` among its arguments widened too."""
    return _recast(call, widened, torch.float64)


def coarser(call: Call) -> Call:
    """The call with float64 made float32; a `dtype` among its arguments too."""
    return _recast(call, narrowed, torch.float32)


def _recast(call: Call, change: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Call:
    other = call.map(lambda t: change(t.detach()).clone().requires_grad_(t.requires_grad))
    given = lambda v: dtype if isinstance(v, torch.dtype) and v.is_floating_point else v  # noqa: E731
    return call.like(map(given, other.args), {name: given(value) for name, value in other.kwargs.items()})


def cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in another dtype that wants a gradient where the tensor does."""
    return tensor.detach().to(dtype, copy=True).requires_grad_(tensor.requires_grad)


def on_cpu(call: Call) -> Call:
    """The call with its tensors on the CPU."""
    return call.map(lambda t: t.detach().cpu().requires_grad_(t.requires_grad))


def widened(tensor: Tensor) -> Tensor:
    """Cast to float64 or complex128; integers stay as they are."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    return tensor.to(torch.float64) if tensor.is_floating_point() else tensor


def narrowed(tensor: Tensor) -> Tensor:
    return tensor.to(FINEST[tensor.dtype]) if tensor.dtype in FINEST else tensor


def other_values(tensor: Tensor) -> Tensor:
    """The values in another order; halved where that changes nothing."""
    given = tensor.detach()
    other = given.flip(tuple(range(given.dim()))) if given.dim() else given
    other = (widened(given) * 0.5).to(given.dtype) if torch.equal(computable(other), computable(given)) else other
    return other.requires_grad_(tensor.requires_grad)


def nudged(tensor: Tensor, source: torch.Generator) -> Tensor:
    given = tensor.detach()
    step = torch.randn(tensor.shape, generator=source, dtype=torch.float64).to(tensor.device)
    wide = widened(given)
    moved = (wide * (1 + _NUDGE * step)).to(tensor.dtype)
    kept = torch.where(wide.isfinite() & widened(moved).isfinite(), widened(moved), wide)
    return kept.to(tensor.dtype).requires_grad_(tensor.requires_grad)


def rounded_otherwise(grad: Tensor, source: torch.Generator) -> Tensor:
    """Return the gradient in float64, rounded a unit in the last place up or down."""
    step = torch.randn(grad.shape, generator=source, dtype=torch.float64).sign().to(grad.device)
    return widened(grad) * (1 + step * torch.finfo(grad.dtype).eps)


def other_truth(tensor: Tensor, source: torch.Generator) -> Tensor:
    """Return values that are rounded otherwise, in float64, where the truth has an error of its own."""
    if tensor.dtype not in FINEST:
        return tensor
    return rounded_otherwise(tensor.detach(), source).requires_grad_(tensor.requires_grad)


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference, among finite values."""
    off = (computable(a).double() - computable(b).double()).abs()
    off = off[off.isfinite()]
    return off.max().item() if off.numel() else 0.0
