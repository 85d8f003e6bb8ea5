"""Losses of a linear layer whose outputs are in no memory: the product's epilogue keeps a few numbers of a row and tile.

It serves where no gradient is wanted: for that the logits would have to be computed again.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._kernel.kernel import Kernel, ceil_div
from ..._util.strides import aligned
from ..core.forms import Form, Forms, Launch, Library
from ..core.gpu import Gpu, gpu
from ..gemm import gemm, linear, wgmma
from ..gemm.wgmma import Operands
from . import losses

linear_cross_entropy_parts = Kernel("fused_linear_cross_entropy.cu", "linear_cross_entropy_parts", define=losses.DEFINE)

ROWS = 32  # of a block that adds what tiles have left
TILE_BYTES = 12  # of a row of a tile: maximum, sum of exponentials, sum


class Problem(NamedTuple):
    """A product whose rows become losses."""

    gemm: gemm.Problem
    weighted: bool  # with weights of the classes and label smoothing at once


class Parts(wgmma.Tile):
    """The tile of 128 x 256, whose epilogue leaves of each row the maximum, the sum of exponentials and the sum."""

    measured = "1.05 to 1.4 times as fast as with logits in memory, of which it needs a seventh or less, on an H100"

    def __init__(self) -> None:
        super().__init__("wgmma_128x256", 128, 256, 4, 1, 1.0, cluster=2, late=True, layouts=((False, False),))
        self.summary += ", which leaves of a row the maximum, the sum of exponentials and the sum"

    def made(self) -> Kernel:
        """The kernel."""
        for name in ("PINGPONG", "LATE"):
            del self.fixed[name]
        return self.kernel_of("fused_linear_cross_entropy_wgmma.cu", "linear_cross_entropy_wgmma")

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        """It takes half types whose rows are whole vectors, on Hopper alone."""
        if problem.weighted:
            return "it adds up logits without weights of their classes"
        return super().why_not(problem, gpu)

    def why_slower(self, problem: Problem, gpu: Gpu) -> str | None:
        """Compare with PyTorch's products and a kernel for what they leave."""
        full = self.full(problem.gemm, gpu)
        return f"{full:.0%} of the multiprocessors have work" if full < wgmma.FULL else None

    def launch(self, problem: Problem, gpu: Gpu) -> Launch[Operands]:
        """Launch of the product; `step` is the number of rows to launch it for at a time."""
        of = super().launch(problem, gpu)
        m, n, k, *_, group = of.args
        each = ceil_div(n, self.n) * TILE_BYTES
        step = min(m, max(gpu.scratch // each // self.m, 1) * self.m)
        return Launch(
            self.kernel, of.grid, of.block, of.shared, {"T": problem.gemm.dtype, **self.fixed}, of.cluster,
            extra=of.extra._replace(step=step), args=(n, k, group),
        )  # fmt: skip


class Logits(Form[Problem]):
    """The logits in memory, a chunk at a time."""

    name = "logits"
    summary = "PyTorch's product, a chunk of rows at a time; then a kernel that reads the logits"

    def launch(self, problem: Problem, gpu: Gpu) -> Library:
        """Nothing of its own."""
        return Library(self.name)


LOSSES: Forms[Problem] = Forms("fused_linear_cross_entropy", "losses", (Parts(), Logits()))


def compute(given: Any, each: Tensor) -> bool:
    """The loss of each row; False where no kernel does that without the logits."""
    x, weight = given.x, given.weight
    product = linear.problem(x.shape, x.stride(), False, weight.shape, weight.stride(), True, False, x.dtype)
    weighted = given.class_weight is not None and given.label_smoothing > 0
    launch = LOSSES.plan(Problem(product, weighted), gpu(x.device))
    if isinstance(launch, Library):
        return False
    x, weight = (t if aligned(t) else gemm.padded(t) for t in (x, weight))
    of: Operands = launch.extra
    (rows, _), classes, step = x.shape, weight.shape[0], of.step
    tiles = ceil_div(classes, launch.template["N"])
    sums = torch.empty((tiles, step, 2), dtype=each.dtype, device=x.device)
    totals = torch.empty((tiles, step), dtype=each.dtype, device=x.device) if given.label_smoothing > 0 else None
    picked, options = torch.empty(step, dtype=each.dtype, device=x.device), given.options(0)
    map_of_weight = of.b.map(weight)
    for first in range(0, rows, step):
        some, target = x[first : first + step], given.target[first : first + step]
        launch(
            of.a._replace(sizes=(1, *some.shape)).map(some),
            map_of_weight,
            given.bias,
            target,
            sums,
            totals,
            picked,
            some.shape[0],
        )
        add = linear_cross_entropy_parts[ceil_div(some.shape[0], ROWS), (ROWS, 8)]
        where = first, some.shape[0], tiles
        add(given.target, given.class_weight, sums, totals, picked, each, *where, options)
    return True
