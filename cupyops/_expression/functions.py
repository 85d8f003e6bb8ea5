"""Functions that a translated body calls: C's functions and conversions in PyTorch, where PyTorch's own differ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .._dispatch.core.images import accumulator as computed_in  # noqa: F401

inf, nan = math.inf, math.nan  # as Python writes them


def number(value: Any, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number as a tensor of no dimension; infinite where `dtype` does not reach so far, as in C."""
    if dtype.is_floating_point:
        return torch.full((), value, dtype=torch.float64, device=device).to(dtype)
    return torch.full((), value, dtype=dtype, device=device)


def integer(value: Tensor, dtype: torch.dtype) -> Tensor:
    """A floating-point number as int32 or int64 as CUDA converts: cut towards zero; the nearest, where it does not fit.

    PyTorch's own conversions differ there between processors. NaN is 0 where float becomes int, else the least number.
    """
    limits = torch.iinfo(dtype)
    fits = (value >= limits.min) & (value < -float(limits.min))  # powers of two, which every floating type has
    of_nan = 0 if value.dtype != torch.float64 and dtype == torch.int32 else limits.min
    outside = torch.where(value > 0, limits.max, torch.where(torch.isnan(value), of_nan, limits.min))
    return torch.where(fits, torch.where(fits, value.detach(), 0).to(dtype), outside.to(dtype))


def guard(condition: Tensor, value: Tensor) -> Tensor:
    """`value`, with a gradient only where the condition holds.

    A branch is computed everywhere and selected afterwards. Where it is not taken its derivative may be infinite, and 0
    times that is NaN; so none comes through.
    """
    return torch.where(condition, value, value.detach())


def quotient(a: Tensor, b: Tensor) -> Tensor:
    """a / b of integers, cut off towards zero; what it is where b is 0 nobody says, but it raises nothing."""
    return torch.div(a, torch.where(b == 0, 1, b), rounding_mode="trunc")


def remainder(a: Tensor, b: Tensor) -> Tensor:
    """a % b of integers, with the sign of a."""
    return torch.fmod(a, torch.where(b == 0, 1, b))


def rounded(x: Tensor) -> Tensor:
    """C's round: halves away from zero."""
    whole = torch.trunc(x)
    return torch.where(torch.abs(x - whole) >= 0.5, whole + torch.sign(x), whole)


def exp10(x: Tensor) -> Tensor:
    """10 to the power of x."""
    return torch.pow(10.0, x)


def finish(value: Tensor, dtype: torch.dtype, shape: Sequence[int], inputs: Sequence[Tensor]) -> Tensor:
    """An output: rounded once, of the whole shape, and a tensor of its own. Narrow integers are the low bits of an int."""
    if value.is_floating_point() and not (dtype.is_floating_point or dtype == torch.bool):
        value = integer(value, torch.int64 if dtype == torch.int64 else torch.int32)
    result = value.to(dtype)
    if result.dim() != len(shape) or result.shape != torch.Size(shape):
        return result.expand(shape).clone(memory_format=torch.contiguous_format)
    return result.clone() if any(result is one for one in inputs) else result


def summed(gradient: Tensor, like: Tensor, shape: Sequence[int]) -> Tensor:
    """The gradient of an input: over the dimensions along which it was broadcast the sum, rounded once."""
    if gradient.dim() != len(shape) or gradient.shape != torch.Size(shape):
        gradient = gradient.expand(shape)
    return gradient.sum_to_size(like.shape).to(like.dtype)


# --- reductions ---


def count(shape: Sequence[int], dims: Sequence[int]) -> int:
    """Number of elements that are reduced to one."""
    return math.prod(shape[dim] for dim in dims)


def folded(
    function: Callable[..., Tensor], mapped: Tensor, dims: Sequence[int], keepdim: bool, empty: Tensor
) -> Tensor:
    """`function` over the dimensions; `empty` where there is nothing to reduce."""
    if mapped.dim() == 0:
        return mapped
    if any(mapped.shape[dim] == 0 for dim in dims):
        return torch.sum(mapped, tuple(dims), keepdim=keepdim) + empty  # the sum is 0, and of the right shape and graph
    return function(mapped, tuple(dims), keepdim=keepdim)


def product(mapped: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """The product over several dimensions."""
    for dim in sorted(dims, reverse=True):
        mapped = torch.prod(mapped, dim, keepdim=keepdim)
    return mapped


def in_pairs(combine: Callable[[Tensor, Tensor], Tensor], identity: Tensor) -> Callable[..., Tensor]:
    """A reduction by halves: the first half combined with the second, until one is left; that with the identity."""

    def reduced(mapped: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
        kept = [dim for dim in range(mapped.dim()) if dim not in dims]
        shape = [1 if dim in dims else size for dim, size in enumerate(mapped.shape) if keepdim or dim not in dims]
        left = mapped.permute([*kept, *dims]).flatten(len(kept))
        while (size := left.shape[-1]) > 1:
            half = size // 2
            pairs = combine(left[..., :half], left[..., half : 2 * half])
            left = torch.cat([pairs, left[..., 2 * half :]], -1) if size % 2 else pairs
        return combine(left, identity).reshape(shape)

    return reduced
