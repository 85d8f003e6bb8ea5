"""Autocast: what PyTorch's lists do with an operator, per device type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

# "lower" casts to the autocast dtype
POLICIES: dict[str | None, dict[str, str]] = {
    None: {},
    "lower": {"cuda": "lower", "cpu": "lower"},  # matmul, linear, convolutions
    "fp32": {"cuda": "fp32"},  # softmax, norms, losses
    "fp32_everywhere": {"cuda": "fp32", "cpu": "fp32"},  # nll_loss, which the CPU's list has too
}

_CAST = (torch.float16, torch.bfloat16, torch.float32)


def dtype_for(policy: Mapping[str, str], device: torch.device) -> torch.dtype | None:
    """The dtype to which inputs on `device` are cast now, or None."""
    asked = policy.get(device.type)
    if asked is None or not torch.is_autocast_enabled(device.type):
        return None
    return torch.float32 if asked == "fp32" else torch.get_autocast_dtype(device.type)


def cast(args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Inputs in float16, bfloat16 and float32 as `dtype`.

    float64 is left alone, as PyTorch leaves it; so is float8, of which a scale beside it makes numbers.
    """

    def one(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.dtype in _CAST else value

    return tuple(one(value) for value in args)
