"""linear: x @ weight.T + bias."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from .._dispatch import gemm, library, wgmma
from .._dispatch.forms import Forms
from .._dispatch.gemm import Layout, Problem
from .._dispatch.gpu import gpu
from .._dispatch.rows import is_symbolic
from .._kernel.kernel import FLOATING, Kernel, ceil_div
from .._operator.floating import operator
from .._util import arguments
from .._util.strides import is_dry
from ..errors import InputError

linear_fwd = Kernel("linear.cu", "linear_fwd<T, TILE>", **gemm.TILED)
linear_wide = Kernel("linear.cu", "linear_fwd<T, TILE>", T=gemm.HALF, TILE=(gemm.WIDE,))
linear_sum = Kernel("linear.cu", "linear_sum<T>", T=FLOATING)

PRODUCT = Forms("linear", "product", wgmma.forms(gemm.tiles(linear_fwd, linear_wide)))

_LARGE = 2**20  # elements of weight, from which on one more column costs more than reading grad_y once more


@operator("cupyops::linear", autocast="lower", sharding="...k, nk, +n -> ...n")
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.nn.functional.linear(x, weight, bias)


@_linear.forward
def forward(x, weight, bias):
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    bias = bias if bias is None else bias.contiguous()
    _multiply(_rows(x), weight, bias, y, turn_b=True)
    return y, ()


@_linear.backward(reads={"x": ("weight",), "weight": ("x",), "bias": ()})
def backward(saved, grad_y, x, weight, bias, needs_grad):
    rows, grad_rows = _rows(x), _rows(grad_y)
    grad_x = grad_weight = grad_bias = None
    if needs_grad.x:
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        _multiply(grad_rows, weight, None, grad_x)
    if needs_grad.weight or needs_grad.bias:
        dense = torch.contiguous_format
        grad_weight = torch.empty_like(weight, memory_format=dense) if needs_grad.weight else None
        grad_bias = torch.empty_like(bias, memory_format=dense) if needs_grad.bias else None
        if needs_grad.weight and needs_grad.bias and not is_dry(grad_y) and _apart(grad_rows, rows):
            _multiply(grad_rows, rows, None, grad_weight, turn_a=True)
            _multiply(grad_rows, rows[:, :0], None, None, grad_bias, turn_a=True)
        else:
            taps = rows if needs_grad.weight else rows[:, :0]
            _multiply(grad_rows, taps, None, grad_weight, grad_bias, turn_a=True)
    return grad_x, grad_weight, grad_bias


@_linear.unsupported
def unsupported(x, weight, bias):
    n, k = weight.shape
    m = math.prod(x.shape[:-1])
    if reason := gemm.too_large(m, n, k, tiles=ceil_div(m, 32) * ceil_div(max(n, k + 1), 32)):
        return reason
    if is_symbolic(m, n, k) or not x.is_cuda or not m * n * k:
        return None
    rows = _rows(x) if x.dim() == 2 or x.is_contiguous() else x.new_empty((m, k), device="meta")
    problem = _problem(rows.shape, rows.stride(), False, weight.shape, weight.stride(), True, False, x.dtype)
    return library.faster(PRODUCT, problem, x.device)


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
    _check(input, weight, bias)
    if weight.dim() == 1:
        return _linear(input, weight.unsqueeze(0), None).squeeze(-1)
    return _linear(input, weight, bias)


def _check(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    arguments.tensor("input", input)
    arguments.tensor("weight", weight)
    arguments.optional_tensor("bias", bias)
    arguments.same_device(input=input, weight=weight, bias=bias)
    gemm.check_dtypes(input=input, weight=weight, bias=bias)
    if input.dim() < 1:
        arguments.fail("input", input, "at least 1 dimension")
    if weight.dim() not in (1, 2):
        arguments.fail("weight", weight, "shape (out_features, in_features) or (in_features,)")
    if weight.shape[-1] != input.shape[-1]:
        wanted = f"in_features {input.shape[-1]}, the last dimension of input of shape {tuple(input.shape)}"
        raise InputError(f"weight has shape {tuple(weight.shape)}, expected {wanted}")
    if weight.dim() == 1 and bias is not None:
        arguments.fail("bias", bias, "None beside a weight of one dimension")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise InputError(f"bias has shape {tuple(bias.shape)}, expected ({weight.shape[0]},), out_features of weight")


def _apart(grad_rows: Tensor, rows: Tensor) -> bool:
    """Whether grad_bias is better summed by itself: beside wgmma, which has no column of ones, or many columns."""
    if grad_rows.shape[1] * rows.shape[1] >= _LARGE:
        return True
    problem = _problem(grad_rows.shape, grad_rows.stride(), True, rows.shape, rows.stride(), False, False, rows.dtype)
    return PRODUCT.choose(problem, gpu(rows.device)).name.startswith("wgmma")


def _rows(x: Tensor) -> Tensor:
    """x as a matrix of rows: a view where its strides allow one."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _multiply(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    y: Tensor | None,
    column: Tensor | None = None,
    *,
    turn_a: bool = False,
    turn_b: bool = False,
) -> None:
    """y = a b + bias, contiguous; column, if given, the sums of the rows of a. A matrix to turn is given as it lies."""
    if is_dry(a):
        return
    problem = _problem(a.shape, a.stride(), turn_a, b.shape, b.stride(), turn_b, column is not None, a.dtype)
    launch = PRODUCT.launch(problem, gpu(a.device))
    if library.serves(launch):
        return library.multiply(a.T if turn_a else a, b.T if turn_b else b, bias, y, column)
    if copies := gemm.prepared(problem, launch, a.T if turn_a else a, b.T if turn_b else b):
        return _multiply(*copies, bias, y, column)
    return wgmma.run(launch, linear_sum, (a, b, bias), (y, column))


@functools.lru_cache(maxsize=4096)
def _problem(shape_a, stride_a, turn_a, shape_b, stride_b, turn_b, ones, dtype):
    if turn_a:
        shape_a, stride_a = shape_a[::-1], stride_a[::-1]
    if turn_b:
        shape_b, stride_b = shape_b[::-1], stride_b[::-1]
    (m, k), n = shape_a, shape_b[1]
    return Problem(m, n, k, Layout(*stride_a), Layout(*stride_b[::-1]), Layout(n, 1), dtype, ones=ones)
