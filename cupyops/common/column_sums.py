"""Sums over the rows of a [rows x columns] array: how launches cut it. See cuda_src/common/column_sums.cuh."""

from __future__ import annotations

from ..kernel import ceil_div

BLOCK = 256  # kSumThreads
BLOCKS = 2048  # into which the rows are cut, whatever the GPU: the same bits on all


def slabs_of(rows: int, columns: int, width: int) -> tuple[int, tuple[int, int], int, int]:
    """(grid, block, slabs, rows of a slab) for threads that own `width` columns each."""
    block = block_of(ceil_div(columns, width), rows)
    tiles = ceil_div(columns, block[0] * width)
    slab_rows = ceil_div(rows, max(1, min(BLOCKS // tiles, rows // (8 * block[1]))))
    slabs = ceil_div(rows, slab_rows)
    return tiles * slabs, block, slabs, slab_rows


def block_of(columns: int, rows: int) -> tuple[int, int]:
    """A block of 256 threads for a [rows x columns] reduction over rows: wider than a warp only where rows are few."""
    x = min(32, 1 << (columns - 1).bit_length())
    while x < min(columns, BLOCK) and BLOCK // x > rows:
        x *= 2
    return x, BLOCK // x
