"""Forms of a linear layer with what follows it: an activation and a residual, or a gate.

The epilogue of the product computes that, from sums that were not rounded; of a gate on Hopper alone. Where it is not
measured to be faster, a product of `linear`'s is followed by the kernel of the activation.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..._kernel.kernel import HALF, Kernel
from ..._util.arguments import autocast_dtype
from ..._util.strides import is_dry
from ..core import library
from ..core.forms import Form, Forms, Launch, Library
from ..core.gpu import Gpu, gpu
from ..elementwise.activations import FUNCTIONS
from . import few_rows, gemm, linear, wgmma
from .gemm import Problem
from .wgmma import K, Operand, Operands

# By their names in Python, those of common/elementwise/activations.cuh.
ACTIVATIONS = {"none": "Identity", "relu": "Relu", "gelu": "GeluExact", "gelu_tanh": "GeluTanh", "silu": "Silu"}
GATES = {name: ACTIVATIONS[name] for name in ("silu", "gelu", "gelu_tanh")}
MEASURED = (
    "relu",
    "gelu",
)  # activations of linear_act, without a residual, that were measured beside PyTorch's functions


class Fused(wgmma.Tile):
    """The tile of 128 x 256 with an epilogue that computes what follows; the operands' rows are contiguous along k.

    Args:
        name: of the kernel, and of its file.
        functions: the activations that it has, as values of the dictionary.
        columns: of the result in a tile. Of a gate they are half as many as are multiplied: each block of a cluster fetches
            the tile of one weight for both.
        least: m, n and k, from which on it is measured to be faster than PyTorch's product and a kernel for what follows.
    """

    def __init__(self, name: str, functions: Mapping[str, str], columns: int, least: tuple[int, ...]) -> None:
        self._name, self._functions, self._least = name, tuple(functions.values()), least
        super().__init__("wgmma_128x256", 128, 256, 4, 2, 1.0, cluster=2, late=True, layouts=((False, False),))
        self.columns = columns
        self.summary += ", then what follows"

    def made(self) -> Kernel:
        """The kernel, of all activations."""
        return self.kernel_of(f"{self._name}.cu", self._name, F=self._functions)

    def why_slower(self, problem: Any, gpu: Gpu) -> str | None:
        """Compare measured times with PyTorch's functions, and modelled times with this library's other kernels."""
        p = gemm.gemm_of(problem)
        if gpu.library:
            if self.is_large(p.m, p.n, p.k):
                return None
            return (
                "it is measured to be faster than PyTorch's product and a kernel for what follows in larger ones alone"
            )
        portable = gemm.least_time(p, gpu.multiprocessors)
        return f"mma should take {portable:.1f} us" if portable < self.time(p, gpu) else None

    def is_large(self, *sizes: int) -> bool:
        """Return True if m, n and k are so large that this was measured to be faster than a product and another kernel."""
        return all(map(operator.ge, sizes, self._least))

    def launch(self, problem: Any, gpu: Gpu) -> Launch[Operands]:
        """Launch of the product; `extra` also says where the values that backward reads are stored."""
        p, launch = gemm.gemm_of(problem), super().launch(problem, gpu)
        m, n, k, *_, pitch, group = launch.args
        kept = Operand((self.n // self.columns, p.m, p.n), (0, p.n, 1), (1, K, self.piece), True)
        extra = launch.extra._replace(kept=kept)
        return replace(launch, extra=extra, args=(m, n, k, pitch, group), template={"T": p.dtype, **self.fixed})


class Apart(Form[Problem]):
    """A product, then what follows it."""

    def __init__(self, last: bool) -> None:
        self._last = last

    name = "apart"
    summary = "a product by a form of linear, which PyTorch's is too; then the kernel of the activation"

    def why_slower(self, problem: Problem, gpu: Gpu) -> str | None:
        """It is what PyTorch does, with kernels of ours for what follows."""
        return None if gpu.library or self._last else "an epilogue saves a pass"

    def launch(self, problem: Problem, gpu: Gpu) -> Library:
        """Nothing of its own."""
        return Library(self.name)


class Computed(Fused):
    """Fused form whose epilogue is one line of C and whose kernels are supplied later: see `Launch.by`."""

    def __init__(self, least: int) -> None:
        super().__init__("linear_epilogue_wgmma", {}, 256, ())
        self.work = least

    def made(self) -> Kernel:
        """Return None: the kernels are supplied later."""
        of_any: Any = None
        return of_any

    def kernels(self) -> tuple[Kernel, ...]:
        """Return no kernels, as those that are supplied later are not listed."""
        return ()

    def why_slower(self, problem: Any, gpu: Gpu) -> str | None:
        """Return why cuBLAS and a kernel for what follows are faster, as measured on an H100, or None."""
        p = gemm.gemm_of(problem)
        if not gpu.library:
            return super().why_slower(problem, gpu)
        if p.m * p.n * p.k < self.work:
            return "it is measured to be faster than a product and a kernel for what follows in larger ones alone"
        if p.out.i % 8 or p.k % 8:
            return "a product and a kernel for what follows are as fast for rows off 16-byte boundaries"
        return self._why_cublas(p, gpu)


ACTIVATED = Fused("linear_act_wgmma", ACTIVATIONS, 256, (16384, 3072, 768))
GATED = Fused("gated_linear_wgmma", GATES, 128, (8192, 5632, 2048))
COMPUTED = Computed(16384 * 768 * 3072)

FEW_GATED = few_rows.FewRows(gated=True)

LINEAR_ACT = Forms("linear_act", "product", [few_rows.FewRows(), ACTIVATED, Apart(last=False), *gemm.DENSE])
GATED_LINEAR = Forms("gated_linear", "product", [FEW_GATED, GATED, Apart(last=True)])
LINEAR_EPILOGUE = Forms("linear_epilogue", "product", [COMPUTED, Apart(last=True)])


def is_gate_worth_it(x: Tensor, features: int, activation: str) -> bool:
    """Return True if a gated layer of x runs faster as one operator than as three, of which PyTorch may do the products."""
    rows, k = math.prod(x.shape[:-1]), x.shape[-1]
    if not library.is_wanted(x):
        return True
    if rows <= few_rows.MOST_ROWS:
        return few_rows.is_chosen(rows, features, k, autocast_dtype(x) or x.dtype, gpu(x.device), FEW_GATED)
    if activation != "silu" or not GATED.is_large(rows, features, k):
        return False
    return (autocast_dtype(x) or x.dtype) in HALF and features % 8 == 0 and gpu(x.device).capability == 9


def is_activation_worth_it(x: Tensor, weight: Tensor, activation: str) -> bool:
    """Return True if a layer of rows x runs faster with its activation in one operator than in two."""
    if not library.is_wanted(x):
        return True
    found = linear.problem(x.shape, x.stride(), False, weight.shape, weight.stride(), True, False, x.dtype)
    chosen = LINEAR_ACT.choose(found, gpu(x.device))
    return isinstance(chosen, few_rows.FewRows) or (activation in MEASURED and isinstance(chosen, Fused))


class Plan:
    """Plan by which an epilogue computes a layer of rows `x`."""

    def __init__(self, launch: Launch[Any], x: Tensor, weights: Sequence[Tensor]) -> None:
        self.launch, self.x, self.weights = launch, x, weights

    @property
    def takes_residual(self) -> bool:
        """True if the epilogue adds a residual; on Hopper linear_act's does not, but linear_epilogue's can."""
        return not self.launch.extra

    def run(self, y: Tensor, kept: Tensor | None, activation: str, *more: Tensor | None) -> None:
        """Launch it.

        Args:
            y: the result.
            kept: where what backward reads goes, or None: [m, n], or of a gate [2, m, n] or [m, 2 n].
            activation: by its name in Python.
            *more: of linear_act the bias and the residual.
        """
        launch = self.launch
        if launch.extra:
            return self._by_wgmma(y, kept, ACTIVATIONS[activation], more[:1])
        (weight,), (bias, residual) = self.weights, more
        function = FUNCTIONS.index(ACTIVATIONS[activation])
        gemm.run_dense(launch, self.x, weight, y, bias, residual, function, kept)
        return None

    def compute(self, kernel: Kernel, y: Tensor, kept: Tensor | None, bias: Tensor | None, *more: Any) -> None:
        """Launch the kernel of an epilogue written as a line of C, which takes `more`; `kept` has the shape of y."""
        maps, _ = self._maps(y, kept)
        self.launch.by(kernel)(*maps, y, kept, bias, *more)

    def _by_wgmma(self, y: Tensor, kept: Tensor | None, function: str, more: Sequence[Tensor | None]) -> None:
        maps, strides = self._maps(y, kept)
        self.launch(*maps, y, kept, *strides, *more, F=function)

    def _maps(self, y: Tensor, kept: Tensor | None) -> tuple[list[Any], tuple[int, int]]:
        """The maps of all operands and results; from one row that is kept to the next, and from one part to the other."""
        of: Operands = self.launch.extra
        pitch = self.launch.args[-2]
        assert of.kept is not None
        maps = [of.a.map(self.x), *(of.b.map(weight) for weight in self.weights)]
        stored = maps[0] if pitch else of.y.map(y, written=True)
        if kept is None:
            return [*maps, stored, stored], (0, 0)
        columns = y.shape[-1]
        strides = (columns, y.numel()) if kept.shape[-1] == columns else (2 * columns, columns)
        place = of.kept._replace(strides=(strides[1], strides[0], 1))
        return [*maps, stored, stored if pitch else place.map(kept, written=True)], strides


class FewRowsPlan(Plan):
    """Plan by which the kernel of few rows computes a layer, with all that follows the product."""

    @property
    def takes_residual(self) -> bool:
        """True: what follows is computed from one sum by one thread."""
        return True

    def run(self, y: Tensor, kept: Tensor | None, activation: str, *more: Tensor | None) -> None:
        """Launch it, as any plan."""
        bias, residual = more or (None, None)
        function = FUNCTIONS.index(ACTIVATIONS[activation])
        few_rows.run(self.launch, self.x, self.weights, [bias], [y], residual, function, kept)


def fused(
    forms: Forms[Any], x: Tensor, weights: Sequence[Tensor], turn: bool = True, measured: bool = True
) -> Plan | None:
    """Plan a layer of rows `x` with its epilogue in one launch; None where the product runs separately.

    Args:
        forms: of this module.
        x: a matrix.
        weights: one, or two that lie alike.
        turn: x weight^T is multiplied, else x weight.
        measured: whether what follows is one of those that were measured, beside PyTorch's.
    """
    if is_dry(x):
        return None
    weight = weights[0]
    problem = linear.problem(x.shape, x.stride(), False, weight.shape, weight.stride(), turn, False, x.dtype)
    launch = forms.plan(problem, gpu(x.device))
    if isinstance(launch, Library):
        return None
    if few_rows.serves(launch):
        return FewRowsPlan(
            launch, few_rows.whole(x), [few_rows.whole(weight if turn else weight.T) for weight in weights]
        )
    if not measured and library.is_wanted(x):
        return None
    if launch.extra:
        return Plan(launch, few_rows.whole(x), [few_rows.whole(weight) for weight in weights])
    if copies := gemm.prepared(problem, launch, x, weight.T if turn else weight):
        return fused(forms, copies[0], copies[1:], turn=False, measured=measured)
    return Plan(launch, x, weights)


def rows_and_columns(captured: Tensor, shape: Sequence[int]) -> tuple[int, int] | None:
    """The strides of a tensor that broadcasts to `shape`, seen as a matrix; None where its rows are not one stride apart."""
    strides = [0 if own == 1 else step for own, step in zip(captured.shape, captured.stride())]
    strides = [0] * (len(shape) - len(strides)) + strides
    row, rows = 0, 1
    for size, stride in zip(reversed(shape[:-1]), reversed(strides[:-1])):
        if size == 1:
            continue
        if rows == 1:
            row = stride
        elif stride != row * rows:
            return None
        rows *= size
    return row, strides[-1]
