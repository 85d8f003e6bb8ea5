"""Checks of the arguments of `cupyops.attention`, and the bounds on the keys that a query sees."""

from __future__ import annotations

from torch import Tensor

from ..._util import arguments
from ...errors import InputError


def check(query: Tensor, key: Tensor, value: Tensor) -> None:
    """The tensors of `cupyops.attention`: floating-point, of one device and dtype, of shapes that fit."""
    arguments.floating("query", query)
    arguments.floating("key", key)
    arguments.floating("value", value)
    arguments.same_device(query=query, key=key, value=value)
    if not arguments.autocast(query.device):
        arguments.same_dtype(query=query, key=key, value=value)
    if query.dim() != 4:
        arguments.fail("query", query, "(batch, heads, queries, head_dim)")
    batches, heads, _, width = query.shape
    if key.dim() != 4 or (key.shape[0], key.shape[3]) != (batches, width):
        arguments.fail("key", key, f"({batches}, kv_heads, keys, {width}), as query has it")
    if value.shape[:3] != key.shape[:3] or value.dim() != 4:
        arguments.fail("value", value, f"{tuple(key.shape[:3])} and head_dim, as key has it")
    if heads % key.shape[1] if key.shape[1] else heads:
        raise InputError(f"key has {key.shape[1]} heads, expected a divisor of the {heads} of query")


def number(scale: float | None) -> float | None:
    """The scale as a float."""
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
        arguments.fail("scale", scale, "a number, or None for 1 / sqrt(head_dim)")
    return None if scale is None else float(scale)


def bounds(
    causal: str | None, window: tuple[int | None, int | None] | None, apart: int
) -> tuple[int | None, int | None]:
    """(low, high) of the keys that a query sees; `apart`: how many keys more than queries there are."""
    arguments.choice("causal", causal, (None, "top_left", "bottom_right"))
    diagonal = 0 if causal == "top_left" else apart
    high = None if causal is None else diagonal
    if window is None:
        return None, high
    if not isinstance(window, (tuple, list)) or len(window) != 2 or not all(_is_size(side) for side in window):
        arguments.fail("window", window, "(left, right), each an int of at least 0 or None")
    left, right = window
    if right is not None:
        high = diagonal + (right if causal is None else 0)
    return None if left is None else diagonal - left, high


def _is_size(side: int | None) -> bool:
    return side is None or (isinstance(side, int) and not isinstance(side, bool) and side >= 0)
