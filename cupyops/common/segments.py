"""Reductions over the channels or groups of images: how blocks share them, the host's half of runs.cuh and columns.cuh."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..layout import is_dry
from .gemm import divisor
from .rows import is_symbolic

THREADS = 256  # of a block, at most
BLOCKS = 132 * 16  # into which a launch is cut, whatever the GPU: the same bits on all
PACKS = 4  # that a thread has under way
FINISHERS = (32, 8)  # the block of a kernel that combines parts
MOST_PACKS = (1 << 31) - THREADS * PACKS  # of a segment: counted in 32 bits, a step beyond the last included


class Runs(NamedTuple):
    """A launch over `segments` of a contiguous array, `parts` blocks for each; `struct Runs`, packed."""

    grid: int
    block: int
    parts: int
    packed: np.ndarray


class Columns(NamedTuple):
    """A launch over the columns of `rows` by `size` elements."""

    grid: tuple[int, int]
    block: tuple[int, int]

    @property
    def parts(self) -> int:
        """Of the rows."""
        return self.grid[1]


@functools.lru_cache(maxsize=4096)
def runs(segments: int, count: int, size: int, itemsize: int, aligned: bool) -> Runs:
    """Segments of `count` runs of `size` elements, one for every segment in turn; `aligned`: the first at 16 bytes."""
    packs = packs_of(size, itemsize, aligned)
    total = count * packs
    most = -(-BLOCKS // segments)
    parts = max(1, min(most, total // (THREADS * PACKS)))
    block = min(THREADS, -(-total // (parts * 32)) * 32)
    packed = np.array([count, size, segments * size, parts, total, *divisor(packs)], dtype=np.int64)
    return Runs(segments * parts, block, parts, packed)


def packs_of(size: int, itemsize: int, aligned: bool) -> int:
    """16-byte packs of a run, which may begin anywhere in the first of them where runs are not whole packs."""
    width = 16 // itemsize
    return size // width if aligned and size % width == 0 else (size + 2 * width - 2) // width


@functools.lru_cache(maxsize=4096)
def columns(rows: int, size: int, itemsize: int) -> Columns:
    """Columns of `rows` by `size` elements."""
    packs = -(-size * itemsize // 16)
    along = min(32, 1 << (packs - 1).bit_length())
    tiles = -(-packs // along)
    across = THREADS // along
    parts = max(1, min(-(-BLOCKS // tiles), rows // (across * PACKS), 65535))
    return Columns((tiles, parts), (along, across))


def is_aligned(tensor: Tensor) -> bool:
    """Whether it begins at a 16-byte boundary."""
    return tensor.data_ptr() % 16 == 0


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
