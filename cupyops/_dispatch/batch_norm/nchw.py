"""The forms of batch_norm for images, whose channels are strided segments: cuda_src/batch_norm.cu."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._kernel.kernel import FLOATING, Kernel
from ..core.forms import Launch
from ..core.gpu import Gpu
from ..core.images import accumulator
from ..reduce import segments
from ..reduce.segments import Segments
from .problem import (
    DEFINE,
    HALF_AND_FLOAT,
    Backward,
    BatchNormForm,
    Forward,
    Problem,
    batch_norm_bwd_finalize,
    finalize,
)

# blocks in inference, at most, by the size of an element: they have less each than where sums are to be combined
INFERENCE_BLOCKS = {2: 1 << 12, 4: 1 << 14, 8: 1 << 14}


def _nchw(name: str, dtypes: tuple[torch.dtype, ...] = FLOATING) -> Kernel:
    return Kernel(
        "batch_norm.cu",
        f"{name}<T, ALIGNED>",
        T=dtypes,
        ALIGNED=(False, True),
        where=lambda T, ALIGNED: T.itemsize < 8 or not ALIGNED,
        define=DEFINE,
    )


batch_norm_fwd_nchw_cluster = _nchw("batch_norm_fwd_nchw_cluster", HALF_AND_FLOAT)
batch_norm_fwd_nchw_partials = _nchw("batch_norm_fwd_nchw_partials")
batch_norm_fwd_nchw = _nchw("batch_norm_fwd_nchw")
batch_norm_bwd_nchw_cluster = _nchw("batch_norm_bwd_nchw_cluster", HALF_AND_FLOAT)
batch_norm_bwd_nchw_partials = _nchw("batch_norm_bwd_nchw_partials")
batch_norm_bwd_nchw = _nchw("batch_norm_bwd_nchw")


def _launch_segments(kernel: Kernel, problem: Problem, plan: Segments) -> Launch:
    template = {"ALIGNED": plan.aligned and problem.itemsize < 8} if "ALIGNED" in kernel.template else {}
    return Launch(kernel, plan.grid, plan.block, template=template)


class NchwCluster(BatchNormForm):
    """The blocks of a cluster share a channel, which is read from memory once."""

    name = "nchw_cluster"
    summary = "the blocks of a cluster share a channel, and hold what they can of it in shared memory"
    kernel: Kernel
    tensors: int  # that are read twice

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        if problem.itemsize == 8:
            return "fp64 is computed in two passes alone"
        return "channels lie side by side" if problem.nhwc else None

    def why_slower(self, problem: Problem, gpu: Gpu) -> str | None:
        plan = self._plan(problem, gpu)
        if plan.grid < segments.FEWEST and plan.each > segments.THREADS * segments.VECTORS:
            return f"fewer than {segments.FEWEST} blocks would have long parts of channels"
        most = segments.MOST_CLUSTER_VECTORS if gpu.has_clusters else 2 * segments.CLUSTER_VECTORS
        return f"a block would have more than {most} vectors" if plan.each * self.tensors > most else None

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        plan = self._plan(problem, gpu)
        shared, blocks = plan.buffered * self.tensors * 16, (plan.splits,) if plan.splits > 1 else None
        template = {"ALIGNED": plan.aligned} if "ALIGNED" in self.kernel.template else {}
        return Launch(self.kernel, plan.grid, plan.block, shared, template, blocks)

    def _plan(self, problem: Problem, gpu: Gpu) -> Segments:
        return segments.cluster(*problem.segments, self.tensors, gpu)


class NchwClusterForward(NchwCluster):
    kernel, tensors = batch_norm_fwd_nchw_cluster, 1

    def run(self, problem: Problem, gpu: Gpu, of: Forward) -> None:
        plan = self._plan(problem, gpu)
        rest = plan.packed, plan.buffered, of.wide, of.momentum, of.eps
        self.launch(problem, gpu)(*of[:8], *rest, *of.then, T=of.x.dtype)


class NchwClusterBackward(NchwCluster):
    kernel, tensors = batch_norm_bwd_nchw_cluster, 2

    def run(self, problem: Problem, gpu: Gpu, of: Backward) -> None:
        plan = self._plan(problem, gpu)
        given = of.grad_y, of.x, of.weight, of.mean, of.rstd, *of.gradients
        self.launch(problem, gpu)(*given, plan.packed, plan.buffered, of.wide, *of.gate, T=of.x.dtype)


class NchwTwoPassForward(BatchNormForm):
    """Partial moments of each block's split of a channel, and y."""

    name = "nchw_two_pass"
    summary = "blocks share a channel; two passes; also fp64 of any layout"
    kernel = batch_norm_fwd_nchw  # of the second pass

    def kernels(self) -> tuple[Kernel, ...]:
        return batch_norm_fwd_nchw_partials, self.kernel

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        return _launch_segments(self.kernel, problem, segments.split(*problem.segments))

    def run(self, problem: Problem, gpu: Gpu, of: Forward) -> None:
        plan, dtype = segments.split(*problem.segments), of.x.dtype
        partials = of.x.new_empty(plan.grid * 3, dtype=accumulator(dtype))
        _launch_segments(batch_norm_fwd_nchw_partials, problem, plan)(of.x, partials, plan.packed, T=dtype)
        given = *of[:4], partials, *of.statistics, plan.packed, of.wide, of.momentum, of.eps, *of.then
        self.launch(problem, gpu)(*given, T=dtype)


class NchwInference(NchwTwoPassForward):
    """y, by the running statistics."""

    name = "nchw"
    summary = "blocks share a channel; also fp64 of any layout"

    def kernels(self) -> tuple[Kernel, ...]:
        return (self.kernel,)

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        return _launch_segments(self.kernel, problem, self._plan(problem))

    def run(self, problem: Problem, gpu: Gpu, of: Forward) -> None:
        rest = self._plan(problem).packed, of.wide, 0.0, of.eps, *of.then
        self.launch(problem, gpu)(*of[:4], None, *of.statistics, *rest, T=of.x.dtype)

    def _plan(self, problem: Problem) -> Segments:
        most = INFERENCE_BLOCKS[problem.itemsize]
        return segments.split(*problem.segments, blocks=most, splits=most)


class NchwTwoPassBackward(BatchNormForm):
    """Partial sums of each block's split of a channel, and grad_x."""

    name = "nchw_two_pass"
    summary = NchwTwoPassForward.summary
    first, second = batch_norm_bwd_nchw_partials, batch_norm_bwd_nchw  # the kernels of the two passes

    def kernels(self) -> tuple[Kernel, ...]:
        return self.first, self.second, batch_norm_bwd_finalize

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        kernel = self.second if problem.grad_x else self.first
        return _launch_segments(kernel, problem, segments.split(*problem.segments))

    def run(self, problem: Problem, gpu: Gpu, of: Backward) -> None:
        plan = segments.split(*problem.segments)
        partials = of.x.new_empty(plan.grid * 2, dtype=accumulator(of.x.dtype))
        _sum_segments(self.first, problem, of, None, partials)
        if of.grad_x is None:
            return finalize(of, partials, 1, plan.splits, (2, 2 * plan.splits))
        given = of.grad_y, of.x, of.weight, of.mean, of.rstd, partials, *of.gradients
        self.launch(problem, gpu)(*given, plan.packed, of.wide, *of.gate, T=of.x.dtype)


def _sum_segments(
    kernel: Kernel, problem: Problem, of: Backward, grad_x: Tensor | None, partials: Tensor | None
) -> None:
    plan = segments.split(*problem.segments)
    given = of.grad_y, of.x, of.weight, *of.statistics, grad_x, partials, plan.packed, of.wide, of.eps
    _launch_segments(kernel, problem, plan)(*given, *of.gate[:1], T=of.x.dtype)


class NchwInferenceBackward(NchwTwoPassBackward):
    """Partial sums and grad_x at once, since no sum enters it."""

    name = "nchw"
    summary = NchwInference.summary

    def kernels(self) -> tuple[Kernel, ...]:
        return self.first, batch_norm_bwd_finalize

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        return _launch_segments(self.first, problem, segments.split(*problem.segments))

    def run(self, problem: Problem, gpu: Gpu, of: Backward) -> None:
        plan = segments.split(*problem.segments)
        partials = of.x.new_empty(plan.grid * 2, dtype=accumulator(of.x.dtype)) if of.of_parameters else None
        _sum_segments(self.first, problem, of, of.grad_x, partials)
        if partials is not None:
            finalize(of, partials, 1, plan.splits, (2, 2 * plan.splits))
