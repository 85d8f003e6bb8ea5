"""Tiles of the columns of a matrix, for statistics of channels that lie side by side: the host's half of
cuda_src/common/tile/column_tile.cuh."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from ..._kernel.kernel import ceil_div
from ..reduce.segments import CLUSTER, FEWEST, TUNED_MULTIPROCESSORS, is_whole
from .gpu import Gpu

THREADS = 256  # of a block
BLOCKS = {True: 3, False: 5}  # that fit on a multiprocessor: of whole vectors, and of single elements
WAVES = 4  # of such blocks, where there are more tiles than that
ALONG = {True: 32, False: 128}  # threads along the columns of a tile, at most
ROWS = 4  # of a thread, at least, before more blocks share a tile
FOLDED_ROWS = 128  # that are left at least where several are read as one: fewer cost as much to combine as to sum
FOLDED_SIZE = 64  # elements of such a row, at least: threads of fewer would each sum a channel alone

CLUSTER_VECTORS = (4, 8)  # along the columns of a cluster's tile
CLUSTER_ROWS = 1024  # for each block of a cluster, at most
CLUSTER_BLOCKS = TUNED_MULTIPROCESSORS * 2  # beyond which two passes are faster


class Matrix(NamedTuple):
    """`rows` by `size` elements, of which column i belongs to channel i // pixels % channels."""

    rows: int
    size: int
    channels: int
    pixels: int

    @property
    def folds(self) -> int:
        """Rows of channels in a row."""
        return self.size // (self.channels * self.pixels)

    def folded(self, itemsize: int, aligned: bool) -> Matrix:
        """Return the matrix with enough rows read as one to make whole vectors, where there are rows enough."""
        folds = 16 // math.gcd(16, self.size * itemsize)
        enough = self.rows >= folds * FOLDED_ROWS and self.size >= FOLDED_SIZE
        if aligned and enough and self.rows % folds == 0 and self.size * folds < 1 << 31:
            return self._replace(rows=self.rows // folds, size=self.size * folds)
        return self


class Columns(NamedTuple):
    """A launch over tiles of columns."""

    grid: tuple[int, int]
    block: tuple[int, int]
    aligned: bool  # every row is whole vectors

    @property
    def splits(self) -> int:
        """Number of blocks that share the rows of a tile."""
        return self.grid[1]


@functools.lru_cache(maxsize=4096)
def split(rows: int, size: int, itemsize: int, aligned: bool, matrices: int = 1) -> Columns:
    """Divide the columns of `rows` by `size` elements among blocks; `aligned`: every tensor begins at 16 bytes.

    matrices: how many such there are, each of which has as many blocks.

    Both passes have this launch: a thread then goes from the end where it was last, which is still in the cache.
    """
    whole = is_whole(size, itemsize, aligned)
    pieces = size * itemsize // 16 if whole else size
    along = min(ALONG[whole], 1 << (pieces - 1).bit_length())
    tiles, across, blocks = ceil_div(pieces, along), THREADS // along, BLOCKS[whole] * TUNED_MULTIPROCESSORS
    most = blocks // (tiles * matrices) or ceil_div(WAVES * blocks, tiles * matrices)
    splits = max(1, min(most, rows // (across * ROWS), 65535))
    return Columns((tiles, splits), (along, across), whole)


@functools.lru_cache(maxsize=4096)
def cluster(rows: int, size: int, itemsize: int, gpu: Gpu) -> Columns | None:
    """Divide the columns among clusters, which read a tile twice; None: too many rows or blocks. Rows are whole vectors.

    A tile has whole lines of memory, where these are blocks enough; else as few columns as it can.
    """
    most, found = CLUSTER if gpu.has_clusters else 1, []
    if rows > CLUSTER_ROWS * most:
        return None
    for along in CLUSTER_VECTORS:
        tiles, across, blocks = ceil_div(size, along * 16 // itemsize), THREADS // along, 1
        while blocks < most and rows > blocks * across * 2:
            blocks *= 2
        if tiles * blocks <= CLUSTER_BLOCKS:
            found.append(Columns((tiles, blocks), (along, across), True))
    if not found:
        return None
    return found[-1 if math.prod(found[-1].grid) >= FEWEST else 0]
