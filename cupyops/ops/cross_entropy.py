"""cross_entropy: log_softmax and nll_loss in one pass, for targets that are classes or probabilities."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import check
from ..common import clusters, held, losses
from ..common.rows import is_symbolic, packs_of
from ..kernel import FLOATING, Kernel, ceil_div
from ..operator import operator

MODES = CLASS, SMOOTHED, PROBABILITIES = 0, 1, 2
FEW_PACKS, PACKS = 2, 4  # of 16 bytes, that a thread holds in registers of a row
cross_entropy_fwd = Kernel("cross_entropy.cu", "cross_entropy_fwd<T, MODE>", T=FLOATING, MODE=MODES)
cross_entropy_fwd_inner = Kernel("cross_entropy.cu", "cross_entropy_fwd_inner<T, MODE>", T=FLOATING, MODE=MODES)
cross_entropy_fwd_weight = Kernel("cross_entropy.cu", "cross_entropy_fwd_weight<T>", T=FLOATING)
cross_entropy_fwd_grad = Kernel(
    "cross_entropy.cu",
    "cross_entropy_fwd_grad<T, K>",
    T=FLOATING,
    K=(FEW_PACKS, PACKS),
    where=lambda T, K: K == PACKS or T.itemsize < 8,  # a row of so few packs of float64 is a thread's
)
cross_entropy_fwd_held = Kernel(
    "cross_entropy.cu", "cross_entropy_fwd_held<T, THREADS>", T=FLOATING, THREADS=held.THREADS
)
cross_entropy_fwd_sum = Kernel("cross_entropy.cu", "cross_entropy_fwd_sum<T>", T=FLOATING)
cross_entropy_bwd = Kernel("cross_entropy.cu", "cross_entropy_bwd<T, MODE>", T=FLOATING, MODE=MODES)
cross_entropy_bwd_inner = Kernel("cross_entropy.cu", "cross_entropy_bwd_inner<T, MODE>", T=FLOATING, MODE=MODES)

BLOCK = 256
FEW_THREADS = 4  # of a row, at least: neighbours then read 64 bytes at once
FEW_CLASSES = 16  # up to here a row is worth one thread
IN_REGISTERS = 1 << 14  # bytes of a row, up to which forward holds it there
WARP_CLASSES = 1024  # up to here a row is worth a warp, then a block
SEGMENT = 16384  # columns of a row that one block of the backward owns
CHUNK = 64  # classes that one thread of the backward owns where classes do not lie side by side
MAX_BLOCKS = 4096  # of a sum over the batch; a block then adds their parts
WEIGHT_BLOCKS = 32  # of the sum over the weights of the targets, whose parts a warp adds
TARGETS = 4096  # that are worth a block of it
FEW_TARGETS = 1 << 14  # up to here each block of the forward counts them
LOOKING_BLOCKS = 1024  # of a backward that mostly finds its work done
SUM_BLOCK = 1024


class Given(NamedTuple):
    """What both directions get, as the kernels read it."""

    mode: int
    x: Tensor
    target: Tensor | None
    probabilities: Tensor | None
    weight: Tensor | None
    ignore_index: int
    reduction: int
    label_smoothing: float


# --- targets are classes ---


@operator("cupyops::cross_entropy", autocast="fp32_everywhere")
def _cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float
) -> Tensor:
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    return losses.reference(F.cross_entropy, x, target, weight, reduction, **options)


@_cross_entropy.forward
def _(x, target, weight, ignore_index, reduction, label_smoothing, needs_grad=None):
    given = _of_classes(x, target, weight, ignore_index, reduction, label_smoothing)
    block = _held(given) if needs_grad is not None and needs_grad.x else None
    return _forward(given) if block is None else _forward_with_grad(given, block)


@_cross_entropy.backward
def _(saved, grad_y, x, target, weight, ignore_index, reduction, label_smoothing, last):
    given = _of_classes(x, target, weight, ignore_index, reduction, label_smoothing)
    written = last and len(saved) > 2  # while the graph is kept, so is what forward has written
    grad_x = saved[2] if written else torch.empty_like(given.x)
    _backward(given, saved[:2], grad_y, grad_x, None, written)
    return grad_x


@_cross_entropy.unsupported
def _(x, target, weight, ignore_index, reduction, label_smoothing):
    return losses.no_classes(x)


def _of_classes(x, target, weight, ignore_index, reduction, label_smoothing) -> Given:
    mode = SMOOTHED if label_smoothing > 0 else CLASS
    x, target, weight = losses.dense(x), target.contiguous(), losses.contiguous(weight)
    return Given(mode, x, target, None, weight, ignore_index, losses.REDUCTIONS[reduction], label_smoothing)


# --- targets are probabilities ---


@operator("cupyops::cross_entropy_probabilities", autocast="fp32_everywhere")
def _cross_entropy_probabilities(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: str, label_smoothing: float
) -> Tensor:
    return F.cross_entropy(x, target, weight, reduction=reduction, label_smoothing=label_smoothing)


@_cross_entropy_probabilities.forward
def _(x, target, weight, reduction, label_smoothing):
    return _forward(_of_probabilities(x, target, weight, reduction, label_smoothing))


@_cross_entropy_probabilities.backward
def _(saved, grad_y, x, target, weight, reduction, label_smoothing, needs_grad):
    given = _of_probabilities(x, target, weight, reduction, label_smoothing)
    grad_x, grad_target = (torch.empty_like(given.x) if need else None for need in (needs_grad.x, needs_grad.target))
    _backward(given, saved, grad_y, grad_x, grad_target)
    return grad_x, grad_target


@_cross_entropy_probabilities.unsupported
def _(x, target, weight, reduction, label_smoothing):
    return losses.no_classes(x)


def _of_probabilities(x, target, weight, reduction, label_smoothing) -> Given:
    x, weight = losses.dense(x), losses.contiguous(weight)
    probabilities = losses.laid_out_as(x, target)
    return Given(PROBABILITIES, x, None, probabilities, weight, -100, losses.REDUCTIONS[reduction], label_smoothing)


# --- the public function ---


@_cross_entropy.interface
def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross-entropy between logits and a target; as `torch.nn.functional.cross_entropy`.

    Args:
        input: logits, (C), (N, C) or (N, C, d1, ...); kernels serve fp16, bf16, fp32 and fp64.
        target: classes in [0, C), integers of shape (), (N) or (N, d1, ...); or probabilities of the shape of `input`,
            floating-point, which get a gradient too.
        weight: of each class, (C), of the dtype of `input`.
        size_average: deprecated, see `reduction`.
        ignore_index: a class target of this value adds nothing to the loss, nor to its gradient.
        reduce: deprecated, see `reduction`.
        reduction: "none", "sum", or "mean": over the weights of the class targets (NaN where there are none), or over the
            positions where targets are probabilities.
        label_smoothing: in [0, 1]; how much of the target is spread evenly over the classes.

    Returns:
        Tensor of shape () in the dtype of `input`; with "none" of the shape of `input` without C.

    Raises:
        InputError: shapes do not match, `weight` has not C elements, `reduction` is unknown, `label_smoothing` is outside
            [0, 1] or, on the CPU, a class out of range. On a GPU such a class prints itself and stops the kernel.

    Example:
        >>> cupyops.cross_entropy(torch.tensor([[0.0, 0.0], [0.0, 0.0]]), torch.tensor([0, 1]))
        tensor(0.6931)
    """
    reduction = losses.chosen_reduction(size_average, reduce, reduction)
    _check(input, target, ignore_index, label_smoothing)
    label_smoothing = float(label_smoothing)
    if not target.dtype.is_floating_point:
        if weight is not None:
            losses.check_class_weight(input, weight)
        return _cross_entropy(input, target.long(), weight, ignore_index, reduction, label_smoothing)
    losses.check_weight(input, weight)
    if weight is not None and weight.requires_grad:  # PyTorch has this gradient; the kernels do not
        return F.cross_entropy(input, target, weight, reduction=reduction, label_smoothing=label_smoothing)
    return _cross_entropy_probabilities(input, target, weight, reduction, label_smoothing)


def _check(input: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> None:
    losses.check_input(input, target, ignore_index)
    if not isinstance(label_smoothing, (int, float)) or not 0 <= label_smoothing <= 1:
        check.fail("label_smoothing", label_smoothing, "a number in [0, 1]")
    if target.dtype.is_complex or target.dtype is torch.bool:
        check.fail("target", target, "a tensor of integers (classes) or of a floating-point dtype (probabilities)")
    if not target.dtype.is_floating_point:
        losses.check_target(input, target, losses.positions(input), "classes")
        return
    losses.check_target(input, target, tuple(input.shape), "probabilities")
    if ignore_index >= 0:
        check.fail("ignore_index", ignore_index, "none: a target of probabilities has no class to ignore")


# --- launches ---


def _forward(given: Given) -> tuple[Tensor, tuple[Tensor, ...]]:
    x, chosen = given.x, given.reduction
    classes, inner, shape = losses.classes(x), losses.inner(x), losses.positions(x)
    positions = math.prod(shape)
    y = torch.empty(shape if chosen == 0 else (), dtype=x.dtype, device=x.device)
    parts, total_weight = losses.room_for_sums(x, chosen, MAX_BLOCKS)
    stats = torch.empty((2 if given.mode == CLASS else 3, positions), dtype=parts.dtype, device=x.device)
    tensors = *given[1:5], y, stats, parts, total_weight
    options = given.ignore_index, given.label_smoothing, chosen
    if inner == 1 and classes > FEW_CLASSES:
        block = _row_block(classes)
        grid = losses.blocks(positions, block[1], MAX_BLOCKS, chosen)
        cross_entropy_fwd[grid, block](*tensors, positions, classes, *options, T=x.dtype, MODE=given.mode)
    else:
        block = (BLOCK, 1) if classes <= CHUNK else (32, BLOCK // 32)
        grid = losses.blocks(positions, block[0], MAX_BLOCKS, chosen)
        launch = cross_entropy_fwd_inner[grid, block]
        launch(*tensors, positions, classes, inner, *options, T=x.dtype, MODE=given.mode)
    if chosen:
        several = ceil_div(grid - 1, MAX_BLOCKS)  # 0 where one block has done it all
        cross_entropy_fwd_sum.configure(several, SUM_BLOCK, overlap=True)(
            parts, y, total_weight, grid, chosen, T=x.dtype
        )
    return y, (stats, total_weight)


def _forward_with_grad(given: Given, block: tuple[int, int, int] | held.Plan) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The loss, and into the last that is saved the gradient for a grad_y of 1."""
    x, chosen = given.x, given.reduction
    classes, positions = losses.classes(x), given.target.numel()  # type: ignore[union-attr]
    y = torch.empty(losses.positions(x) if chosen == 0 else (), dtype=x.dtype, device=x.device)
    parts, total_weight = losses.room_for_sums(x, chosen, MAX_BLOCKS)
    stats = torch.empty((2, positions), dtype=parts.dtype, device=x.device)
    counts = torch.empty(WEIGHT_BLOCKS, dtype=parts.dtype, device=x.device)
    grad_x = torch.empty_like(x)
    counts_itself = isinstance(block, held.Plan) and positions <= FEW_TARGETS
    counted = 0
    if chosen == losses.REDUCTIONS["mean"] and not counts_itself:
        counted = min(ceil_div(positions, TARGETS), WEIGHT_BLOCKS)
    sizes = classes, given.ignore_index
    cross_entropy_fwd_weight[counted, SUM_BLOCK](given.target, given.weight, counts, positions, *sizes, T=x.dtype)
    tensors = x, given.target, given.weight, y, stats, parts, total_weight, counts, grad_x
    options = counted, given.ignore_index, chosen
    if isinstance(block, held.Plan):
        groups, launch = min(positions, block.groups), block.launch(cross_entropy_fwd_held, positions)
        launch(*tensors, positions, classes, block.packs, *options, T=x.dtype, THREADS=block.threads)
    else:
        groups = min(ceil_div(positions, block[1]), MAX_BLOCKS)
        cross_entropy_fwd_grad[groups, block[:2]](*tensors, positions, classes, *options, T=x.dtype, K=block[2])
    if chosen:
        several = ceil_div(groups - 1, MAX_BLOCKS)  # 0 where one block has done it all
        cross_entropy_fwd_sum.configure(several, SUM_BLOCK, overlap=True)(
            parts, y, total_weight, groups, chosen, T=x.dtype
        )
    return y, (stats, total_weight, grad_x)


def _backward(
    given: Given,
    saved: tuple[Tensor, ...],
    grad_y: Tensor,
    grad_x: Tensor | None,
    grad_probabilities: Tensor | None,
    written: bool = False,
) -> None:
    x, positions = given.x, saved[0].shape[1]
    classes, inner = losses.classes(x), losses.inner(x)
    tensors = grad_y, *given[1:5], *saved, grad_x, grad_probabilities
    options = given.ignore_index, given.label_smoothing, given.reduction
    if inner == 1 and classes > FEW_CLASSES:
        block, segments = _row_block(classes), ceil_div(classes, SEGMENT)
        grid = ceil_div(positions, block[1]) * segments
        launch = cross_entropy_bwd[min(grid, LOOKING_BLOCKS) if written else grid, block]
        launch(*tensors, positions, classes, segments, *options, written, T=x.dtype, MODE=given.mode)
    else:
        chunks = ceil_div(classes, CHUNK)
        grid = ceil_div(positions, BLOCK) * chunks
        launch = cross_entropy_bwd_inner[grid, BLOCK]
        launch(*tensors, positions, classes, inner, chunks, *options, T=x.dtype, MODE=given.mode)


def _held(given: Given) -> tuple[int, int, int] | held.Plan | None:
    """How forward holds a row to write its gradient too: (threads of a row, rows of a block, packs of a thread), or a plan;
    None where it does not."""
    x = given.x
    classes = losses.classes(x)
    if given.mode != CLASS or losses.inner(x) != 1 or is_symbolic(*x.shape) or classes <= FEW_CLASSES or not x.numel():
        return None
    if classes * x.element_size() > IN_REGISTERS:
        return held.plan(classes, x.element_size(), 1, x.device, clusters.exist(x.device))
    return _block_in_registers(classes, x.element_size())


@functools.lru_cache(maxsize=4096)
def _block_in_registers(classes: int, itemsize: int) -> tuple[int, int, int]:
    vectors = packs_of(classes, itemsize)
    if vectors > 32 * PACKS:
        return ceil_div(vectors, PACKS * 32) * 32, 1, PACKS
    if vectors <= FEW_THREADS * FEW_PACKS:
        return FEW_THREADS, BLOCK // FEW_THREADS, FEW_PACKS
    threads = 1 << (ceil_div(vectors, PACKS) - 1).bit_length()
    return threads, BLOCK // threads, PACKS


def _row_block(classes: int) -> tuple[int, int]:
    """(threads of a row, rows of a block)."""
    return (32, BLOCK // 32) if classes <= WARP_CLASSES else (BLOCK, 1)
