"""Products that are added to a matrix, as the gradient of a tensor to what another of its readers has given."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from .._kernel.kernel import Kernel
from . import gemm, wgmma
from .forms import Launch
from .gpu import Gpu


class Added(wgmma.Tile):
    """A tile to whose slots TMA brings what is added, while the tile before is multiplied."""

    def __init__(self, name: str, m: int, n: int, stages: int, slots: int, cluster: int) -> None:
        super().__init__(name, m, n, stages, slots, 0.87, cluster, pingpong=True, layouts=((False, True),))
        self.summary += "; and what is added"

    def made(self) -> Kernel:
        """The kernel."""
        for name in ("SPLIT", "PINGPONG", "LATE"):
            del self.fixed[name]
        return self.kernel_of("gemm_add_wgmma.cu", "gemm_add_wgmma", B_MN=(True,))

    @property
    def shared(self) -> int:
        """Two barriers more."""
        return super().shared + 16

    def launch(self, problem: gemm.Problem, gpu: Gpu) -> Launch:
        of = super().launch(problem, gpu)
        template = {name: of.template[name] for name in ("T", *self.fixed, "B_MN")}
        return replace(of, template=template, args=(*of.args[:3], of.args[-1]))


TILES = [Added("wgmma_128x128", 128, 128, 5, 4, 2)]


def run(launch: Launch, a: Tensor, b: Tensor, c: Tensor, y: Tensor) -> None:
    """y = a b + c."""
    of = launch.extra
    launch(of["a"].map(a), of["b"].map(b), of["y"].map(c), of["y"].map(y, written=True))
