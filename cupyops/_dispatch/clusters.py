"""Rows that the blocks of a cluster share: the host's half of cuda_src/common/hw/cluster.cuh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from .._kernel.kernel import Kernel, capability
from .rows import packs_of

PACKS = 4  # 16-byte packs that a thread holds of a row
THREADS = 256  # that a block has where so many suffice: small ones, of which several run on a multiprocessor at a time
_FIRST = 9  # the first compute capability that has clusters
_MOST_BLOCKS = 8
_MOST_THREADS = 1024


class Share(NamedTuple):
    """How a row is divided: among `blocks` blocks of `threads` threads each; a block alone may have several `rows`."""

    blocks: int
    threads: int
    rows: int = 1

    def launch(self, kernel: Kernel, groups: int) -> Callable[..., None]:
        """The launch of `groups` clusters, or blocks."""
        block = self.threads, self.rows
        if self.blocks == 1:
            return kernel[groups, block]
        return kernel.configure(groups * self.blocks, block, cluster=self.blocks)


def exist(device: torch.device) -> bool:
    """Whether what runs on `device` knows clusters."""
    return capability(device) >= _FIRST


def shares(size: int, itemsize: int) -> list[Share]:
    """Those for rows of `size` elements of any number of blocks."""
    warps = -(-packs_of(size, itemsize) // (PACKS * 32))
    return [Share(blocks, -(-warps // blocks) * 32) for blocks in range(2, _MOST_BLOCKS + 1)]


@functools.lru_cache(maxsize=4096)
def share(size: int, itemsize: int, several: bool = True) -> Share | None:
    """For rows of `size` elements, a power of two of blocks, or one where not `several`; None: too long to hold."""
    warps = -(-packs_of(size, itemsize) // (PACKS * 32))
    blocks = 1
    while several and blocks < _MOST_BLOCKS and blocks * THREADS < warps * 32:
        blocks *= 2
    threads = -(-warps // blocks) * 32
    return Share(blocks, threads) if threads <= _MOST_THREADS else None
