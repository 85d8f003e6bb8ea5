"""Row-wise launches: how many threads share a row, the host's half of cuda_src/common/tile/row_tile.cuh.

Sizes may be symbolic (a dry run for torch.compile or torch.export): nothing then branches on them, since nothing is
launched.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

from torch import Tensor

PACKS = (1, 4)  # vectors of 16 bytes that a thread holds of a row: the template values of the kernels
WIDEST = 1024  # threads that share one row
SMALL_ROWS = 256  # of a block, and its threads, which have a row each: see cuda_src/common/tile/tiny_rows.cuh
SMALL_BYTES = 128  # of a row that a thread has, at most
_MAX_GRID = 1 << 16  # blocks; they stride over the rest, and fewer blocks of tiny rows cost less to start


class Share(NamedTuple):
    """Division of a row: `packs` vectors in each of `threads` threads, `rows` rows to a block; 0 packs: too long to hold."""

    packs: int
    threads: int
    rows: int

    @property
    def block(self) -> tuple[int, int]:
        return self.threads, self.rows


def is_symbolic(*sizes: Any) -> bool:
    """Return True if a size is symbolic, as in a dry run on symbolic shapes."""
    return any(type(size) is not int for size in sizes)


def packs_of(size: int, itemsize: int) -> int:
    """Largest number of vectors that a row of `size` elements touches, since one may begin within a vector."""
    width = 16 // itemsize
    return max(1, -(-(size + width - math.gcd(size, width)) // width))


@functools.lru_cache(maxsize=4096)
def share(size: int, itemsize: int, most: int = WIDEST, block: int = 128) -> Share:
    """Threads for rows of `size` elements: at most `most` for a row, about `block` in a block of several rows."""
    vectors = packs_of(size, itemsize)
    if vectors <= 32:
        threads = 1 << (vectors - 1).bit_length()
        return Share(1, threads, block // threads)
    packs = PACKS[-1]
    if vectors <= 32 * packs:
        threads = 16 if packs * 16 >= vectors else 32
        return Share(packs, threads, block // threads)
    threads = -(-vectors // (32 * packs)) * 32
    return Share(packs, threads, 1) if threads <= most else Share(0, most, 1)


def grid(rows: int, per_block: int = 1) -> int:
    """Blocks for `rows` rows."""
    return min(-(-rows // per_block), _MAX_GRID)


def split(x: Tensor, dim: int) -> tuple[int, int, int]:
    """(outer, size, inner) of a contiguous tensor around `dim`; a tensor without dimensions is one row of one."""
    if x.dim() == 0:
        return 1, 1, 1
    return math.prod(x.shape[:dim]), x.shape[dim], math.prod(x.shape[dim + 1 :])


def power_of_two(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()
