"""nll_loss: minus the input at the target class."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from .._dispatch.core import shardings
from .._dispatch.loss import losses
from .._kernel.kernel import FLOATING, Kernel, ceil_div
from .._operator.derivation.distributed import is_spread
from .._operator.floating import operator
from .._util import arguments
from .._util.strides import is_dry

ZERO_VECTORS = 2  # of 16 bytes of grad_x that each thread of backward makes zeros first
DEFINE = {**losses.DEFINE, "ZERO_VECTORS": ZERO_VECTORS}
nll_loss_fwd = Kernel("nll_loss.cu", "nll_loss_fwd<T>", define=DEFINE, T=FLOATING)
nll_loss_bwd_strided = Kernel("nll_loss.cu", "nll_loss_bwd_strided<T>", define=DEFINE, T=FLOATING)
nll_loss_bwd_rows = Kernel("nll_loss.cu", "nll_loss_bwd_rows<T>", define=DEFINE, T=losses.SINGLE)

BLOCK = 256
MOST_BLOCKS = 1024  # of forward, on every GPU, so that the sum over the batch has the same bits on all of them


@operator("cupyops::nll_loss", autocast="fp32_everywhere", sharding=shardings.nll_loss)
def _nll_loss(x: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, reduction: str) -> Tensor:
    # contiguous: on the CPU PyTorch has no gradient for a transposed (N, C, d1, d2)
    return losses.reference(F.nll_loss, x.contiguous(), target, weight, reduction, ignore_index=ignore_index)


@_nll_loss.forward
def forward(x, target, weight, ignore_index, reduction):
    x, target, weight = losses.dense(x), target.contiguous(), losses.contiguous(weight)
    positions, chosen = target.numel(), losses.REDUCTIONS[reduction]
    y = torch.empty(target.shape if chosen == 0 else (), dtype=x.dtype, device=x.device)
    partials, total_weight = losses.buffer_for_sums(x, chosen, MOST_BLOCKS)
    if not is_dry(x):
        blocks = losses.blocks(positions, BLOCK, MOST_BLOCKS, chosen)
        sizes = positions, losses.classes(x), losses.inner(x), ignore_index, chosen
        nll_loss_fwd[blocks, BLOCK](x, target, weight, y, partials, total_weight, *sizes, T=x.dtype)
        losses.finalize(partials, y, total_weight, blocks, chosen)
    return y, (total_weight,)


@_nll_loss.backward
def backward(saved, grad_y, x, target, weight, ignore_index, reduction):
    x, target, weight = losses.dense(x), target.contiguous(), losses.contiguous(weight)
    given, chosen = (grad_y, target, weight, saved[0]), losses.REDUCTIONS[reduction]
    positions, classes = target.numel(), losses.classes(x)
    if losses.side_by_side(x) and x.dtype in losses.SINGLE:
        grad_x = torch.empty_like(x)
        blocks = ceil_div(grad_x.numel(), BLOCK * ZERO_VECTORS * 16 // grad_x.itemsize)
        nll_loss_bwd_rows[blocks, BLOCK](*given, grad_x, positions, classes, ignore_index, chosen, T=x.dtype)
    else:
        grad_x, sizes = torch.zeros_like(x), (positions, classes, losses.inner(x), ignore_index, chosen)
        nll_loss_bwd_strided[ceil_div(positions, BLOCK), BLOCK](*given, grad_x, *sizes, T=x.dtype)
    return grad_x


@_nll_loss.unsupported
def unsupported(x, target, weight, ignore_index, reduction):
    return losses.no_classes(x)


@_nll_loss.interface(twin=torch.nn.functional.nll_loss)
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
    reduction = losses.chosen_reduction(size_average, reduce, reduction)
    _check(input, target, ignore_index)
    if weight is not None:
        losses.check_class_weight(input, weight)
    if input.dim() == target.dim() == 1:  # (C) and (1)
        target = target.squeeze(0)
    target = target.long()
    if reduction == "mean" and is_spread(input):  # each device has a part of the sum
        total = _nll_loss(input, target, weight, ignore_index, "sum")
        return total / losses.counted(target, weight, ignore_index)
    return _nll_loss(input, target, weight, ignore_index, reduction)


def _check(input: Tensor, target: Tensor, ignore_index: int) -> None:
    losses.check_input(input, target, ignore_index)
    if target.dtype.is_floating_point or target.dtype.is_complex or target.dtype is torch.bool:
        arguments.fail("target", target, "a tensor of integers")
    if input.dim() != 1 or tuple(target.shape) != (1,):
        losses.check_target(input, target, losses.positions(input), "classes")
