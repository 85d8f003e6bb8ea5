"""var: the variance over any dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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

DEFINE = {**reduction.DEFINE, **reduction_backward.DEFINE}
MOMENTS = 3  # numbers of a Moments
var_fwd_thread_per_row = Kernel("var.cu", "var_fwd_thread_per_row<T>", define=DEFINE, T=UP_TO_FLOAT32)
var_fwd_registers = Kernel("var.cu", "var_fwd_registers<T>", define=DEFINE, T=(torch.float32,))
var_fwd_fold = Kernel(
    "var.cu", "var_fwd_fold<T, FORM>", define=DEFINE, T=FLOATING, FORM=reduction.FORM, where=sum_var.served
)
var_fwd_finalize = Kernel("var.cu", "var_fwd_finalize<T>", define=DEFINE, T=FLOATING)
var_bwd_short_rows = Kernel("var.cu", "var_bwd_short_rows<T>", define=DEFINE, T=UP_TO_FLOAT32)
var_bwd_rows = Kernel("var.cu", "var_bwd_rows<T>", define=DEFINE, T=UP_TO_FLOAT32)
var_bwd_columns = Kernel("var.cu", "var_bwd_columns<T>", define=DEFINE, T=UP_TO_FLOAT32)
var_bwd_strided = Kernel("var.cu", "var_bwd_strided<T>", define=DEFINE, T=FLOATING)

FORWARD = Forms(
    "var",
    "forward",
    [
        reduction.ThreadPerRow(var_fwd_thread_per_row),
        reduction.Registers(var_fwd_registers),
        *reduction.fold_forms(var_fwd_fold, sum_var.STATE_LOADS),
    ],
)
BACKWARD = Forms(
    "var",
    "backward",
    [
        reduction_backward.ShortRows(var_bwd_short_rows),
        reduction_backward.Rows(var_bwd_rows),
        reduction_backward.Columns(var_bwd_columns),
        reduction_backward.Strided(var_bwd_strided),
    ],
)


@operator("cupyops::var", sharding=shardings.reduced)
def _var(x: Tensor, dim: list[int], correction: float, keepdim: bool) -> Tensor:
    return torch.var(x, dim, correction=correction, keepdim=keepdim)


@_var.unsupported
def unsupported(x, dim, correction, keepdim):
    return sum_var.why_not(x, dim) or (None if sum_var.count(x.shape, dim) > correction else "no degrees of freedom")


@_var.forward
def forward(x, dim, correction, keepdim):
    y, strides = sum_var.empty_results(x, dim, keepdim, x.dtype)
    mean = torch.empty(y.shape, dtype=sum_var.accumulator(x.dtype), device=x.device)
    freedom = sum_var.count(x.shape, dim) - correction
    sum_var.reduce(FORWARD, var_fwd_finalize, x, dim, strides, (y, mean), (freedom,), MOMENTS)
    return y, (mean,)


@_var.backward
def backward(saved, grad_y, x, dim, correction, keepdim):
    slope = 2 / (sum_var.count(x.shape, dim) - correction)
    return reduction_backward.gradient(BACKWARD, x, dim, keepdim, (grad_y, saved[0]), (slope,))


@_var.interface(twin=torch.var)
def var(
    input: Tensor,
    dim: int | Sequence[int] | bool | None = None,
    unbiased: bool | None = None,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> Tensor:
    """Variance over any dimensions; as `torch.var`.

    Summed about the mean: it does not cancel where the mean is large, and of a constant it is exactly 0.

    Args:
        input: any shape and strides; kernels serve fp16, bf16, fp32 and fp64.
        dim: the dimension, or several; None and () mean all. A bool in its place is `unbiased`.
        unbiased: True for a `correction` of 1, False for 0.
        keepdim: keep them, of size 1.
        correction: the sum of squares is divided by this much less than the number of elements; 1 by default.

    Returns:
        Tensor of the dtype of `input`. NaN or inf where there are no more elements than `correction`.

    Raises:
        InputError: `input` is no tensor or of integers, `dim` names no dimension or one twice, or both `unbiased` and
            `correction` are given.

    Example:
        >>> cupyops.var(torch.tensor([[1.0, 2.0], [3.0, 7.0]]), 1)
        tensor([0.5000, 8.0000])
    """
    return _var(*_arguments(input, dim, unbiased, keepdim, correction))


def _arguments(
    input: Any, dim: Any, unbiased: Any, keepdim: Any, correction: Any
) -> tuple[Tensor, list[int], float, bool]:
    """Check the arguments and return the operator's. A bool in place of `dim` is `unbiased`, as in PyTorch."""
    if isinstance(dim, bool):
        if unbiased is not None:
            arguments.fail("unbiased", unbiased, "no second one")
        dim, unbiased = None, dim
    dims = sum_var.given_dims(input, dim, keepdim, None)
    sum_var.check_inexact(input)
    if unbiased is not None:
        if not isinstance(unbiased, bool):
            arguments.fail("unbiased", unbiased, "a bool or None")
        if correction is not None:
            arguments.fail("correction", correction, "None where `unbiased` is given")
        correction = int(unbiased)
    elif correction is None:
        correction = 1
    elif isinstance(correction, bool) or not isinstance(correction, (int, float, torch.SymInt, torch.SymFloat)):
        arguments.fail("correction", correction, "a number or None")
    return input, dims, float(correction), keepdim
