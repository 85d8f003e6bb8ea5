"""amax: the largest over any dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .. import check
from ..common import totals
from ..common.broadcast import BLOCK, empty_output
from ..common.broadcast import arrange as spread_out
from ..common.reduction import arrange, finishing_block
from ..kernel import FLOATING, Kernel, ceil_div
from ..layout import is_dry
from ..operator import operator

amax_fwd = Kernel("amax.cu", "amax_fwd<T, FORM>", T=FLOATING, FORM=tuple(range(5)))
amax_finish = Kernel("amax.cu", "amax_finish<T>", T=FLOATING)
amax_bwd = Kernel("amax.cu", "amax_bwd<T>", T=FLOATING)


@operator("cupyops::amax")
def _amax(x: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    return torch.amax(x, dim, keepdim)


@_amax.forward
def _(x, dim, keepdim):
    y, strides = totals.room(x, dim, keepdim, x.dtype)
    acc = torch.float64 if x.dtype is torch.float64 else torch.float32
    ties = torch.empty(y.shape, dtype=acc, device=x.device)
    if is_dry(y) or y.numel() == 0:
        return y, (ties,)
    plan, (x,) = arrange((x,), tuple(dim), strides, 16 // x.element_size())
    results, structs = y.numel(), (plan.kept, plan.reduced, plan.division)
    partial = None if plan.slabs == 1 else torch.empty((plan.slabs, results, 2), dtype=acc, device=x.device)
    amax_fwd[plan.tiles * plan.slabs, plan.block](x, y, ties, partial, *structs, results, T=x.dtype, FORM=plan.form)
    if partial is not None:
        block = finishing_block(results, plan.slabs)
        amax_finish[ceil_div(results, block[0]), block](partial, y, ties, plan.slabs, results, T=x.dtype)
    return y, (ties,)


@_amax.backward
def _(saved, grad_y, x, y, dim, keepdim):
    grad_x = empty_output(x)
    over = [totals.spread(one, dim, keepdim, x.shape) for one in (y, grad_y, saved[0])]
    grid, layout, inputs = spread_out(grad_x, x, *over)
    amax_bwd[grid, BLOCK](*inputs, grad_x, layout, x.numel(), T=x.dtype)
    return grad_x


@_amax.interface
def amax(input: Tensor, dim: int | Sequence[int] = (), keepdim: bool = False) -> Tensor:
    """Largest over any dimensions; as `torch.amax`.

    Elements that are equally the largest share the gradient.

    Args:
        input: any shape and strides; kernels serve fp16, bf16, fp32 and fp64.
        dim: the dimension, or several; () means all.
        keepdim: keep them, of size 1.

    Returns:
        Tensor of the dtype of `input`; NaN where one of the elements is.

    Raises:
        InputError: `input` is no tensor, is complex, has nothing to reduce or more than 64 dimensions, or `dim` names no
            dimension or one twice.

    Example:
        >>> cupyops.amax(torch.tensor([[1.0, 2.0], [4.0, 3.0]]), 1)
        tensor([2., 4.])
    """
    if dim is None:
        check.fail("dim", dim, "an int, or a sequence of ints")
    dims = totals.given_dims(input, dim, keepdim, None)
    if input.dtype.is_complex:
        check.fail("input", input, "a tensor of real numbers")
    if input.dim() > 64:
        check.fail("input", input, "one of at most 64 dimensions")
    if input.dim() and any(input.shape[one] == 0 for one in dims):
        check.fail("input", input, "one with elements to reduce")
    return _amax(input, dims, keepdim)
