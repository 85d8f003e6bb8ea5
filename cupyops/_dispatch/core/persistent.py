"""Persistent rows, which a block or a cluster keeps in shared memory: the host's half of common/tile/persistent_row.cuh."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from ..._kernel.kernel import Kernel
from .forms import Launch
from .gpu import Gpu
from .rows import packs_of

# by threads of a block: blocks of a multiprocessor that a kernel leaves registers for
BLOCKS = {256: 3, 512: 2, 1024: 1}
_OWN = 2  # vectors, of all tensors together, that each thread of a block of 1024 has in registers besides
_CHOICES = ((256, 1), (512, 1), (256, 2), (1024, 1), (1024, 2), (1024, 4))  # threads of a block; blocks of a cluster
_RESERVED = 1024  # bytes of shared memory that a block takes besides
_STATIC = 2048  # bytes that its kernel declares, at most


def domain(tensors: int, threads: tuple[int, ...] = tuple(BLOCKS)) -> dict[str, tuple[int, ...]]:
    """The domains of THREADS, BLOCKS and OWN in a kernel's template: see `exists` for which go together."""
    return {
        "THREADS": threads,
        "BLOCKS": tuple(sorted({BLOCKS[each] for each in threads})),
        "OWN": tuple(sorted({_own(each, tensors) for each in threads})),
    }


def exists(tensors: int, threads: int, blocks: int, own: int) -> bool:
    """Return True if a kernel of `tensors` tensors has an instance of these template values."""
    return (blocks, own) == (BLOCKS[threads], _own(threads, tensors))


def _own(threads: int, tensors: int) -> int:
    return _OWN // tensors if threads == 1024 else 0


class Plan(NamedTuple):
    """Each of `threads` threads has `vectors` vectors of each tensor of a row, `own` of them in registers."""

    threads: int
    own: int
    vectors: int
    cluster: int  # blocks that share a row
    shared: int
    groups: int  # blocks, or clusters, that the GPU runs at a time

    def launch(self, kernel: Kernel, rows: int, **template: Any) -> Launch:
        """The launch for so many rows of a kernel that takes `vectors` as an argument."""
        template |= {"THREADS": self.threads, "BLOCKS": BLOCKS[self.threads], "OWN": self.own}
        grid, cluster = min(rows, self.groups) * self.cluster, self.cluster if self.cluster > 1 else None
        return Launch(kernel, grid, self.threads, self.shared, template, cluster, named={"vectors": self.vectors})


@functools.lru_cache(maxsize=4096)
def plan(size: int, itemsize: int, tensors: int, gpu: Gpu, threads: tuple[int, ...] = tuple(BLOCKS)) -> Plan | None:
    """Divide rows of `size` elements of `tensors` tensors among blocks of one of `threads` threads; None: too long.

    As many blocks as the registers allow must fit a multiprocessor, else the next choice is better.
    """
    vectors_of_row = packs_of(size, itemsize)
    for each, cluster in _CHOICES:
        if each not in threads or (cluster > 1 and not gpu.has_clusters):
            continue
        own = _own(each, tensors)
        vectors = max(-(-vectors_of_row // (each * cluster)), own)
        shared = 16 * tensors * (vectors - own) * each
        resident = gpu.shared_total // (shared + _STATIC + _RESERVED)
        if shared + _STATIC <= gpu.shared and resident >= BLOCKS[each]:
            groups = max(gpu.multiprocessors * BLOCKS[each] // cluster, 1)
            return Plan(each, own, vectors, cluster, shared, groups)
    return None
