"""Reductions over the channels or groups of images: how blocks share them, the host's half of runs.cuh and columns.cuh."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._kernel.kernel import ceil_div
from .._util.strides import aligned, is_dry
from .gemm import divisor
from .rows import is_symbolic

THREADS = 256  # of a block, at most
BLOCKS = 132 * 16  # into which a launch is cut, whatever the GPU: the same bits on all
MOST_PARTS = 48  # of a segment, where these are blocks enough: others would take longer to combine than to make
ENOUGH = 132 * 2  # blocks
PACKS = 4  # that a thread has under way
FINISHERS = (8, 32)  # the block of a kernel that combines parts
COLUMN_BLOCKS = {True: 132 * 3, False: 132 * 5}  # of a pass over columns, which all find room: for whole packs, else
COLUMN_WAVES = 4  # of them, where there are more tiles than that
COLUMN_ALONG = {True: 32, False: 128}  # threads along the columns of a tile, at most
CLUSTER = 8  # blocks of a cluster, at most
CLUSTER_THREADS = 256
CLUSTER_PACKS = 1024  # of a block, where the cluster may still grow
MOST_CLUSTER_PACKS = 16384  # of a block: others would have to wait for it
CLUSTER_ROOM = 55 << 10  # bytes of shared memory of a block: four to a multiprocessor
LARGE_CLUSTER_PACKS = 8192  # of a block, beyond which it has twice the threads and the room
FEWEST = 64  # blocks that are worth while
CLUSTER_ROWS = 8192
TILE_BLOCKS = 132 * 2  # of clusters, beyond which two passes are faster
CLUSTER_ALONG = (4, 8)  # packs along the columns of a cluster's tile
MOST_PACKS = (1 << 31) - THREADS * PACKS  # of a segment: counted in 32 bits, a step beyond the last included


class Runs(NamedTuple):
    """A launch over `segments` of a contiguous array, `parts` blocks for each; `struct Runs`, packed."""

    grid: int
    block: int
    parts: int
    packed: np.ndarray
    whole: bool  # every run is whole packs
    room: int = 0  # packs of a tensor that a block of a cluster keeps


class Columns(NamedTuple):
    """A launch over the columns of `rows` by `size` elements."""

    grid: tuple[int, int]
    block: tuple[int, int]
    whole: bool  # every row is whole packs

    @property
    def parts(self) -> int:
        """Of the rows."""
        return self.grid[1]


@functools.lru_cache(maxsize=4096)
def runs(
    segments: int, count: int, size: int, itemsize: int, aligned: bool, blocks: int = BLOCKS, parts: int = MOST_PARTS
) -> Runs:
    """Segments of `count` runs of `size` elements, one for every segment in turn; `aligned`: the first at 16 bytes.

    Cut into at most so many `blocks`, and a segment into so many `parts`.
    """
    packs = packs_of(size, itemsize, aligned)
    total = count * packs
    most = min(ceil_div(blocks, segments), max(parts, ceil_div(ENOUGH, segments)))
    parts = max(1, min(most, total // (THREADS * PACKS)))
    block = min(THREADS, -(-total // (parts * 32)) * 32)
    packed = _packed(segments, count, size, parts, packs)
    return Runs(segments * parts, block, parts, packed, _whole(size, itemsize, aligned))


@functools.lru_cache(maxsize=4096)
def cluster(segments: int, count: int, size: int, itemsize: int, aligned: bool, tensors: int, most: int) -> Runs | None:
    """The same where a segment is a cluster's, of `most` blocks at most, which read `tensors` twice; None: too long.

    Beyond what shared memory holds they find it in the cache, or have to read it again.
    """
    packs = packs_of(size, itemsize, aligned)
    total = count * packs
    blocks = 1
    while blocks < most and total > blocks * CLUSTER_PACKS // tensors:
        blocks *= 2
    each = ceil_div(total, blocks)
    few = segments * blocks < FEWEST and each > THREADS * PACKS
    if few or each * tensors > (MOST_CLUSTER_PACKS if most > 1 else 2 * CLUSTER_PACKS):
        return None
    large = each * tensors > LARGE_CLUSTER_PACKS
    block = min(2 * CLUSTER_THREADS if large else CLUSTER_THREADS, max(64, ceil_div(each, PACKS * 32) * 32))
    room = min(each, (2 * CLUSTER_ROOM if large else CLUSTER_ROOM) // (16 * tensors)) if most > 1 else 0
    packed = _packed(segments, count, size, blocks, packs)
    return Runs(segments * blocks, block, blocks, packed, _whole(size, itemsize, aligned), room)


def _packed(segments: int, count: int, size: int, parts: int, packs: int) -> np.ndarray:
    total = count * packs
    numbers = [
        *(count, size, segments * size, parts, ceil_div(total, parts)),
        *(total, segments * count * size, *divisor(packs)),
    ]
    return np.array(numbers, dtype=np.int64)


def packs_of(size: int, itemsize: int, aligned: bool) -> int:
    """16-byte packs of a run, which may begin anywhere in the first of them where runs are not whole packs."""
    width = 16 // itemsize
    return size // width if _whole(size, itemsize, aligned) else (size + 2 * width - 2) // width


def _whole(size: int, itemsize: int, aligned: bool) -> bool:
    return aligned and size * itemsize % 16 == 0


@functools.lru_cache(maxsize=4096)
def columns(rows: int, size: int, itemsize: int, aligned: bool) -> Columns:
    """Columns of `rows` by `size` elements; `aligned`: every tensor begins at 16 bytes.

    One launch for all passes: a thread then goes from the end where it was last, which is still in cache.
    """
    whole = _whole(size, itemsize, aligned)
    pieces = size * itemsize // 16 if whole else size
    along = min(COLUMN_ALONG[whole], 1 << (pieces - 1).bit_length())
    tiles, across, blocks = ceil_div(pieces, along), THREADS // along, COLUMN_BLOCKS[whole]
    most = blocks // tiles or ceil_div(COLUMN_WAVES * blocks, tiles)
    parts = max(1, min(most, rows // (across * PACKS), 65535))
    return Columns((tiles, parts), (along, across), whole)


@functools.lru_cache(maxsize=4096)
def cluster_columns(rows: int, size: int, itemsize: int, aligned: bool, most: int) -> Columns | None:
    """The same where a tile is a cluster's, of `most` blocks at most, which read it twice; None: too many rows or blocks.

    Of whole packs a tile has whole lines of memory, where the blocks are enough; else as few columns as it can.
    """
    if rows > CLUSTER_ROWS * most // CLUSTER:
        return None
    whole, found = _whole(size, itemsize, aligned), []
    for packs in CLUSTER_ALONG:
        wide = packs * 16 // itemsize
        tiles, along = ceil_div(size, wide), packs if whole else wide
        across = THREADS // along
        blocks = 1
        while blocks < most and rows > blocks * across * 2:
            blocks *= 2
        if tiles * blocks <= TILE_BLOCKS:
            found.append((tiles * blocks, Columns((tiles, blocks), (along, across), whole)))
    if not found:
        return None
    return found[-1 if whole and found[-1][0] >= FEWEST else 0][1]


def is_aligned(tensor: Tensor) -> bool:
    """Whether it begins at a 16-byte boundary."""
    return aligned(tensor)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """What the kernels compute in: acc_t."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def spatial(x: Tensor) -> int:
    """Elements of a plane of (n, c, *)."""
    return math.prod(x.shape[2:])


def is_there(x: Tensor) -> bool:
    """Whether there is something to launch: not in a dry run, and not without elements."""
    return not (is_dry(x) or is_symbolic(*x.shape)) and x.numel() > 0


def is_empty(x: Tensor) -> bool:
    """Whether there is nothing to launch for, dry runs apart."""
    return not (is_dry(x) or is_symbolic(*x.shape) or x.numel())


def gradient_room(parameter: Tensor, x: Tensor) -> Tensor:
    """Room for the gradient of a parameter, contiguous; 0 where there is nothing to sum."""
    make = torch.zeros_like if is_empty(x) else torch.empty_like
    return make(parameter, memory_format=torch.contiguous_format)
