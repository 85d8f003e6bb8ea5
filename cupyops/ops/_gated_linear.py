"""gated_linear: f(x @ weight_gate.T) * (x @ weight_up.T), the first half of a gated feed-forward layer."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.nn import functional as F

from .._dispatch import gated
from .._dispatch.core import library, shardings
from .._dispatch.core.forms import Forms
from .._dispatch.elementwise.activations import REFERENCES
from .._dispatch.gemm import gemm
from .._dispatch.gemm.epilogues import GATED_LINEAR, GATES, LINEAR_ACT, fused
from .._dispatch.gemm.linear import multiply, rows_of, too_large, wants_gradient
from .._operator.floating import operator
from .._util import arguments
from .._util.strides import contiguous, is_dry
from ..errors import InputError

_BOTH = SimpleNamespace(gate=True, up=True)  # the gradients that are wanted of the products


@operator("cupyops::gated_linear", autocast="lower", sharding=shardings.gated_linear)
def _gated_linear(x: Tensor, weight: Tensor, weight_up: Tensor | None, activation: str, keep: bool = True) -> Tensor:
    weight, weight_up = _halves(weight, weight_up)
    return REFERENCES[activation](F.linear(x, weight)) * F.linear(x, weight_up)  # which a subclass may override


@_gated_linear.forward
def forward(x, weight, weight_up, activation, keep):
    rows, (weight, weight_up) = rows_of(x), contiguous(weight, weight_up)
    halves, m = _halves(weight, weight_up), math.prod(x.shape[:-1])
    n = halves[0].shape[0]
    # the products: of packed weights side by side, which makes one product of each gradient; else one after the other
    z_shape = (m, 2 * n) if weight_up is None else (2, m, n)
    y, z = x.new_empty((m, n)), None
    if plan := fused(GATED_LINEAR, rows, halves, measured=activation == "silu"):
        z = x.new_empty(z_shape) if keep else None
        plan.run(y, z, activation)
    else:
        z = x.new_empty(z_shape)
        for one, part in [(weight, z)] if weight_up is None else zip(halves, z):
            multiply(rows, one, None, part, turn_b=True)
        y = gated.forward(_forms(activation)[0], *_products(z), GATES[activation])
    return y.view(*x.shape[:-1], n), (z,) if keep else ()


@_gated_linear.backward(apart=True)
def backward(saved, grad_y, x, weight, weight_up, activation, needs_grad):
    rows, weights = rows_of(x), [weight] if weight_up is None else [weight, weight_up]
    z = _products(*saved)
    grads = gated.backward(_forms(activation)[1], rows_of(grad_y), *z, _BOTH, GATES[activation])
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_grad.x else None
    if grad_x is not None:
        _add_products(grads[: len(weights)], weights, rows_of(grad_x))
    grad_weights = [None, None]
    for index, (one, need) in enumerate(zip(weights, (needs_grad.weight, needs_grad.weight_up))):
        if need:
            grad_weights[index] = torch.empty_like(one, memory_format=torch.contiguous_format)
            multiply(grads[index], rows, None, grad_weights[index], turn_a=True)
    return grad_x, *grad_weights


@_gated_linear.unsupported
def unsupported(x, weight, weight_up, activation, keep):
    n, k = weight.shape
    return too_large(math.prod(x.shape[:-1]), 2 * n, k)


def _forms(activation: str) -> tuple[Forms, Forms]:
    """Forms of the gate alone, forward and backward."""
    return gated.SWIGLU if activation == "silu" else gated.GEGLU


def _products(z: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the products as gated activations take them: packed rows are one tensor."""
    return (z, None) if z.dim() == 2 else (z[0], z[1])


def _halves(weight: Tensor, weight_up: Tensor | None) -> tuple[Tensor, Tensor]:
    """The gate's weight and the other; packed, the gate's is the first half."""
    if weight_up is not None:
        return weight, weight_up
    half = weight.shape[0] // 2
    return weight[:half], weight[half:]


def _add_products(a: list[Tensor], b: list[Tensor], y: Tensor) -> None:
    """y = the sum of a[i] b[i], of one or two: the first product is the residual of the second."""
    if len(a) == 1:
        return multiply(a[0], b[0], None, y)
    plan = fused(LINEAR_ACT, a[1], b[1:], turn=False, measured=False)
    first = y if plan is None else torch.empty_like(y)
    multiply(a[0], b[0], None, first)
    if plan is not None:
        plan.run(y, None, "none", None, first)
    elif not is_dry(y):
        library.call("torch.addmm", y, lambda: torch.addmm(y, a[1], b[1], out=y))
    return None


@_gated_linear.interface
def gated_linear(input: Tensor, weight: Tensor, weight_up: Tensor | None = None, activation: str = "silu") -> Tensor:
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
        raise InputError(
            f"weight has shape {tuple(weight.shape)}, expected an even number of rows, or weight_up as well"
        )
    return _gated_linear(input, weight, weight_up, activation, wants_gradient(input, weight, weight_up))
