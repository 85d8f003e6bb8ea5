"""linear: x @ weight.T + bias."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._dispatch.core import library
from .._dispatch.core.rows import is_symbolic
from .._dispatch.gemm import tf32
from .._dispatch.gemm.linear import PRODUCT, check, gradients, multiply, problem, rows_of, too_large
from .._operator.floating import operator


@operator("cupyops::linear", autocast="lower", sharding="...k, nk, +n -> ...n")
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


@_linear.forward
def forward(x, weight, bias):
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    bias = bias if bias is None else bias.contiguous()
    multiply(rows_of(x), weight, bias, y, turn_b=True)
    return y, ()


@_linear.backward(reads={"x": ("weight",), "weight": ("x",), "bias": ()}, apart=True)
def backward(saved, grad_y, x, weight, bias, needs_grad):
    return gradients(grad_y, x, weight, bias, needs_grad)


@_linear.unsupported
def unsupported(x, weight, bias):
    n, k = weight.shape
    m = math.prod(x.shape[:-1])
    if reason := too_large(m, n, k):
        return reason
    if is_symbolic(m, n, k) or not x.is_cuda or not m * n * k:
        return None
    strides = x.stride() if x.dim() == 2 else (k, 1)  # `rows_of` copies where it has no view
    found = problem((m, k), strides, False, weight.shape, weight.stride(), True, False, x.dtype)
    return library.faster(PRODUCT, tf32.asked(found), x.device)


# --- the public function ---


@_linear.interface(twin=torch.nn.functional.linear)
def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Affine map of the last dimension, input @ weight.T + bias; as `torch.nn.functional.linear`.

    Args:
        input: (..., in_features); fp16, bf16, fp32 and fp64 by kernels (summed in fp32, fp64 in fp64).
        weight: (out_features, in_features), or (in_features,) without a bias, of the dtype of `input`.
        bias: (out_features,), of the dtype of `input`.

    Returns:
        Tensor (..., out_features), contiguous; (...,) for a weight of one dimension.

    Raises:
        InputError: an argument is no tensor; shapes do not fit; dtypes or devices differ.

    Example:
        >>> cupyops.linear(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]]), torch.tensor([0.0, 1.0]))
        tensor([[11., 18.]])
    """
    check(input, weight, bias)
    if weight.dim() == 1:
        return _linear(input, weight.unsqueeze(0), None).squeeze(-1)
    return _linear(input, weight, bias)
