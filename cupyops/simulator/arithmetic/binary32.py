"""float32 arithmetic in each rounding: float64 has room for what float32 operations must remember."""

from typing import Any

import numpy as np

from .exact import narrow, odd_sum, zero_sum
from .lanes import choose, repair
from .operation import Function

_F64 = np.float64
_LOW29 = np.uint64((1 << 29) - 1)
_HALF29 = np.uint64(1 << 28)
_SUBNORMAL32 = np.float32(2.0**-126)


def add32(rounding: str) -> Function:
    """a + b in float32."""
    if rounding == "rn":
        return np.add
    return lambda a, b: narrow(zero_sum(rounding, odd_sum(a, b), _F64(0), a, b), rounding)


def subtract32(rounding: str) -> Function:
    """a - b in float32."""
    if rounding == "rn":
        return np.subtract
    add = add32(rounding)
    return lambda a, b: add(a, -b)


def multiply32(rounding: str) -> Function:
    """a * b in float32: the float64 product is exact."""
    if rounding == "rn":
        return np.multiply
    return lambda a, b: narrow(np.multiply(a, b, dtype=_F64), rounding)


def fma32(a: Any, b: Any, c: Any) -> Any:
    """a * b + c in float32, rounded once.

    The product is exact in float64. The sum is rounded there first, which goes wrong only where it comes to lie half
    way between two float32 numbers, or near the subnormal ones, which are coarser: there it is rounded to odd instead.
    """
    product = np.multiply(a, b, dtype=_F64)
    total = np.add(product, c, dtype=_F64)
    result = total.astype(np.float32)
    doubtful = (total.view(np.uint64) & _LOW29) == _HALF29
    small = np.abs(result) <= _SUBNORMAL32
    if np.count_nonzero(small):
        doubtful |= small & (total != 0)  # a sum of zero is exact
    return repair(result, doubtful, lambda p, addend: odd_sum(p, addend).astype(np.float32), product, c)


def fma32_in(rounding: str) -> Function:
    """a * b + c in float32."""
    if rounding == "rn":
        return fma32

    def fma(a: Any, b: Any, c: Any) -> Any:
        product = np.multiply(a, b, dtype=_F64)
        return narrow(zero_sum(rounding, odd_sum(product, c), _F64(0), product, c), rounding)

    return fma


def divide32(rounding: str) -> Function:
    """a / b in float32: a float64 quotient of float32 numbers is never rounded across a float32 number."""
    if rounding == "rn":
        return np.divide
    return lambda a, b: narrow(np.divide(a, b, dtype=_F64), rounding)


def without_subnormal_quotients(divide: Function) -> Function:
    """Flush quotients as .ftz does on a GPU: before a directed rounding could lift them to the first normal number."""

    def apply(a: Any, b: Any) -> Any:
        exact = np.divide(a, b, dtype=_F64)
        return choose(np.abs(exact) < _SUBNORMAL32, np.copysign(np.float32(0), exact.astype(np.float32)), divide(a, b))

    return apply


def root32(rounding: str) -> Function:
    """The square root in float32; for the float64 root the same holds as for the quotient."""
    if rounding == "rn":
        return np.sqrt
    return lambda a: narrow(np.sqrt(a, dtype=_F64), rounding)
