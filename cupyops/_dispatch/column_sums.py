"""Sums over rows, or over a channel's spans, in a pass over gradients. See cuda_src/common/reduce/column.cuh."""

from __future__ import annotations

import functools
import math
import struct
from typing import NamedTuple

import numpy as np

from .._kernel.kernel import ceil_div

BLOCK = 256  # kSumThreads
FINISH = 1024  # kFinishThreads
BLOCKS = 528  # into which the rows are cut, whatever the GPU: the same bits on all
SHORT = 32  # spans of fewer elements are read as columns
WARPS = 16384  # into which spans are cut
LEAST = 8  # vectors of a thread, where there are slabs
FOLDED = 4  # periods at a time of a block that has whole ones, at least, where it adds up the rows of each

Pattern = tuple[int, int, int]  # (outer, channels, inner) in memory order, one number for each channel


@functools.lru_cache(maxsize=4096)
def pattern(shape: tuple[int, ...], strides: tuple[int, ...], factor: tuple[int, ...]) -> Pattern | None:
    """How a factor of that shape varies over a dense tensor, in memory order; None if over dimensions that are apart."""
    padded = (1,) * (len(shape) - len(factor)) + tuple(factor)
    order = sorted((d for d, size in enumerate(shape) if size != 1), key=lambda d: -strides[d])
    varying = [d for d in order if padded[d] != 1]
    outer = channels = inner = 1
    for dim in order:
        if dim in varying:
            channels *= shape[dim]
        elif channels == 1 and varying:
            outer *= shape[dim]
        else:
            inner *= shape[dim]
    start = order.index(varying[0]) if varying else 0
    # the channels are counted as a contiguous factor counts them, and without a gap
    if order[start : start + len(varying)] != sorted(varying):
        return None
    return outer, channels, inner


class Plan(NamedTuple):
    """A pass and its finish_sums()."""

    grid: int
    block: tuple[int, int]
    size: np.ndarray  # Columns or Spans
    columns: bool
    cut: bool
    partial: tuple[int, int]  # the shape of each sum: slabs, and what each has
    finish: tuple[int, tuple[int, int]]
    left: tuple[int, int, int]  # slabs, channels, inner


@functools.lru_cache(maxsize=4096)
def plan(outer: int, channels: int, inner: int, width: int) -> Plan:
    """For an array [outer x channels x inner], none of them 0, whose channels are summed; vectors of `width`."""
    if inner < SHORT:
        return _of_columns(outer, channels, inner, width)
    return _of_spans(outer, channels, inner, width)


def _of_columns(outer: int, channels: int, inner: int, width: int) -> Plan:
    columns = channels * inner
    times = width // math.gcd(columns, width)  # rows of whole vectors
    period = columns * times // width
    rows = ceil_div(outer, times)
    whole = BLOCK // period >= (FOLDED if times > 1 else FOLDED + 1)  # else more threads of 32 across have columns
    folded = whole and times > 1
    block = (period, BLOCK // period) if whole else block_of(period, rows)
    tiles = ceil_div(period, block[0])
    slab_rows = ceil_div(rows, max(1, min(BLOCKS // tiles, rows // (LEAST * block[1]))))
    slabs = ceil_div(rows, slab_rows)
    size = struct.pack("=7q", outer * columns, columns, inner, period, rows, slab_rows, folded)
    kept = columns if folded else period * width
    return Plan(
        tiles * slabs, block, np.frombuffer(size, np.uint8), True, False, (slabs, kept),
        *_finish(slabs * kept // columns, channels, inner),
    )  # fmt: skip


def _of_spans(outer: int, channels: int, inner: int, width: int) -> Plan:
    cut = inner % width > 0
    units = inner // width + 2 * cut
    slab_units = ceil_div(outer * units, max(1, min(WARPS // channels, outer * units // (LEAST * 32))))
    slab_units = min(ceil_div(slab_units, 32) * 32, outer * units)  # whole turns of a warp
    slabs = ceil_div(outer * units, slab_units)
    numbers = (outer * channels * inner, channels, inner, units, slab_units, slabs, outer * units)
    size = struct.pack("=9q", *numbers, 32 % units, 32 // units * channels * inner)
    return Plan(
        ceil_div(slabs * channels * 32, BLOCK), (BLOCK, 1), np.frombuffer(size, np.uint8), False, cut, (slabs, channels),
        *_finish(slabs, channels, 1),
    )  # fmt: skip


def _finish(slabs: int, channels: int, inner: int) -> tuple[tuple[int, tuple[int, int]], tuple[int, int, int]]:
    x, _ = block_of(channels, slabs)
    y = min(FINISH // x, 1 << (max(ceil_div(slabs, 4), 1) - 1).bit_length())
    return (ceil_div(channels, x), (x, y)), (slabs, channels, inner)


def block_of(columns: int, rows: int) -> tuple[int, int]:
    """A block of about 256 threads for a [rows x columns] reduction over rows: wider than a warp only where rows are few."""
    x = min(32, columns)
    while x < min(columns, BLOCK) and BLOCK // x > rows:
        x *= 2
    return x, BLOCK // x
