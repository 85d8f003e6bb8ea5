"""kl_div: the Kullback-Leibler divergence of log-probabilities from a target."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._dispatch.core import shardings
from .._dispatch.elementwise.broadcast import broadcast_shape, empty_output
from .._dispatch.loss import losses
from .._kernel.kernel import FLOATING, Kernel, ceil_div
from .._operator.derivation.autocast import POLICIES, cast, dtype_for
from .._operator.floating import operator
from .._util import arguments, torch_private
from .._util.strides import is_dry, restride

IN_FLIGHT = 4  # vectors of each input that a thread of a sum loads at once
DEFINE = {"IN_FLIGHT": IN_FLIGHT}


def _kernel(name: str, **domain: Any) -> Kernel:
    return Kernel("kl_div.cu", f"kl_div_{name}", define=DEFINE, **domain)


kl_div_fwd_each = _kernel("fwd_each<T>", T=FLOATING)
kl_div_fwd_partials = _kernel("fwd_partials<T>", T=FLOATING)
kl_div_fwd_finalize = _kernel("fwd_finalize<T>", T=FLOATING)
kl_div_bwd = _kernel("bwd<T>", T=losses.SINGLE)
kl_div_bwd_target = _kernel("bwd_target<T>", T=FLOATING)

BLOCK = 128
TILE = {dtype: BLOCK * 16 // dtype.itemsize for dtype in FLOATING}  # elements of one block
SUM_BLOCK = 256  # threads of a block of a sum
SUM_TILE = {dtype: SUM_BLOCK * IN_FLIGHT * 16 // dtype.itemsize for dtype in FLOATING}
MOST_BLOCKS = (
    4224  # of a sum, on every GPU, so that it has the same bits on all of them: 32 for each multiprocessor of an H200
)
REDUCTIONS = ("none", "mean", "sum", "batchmean")


@operator("cupyops::kl_div", autocast="fp32_everywhere", sharding=shardings.kl_div)
def _kl_div(x: Tensor, target: Tensor, reduction: str, log_target: bool, batch: int) -> Tensor:
    # as torch.kl_div, for which vmap has no rule; nor has autocast for what it is made of
    dtype = dtype_for(POLICIES["fp32_everywhere"], x.device)
    x, target = (x, target) if dtype is None else cast((x, target), dtype)
    loss = target.exp() * (target - x) if log_target else torch.xlogy(target, target) - target * x
    if reduction == "none":
        return loss
    if reduction == "mean":
        return loss.mean()
    return loss.sum() / batch if reduction == "batchmean" else loss.sum()


@_kl_div.forward
def forward(x, target, reduction, log_target, batch):
    x, target, like = _laid_out_alike(x, target)
    n, dtype = x.numel(), x.dtype
    if reduction == "none":
        kl_div_fwd_each[ceil_div(n, TILE[dtype]), BLOCK](x, target, like, n, log_target, T=dtype)
        return like, ()
    y = torch.empty((), dtype=dtype, device=x.device)
    partials = torch.empty(MOST_BLOCKS, dtype=losses.accumulator(dtype), device=x.device)
    if not is_dry(x):
        blocks, divisor = losses.blocks(n, SUM_TILE[dtype], MOST_BLOCKS, 1), _divisor(reduction, n, batch)
        kl_div_fwd_partials[blocks, SUM_BLOCK](x, target, partials, y, n, divisor, log_target, T=dtype)
        if blocks > 1:
            launch = kl_div_fwd_finalize.configure(1, losses.SUM_BLOCK, overlap=True)
            launch(partials, y, blocks, divisor, T=dtype)
    return y, ()


@_kl_div.backward(reads={"x": ("target",)})
def backward(saved, grad_y, x, target, reduction, log_target, batch, needs_grad):
    x, target, like = _laid_out_alike(x if needs_grad.target else target, target)  # it is not kept for grad_x alone
    n, dtype = x.numel(), x.dtype
    grad_x = like if needs_grad.x else None
    grad_target = torch.empty_like(like) if needs_grad.target else None
    grad_y = restride(grad_y, like.stride()) if reduction == "none" else grad_y
    divisor = 0 if reduction == "none" else _divisor(reduction, n, batch)
    grid = ceil_div(n, TILE[dtype])
    if grad_target is None and dtype in losses.SINGLE:
        kl_div_bwd[grid, BLOCK](grad_y, target, grad_x, n, divisor, log_target, T=dtype)
    else:
        tensors = grad_y, x, target, grad_x, grad_target
        kl_div_bwd_target[grid, BLOCK](*tensors, n, divisor, log_target, T=dtype)
    return grad_x, grad_target


def _laid_out_alike(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Both inputs laid out alike and dense, and an empty tensor that is laid out so."""
    like = empty_output(x, target)
    return restride(x, like.stride()), restride(target, like.stride()), like


def _divisor(reduction: str, n: int, batch: int) -> int:
    return n if reduction == "mean" else batch if reduction == "batchmean" else 1


@_kl_div.interface(twin=torch.nn.functional.kl_div)
def kl_div(
    input: Tensor,
    target: Tensor,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
    log_target: bool = False,
) -> Tensor:
    """Kullback-Leibler divergence, target * (log(target) - input); as `torch.nn.functional.kl_div`.

    Args:
        input: log-probabilities, any shape; kernels serve fp16, bf16, fp32 and fp64.
        target: probabilities, or with `log_target` their logarithms; broadcasts with `input`, and gets a gradient too.
        size_average: deprecated, see `reduction`.
        reduce: deprecated, see `reduction`.
        reduction: "none", "sum", "batchmean" (the sum over the size of the first dimension of `input`), or "mean" over all
            elements, with PyTorch's warning that this is not the divergence.
        log_target: whether `target` is of logarithms.

    Returns:
        Tensor of shape () in the dtype of `input`; with "none" of the broadcast shape. A target of 0 adds nothing.

    Raises:
        InputError: an argument is no tensor or array of a floating-point dtype; the shapes do not broadcast;
            `reduction` is unknown.

    Example:
        >>> p, q = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.25, 0.75]])
        >>> cupyops.kl_div(q.log(), p, reduction="batchmean")
        tensor(0.1438)
    """
    if size_average is not None or reduce is not None:
        reduction = torch_private.legacy_reduction(size_average, reduce)
    elif reduction == "mean":
        _warn()
    arguments.choice("reduction", reduction, REDUCTIONS)
    arguments.floating("input", input)
    arguments.floating("target", target)
    arguments.same_device(input=input, target=target)
    batch = input.shape[0] if reduction == "batchmean" and input.dim() else 1
    # dim() first: tuples compare their sizes before their lengths, which would tie a symbolic size to another
    if input.dim() != target.dim() or input.shape != target.shape:
        shape = broadcast_shape(input=input, target=target)
        input, target = input.expand(shape), target.expand(shape)
    return _kl_div(input, target, reduction, bool(log_target), batch)


def _warn() -> None:
    """PyTorch's warning."""
    arguments.warn(
        'reduction="mean" divides by the number of elements, which is not the divergence; "batchmean" divides by the '
        "size of the batch. PyTorch announces that a later release of its own does so for both"
    )
