"""amax: the largest over any dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._dispatch import totals
from .._kernel.kernel import FLOATING, Kernel
from .._operator.operator import operator
from .._util import arguments

amax_fwd = Kernel("amax.cu", "amax_fwd<T, FORM>", T=FLOATING, FORM=totals.FORM)
amax_finish = Kernel("amax.cu", "amax_finish<T>", T=FLOATING)
amax_small = Kernel("amax.cu", "amax_small<T>", T=FLOATING)
amax_bwd_small = Kernel("amax.cu", "amax_bwd_small<T>", T=FLOATING)
amax_bwd_short = Kernel("amax.cu", "amax_bwd_short<T>", T=FLOATING)
amax_bwd_rows = Kernel("amax.cu", "amax_bwd_rows<T>", T=FLOATING)
amax_bwd_columns = Kernel("amax.cu", "amax_bwd_columns<T>", T=FLOATING)
amax_bwd = Kernel("amax.cu", "amax_bwd<T>", T=FLOATING)

FURTHER = (amax_bwd_rows, amax_bwd_columns, amax_bwd)  # gradients of all but short rows
STATE = 3  # numbers of a Top


@operator("cupyops::amax")
def _amax(x: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    return torch.amax(x, dim, keepdim)


@_amax.forward
def _(x, dim, keepdim):
    y, strides = totals.room(x, dim, keepdim, x.dtype)
    accumulator = totals.accumulator(x)
    words = torch.int64 if accumulator is torch.float64 else torch.int32  # of small rows masks: equal as integers alone
    ties = torch.empty(y.shape, dtype=words, device=x.device)
    where = torch.empty(y.shape, dtype=torch.int32, device=x.device)
    kernels, count = (amax_fwd, amax_finish, amax_small, None), totals.count(x.shape, dim)
    totals.fold(kernels, x, dim, strides, (y, ties.view(accumulator), where), (count,), STATE, all_small=True)
    return y, (ties, where)


@_amax.backward
def _(saved, grad_y, x, y, dim, keepdim):
    ties, where = saved[0].view(totals.accumulator(x)), saved[1]
    if totals.in_small_rows(x, dim):  # forward left masks
        return totals.gradient((amax_bwd_small, *FURTHER), x, dim, keepdim, (grad_y, ties), places=(where,))
    return totals.gradient((amax_bwd_short, *FURTHER), x, dim, keepdim, (y, grad_y, ties), places=(where,))


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
        arguments.fail("dim", dim, "an int, or a sequence of ints")
    dims = totals.given_dims(input, dim, keepdim, None)
    if input.dtype.is_complex:
        arguments.fail("input", input, "a tensor of real numbers")
    if input.dim() > 64:
        arguments.fail("input", input, "one of at most 64 dimensions")
    if input.dim() and any(input.shape[one] == 0 for one in dims):
        arguments.fail("input", input, "one with elements to reduce")
    return _amax(input, dims, keepdim)
