"""float64 arithmetic in each rounding: what NumPy rounds to nearest, and the sign of the error of that.

The errors come from two_sum and two_product. Where a piece of a product would leave the range of float64, Python's
fractions say it instead, lane by lane: such lanes are rare.
"""

from fractions import Fraction
from math import copysign, inf, isfinite
from typing import Any

import numpy as np

from .exact import to_odd, toward, two_product, two_sum, zero_sum
from .lanes import choose, each, repair
from .operation import Function

_F64 = np.float64
_LARGE = _F64(2.0**480)  # within these, a product and its error are far from both ends of the range
_SMALL = _F64(2.0**-480)


def add64(rounding: str) -> Function:
    """a + b."""
    if rounding == "rn":
        return np.add

    def add(a: Any, b: Any) -> Any:
        total, error = two_sum(a, b)
        overflowed = np.isinf(total) & np.isfinite(a) & np.isfinite(b)
        error = choose(overflowed, -total, error)
        return toward(zero_sum(rounding, total, error, a, b), error, rounding)

    return add


def subtract64(rounding: str) -> Function:
    """a - b."""
    if rounding == "rn":
        return np.subtract
    add = add64(rounding)
    return lambda a, b: add(a, -b)


def multiply64(rounding: str) -> Function:
    """a * b."""
    if rounding == "rn":
        return np.multiply

    def multiply(a: Any, b: Any) -> Any:
        product, error = two_product(a, b)
        error = np.where(_exactly_zero(a, b), 0.0, error)
        error = repair(error[()], _out_of_range(a, b), _error_of_product, a, b, product)
        return toward(product, error, rounding)

    return multiply


def divide64(rounding: str) -> Function:
    """a / b."""
    if rounding == "rn":
        return np.divide

    def divide(a: Any, b: Any) -> Any:
        quotient = np.divide(a, b)
        product, low = two_product(quotient, b)
        error = np.where(_exactly_zero(a, b), 0.0, ((a - product) - low) * np.sign(b))
        error = repair(error[()], _out_of_range(a, b), _error_of_quotient, a, b, quotient)
        return toward(quotient, error, rounding)

    return divide


def root64(rounding: str) -> Function:
    """The square root."""
    if rounding == "rn":
        return np.sqrt

    def root(a: Any) -> Any:
        nearest = np.sqrt(a)
        scale = choose(a < 1, _F64(2.0**256), _F64(2.0**-256))
        scaled = nearest * scale
        square, low = two_product(scaled, scaled)
        error = choose((a > 0) & np.isfinite(a), (a * scale * scale - square) - low, _F64(0))
        return toward(nearest, error, rounding)

    return root


def fma64(rounding: str) -> Function:
    """a * b + c, rounded once (Boldo and Melquiond, Emulation of FMA and correctly rounded sums, 2008)."""

    def fma(a: Any, b: Any, c: Any) -> Any:
        product, low = two_product(a, b)
        high, middle = two_sum(c, low)
        top, rest = two_sum(product, high)
        nearest, error = two_sum(top, to_odd(*two_sum(middle, rest)))
        nothing = (a == 0) | (b == 0)
        nearest = choose(nothing, product + c, nearest)
        doubtful = ~nothing & ~(_moderate(a) & _moderate(b) & (np.abs(c) < _F64(2.0**1000)))
        nearest = repair(nearest, doubtful, _fma_of_any, a, b, c)
        if rounding == "rn":
            return nearest
        error = choose(nothing, _F64(0), error)
        error = repair(error, doubtful, _error_of_fma, a, b, c, nearest)
        return toward(zero_sum(rounding, nearest, error, product, c), error, rounding)

    return fma


def _moderate(a: Any) -> Any:
    magnitude = np.abs(a)
    return (magnitude > _SMALL) & (magnitude < _LARGE)


def _exactly_zero(a: Any, b: Any) -> Any:
    """Mask of products or quotients that are exact, infinite or NaN, judged by their operands."""
    return (a == 0) | (b == 0) | ~np.isfinite(a) | ~np.isfinite(b)


def _out_of_range(a: Any, b: Any) -> Any:
    return ~_exactly_zero(a, b) & ~(_moderate(a) & _moderate(b))


def _fma_of_any(a: Any, b: Any, c: Any) -> Any:
    """The sum rounded to nearest, of any operands."""
    finite = np.isfinite(a) & np.isfinite(b)
    result = np.where(finite, c + c, a * b + c)  # a product that overflows does not meet an infinite c
    wanted = finite & np.isfinite(c)
    return repair(result[()], wanted, lambda *operands: each(_fma_of_numbers, _F64, *operands), a, b, c)


def _fma_of_numbers(a: float, b: float, c: float) -> float:
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if exact == 0:
        return 0.0  # neither the product nor c is zero here: they cancel
    try:
        return copysign(float(exact), exact)
    except OverflowError:
        return inf if exact > 0 else -inf


def _error_of_product(a: Any, b: Any, nearest: Any) -> Any:
    return each(lambda x, y, r: _excess(Fraction(x) * Fraction(y), r), _F64, a, b, nearest)


def _error_of_quotient(a: Any, b: Any, nearest: Any) -> Any:
    return each(lambda x, y, r: _excess(Fraction(x) / Fraction(y), r), _F64, a, b, nearest)


def _error_of_fma(a: Any, b: Any, c: Any, nearest: Any) -> Any:
    def excess(x: float, y: float, z: float, r: float) -> float:
        if not (isfinite(x) and isfinite(y) and isfinite(z)):
            return 0.0
        return _excess(Fraction(x) * Fraction(y) + Fraction(z), r)

    return each(excess, _F64, a, b, c, nearest)


def _excess(exact: Fraction, nearest: float) -> float:
    """The sign of what the exact value has beyond the nearest float64."""
    if not isfinite(nearest):
        return -copysign(1.0, nearest)
    return float((exact > Fraction(nearest)) - (exact < Fraction(nearest)))
