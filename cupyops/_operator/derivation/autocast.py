"""Autocast: what PyTorch's lists do with an operator, per device type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
_KINDS = ("cuda", "cpu")

_CAST = (torch.float16, torch.bfloat16, torch.float32)


def dtype_for(policy: Mapping[str, str], device: torch.device) -> torch.dtype | None:
    """The dtype to which inputs on `device` are cast now, or None."""
    asked = policy.get(device.type)
    if asked is None or not torch.is_autocast_enabled(device.type):
        return None
    return torch.float32 if asked == "fp32" else torch.get_autocast_dtype(device.type)


def without(policy: Mapping[str, str], function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)` with autocast off where there is a policy, which has settled the dtypes; as `custom_fwd` has it."""
    if policy:
        for kind in _KINDS:
            if torch.is_autocast_enabled(kind):
                with torch.autocast(kind, enabled=False):
                    return without(policy, function, *args)
    return function(*args)


def cast(args: tuple[Any, ...], dtype: torch.dtype) -> tuple[Any, ...]:
    """Inputs in float16, bfloat16 and float32 as `dtype`.

    float64 is left alone, as PyTorch leaves it; so is float8, of which a scale beside it makes numbers.
    """

    def one(value: Any) -> Any:
        return value.to(dtype) if isinstance(value, Tensor) and value.dtype in _CAST else value

    return tuple(one(value) for value in args)
