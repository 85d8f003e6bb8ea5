"""How a reduction of strided inputs is divided among blocks and threads. See common/reduce/reduction.cuh."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from torch import Tensor

from .._kernel.kernel import ceil_div
from .._util.strides import aligned
from .broadcast import innermost_first, packed_layout
from .gemm import divisor
from .rows import SMALL_BYTES, SMALL_ROWS

THREADS = 256  # of a block
MOST_THREADS = 512  # kFoldThreads: of a block where there is one for each result, or tile of columns
BLOCKS = 1024  # into which a launch is cut, whatever the GPU: the same bits on all
ROW_BLOCKS = 8192  # of rows: the last ones to end are short
ENOUGH_BLOCKS = 128  # that need not be cut into more
LOADS = 4  # units of a row that a thread has, about
SPREAD_LOADS = 4  # kSpreadUnits: vectors that a thread of spread_rows() has
WHOLE_PACKS = 4  # kWholePacks: vectors that a thread has of a WholeRow
SHORT_PACKS = 32  # of a row that is too short to be one, and that is spread with others
SHORT_UNITS = 2  # kShortUnits: what a thread of spread_short() has
DEEP = 4  # units of columns that a thread has at least, where few columns make a block
UNITS = 16  # of columns that a thread has at least, where a reduction is cut into slabs
ENOUGH_THREADS = 1 << 18  # to fill a GPU: with fewer rows' worth, more of them share a row
LANES = 8  # of columns: 128 bytes
COLUMN_THREADS = 1 << 16  # for whose vectors there are registers, so many being under way at once
FEWEST_THREADS = 128  # of a block of them
MOST_UNITS = 1 << 30  # of a slab

LINE, ROWS, ROW_VECTORS, COLUMNS, COLUMN_VECTORS = range(5)  # Form

Strides = tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """One launch of fold(): its template value, grid, block and structs; and of fold_slabs() after it, if `slabs`.

    `slabs` by `partials` partial results are combined to as many as there are.
    """

    form: int
    grid: tuple[int, int]
    block: tuple[int, int]
    slabs: int
    partials: int
    structs: tuple[np.ndarray, np.ndarray, np.ndarray]  # kept, reduced, Division


def arrange(
    inputs: Sequence[Tensor], dims: tuple[int, ...], output_strides: Strides, vector: int, loads: int = LOADS
) -> tuple[Plan, Sequence[Tensor]]:
    """The plan, and the inputs, copied where their strides are too many. They have one shape, not without elements.

    `output_strides` are those of the dimensions that are kept; `vector` elements are loaded at once, `loads` of them by a
    thread of a row.
    """
    shape = tuple(inputs[0].shape)
    whole = all(aligned(tensor, vector * tensor.element_size()) for tensor in inputs)
    found = plan(shape, dims, output_strides, vector, whole, loads, *[tensor.stride() for tensor in inputs])
    if found is not None:
        return found, inputs
    # [results x what is reduced], contiguous: one dimension of each
    order = [d for d in range(len(shape)) if d not in dims] + list(dims)
    back = sorted(range(len(order)), key=order.__getitem__)
    inputs = [tensor.permute(order).contiguous().permute(back) for tensor in inputs]
    return arrange(inputs, dims, output_strides, vector, loads)


@functools.lru_cache(maxsize=4096)
def plan(
    shape: tuple[int, ...],
    dims: tuple[int, ...],
    output_strides: Strides,
    vector: int,
    aligned: bool,
    loads: int,
    *strides: Strides,
) -> Plan | None:
    """None if the dimensions kept, or those reduced, are too many to walk."""
    whole_vector = vector
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
    whole, period = 0, 1
    if form == COLUMNS and aligned and odd_columns(shape, dims, strides, output_strides):
        # as many rows side by side as make whole vectors: what is left of the last ones ends within a unit
        period = whole_vector // math.gcd(results, whole_vector)
        whole, form = results * count, COLUMN_VECTORS
        units, results = ceil_div(count, period), results * period // whole_vector
        along = packed_layout((units,), (1,), 1, (results * whole_vector,))
        across = packed_layout((results * whole_vector,), (1,), whole_vector, (1,), (1,))
        assert along is not None and across is not None
    block, tiles, slabs = _division(rows, results, units, form, loads, period > 1)
    slab_units = max(ceil_div(units, slabs), 1)
    slabs = max(ceil_div(units, slab_units), 1)
    if form == LINE:
        units, slab_units = count, slab_units * vector
    division = struct.pack("=5q", results, units, slab_units, whole, period)
    several = slabs * period if slabs * period > 1 else 0
    partials = results * (whole_vector if form == COLUMN_VECTORS else 1)
    return Plan(
        form, (tiles, slabs), block, several, partials, (across[0], along[0], np.frombuffer(division, np.uint8))
    )


def odd_columns(
    shape: Sequence[int], dims: tuple[int, ...], strides: Sequence[Strides], output_strides: Strides
) -> bool:
    """Whether it is one contiguous input whose first dimensions are reduced to contiguous results."""
    kept = [d for d in range(len(shape)) if d not in dims]
    first = max(dims, default=0) < min(kept, default=0)
    contiguous = is_dense(shape, strides[0]) and is_dense([shape[d] for d in kept], output_strides)
    return len(strides) == 1 and first and contiguous


def is_dense(shape: Sequence[int], strides: Strides) -> bool:
    """Whether a tensor of these strides is contiguous."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def _division(
    rows: bool, results: int, units: int, form: int, loads: int, odd: bool
) -> tuple[tuple[int, int], int, int]:
    """(block, tiles, slabs) for so many results, of so many units each; `odd` where units of columns straddle sectors."""
    if rows:
        along, most = min(THREADS, _power_of_two(ceil_div(units, loads))), min(THREADS, _power_of_two(units))
        while along < most and results * along < ENOUGH_THREADS:
            along *= 2
        if ENOUGH_BLOCKS <= results < BLOCKS and units >= MOST_THREADS * LOADS:
            along = MOST_THREADS
        block = along, max(THREADS // along, 1)
        tiles = ceil_div(results, block[1])
        cut = min(ROW_BLOCKS // tiles, units // (along * loads))
    else:
        lanes, threads = 4 * LANES, MOST_THREADS
        if form == COLUMN_VECTORS:
            lanes, threads = (lanes, threads // 2) if odd else (LANES, threads)
            while threads > FEWEST_THREADS and ceil_div(results, lanes) * threads > COLUMN_THREADS:
                threads //= 2
        deep = units >= threads // lanes * DEEP
        block = finishing_block(results, units, lanes, threads) if deep else finishing_block(results, units)
        along = block[1]
        tiles = ceil_div(results, block[0])
        parts = _full(tiles, COLUMN_THREADS // (along * block[0])) if form == COLUMN_VECTORS else BLOCKS // tiles
        cut = min(parts, units // (along * UNITS))
    slabs = 1 if tiles >= ENOUGH_BLOCKS and not odd else cut
    return block, tiles, max(1, slabs, ceil_div(units, MOST_UNITS))


def _full(tiles: int, at_once: int) -> int:
    """Into how many slabs to cut, the fewest by which nearly all of the blocks that run at once always do."""
    slabs = max(at_once // tiles, 1)
    while slabs * tiles < BLOCKS and -slabs * tiles % at_once > slabs * tiles // 8:
        slabs += 1
    return slabs


def finishing_block(results: int, units: int, wide: int = 32, threads: int = 0) -> tuple[int, int]:
    """A block whose x runs over results: `wide`, by default as a warp, and wider only where units to reduce are few."""
    threads = threads or (THREADS if units < BLOCKS else MOST_THREADS)
    x = min(wide, _power_of_two(results))
    while x < min(results, threads) and threads // x > units:
        x *= 2
    return x, threads // x


class Rows(NamedTuple):
    """A launch for rows of a contiguous input: a thread takes one that is `small`, else threads hold a WholeRow."""

    small: bool
    grid: int
    block: tuple[int, int]
    shared: int
    rows: int
    size: int


@functools.lru_cache(maxsize=4096)
def rows_alone(
    shape: tuple[int, ...], dims: tuple[int, ...], itemsize: int, aligned: bool, all_small: bool
) -> Rows | None:
    """None where fold() reduces them. `all_small`: rows of whole vectors may be small, for which they need no copy."""
    kept, reduced = longer_dims(shape, dims)
    if kept and reduced and kept[-1] > reduced[0]:
        return None
    rows, size = math.prod(shape[d] for d in kept), math.prod(shape[d] for d in reduced)
    packs, rest = divmod(size * itemsize, 16)
    if reduced and size * itemsize <= SMALL_BYTES and (rest or all_small):
        shared = 0 if aligned and not rest else SMALL_ROWS * size * itemsize
        return Rows(True, ceil_div(rows, SMALL_ROWS), (SMALL_ROWS, 1), shared, rows, size)
    along = _power_of_two(ceil_div(packs, WHOLE_PACKS))
    if rest or not aligned or packs <= SHORT_PACKS or along > MOST_THREADS:
        return None
    side = max(THREADS // 2 // along, 1) if along <= 32 else 1
    return Rows(False, ceil_div(rows, side), (along, side), 0, rows, size)


def longer_dims(shape: Sequence[int], dims: Sequence[int]) -> tuple[list[int], list[int]]:
    """The dimensions kept, and those reduced; one of size 1 is neither."""
    longer = [dim for dim, size in enumerate(shape) if size > 1]
    return [dim for dim in longer if dim not in dims], [dim for dim in longer if dim in dims]


def rows_block(rows: int, vectors: int) -> tuple[int, tuple[int, int], int]:
    """(grid, block, parts of a row) of spread_rows() for rows of so many vectors."""
    along = min(THREADS, _power_of_two(ceil_div(vectors, SPREAD_LOADS)))
    parts = ceil_div(vectors, along * SPREAD_LOADS)
    return ceil_div(rows, THREADS // along) * parts, (along, THREADS // along), parts


@functools.lru_cache(maxsize=4096)
def short_rows(rows: int, size: int, vector: int, aligned: bool) -> tuple[int, bool, np.ndarray] | None:
    """(grid, whether it is vectors that are spread, `struct Divisor`) of spread_short(), or None for longer rows."""
    if ceil_div(size, vector) > SHORT_PACKS:
        return None
    vectors = aligned and size >= vector
    units = ceil_div(rows * size, vector if vectors else 1)
    return ceil_div(units, SHORT_UNITS * THREADS), vectors, np.array(divisor(size), dtype=np.int64)


def columns_block(across: int, units: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """(grid, block) of spread_columns() for `units` rows of so many vectors."""
    lanes = min(THREADS // 2, _power_of_two(across))
    tiles, deep = ceil_div(across, lanes), THREADS // lanes
    return (tiles, max(1, min(ceil_div(2 * BLOCKS, tiles), units // (deep * UNITS)))), (lanes, deep)


def _power_of_two(least: int) -> int:
    return 1 << (max(least, 1) - 1).bit_length()
