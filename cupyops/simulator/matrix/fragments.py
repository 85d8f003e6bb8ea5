"""Fragments: which lane holds which element of a matrix, as the PTX ISA's figures show.

All layouts but those of `m8n8k4` for halves are one: eight quads of lanes hold a row each, and the lanes of a quad hold
runs of consecutive columns, as many as fit into a register. What a register more means differs: first the row eight
further down (where a warp holds 16 rows), then the columns that follow. The layout of `wmma`'s fragments is unspecified,
so that any will do.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np


@dataclass(frozen=True, eq=False)
class Fragment:
    """A matrix (or several) spread over the registers of a warp or a warpgroup."""

    shape: tuple[int, ...]
    place: np.ndarray  # flat position in the matrix of each element that the lanes hold, lane by lane
    holder: np.ndarray  # the inverse: who holds each element of the matrix, the first of them if there are several
    per_lane: int

    def gather(self, elements: np.ndarray) -> np.ndarray:
        """(threads, elements of a thread) -> (warps or warpgroups, *shape)."""
        return elements.reshape(-1, self.place.size).take(self.holder, 1).reshape(-1, *self.shape)

    def scatter(self, matrices: np.ndarray) -> np.ndarray:
        """(warps or warpgroups, *shape) -> (threads, elements of a thread)."""
        return matrices.reshape(-1, self.holder.size).take(self.place, 1).reshape(-1, self.per_lane)


def fragment(shape: tuple[int, ...], *coordinates: np.ndarray) -> Fragment:
    """A fragment from the coordinates of each element, arrays that broadcast to (lanes, elements of a lane)."""
    grid = np.broadcast_arrays(*coordinates)
    place = np.ravel_multi_index(grid, shape)
    holder = np.unique(place, return_index=True)[1]
    return Fragment(shape, place.ravel(), holder, place.shape[1])


@cache
def by_quads(rows: int, columns: int, run: int, warps: int = 1) -> Fragment:
    """The common layout. Each warp holds 8 or 16 of the `rows`; `run` is the number of columns in a register.

    It serves A (m x k), B seen as n x k, and the accumulators (m x n, runs of two columns).
    """
    lane = np.arange(32 * warps)[:, None]
    register, within = divmod(np.arange(rows * columns // (32 * warps))[None, :], run)
    rows_of_warp = rows // warps
    block, half = divmod(register, rows_of_warp // 8)
    row = rows_of_warp * (lane // 32) + 8 * half + lane % 32 // 4
    column = 4 * run * block + run * (lane % 4) + within
    return fragment((rows, columns), row, column)


@cache
def quad_pairs_operand(by_row: bool) -> Fragment:
    """A (8 x 4) or B (seen as 8 x 4 too) of `m8n8k4` for halves: four matrices, each in two quads of the warp.

    `by_row`: a lane holds a row of the 8 x 4, as for A.row and B.col; otherwise one column of its quad's four rows.
    """
    lane, element = np.arange(32)[:, None], np.arange(4)[None, :]
    matrix, quad, position = lane // 4 % 4, lane // 16, lane % 4
    row, column = (position, element) if by_row else (element, position)
    return fragment((4, 8, 4), matrix, 4 * quad + row, column)


@cache
def quad_pairs_accumulator(halves: bool) -> Fragment:
    """C or D (8 x 8) of `m8n8k4` for halves: whole rows where they are halves, 2 x 2 patches where they are floats."""
    lane, element = np.arange(32)[:, None], np.arange(8)[None, :]
    matrix, quad = lane // 4 % 4, lane // 16
    if halves:
        return fragment((4, 8, 8), matrix, 4 * quad + lane % 4, element)
    row = 4 * quad + (lane & 1) + (element & 2)
    column = (element & 4) + (lane & 2) + (element & 1)
    return fragment((4, 8, 8), matrix, row, column)


@cache
def by_lanes(rows: int, columns: int, copies: int = 1) -> Fragment:
    """Fragment of `wmma`: every lane holds the next elements of the rows, as often as its registers have room for."""
    own = np.arange(rows * columns).reshape(32, -1)
    return fragment((rows, columns), *np.unravel_index(np.tile(own, copies), (rows, columns)))
