"""Row-wise launches: how many threads share a row, the host's half of cuda_src/common/rows.cuh.

Sizes may be symbolic (a dry run for torch.compile or torch.export): nothing then branches on them, since nothing is
launched.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

PACKS = (1, 2, 4)  # 16-byte packs that a thread holds of a row: the template values of the kernels
WIDEST = 1024  # threads that share one row
_ENOUGH_THREADS = 1 << 16  # for a large GPU: only then do threads take several columns each
_MAX_GRID = 1 << 16  # blocks; they stride over the rest, and fewer blocks of tiny rows cost less to start


class Share(NamedTuple):
    """How a row is divided: `packs` in each of `threads` threads, `rows` rows to a block. No packs: too long to hold."""

    packs: int
    threads: int
    rows: int

    @property
    def block(self) -> tuple[int, int]:
        return self.threads, self.rows


def is_symbolic(*sizes: Any) -> bool:
    """Whether this is a dry run on symbolic shapes."""
    return any(type(size) is not int for size in sizes)


@functools.lru_cache(maxsize=4096)
def share(size: int, itemsize: int, most: int = WIDEST, block: int = 128) -> Share:
    """Threads for rows of `size` elements: at most `most` for a row, about `block` in a block of several rows."""
    width = 16 // itemsize
    vectors = max(1, -(-size // width))
    if vectors <= 32:
        threads = 1 << (vectors - 1).bit_length()
        return Share(1, threads, block // threads)
    packs = 2 if size % width else 4  # elements that are dealt one by one take more registers each
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


class SoftmaxKernels(NamedTuple):
    """The three forms of a softmax kernel, forward or backward."""

    rows: Any
    wide: Any
    columns: Any


def launch_softmax(kernels: SoftmaxKernels, dim: int, *tensors: Tensor, **template: Any) -> None:
    """Launch the form that fits the shape of `tensors`, which are contiguous; packs are cut for the first."""
    outer, size, inner = split(tensors[0], dim)
    if is_symbolic(outer, size, inner) or not tensors[0].numel():
        return
    if inner > 1:
        block, columns, vectors = _share_columns(outer * inner, size, inner, template["T"].itemsize)
        launch = kernels.columns[grid(columns, block[0]), block]
        launch(*tensors, outer, size, inner, VECTORS=vectors, **template)
        return
    division = share(size, tensors[0].element_size())
    if division.packs:
        kernels.rows[grid(outer, division.rows), division.block](*tensors, outer, size, K=division.packs, **template)
    else:
        kernels.wide[grid(outer), division.threads](*tensors, outer, size, **template)


@functools.lru_cache(maxsize=4096)
def _share_columns(columns: int, size: int, inner: int, itemsize: int) -> tuple[tuple[int, int], int, bool]:
    """The block, (neighbouring columns, threads to a column), the columns in units of a thread's, and whether those are
    as many as make 16 bytes."""
    width = 16 // itemsize
    neighbours = min(_power_of_two(columns), 32)
    sharing = min(_power_of_two(-(-size // 8)), 512 // neighbours)
    vectors = inner % width == 0 and columns // width * sharing >= _ENOUGH_THREADS
    if vectors:
        columns //= width
    return (min(_power_of_two(columns), max(neighbours, 128 // sharing)), sharing), columns, vectors


def implicit_dim(name: str, ndim: int, stacklevel: int) -> int:
    """PyTorch's choice where `dim` is not given, with PyTorch's warning, which cannot be traced."""
    if not torch.compiler.is_compiling():
        warnings.warn(
            f"Implicit dimension choice for {name} has been deprecated. Change the call to include dim=X as an argument.",
            stacklevel=stacklevel + 1,
        )
    return 0 if ndim in (0, 1, 3) else 1


def _power_of_two(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()
