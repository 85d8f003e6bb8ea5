"""The form of group_norm for channels that lie side by side: cuda_src/group_norm_nhwc.cu."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..._kernel.kernel import Kernel, ceil_div
from ..core import column_tiles
from ..core.column_tiles import Columns
from ..core.forms import Launch
from ..core.gpu import Gpu
from ..core.images import spatial
from ..reduce import segments
from .problem import HALF_AND_FLOAT, Backward, Forward, GroupNormForm, Problem, Sums, sums_of

SHORTEST = 512  # elements of a group: of a shorter one the rest that a mean's rounding leaves may count
MOST_IMAGES = 65535  # of a grid
GROUP_WARPS = 4  # of a block between the passes, each of which has a group

DEFINE = {
    "COLUMN_THREADS": column_tiles.THREADS,
    "NHWC_BLOCKS": column_tiles.BLOCKS[True],
    "NHWC_BLOCKS_UNALIGNED": column_tiles.BLOCKS[False],
    "GROUP_WARPS": GROUP_WARPS,
}


def _nhwc(name: str, **domain: Any) -> Kernel:
    return Kernel("group_norm_nhwc.cu", f"{name}<T>" if domain else name, define=DEFINE, **domain)


group_norm_fwd_nhwc_partials = _nhwc("group_norm_fwd_nhwc_partials", T=HALF_AND_FLOAT)
group_norm_fwd_nhwc_finalize = _nhwc("group_norm_fwd_nhwc_finalize")
group_norm_fwd_nhwc = _nhwc("group_norm_fwd_nhwc", T=HALF_AND_FLOAT)
group_norm_bwd_nhwc_partials = _nhwc("group_norm_bwd_nhwc_partials", T=HALF_AND_FLOAT)
group_norm_bwd_nhwc_finalize = _nhwc("group_norm_bwd_nhwc_finalize", T=HALF_AND_FLOAT)
group_norm_bwd_nhwc = _nhwc("group_norm_bwd_nhwc", T=HALF_AND_FLOAT)


def is_served(x: Tensor, num_groups: int) -> bool:
    """Return True if the form takes channels_last images like `x` that begin at 16 bytes."""
    images, channels, pixels = x.shape[0], x.shape[1], spatial(x)
    return (
        x.dtype in HALF_AND_FLOAT
        and segments.is_whole(channels, x.element_size(), True)
        and images <= MOST_IMAGES
        and channels // num_groups * pixels >= SHORTEST
    )


class Nhwc(GroupNormForm):
    """Blocks share the pixels of a tile of channels of an image; what they leave is combined between two passes."""

    name = "nhwc"
    summary = "blocks share the pixels of a tile of channels; two passes"

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        return None if problem.nhwc else "channels do not lie side by side"

    def _launch(self, kernel: Kernel, problem: Problem) -> Launch:
        plan = _plan(problem)
        return Launch(kernel, (*plan.grid, problem.rows // problem.groups), plan.block)


def _plan(problem: Problem) -> Columns:
    images, channels = problem.rows // problem.groups, problem.groups * problem.channels
    return column_tiles.split(problem.pixels, channels, problem.itemsize, True, images)


def _between(kernel: Kernel, problem: Problem) -> Any:
    return kernel[ceil_div(problem.rows, GROUP_WARPS), (32, GROUP_WARPS)]


def _sizes(problem: Problem) -> tuple[int, int, int, int]:
    """Size arguments of the kernels of both passes: pixels, channels, groups, channels of a group."""
    return problem.pixels, problem.groups * problem.channels, problem.groups, problem.channels


class NhwcForward(Nhwc):
    uses = (group_norm_fwd_nhwc_partials, group_norm_fwd_nhwc_finalize, group_norm_fwd_nhwc)

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        return self._launch(group_norm_fwd_nhwc, problem)

    def run(self, problem: Problem, gpu: Gpu, of: Forward) -> None:
        pixels, channels, groups, each = _sizes(problem)
        splits, dtype = _plan(problem).splits, of.x.dtype
        partials = of.rstd.new_empty(problem.rows // groups * splits * channels * 2)
        self._launch(group_norm_fwd_nhwc_partials, problem)(of.x, partials, pixels, channels, T=dtype)
        combine = _between(group_norm_fwd_nhwc_finalize, problem)
        combine(partials, of.mean, of.rstd, problem.rows, groups, each, pixels, splits, of.eps)
        self.launch(problem, gpu)(*of[:6], *_sizes(problem), T=dtype)


class NhwcBackward(Nhwc):
    uses = (group_norm_bwd_nhwc_partials, group_norm_bwd_nhwc_finalize, group_norm_bwd_nhwc)

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        return self._launch(group_norm_bwd_nhwc if problem.grad_x else group_norm_bwd_nhwc_partials, problem)

    def run(self, problem: Problem, gpu: Gpu, of: Backward) -> Sums:
        pixels, _, groups, each = _sizes(problem)
        splits, dtype = _plan(problem).splits, of.x.dtype
        sums, statistics = sums_of(problem, of, splits), (of.mean, of.rstd)
        first = self._launch(group_norm_bwd_nhwc_partials, problem)
        first(of.grad_y, of.x, *statistics, sums.values, *_sizes(problem), T=dtype)
        if of.grad_x is not None:
            common = of.mean.new_empty(problem.rows * 2)
            combine = _between(group_norm_bwd_nhwc_finalize, problem)
            combine(sums.values, of.weight, *statistics, common, problem.rows, groups, each, pixels, splits, T=dtype)
            given = of.grad_y, of.x, of.weight, *statistics, common, of.grad_x
            self.launch(problem, gpu)(*given, *_sizes(problem), T=dtype)
        return sums
