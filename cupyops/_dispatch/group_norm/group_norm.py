"""The forms of group_norm: how many threads hold a group, and where."""

from __future__ import annotations

import functools
from typing import NamedTuple

from ..._kernel.kernel import FLOATING, Kernel, ceil_div
from ..core.forms import Forms, Launch
from ..core.gpu import Gpu
from ..core.images import accumulator
from ..reduce import segments
from ..reduce.segments import CLUSTER, FEWEST, Segments
from .nhwc import NhwcBackward, NhwcForward
from .nhwc import is_served as is_served
from .problem import (
    HALF_AND_FLOAT,
    PERSISTENT,
    SHARED_MEMORY_THREADS,
    SUB_WARP_THREADS,
    Backward,
    Forward,
    GroupNormForm,
    Problem,
    Sums,
    add_images,
    division,
    images_of,
    kernel,
    lanes_for,
    sums_of,
)
from .problem import problem_of as problem_of
from .problem import too_large as too_large

# bytes of a vector: (threads, vectors of each) that hold a short group, of which the first that suffices is taken; backward
# prefers fewer vectors, since it holds two tensors
SUB_WARP_FORWARD = {16: ((8, 7), (16, 7), (32, 7), (64, 7), (128, 7)), 8: ((8, 7),)}
SUB_WARP_BACKWARD = {16: ((16, 4), (32, 4), (64, 4), (128, 4), (128, 7)), 8: ((8, 7),)}
# threads of a group for which there are instances of their own; others ask how many there are, which takes backward of 128
# threads up to a twentieth
UNROLLED_FORWARD = (8,)
UNROLLED_BACKWARD = (8, 128)
SHORTEST = 64  # bytes of a group for which sub_warp pays
MOST_ROWS = 1 << 30  # that an int counts, with those of a block behind them

WARP_VECTORS = 128  # of a group, at most, that a warp holds, or a part of one
# threads, at least, where groups have an unaligned head and tail, of which a thread has one element in forward
ENDS = 16
PREFERRED = 2048  # vectors of a group in a block: more blocks share a longer one
MANY_VECTORS = 4 * PREFERRED  # of a group: where such groups are few, several blocks for each are faster

SHARED_MEMORY = 48 << 10  # bytes for a block that every GPU has
RESERVED = 3 << 10  # bytes of shared memory of a block that CUDA and the kernel's own variables take


def _sub_warp(name: str, divisions: dict[int, tuple[tuple[int, int], ...]], unrolled: tuple[int, ...]) -> Kernel:
    return kernel(
        "group_norm_sub_warp.cu",
        f"{name}<T, BYTES, THREADS, K>",
        T=HALF_AND_FLOAT,
        BYTES=tuple(divisions),
        THREADS=(0, *unrolled),
        K=(4, 7),
        where=lambda BYTES, THREADS, K: any(
            (one if one in unrolled else 0, k) == (THREADS, K) for one, k in divisions[BYTES]
        ),
    )


def _persistent(name: str) -> Kernel:
    return kernel(
        "group_norm.cu",
        f"{name}<T, K, ALIGNED>",
        T=HALF_AND_FLOAT,
        K=tuple(PERSISTENT),
        ALIGNED=(False, True),
        where=lambda T, K, ALIGNED: ALIGNED or K == 8,
    )


group_norm_fwd_sub_warp = _sub_warp("group_norm_fwd_sub_warp", SUB_WARP_FORWARD, UNROLLED_FORWARD)
group_norm_fwd_persistent = _persistent("group_norm_fwd_persistent")
group_norm_fwd_shared_memory = kernel("group_norm.cu", "group_norm_fwd_shared_memory<T>", T=HALF_AND_FLOAT)
group_norm_fwd_partials = kernel("group_norm_two_pass.cu", "group_norm_fwd_partials<T>", T=FLOATING)
group_norm_fwd_two_pass = kernel("group_norm_two_pass.cu", "group_norm_fwd_two_pass<T>", T=FLOATING)
group_norm_bwd_sub_warp = _sub_warp("group_norm_bwd_sub_warp", SUB_WARP_BACKWARD, UNROLLED_BACKWARD)
group_norm_bwd_persistent = _persistent("group_norm_bwd_persistent")
group_norm_bwd_shared_memory = kernel("group_norm.cu", "group_norm_bwd_shared_memory<T>", T=HALF_AND_FLOAT)
group_norm_bwd_partials = kernel("group_norm_two_pass.cu", "group_norm_bwd_partials<T>", T=FLOATING)
group_norm_bwd_two_pass = kernel("group_norm_two_pass.cu", "group_norm_bwd_two_pass<T>", T=FLOATING)


# --- a few threads hold a group --------------------------------------------------------------------------------------


class Shared(NamedTuple):
    """Lanes that share a channel's sums, and blocks that share a row."""

    lanes: int
    blocks: int = 1


class SubWarp(GroupNormForm):
    """A part of a warp, or up to four warps, hold a group in registers, in vectors that no two groups share."""

    name = "sub_warp"
    summary = "8 to 128 threads hold a short group whose planes are not whole vectors"
    kernel: Kernel
    divisions: dict[int, tuple[tuple[int, int], ...]]
    unrolled: tuple[int, ...]

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        if reason := super().why_not(problem, gpu):
            return reason
        if problem.plane < 16:
            return "a vector would have more than two channels"
        if problem.bytes % 8:
            return "groups are not whole vectors of 8 bytes"
        if problem.rows >= MOST_ROWS:
            return "there are 2^30 groups"
        return None if self._division(problem) else "groups are too long"

    def why_slower(self, problem: Problem, gpu: Gpu) -> str | None:
        if problem.plane % 16 == 0:
            return "planes are whole vectors"
        return f"groups have fewer than {SHORTEST} bytes" if problem.bytes < SHORTEST else None

    def _vector(self, problem: Problem) -> int:
        """Bytes of a vector."""
        return 8 if problem.bytes % 16 else 16

    def _division(self, problem: Problem) -> tuple[int, int] | None:
        """(threads, vectors of each)"""
        vectors = problem.bytes // self._vector(problem)
        return next((one for one in self.divisions[self._vector(problem)] if vectors <= one[0] * one[1]), None)

    def _shared(self, problem: Problem, threads: int, vectors: int) -> int:
        """Bytes of shared memory of a row."""
        raise NotImplementedError

    def launch(self, problem: Problem, gpu: Gpu) -> Launch[Shared]:
        division = self._division(problem)
        assert division is not None
        threads, vectors = division
        rows = SUB_WARP_THREADS // threads
        template = {"BYTES": self._vector(problem), "THREADS": threads if threads in self.unrolled else 0, "K": vectors}
        shared = rows * self._shared(problem, threads, vectors)
        extra, block = Shared(lanes_for(threads, problem)), (threads, rows)
        return Launch(self.kernel, ceil_div(problem.rows, rows), block, shared, template, extra=extra)


class SubWarpForward(SubWarp):
    kernel, divisions, unrolled = group_norm_fwd_sub_warp, SUB_WARP_FORWARD, UNROLLED_FORWARD

    def _shared(self, problem: Problem, threads: int, vectors: int) -> int:
        return (problem.channels + 1) * 4 * problem.itemsize

    def run(self, problem: Problem, gpu: Gpu, of: Forward) -> None:
        rest = division(problem), images_of(problem.groups), problem.rows, problem.size, of.eps
        self.launch(problem, gpu)(*of[:6], *rest, T=of.x.dtype)


class SubWarpBackward(SubWarp):
    kernel, divisions, unrolled = group_norm_bwd_sub_warp, SUB_WARP_BACKWARD, UNROLLED_BACKWARD

    def _shared(self, problem: Problem, threads: int, vectors: int) -> int:
        return (vectors * threads + 3 * (problem.channels + 1)) * 8

    def run(self, problem: Problem, gpu: Gpu, of: Backward) -> Sums:
        launch, sums = self.launch(problem, gpu), sums_of(problem, of)
        rest = division(problem), images_of(problem.groups), problem.rows, problem.size, launch.extra.lanes
        launch(*of[:6], sums.values, *rest, T=of.x.dtype)
        return sums


# --- the registers of a block or a cluster hold a group --------------------------------------------------------------


class Registers(NamedTuple):
    """Layout of groups in registers: `blocks` share a row, and a block is (threads of a row, rows), each with `vectors`."""

    vectors: int
    block: tuple[int, int]
    blocks: int


@functools.lru_cache(maxsize=4096)
def _registers(total: int, whole_planes: bool, clusters: bool) -> Registers | None:
    """Divide groups of `total` vectors among registers; None: too long."""
    if total <= WARP_VECTORS:
        vectors = 4 if whole_planes else 8
        threads = max(1 if whole_planes else ENDS, 1 << (ceil_div(total, vectors) - 1).bit_length())
        return Registers(vectors, (threads, 128 // threads), 1)
    blocks = 1
    while clusters and blocks < CLUSTER and total > blocks * PREFERRED:
        blocks *= 2
    each = ceil_div(total, blocks)
    for vectors, threads in PERSISTENT.items():
        if each <= vectors * threads and (whole_planes or vectors == 8):
            return Registers(vectors, (ceil_div(each, 32 * vectors) * 32, 1), blocks)
    return None


class Persistent(GroupNormForm):
    """The registers of a part of a warp, of a block or of the blocks of a cluster hold a group."""

    name = "persistent"
    summary = "the registers of a warp, a block or a cluster hold a group"
    kernel: Kernel
    shared_bytes: int  # of shared memory for each vector

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        if reason := super().why_not(problem, gpu):
            return reason
        if problem.plane < 16:
            return "a vector would have more than two channels"
        return None if self._plan(problem, gpu) else "groups are too long"

    def why_slower(self, problem: Problem, gpu: Gpu) -> str | None:
        if problem.has_small_planes:
            return "planes are small"
        plan = self._plan(problem, gpu)
        assert plan is not None
        few = problem.rows * plan.blocks < FEWEST and problem.bytes // 16 > MANY_VECTORS
        return "there are few groups, and long ones" if few else None

    def _plan(self, problem: Problem, gpu: Gpu) -> Registers | None:
        return _registers(problem.bytes // 16, problem.plane % 16 == 0, gpu.has_clusters)

    def launch(self, problem: Problem, gpu: Gpu) -> Launch[Shared]:
        plan = self._plan(problem, gpu)
        assert plan is not None
        threads, rows = plan.block
        template = {"K": plan.vectors, "ALIGNED": problem.plane % 16 == 0}
        grid, cluster = ceil_div(problem.rows, rows) * plan.blocks, plan.blocks if plan.blocks > 1 else None
        shared = rows * threads * plan.vectors * self.shared_bytes
        extra = Shared(lanes_for(threads, problem), plan.blocks)
        return Launch(self.kernel, grid, plan.block, shared, template, cluster, extra=extra)


class PersistentForward(Persistent):
    kernel, shared_bytes = group_norm_fwd_persistent, 0

    def run(self, problem: Problem, gpu: Gpu, of: Forward) -> None:
        rest = division(problem), problem.rows, problem.size, of.eps
        self.launch(problem, gpu)(*of[:6], *rest, T=of.x.dtype)


class PersistentBackward(Persistent):
    kernel, shared_bytes = group_norm_bwd_persistent, 8

    def run(self, problem: Problem, gpu: Gpu, of: Backward) -> Sums:
        launch = self.launch(problem, gpu)
        sums = sums_of(problem, of, launch.extra.blocks)
        rest = division(problem), problem.rows, problem.size, launch.extra.lanes
        launch(*of[:6], sums.values, *rest, T=of.x.dtype)
        return sums


# --- shared memory holds groups of small planes ----------------------------------------------------------------------


class Planes(NamedTuple):
    """Layout of groups in shared memory: `blocks` share a row, and each has `planes` of it.

    A block is (threads of a row, rows), with room for `vectors` of each tensor.
    """

    planes: int
    vectors: int
    block: tuple[int, int]
    blocks: int


@functools.lru_cache(maxsize=4096)
def _planes(channels: int, pixels: int, itemsize: int, tensors: int, gpu: Gpu) -> Planes | None:
    """Divide groups among the shared memory of blocks; None where a group is too long."""
    room = max(SHARED_MEMORY, min(gpu.shared, gpu.shared_total // 3) - RESERVED)  # three blocks fit on a multiprocessor
    most, blocks = room // (16 * tensors), 1
    vectors = lambda planes: segments.vectors_of(planes * pixels, itemsize, False)  # noqa: E731
    while gpu.has_clusters and blocks < CLUSTER and vectors(ceil_div(channels, blocks)) > most:
        blocks *= 2
    planes = ceil_div(channels, blocks)
    if vectors(planes) > most:
        return None
    threads, rows = min(SHARED_MEMORY_THREADS, ceil_div(planes, 32) * 32), 1
    if blocks == 1 and planes <= 32:
        threads = 1 << (planes - 1).bit_length()
        fits = [
            rows for rows in (128 // threads, 64 // threads, 32 // threads) if rows and vectors(rows * channels) <= most
        ]
        if not fits:  # a block is whole warps
            return None
        rows = fits[0]
    return Planes(planes, vectors(rows * planes), (threads, rows), blocks)


class SharedMemory(GroupNormForm):
    """Shared memory holds groups of small planes, of which a thread has one or several."""

    name = "shared_memory"
    summary = "the shared memory of a block or a cluster holds groups; a thread has small planes"
    kernel: Kernel
    tensors: int

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        if reason := super().why_not(problem, gpu):
            return reason
        return None if self._plan(problem, gpu) else "groups are too long for shared memory"

    def why_slower(self, problem: Problem, gpu: Gpu) -> str | None:
        if not problem.has_small_planes:
            return "planes are not small"
        plan = self._plan(problem, gpu)
        assert plan is not None
        few = problem.rows * plan.blocks < FEWEST and problem.bytes // 16 > MANY_VECTORS
        return "there are few groups, and long ones" if few else None

    def _plan(self, problem: Problem, gpu: Gpu) -> Planes | None:
        return _planes(problem.channels, problem.pixels, problem.itemsize, self.tensors, gpu)

    def launch(self, problem: Problem, gpu: Gpu) -> Launch[Planes]:
        plan = self._plan(problem, gpu)
        assert plan is not None
        grid, cluster = ceil_div(problem.rows, plan.block[1]) * plan.blocks, plan.blocks if plan.blocks > 1 else None
        shared = plan.vectors * 16 * self.tensors
        return Launch(self.kernel, grid, plan.block, shared, cluster=cluster, extra=plan)


class SharedMemoryForward(SharedMemory):
    kernel, tensors = group_norm_fwd_shared_memory, 1

    def run(self, problem: Problem, gpu: Gpu, of: Forward) -> None:
        launch = self.launch(problem, gpu)
        rest = launch.extra.planes, division(problem), problem.rows, problem.size, of.eps
        launch(*of[:6], *rest, T=of.x.dtype)


class SharedMemoryBackward(SharedMemory):
    kernel, tensors = group_norm_bwd_shared_memory, 2

    def run(self, problem: Problem, gpu: Gpu, of: Backward) -> Sums:
        launch, sums = self.launch(problem, gpu), sums_of(problem, of)
        rest = division(problem), problem.rows, problem.size, launch.extra.vectors
        launch(*of[:6], sums.values, launch.extra.planes, *rest, T=of.x.dtype)
        return sums


# --- blocks share a group --------------------------------------------------------------------------------------------


class TwoPass(GroupNormForm):
    """The blocks that share a group read it twice."""

    name = "two_pass"
    summary = "blocks share a group; two passes; also fp64, and tensors that begin anywhere"

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        return "channels lie side by side" if problem.nhwc else None

    def _plan(self, problem: Problem) -> Segments:
        return segments.split(problem.rows, 1, problem.size, problem.itemsize, problem.aligned)


class TwoPassForward(TwoPass):
    uses = (group_norm_fwd_partials, group_norm_fwd_two_pass)

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        plan = self._plan(problem)
        return Launch(group_norm_fwd_two_pass, plan.grid, plan.block)

    def run(self, problem: Problem, gpu: Gpu, of: Forward) -> None:
        plan, dtype = self._plan(problem), of.x.dtype
        partials = of.x.new_empty(plan.grid * (3 if dtype.itemsize == 2 else 4), dtype=accumulator(dtype))
        group_norm_fwd_partials[plan.grid, plan.block](of.x, partials, plan.packed, T=dtype)
        rest = of.mean, of.rstd, plan.packed, division(problem), of.eps
        self.launch(problem, gpu)(*of[:4], partials, *rest, T=dtype)


class TwoPassBackward(TwoPass):
    uses = (group_norm_bwd_partials, group_norm_bwd_two_pass)

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        if not problem.grad_x:
            grid, block, _ = _split_planes(problem)
            return Launch(group_norm_bwd_partials, grid, block)
        plan = self._plan(problem)
        return Launch(group_norm_bwd_two_pass, plan.grid, plan.block)

    def run(self, problem: Problem, gpu: Gpu, of: Backward) -> Sums:
        grid, block, planes = _split_planes(problem)
        sums, dtype = sums_of(problem, of, planes.splits), of.x.dtype
        sizes = problem.channels, problem.rows * problem.channels
        launch = group_norm_bwd_partials[grid, block]
        launch(of.grad_y, of.x, of.mean, of.rstd, sums.values, planes.packed, *sizes, T=dtype)
        if of.grad_x is not None:
            rest = self._plan(problem).packed, division(problem), sums.of_plane
            self.launch(problem, gpu)(*of[:5], sums.values, of.grad_x, *rest, T=dtype)
        return sums


def _split_planes(problem: Problem) -> tuple[int, tuple[int, int], Segments]:
    """(grid, block, plan) of the sums of planes: several planes to a block where they are small."""
    planes = problem.rows * problem.channels
    plan = segments.split(planes, 1, problem.pixels, problem.itemsize, problem.aligned)
    vectors = segments.vectors_of(problem.pixels, problem.itemsize, problem.aligned)
    if vectors > 32:
        return plan.grid, (plan.block, 1), plan
    threads = 1 << (vectors - 1).bit_length()
    return ceil_div(planes, 128 // threads), (threads, 128 // threads), plan


FORWARD = Forms(
    "group_norm",
    "forward",
    [SubWarpForward(), PersistentForward(), SharedMemoryForward(), TwoPassForward(), NhwcForward()],
)
BACKWARD = Forms(
    "group_norm",
    "backward",
    [SubWarpBackward(), PersistentBackward(), SharedMemoryBackward(), TwoPassBackward(), NhwcBackward()],
)


def run_forward(problem: Problem, gpu: Gpu, of: Forward) -> None:
    """Compute y, mean and rstd by the form that is chosen."""
    form = FORWARD.choose(problem, gpu)
    assert isinstance(form, GroupNormForm)
    form.run(problem, gpu, of)


def run_backward(problem: Problem, gpu: Gpu, of: Backward) -> None:
    """Compute the gradients that are wanted by the form that is chosen."""
    form = BACKWARD.choose(problem, gpu)
    assert isinstance(form, GroupNormForm)
    sums = form.run(problem, gpu, of)
    if of.grad_weight is not None or of.grad_bias is not None:
        add_images(sums, of)
