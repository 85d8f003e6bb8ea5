"""softmax: exp(x) / sum exp(x) over one dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from .._dispatch import softmaxes
from .._dispatch.core import shardings
from .._operator.floating import operator

FORWARD, BACKWARD = softmaxes.forms("softmax")


@operator("cupyops::softmax", autocast="fp32", sharding=shardings.along)
def _softmax(x: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
    return torch.softmax(x, dim, dtype=dtype)


softmaxes.give_roles(_softmax, (FORWARD, BACKWARD))


@_softmax.interface(twin=torch.nn.functional.softmax)
def softmax(input: Tensor, dim: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Softmax, exp(x) / sum(exp(x)) over one dimension; as `torch.nn.functional.softmax`.

    Args:
        input: any shape; fp16, bf16, fp32 or fp64, or any real dtype if `dtype` is given.
        dim: the dimension that sums to 1. Left out, it is 0 for 0, 1 and 3 dimensions, else 1, with PyTorch's warning.
        dtype: a floating-point dtype that `input` is cast to first. From a half type to fp32, the kernel casts.

    Returns:
        Contiguous tensor of the shape of `input`, of `dtype` or the dtype of `input`. A row with NaN or +inf in it, or of
        -inf alone, is NaN.

    Raises:
        InputError: `input` is not a tensor of a floating-point dtype (nor is `dtype` given), `dim` is not a dimension of
            it, or `dtype` is not a floating-point dtype.

    Example:
        >>> cupyops.softmax(torch.tensor([1.0, 2.0, 3.0]), dim=0)
        tensor([0.0900, 0.2447, 0.6652])
    """
    return _softmax(*softmaxes.checked_arguments("softmax", input, dim, dtype))
