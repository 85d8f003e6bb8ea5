"""Rules of the writes to inputs with which a graph ends."""

from __future__ import annotations

from typing import Any

import torch

from ..builder import Builder, Result
from ..values import Buffer, Value, broadcast, is_dense
from .pointwise import converted
from .registry import rule

aten = torch.ops.aten


@rule(aten.copy_.default)
def copy_(build: Builder, result: Result, x: Value, src: Any, non_blocking: bool = False) -> Any:
    """Overwrite an input."""
    if not isinstance(src, Value) or not isinstance(x, Buffer) or x.unit is not None or not is_dense(x):
        return NotImplemented
    value = converted(build, result, broadcast(src, x.shape), rounds=False)
    if value is NotImplemented:
        return NotImplemented
    build.write(x, value)
    return x
