"""nll_loss: minus the input at the target class."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import _reduction
from torch.nn import functional as F

from .. import check
from ..errors import InputError
from ..kernel import FLOATING, Kernel, ceil_div
from ..operator import operator

nll_loss_fwd = Kernel("nll_loss.cu", "nll_loss_fwd<T>", T=FLOATING)
nll_loss_fwd_sum = Kernel("nll_loss.cu", "nll_loss_fwd_sum<T>", T=FLOATING)
nll_loss_bwd = Kernel("nll_loss.cu", "nll_loss_bwd<T>", T=FLOATING)

BLOCK = 256
MAX_BLOCKS = 1024  # of a sum over the batch; a block then adds their parts
REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}


@operator("cupyops::nll_loss", autocast="fp32_everywhere")
def _nll_loss(x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str) -> Tensor:
    weight = None if weight is None else weight.detach()  # PyTorch's function refuses one that wants a gradient
    # With positions (N, d1): of (C) and (N, C), PyTorch's rules for fake tensors are wrong. Contiguous: on the CPU it has
    # no gradient for a transposed (N, C, d1, d2).
    x, positions = (x[None] if x.dim() == 1 else x).contiguous(), target[None] if x.dim() == 1 else target
    x, positions = (x[..., None], positions[..., None]) if x.dim() == 2 else (x, positions)
    try:
        y = F.nll_loss(x, positions, weight, ignore_index=ignore_index, reduction=reduction)
    except IndexError as error:
        raise InputError(f"target: {error}") from error
    return y.reshape(target.shape) if reduction == "none" else y


@_nll_loss.forward
def _(x, target, weight, ignore_index, reduction):
    x, inner = _by_class(x)
    target, weight = target.contiguous(), None if weight is None else weight.contiguous()
    positions, chosen = target.numel(), REDUCTIONS[reduction]
    y = torch.empty(target.shape if chosen == 0 else (), dtype=x.dtype, device=x.device)
    acc = torch.float64 if x.dtype is torch.float64 else torch.float32
    parts = torch.empty(2 * MAX_BLOCKS if chosen else 0, dtype=acc, device=x.device)
    total_weight = torch.empty((), dtype=acc, device=x.device) if chosen else parts
    blocks = _at_most(positions // BLOCK + 1, MAX_BLOCKS)
    sizes = positions, _classes(x), inner, ignore_index, chosen
    nll_loss_fwd[blocks, BLOCK](x, target, weight, y, parts, total_weight, *sizes, T=x.dtype)
    if chosen:
        several = ceil_div(blocks - 1, MAX_BLOCKS)  # 0 where one block has done it all
        nll_loss_fwd_sum[several, MAX_BLOCKS](parts, y, total_weight, blocks, chosen, T=x.dtype)
    return y, (total_weight,)


@_nll_loss.backward
def _(saved, grad_y, x, target, weight, ignore_index, reduction):
    x, inner = _by_class(x)
    target, weight = target.contiguous(), None if weight is None else weight.contiguous()
    grad_x = torch.zeros_like(x)
    positions = target.numel()
    sizes = positions, _classes(x), inner, ignore_index, REDUCTIONS[reduction]
    blocks = ceil_div(positions, BLOCK)
    nll_loss_bwd[blocks, BLOCK](grad_y, target, weight, saved[0], grad_x, *sizes, T=x.dtype)
    return grad_x


@_nll_loss.unsupported
def _(x, target, weight, ignore_index, reduction):
    return "no classes" if _classes(x) == 0 else None


@_nll_loss.interface
def nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> Tensor:
    """Negative log-likelihood, minus the input at the target class; as `torch.nn.functional.nll_loss`.

    Args:
        input: log-probabilities, (C), (N, C) or (N, C, d1, ...); kernels serve fp16, bf16, fp32 and fp64.
        target: classes in [0, C), integers of shape (), (N) or (N, d1, ...).
        weight: of each class, (C), of the dtype of `input`; it gets no gradient.
        size_average: deprecated, see `reduction`.
        ignore_index: a target of this value adds nothing to the loss, nor to its gradient.
        reduce: deprecated, see `reduction`.
        reduction: "none", "sum", or "mean" over the weights of the targets (NaN where there are none).

    Returns:
        Tensor of shape () in the dtype of `input`; with "none" of the shape of `target`.

    Raises:
        InputError: shapes do not match, `weight` has not C elements, `reduction` is unknown, `target` is not of integers
            or, on the CPU, out of range. On a GPU a target out of range prints itself and stops the kernel.

    Example:
        >>> cupyops.nll_loss(torch.tensor([[-1.0, -2.0], [-3.0, -4.0]]), torch.tensor([0, 1]))
        tensor(2.5000)
    """
    if size_average is not None or reduce is not None:
        reduction = _reduction.legacy_get_string(size_average, reduce)
    check.floating("input", input)
    _check_target(input, target)
    _check_weight(input, weight)
    check.choice("reduction", reduction, tuple(REDUCTIONS))
    if not isinstance(ignore_index, (int, torch.SymInt)) or isinstance(ignore_index, bool):
        check.fail("ignore_index", ignore_index, "an int")
    if input.dim() == 1 and target.dim() == 1:
        target = target.squeeze(0)
    return _nll_loss(input, target.long(), weight, ignore_index, reduction)


def _check_target(input: Tensor, target: Tensor) -> None:
    check.tensor("target", target)
    check.same_device(input=input, target=target)
    if target.dtype.is_floating_point or target.dtype.is_complex or target.dtype is torch.bool:
        check.fail("target", target, "a tensor of integers")
    if input.dim() == 0:
        check.fail("input", input, "a tensor of shape (C), (N, C) or (N, C, d1, ...)")
    expected = (*input.shape[:1], *input.shape[2:]) if input.dim() > 1 else ()
    if input.dim() == 1 and tuple(target.shape) == (1,):
        return
    if target.dim() > 0 < len(expected) and target.shape[0] != expected[0]:
        raise InputError(f"target has batch size {target.shape[0]}, but input has {expected[0]}")
    if tuple(target.shape) != expected:
        check.fail("target", target, f"shape {expected}, as input is of shape {tuple(input.shape)}")


def _check_weight(input: Tensor, weight: Tensor | None) -> None:
    check.optional_tensor("weight", weight)
    if weight is None:
        return
    check.same_device(input=input, weight=weight)
    if tuple(weight.shape) != (_classes(input),):
        check.fail("weight", weight, f"shape ({_classes(input)},), one for each class")
    if weight.requires_grad:
        check.fail("weight", weight, "one that requires no gradient: the loss has none with respect to it")
    if weight.dtype != input.dtype and not torch.is_autocast_enabled(input.device.type):
        raise InputError(f"weight is {weight.dtype}, but input is {input.dtype}")


def _classes(x: Tensor) -> int:
    return x.shape[1] if x.dim() > 1 else x.shape[0]


def _by_class(x: Tensor) -> tuple[Tensor, int]:
    """`x` dense, and the distance between its classes: 1 where they lie side by side, as in channels_last."""
    if x.dim() < 3:
        return x.contiguous(), 1
    if x.movedim(1, -1).is_contiguous():
        return x, 1
    return x.contiguous(), math.prod(x.shape[2:])


def _at_most(blocks: int, limit: int) -> int:
    """The smaller, without asking which it is where `blocks` is symbolic: an exported graph then serves every batch."""
    return min(blocks, limit) if type(blocks) is int else torch.sym_min(blocks, limit)
