"""var: the variance over any dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._dispatch import totals
from .._operator.operator import operator


@operator("cupyops::var")
def _var(x: Tensor, dim: list[int], correction: float, keepdim: bool) -> Tensor:
    return torch.var(x, dim, correction=correction, keepdim=keepdim)


totals.give_var_roles(_var)


@_var.interface
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
    return _var(*totals.var_arguments(input, dim, unbiased, keepdim, correction))
