"""Values that are told apart by type and value alone: what the signature of a call is made of."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from ..._kernel.launch.tensor_map import Description

MISS = object()
"""Result of a plan's code where the call is not the one that was recorded."""


class Ref(NamedTuple):
    """A tensor, by its number."""

    number: int


class MapRef(NamedTuple):
    """A tensor map: the number of its tensor, and what does not depend on where that lies."""

    tensor: Ref
    description: Description
    written: bool


class PointersRef(NamedTuple):
    """Pointers: the numbers of their tensors, None for a null pointer."""

    entries: tuple[Ref | None, ...]
    written: bool


class AccessorRef(NamedTuple):
    """A tensor as an accessor: its number, and what the accessor is where its address is 0."""

    tensor: Ref
    content: bytes


class NoConstant(Exception):
    """A value that is not one of the kinds that are told apart by type and value alone."""


_PLAIN = (
    int,
    bool,
    str,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    type(...),
    Ref,
    MapRef,
    PointersRef,
    AccessorRef,
)
_SEQUENCES = (tuple, list, torch.Size)


def freeze(value: Any) -> Any:
    """A hashable that is equal for equal values of equal types alone: 1, True and 1.0 differ, and 0.0 and -0.0."""
    kind = type(value)
    if kind in _PLAIN:
        return kind, value
    if kind is float:
        return kind, value.hex()
    if kind in _SEQUENCES:
        return kind, tuple([freeze(one) for one in value])
    if kind is dict:
        return kind, tuple([(freeze(name), freeze(one)) for name, one in value.items()])
    if kind is slice:
        return kind, freeze(value.start), freeze(value.stop), freeze(value.step)
    if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
        return kind, str(value.dtype), value.shape, value.tobytes()
    raise NoConstant(f"a value of type {kind.__name__}")
