"""Strided segments, the channels or groups of images, and how blocks share them: the host's half of reduce/strided.cuh."""

from __future__ import annotations

import functools
from typing import NamedTuple

import numpy as np

from ..._kernel.kernel import ceil_div
from ..core.gpu import Gpu
from ..gemm.gemm import divisor

# The number of blocks that share a segment decides the order in which it is summed. So the numbers of blocks below are
# multiples of the multiprocessors of the GPUs that they were tuned on, H100 and H200, and not of those of the card: results
# are the same bits on every card that has the same forms.
TUNED_MULTIPROCESSORS = 132
THREADS = 256  # of a block, at most
BLOCKS = TUNED_MULTIPROCESSORS * 16  # of a launch, at most, unless there are more segments
MOST_SPLITS = 48  # of a segment, where these are blocks enough: more would take longer to combine than to compute
ENOUGH = TUNED_MULTIPROCESSORS * 2  # blocks
VECTORS = 4  # of a thread, at least, before more blocks share a segment
MOST_VECTORS = (1 << 31) - THREADS * VECTORS  # of a segment: counted in 32 bits, with a step beyond the last
FEWEST = 64  # blocks that are worth a launch

CLUSTER = 8  # blocks of a cluster, at most
CLUSTER_THREADS = 512  # of a block, at most: twice what all but long segments have
CLUSTER_VECTORS = 1024  # of a block, beyond which the cluster grows
MOST_CLUSTER_VECTORS = 16384  # of a block, beyond which two passes are faster
LARGE_CLUSTER_VECTORS = 8192  # of a block, beyond which it has twice the threads and the buffer
RESERVED = 2 << 10  # bytes of shared memory of a block that CUDA and the kernel's own variables take


class Segments(NamedTuple):
    """A launch over segments, `splits` blocks for each; `packed` is `struct Segments`."""

    grid: int
    block: int
    splits: int
    each: int  # vectors of a block
    packed: np.ndarray
    aligned: bool  # every run is whole vectors
    buffered: int = 0  # vectors of a tensor that a block of a cluster holds in shared memory


@functools.lru_cache(maxsize=4096)
def split(
    segments: int, count: int, size: int, itemsize: int, aligned: bool, blocks: int = BLOCKS, splits: int = MOST_SPLITS
) -> Segments:
    """Divide segments among blocks, each of `count` runs of `size` elements; the runs of all segments take turns.

    Args:
        aligned: every tensor begins at 16 bytes.
        blocks: of the launch, at most, unless there are more segments.
        splits: of a segment, at most, where these are `ENOUGH` blocks.
    """
    total = count * vectors_of(size, itemsize, aligned)
    most = min(ceil_div(blocks, segments), max(splits, ceil_div(ENOUGH, segments)))
    splits = max(1, min(most, total // (THREADS * VECTORS)))
    block = min(THREADS, ceil_div(total, splits * 32) * 32)
    return _launch(segments, count, size, itemsize, aligned, splits, block)


@functools.lru_cache(maxsize=4096)
def cluster(segments: int, count: int, size: int, itemsize: int, aligned: bool, tensors: int, gpu: Gpu) -> Segments:
    """Divide segments among clusters, each of which reads `tensors` of its segment twice: the second time from shared
    memory, or from the cache what does not fit there. Without clusters a block has a segment alone."""
    total, blocks = count * vectors_of(size, itemsize, aligned), 1
    while gpu.has_clusters and blocks < CLUSTER and total > blocks * CLUSTER_VECTORS // tensors:
        blocks *= 2
    each = ceil_div(total, blocks)
    large = each * tensors > LARGE_CLUSTER_VECTORS
    most = CLUSTER_THREADS if large else CLUSTER_THREADS // 2
    block = min(most, max(64, ceil_div(each, VECTORS * 32) * 32))
    room = (gpu.shared_total // 4 - RESERVED) * (2 if large else 1)  # four blocks fit on a multiprocessor, or two
    buffered = min(each, min(room, gpu.shared - RESERVED) // (16 * tensors)) if gpu.has_clusters else 0
    return _launch(segments, count, size, itemsize, aligned, blocks, block, buffered)


def _launch(
    segments: int, count: int, size: int, itemsize: int, aligned: bool, splits: int, block: int, buffered: int = 0
) -> Segments:
    vectors = vectors_of(size, itemsize, aligned)
    total = count * vectors
    each = ceil_div(total, splits)
    numbers = [count, size, segments * size, splits, each, total, segments * count * size, *divisor(vectors)]
    packed = np.array(numbers, dtype=np.int64)
    return Segments(segments * splits, block, splits, each, packed, is_whole(size, itemsize, aligned), buffered)


def vectors_of(size: int, itemsize: int, aligned: bool) -> int:
    """16-byte vectors of a run, which may begin anywhere in the first of them where runs are not whole vectors."""
    width = 16 // itemsize
    return size // width if is_whole(size, itemsize, aligned) else (size + 2 * width - 2) // width


def is_whole(size: int, itemsize: int, aligned: bool) -> bool:
    """Return True if runs of `size` elements are whole vectors."""
    return aligned and size * itemsize % 16 == 0
