"""Modifiers of a float's result: .ftz, .sat, .relu, and the one NaN that the hardware writes.

A float32 operation that gives a NaN gives 0x7fffffff (PTX leaves the payload unspecified, the hardware writes this one);
float16 and bfloat16 give 0x7fff. PTX keeps payloads in float64: there the host's NaN is left as it is.
"""

from typing import Any

import numpy as np

from .lanes import choose
from .operation import Function

TINY32 = np.float32(2.0**-126)  # the smallest normal number
NAN32 = np.uint32(0x7FFFFFFF).view(np.float32)
_ZERO, _ONE = np.float32(0), np.float32(1)


def flush32(value: Any) -> Any:
    """Subnormal float32 numbers become zeros of their sign."""
    tiny = np.abs(value) < TINY32
    if not tiny.any():
        return value
    return np.multiply(value, ~tiny, dtype=np.float32)


def saturate(value: Any) -> Any:
    """Clamp to [0, 1]; NaN and -0 become +0."""
    kind = value.dtype.type
    return choose(value > 0, np.minimum(value, kind(1)), kind(0))


def relu32(value: Any) -> Any:
    """Negative float32 numbers, and -0, become +0; NaN becomes the canonical NaN."""
    return canonical(choose(value <= 0, _ZERO, value))


def canonical(value: Any) -> Any:
    """Each NaN of a float32 value becomes the hardware's."""
    # a sum of squares is NaN if one of them is, and not otherwise: there is no quicker way to ask
    sign = value.dot(value) if value.ndim else value
    if sign == sign:
        return value
    return choose(np.isnan(value), NAN32, value)


def chain(*steps: Function | None) -> Function | None:
    """The steps that are there, one after the other; None when there is none."""
    present = [step for step in steps if step is not None]
    if len(present) < 2:
        return present[0] if present else None

    def apply(value: Any) -> Any:
        for step in present:
            value = step(value)
        return value

    return apply
