"""Convolutions of one tap in front of a normalisation over a batch: products that leave the moments of their columns."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._kernel.kernel import Kernel, ceil_div
from . import gemm, wgmma
from .forms import Form, Forms, Launch
from .gpu import Gpu
from .library import Library

WARPS = 8  # of a block that leave moments of rows of their own
PIECE = 64  # rows that are stored, and measured, at once


class Measured(wgmma.Tile):
    """A tile whose epilogue sums the columns of what it stores; all tiles of a block are of the same columns."""

    def __init__(self, name: str, m: int, n: int, stages: int, cluster: int) -> None:
        super().__init__(
            name, m, n, stages, 2 if n > PIECE else 1, 0.87, cluster, pingpong=True, layouts=((False, False),)
        )
        self.summary += "; and the moments of its columns"

    def made(self) -> Kernel:
        """The kernel."""
        for name in ("SPLIT", "PINGPONG", "LATE"):
            del self.fixed[name]
        return self.kernel_of("conv2d_moments_wgmma.cu", "conv2d_moments_wgmma")

    def why_not(self, problem: gemm.Problem, gpu: Gpu) -> str | None:
        """It measures whole pieces, and has a cluster for each column of tiles."""
        if problem.m % PIECE:
            return f"pixels are no multiple of {PIECE}"
        if ceil_div(problem.n, self.n) > max(1, gpu.multiprocessors // self.cluster):
            return "there are too many filters"
        return super().why_not(problem, gpu)

    def why_slower(self, problem: gemm.Problem, gpu: Gpu) -> str | None:
        return None

    def launch(self, problem: gemm.Problem, gpu: Gpu) -> Launch:
        """As many clusters as run at once, equally many of each column of tiles."""
        of = super().launch(problem, gpu)
        columns = ceil_div(problem.n, self.n)
        clusters = of.grid // self.cluster // columns * columns  # type: ignore[operator]
        parts = clusters // columns * self.cluster * WARPS
        extra = {**of.extra, "parts": parts}
        template = {name: of.template[name] for name in ("T", *self.fixed)}
        return replace(of, grid=clusters * self.cluster, template=template, extra=extra, args=of.args[:3])


TILES = [Measured("wgmma_128x128", 128, 128, 6, 2)]


def run(launch: Launch, x: Tensor, weight: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """y = x weight^T of matrices; the moments of columns, [parts, n, 2], and how many rows each part has."""
    of, parts = launch.extra, launch.extra["parts"]
    moments = torch.empty((parts, y.shape[1], 2), dtype=torch.float32, device=y.device)
    counts = torch.empty(parts, dtype=torch.float32, device=y.device)
    launch(of["a"].map(x), of["b"].map(weight), of["y"].map(y, written=True), moments, counts)
    return moments, counts
