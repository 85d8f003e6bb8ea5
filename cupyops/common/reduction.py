"""How a reduction of strided inputs is divided among blocks and threads. See common/reduction.cuh."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from ..kernel import ceil_div
from .broadcast import innermost_first, packed_layout

THREADS = 256  # kFoldThreads
BLOCKS = 1024  # into which a launch is cut, whatever the GPU: the same bits on all
UNITS = 16  # that a thread has at least, where a reduction is cut into slabs; and about, of a row
ENOUGH_THREADS = 1 << 18  # to fill a GPU: with fewer rows' worth, more of them share a row

LINE, ROWS, ROW_VECTORS, COLUMNS, COLUMN_VECTORS = range(5)  # Form

Strides = tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """One launch of fold(): its template values, grid, block and structs; and of fold_slabs(), if there are `slabs`."""

    form: int
    block: tuple[int, int]
    tiles: int
    slabs: int
    kept: np.ndarray
    reduced: np.ndarray
    division: np.ndarray


def arrange(
    inputs: Sequence[Tensor], dims: tuple[int, ...], output_strides: Strides, vector: int
) -> tuple[Plan, Sequence[Tensor]]:
    """The plan, and the inputs, copied where their strides are too many. They have one shape, not without elements.

    `output_strides` are those of the dimensions that are kept; `vector` elements are loaded at once.
    """
    shape = tuple(inputs[0].shape)
    aligned = all(tensor.data_ptr() % (vector * tensor.element_size()) == 0 for tensor in inputs)
    found = plan(shape, dims, output_strides, vector, aligned, *[tensor.stride() for tensor in inputs])
    if found is not None:
        return found, inputs
    # [results x what is reduced], contiguous: one dimension of each
    order = [d for d in range(len(shape)) if d not in dims] + list(dims)
    back = sorted(range(len(order)), key=order.__getitem__)
    inputs = [tensor.permute(order).contiguous().permute(back) for tensor in inputs]
    return arrange(inputs, dims, output_strides, vector)


@functools.lru_cache(maxsize=4096)
def plan(
    shape: tuple[int, ...],
    dims: tuple[int, ...],
    output_strides: Strides,
    vector: int,
    aligned: bool,
    *strides: Strides,
) -> Plan | None:
    """None if the dimensions kept, or those reduced, are too many to walk."""
    order = [d for d in innermost_first(shape, strides) if shape[d] > 1] or [0]
    rank = {dim: place for place, dim in enumerate(order)}
    kept_dims = tuple(d for d in range(len(shape)) if d not in dims)
    rows = order[0] not in kept_dims

    def layout(of: tuple[int, ...], width: int, *more: Strides) -> tuple[np.ndarray, int, int] | None:
        steps = [tuple(one[d] for d in of) for one in strides]
        return packed_layout(tuple(shape[d] for d in of), tuple(rank.get(d, 0) for d in of), width, *steps, *more)

    results, count = math.prod(shape[d] for d in kept_dims), math.prod(shape[d] for d in dims)
    line = layout(dims, 1) if rows else None
    if vector > 1 and line is not None and line[2] == 1 and all(one and one[order[0]] == 1 for one in strides):
        form, units = LINE, ceil_div(count, vector)
        along, across = layout(dims, 1), layout(kept_dims, 1, output_strides)
    else:
        crossed = kept_dims if rows else dims  # stepped over by whole vectors, where it is to be loaded by them
        steps = [one[d] for one in strides if shape and one[order[0]] for d in crossed if shape[d] > 1]
        still = len(strides) == 1 and shape and not strides[0][order[0]]
        if not aligned or still or any(step % vector for step in steps) or (count if rows else results) % vector:
            vector = 1
        along = layout(dims, vector if rows else 1)
        across = layout(kept_dims, 1 if rows else vector, output_strides)
        width = ((along if rows else across) or (None, 1))[1]
        form = (ROWS if rows else COLUMNS) + (width > 1)
        units, results = (count // width, results) if rows else (count, results // width)
    if along is None or across is None:
        return None
    block, tiles, slabs = _division(rows, results, units, form)
    slab_units = max(ceil_div(units, slabs), 1)
    slabs = max(ceil_div(units, slab_units), 1)
    if form == LINE:
        units, slab_units = count, slab_units * vector
    division = struct.pack("=4q", results, units, tiles, slab_units)
    return Plan(form, block, tiles, slabs, across[0], along[0], np.frombuffer(division, np.uint8))


def _division(rows: bool, results: int, units: int, form: int) -> tuple[tuple[int, int], int, int]:
    """(block, tiles, slabs) for so many results, of so many units each."""
    if rows:
        along, most = min(THREADS, _power_of_two(ceil_div(units, UNITS))), min(THREADS, _power_of_two(units))
        while along < most and results * along < ENOUGH_THREADS:
            along *= 2
        block = along, THREADS // along
        tiles = ceil_div(results, block[1])
    else:
        block = finishing_block(results, units, 128 if form == COLUMNS else 32)
        along = block[1]
        tiles = ceil_div(results, block[0])
    return block, tiles, max(1, min(BLOCKS // tiles, units // (along * UNITS)))


def finishing_block(results: int, units: int, wide: int = 32) -> tuple[int, int]:
    """A block whose x runs over results: `wide`, by default as a warp, and wider only where units to reduce are few."""
    x = min(wide, _power_of_two(results))
    while x < min(results, THREADS) and THREADS // x > units:
        x *= 2
    return x, THREADS // x


def _power_of_two(least: int) -> int:
    return 1 << (max(least, 1) - 1).bit_length()
