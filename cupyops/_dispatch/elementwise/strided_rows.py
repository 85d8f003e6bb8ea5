"""Elementwise launches over strided rows, such as the halves of a packed tensor: common/elementwise/strided_rows.cuh."""

from __future__ import annotations

import functools

import numpy as np

from ..._kernel.kernel import ceil_div
from ..gemm.gemm import divisor
from .broadcast import Strides

BLOCK = 128
WARP = 32


def row_stride(shape: tuple[int, ...], strides: Strides) -> int | None:
    """Elements from one row, of the last dimension, to the next; None where rows are not contiguous or not evenly apart."""
    if not shape:
        return 1
    if strides[-1] != 1 and shape[-1] != 1:
        return None
    stride, apart = None, 1
    for size, step in zip(reversed(shape[:-1]), reversed(strides[:-1])):
        if size == 1:
            continue
        if stride is None:
            stride = step
        elif step != stride * apart:
            return None
        apart *= size
    return shape[-1] if stride is None else stride


@functools.lru_cache(maxsize=4096)
def spans(rows: int, cols: int, itemsize: int, overlap: bool = False) -> tuple[int, np.ndarray]:
    """The grid, and `struct Rows`. Rows that are no whole number of vectors begin, and end, within one.

    `overlap`: they have one span more, and each warp begins with the last span of the one before.
    """
    width = 16 // itemsize
    count = (cols // width if cols % width == 0 else (cols + 2 * width - 2) // width) + overlap
    total = rows * count
    by_count = divisor(count) if total < 2**31 - BLOCK else (0, 0, 0)
    own = BLOCK - BLOCK // WARP if overlap else BLOCK
    return ceil_div(total, own), np.array((rows, cols, count, *by_count), dtype=np.int64)
