"""The forms of backward of layer_norm, rms_norm and add_rms_norm, and of the partials of their parameters' gradients."""

from __future__ import annotations

import math
from typing import Any

from ..._kernel.kernel import ceil_div
from ..core.forms import Form, Forms, Launch
from ..core.gpu import Gpu
from ..core.rows import PACKS, SMALL_ROWS, Share
from . import forms

THREAD_PER_ROW_BLOCKS = 4  # for each multiprocessor
PREFETCH_LATE_THREADS = 512  # of a row, from which on a late prefetch takes less time
CLUSTER_THREADS = 256  # of a block of a cluster, where so many suffice: several such blocks fit on a multiprocessor
_MOST_BLOCKS = 8  # of a cluster
_CLUSTER_MULTIPROCESSORS = 16  # at least, among which the blocks of a cluster lie
_DRIVER = 1024  # bytes of RESERVED that are the driver's: a block cannot have them, a multiprocessor has
_ROW_SUMS = 256  # numbers of each row sum: see RowAdderBuffer
_MBARRIERS = 16  # bytes of those that are with them, of unaligned rows

bwd_thread_per_row = forms.kernel("norm_bwd_thread_per_row<T, CENTRED>", **forms.EACH)
bwd_sub_warp = forms.kernel("norm_bwd_sub_warp<T, CENTRED>", **forms.EACH)
bwd_block = forms.kernel(
    "norm_bwd_block<T, CENTRED, K, ALIGNED>", **forms.EACH, K=PACKS, ALIGNED=forms.BOTH, where=forms.is_block
)
bwd_two_pass = forms.kernel("norm_bwd_two_pass<T>", **forms.ALL)
bwd_strided = forms.kernel("norm_bwd_strided<T>", **forms.ALL)
bwd_finalize = forms.kernel("norm_bwd_finalize<T>", **forms.ALL)


class _ThreadPerRow(forms.ThreadPerRow):
    uses = (bwd_thread_per_row, bwd_finalize)

    def shared(self, problem: forms.Problem) -> int:
        return SMALL_ROWS * problem.row * problem.gradients + forms.padded(problem.size * problem.acc)

    def launch(self, problem: forms.Problem, gpu: Gpu) -> Launch:
        grid = forms.count(problem.rows, SMALL_ROWS, THREAD_PER_ROW_BLOCKS * gpu.multiprocessors)
        template = {"CENTRED": problem.operator.centred}
        return Launch(bwd_thread_per_row, grid, (SMALL_ROWS, 1), self.shared(problem), template)


class _SubWarp(forms.SubWarp):
    uses = (bwd_sub_warp, bwd_finalize)

    def launch(self, problem: forms.Problem, gpu: Gpu) -> Launch:
        grid, block = self.blocks(problem, gpu, forms.BACKWARD_ROWS)
        return Launch(bwd_sub_warp, grid, block, template={"CENTRED": problem.operator.centred})


class _OnePass(forms.Shared):
    """A wave of blocks, or of clusters, that stride over rows in shared memory."""

    uses = (bwd_block, bwd_finalize)

    def most(self, problem: forms.Problem, gpu: Gpu) -> int:
        """Threads of a block, at most."""
        return min(
            forms.BACKWARD_THREADS,
            (gpu.shared - forms.RESERVED) // (_least(problem) * forms.VECTORS) // forms.WARP * forms.WARP,
        )

    def share(self, problem: forms.Problem, gpu: Gpu) -> Share:
        """The threads of a row in one block."""
        return forms.share_row(problem, self.most(problem, gpu), 256)

    def half(self, problem: forms.Problem, gpu: Gpu) -> int:
        """Threads of half a row, which two blocks share, where a block holds it."""
        return ceil_div(self.share(problem, gpu).threads, 2 * forms.WARP) * forms.WARP

    def wave(self, problem: forms.Problem, gpu: Gpu, threads: Share, blocks: int, late: bool) -> Launch:
        """The launch for rows that `blocks` blocks of such threads share; where two stages fit, `late` is the prefetch."""
        vectors = threads.packs * math.prod(threads.block)
        least, stage = _least(problem), 16 * problem.gradients
        stages = 2 if vectors * (least + stage) <= gpu.shared - forms.RESERVED else 1
        shared = vectors * (least + stage * (stages - 1))
        template = {"CENTRED": problem.operator.centred, "K": threads.packs, "ALIGNED": problem.aligned}
        return Launch(
            bwd_block,
            _groups(problem, gpu, shared, threads.block, blocks) * blocks,
            threads.block,
            shared,
            template,
            blocks if blocks > 1 else None,
            named={"stages": stages, "late": late and problem.aligned and stages == 2},
        )


class _Block(_OnePass):
    name = "block"
    summary = "the threads of a block share a row, in shared memory, and read the next meanwhile"

    def why_not(self, problem: forms.Problem, gpu: Gpu) -> str | None:
        if not self.share(problem, gpu).packs:
            return f"a row needs more than {self.most(problem, gpu)} threads"
        return super().why_not(problem, gpu)

    def why_slower(self, problem: forms.Problem, gpu: Gpu) -> str | None:
        most, threads = self.most(problem, gpu), self.share(problem, gpu).threads
        if gpu.has_clusters and most // threads == 1 and most // self.half(problem, gpu) >= 3:
            return "three halves of rows fit on a multiprocessor, on which a second row does not"
        return None

    def launch(self, problem: forms.Problem, gpu: Gpu) -> Launch:
        return self.wave(problem, gpu, self.share(problem, gpu), 1, late=False)


class _PrefetchLate(_Block):
    name = "prefetch_late"
    summary = "as block; the statistics of the next row are prefetched once this row has arrived"

    def why_not(self, problem: forms.Problem, gpu: Gpu) -> str | None:
        if not problem.aligned:
            return "rows begin off 16-byte boundaries"
        if reason := super().why_not(problem, gpu):
            return reason
        return None if self.launch(problem, gpu).named["stages"] == 2 else "two rows do not fit into shared memory"

    def why_slower(self, problem: forms.Problem, gpu: Gpu) -> str | None:
        if self.share(problem, gpu).threads < PREFETCH_LATE_THREADS:
            return f"a row has fewer than {PREFETCH_LATE_THREADS} threads"
        return super().why_slower(problem, gpu)

    def launch(self, problem: forms.Problem, gpu: Gpu) -> Launch:
        return self.wave(problem, gpu, self.share(problem, gpu), 1, late=True)


class _Cluster(_OnePass):
    name = "cluster"
    summary = "as prefetch_late, where two rows fit; the blocks of a cluster share a row"

    def why_not(self, problem: forms.Problem, gpu: Gpu) -> str | None:
        if not gpu.has_clusters:
            return "clusters need compute capability 9.0"
        if not self.splits(problem, gpu):
            return f"a row needs more than {_MOST_BLOCKS} blocks"
        return super().why_not(problem, gpu)

    def launch(self, problem: forms.Problem, gpu: Gpu) -> Launch:
        """Return the launch whose clusters run at one time in the largest number."""
        launches = [self.among(problem, gpu, *split) for split in self.splits(problem, gpu)]
        return max(launches, key=lambda launch: (partials_of(launch), launch.cluster))

    def among(self, problem: forms.Problem, gpu: Gpu, blocks: int, threads: int) -> Launch:
        """The launch for rows that `blocks` blocks of `threads` threads share."""
        return self.wave(problem, gpu, Share(forms.VECTORS, threads, 1), blocks, late=True)

    def splits(self, problem: forms.Problem, gpu: Gpu) -> list[tuple[int, int]]:
        """The blocks of a row, and their threads: any that fit; of aligned rows a power of two of blocks."""
        if self.share(problem, gpu).packs:
            return [(2, self.half(problem, gpu))]
        warps = ceil_div(problem.shared_vectors, forms.VECTORS * forms.WARP)
        if problem.aligned:
            several = [min(forms.power_of_two(ceil_div(warps * forms.WARP, CLUSTER_THREADS)), _MOST_BLOCKS)]
        else:
            several = list(range(2, _MOST_BLOCKS + 1))
        splits = [(blocks, ceil_div(warps, blocks) * forms.WARP) for blocks in several]
        return [(blocks, threads) for blocks, threads in splits if threads <= self.most(problem, gpu)]


class _TwoPass(Form[forms.Problem]):
    name = "two_pass"
    summary = "the threads of a block share a row of any length, and read it twice; the parameters' gradients are apart"
    uses = (bwd_two_pass,)

    def launch(self, problem: forms.Problem, gpu: Gpu) -> Launch:
        return Launch(bwd_two_pass, forms.blocks_for(problem.rows, 1, gpu), forms.two_pass_threads(problem))


class _Strided(Form[forms.Problem]):
    name = "strided"
    summary = "a thread has a vector of columns, and strides over the rows"
    uses = (bwd_strided, bwd_finalize)

    def launch(self, problem: forms.Problem, gpu: Gpu) -> Launch:
        vectors = ceil_div(problem.row, 16)
        threads = min(ceil_div(vectors, forms.WARP) * forms.WARP, forms.BACKWARD_THREADS)
        tiles = ceil_div(vectors, threads)
        most = 2 * gpu.multiprocessors * (forms.BACKWARD_THREADS // threads) // tiles
        grid = tiles, forms.count(problem.rows, forms.PARTIAL_ROWS, most)
        return Launch(bwd_strided, grid, threads)


BLOCK = _Block()
BACKWARD = Forms("norm", "backward", [_ThreadPerRow(), _SubWarp(), _PrefetchLate(), BLOCK, _Cluster(), _TwoPass()])
PARTIALS = Forms("norm", "partials", [_Strided()])  # of backward by two_pass, which leaves none


def _least(problem: forms.Problem) -> int:
    """Bytes of shared memory for a vector of each tensor and of the weight."""
    return 16 * (problem.gradients + 1)


def _groups(problem: forms.Problem, gpu: Gpu, shared: int, block: tuple[int, int], blocks: int) -> int:
    """Blocks, or clusters of `blocks`, that run at one time: no more than there is work for, and of unaligned rows so many
    that every group has rows that begin alike within a vector."""
    period = 1 if problem.aligned else problem.width
    besides = _ROW_SUMS * (2 if problem.operator.centred else 1) * problem.acc + _DRIVER
    besides += 0 if problem.aligned else _MBARRIERS
    if block[1] > 1:
        besides = forms.RESERVED  # one more such block that just fits is slower: its rows wait for no barrier
    resident = forms.BACKWARD_THREADS // math.prod(block)
    resident = max(1, min(resident, (gpu.shared + _DRIVER) // (shared + besides)))
    wave = gpu.multiprocessors * resident // blocks
    if not problem.aligned and blocks > 1:  # of any number of blocks: each part of the GPU may have some to spare
        wave = gpu.multiprocessors // _CLUSTER_MULTIPROCESSORS * (_CLUSTER_MULTIPROCESSORS * resident // blocks)
    wave = max(wave // period, 1) * period
    rows = ceil_div(problem.rows, forms.PARTIAL_ROWS if problem.parameters else 1)
    return ceil_div(max(1, min(ceil_div(rows, block[1]), wave)), period) * period


def partials_of(launch: Launch) -> int:
    """Number of rows of partials that a launch leaves: one for each block or cluster."""
    grid: Any = launch.grid
    return grid[1] if isinstance(grid, tuple) else grid // (launch.cluster or 1)
