"""mean: the sum over any dimensions, divided by how many they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._dispatch.core import shardings
from .._dispatch.reduce import sum_var
from .._operator.floating import operator


@operator("cupyops::mean", sharding=shardings.averaged)
def _mean(x: Tensor, dim: list[int], keepdim: bool, dtype: torch.dtype | None, size: list[int]) -> Tensor:
    return torch.mean(x, dim, keepdim, dtype=dtype)


sum_var.give_roles(_mean, mean=True)


@_mean.interface(twin=torch.mean)
def mean(
    input: Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Mean over any dimensions; as `torch.mean`.

    Args:
        input: any shape and strides; kernels serve fp16, bf16, fp32 and fp64.
        dim: the dimension, or several; None and () mean all.
        keepdim: keep them, of size 1.
        dtype: a floating or complex dtype that `input` is cast to first. From a half type to fp32, the kernel casts.

    Returns:
        Tensor of `dtype`, by default that of `input`. NaN of nothing.

    Raises:
        InputError: `input` is no tensor or of integers, with no `dtype`, or `dim` names no dimension or one twice.

    Example:
        >>> cupyops.mean(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 1)
        tensor([1.5000, 3.5000])
    """
    dims = sum_var.given_dims(input, dim, keepdim, dtype)
    sum_var.check_inexact(input, dtype)
    return _mean(input, dims, keepdim, dtype, list(input.shape))
