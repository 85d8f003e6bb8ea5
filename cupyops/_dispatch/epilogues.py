"""Forms of a linear layer with what follows it: an activation and a residual, or a gate (cuda_src/*_linear_wgmma.cu).

On Hopper the epilogue of the product computes it, from sums that were not rounded. Else, and where that is not measured to be
faster, a product of `linear`'s is followed by the kernel of the activation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from .._kernel.kernel import Kernel
from .._util.strides import aligned, is_dry
from . import gemm, linear, wgmma
from .forms import Form, Forms, Launch
from .gemm import HALF, Problem
from .gpu import Gpu, gpu
from .wgmma import K, Operand

# By their names in Python, those of common/elementwise/activations.cuh.
ACTIVATIONS = {"none": "Identity", "relu": "Relu", "gelu": "GeluExact", "gelu_tanh": "GeluTanh", "silu": "Silu"}
GATES = {name: ACTIVATIONS[name] for name in ("silu", "gelu", "gelu_tanh")}


class Fused(wgmma.Tile):
    """A tile of wgmma's whose epilogue computes what follows; the operands' rows are contiguous along k.

    Args:
        name, m, n, stages, slots, share, **how: see `wgmma.Tile`.
        kernel: the kernel, in a file of its name.
        functions: the activations that it has.
        columns: of the result in a tile.
    """

    def __init__(
        self,
        name: str,
        m: int,
        n: int,
        stages: int,
        slots: int,
        share: float,
        kernel: str,
        functions: Sequence[str],
        columns: int,
        **how: Any,
    ) -> None:
        self._name, self._functions = kernel, tuple(functions)
        super().__init__(name, m, n, stages, slots, share, layouts=((False, False),), **how)
        self.columns = columns
        self.summary += ", then what follows"

    def made(self) -> Kernel:
        """The kernel, of all activations."""
        del self.fixed["SPLIT"]
        return Kernel(
            f"{self._name}.cu",
            f"{self._name}<T, F, {', '.join(self.fixed)}>",
            arch="sm_90a",
            T=HALF,
            F=self._functions,
            **{name: (value,) for name, value in self.fixed.items()},
        )

    def why_slower(self, problem: Any, gpu: Gpu) -> str | None:
        """Not measured; beside the kernels of this library a model of the time chooses."""
        if gpu.library:
            return "no epilogue is measured to be faster than PyTorch's product and a kernel for what follows"
        p = gemm.gemm_of(problem)
        others = [form for form in self.siblings if form.why_not(p, gpu) is None]
        if min(form.time(p, gpu) for form in others) < self.time(p, gpu):
            return "another tile should take less time"
        apart = gemm.least_time(p, gpu.multiprocessors)
        return f"the product by itself should take {apart:.1f} us" if apart < self.time(p, gpu) else None

    @property
    def siblings(self) -> Sequence[Fused]:
        """The forms of its list that are fused."""
        return ACTIVATED if self._name == "linear_act_wgmma" else GATED

    def launch(self, problem: Any, gpu: Gpu) -> Launch:
        """As of a product; and where what backward reads is kept."""
        p, launch = gemm.gemm_of(problem), super().launch(problem, gpu)
        m, n, k, *_, pitch, group = launch.args
        parts = self.n // self.columns
        kept = Operand((parts, p.m, p.n), (p.n, parts * p.n, 1), (1, K, self.piece), True)
        extra = {**launch.extra, "kept": kept}
        return replace(launch, extra=extra, args=(m, n, k, pitch, group), template={"T": p.dtype, **self.fixed})


class Apart(Form[Problem]):
    """A product, then what follows it."""

    name = "apart"
    summary = "a product by a form of linear, which PyTorch's is too; then the kernel of the activation"

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        """Nothing of its own."""
        return Launch(None, 0, 0)  # type: ignore[arg-type]


def _activated(name: str, m: int, n: int, stages: int, slots: int, share: float, **how: Any) -> Fused:
    return Fused(name, m, n, stages, slots, share, "linear_act_wgmma", [*ACTIVATIONS.values()], n, **how)


ACTIVATED = [
    _activated("wgmma_128x256", 128, 256, 4, 2, 1.0, cluster=2, late=True),
    _activated("wgmma_128x128", 128, 128, 6, 2, 0.87, cluster=2, pingpong=True),
]
# a block of a cluster fetches the tile of one weight for both
_WIDE = dict(kernel="gated_linear_wgmma", functions=[*GATES.values()], columns=128, cluster=2, late=True)
GATED = [Fused("wgmma_128x256", 128, 256, 4, 2, 1.0, **_WIDE)]  # type: ignore[arg-type]

LINEAR_ACT = Forms("linear_act", "product", [*ACTIVATED, Apart()])
GATED_LINEAR = Forms("gated_linear", "product", [*GATED, Apart()])


def fused(forms: Forms[Any], x: Tensor, weights: Sequence[Tensor]) -> Callable[..., None] | None:
    """What computes a layer of rows `x` at once; None where the product is apart.

    It takes (y, kept, F, *more): where backward's tensor goes, or None; the activation's name in CUDA; bias and residual.
    """
    if is_dry(x):
        return None
    weight = weights[0]
    if any(one.stride() != weight.stride() for one in weights):
        return None
    problem = linear.problem(x.shape, x.stride(), False, weight.shape, weight.stride(), True, False, x.dtype)
    launch = forms.launch(problem, gpu(x.device))
    if launch.kernel is None:
        return None

    def run(y: Tensor, kept: Tensor | None, function: str, *more: Tensor | None) -> None:
        of, pitch = launch.extra, launch.args[-2]
        maps = [of["a"].map(_whole(x)), *(of["b"].map(_whole(weight)) for weight in weights)]
        stored = maps[0] if pitch else of["y"].map(y, written=True)
        also = stored if pitch or kept is None else of["kept"].map(kept, written=True)
        launch(*maps, stored, also, y, kept, *more, F=function)

    return run


def _whole(matrix: Tensor) -> Tensor:
    """As TMA reads it: its rows begin at whole vectors."""
    return matrix if aligned(matrix) else gemm.padded(matrix)
