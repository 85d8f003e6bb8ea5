"""What sum and mean share: one kernel, dtypes, and gradients that are views; and with amax, dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import check
from ..kernel import FLOATING, Kernel, ceil_div
from ..layout import is_dry
from .reduction import arrange, finishing_block

sum_fwd = Kernel("sum.cu", "sum_fwd<T, FORM>", T=FLOATING, FORM=tuple(range(5)))
sum_finish = Kernel("sum.cu", "sum_finish<T>", T=FLOATING)

_HALVES = (torch.float16, torch.bfloat16)


def room(x: Tensor, dims: Sequence[int], keepdim: bool, dtype: torch.dtype) -> tuple[Tensor, tuple[int, ...]]:
    """Room for the results over `dims`, and its strides in the dimensions that are kept."""
    shape = x.shape
    kept = [dim for dim in range(len(shape)) if dim not in dims]
    result = [1 if dim in dims else shape[dim] for dim in range(len(shape))] if keepdim else [shape[d] for d in kept]
    y = torch.empty(result, dtype=dtype, device=x.device)
    return y, tuple(y.stride(dim) for dim in kept) if keepdim else y.stride()


def total(x: Tensor, dims: Sequence[int], keepdim: bool, dtype: torch.dtype | None, mean: bool) -> Tensor:
    """The sum over `dims`, or the mean, of x as `dtype`."""
    y, strides = room(x, dims, keepdim, dtype or x.dtype)
    if is_dry(y) or y.numel() == 0:
        return y
    count = math.prod(x.shape[dim] for dim in dims)
    plan, (x,) = arrange((x,), tuple(dims), strides, 16 // x.element_size())
    acc = torch.float64 if x.dtype is torch.float64 else torch.float32
    results, wide, divisor = y.numel(), y.dtype is not x.dtype, count if mean else 1
    partial = None if plan.slabs == 1 else torch.empty((plan.slabs, results), dtype=acc, device=x.device)
    structs = plan.kept, plan.reduced, plan.division
    sum_fwd[plan.tiles * plan.slabs, plan.block](
        x, y, partial, wide, divisor, *structs, results, T=x.dtype, FORM=plan.form
    )
    if partial is not None:
        block = finishing_block(results, plan.slabs)
        sum_finish[ceil_div(results, block[0]), block](partial, y, wide, divisor, plan.slabs, results, T=x.dtype)
    return y


def spread(grad_y: Tensor, dims: Sequence[int], keepdim: bool, size: Sequence[int]) -> Tensor:
    """The gradient of a result, over what was reduced to it: a view."""
    if not keepdim:
        for dim in dims:
            if len(size):
                grad_y = grad_y.unsqueeze(dim)
    return grad_y.expand(size)


def why_not(x: Tensor, dims: Sequence[int], dtype: torch.dtype | None) -> str | None:
    """Why the kernel does not serve a call, or None."""
    if not all(x.shape[dim] for dim in dims if x.dim()):
        return "nothing to reduce"
    if dtype is None or dtype is x.dtype or (dtype is torch.float32 and x.dtype in _HALVES):
        return None
    return f"no kernel for {x.dtype} to {dtype}"


def given_dims(input: Tensor, dim: Any, keepdim: Any, dtype: Any) -> list[int]:
    """The dimensions to reduce, from the front and in order; all arguments checked."""
    check.tensor("input", input)
    if not isinstance(keepdim, bool):
        check.fail("keepdim", keepdim, "a bool")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        check.fail("dtype", dtype, "a torch.dtype or None")
    listed = list(dim) if isinstance(dim, (tuple, list)) else [] if dim is None else [dim]
    ndim = input.dim()
    chosen = [check.dim("dim", one, ndim) for one in listed]
    dims = [one for one in range(ndim) if not chosen or any(one == other for other in chosen)]
    if len(dims) < len(chosen) and (ndim or len(chosen) > 1):
        check.fail("dim", dim, "each dimension once")
    return dims
