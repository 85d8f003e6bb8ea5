"""Arithmetic without error: a sum or product as two float64, rounding to odd, and rounding in a direction.

A value rounded to odd (truncated, its last bit set when anything was lost) can be rounded again, to a format of at
least two bits fewer and in any direction, as if the exact value were rounded: the last bit remembers what was lost.
"""

from typing import Any

import numpy as np

from .lanes import choose

_ONE = np.uint64(1)
_SPLITTER = np.float64(2**27 + 1)


def two_sum(a: Any, b: Any) -> tuple[Any, Any]:
    """The rounded float64 sum and its error: their sum is a + b exactly, unless it overflows."""
    total = np.add(a, b, dtype=np.float64)
    of_b = total - a
    return total, (a - (total - of_b)) + (b - of_b)


def two_product(a: Any, b: Any) -> tuple[Any, Any]:
    """The rounded float64 product and its error, for operands that neither over- nor underflow on the way."""
    product = a * b
    a_high, a_low = _halves(a)
    b_high, b_low = _halves(b)
    return product, ((a_high * b_high - product) + a_high * b_low + a_low * b_high) + a_low * b_low


def _halves(a: Any) -> tuple[Any, Any]:
    spread = _SPLITTER * a
    high = spread - (spread - a)
    return high, a - high


def to_odd(nearest: Any, error: Any) -> Any:
    """The sum of a float64 and its rounding error, rounded to odd."""
    bits = nearest.view(np.uint64)
    inexact = (error != 0) & np.isfinite(nearest) & ((bits & _ONE) == 0)
    outward = (error > 0) == (nearest > 0)
    return choose(inexact, choose(outward, bits + _ONE, bits - _ONE), bits).view(np.float64)


def odd_sum(a: Any, b: Any) -> Any:
    """a + b rounded to odd in float64."""
    return to_odd(*two_sum(a, b))


def toward(nearest: Any, error: Any, rounding: str) -> Any:
    """The neighbour in the direction of rounding, of a value that was rounded to nearest.

    `error` has the sign of what the exact value has beyond the nearest one, and is 0 or NaN where that one is exact.
    """
    kind = nearest.dtype.type
    if rounding == "rn":
        return nearest
    if rounding == "rz":
        astray = ((nearest > 0) & (error < 0)) | ((nearest < 0) & (error > 0))
        goal = kind(0)
    elif rounding == "rm":
        astray, goal = error < 0, kind(-np.inf)
    else:
        astray, goal = error > 0, kind(np.inf)
    if not astray.any():
        return nearest
    return choose(astray, np.nextafter(nearest, goal), nearest)


def narrow(value: Any, rounding: str) -> Any:
    """A float64, exact or rounded to odd, as float32."""
    nearest = value.astype(np.float32)
    if rounding == "rn":
        return nearest
    # An infinity that was finite has an error too: its neighbour is the largest finite number.
    return toward(nearest, value - nearest.astype(np.float64), rounding)


def zero_sum(rounding: str, total: Any, error: Any, a: Any, b: Any) -> Any:
    """A sum that is exactly zero is -0 when rounding down, unless both its terms are +0; in other roundings it stays."""
    if rounding != "rm":
        return total
    cancels = (total == 0) & (error == 0) & (np.signbit(a) | np.signbit(b))
    return choose(cancels, total.dtype.type(-0.0), total)
