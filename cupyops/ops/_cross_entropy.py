"""cross_entropy: log_softmax and nll_loss in one pass, for targets that are classes or probabilities."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .._dispatch.core import shardings
from .._dispatch.loss import cross_entropy as launches
from .._dispatch.loss import losses
from .._dispatch.loss.cross_entropy import Given
from .._operator.derivation.distributed import is_spread
from .._operator.floating import operator
from .._util import arguments

_HALF = (torch.float16, torch.bfloat16)

# --- targets are classes ---


@operator("cupyops::cross_entropy", autocast="fp32_everywhere", sharding=shardings.cross_entropy)
def _cross_entropy(
    x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str, label_smoothing: float
) -> Tensor:
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    return losses.reference(F.cross_entropy, x, target, weight, reduction, **options)


@_cross_entropy.forward
def forward(x, target, weight, ignore_index, reduction, label_smoothing, needs_grad=None):
    given = _of_classes(x, target, weight, ignore_index, reduction, label_smoothing)
    return launches.forward(given, gradient=needs_grad is not None and needs_grad.x)


@_cross_entropy.backward
def backward(saved, grad_y, x, target, weight, ignore_index, reduction, label_smoothing, last):
    return _gradient(_of_classes(x, target, weight, ignore_index, reduction, label_smoothing), saved, grad_y, last)


@_cross_entropy.unsupported
def unsupported(x, target, weight, ignore_index, reduction, label_smoothing):
    return losses.no_classes(x)


def _of_classes(x, target, weight, ignore_index, reduction, label_smoothing, wide=False) -> Given:
    x, target, weight = losses.dense(x), target.contiguous(), losses.contiguous(weight)
    return Given(x, target, None, weight, ignore_index, losses.REDUCTIONS[reduction], label_smoothing, wide)


def _gradient(given: Given, saved, grad_y, last) -> Tensor:
    written = last and len(saved) > 2  # while the graph is kept, so is what forward has written
    grad_x = saved[2] if written else torch.empty_like(given.x)
    launches.backward(given, saved[:2], grad_y, grad_x, written=written)
    return grad_x


# --- targets are classes, the loss of logits of half types is fp32 ---


@operator("cupyops::cross_entropy_fp32", dtypes=_HALF, sharding=shardings.cross_entropy_fp32)
def _cross_entropy_fp32(x: Tensor, target: Tensor, ignore_index: int, reduction: str, label_smoothing: float) -> Tensor:
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    return losses.reference(F.cross_entropy, x.float(), target, None, reduction, **options)


@_cross_entropy_fp32.forward
def forward_fp32(x, target, ignore_index, reduction, label_smoothing, needs_grad=None):
    given = _of_classes(x, target, None, ignore_index, reduction, label_smoothing, wide=True)
    return launches.forward(given, gradient=needs_grad is not None and needs_grad.x)


@_cross_entropy_fp32.backward
def backward_fp32(saved, grad_y, x, target, ignore_index, reduction, label_smoothing, last):
    given = _of_classes(x, target, None, ignore_index, reduction, label_smoothing, wide=True)
    return _gradient(given, saved, grad_y, last)


@_cross_entropy_fp32.unsupported
def unsupported_fp32(x, target, ignore_index, reduction, label_smoothing):
    return losses.no_classes(x)


# --- targets are probabilities ---


@operator(
    "cupyops::cross_entropy_probabilities", autocast="fp32_everywhere", sharding=shardings.cross_entropy_probabilities
)
def _cross_entropy_probabilities(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: str, label_smoothing: float
) -> Tensor:
    return F.cross_entropy(x, target, weight, reduction=reduction, label_smoothing=label_smoothing)


@_cross_entropy_probabilities.forward
def forward_probabilities(x, target, weight, reduction, label_smoothing):
    return launches.forward(_of_probabilities(x, target, weight, reduction, label_smoothing))


@_cross_entropy_probabilities.backward
def backward_probabilities(saved, grad_y, x, target, weight, reduction, label_smoothing, needs_grad):
    given = _of_probabilities(x, target, weight, reduction, label_smoothing)
    grad_x, grad_target = (torch.empty_like(given.x) if need else None for need in (needs_grad.x, needs_grad.target))
    launches.backward(given, saved, grad_y, grad_x, grad_target)
    return grad_x, grad_target


@_cross_entropy_probabilities.unsupported
def unsupported_probabilities(x, target, weight, reduction, label_smoothing):
    return losses.no_classes(x)


def _of_probabilities(x, target, weight, reduction, label_smoothing) -> Given:
    x, weight = losses.dense(x), losses.contiguous(weight)
    probabilities = losses.laid_out_as(x, target)
    return Given(x, None, probabilities, weight, -100, losses.REDUCTIONS[reduction], label_smoothing)


@_cross_entropy.interface(twin=torch.nn.functional.cross_entropy)
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
        target = target.long()
        if weight is None and input.dtype in _HALF and arguments.autocast(input.device):  # which asks for fp32
            return cross_entropy_fp32(input, target, ignore_index, reduction, label_smoothing)
        if reduction == "mean" and is_spread(input):  # each device has a part of the sum
            total = _cross_entropy(input, target, weight, ignore_index, "sum", label_smoothing)
            return total / losses.counted(target, weight, ignore_index)
        return _cross_entropy(input, target, weight, ignore_index, reduction, label_smoothing)
    losses.check_weight(input, weight)
    if weight is not None and weight.requires_grad:  # PyTorch has this gradient; the kernels do not
        return F.cross_entropy(input, target, weight, reduction=reduction, label_smoothing=label_smoothing)
    return _cross_entropy_probabilities(input, target, weight, reduction, label_smoothing)


def cross_entropy_fp32(
    input: Tensor, target: Tensor, ignore_index: int = -100, reduction: str = "mean", label_smoothing: float = 0.0
) -> Tensor:
    """`cross_entropy(input.float(), target, ...)` for classes, without a copy of logits of half types."""
    _check(input, target, ignore_index, label_smoothing)
    target = target.long()
    if input.dtype not in _HALF:
        return _cross_entropy(input.float(), target, None, ignore_index, reduction, label_smoothing)
    if reduction == "mean" and is_spread(input):
        total = _cross_entropy_fp32(input, target, ignore_index, "sum", label_smoothing)
        return total / losses.counted(target, None, ignore_index)
    return _cross_entropy_fp32(input, target, ignore_index, reduction, label_smoothing)


def _check(input: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> None:
    losses.check_input(input, target, ignore_index)
    if not isinstance(label_smoothing, (int, float)) or not 0 <= label_smoothing <= 1:
        arguments.fail("label_smoothing", label_smoothing, "a number in [0, 1]")
    if target.dtype.is_complex or target.dtype is torch.bool:
        arguments.fail("target", target, "a tensor of integers (classes) or of a floating-point dtype (probabilities)")
    if not target.dtype.is_floating_point:
        losses.check_target(input, target, losses.positions(input), "classes")
        return
    losses.check_target(input, target, tuple(input.shape), "probabilities")
    if ignore_index >= 0:
        arguments.fail("ignore_index", ignore_index, "none: a target of probabilities has no class to ignore")
