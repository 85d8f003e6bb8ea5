"""The forms of backward of layer_norm, rms_norm and add_rms_norm, and of the partials of their parameters' gradients."""

from __future__ import annotations

import math
from typing import Any

from .._kernel.kernel import ceil_div
from .forms import Form, Forms, Launch
from .gpu import Gpu
from .norm_forms import (
    ALL,
    BACKWARD_ROWS,
    BACKWARD_THREADS,
    BOTH,
    EACH,
    PARTIAL_ROWS,
    RESERVED,
    VECTORS,
    WARP,
    Problem,
    Shared,
    SubWarp,
    ThreadPerRow,
    blocks_for,
    count,
    is_block,
    kernel,
    padded,
    power_of_two,
    share_row,
    two_pass_threads,
)
from .rows import PACKS, SMALL_ROWS, Share

THREAD_PER_ROW_BLOCKS = 4  # for each multiprocessor
PREFETCH_LATE_THREADS = 512  # of a row, from which on a late prefetch takes less time
CLUSTER_THREADS = 256  # of a block of a cluster, where so many suffice: several such blocks fit on a multiprocessor
_MOST_BLOCKS = 8  # of a cluster
_CLUSTER_MULTIPROCESSORS = 16  # at least, among which the blocks of a cluster lie
_DRIVER = 1024  # bytes of RESERVED that are the driver's: a block cannot have them, a multiprocessor has
_ROW_SUMS = 256  # numbers of each row sum: see RowAdderBuffer
_MBARRIERS = 16  # bytes of those that are with them, of unaligned rows

bwd_thread_per_row = kernel("norm_bwd_thread_per_row<T, CENTRED>", **EACH)
bwd_sub_warp = kernel("norm_bwd_sub_warp<T, CENTRED>", **EACH)
bwd_block = kernel("norm_bwd_block<T, CENTRED, K, ALIGNED>", **EACH, K=PACKS, ALIGNED=BOTH, where=is_block)
bwd_two_pass = kernel("norm_bwd_two_pass<T>", **ALL)
bwd_strided = kernel("norm_bwd_strided<T>", **ALL)
bwd_finalize = kernel("norm_bwd_finalize<T>", **ALL)


class _ThreadPerRow(ThreadPerRow):
    uses = (bwd_thread_per_row, bwd_finalize)

    def shared(self, problem: Problem) -> int:
        return SMALL_ROWS * problem.row * problem.gradients + padded(problem.size * problem.acc)

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        grid = count(problem.rows, SMALL_ROWS, THREAD_PER_ROW_BLOCKS * gpu.multiprocessors)
        template = {"CENTRED": problem.operator.centred}
        return Launch(bwd_thread_per_row, grid, (SMALL_ROWS, 1), self.shared(problem), template)


class _SubWarp(SubWarp):
    uses = (bwd_sub_warp, bwd_finalize)

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        grid, block = self.blocks(problem, gpu, BACKWARD_ROWS)
        return Launch(bwd_sub_warp, grid, block, template={"CENTRED": problem.operator.centred})


class _OnePass(Shared):
    """A wave of blocks, or of clusters, that stride over rows in shared memory."""

    uses = (bwd_block, bwd_finalize)

    def most(self, problem: Problem, gpu: Gpu) -> int:
        """Threads of a block, at most."""
        return min(BACKWARD_THREADS, (gpu.shared - RESERVED) // (_least(problem) * VECTORS) // WARP * WARP)

    def share(self, problem: Problem, gpu: Gpu) -> Share:
        """The threads of a row in one block."""
        return share_row(problem, self.most(problem, gpu), 256)

    def half(self, problem: Problem, gpu: Gpu) -> int:
        """Threads of half a row, which two blocks share, where a block holds it."""
        return ceil_div(self.share(problem, gpu).threads, 2 * WARP) * WARP

    def wave(self, problem: Problem, gpu: Gpu, threads: Share, blocks: int, late: bool) -> Launch:
        """The launch for rows that `blocks` blocks of such threads share; where two stages fit, `late` is the prefetch."""
        vectors = threads.packs * math.prod(threads.block)
        least, stage = _least(problem), 16 * problem.gradients
        stages = 2 if vectors * (least + stage) <= gpu.shared - RESERVED else 1
        shared = vectors * (least + stage * (stages - 1))
        template = {"CENTRED": problem.operator.centred, "K": threads.packs, "ALIGNED": problem.aligned}
        return Launch(
            bwd_block,
            _groups(problem, gpu, shared, threads.block, blocks) * blocks,
            threads.block,
            shared,
            template,
            blocks if blocks > 1 else None,
            extra={"stages": stages, "late": late and problem.aligned and stages == 2},
        )


class _Block(_OnePass):
    name = "block"
    summary = "the threads of a block share a row, in shared memory, and read the next meanwhile"

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        if not self.share(problem, gpu).packs:
            return f"a row needs more than {self.most(problem, gpu)} threads"
        return super().why_not(problem, gpu)

    def why_slower(self, problem: Problem, gpu: Gpu) -> str | None:
        most, threads = self.most(problem, gpu), self.share(problem, gpu).threads
        if gpu.has_clusters and most // threads == 1 and most // self.half(problem, gpu) >= 3:
            return "three halves of rows fit on a multiprocessor, on which a second row does not"
        return None

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        return self.wave(problem, gpu, self.share(problem, gpu), 1, late=False)


class _PrefetchLate(_Block):
    name = "prefetch_late"
    summary = "as block; the statistics of the next row are prefetched once this row has arrived"

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        if not problem.aligned:
            return "rows begin off 16-byte boundaries"
        if reason := super().why_not(problem, gpu):
            return reason
        return None if self.launch(problem, gpu).extra["stages"] == 2 else "two rows do not fit into shared memory"

    def why_slower(self, problem: Problem, gpu: Gpu) -> str | None:
        if self.share(problem, gpu).threads < PREFETCH_LATE_THREADS:
            return f"a row has fewer than {PREFETCH_LATE_THREADS} threads"
        return super().why_slower(problem, gpu)

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        return self.wave(problem, gpu, self.share(problem, gpu), 1, late=True)


class _Cluster(_OnePass):
    name = "cluster"
    summary = "as prefetch_late, where two rows fit; the blocks of a cluster share a row"

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        if not gpu.has_clusters:
            return "clusters need compute capability 9.0"
        if not self.splits(problem, gpu):
            return f"a row needs more than {_MOST_BLOCKS} blocks"
        return super().why_not(problem, gpu)

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        """Return the launch whose clusters run at one time in the largest number."""
        launches = [self.among(problem, gpu, *split) for split in self.splits(problem, gpu)]
        return max(launches, key=lambda launch: (partials_of(launch), launch.cluster))

    def among(self, problem: Problem, gpu: Gpu, blocks: int, threads: int) -> Launch:
        """The launch for rows that `blocks` blocks of `threads` threads share."""
        return self.wave(problem, gpu, Share(VECTORS, threads, 1), blocks, late=True)

    def splits(self, problem: Problem, gpu: Gpu) -> list[tuple[int, int]]:
        """The blocks of a row, and their threads: any that fit; of aligned rows a power of two of blocks."""
        if self.share(problem, gpu).packs:
            return [(2, self.half(problem, gpu))]
        warps = ceil_div(problem.shared_vectors, VECTORS * WARP)
        if problem.aligned:
            several = [min(power_of_two(ceil_div(warps * WARP, CLUSTER_THREADS)), _MOST_BLOCKS)]
        else:
            several = list(range(2, _MOST_BLOCKS + 1))
        splits = [(blocks, ceil_div(warps, blocks) * WARP) for blocks in several]
        return [(blocks, threads) for blocks, threads in splits if threads <= self.most(problem, gpu)]


class _TwoPass(Form[Problem]):
    name = "two_pass"
    summary = "the threads of a block share a row of any length, and read it twice; the parameters' gradients are apart"
    uses = (bwd_two_pass,)

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        return Launch(bwd_two_pass, blocks_for(problem.rows, 1, gpu), two_pass_threads(problem))


class _Strided(Form[Problem]):
    name = "strided"
    summary = "a thread has a vector of columns, and strides over the rows"
    uses = (bwd_strided, bwd_finalize)

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        vectors = ceil_div(problem.row, 16)
        threads = min(ceil_div(vectors, WARP) * WARP, BACKWARD_THREADS)
        tiles = ceil_div(vectors, threads)
        most = 2 * gpu.multiprocessors * (BACKWARD_THREADS // threads) // tiles
        grid = tiles, count(problem.rows, PARTIAL_ROWS, most)
        return Launch(bwd_strided, grid, threads)


BLOCK = _Block()
BACKWARD = Forms("norm", "backward", [_ThreadPerRow(), _SubWarp(), _PrefetchLate(), BLOCK, _Cluster(), _TwoPass()])
PARTIALS = Forms("norm", "partials", [_Strided()])  # of backward by two_pass, which leaves none


def _least(problem: Problem) -> int:
    """Bytes of shared memory for a vector of each tensor and of the weight."""
    return 16 * (problem.gradients + 1)


def _groups(problem: Problem, gpu: Gpu, shared: int, block: tuple[int, int], blocks: int) -> int:
    """Blocks, or clusters of `blocks`, that run at one time: no more than there is work for, and of unaligned rows so many
    that every group has rows that begin alike within a vector."""
    period = 1 if problem.aligned else problem.width
    besides = _ROW_SUMS * (2 if problem.operator.centred else 1) * problem.acc + _DRIVER
    besides += 0 if problem.aligned else _MBARRIERS
    if block[1] > 1:
        besides = RESERVED  # one more such block that just fits is slower: its rows wait for no barrier
    resident = BACKWARD_THREADS // math.prod(block)
    resident = max(1, min(resident, (gpu.shared + _DRIVER) // (shared + besides)))
    wave = gpu.multiprocessors * resident // blocks
    if not problem.aligned and blocks > 1:  # of any number of blocks: each part of the GPU may have some to spare
        wave = gpu.multiprocessors // _CLUSTER_MULTIPROCESSORS * (_CLUSTER_MULTIPROCESSORS * resident // blocks)
    wave = max(wave // period, 1) * period
    rows = ceil_div(problem.rows, PARTIAL_ROWS if problem.parameters else 1)
    return ceil_div(max(1, min(ceil_div(rows, block[1]), wave)), period) * period


def partials_of(launch: Launch) -> int:
    """Number of rows of partials that a launch leaves: one for each block or cluster."""
    grid: Any = launch.grid
    return grid[1] if isinstance(grid, tuple) else grid // (launch.cluster or 1)
