"""The forms of cross_entropy, and their launches.

Forward may write the gradient too, for a grad_y of 1, while it has a row: the forms `registers` and `persistent`.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._kernel.kernel import FLOATING, Kernel, ceil_div
from ..._util.strides import is_dry
from ..core import persistent
from ..core.forms import Form, Forms, Launch
from ..core.gpu import Gpu, gpu
from ..core.rows import is_symbolic, packs_of, power_of_two
from . import losses
from .losses import SINGLE

FILE = "cross_entropy.cu"
HALF = (torch.float16, torch.bfloat16)
FEW_VECTORS, VECTORS = 2, 4  # of a row that a thread has in registers
BLOCK = 256
DEFINE = {**losses.DEFINE, "STRIDED_THREADS": BLOCK, "FEW_VECTORS": FEW_VECTORS}

_FEW_THREADS = 4  # of a row, at least: neighbours then read 64 bytes at once
_FEW_CLASSES = 16  # up to here a thread takes a row
_REGISTER_BYTES = 1 << 14  # of a row, up to which registers are faster than shared memory
_WARP_CLASSES = 1024  # up to here a warp takes a row, and from there on a block
_SEGMENT = 16384  # columns of a row that one block of backward owns
_CHUNK = 64  # classes that one thread of backward owns where classes do not lie side by side
_MOST_BLOCKS = 4096  # of forward, whose partial sums one block then adds
_BLOCKS = 32  # of forward for each multiprocessor
_WEIGHT_BLOCKS = 32  # of the sum over the weights of the targets, whose partial sums a warp adds
_TARGETS = 4096  # that are worth a block of it
_FEW_TARGETS = 1 << 14  # up to here each block of `persistent` adds their weights itself
_LOOKING_BLOCKS = 1024  # of a backward that mostly finds its work done


class Given(NamedTuple):
    """Arguments of both directions, as the kernels read them: a target of classes, or one of probabilities."""

    x: Tensor
    target: Tensor | None
    probabilities: Tensor | None
    weight: Tensor | None
    ignore_index: int
    reduction: int
    label_smoothing: float
    wide: bool = False  # the loss and its gradient are fp32, of logits of half types

    def problem(self, gradient: bool) -> Problem:
        """Problem by which a form is chosen; `gradient`: see `Problem`."""
        soft = self.probabilities is not None or self.label_smoothing > 0
        positions, classes = math.prod(losses.positions(self.x)), losses.classes(self.x)
        return Problem(positions, classes, losses.inner(self.x), self.x.dtype, soft, self.reduction, gradient)


class Problem(NamedTuple):
    """Sizes and flags by which a form is chosen. `soft`: smoothing or probabilities; `gradient`: it is wanted or written."""

    positions: int
    classes: int
    inner: int
    dtype: torch.dtype
    soft: bool
    reduction: int
    gradient: bool


class _LossForm(Form[Problem]):
    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        if problem.inner > 1:
            return "the classes of a position do not lie side by side"
        if problem.dtype is torch.float64:
            return "fp64 has one kernel, strided"
        return None

    def why_slower(self, problem: Problem, gpu: Gpu) -> str | None:
        return "a thread takes a row of so few classes" if problem.classes <= _FEW_CLASSES else None


class _WritesGradient(_LossForm):
    """Forward with the gradient."""

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        if not problem.gradient:
            return "forward does not know that a gradient is wanted"
        if problem.soft:
            return "the target is not the class alone"
        return super().why_not(problem, gpu) if problem.positions else "there is no position"


class Registers(_WritesGradient):
    name = "registers"
    summary = "4 lanes to a block have a row in registers, and write its gradient too"

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        if packs_of(problem.classes, problem.dtype.itemsize) > 1024 * VECTORS:
            return "a row is too long for the registers of a block"
        return super().why_not(problem, gpu)

    def why_slower(self, problem: Problem, gpu: Gpu) -> str | None:
        if problem.classes * problem.dtype.itemsize > _REGISTER_BYTES:
            return "so few long rows are in registers that loads and stores do not overlap"
        return super().why_slower(problem, gpu)

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        threads, rows, vectors = self._block(problem)
        grid = min(ceil_div(problem.positions, rows), _most_blocks(gpu))
        return Launch(self.kernel, grid, (threads, rows), template={"T": problem.dtype, "K": vectors})

    def _block(self, problem: Problem) -> tuple[int, int, int]:
        """Threads of a row, rows of a block, vectors of a thread."""
        vectors = packs_of(problem.classes, problem.dtype.itemsize)
        if vectors > 32 * VECTORS:
            return ceil_div(vectors, VECTORS * 32) * 32, 1, VECTORS
        if vectors <= _FEW_THREADS * FEW_VECTORS and problem.dtype in HALF:
            return _FEW_THREADS, BLOCK // _FEW_THREADS, FEW_VECTORS
        threads = max(power_of_two(ceil_div(vectors, VECTORS)), _FEW_THREADS)
        return threads, BLOCK // threads, VECTORS


class Persistent(_WritesGradient):
    name = "persistent"
    summary = "a block or a cluster keeps a row in shared memory, and writes its gradient too"

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        if reason := super().why_not(problem, gpu):
            return reason
        return None if self._plan(problem, gpu) else "the shared memory of a block, or of a cluster, holds no row"

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        plan = self._plan(problem, gpu)
        assert plan is not None
        return plan.launch(self.kernel, problem.positions, T=problem.dtype)

    def _plan(self, problem: Problem, gpu: Gpu) -> persistent.Plan | None:
        threads = losses.persistent_threads(problem.dtype)
        return persistent.plan(problem.classes, problem.dtype.itemsize, 1, gpu, threads)


def _row_block(classes: int) -> tuple[int, int]:
    """(threads of a row, rows of a block)."""
    return (32, BLOCK // 32) if classes <= _WARP_CLASSES else (BLOCK, 1)


class TwoPass(_LossForm):
    name = "two_pass"
    summary = "a warp or a block takes a row: forward reads it, and backward reads it again"

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        block = _row_block(problem.classes)
        grid = losses.blocks(problem.positions, block[1], _most_blocks(gpu), problem.reduction)
        return Launch(self.kernel, grid, block, template={"T": problem.dtype, "SOFT": problem.soft})


class TwoPassBackward(TwoPass):
    summary = "a warp or a block takes a row, or a segment of one"

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        block, segments = _row_block(problem.classes), ceil_div(problem.classes, _SEGMENT)
        grid = ceil_div(problem.positions, block[1]) * segments
        if problem.gradient:
            grid = min(grid, _LOOKING_BLOCKS)
        template = {"T": problem.dtype, "SOFT": problem.soft}
        return Launch(self.kernel, grid, block, template=template, named={"segments": segments})


class Strided(_LossForm):
    name = "strided"
    summary = "a thread, or several slices, takes a position, and neighbouring threads neighbouring positions"

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        return None

    def why_slower(self, problem: Problem, gpu: Gpu) -> str | None:
        return None

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        neighbours = BLOCK if problem.classes <= _CHUNK else self._neighbours(problem)
        block = neighbours, BLOCK // neighbours
        grid = losses.blocks(problem.positions, neighbours, _most_blocks(gpu), problem.reduction)
        return Launch(self.kernel, grid, block, template={"T": problem.dtype}, named={"inner": problem.inner})

    def _neighbours(self, problem: Problem) -> int:
        """Positions of a block, whose other threads are slices: few where the classes of a position lie side by side."""
        return min(32 if problem.inner > 1 else 4, power_of_two(problem.positions))


class StridedBackward(Strided):
    summary = "a thread takes some classes of a position, and neighbouring threads neighbouring positions"

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        chunks, block = ceil_div(problem.classes, _CHUNK), min(BLOCK, max(32, power_of_two(problem.positions)))
        grid = ceil_div(problem.positions, block) * chunks
        named = {"inner": problem.inner, "chunks": chunks}
        return Launch(self.kernel, grid, block, template={"T": problem.dtype}, named=named)


def _most_blocks(gpu: Gpu) -> int:
    return min(_MOST_BLOCKS, _BLOCKS * gpu.multiprocessors)


def _kernel(name: str, **domain: Any) -> Kernel:
    return Kernel(FILE, f"cross_entropy_{name}", define=DEFINE, **domain)


_SOFT = {"T": SINGLE, "SOFT": (False, True)}
FORWARD = Forms(
    "cross_entropy",
    "forward",
    (
        Registers(
            _kernel(
                "fwd_registers<T, K>",
                T=SINGLE,
                K=(FEW_VECTORS, VECTORS),
                where=lambda T, K: K == VECTORS or T in HALF,
            )
        ),
        Persistent(_kernel("fwd_persistent<T, THREADS, BLOCKS, OWN>", **losses.persistent_domain())),
        TwoPass(_kernel("fwd_two_pass<T, SOFT>", **_SOFT)),
        Strided(_kernel("fwd_strided<T>", T=FLOATING)),
    ),
)
BACKWARD = Forms(
    "cross_entropy",
    "backward",
    (
        TwoPassBackward(_kernel("bwd_two_pass<T, SOFT>", **_SOFT)),
        StridedBackward(_kernel("bwd_strided<T>", T=FLOATING)),
    ),
)
fwd_weight = _kernel("fwd_weight<T>", T=SINGLE)


def forward(given: Given, gradient: bool = False) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss, and what backward needs: stats, the sum of the weights, and where it is known that a gradient is wanted
    perhaps that gradient, for a grad_y of 1."""
    x, chosen = given.x, given.reduction
    problem = given.problem(gradient and not is_symbolic(*x.shape))
    dtype = torch.float32 if given.wide else x.dtype
    y = torch.empty(losses.positions(x) if chosen == 0 else (), dtype=dtype, device=x.device)
    partials, total_weight = losses.buffer_for_sums(x, chosen, _MOST_BLOCKS)
    stats = torch.empty((3 if problem.soft else 2, problem.positions), dtype=partials.dtype, device=x.device)
    if is_symbolic(*x.shape):
        return y, (stats, total_weight)
    of = gpu(x.device)
    form = FORWARD.choose(problem, of)
    writes = isinstance(form, _WritesGradient)
    grad_x = torch.empty_like(x) if writes else None
    saved = (stats, total_weight) if grad_x is None else (stats, total_weight, grad_x)
    if is_dry(x):
        return y, saved
    launch = form.launch(problem, of)
    assert isinstance(launch, Launch)
    outputs, sizes = (y, stats, partials, total_weight), (problem.positions, problem.classes)
    options = {"ignore_index": given.ignore_index, "reduction": chosen, "wide": given.wide}
    if grad_x is None:
        launch(*given[:4], *outputs, *sizes, label_smoothing=given.label_smoothing, **options)
    else:
        counts, counted = _weights(given, problem, isinstance(form, Persistent))
        tensors = x, given.target, given.weight, *outputs, counts, grad_x
        launch(*tensors, *sizes, counted=counted, **options)
    groups = launch.grid // (launch.cluster or 1)  # type: ignore[operator]
    losses.finalize(partials, y, total_weight, groups, chosen)
    return y, saved


def _weights(given: Given, problem: Problem, adds_few: bool) -> tuple[Tensor, int]:
    """Sum the weights of the targets, for the mean: (sums, their number); no sums where the form adds few weights itself."""
    x, counted = given.x, 0
    counts = torch.empty(_WEIGHT_BLOCKS, dtype=losses.accumulator(x.dtype), device=x.device)
    if given.reduction == losses.REDUCTIONS["mean"] and not (adds_few and problem.positions <= _FEW_TARGETS):
        counted = min(ceil_div(problem.positions, _TARGETS), _WEIGHT_BLOCKS)
    sizes = problem.positions, problem.classes, given.ignore_index
    fwd_weight[counted, losses.SUM_BLOCK](given.target, given.weight, counts, *sizes, T=x.dtype)
    return counts, counted


def backward(
    given: Given,
    saved: tuple[Tensor, ...],
    grad_y: Tensor,
    grad_x: Tensor | None,
    grad_probabilities: Tensor | None = None,
    written: bool = False,
) -> None:
    """Write the gradients that are wanted; with `written` grad_x has that for a grad_y of 1 already."""
    x = given.x
    if is_dry(x):
        return
    problem = given.problem(written)
    form = BACKWARD.choose(problem, gpu(x.device))
    launch = form.launch(problem, gpu(x.device))
    assert isinstance(launch, Launch)
    tensors = grad_y, *given[:4], *saved, grad_x, grad_probabilities
    options = {"ignore_index": given.ignore_index, "reduction": given.reduction, "wide": given.wide}
    if isinstance(form, TwoPass):
        options["written"] = written
    launch(*tensors, problem.positions, problem.classes, label_smoothing=given.label_smoothing, **options)
