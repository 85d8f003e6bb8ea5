"""The forms of batch_norm for channels that lie side by side: cuda_src/batch_norm_nhwc.cu."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..._kernel.kernel import Kernel, ceil_div
from ..core import column_tiles
from ..core.column_tiles import Columns, Matrix
from ..core.forms import Launch
from ..core.gpu import Gpu
from ..core.images import accumulator
from ..reduce import segments
from .problem import (
    DEFINE,
    FINALIZERS,
    HALF_AND_FLOAT,
    Backward,
    BatchNormForm,
    Forward,
    Problem,
    batch_norm_bwd_finalize,
    finalize,
)

# elements of a plane, at most, that is read by columns, since a run of it is no whole lines of the cache
SMALL_PLANE = 256
SMALL_PLANE_IMAGES = 16  # at least
INLINE_PIXELS = 32  # of a plane, at least, whose partials the blocks of the second pass combine: a warp has a channel
INLINE_PARTIALS = 2  # of a column, at most: more would be read by too many blocks
ALIGNED = {"ALIGNED": (False, True)}


def _nhwc(name: str, **domain: Any) -> Kernel:
    parameters = ", ".join(("T", *domain))
    return Kernel("batch_norm_nhwc.cu", f"{name}<{parameters}>", T=HALF_AND_FLOAT, define=DEFINE, **domain)


batch_norm_fwd_nhwc_cluster = _nhwc("batch_norm_fwd_nhwc_cluster")
batch_norm_fwd_nhwc_partials = _nhwc("batch_norm_fwd_nhwc_partials", **ALIGNED)
batch_norm_fwd_nhwc_finalize = _nhwc("batch_norm_fwd_nhwc_finalize")
batch_norm_fwd_nhwc = _nhwc("batch_norm_fwd_nhwc", **ALIGNED)
batch_norm_bwd_nhwc_cluster = _nhwc("batch_norm_bwd_nhwc_cluster")
batch_norm_bwd_nhwc_partials = _nhwc("batch_norm_bwd_nhwc_partials", **ALIGNED)
batch_norm_bwd_nhwc_inline = _nhwc("batch_norm_bwd_nhwc_inline")
batch_norm_bwd_nhwc = _nhwc("batch_norm_bwd_nhwc", **ALIGNED)


def _why_not_columns(problem: Problem) -> str | None:
    if problem.itemsize == 8:
        return "fp64 is computed by the segments of an image alone"
    if not problem.nhwc and problem.channels * problem.pixels >= 1 << 31:
        return "an image has 2^31 elements"
    return None


def _why_columns_slower(problem: Problem) -> str | None:
    """Small planes are read by columns, since a run of one is not whole lines of the cache."""
    if problem.nhwc:
        return None
    if problem.pixels > SMALL_PLANE:
        return f"planes have more than {SMALL_PLANE} elements"
    if problem.pixels * problem.itemsize % 16 == 0:
        return "planes are whole vectors"
    return None if problem.images >= SMALL_PLANE_IMAGES else f"there are fewer than {SMALL_PLANE_IMAGES} images"


def columns_of(problem: Problem) -> tuple[Matrix, Columns]:
    """Columns of the problem, and the launch over them."""
    matrix = problem.matrix.folded(problem.itemsize, problem.aligned)
    return matrix, column_tiles.split(matrix.rows, matrix.size, problem.itemsize, problem.aligned)


def _launch_columns(kernel: Kernel, plan: Columns) -> Launch:
    template = {"ALIGNED": plan.aligned} if "ALIGNED" in kernel.template else {}
    return Launch(kernel, plan.grid, plan.block, template=template)


class NhwcCluster(BatchNormForm):
    """The blocks of a cluster share a tile of columns, which is read from memory once."""

    name = "nhwc_cluster"
    summary = "the blocks of a cluster share a tile of channels"

    kernel: Kernel

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        if reason := _why_not_columns(problem):
            return reason
        if problem.matrix.pixels > 1:
            return "channels do not lie side by side"
        if problem.measured:
            return "the moments are there"
        if not segments.is_whole(problem.channels, problem.itemsize, problem.aligned):
            return "rows are not whole vectors"
        return None if self._plan(problem, gpu) else "there are too many rows, or too many channels"

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        plan = self._plan(problem, gpu)
        assert plan is not None
        return Launch(self.kernel, plan.grid, plan.block, cluster=(1, plan.splits) if plan.splits > 1 else None)

    def _plan(self, problem: Problem, gpu: Gpu) -> Columns | None:
        return column_tiles.cluster(problem.matrix.rows, problem.channels, problem.itemsize, gpu)


class NhwcClusterForward(NhwcCluster):
    kernel = batch_norm_fwd_nhwc_cluster

    def run(self, problem: Problem, gpu: Gpu, of: Forward) -> None:
        self.launch(problem, gpu)(*of[:8], *problem.matrix[:2], of.wide, of.momentum, of.eps, *of.then, T=of.x.dtype)


class NhwcClusterBackward(NhwcCluster):
    kernel = batch_norm_bwd_nhwc_cluster

    def run(self, problem: Problem, gpu: Gpu, of: Backward) -> None:
        given = of.grad_y, of.x, of.weight, of.mean, of.rstd, *of.gradients
        self.launch(problem, gpu)(*given, *problem.matrix[:2], of.wide, *of.gate, T=of.x.dtype)


class NhwcTwoPassForward(BatchNormForm):
    """Partial moments of each split of the rows, which a second kernel combines, and y."""

    name = "nhwc_two_pass"
    summary = "blocks share the rows of a tile of channels, or of the pixels of small planes; two passes"
    kernel = batch_norm_fwd_nhwc  # of the second pass

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        return _why_not_columns(problem)

    def why_slower(self, problem: Problem, gpu: Gpu) -> str | None:
        return _why_columns_slower(problem)

    def kernels(self) -> tuple[Kernel, ...]:
        return batch_norm_fwd_nhwc_partials, batch_norm_fwd_nhwc_finalize, self.kernel

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        return _launch_columns(self.kernel, columns_of(problem)[1])

    def run(self, problem: Problem, gpu: Gpu, of: Forward) -> None:
        matrix, plan = columns_of(problem)
        rows, size, channels, pixels = matrix
        dtype, counts, partials, splits = of.x.dtype, None, None, plan.splits
        if of.moments is None:
            partials = of.x.new_empty(splits * size * 2, dtype=accumulator(dtype))
            _launch_columns(batch_norm_fwd_nhwc_partials, plan)(of.x, partials, rows, size, T=dtype)
            sizes = rows, channels, pixels, matrix.folds, splits
        else:
            partials, counts = of.moments
            sizes = rows, channels, 1, 1, len(counts)
        finalize = batch_norm_fwd_nhwc_finalize[ceil_div(channels, FINALIZERS[0]), FINALIZERS]
        finalize(partials, counts, *of.statistics, *sizes, of.wide, of.momentum, of.eps, T=dtype)
        _normalise(self.kernel, plan, matrix, of._replace(running_mean=None, running_var=None))


def _normalise(kernel: Kernel, plan: Columns, matrix: Matrix, of: Forward) -> None:
    launch = _launch_columns(kernel, plan)
    launch(*of[:8], *matrix, of.wide, of.eps, *of.then, T=of.x.dtype)


class NhwcTwoPassBackward(BatchNormForm):
    """Partial sums of each split of the rows, which a second kernel combines, and grad_x."""

    name = "nhwc_two_pass"
    summary = NhwcTwoPassForward.summary
    first, second = batch_norm_bwd_nhwc_partials, batch_norm_bwd_nhwc  # the kernels of the two passes

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        return _why_not_columns(problem)

    def why_slower(self, problem: Problem, gpu: Gpu) -> str | None:
        return _why_columns_slower(problem)

    def kernels(self) -> tuple[Kernel, ...]:
        return self.first, batch_norm_bwd_finalize, self.second

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        kernel = self.second if problem.grad_x else self.first
        return _launch_columns(kernel, columns_of(problem)[1])

    def run(self, problem: Problem, gpu: Gpu, of: Backward) -> None:
        matrix, _ = columns_of(problem)
        partials, count = _column_partials(self.first, problem, of)
        gradient = partials.new_empty(matrix.channels, 4) if problem.grad_x else None
        _finalize_columns(of, matrix, partials, count, gradient)
        if problem.grad_x:
            self.launch(problem, gpu)(of.grad_y, of.x, gradient, of.grad_x, *matrix, *of.gate, T=of.x.dtype)


def _column_partials(kernel: Kernel, problem: Problem, of: Backward) -> tuple[Tensor, int]:
    """Partial sums, and how many of each column of pixels."""
    matrix, plan = columns_of(problem)
    partials = of.x.new_empty(plan.splits * matrix.size * 2, dtype=accumulator(of.x.dtype))
    launch = _launch_columns(kernel, plan)
    launch(of.grad_y, of.x, *of.statistics, partials, *matrix, of.wide, of.eps, *of.gate[:1], T=of.x.dtype)
    return partials, plan.splits * matrix.folds


def _finalize_columns(of: Backward, matrix: Matrix, partials: Tensor, count: int, gradient: Tensor | None) -> None:
    steps = 2 * matrix.channels * matrix.pixels, 2
    finalize(of, partials, matrix.pixels, count, steps, gradient)


class NhwcInline(NhwcTwoPassBackward):
    """Variant of nhwc_two_pass whose second pass combines the partials in its own blocks, which saves a launch."""

    name = "nhwc_inline"
    second = batch_norm_bwd_nhwc_inline
    summary = "as nhwc_two_pass; a warp of each block of the second pass combines the few partials of a channel"

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        if reason := _why_not_columns(problem):
            return reason
        if not problem.grad_x:
            return "grad_x, which a second pass writes, is not wanted"
        matrix, plan = columns_of(problem)
        if matrix.pixels < INLINE_PIXELS:
            return f"a channel has fewer than {INLINE_PIXELS} columns"
        return None if plan.aligned else "rows are not whole vectors"

    def why_slower(self, problem: Problem, gpu: Gpu) -> str | None:
        matrix, plan = columns_of(problem)
        if plan.splits * matrix.folds > INLINE_PARTIALS:
            return f"each column has more than {INLINE_PARTIALS} partials"
        return _why_columns_slower(problem)

    def kernels(self) -> tuple[Kernel, ...]:
        return self.first, self.second

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        _, plan = columns_of(problem)
        return Launch(self.second, plan.grid, plan.block)

    def run(self, problem: Problem, gpu: Gpu, of: Backward) -> None:
        partials, count = _column_partials(self.first, problem, of)
        given = of.grad_y, of.x, of.weight, of.mean, of.rstd, partials, *of.gradients
        self.launch(problem, gpu)(*given, *columns_of(problem)[0], count, of.wide, *of.gate, T=of.x.dtype)


class NhwcInference(NhwcTwoPassForward):
    """y, by the running statistics."""

    name = "nhwc"
    summary = "blocks share the rows of a tile of channels, or of the pixels of small planes"

    def kernels(self) -> tuple[Kernel, ...]:
        return (self.kernel,)

    def run(self, problem: Problem, gpu: Gpu, of: Forward) -> None:
        matrix, plan = columns_of(problem)
        _normalise(self.kernel, plan, matrix, of)


class NhwcInferenceBackward(NhwcTwoPassBackward):
    """grad_x is grad_y times a factor of its channel: the forward kernel's work, without means and bias."""

    name = "nhwc"
    summary = NhwcInference.summary

    def kernels(self) -> tuple[Kernel, ...]:
        return batch_norm_fwd_nhwc, batch_norm_bwd_nhwc_partials, batch_norm_bwd_finalize

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        kernel = batch_norm_fwd_nhwc if problem.grad_x else batch_norm_bwd_nhwc_partials
        return _launch_columns(kernel, columns_of(problem)[1])

    def run(self, problem: Problem, gpu: Gpu, of: Backward) -> None:
        matrix, plan = columns_of(problem)
        if of.of_parameters:
            _finalize_columns(of, matrix, *_column_partials(self.first, problem, of), None)
        if of.grad_x is not None:
            scaled = of.grad_y, of.weight, None, of.grad_x, None, None, None, of.running_var
            _normalise(batch_norm_fwd_nhwc, plan, matrix, Forward(*scaled, of.wide, 0.0, of.eps))
