"""linear_act: an activation of a linear layer's outputs, and a residual that is added to it."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from .._dispatch.core import library
from .._dispatch.elementwise.activations import IN_PLACE, REFERENCES, activate, gradient
from .._dispatch.gemm import gemm
from .._dispatch.gemm.epilogues import ACTIVATIONS, LINEAR_ACT, MEASURED, fused
from .._dispatch.gemm.linear import check, gradients, multiply, rows_of, too_large, wants_gradient
from .._operator.derivation.autocast import POLICIES, dtype_for
from .._operator.floating import operator
from .._util import arguments
from .._util.strides import contiguous, is_dry


@operator("cupyops::linear_act", autocast="lower", sharding="...K, nK, n, ...n -> ...n")
def _linear_act(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, activation: str, keep: bool = True
) -> Tensor:
    y = REFERENCES[activation](F.linear(x, weight, bias))
    return y if residual is None else y + residual


@_linear_act.forward
def forward(x, weight, bias, residual, activation, keep):
    rows, (weight, bias, residual) = rows_of(x), contiguous(weight, bias, residual)
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    kept = None
    if keep and activation != "none":  # of relu alone, y tells where its slope is 0
        kept = y if activation == "relu" and residual is None else torch.empty_like(y)
    if plan := fused(LINEAR_ACT, rows, (weight,), measured=activation in MEASURED and residual is None):
        within, after = (residual, None) if plan.takes_residual else (None, residual)
        plan.run(y, None if kept is y else kept, activation, bias, within)
    else:
        z = kept if kept is not None else y if activation in IN_PLACE else torch.empty_like(y)
        multiply(rows, weight, bias, z, turn_b=True)
        activate(z, y, activation)
        after = residual
    if after is not None and not is_dry(y):
        library.call("torch.add", y, lambda: torch.add(y, after, out=y))
    return y, () if kept is None else (kept,)


@_linear_act.backward(
    reads={**dict.fromkeys(("x", "weight", "bias"), ("x", "weight", "bias")), "residual": ()}, apart=True
)
def backward(saved, grad_y, x, weight, bias, activation, needs_grad):
    grad_residual = grad_y if needs_grad.residual else None
    if not (needs_grad.x or needs_grad.weight or needs_grad.bias):
        return None, None, None, grad_residual
    grad_z = gradient(grad_y, saved[0] if saved else grad_y, activation)
    return *gradients(grad_z, x, weight, bias, needs_grad), grad_residual


@_linear_act.unsupported
def unsupported(x, weight, bias, residual, activation, keep):
    return too_large(math.prod(x.shape[:-1]), *weight.shape)


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
