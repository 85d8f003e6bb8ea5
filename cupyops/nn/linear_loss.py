"""A head and what losses are made of its outputs, of which only a part is in memory at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .._operator.derivation.autocast import POLICIES, cast, dtype_for
from .._operator.derivation.distributed import is_spread
from .._util import arguments, torch_private
from ..ops._fused_linear_cross_entropy import fused_linear_cross_entropy
from ..ops._linear import linear

MOST_LOGITS = 2**25  # in memory at a time: 128 MiB in fp32, and some such beside


class Tokens(NamedTuple):
    """The log-probabilities of tokens, in fp32 (fp64 for fp64 inputs), of which losses are made."""

    log_prob: Tensor  # of its target; 0 where that is ignored
    log_sum: Tensor  # of the exponentials of all logits
    mean_log_prob: Tensor  # over all classes
    best: Tensor  # the class with the largest logit; no gradient goes through it


def linear_log_prob(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> Tensor:
    """The log-probability of each target, by a linear layer's outputs as logits, without all of these in memory.

    What preference and policy losses are made of; `cupyops.nn.preference` has some. By the kernels of
    `cupyops.fused_linear_cross_entropy`; with `softcap` or `temperature` by PyTorch's functions, a chunk of rows at a time,
    whose logits backward computes again. A backward that is itself to be differentiated has all the logits in memory.

    Args:
        input: (..., K), fp16, bf16, fp32 or fp64.
        weight: (C, K), of the dtype of `input`.
        target: classes in [0, C), integers of the shape of `input` without K.
        bias: (C).
        ignore_index: where a target is this, the result is 0, and no gradient comes of it.
        softcap: the logits become softcap * tanh(logits / softcap), as Gemma's.
        temperature: by which the logits are divided then.

    Returns:
        Tensor of the shape of `target`, in float32, or float64 for inputs of that.

    Raises:
        InputError: shapes, dtypes or devices do not match, `softcap` or `temperature` is not above 0, inputs of `softcap`
            or `temperature` are DTensors, or, on the CPU, a class is out of range.

    Example:
        >>> x, weight = torch.zeros(2, 3), torch.zeros(4, 3)
        >>> cupyops.nn.linear_log_prob(x, weight, torch.tensor([0, -100]))
        tensor([-1.3863,  0.0000])
    """
    if softcap is None and temperature == 1:
        loss = fused_linear_cross_entropy(input, weight, target, bias, ignore_index=ignore_index, reduction="none")
        return torch.where(target == ignore_index, 0.0, -loss)  # -loss would be -0
    return tokens(input, weight, target, bias, ignore_index, softcap, temperature).log_prob


class LinearCrossEntropy(torch.nn.Linear):
    """A model's head and its loss in one: cross-entropy of the linear layer's outputs without all of them in memory,
    by `cupyops.fused_linear_cross_entropy`. The weight is here, so that FSDP2 gathers it and a `state_dict` has it, as
    of `torch.nn.Linear`; `head.weight = embedding.weight` ties it.

    With `softcap`, `z_loss` or `accuracy=True` PyTorch's functions compute a chunk of rows at a time, and again in backward;
    one that is itself to be differentiated has all the logits in memory.

    Args:
        in_features, out_features, bias, device, dtype: as `torch.nn.Linear`, but that `bias` is False unless asked for.
        ignore_index: a target of this value adds nothing.
        reduction: "none", "sum", or "mean" over the targets that count (NaN where there are none).
        label_smoothing: in [0, 1]; how much of the target is spread evenly over the classes.
        softcap: the logits become softcap * tanh(logits / softcap).
        z_loss: to each token's loss is added z_loss * log_sum^2, log_sum that of the exponentials of its logits.

    Raises:
        InputError: what `cupyops.fused_linear_cross_entropy` raises it for, or an option out of its range.

    Example:
        >>> head = cupyops.nn.LinearCrossEntropy(3, 4)
        >>> _ = torch.nn.init.zeros_(head.weight)
        >>> head(torch.zeros(2, 3), torch.tensor([0, 3]))
        tensor(1.3863, grad_fn=<...>)
        >>> head(torch.zeros(2, 3)).shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        *,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        softcap: float | None = None,
        z_loss: float = 0.0,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        arguments.choice("reduction", reduction, ("none", "sum", "mean"))
        if not isinstance(label_smoothing, (int, float)) or not 0 <= label_smoothing <= 1:
            arguments.fail("label_smoothing", label_smoothing, "a number in [0, 1]")
        if not isinstance(z_loss, (int, float)) or not z_loss >= 0:
            arguments.fail("z_loss", z_loss, "a number of at least 0")
        _check_number("softcap", softcap)
        self.ignore_index, self.reduction, self.label_smoothing = ignore_index, reduction, label_smoothing
        self.softcap, self.z_loss = softcap, z_loss

    def forward(  # type: ignore[override]
        self,
        input: Tensor,
        target: Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        accuracy: bool = False,
    ) -> Any:
        """The loss, in float32 (float64 of that); without a target the logits.

        Args:
            input: (..., in_features).
            target: classes, integers of the shape of `input` without its last dimension.
            num_items_in_batch: what the sum of the losses is divided by in place of the count of this call's targets, as
                where gradients are accumulated over several calls.
            accuracy: return (loss, accuracy): beside it the share of the targets that have the largest logit.
        """
        if target is None:
            logits = linear(input, self.weight, self.bias)
            return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)
        if num_items_in_batch is not None and self.reduction == "none":
            arguments.fail("num_items_in_batch", num_items_in_batch, 'None beside reduction="none"')
        reduction = self.reduction if num_items_in_batch is None else "sum"
        if self.softcap is None and not self.z_loss and not accuracy:
            options = {
                "ignore_index": self.ignore_index,
                "label_smoothing": self.label_smoothing,
                "reduction": reduction,
            }
            loss = fused_linear_cross_entropy(input, self.weight, target, self.bias, **options)  # type: ignore[arg-type]
            return loss if num_items_in_batch is None else loss / num_items_in_batch
        found = tokens(input, self.weight, target, self.bias, self.ignore_index, self.softcap)
        counted = target != self.ignore_index
        smoothed = (1 - self.label_smoothing) * found.log_prob + self.label_smoothing * found.mean_log_prob
        each = torch.where(counted, self.z_loss * found.log_sum.square() - smoothed, 0.0)
        loss = each if reduction == "none" else each.sum()
        if reduction == "mean" or num_items_in_batch is not None:
            loss = loss / (counted.sum() if num_items_in_batch is None else num_items_in_batch)
        return (loss, ((found.best == target) & counted).sum() / counted.sum()) if accuracy else loss

    def extra_repr(self) -> str:
        options = {name: getattr(self, name) for name in ("reduction", "label_smoothing", "softcap", "z_loss")}
        return ", ".join([super().extra_repr(), *(f"{name}={value!r}" for name, value in options.items())])


# --- a chunk at a time ---


def tokens(
    input: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    softcap: float | None = None,
    temperature: float = 1.0,
) -> Tokens:
    """The log-probability of each token, in the shape of `target`."""
    check(input, weight, bias)
    _check_number("softcap", softcap)
    _check_number("temperature", temperature)
    if target.dtype.is_floating_point or target.dtype.is_complex or target.dtype is torch.bool:
        arguments.fail("target", target, "a tensor of integers")
    if target.shape != input.shape[:-1] or target.device != input.device:
        arguments.fail("target", target, f"classes of shape {tuple(input.shape[:-1])} on {input.device}")
    classes = weight.shape[0]
    flat = target.reshape(-1).long()
    ignored = flat == ignore_index
    arguments.in_range("target {}", flat, classes, "a class", ignore_index)
    compute = functools.partial(_statistics, softcap, temperature)
    rows = input.reshape(-1, input.shape[-1]), torch.where(ignored, 0, flat)
    found = chunked(compute, rows, (weight, bias), classes)
    log_prob = torch.where(ignored, 0.0, found[0])
    return Tokens(*(one.reshape(target.shape) for one in (log_prob, *found[1:])))


def _statistics(softcap: float | None, temperature: float, x: Tensor, target: Tensor, weight: Tensor, bias: Any) -> Any:
    logits = logits_of(x, weight, bias, temperature, softcap)
    log_sum = logits.logsumexp(-1)
    picked = logits.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return picked - log_sum, log_sum, logits.mean(-1) - log_sum, logits.detach().argmax(-1)


def logits_of(x: Tensor, weight: Tensor, bias: Any, temperature: float, softcap: float | None = None) -> Tensor:
    """Compute logits in fp32 or fp64."""
    logits = F.linear(x, weight, bias)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    return logits if temperature == 1 else logits / temperature


def chunked(
    compute: Callable[..., Sequence[Tensor]], rows: Sequence[Tensor], whole: Sequence[Tensor | None], classes: int
) -> tuple[Tensor, ...]:
    """`compute(*rows, *whole)`, whose results have a number for each row, over as many rows at a time as memory is to have
    logits of; of all at once inside torch.func and forward-mode AD. Gradients of what is `whole` are added up in fp32."""
    dtype = dtype_for(POLICIES["lower"], rows[0].device)
    if dtype is not None:
        floating = [one.dtype.is_floating_point for one in rows]
        rows = [cast((one,), dtype)[0] if is_float else one for one, is_float in zip(rows, floating)]
        whole = cast(tuple(whole), dtype)
    if torch_private.functorch_active() or torch_private.forward_mode():
        return tuple(compute(*rows, *whole))
    size = max(1, MOST_LOGITS // max(1, classes))
    if (
        torch.compiler.is_compiling()
    ):  # Dynamo follows no autograd.grad in a backward; gradients are added up as they are
        from torch.utils.checkpoint import checkpoint

        tensors = (*rows, *whole)
        parts = [_part(tensors, len(rows), chunk) for chunk in _chunks(tensors, size)]
        columns = zip(*(checkpoint(compute, *part, use_reentrant=False) for part in parts))
        return tuple(torch.cat(column) for column in columns)
    return tuple(_Chunked.apply(compute, size, len(rows), *rows, *whole))


class _Chunked(torch.autograd.Function):
    """See `chunked`."""

    @staticmethod
    def forward(ctx: Any, compute: Any, size: int, split: int, *tensors: Any) -> Any:
        ctx.compute, ctx.size, ctx.split = compute, size, split
        ctx.save_for_backward(*tensors)
        parts = [compute(*_part(tensors, split, chunk)) for chunk in _chunks(tensors, size)]
        found = tuple(torch.cat(column) for column in zip(*parts))
        ctx.mark_non_differentiable(*(one for one in found if not one.dtype.is_floating_point))
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        tensors, split, wanted = ctx.saved_tensors, ctx.split, ctx.needs_input_grad[3:]
        if torch.is_grad_enabled():  # create_graph: gradients that have one
            return None, None, None, *_gradients(ctx.compute, tensors, wanted, grads, create_graph=True)
        found: list[Any] = [None] * len(tensors)
        for index in (place for place, needed in enumerate(wanted) if needed):
            one = tensors[index]  # of rows in their own dtype, since each is written once
            wide = one.dtype if index < split else torch.promote_types(one.dtype, torch.float32)
            found[index] = torch.zeros_like(one, dtype=wide)
        for chunk in _chunks(tensors, ctx.size):
            own = [
                one if one is None else one.detach().requires_grad_(needed)
                for one, needed in zip(_part(tensors, split, chunk), wanted)
            ]
            for place, gradient in enumerate(_gradients(ctx.compute, own, wanted, [grad[chunk] for grad in grads])):
                if gradient is not None:
                    (found[place][chunk] if place < split else found[place]).add_(gradient)
        return None, None, None, *(
            one if one is None else one.to(tensor.dtype) for one, tensor in zip(found, tensors)
        )  # fmt: skip


def _gradients(compute: Any, tensors: Any, wanted: Any, grads: Any, create_graph: bool = False) -> list[Any]:
    """Return the gradients that are wanted, and None for the others."""
    device = tensors[0].device
    plainly = torch.autocast(device.type, enabled=False) if arguments.autocast(device) else nullcontext()
    with torch.enable_grad(), plainly:
        pairs = [(y, grad) for y, grad in zip(compute(*tensors), grads) if y.requires_grad]
        sources = [one for one, needed in zip(tensors, wanted) if needed]
        outputs, given = [y for y, _ in pairs], [grad for _, grad in pairs]
        found = iter(torch.autograd.grad(outputs, sources, given, allow_unused=True, create_graph=create_graph))
    return [next(found) if needed else None for needed in wanted]


def _chunks(tensors: Sequence[Any], size: int) -> list[slice]:
    rows = tensors[0].shape[0]
    return [slice(start, start + size) for start in range(0, max(rows, 1), size)]


def _part(tensors: Sequence[Any], split: int, chunk: slice) -> list[Any]:
    return [one[chunk] if place < split else one for place, one in enumerate(tensors)]


def check(input: Tensor, weight: Tensor, bias: Tensor | None, name: str = "") -> None:
    """A linear layer's arguments, whose names begin with `name`."""
    arguments.floating(f"{name}input", input)
    arguments.floating(f"{name}weight", weight)
    arguments.optional_tensor(f"{name}bias", bias)
    given = {f"{name}input": input, f"{name}weight": weight, f"{name}bias": bias}
    arguments.same_device(**given)
    if not arguments.autocast(input.device):
        arguments.same_dtype(**given)
    for what, one in given.items():
        if is_spread(one):
            arguments.fail(what, one, "a plain tensor: logits in chunks are not split over devices")
    if input.dim() == 0 or weight.dim() != 2 or weight.shape[1] != input.shape[-1]:
        arguments.fail(f"{name}weight", weight, f"shape (C, K), where {name}input is {tuple(input.shape)}, (..., K)")
    if weight.shape[0] == 0:
        arguments.fail(f"{name}weight", weight, "a class or more")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        arguments.fail(f"{name}bias", bias, f"shape ({weight.shape[0]},), one for each class")


def _check_number(name: str, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
        arguments.fail(name, value, "a number above 0")
