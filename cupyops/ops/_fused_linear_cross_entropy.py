"""fused_linear_cross_entropy: the cross-entropy of a linear layer's outputs, of which only a part is in memory at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.jit import is_tracing
from torch.nn import Parameter
from torch.nn import functional as F

from .._dispatch.core import shardings
from .._dispatch.loss import losses
from .._dispatch.loss.linear import BIAS, WEIGHT, Given, Gradients, Scale, X, compute
from .._dispatch.loss.linear_scales import ONCE, add, scale_of_rows, scaled, taken
from .._operator.derivation.autocast import POLICIES, cast, dtype_for
from .._operator.derivation.distributed import is_spread
from .._operator.floating import operator
from .._util import arguments, torch_private

SCRATCH = 512 << 20
"""Bytes of logits that models of language get. On an H200 a step of the benchmark's Llama takes 0.2 ms more than with all of
them, with 240 MiB 2.4."""


@operator("cupyops::fused_linear_cross_entropy", sharding=shardings.fused_linear_cross_entropy)
def _linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    ignore_index: int,
    reduction: str,
    label_smoothing: float,
    wanted: int,
    scratch: int,
) -> Tensor:
    logits = F.linear(x, weight, bias)
    logits = logits.to(losses.accumulator(x.dtype))
    class_weight = None if class_weight is None else _from_bits(class_weight).to(logits.dtype)
    options = {"ignore_index": ignore_index, "label_smoothing": label_smoothing}
    return losses.reference(F.cross_entropy, logits, target, class_weight, reduction, **options)


@_linear_cross_entropy.forward
def forward(x, weight, target, bias, class_weight, ignore_index, reduction, label_smoothing, wanted, scratch):
    given = _launch_arguments(x, weight, target, bias, class_weight, ignore_index, label_smoothing, scratch)
    wanted = wanted if reduction != "none" else 0  # of a row's factor nothing is known yet
    dtype = losses.accumulator(x.dtype)
    each = torch.empty(x.shape[0], dtype=dtype, device=x.device)
    scale, total = scale_of_rows(given, reduction)
    gradients = compute(given, each, scale, wanted)
    saved = tuple(one for one in gradients if one is not None)
    if saved and wanted & ONCE:
        saved += (torch.zeros(1, dtype=torch.uint8, device="cpu"),)
    if reduction == "none":
        return each, saved
    y = torch.empty((), dtype=dtype, device=x.device)
    add(each, total, y)
    return y, saved


@_linear_cross_entropy.backward
def backward(
    saved,
    grad_y,
    x,
    weight,
    target,
    bias,
    class_weight,
    ignore_index,
    reduction,
    label_smoothing,
    wanted,
    scratch,
    needs_grad,
):
    given = _launch_arguments(x, weight, target, bias, class_weight, ignore_index, label_smoothing, scratch)
    grad_y = grad_y.to(losses.accumulator(x.dtype))
    needed = X * needs_grad.x + WEIGHT * needs_grad.weight + BIAS * needs_grad.bias
    if reduction == "none":
        each = torch.empty_like(grad_y)
        gradients = compute(given, each, Scale(grad_y.contiguous(), 1), needed)
    else:
        made, ours = taken(saved, wanted), True
        if made is None or needed & ~wanted:
            each = torch.empty(x.shape[0], dtype=grad_y.dtype, device=x.device)
            made = compute(given, each, scale_of_rows(given, reduction)[0], needed)
        else:
            ours = bool(wanted & ONCE)
        gradients = Gradients(*[scaled(one, grad_y, given, reduction, ours) for one in made])
    return gradients.x, gradients.weight, None, gradients.bias


@_linear_cross_entropy.unsupported
def unsupported(x, weight, target, bias, class_weight, ignore_index, reduction, label_smoothing, wanted, scratch):
    return "no classes" if weight.shape[0] == 0 else None


def _launch_arguments(x, weight, target, bias, class_weight, ignore_index, label_smoothing, scratch) -> Given:
    tensors = x.contiguous(), weight.contiguous(), target.contiguous(), losses.contiguous(bias)
    class_weight = None if class_weight is None else _from_bits(class_weight)
    return Given(*tensors, class_weight, ignore_index, label_smoothing, scratch)


def _to_bits(class_weight: Tensor) -> Tensor:
    """Return the weights' bits as integers: floating tensors must share one dtype, and autocast must not cast these."""
    wide = class_weight.to(losses.accumulator(class_weight.dtype)).resolve_neg().contiguous()
    if is_tracing():  # PyTorch cannot trace a view in another dtype; the reference takes the weights as they are
        return wide
    return wide.view(torch.int64 if wide.dtype is torch.float64 else torch.int32)


def _from_bits(class_weight: Tensor) -> Tensor:
    if class_weight.is_floating_point():
        return class_weight
    return class_weight.view(torch.float64 if class_weight.dtype is torch.int64 else torch.float32)


@_linear_cross_entropy.interface
def fused_linear_cross_entropy(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    scratch: int | None = None,
) -> Tensor:
    """`cross_entropy(linear(input, weight, bias), target, class_weight, ...)` without all the logits in memory.

    Beside the gradients it needs 240 MiB, or 512 bytes for each row where that is more. A gradient that is wanted is
    computed with the loss; with `reduction="none"`, and in a second backward of the same loss, in backward.

    Args:
        input: (..., K); kernels serve fp16, bf16, fp32 and fp64.
        weight, bias: (C, K) and (C), of the dtype of `input`.
        target: classes in [0, C), integers of the shape of `input` without K.
        class_weight: of each class, (C), of the dtype of `input`; it gets no gradient.
        ignore_index: a target of this value adds nothing to the loss, nor to its gradient.
        reduction: "none", "sum", or "mean" over the weights of the targets (NaN where there are none).
        label_smoothing: in [0, 1]; how much of the target is spread evenly over the classes.
        scratch: bytes of logits, in the place of 240 MiB. More of them may be faster where gradients are wanted, since
            products are of more rows.

    Returns:
        Tensor of shape () in float32, and in float64 for inputs of that; with "none" of the shape of `target`.

    Raises:
        InputError: shapes, dtypes or devices do not match, `reduction` is unknown, `label_smoothing` is outside [0, 1],
            `scratch` is no int of at least 1 or, on the CPU, a class out of range. On a GPU such a class prints itself and
            stops the kernel.

    Example:
        >>> x, weight = torch.zeros(2, 3), torch.zeros(4, 3)
        >>> cupyops.fused_linear_cross_entropy(x, weight, torch.tensor([0, 3]))
        tensor(1.3863)
    """
    _check(input, weight, target, bias, class_weight, ignore_index, reduction, label_smoothing)
    if scratch is not None and (isinstance(scratch, bool) or not isinstance(scratch, int) or scratch < 1):
        arguments.fail("scratch", scratch, "an int of at least 1: bytes, or None")
    dtype = dtype_for(POLICIES["lower"], input.device)
    input, weight, bias = cast((input, weight, bias), dtype) if dtype is not None else (input, weight, bias)
    bits = None if class_weight is None else _to_bits(class_weight)
    rows, indices = input.reshape(-1, input.shape[-1]), target.long().reshape(-1)
    wanted = _wanted(rows, weight, bias)
    parts = reduction == "mean" and is_spread(rows)  # each device has one of the sum
    options = ignore_index, "sum" if parts else reduction, float(label_smoothing), wanted, scratch or 0
    y = _linear_cross_entropy(rows, weight, indices, bias, bits, *options)
    if parts:
        y = y / losses.counted(indices, class_weight, ignore_index)
    return y.reshape(target.shape) if reduction == "none" else y


def _wanted(x: Tensor, weight: Tensor, bias: Tensor | None) -> int:
    """The gradients that autograd will ask for."""
    if not torch.is_grad_enabled():
        return 0
    wanted = X * x.requires_grad + WEIGHT * weight.requires_grad
    wanted += BIAS * (bias is not None and bias.requires_grad)
    plain = type(x) in (Tensor, Parameter) and type(weight) in (Tensor, Parameter)
    alone = plain and not is_dynamo_compiling() and not torch_private.dispatch_modes()
    return wanted + ONCE if wanted and alone else wanted


def _check(
    input: Any,
    weight: Any,
    target: Any,
    bias: Any,
    class_weight: Any,
    ignore_index: Any,
    reduction: Any,
    label_smoothing: Any,
) -> None:
    losses.check_input(input, target, ignore_index)
    arguments.floating("weight", weight)
    for name, value in (("bias", bias), ("class_weight", class_weight)):
        arguments.optional_tensor(name, value)
    arguments.same_device(input=input, weight=weight, bias=bias, class_weight=class_weight)
    if not arguments.autocast(input.device):
        arguments.same_dtype(input=input, weight=weight, bias=bias, class_weight=class_weight)
    if weight.dim() != 2 or weight.shape[1] != input.shape[-1]:
        arguments.fail("weight", weight, f"shape (C, {input.shape[-1]}), as input is of shape {tuple(input.shape)}")
    for name, value in (("bias", bias), ("class_weight", class_weight)):
        if value is not None and tuple(value.shape) != (weight.shape[0],):
            arguments.fail(name, value, f"shape ({weight.shape[0]},), one for each class")
    if class_weight is not None and class_weight.requires_grad:
        arguments.fail(
            "class_weight", class_weight, "one that requires no gradient: the loss has none with respect to it"
        )
    if target.dtype.is_floating_point or target.dtype.is_complex or target.dtype is torch.bool:
        arguments.fail("target", target, "a tensor of integers")
    if tuple(target.shape) != tuple(input.shape[:-1]):
        arguments.fail("target", target, f"classes of shape {tuple(input.shape[:-1])}, that of input without the last")
    arguments.choice("reduction", reduction, tuple(losses.REDUCTIONS))
    if not isinstance(label_smoothing, (int, float)) or not 0 <= label_smoothing <= 1:
        arguments.fail("label_smoothing", label_smoothing, "a number in [0, 1]")
