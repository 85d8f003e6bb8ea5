"""Rows held by a block or a cluster: the host's half of common/tile/persistent_row.cuh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from .._kernel.kernel import Kernel
from .norms import card
from .rows import packs_of

FEW, SOME, MANY = THREADS = 256, 512, 1024  # of a block: so many that three, two, or one of them run at a time
OWN = 2  # packs that each thread of MANY has in registers besides, of all tensors together
_CHOICES = (
    (FEW, 1, 3),
    (SOME, 1, 2),
    (FEW, 2, 3),
    (MANY, 1, 1),
    (MANY, 2, 1),
    (MANY, 4, 1),
)  # blocks of a row; at a time
_RESERVED = 1024  # bytes of shared memory that a block takes besides
_STATIC = 2048  # and its kernel declares, at most; twice that in fp64


class Plan(NamedTuple):
    """`packs` of each tensor in each thread, `own` of them in registers; a row has a cluster of `blocks`."""

    threads: int
    own: int
    packs: int
    blocks: int
    shared: int
    groups: int  # blocks, or clusters, that run at a time

    def launch(self, kernel: Kernel, rows: int) -> Callable[..., None]:
        """The launch of a kernel whose template is told `threads`, too."""
        grid = min(rows, self.groups) * self.blocks
        if self.blocks == 1:
            return kernel[grid, self.threads, self.shared]
        return kernel.configure(grid, self.threads, shared=self.shared, cluster=self.blocks)


@functools.lru_cache(maxsize=4096)
def plan(size: int, itemsize: int, tensors: int, device: torch.device, in_clusters: bool) -> Plan | None:
    """For rows of `size` elements of each of `tensors` tensors; None: too long to hold. Of two tensors rows that blocks of
    fewer threads could hold are better held in registers."""
    sms, room = card(device)
    static = _STATIC * (1 + (itemsize == 8))
    vectors = packs_of(size, itemsize)
    for threads, blocks, least in _CHOICES:
        if (blocks > 1 and not in_clusters) or (tensors > 1 and threads < MANY):
            continue
        own = OWN // tensors if threads == MANY else 0
        packs = max(-(-vectors // (threads * blocks)), own)
        shared = 16 * tensors * (packs - own) * threads
        resident = min((room + _RESERVED) // (shared + static + _RESERVED), least)
        if shared + static <= room and resident == least:
            return Plan(threads, own, packs, blocks, shared, max(sms * resident // blocks, 1))
    return None
