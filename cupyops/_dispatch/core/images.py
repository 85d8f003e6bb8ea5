"""Checks of images, (n, channels, *), and the memory that operators on them allocate."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..._util.strides import is_dry
from .rows import is_symbolic


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which the kernels accumulate: acc_t."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def spatial(x: Tensor) -> int:
    """Elements of a plane of (n, c, *)."""
    return math.prod(x.shape[2:])


def is_there(x: Tensor) -> bool:
    """Return True if there is something to launch: not in a dry run, and not without elements."""
    return not (is_dry(x) or is_symbolic(*x.shape)) and x.numel() > 0


def is_empty(x: Tensor) -> bool:
    """Return True if a call that is no dry run has no elements to launch for."""
    return not (is_dry(x) or is_symbolic(*x.shape) or x.numel())


def gradient_like(parameter: Tensor | None, wanted: bool, x: Tensor) -> Tensor | None:
    """Memory for the gradient of a parameter, contiguous; 0 where there is nothing to sum, None where it is not wanted."""
    if not wanted or parameter is None:
        return None
    make = torch.zeros_like if is_empty(x) else torch.empty_like
    return make(parameter, memory_format=torch.contiguous_format)


def contiguous(*tensors: Tensor | None) -> list[Any]:
    """The tensors, those that are not contiguous copied; None stays."""
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]
