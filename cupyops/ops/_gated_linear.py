"""gated_linear: f(x @ weight_gate.T) * (x @ weight_up.T), the first half of a gated feed-forward layer."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import Tensor

from .._dispatch import gated, gemm, library, shardings
from .._dispatch.epilogues import GATED_LINEAR, GATES, fused
from .._dispatch.linear import multiply, rows_of, too_large
from .._operator.floating import operator
from .._util import arguments
from .._util.strides import contiguous, is_dry
from ..errors import InputError
from . import _geglu, _swiglu
from ._linear_act import FUNCTIONS

_BOTH = SimpleNamespace(gate=True, up=True)  # the gradients that are wanted of the products


@operator("cupyops::gated_linear", autocast="lower", sharding=shardings.gated_linear)
def _gated_linear(x: Tensor, weight: Tensor, weight_up: Tensor | None, activation: str) -> Tensor:
    weight, weight_up = _halves(weight, weight_up)
    return FUNCTIONS[activation](x @ weight.mT) * (x @ weight_up.mT)


@_gated_linear.forward
def forward(x, weight, weight_up, activation, needs_grad=None):
    rows, (weight, weight_up) = rows_of(x), contiguous(weight, weight_up)
    halves = _halves(weight, weight_up)
    n, (m, _) = halves[0].shape[0], rows.shape
    if (plan := fused(GATED_LINEAR, rows, halves)) is None:
        parts = [x.new_empty((m, one.shape[0])) for one in (weight, weight_up) if one is not None]
        for one, part in zip((weight, weight_up), parts):
            multiply(rows, one, None, part, turn_b=True)
        y = gated.forward(_family(activation).FORWARD, parts[0], parts[1] if len(parts) > 1 else None, GATES[activation])
        saved = tuple(parts) if needs_grad is not None else ()
    else:
        y = x.new_empty((m, n))
        saved = () if needs_grad is None else (x.new_empty((m, 2 * n)),)
        plan.run(y, saved[0] if saved else None, activation)
    return y.view(*x.shape[:-1], n), saved


@_gated_linear.backward(reads={"x": ("weight", "weight_up"), "weight": ("x",), "weight_up": ("x",)})
def backward(saved, grad_y, x, weight, weight_up, activation, needs_grad):
    rows, grad_rows, (gate, up) = rows_of(x), rows_of(grad_y), (*saved, None)[:2]
    grads = gated.backward(_family(activation).BACKWARD, grad_rows, gate, up, _BOTH, GATES[activation])
    parts = list(grads) if up is not None else [grads[0]]
    if up is None and weight_up is not None:
        parts = list(parts[0].chunk(2, 1))
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_grad.x else None
    if grad_x is not None:
        _add_products(parts, [weight] if weight_up is None else [weight, weight_up], rows_of(grad_x))
    grad_weights = [None, None]
    for index, (part, one, need) in enumerate(
        zip(parts, (weight, weight_up), (needs_grad.weight, needs_grad.weight_up))
    ):
        if need:
            grad_weights[index] = torch.empty_like(one, memory_format=torch.contiguous_format)
            multiply(part, rows, None, grad_weights[index], turn_a=True)
    return grad_x, *grad_weights


@_gated_linear.unsupported
def unsupported(x, weight, weight_up, activation):
    n, k = weight.shape
    return too_large(math.prod(x.shape[:-1]), 2 * n, k)


def _family(activation: str):
    return _swiglu if activation == "silu" else _geglu


def _halves(weight: Tensor, weight_up: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gate's weight and the other; packed, the gate's is the first half."""
    if weight_up is not None:
        return weight, weight_up
    half = weight.shape[0] // 2
    return weight[:half], weight[half:]


def _add_products(a: list[Tensor], b: list[Tensor], y: Tensor) -> None:
    """y = the sum of a[i] b[i]."""
    multiply(a[0], b[0], None, y)
    for left, right in zip(a[1:], b[1:]):
        if library.is_wanted(y):
            library.call("torch.addmm", y, lambda left=left, right=right: torch.addmm(y, left, right, out=y))
            continue
        more = torch.empty_like(y)
        multiply(left, right, None, more)
        if not is_dry(y):
            library.call("torch.add", y, lambda more=more: torch.add(y, more, out=y))


@_gated_linear.interface
def gated_linear(
    input: Tensor, weight: Tensor, weight_up: Tensor | None = None, activation: str = "silu"
) -> Tensor:
    """f(input @ weight.T) * (input @ weight_up.T), for an activation f; on Hopper one product can compute all of it.

    It is the first half of a gated feed-forward layer, of "GLU Variants Improve Transformer", Shazeer, 2020. What backward
    needs beside the arguments are the two products, in the dtype of `input`.

    Args:
        input: (..., in_features); fp16, bf16, fp32 and fp64 by kernels (summed in fp32, fp64 in fp64).
        weight: of the gate, (features, in_features), of the dtype of `input`. Without `weight_up` it is
            (2 * features, in_features), the gate's rows first.
        weight_up: of what the gate is multiplied by, of the shape and dtype of `weight`.
        activation: "silu", "gelu" or "gelu_tanh".

    Returns:
        Tensor (..., features), contiguous.

    Raises:
        InputError: an argument is no tensor; shapes do not fit; dtypes or devices differ; `activation` is unknown.

    Example:
        >>> x, gate, up = torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, -1.0]]), torch.tensor([[3.0, 4.0]])
        >>> cupyops.gated_linear(x, gate, up)
        tensor([[-2.9584]])
    """
    arguments.tensor("input", input)
    arguments.tensor("weight", weight)
    arguments.optional_tensor("weight_up", weight_up)
    arguments.choice("activation", activation, tuple(GATES))
    arguments.same_device(input=input, weight=weight, weight_up=weight_up)
    gemm.check_dtypes(input=input, weight=weight, weight_up=weight_up)
    if input.dim() < 1:
        arguments.fail("input", input, "at least 1 dimension")
    if weight.dim() != 2 or weight.shape[1] != input.shape[-1]:
        wanted = f"(features, {input.shape[-1]}), as input has shape {tuple(input.shape)}"
        raise InputError(f"weight has shape {tuple(weight.shape)}, expected {wanted}")
    if weight_up is not None and weight_up.shape != weight.shape:
        arguments.fail("weight_up", weight_up, f"the shape of weight, {tuple(weight.shape)}")
    if weight_up is None and weight.shape[0] % 2:
        raise InputError(f"weight has shape {tuple(weight.shape)}, expected an even number of rows, or weight_up as well")
    return _gated_linear(input, weight, weight_up, activation)
