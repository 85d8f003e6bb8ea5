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
UNITS = 8  # that a thread has at least, where a reduction is cut into slabs

Strides = tuple[int, ...]


@dataclass(frozen=True)
class Plan:
    """One launch of fold(): its template values, grid, block and structs; and of fold_slabs(), if there are `slabs`."""

    rows: bool
    vec: bool
    line: bool
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
    found = plan(shape, dims, output_strides, vector if aligned else 1, *[tensor.stride() for tensor in inputs])
    if found is not None:
        return found, inputs
    # [results x what is reduced], contiguous: one dimension of each
    order = [d for d in range(len(shape)) if d not in dims] + list(dims)
    back = sorted(range(len(order)), key=order.__getitem__)
    inputs = [tensor.permute(order).contiguous().permute(back) for tensor in inputs]
    return arrange(inputs, dims, output_strides, vector)


@functools.lru_cache(maxsize=4096)
def plan(
    shape: tuple[int, ...], dims: tuple[int, ...], output_strides: Strides, vector: int, *strides: Strides
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
    across = kept_dims if rows else dims  # what is stepped over: by whole vectors, where it is to be loaded by them
    steps = [one[d] for one in strides if shape and one[order[0]] for d in across if shape[d] > 1]
    if any(step % vector for step in steps) or (not rows and results % vector):
        vector = 1
    along, across_it = layout(dims, vector if rows else 1), layout(kept_dims, 1 if rows else vector, output_strides)
    if along is None or across_it is None:
        return None
    reduced, kept, width = along[0], across_it[0], (along if rows else across_it)[1]
    # one step from each unit to the next, and no number to be spread over a vector
    line = along[2] == 1 and (width == 1 or all(one and one[order[0]] for one in strides))
    units = count // width if rows else count
    tail = count - units * width if rows else 0
    results = results if rows else results // width
    block, tiles, slabs = _division(rows, results, units)
    slab_units = max(ceil_div(units, slabs), 1)
    division = struct.pack("=5q", results, units, tail, tiles, slab_units)
    slabs = max(ceil_div(units, slab_units), 1)
    return Plan(rows, width > 1, line, block, tiles, slabs, kept, reduced, np.frombuffer(division, np.uint8))


def _division(rows: bool, results: int, units: int) -> tuple[tuple[int, int], int, int]:
    """(block, tiles, slabs) for so many results, of so many units each."""
    if rows:
        along = min(THREADS, _power_of_two(ceil_div(units, 4)))
        block = along, THREADS // along
        tiles = ceil_div(results, block[1])
    else:
        block = finishing_block(results, units)
        along = block[1]
        tiles = ceil_div(results, block[0])
    return block, tiles, max(1, min(BLOCKS // tiles, units // (along * UNITS)))


def finishing_block(results: int, units: int) -> tuple[int, int]:
    """A block whose x runs over results: a warp wide, and wider only where there are few units to reduce."""
    x = min(32, _power_of_two(results))
    while x < min(results, THREADS) and THREADS // x > units:
        x *= 2
    return x, THREADS // x


def _power_of_two(least: int) -> int:
    return 1 << (max(least, 1) - 1).bit_length()
