"""fused_linear_cross_entropy: what its gradients are multiplied by, and which of them backward may return."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..._kernel.kernel import FLOATING, ceil_div
from . import losses
from .linear import BIAS, WEIGHT, Given, Gradients, Scale, X, kernel

linear_cross_entropy_weights = kernel("weights<T>", T=FLOATING)
linear_cross_entropy_sum = kernel("sum<T>", T=(torch.float32, torch.float64))  # the dtype of the loss
linear_cross_entropy_scale = kernel("scale<T>", T=FLOATING)

ONCE = 8  # in `wanted`, beside the bits of the gradients: backward may return the very tensors that forward has made
_ELEMENTWISE, _BLOCKS = 256, 1 << 12


def _unit(dtype: torch.dtype, reduction: str, rows: Any) -> int:
    """Approximate divisor of a mean: in fp16 the gradients of the logits would vanish if they were divided so early."""
    if dtype is not torch.float16 or reduction != "mean" or type(rows) is not int:
        return 1
    return 1 << min(max(rows, 1).bit_length() - 1, 15)


def _lift(dtype: torch.dtype, reduction: str, rows: Any) -> int:
    """Factor by which forward's gradients are too large: in fp16, before a loss scale, small ones would vanish."""
    return min(_unit(dtype, reduction, rows), 1024)


def scale_of_rows(given: Given, reduction: str) -> tuple[Scale, Tensor | None]:
    """The scale of the rows, and the sum of the targets' weights."""
    if reduction != "mean":
        return Scale(None), None
    x, rows = given.x, given.x.shape[0]
    unit = _unit(x.dtype, reduction, rows)
    total = torch.empty(2, dtype=losses.accumulator(x.dtype), device=x.device)
    tensors = given.target, given.class_weight, total
    linear_cross_entropy_weights[1, losses.SUM_BLOCK](*tensors, rows, given.options(0), unit, T=x.dtype)
    return Scale(total[1:], 0, _lift(x.dtype, reduction, rows) / unit), total


def add(each: Tensor, total: Tensor | None, y: Tensor) -> None:
    """The sum of the losses, over `total` where that is given, into y."""
    linear_cross_entropy_sum[1, losses.SUM_BLOCK](each, total, y, each.shape[0], T=y.dtype)


def scaled(gradient: Tensor | None, grad_y: Tensor, given: Given, reduction: str, ours: bool) -> Tensor | None:
    """Scale a gradient by grad_y, in place if it is `ours`."""
    if gradient is None:
        return None
    y, n, dtype = gradient if ours else torch.empty_like(gradient), gradient.numel(), gradient.dtype
    grid = min(ceil_div(n, _ELEMENTWISE * 16 // dtype.itemsize), _BLOCKS)
    lift = 1 / _lift(dtype, reduction, given.x.shape[0])
    linear_cross_entropy_scale[grid, _ELEMENTWISE](gradient, y, grad_y, lift, n, T=dtype)
    return y


def taken(saved: tuple[Tensor, ...], wanted: int) -> Gradients | None:
    """Return the saved gradients; if they may be returned as they are, only at the first call, and None from then on.

    The mark is a byte on the host beside the gradients, so that it goes wherever a hook on saved tensors takes them. It is
    written behind the back of its version counter, as they are when they are scaled, and returned with another counter:
    what happens to a gradient that was returned is no change of a saved tensor.
    """
    if not saved:
        return None
    if wanted & ONCE:
        mark = saved[-1].cpu().numpy()  # a hook on saved tensors gives copies each time, on whatever device
        if mark[0]:
            return None
        mark[0] = 1
        saved = tuple(one.data for one in saved[:-1])
    tensors = iter(saved)
    return Gradients(*[next(tensors) if wanted & bit else None for bit in (X, WEIGHT, BIAS)])
