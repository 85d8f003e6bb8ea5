"""Common parts of the losses over classes: the memory layout of logits, the reference's shapes, the checks of arguments.

`x` is (C), (N, C) or (N, C, d1, ...); a position is what is left of its indices without the class.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..._kernel.kernel import FLOATING, Kernel
from ..._util import arguments, torch_private
from ..._util.strides import is_dry
from ...errors import InputError
from ..core import persistent
from ..core.images import accumulator as accumulator

SINGLE = (torch.float16, torch.bfloat16, torch.float32)  # fp64 has the general form of each loss alone
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
DEFINE = {f"REDUCTION_{name.upper()}": number for name, number in REDUCTIONS.items()}
SUM_BLOCK = 1024  # threads of a single block that adds

loss_finalize = Kernel("loss_finalize.cu", "loss_finalize<T>", define=DEFINE, T=FLOATING)


def classes(x: Tensor) -> int:
    """Number of classes, C."""
    return x.shape[1] if x.dim() > 1 else x.shape[0]


def positions(x: Tensor) -> tuple[int, ...]:
    """The shape of `x` without C."""
    return (*x.shape[:1], *x.shape[2:]) if x.dim() > 1 else ()


def no_classes(x: Tensor) -> str | None:
    """Return why the kernels do not serve `x`, or None."""
    return "no classes" if classes(x) == 0 else None


# --- layout ---


def side_by_side(x: Tensor) -> bool:
    """Return True if the classes of a position are contiguous, as in (N, C) and in channels_last."""
    return x.dim() < 3 or x.movedim(1, -1).is_contiguous()


def dense(x: Tensor) -> Tensor:
    """`x` as the kernels read it: (N, C, inner), with inner the innermost, or 1."""
    return x if x.dim() > 2 and side_by_side(x) else x.contiguous()


def inner(x: Tensor) -> int:
    """The distance between the classes of a dense `x`."""
    return 1 if side_by_side(x) else math.prod(x.shape[2:])


def laid_out_as(x: Tensor, other: Tensor) -> Tensor:
    """`other` with the strides of the dense `x`."""
    if x.dim() > 2 and side_by_side(x):
        return other.movedim(1, -1).contiguous().movedim(-1, 1)
    return other.contiguous()


def contiguous(weight: Tensor | None) -> Tensor | None:
    """The weights of the classes as the kernels read them."""
    return None if weight is None else weight.contiguous()


# --- the sum over the batch ---


def buffer_for_sums(x: Tensor, chosen: int, most: int) -> tuple[Tensor, Tensor]:
    """Allocate the partial sums of at most `most` blocks, two numbers each, and the weights' sum; empty with no sum."""
    acc = accumulator(x.dtype)
    partials = torch.empty(2 * most if chosen else 0, dtype=acc, device=x.device)
    return partials, torch.empty((), dtype=acc, device=x.device) if chosen else partials


def blocks(positions: int, each: int, most: int, reduction: int) -> int:
    """Number of blocks for `positions`, `each` to a block; one even for none if there is a reduction: its mean is NaN."""
    return min(positions // each + 1, most) if positions or reduction else 0


def finalize(partials: Tensor, y: Tensor, total_weight: Tensor, count: int, chosen: int) -> None:
    """Add the partial sums of `count` blocks, where there is a sum, and where not one block has done it all."""
    if chosen and count > 1:
        launch = loss_finalize.configure(1, SUM_BLOCK, overlap=True)
        launch(partials, y, total_weight, count, chosen, T=y.dtype)


# --- rows in shared memory ---


def persistent_threads(dtype: torch.dtype) -> tuple[int, ...]:
    """Block sizes that keep a row of logits; fp32 goes without the middle one, which few rows need."""
    return (256, 1024) if dtype is torch.float32 else (256, 512, 1024)


def persistent_domain() -> dict[str, Any]:
    """The domain of a kernel of rows in shared memory, <T, THREADS, BLOCKS, OWN>."""

    def exists(T: torch.dtype, THREADS: int, BLOCKS: int, OWN: int) -> bool:
        return THREADS in persistent_threads(T) and persistent.exists(1, THREADS, BLOCKS, OWN)

    return {"T": SINGLE, **persistent.domain(1), "where": exists}


# --- the reference ---


def reference(
    function: Callable[..., Tensor], x: Tensor, target: Tensor, weight: Tensor | None, reduction: str, **options: Any
) -> Tensor:
    """PyTorch's `function` for targets that are classes."""
    weight = None if weight is None else weight.detach()  # PyTorch's functions refuse one that wants a gradient
    ignored = options.get("ignore_index")
    arguments.in_range("target[{}]", target, classes(x), "ignore_index or a class", ignored)
    logits, indices = x, target
    if is_dry(x):  # with positions, (N, C, d1): of (C) and (N, C), PyTorch's rules for fake tensors are wrong
        logits, indices = (x[None], target[None]) if x.dim() == 1 else (x, target)
        logits, indices = (logits[..., None], indices[..., None]) if logits.dim() == 2 else (logits, indices)
    if options.get("label_smoothing") and torch_private.proxy_mode():
        y = _smoothed(logits, indices, weight, reduction, **options)
        return y.reshape(target.shape) if reduction == "none" else y
    try:
        y = function(logits, indices, weight, reduction=reduction, **options)
    except IndexError as error:
        raise InputError(f"target: {error}; expected indices of classes") from error
    return y.reshape(target.shape) if reduction == "none" else y


def _smoothed(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: str, ignore_index: int, label_smoothing: float
) -> Tensor:
    """PyTorch's cross_entropy, of which a graph that is to be functional is recorded: PyTorch changes a tensor in place."""
    axis = 1 if x.dim() > 1 else 0
    log_prob = x.log_softmax(axis)
    sharp = torch.nn.functional.nll_loss(log_prob, target, weight, ignore_index=ignore_index, reduction=reduction)
    weighed = log_prob if weight is None else log_prob * weight.reshape(-1, *[1] * (x.dim() - 1 - axis))
    even = torch.where(target == ignore_index, 0.0, -weighed.sum(axis))
    if reduction != "none":
        even = even.sum() / (counted(target, weight, ignore_index) if reduction == "mean" else 1)
    return (1 - label_smoothing) * sharp + even * (label_smoothing / classes(x))


# --- checks ---


def counted(target: Tensor, weight: Tensor | None, ignore_index: int) -> Tensor:
    """Divisor of a mean over the classes in `target`: the number of those not ignored, or the sum of their weights."""
    there = target != ignore_index
    if weight is None:
        return there.sum()
    each = torch.nn.functional.embedding(torch.where(there, target, 0), weight.unsqueeze(1)).squeeze(-1)
    return torch.where(there, each, 0).sum()


def chosen_reduction(size_average: bool | None, reduce: bool | None, reduction: str) -> str:
    """`reduction`, unless one of the deprecated arguments says otherwise."""
    if size_average is not None or reduce is not None:
        reduction = torch_private.legacy_reduction(size_average, reduce)
    arguments.choice("reduction", reduction, tuple(REDUCTIONS))
    return reduction


def check_input(input: Any, target: Any, ignore_index: Any) -> None:
    """Check the arguments that every loss has."""
    arguments.floating("input", input)
    arguments.tensor("target", target)
    arguments.same_device(input=input, target=target)
    if input.dim() == 0:
        arguments.fail("input", input, "a tensor of shape (C), (N, C) or (N, C, d1, ...)")
    if not isinstance(ignore_index, (int, torch.SymInt)) or isinstance(ignore_index, bool):
        arguments.fail("ignore_index", ignore_index, "an int")


def check_target(input: Tensor, target: Tensor, expected: tuple[int, ...], what: str) -> None:
    """`target` is of the shape `expected`."""
    if target.dim() > 0 and input.dim() > 1 and target.shape[0] != input.shape[0]:
        raise InputError(
            f"target has batch size {target.shape[0]}, but input has {input.shape[0]}; expected one batch size"
        )
    if tuple(target.shape) != expected:
        arguments.fail("target", target, f"{what} of shape {expected}, as input is of shape {tuple(input.shape)}")


def check_weight(input: Tensor, weight: Any) -> None:
    """`weight` is None or has a number for each class."""
    arguments.optional_tensor("weight", weight)
    if weight is None:
        return
    arguments.floating("weight", weight)
    arguments.same_device(input=input, weight=weight)
    if tuple(weight.shape) != (classes(input),):
        arguments.fail("weight", weight, f"shape ({classes(input)},), one for each class")


def check_class_weight(input: Tensor, weight: Tensor | None) -> None:
    """`weight` suits targets that are classes."""
    check_weight(input, weight)
    if weight is None:
        return
    if weight.requires_grad:
        arguments.fail("weight", weight, "one that requires no gradient: the loss has none with respect to it")
    if weight.dtype != input.dtype and not arguments.autocast(input.device):
        raise InputError(f"weight is {weight.dtype}, but input is {input.dtype}; expected one dtype")
