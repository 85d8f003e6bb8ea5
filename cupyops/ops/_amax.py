"""amax: the largest over any dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._dispatch.core import shardings
from .._dispatch.core.forms import Forms
from .._dispatch.elementwise.elementwise import UP_TO_FLOAT32
from .._dispatch.reduce import backward as reduction_backward
from .._dispatch.reduce import reduction, sum_var
from .._kernel.kernel import FLOATING, Kernel
from .._operator.floating import operator
from .._util import arguments
from .._util.strides import is_dry

DEFINE = {**reduction.DEFINE, **reduction_backward.DEFINE}
STATE = 3  # numbers of a Top
amax_fwd_thread_per_row = Kernel("amax.cu", "amax_fwd_thread_per_row<T>", define=DEFINE, T=UP_TO_FLOAT32)
amax_fwd_fold = Kernel(
    "amax.cu", "amax_fwd_fold<T, FORM>", define=DEFINE, T=FLOATING, FORM=reduction.FORM, where=sum_var.served
)
amax_fwd_finalize = Kernel("amax.cu", "amax_fwd_finalize<T>", define=DEFINE, T=FLOATING)
amax_bwd_masked_rows = Kernel("amax.cu", "amax_bwd_masked_rows<T>", define=DEFINE, T=UP_TO_FLOAT32)
amax_bwd_rows = Kernel("amax.cu", "amax_bwd_rows<T>", define=DEFINE, T=UP_TO_FLOAT32)
amax_bwd_columns = Kernel("amax.cu", "amax_bwd_columns<T>", define=DEFINE, T=UP_TO_FLOAT32)
amax_bwd_strided = Kernel("amax.cu", "amax_bwd_strided<T>", define=DEFINE, T=FLOATING)

ROWS = reduction.ThreadPerRow(amax_fwd_thread_per_row, reads_vectors=True)  # which leaves masks, and the others ties
FORWARD = Forms("amax", "forward", [ROWS, *reduction.fold_forms(amax_fwd_fold, sum_var.STATE_LOADS)])
BACKWARD = Forms(
    "amax",
    "backward",
    [
        reduction_backward.MaskedRows(amax_bwd_masked_rows),
        reduction_backward.Rows(amax_bwd_rows),
        reduction_backward.Columns(amax_bwd_columns),
        reduction_backward.Strided(amax_bwd_strided),
    ],
)


@operator("cupyops::amax", sharding=shardings.reduced)
def _amax(x: Tensor, dim: list[int], keepdim: bool) -> Tensor:
    return torch.amax(x, dim, keepdim)


@_amax.forward
def forward(x, dim, keepdim):
    y, strides = sum_var.empty_results(x, dim, keepdim, x.dtype)
    accumulator = sum_var.accumulator(x.dtype)
    words = torch.int64 if accumulator is torch.float64 else torch.int32  # masks are equal as integers alone
    ties = torch.empty(y.shape, dtype=words, device=x.device)
    where = torch.empty(y.shape, dtype=torch.int32, device=x.device)
    outputs = (y, ties.view(accumulator), where)
    sum_var.reduce(FORWARD, amax_fwd_finalize, x, dim, strides, outputs, (sum_var.count(x.shape, dim),), STATE)
    return y, (ties, where)


@_amax.backward
def backward(saved, grad_y, x, y, dim, keepdim):
    ties, where = saved[0].view(sum_var.accumulator(x.dtype)), saved[1]
    if _has_masks(x, dim):
        return reduction_backward.gradient(BACKWARD, x, dim, keepdim, (grad_y, ties), places=(where,), masks=True)
    return reduction_backward.gradient(BACKWARD, x, dim, keepdim, (y, grad_y, ties), places=(where,))


@_amax.interface(twin=torch.amax)
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
    dims = sum_var.given_dims(input, dim, keepdim, None)
    if input.dtype.is_complex:
        arguments.fail("input", input, "a tensor of real numbers")
    if input.dim() > 64:
        arguments.fail("input", input, "one of at most 64 dimensions")
    if input.dim() and any(input.shape[one] == 0 for one in dims):
        arguments.fail("input", input, "one with elements to reduce")
    return _amax(input, dims, keepdim)


def _has_masks(x: Tensor, dim: Sequence[int]) -> bool:
    """Return True if forward has left masks. It is chosen as forward was, so that both have the form that is asked for."""
    if is_dry(x) or x.numel() == 0:
        return False
    return reduction.chosen(FORWARD, x, dim) is ROWS
