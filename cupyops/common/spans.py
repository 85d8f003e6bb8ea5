"""Elementwise launches over rows that are apart, the halves of a packed tensor say: the host's half of common/spans.cuh."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from ..kernel import ceil_div

BLOCK = 128


class Spans(NamedTuple):
    """A launch over [rows x cols], and how far apart the rows of each input are."""

    config: tuple[int, tuple[int, int]]  # grid, block
    rows: int
    cols: int
    strides: tuple[int, ...]


@functools.lru_cache(maxsize=4096)
def spans(
    shape: tuple[int, ...], output: tuple[int, ...], itemsize: int, *inputs: tuple[int, ...], flat: bool = True
) -> Spans | None:
    """The launch for a dense output of that shape and strides, with inputs of those; None where it takes a copy first.

    `flat`: what is laid out alike is one row; else the last dimension is one.
    """
    n = math.prod(shape)
    if n == 0:
        return Spans((0, (1, 1)), 0, 0, (0,) * len(inputs))  # nothing is launched
    if flat and all(stride == output for stride in inputs):
        return Spans(_config(1, n, itemsize), 1, n, (n,) * len(inputs))
    cols = shape[-1] if shape else 1
    apart = [row_stride(shape, stride) for stride in (output, *inputs)]
    if apart[0] != cols or None in apart:
        return None
    return Spans(_config(n // cols, cols, itemsize), n // cols, cols, tuple(apart[1:]))  # type: ignore[arg-type]


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


def _config(rows: int, cols: int, itemsize: int) -> tuple[int, tuple[int, int]]:
    """Blocks of about `BLOCK` threads that fit the rows: tiles of equal size, several short rows to a block."""
    packs = max(1, ceil_div(cols * itemsize, 16))
    tiles = ceil_div(packs, BLOCK)
    threads = ceil_div(packs, tiles)
    if threads > 32:
        threads = ceil_div(threads, 32) * 32
    together = max(1, min(BLOCK // threads, rows))
    tiles = ceil_div(cols, threads * (16 // itemsize))
    return tiles * ceil_div(rows, together), (threads, together)
