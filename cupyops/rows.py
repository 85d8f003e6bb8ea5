"""Row-wise launches: how many threads share a row, the host's half of cuda_src/common/rows.cuh.

Sizes may be symbolic (a dry run for torch.compile or torch.export): nothing here then branches on them, since nothing is
launched.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

PACKS = (1, 4)  # 16-byte packs that a thread holds of a row: the template values of the kernels
WIDEST = 1024  # threads that share one row
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
    slack = width - 1 if size % width else 0  # rows of odd size begin anywhere between 16-byte boundaries
    vectors = max(1, -(-(size + slack) // width))
    if vectors <= 32:
        threads = 1 << (vectors - 1).bit_length()
        return Share(1, threads, block // threads)
    if vectors <= 128:
        threads = 16 if vectors <= 64 else 32
        return Share(4, threads, block // threads)
    threads = -(-vectors // 128) * 32
    return Share(4, threads, 1) if threads <= most else Share(0, most, 1)


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


def launch_softmax(kernels: SoftmaxKernels, tensors: Sequence[Tensor], dim: int, width_of: Tensor, **template: Any) -> None:
    """Launch the form that fits the shape of `tensors`, all contiguous; `width_of` is the one that packs are cut for."""
    outer, size, inner = split(width_of, dim)
    if is_symbolic(outer, size, inner) or not width_of.numel():
        return
    itemsize = width_of.element_size()
    if inner == 1:
        packs, threads, rows = division = share(size, itemsize)
        if packs:
            kernels.rows[grid(outer, rows), division.block](*tensors, outer, size, K=packs, **template)
        else:
            kernels.wide[grid(outer), threads](*tensors, outer, size, **template)
        return
    sharing = min(_power_of_two(-(-size // 8)), 16)  # threads to a column
    groups = outer * inner // width
    ...


def implicit_dim(name: str, ndim: int, stacklevel: int) -> int:
    """PyTorch's choice where `dim` is not given, with PyTorch's warning."""
    warnings.warn(
        f"Implicit dimension choice for {name} has been deprecated. Change the call to include dim=X as an argument.",
        stacklevel=stacklevel + 1,
    )
    return 0 if ndim in (0, 1, 3) else 1


def _power_of_two(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << max(n - 1, 0).bit_length()
