"""Rows held by a block or a cluster while the next is on its way: the host's half of cuda_src/common/held.cuh."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..kernel import Kernel, capability
from .norms import card
from .rows import packs_of

RESIDENT = 1536  # threads of a multiprocessor, at most: what kernels leave registers for, kHeldThreads
FEW, MANY = 512, 1024  # threads of a block: few where two blocks at least run at a time
THREADS = FEW, MANY
OWN = 2  # packs that each thread of MANY has in registers besides, of all tensors together
MOST_BLOCKS = 4  # of a cluster, kMaxCluster
FROM = 1 << 14  # bytes of a row from which on this is better than packs in registers alone
_FIRST = 9  # the first compute capability that has clusters
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


def clusters(device: torch.device) -> bool:
    """Whether what runs on `device` knows clusters."""
    return capability(device) >= _FIRST


@functools.lru_cache(maxsize=4096)
def plan(size: int, itemsize: int, tensors: int, device: torch.device, clusters: bool) -> Plan | None:
    """For rows of `size` elements of each of `tensors` tensors; None: too long to hold."""
    sms, room = card(device)
    static = _STATIC * (1 + (itemsize == 8))
    vectors = packs_of(size, itemsize)
    for blocks in (1, 2, MOST_BLOCKS)[: 3 if clusters else 1]:
        for threads, own in ((FEW, 0), (MANY, OWN // tensors)):
            packs = max(-(-vectors // (threads * blocks)), own)
            shared = 16 * tensors * (packs - own) * threads
            resident = min((room + _RESERVED) // (shared + static + _RESERVED), RESIDENT // threads)
            if shared + static <= room and (threads == MANY or resident > 1):
                return Plan(threads, own, packs, blocks, shared, max(sms * resident // blocks, 1))
    return None
