"""cross_entropy: log_softmax and nll_loss in one pass, for targets that are classes or probabilities."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import _reduction
from torch.nn import functional as F

from .. import check
from ..errors import InputError
from ..kernel import FLOATING, Kernel, ceil_div
from ..operator import operator

MODES = CLASS, SMOOTHED, PROBABILITIES = 0, 1, 2
cross_entropy_fwd = Kernel("cross_entropy.cu", "cross_entropy_fwd<T, MODE>", T=FLOATING, MODE=MODES)
cross_entropy_fwd_inner = Kernel("cross_entropy.cu", "cross_entropy_fwd_inner<T, MODE>", T=FLOATING, MODE=MODES)
cross_entropy_fwd_sum = Kernel("cross_entropy.cu", "cross_entropy_fwd_sum<T>", T=FLOATING)
cross_entropy_bwd = Kernel("cross_entropy.cu", "cross_entropy_bwd<T, MODE>", T=FLOATING, MODE=MODES)
cross_entropy_bwd_inner = Kernel("cross_entropy.cu", "cross_entropy_bwd_inner<T, MODE>", T=FLOATING, MODE=MODES)

BLOCK = 256
FEW_CLASSES = 16  # up to here a row is worth one thread
WARP_CLASSES = 1024  # up to here a row is worth a warp, then a block
SEGMENT = 16384  # columns of a row that one block of the backward owns
CHUNK = 64  # classes that one thread of the backward owns where classes do not lie side by side
MAX_BLOCKS = 4096  # of a sum over the batch; a block then adds their parts
SUM_BLOCK = 1024
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


# --- targets are classes ---


@operator("cupyops::cross_entropy", autocast="fp32_everywhere")
def _cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float
) -> Tensor:
    weight = None if weight is None else weight.detach()  # PyTorch's function refuses one that wants a gradient
    # With positions (N, d1): of (C) and (N, C), PyTorch's rules for fake tensors are wrong.
    x, positions = (x[None], target[None]) if x.dim() == 1 else (x, target)
    x, positions = (x[..., None], positions[..., None]) if x.dim() == 2 else (x, positions)
    try:
        y = F.cross_entropy(
            x, positions, weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
        )
    except IndexError as error:
        raise InputError(f"target: {error}") from error
    return y.reshape(target.shape) if reduction == "none" else y


@_cross_entropy.forward
def _(x, target, weight, ignore_index, reduction, label_smoothing):
    mode = SMOOTHED if label_smoothing > 0 else CLASS
    return _forward(mode, _dense(x), target.contiguous(), None, weight, ignore_index, reduction, label_smoothing)


@_cross_entropy.backward
def _(saved, grad_y, x, target, weight, ignore_index, reduction, label_smoothing):
    mode, x = SMOOTHED if label_smoothing > 0 else CLASS, _dense(x)
    options = ignore_index, reduction, label_smoothing
    grad_x = torch.empty_like(x)
    _backward(mode, saved, grad_y, x, target.contiguous(), None, weight, options, grad_x, None)
    return grad_x


@_cross_entropy.unsupported
def _(x, target, weight, ignore_index, reduction, label_smoothing):
    return "no classes" if _classes(x) == 0 else None


# --- targets are probabilities ---


@operator("cupyops::cross_entropy_probabilities", autocast="fp32_everywhere")
def _cross_entropy_probabilities(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: str, label_smoothing: float
) -> Tensor:
    return F.cross_entropy(x, target, weight, reduction=reduction, label_smoothing=label_smoothing)


@_cross_entropy_probabilities.forward
def _(x, target, weight, reduction, label_smoothing):
    x = _dense(x)
    return _forward(PROBABILITIES, x, None, _laid_out_as(x, target), weight, -100, reduction, label_smoothing)


@_cross_entropy_probabilities.backward
def _(saved, grad_y, x, target, weight, reduction, label_smoothing, needs_grad):
    x = _dense(x)
    grad_x = torch.empty_like(x) if needs_grad.x else None
    grad_target = torch.empty_like(x) if needs_grad.target else None
    options = -100, reduction, label_smoothing
    probabilities = _laid_out_as(x, target)
    _backward(PROBABILITIES, saved, grad_y, x, None, probabilities, weight, options, grad_x, grad_target)
    return grad_x, grad_target


@_cross_entropy_probabilities.unsupported
def _(x, target, weight, reduction, label_smoothing):
    return "no classes" if _classes(x) == 0 else None


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
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    probabilities = _check(input, target, weight, ignore_index, reduction, label_smoothing)
    label_smoothing = float(label_smoothing)
    if probabilities:
        if weight is not None and weight.requires_grad:  # PyTorch has this gradient; the kernels do not
            return F.cross_entropy(input, target, weight, reduction=reduction, label_smoothing=label_smoothing)
        return _cross_entropy_probabilities(input, target, weight, reduction, label_smoothing)
    return _cross_entropy(input, target.long(), weight, ignore_index, reduction, label_smoothing)


def _check(input: Any, target: Any, weight: Any, ignore_index: Any, reduction: Any, label_smoothing: Any) -> bool:
    """All that is checked; whether the target is of probabilities."""
    check.floating("input", input)
    check.tensor("target", target)
    check.same_device(input=input, target=target)
    check.choice("reduction", reduction, tuple(REDUCTIONS))
    if not isinstance(ignore_index, (int, torch.SymInt)) or isinstance(ignore_index, bool):
        check.fail("ignore_index", ignore_index, "an int")
    if not isinstance(label_smoothing, (int, float)) or not 0 <= label_smoothing <= 1:
        check.fail("label_smoothing", label_smoothing, "a number in [0, 1]")
    if input.dim() == 0:
        check.fail("input", input, "a tensor of shape (C), (N, C) or (N, C, d1, ...)")
    _check_weight(input, target, weight)
    if target.dtype.is_complex or target.dtype is torch.bool:
        check.fail("target", target, "a tensor of integers (classes) or of a floating-point dtype (probabilities)")
    if not target.dtype.is_floating_point:
        _check_shape(input, target, (*input.shape[:1], *input.shape[2:]) if input.dim() > 1 else (), "classes")
        return False
    _check_shape(input, target, tuple(input.shape), "probabilities")
    if ignore_index >= 0:
        check.fail("ignore_index", ignore_index, "none: a target of probabilities has no class to ignore")
    return True


def _check_shape(input: Tensor, target: Tensor, expected: tuple[int, ...], what: str) -> None:
    if target.dim() > 0 and input.dim() > 1 and target.shape[0] != input.shape[0]:
        raise InputError(f"target has batch size {target.shape[0]}, but input has {input.shape[0]}")
    if tuple(target.shape) != expected:
        check.fail("target", target, f"{what} of shape {expected}, as input is of shape {tuple(input.shape)}")


def _check_weight(input: Tensor, target: Tensor, weight: Any) -> None:
    check.optional_tensor("weight", weight)
    if weight is None:
        return
    check.same_device(input=input, weight=weight)
    if tuple(weight.shape) != (_classes(input),):
        check.fail("weight", weight, f"shape ({_classes(input)},), one for each class")
    check.floating("weight", weight)
    if target.dtype.is_floating_point:
        return
    if weight.requires_grad:
        check.fail("weight", weight, "one that requires no gradient: the loss has none with respect to it")
    if weight.dtype != input.dtype and not torch.is_autocast_enabled(input.device.type):
        raise InputError(f"weight is {weight.dtype}, but input is {input.dtype}")


# --- launches ---


def _forward(
    mode: int,
    x: Tensor,
    target: Tensor | None,
    probabilities: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    classes, inner, chosen = _classes(x), _inner(x), REDUCTIONS[reduction]
    shape = (*x.shape[:1], *x.shape[2:]) if x.dim() > 1 else ()
    positions = math.prod(shape)
    acc = torch.float64 if x.dtype is torch.float64 else torch.float32
    y = torch.empty(shape if chosen == 0 else (), dtype=x.dtype, device=x.device)
    stats = torch.empty((2 if mode == CLASS else 3, positions), dtype=acc, device=x.device)
    parts = torch.empty(2 * MAX_BLOCKS if chosen else 0, dtype=acc, device=x.device)
    total_weight = torch.empty(() if chosen else 0, dtype=acc, device=x.device)
    tensors = x, target, probabilities, None if weight is None else weight.contiguous(), y, stats, parts, total_weight
    numbers = ignore_index, label_smoothing, chosen
    if inner == 1 and classes > FEW_CLASSES:
        block = _row_block(classes)
        grid = _at_most(positions // block[1] + 1, MAX_BLOCKS)
        cross_entropy_fwd[grid, block](*tensors, positions, classes, *numbers, T=x.dtype, MODE=mode)
    else:
        block = (BLOCK, 1) if classes <= CHUNK else (32, BLOCK // 32)
        grid = _at_most(positions // block[0] + 1, MAX_BLOCKS)
        cross_entropy_fwd_inner[grid, block](*tensors, positions, classes, inner, *numbers, T=x.dtype, MODE=mode)
    if chosen:
        several = ceil_div(grid - 1, MAX_BLOCKS)  # 0 where one block has done it all
        cross_entropy_fwd_sum[several, SUM_BLOCK](parts, y, total_weight, grid, chosen, T=x.dtype)
    return y, (stats, total_weight)


def _backward(
    mode: int,
    saved: tuple[Tensor, ...],
    grad_y: Tensor,
    x: Tensor,
    target: Tensor | None,
    probabilities: Tensor | None,
    weight: Tensor | None,
    options: tuple[int, str, float],
    grad_x: Tensor | None,
    grad_probabilities: Tensor | None,
) -> None:
    classes, inner, positions = _classes(x), _inner(x), saved[0].shape[1]
    ignore_index, reduction, label_smoothing = options
    weight = None if weight is None else weight.contiguous()
    tensors = grad_y, x, target, probabilities, weight, *saved, grad_x, grad_probabilities
    numbers = ignore_index, label_smoothing, REDUCTIONS[reduction]
    if inner == 1 and classes > FEW_CLASSES:
        block, segments = _row_block(classes), ceil_div(classes, SEGMENT)
        grid = ceil_div(positions, block[1]) * segments
        cross_entropy_bwd[grid, block](*tensors, positions, classes, segments, *numbers, T=x.dtype, MODE=mode)
    else:
        chunks = ceil_div(classes, CHUNK)
        grid = ceil_div(positions, BLOCK) * chunks
        cross_entropy_bwd_inner[grid, BLOCK](
            *tensors, positions, classes, inner, chunks, *numbers, T=x.dtype, MODE=mode
        )


def _row_block(classes: int) -> tuple[int, int]:
    """(threads of a row, rows of a block)."""
    return (32, BLOCK // 32) if classes <= WARP_CLASSES else (BLOCK, 1)


def _at_most(blocks: int, limit: int) -> int:
    """The smaller, without asking which it is where `blocks` is symbolic: an exported graph then serves every batch."""
    return min(blocks, limit) if type(blocks) is int else torch.sym_min(blocks, limit)


# --- layout ---


def _classes(x: Tensor) -> int:
    return x.shape[1] if x.dim() > 1 else x.shape[0]


def _side_by_side(x: Tensor) -> bool:
    """Whether the classes of a position lie side by side, as in (N, C) and in channels_last."""
    return x.dim() < 3 or x.movedim(1, -1).is_contiguous()


def _dense(x: Tensor) -> Tensor:
    """`x` as the kernels read it: (N, C, inner), with inner the innermost, or 1."""
    return x if x.dim() > 2 and _side_by_side(x) else x.contiguous()


def _inner(x: Tensor) -> int:
    """The distance between the classes of a dense `x`."""
    return 1 if _side_by_side(x) else math.prod(x.shape[2:])


def _laid_out_as(x: Tensor, target: Tensor) -> Tensor:
    """`target` with the strides of the dense `x`."""
    if x.dim() > 2 and _side_by_side(x):
        return target.movedim(1, -1).contiguous().movedim(-1, 1)
    return target.contiguous()
