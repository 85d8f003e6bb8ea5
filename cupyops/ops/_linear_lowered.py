"""linear_lowered: a linear layer under autocast, whose weight is of float32 and whose product is of a half type."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._dispatch.core import library
from .._dispatch.core.forms import Library
from .._dispatch.core.gpu import gpu
from .._dispatch.core.rows import is_symbolic
from .._dispatch.gemm.linear import PRODUCT, multiply, problem, rows_of, too_large
from .._dispatch.reduce.sum_var import total
from .._operator.floating import operator
from .._util.strides import is_dry


@operator("cupyops::linear_lowered", mixed=("weight", "bias"), sharding="...k, nk, +n, nk, +n -> ...n")
def _linear_lowered(
    x: Tensor, weight: Tensor, bias: Tensor | None, half: Tensor | None, half_bias: Tensor | None
) -> Tensor:
    return torch.nn.functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


@_linear_lowered.forward
def forward(x, weight, bias, half, half_bias):
    if half is None:
        half = weight.to(x.dtype, memory_format=torch.contiguous_format)
    if half_bias is None and bias is not None:
        half_bias = bias.to(x.dtype).contiguous()
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    multiply(rows_of(x), half, half_bias, y, turn_b=True)
    return y, (half,)


# weight is not among them: its copy serves every gradient, but the gradient of one reads the weight itself
@_linear_lowered.backward(reads={"x": ("weight",)}, apart=True)
def backward(saved, grad_y, x, needs_grad):
    rows, grad_rows, (half,) = rows_of(x), rows_of(grad_y), saved  # whose shape is that of weight
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_grad.x else None
    grad_weight = half.new_empty(half.shape, dtype=torch.float32) if needs_grad.weight else None
    grad_bias = None
    if grad_x is not None:
        multiply(grad_rows, half, None, grad_x)
    if grad_weight is not None and not is_dry(grad_y):
        _multiply_in_full(grad_rows, rows, grad_weight)
    if needs_grad.bias:
        if len(grad_rows):
            grad_bias = total(grad_rows, [0], torch.float32, False)
        else:
            grad_bias = half.new_zeros(len(half), dtype=torch.float32)
    return grad_x, grad_weight, grad_bias


def _multiply_in_full(a: Tensor, b: Tensor, y: Tensor) -> None:
    """y = a^T b, which PyTorch's function need not round on the way to a wider type."""
    found = problem(a.shape, a.stride(), True, b.shape, b.stride(), False, False, a.dtype)
    if isinstance(PRODUCT.plan(found, gpu(a.device)), Library):
        return library.multiply_in_full(a.T, b, y)
    half = torch.empty_like(y, dtype=a.dtype)
    multiply(a, b, None, half, turn_a=True)
    y.copy_(half)
    return None


@_linear_lowered.unsupported
def unsupported(x, weight, bias, half, half_bias):
    n, k = weight.shape
    m = math.prod(x.shape[:-1])
    if reason := too_large(m, n, k):
        return reason
    if weight.dtype is not torch.float32 or (bias is not None and bias.dtype is not torch.float32):
        return f"weight is {weight.dtype}, expected torch.float32"
    if is_symbolic(m, n, k) or not x.is_cuda or not m * n * k or half is not None:
        return None  # with copies, PyTorch's product is taken for them, and for gradients of float32
    strides = x.stride() if x.dim() == 2 else (k, 1)
    found = problem((m, k), strides, False, (n, k), (k, 1), True, False, x.dtype)
    return library.faster(PRODUCT, found, x.device)


def _by_torch(
    input: Tensor, weight: Tensor, bias: Tensor | None, half: Tensor | None = None, half_bias: Tensor | None = None
) -> Tensor:
    return torch.nn.functional.linear(input, weight, bias)


@_linear_lowered.interface(twin=_by_torch)
def linear_lowered(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    half: Tensor | None = None,
    half_bias: Tensor | None = None,
) -> Tensor:
    """`linear` of a half type with parameters of float32, rounded to it; their gradients are of float32 and are not rounded
    on the way where PyTorch's own product makes them.

    Nothing is checked: the layer of `cupyops.nn` knows what it gives.

    Args:
        input: of a half type.
        weight: of float32.
        bias: of float32, or None.
        half: a contiguous copy of `weight` of the dtype of `input`, where there is one; else it is made here.
        half_bias: the same of `bias`.
    """
    return _linear_lowered(input, weight, bias, half, half_bias)
