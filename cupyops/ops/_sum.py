"""sum: over any dimensions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .._dispatch.core import shardings
from .._dispatch.reduce import sum_var
from .._operator.floating import operator


@operator("cupyops::sum", autocast="fp32", sharding=shardings.summed)
def _sum(x: Tensor, dim: list[int], keepdim: bool, dtype: torch.dtype | None, size: list[int]) -> Tensor:
    return torch.sum(x, dim, keepdim, dtype=dtype)


sum_var.give_roles(_sum, mean=False)


@_sum.interface(twin=torch.sum)
def sum(
    input: Tensor,
    dim: int | Sequence[int] | None = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Sum over any dimensions; as `torch.sum`.

    Args:
        input: any shape and strides; kernels serve fp16, bf16, fp32 and fp64.
        dim: the dimension, or several; None and () mean all.
        keepdim: keep them, of size 1.
        dtype: a dtype that `input` is cast to first. From a half type to fp32, the kernel casts.

    Returns:
        Tensor of `dtype`, by default that of `input`; int64 for integers and bool. 0 of nothing.

    Raises:
        InputError: `input` is no tensor, or `dim` names no dimension or one twice.

    Example:
        >>> cupyops.sum(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), 1)
        tensor([3., 7.])
    """
    dims = sum_var.given_dims(input, dim, keepdim, dtype)
    return _sum(input, dims, keepdim, dtype, list(input.shape))
