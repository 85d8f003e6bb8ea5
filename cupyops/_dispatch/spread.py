"""Elementwise launches with parameters that are broadcast: the host's half of common/elementwise/broadcast_params.cuh."""

from __future__ import annotations

import functools
import math
import struct
from typing import NamedTuple

import numpy as np
from torch import Tensor

from .._kernel.kernel import ceil_div
from .._util.strides import is_dry
from .broadcast import BLOCK, merged
from .gemm import divisor

EACH_COLUMN, WHOLE_SPANS, CUT_SPANS = FORMS = (0, 1, 2)
TURNS = 1  # vectors of a thread, about
FILL = 132 * 2048  # threads; where there are fewer vectors, each has one
MOST = (1 << 31) - 1  # elements of a stride, and of what is counted in an int


class Plan(NamedTuple):
    """A launch of spread_over()."""

    grid: int
    spread: np.ndarray
    form: int


def plan(output: Tensor, x: Tensor, *parameters: Tensor, kept: int = 0) -> Plan | None:
    """The launch, for parameters expanded to the shape of the dense output; None where another kernel has to do it.

    `kept`: the vectors of a thread that keeps its parameters from one to the next, if not `TURNS`.
    """
    if is_dry(output) or output.numel() == 0:
        return None
    strides = [tensor.stride() for tensor in parameters]
    return _plan(output.shape, output.stride(), x.stride(), 16 // output.element_size(), kept or TURNS, *strides)


@functools.lru_cache(maxsize=4096)
def _plan(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    x: tuple[int, ...],
    width: int,
    kept: int,
    *parameters: tuple[int, ...],
) -> Plan | None:
    if any(a != b for size, a, b in zip(shape, strides, x) if size != 1):
        return None
    found = {pattern(shape, strides, one) for one in parameters}
    if len(found) > 1 or None in found:
        return None
    channels, inner = found.pop()  # type: ignore[misc]
    inner = inner if channels > 1 else 1  # one number is a row of one column
    row = 1 if inner > 1 else channels // math.gcd(channels, width)  # vectors that are whole rows
    if 1 < inner < width or max(channels, inner, row * width) > MOST:
        return None
    form = EACH_COLUMN if inner == 1 else CUT_SPANS if inner % width else WHOLE_SPANS
    vectors = math.prod(shape) // width
    step = max(ceil_div(vectors, kept if inner == 1 else TURNS), min(vectors, FILL), 1)
    step = min(ceil_div(step, row), MOST // (row * width)) * row
    whole = step * width
    steps = (whole // inner % channels, whole % inner)
    divisors = (*divisor(channels), *divisor(inner))
    packed = struct.pack("=6q8i", *divisors, channels, inner, step, *steps, vectors // step, vectors % step, 0)
    return Plan(ceil_div(max(min(step, vectors), 1), BLOCK), np.frombuffer(packed, np.uint8), form)


def pattern(shape: tuple[int, ...], strides: tuple[int, ...], parameter: tuple[int, ...]) -> tuple[int, int] | None:
    """(channels, inner): element i of a dense tensor goes with number i // inner % channels; None if that is not so."""
    dims = merged(shape, strides, [parameter])
    inner = dims.pop(0)[0] if dims[0][1] == (0,) else 1
    channels = dims.pop(0)[0] if dims and dims[0][1] == (1,) else 1
    return None if any(step != (0,) for _, step in dims) or len(dims) > 1 else (channels, inner)
