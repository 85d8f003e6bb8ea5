"""Sizes that are symbols, as torch.compile and torch.export have them: what is decided by them must not bind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import torch_private

_ANY = 64  # for a size of which nothing is known


def is_symbolic(args: Sequence[Any]) -> bool:
    """Return True if a size, a stride or a number among the arguments is a symbol."""
    return any(
        any(type(size) is not int for size in (*value.shape, *value.stride()))
        if isinstance(value, Tensor)
        else isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
        or (isinstance(value, (list, tuple)) and any(isinstance(one, torch.SymInt) for one in value))
        for value in args
    )


def known(condition: Any) -> bool:
    """Return True if the condition holds; for a symbol whose value is known nowhere, if that is certain."""
    if not isinstance(condition, torch.SymBool):
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return bool(guard_or_false(condition))


def examples(args: Sequence[Any]) -> list[Any]:
    """The arguments with the sizes that they were traced with, in the place of symbols: to ask them binds no symbol."""
    with torch_private.without_dispatch_modes(), torch_private.FakeTensorMode():
        return [_example(value) for value in args]


def _example(value: Any) -> Any:
    if isinstance(value, Tensor):
        shape, stride = [_number(size) for size in value.shape], [_number(size) for size in value.stride()]
        return torch.empty_strided(shape, stride, dtype=value.dtype, device=value.device)
    if isinstance(value, (list, tuple)):
        return type(value)(_number(one) for one in value)
    return _number(value)


def _number(value: Any) -> Any:
    if not isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return value
    hint = value.node.hint
    return _ANY if hint is None else hint
