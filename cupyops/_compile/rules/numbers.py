"""Python numbers as literals of C, and the dtypes in which an operator computes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..size import Real, Size
from ..values import COMPUTED, Value

KINDS: dict[Any, Any] = {Size: 1, Real: 1.0}  # a number of the same type


def literal(number: Any, dtype: torch.dtype) -> str:
    """The number in the C type that computes `dtype`."""
    kind = COMPUTED[dtype]
    if isinstance(number, (Size, Real)):
        return f"(({kind}){number})"
    if kind == "bool":
        return "true" if number else "false"
    if kind in ("float", "double"):
        return _floating(float(number), kind)
    number = int(number)
    if dtype is torch.int64:
        return "(-9223372036854775807ll - 1)" if number == -(2**63) else f"{number}ll"
    if dtype is torch.int32:
        return "(-2147483647 - 1)" if number == -(2**31) else str(number)
    return f"({kind}){number}"


def _floating(number: float, kind: str) -> str:
    if math.isnan(number):
        return f"nan_of<{kind}>()"
    with np.errstate(over="ignore"):
        value = np.float32(number) if kind == "float" else np.float64(number)
    if np.isinf(value):
        return ("-" if value < 0 else "") + f"infinity<{kind}>()"
    text = np.format_float_scientific(value, unique=True) + ("f" if kind == "float" else "")
    return f"({text})" if text.startswith("-") else text


def promoted(operands: Sequence[Any]) -> torch.dtype:
    """Dtype in which PyTorch computes with these operands: `torch.result_type` over all of them."""
    given = [
        torch.empty((1,) * len(one.shape), dtype=one.dtype, device="meta")
        if isinstance(one, Value)
        else KINDS.get(type(one), one)
        for one in operands
    ]
    found = torch.result_type(given[0], given[1]) if len(given) > 1 else given[0].dtype
    for one in given[2:]:
        found = torch.result_type(torch.empty((1,), dtype=found, device="meta"), one)
    return found
