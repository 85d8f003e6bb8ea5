"""Elementwise launches over strided rows, such as the halves of a packed tensor: common/elementwise/strided_rows.cuh."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np

from .._kernel.kernel import ceil_div
from .gemm import divisor

BLOCK = 128
WARP = 32


class Spans(NamedTuple):
    """A launch over [rows x cols], and how far apart the rows of each input are."""

    config: tuple[int, int]  # grid, block
    shape: np.ndarray  # `struct Rows`
    strides: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def spans(shape: tuple[int, ...], output: tuple[int, ...], itemsize: int, *inputs: tuple[int, ...]) -> Spans | None:
    """The launch for a dense output of that shape and strides, with inputs of those; None where it takes a copy first."""
    n = math.prod(shape)
    if n == 0 or all(stride == output for stride in inputs):
        return Spans(*walk(1, n, itemsize), (n,) * len(inputs))
    cols = shape[-1] if shape else 1
    apart = [row_stride(shape, stride) for stride in (output, *inputs)]
    if apart[0] != cols or None in apart:
        return None
    return Spans(*walk(n // cols, cols, itemsize), tuple(apart[1:]))  # type: ignore[arg-type]


def row_stride(shape: tuple[int, ...], strides: tuple[int, ...]) -> int | None:
    """Elements from one row, of the last dimension, to the next; None where rows are not contiguous or not evenly apart."""
    if not shape:
        return 1
    if strides[-1] != 1 and shape[-1] != 1:
        return None
    stride, span = None, 1
    for size, step in zip(reversed(shape[:-1]), reversed(strides[:-1])):
        if size == 1:
            continue
        if stride is None:
            stride = step
        elif step != stride * span:
            return None
        span *= size
    return shape[-1] if stride is None else stride


@functools.lru_cache(maxsize=4096)
def walk(rows: int, cols: int, itemsize: int, overlap: bool = False) -> tuple[tuple[int, int], np.ndarray]:
    """The launch and the `struct Rows`. Rows that are no whole number of vectors begin, and end, within one.

    `overlap`: they have one span more, and each warp begins with the last span of the one before.
    """
    if rows * cols == 0:
        return (0, 1), np.zeros(6, dtype=np.int64)  # nothing is launched
    width = 16 // itemsize
    count = (cols // width if cols % width == 0 else (cols + 2 * width - 2) // width) + overlap
    total = rows * count
    by_count = divisor(count) if total < 2**31 - BLOCK else (0, 0, 0)
    own = BLOCK - BLOCK // WARP if overlap else BLOCK
    return (ceil_div(total, own), BLOCK), np.array((rows, cols, count, *by_count), dtype=np.int64)
