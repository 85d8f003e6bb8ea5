"""linear_act: an activation of a linear layer's outputs, and a residual that is added to it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from .._dispatch import gemm
from .._dispatch.broadcast import fill
from .._dispatch.elementwise import by_vectors
from .._dispatch.epilogues import ACTIVATIONS, LINEAR_ACT, fused
from .._dispatch.linear import gradients, multiply, rows_of, too_large
from .._operator.derivation.autocast import POLICIES, dtype_for
from .._operator.floating import operator
from .._util import arguments
from .._util.strides import contiguous
from ._add import FORWARD as ADD
from ._gelu import gelu_bwd, gelu_fwd
from ._linear import check
from ._relu import relu_bwd, relu_fwd
from ._silu import silu_bwd, silu_fwd

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}


@operator("cupyops::linear_act", autocast="lower", sharding="...K, nK, n, ...n -> ...n")
def _linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, keep: bool = True
) -> Tensor:
    y = FUNCTIONS[activation](F.linear(x, weight, bias))
    return y if residual is None else y + residual


@_linear_act.forward
def forward(x, weight, bias, residual, activation, keep):
    rows, (weight, bias, residual) = rows_of(x), contiguous(weight, bias, residual)
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    kept = None
    if keep and activation != "none":  # of relu alone, y tells where its slope is 0
        kept = y if activation == "relu" and residual is None else torch.empty_like(y)
    if plan := fused(LINEAR_ACT, rows, (weight,)):
        plan.run(y, None if kept is y else kept, activation, bias, residual)
    else:
        value = y if residual is None else torch.empty_like(y)
        z = torch.empty_like(y) if kept is None and activation.startswith("gelu") else value if kept is None else kept
        multiply(rows, weight, bias, z, turn_b=True)
        _activate(z, value, activation)
        if residual is not None:
            fill(ADD, y, (value, residual), 1.0)
    return y, () if kept is None else (kept,)


@_linear_act.backward(reads={**dict.fromkeys(("x", "weight", "bias"), ("x", "weight", "bias")), "residual": ()})
def backward(saved, grad_y, x, weight, bias, activation, needs_grad):
    grad_residual = grad_y if needs_grad.residual else None
    if not (needs_grad.x or needs_grad.weight or needs_grad.bias):
        return None, None, None, grad_residual
    grad_z = grad_y if activation == "none" else _slope(grad_y, *saved, activation)
    return *gradients(grad_z, x, weight, bias, needs_grad), grad_residual


@_linear_act.unsupported
def unsupported(x, weight, bias, residual, activation, keep):
    return too_large(math.prod(x.shape[:-1]), *weight.shape)


def _activate(z: Tensor, y: Tensor, activation: str) -> None:
    """y = f(z); but for gelu's, z may be y."""
    launch, n, dtype = by_vectors(y), y.numel(), y.dtype
    if activation == "relu":
        relu_fwd[launch](z, y, None, n, T=dtype)
    elif activation == "silu":
        silu_fwd[launch](z, y, n, T=dtype)
    elif activation != "none":
        gelu_fwd[launch](z, y, n, T=dtype, TANH=activation == "gelu_tanh")


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd will ask for the gradient of a tensor; `needs_grad` does not say so inside torch.compile."""
    return torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)


def _slope(grad_y: Tensor, z: Tensor, activation: str) -> Tensor:
    """The gradient of z."""
    grad_z = torch.empty_like(grad_y)
    launch, n, dtype = by_vectors(grad_z), grad_z.numel(), grad_z.dtype
    if activation == "relu":
        relu_bwd[launch](grad_y, z, None, grad_z, n, T=dtype)
    elif activation == "silu":
        silu_bwd[launch](grad_y, z, grad_z, n, T=dtype)
    else:
        gelu_bwd[launch](grad_y, z, grad_z, n, T=dtype, TANH=activation == "gelu_tanh")
    return grad_z


@_linear_act.interface
def linear_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: str = "gelu",
    residual: Tensor | None = None,
) -> Tensor:
    """f(input @ weight.T + bias) + residual, for an activation f; on Hopper the epilogue of the product can compute it.

    What backward needs beside the arguments is one tensor of the shape of the result: what f was given, or of relu without
    a residual the result itself.

    Args:
        input: (..., in_features); fp16, bf16, fp32 and fp64 by kernels (summed in fp32, fp64 in fp64).
        weight: (out_features, in_features), of the dtype of `input`.
        bias: (out_features,), of the dtype of `input`.
        activation: "none", "relu", "gelu", "gelu_tanh" or "silu"; as in `cupyops.gelu`, with "gelu_tanh" its
            approximation by tanh.
        residual: (..., out_features), of the dtype of `input`. Under autocast it keeps its own, and so does the result.

    Returns:
        Tensor (..., out_features), contiguous.

    Raises:
        InputError: an argument is no tensor; shapes do not fit; dtypes or devices differ; `activation` is unknown.

    Example:
        >>> x, weight = torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [-5.0, -6.0]])
        >>> cupyops.linear_act(x, weight, torch.tensor([0.0, 1.0]), "relu", residual=torch.ones(1, 2))
        tensor([[12.,  1.]])
    """
    check(input, weight, bias)
    if weight.dim() != 2:
        arguments.fail("weight", weight, "shape (out_features, in_features)")
    arguments.choice("activation", activation, tuple(ACTIVATIONS))
    arguments.optional_tensor("residual", residual)
    if residual is not None:
        shape = (*input.shape[:-1], weight.shape[0])
        arguments.same_device(input=input, residual=residual)
        gemm.check_dtypes(input=input, residual=residual)
        if tuple(residual.shape) != shape:
            arguments.fail("residual", residual, f"shape {tuple(shape)}, that of the result")
        lower = dtype_for(POLICIES["lower"], input.device)
        if lower is not None and residual.dtype != lower:  # autocast casts what is multiplied, no sum
            return _linear_act(input, weight, bias, None, activation, wants_gradient(input, weight, bias)) + residual
    return _linear_act(input, weight, bias, residual, activation, wants_gradient(input, weight, bias))
