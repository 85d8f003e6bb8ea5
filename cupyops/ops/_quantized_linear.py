"""quantized_linear: x @ weight.T + bias of a weight that is stored in 8 or 4 bits."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._dispatch.core import library
from .._dispatch.core.gpu import gpu
from .._dispatch.core.rows import is_symbolic
from .._dispatch.gemm import quantized
from .._dispatch.gemm.linear import rows_of
from .._dispatch.gemm.quantized import BITS, E4M3
from .._kernel.kernel import HALF
from .._operator.define import operator
from .._util import arguments
from .._util.strides import is_dry
from ..errors import InputError


@operator(
    "cupyops::quantized_linear",
    mixed=("scale", "zero_point"),
    dtypes=(*HALF, torch.float32, E4M3),
    sharding="...K, nJ, nG, nG, n -> ...n",
)
def _quantized_linear(
    x: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor | None, bias: Tensor | None
) -> Tensor:
    return torch.nn.functional.linear(x, _dequantized(weight, scale, zero_point).to(x.dtype), bias)


def _dequantized(weight: Tensor, scale: Tensor, zero_point: Tensor | None) -> Tensor:
    """The numbers that a weight stands for, in float32, or in float64 where its scales are."""
    wide = torch.promote_types(scale.dtype, torch.float32)
    return (_numbers(weight, scale, zero_point, wide) * scale.to(wide)[..., None]).flatten(1)


def _numbers(weight: Tensor, scale: Tensor, zero_point: Tensor | None, wide: torch.dtype) -> Tensor:
    """Stored numbers less their zero points, (out_features, groups, columns of a group)."""
    if weight.dtype is torch.uint8:
        weight, middle = torch.stack([weight & 15, weight >> 4], -1).flatten(-2), quantized.MIDDLE
    else:
        middle = 0
    numbers = weight.to(wide).unflatten(1, (scale.shape[1], weight.shape[1] // scale.shape[1]))
    return numbers - (middle if zero_point is None else zero_point.to(wide)[..., None])


@_quantized_linear.forward
def forward(x, weight, scale, zero_point, bias):
    y = x.new_empty((*x.shape[:-1], weight.shape[0]))
    if not is_dry(y):
        quantized.multiply(rows_of(x), weight, scale, zero_point, bias, y)
    return y, ()


@_quantized_linear.backward(
    reads={
        "x": ("scale", "zero_point"),
        "weight": ("x", "scale", "zero_point"),
        "scale": ("x", "zero_point"),
        "zero_point": ("x", "scale"),
        "bias": (),
    },
    apart=True,
)
def backward(saved, grad_y, x, weight, scale, zero_point, bias, needs_grad):
    """Compute gradients by PyTorch: of x by the dequantised weight, of scales and zero points by that weight's gradient."""
    grad_x = grad_scale = grad_zero = grad_bias = None
    rows, wide = rows_of(grad_y), torch.promote_types(scale.dtype, torch.float32)
    if needs_grad.x:
        grad_x = (rows @ _dequantized(weight, scale, zero_point).to(rows.dtype)).view(x.shape)
    if needs_grad.scale or needs_grad.zero_point:
        grad_weight = (rows.to(wide).mT @ rows_of(x).to(wide)).unflatten(1, (scale.shape[1], -1))
        if needs_grad.scale:
            grad_scale = (grad_weight * _numbers(weight, scale, zero_point, wide)).sum(2).to(scale.dtype)
        if needs_grad.zero_point:
            grad_zero = -(grad_weight.sum(2) * scale).to(scale.dtype)
    if needs_grad.bias:
        grad_bias = rows.sum(0)
    return grad_x, None, grad_scale, grad_zero, grad_bias


@_quantized_linear.unsupported
def unsupported(x, weight, scale, zero_point, bias):
    if is_symbolic(*x.shape, *weight.shape, *scale.shape):
        return None
    problem, card = quantized.problem_of(math.prod(x.shape[:-1]), weight, scale, x.dtype), gpu(x.device)
    if reason := quantized.PRODUCT.list[-1].why_not(problem, card):
        return reason
    return library.faster(quantized.PRODUCT, problem, x.device) if x.is_cuda else None


# --- the public function ---


@_quantized_linear.interface
def quantized_linear(
    input: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Affine map of the last dimension by a weight that is stored in 8 or 4 bits.

        y = input @ w.T + bias      w[i, j] = (weight[i, j] - zero_point[i, g]) * scale[i, g]      g = j // group

    A kernel serves up to 64 rows in fp16 and bf16, as decoding has them, from compute capability 8.0 on: it reads the weight
    once, as it is stored, sums in fp32 and rounds once. For more rows, and everything else, PyTorch multiplies by the w of
    the equation, rounded to the dtype of `input`.

    Args:
        input: (..., in_features), of any floating-point dtype.
        weight: (out_features, in_features) of int8 or float8_e4m3fn; or (out_features, in_features / 2) of uint8: two
            numbers from 0 to 15 a byte, of which the lower four bits are the first. It has no gradient.
        scale: of float32, or another floating-point dtype: a single number; (out_features,) or (out_features, 1), one for
            each row; or (out_features, groups), one for each `in_features / groups` neighbouring columns. The kernel serves
            groups of a multiple of 32 columns.
        zero_point: of the shape and dtype of `scale`: the stored number that stands for 0, which may lie between two. By
            default it is 0, and of 4-bit numbers 8.
        bias: (out_features,), of the dtype of `input`.

    Returns:
        Tensor (..., out_features), contiguous. Gradients are those of `input`, `scale`, `zero_point` and `bias`; PyTorch
        computes them.

    Raises:
        InputError: an argument is no tensor; shapes, dtypes or devices do not fit; a gradient of the weight is wanted.

    Example:
        >>> weight = torch.tensor([[1, -2], [3, 4]], dtype=torch.int8)
        >>> cupyops.quantized_linear(torch.tensor([[1.0, 2.0]]), weight, torch.tensor([0.5, 2.0]))
        tensor([[-1.5000, 22.0000]])
        >>> packed = torch.tensor([[0x9A, 0x08]], dtype=torch.uint8)  # 10, 9, 8, 0
        >>> cupyops.quantized_linear(torch.ones(1, 4), packed, torch.tensor([[1.0, 0.5]]))
        tensor([[-1.]])
    """
    arguments.floating("input", input)
    arguments.tensor("weight", weight)
    arguments.floating("scale", scale)
    for name, value in (("zero_point", zero_point), ("bias", bias)):
        arguments.optional_tensor(name, value)
    arguments.same_device(input=input, weight=weight, scale=scale, zero_point=zero_point, bias=bias)
    _check_weight(input, weight)
    half = arguments.autocast_dtype(input)
    if half is not None and input.dtype is not torch.float64:
        input, bias = input.to(half), bias if bias is None else bias.to(half)
    if bias is not None and (bias.dtype != input.dtype or bias.shape != weight.shape[:1]):
        arguments.fail("bias", bias, f"shape ({weight.shape[0]},) and {input.dtype}")
    if zero_point is not None and (zero_point.shape != scale.shape or zero_point.dtype != scale.dtype):
        arguments.fail("zero_point", zero_point, f"shape {tuple(scale.shape)} and {scale.dtype}, as scale has them")
    factors = (None if one is None else _by_groups(one, weight) for one in (scale, zero_point))
    return _quantized_linear(input, weight, *factors, bias)


def _check_weight(input: Tensor, weight: Tensor) -> None:
    if weight.dim() != 2 or weight.dtype not in BITS:
        arguments.fail("weight", weight, "2 dimensions and int8, float8_e4m3fn or, with two numbers a byte, uint8")
    if weight.requires_grad:
        raise InputError("weight requires a gradient, of which so few bits have none; pass weight.detach()")
    in_features = weight.shape[1] * 8 // BITS[weight.dtype]
    if input.dim() == 0 or input.shape[-1] != in_features:
        arguments.fail("input", input, f"(..., {in_features}) to fit a weight of shape {tuple(weight.shape)}")


def _by_groups(scale: Tensor, weight: Tensor) -> Tensor:
    """(out_features, groups)."""
    n, k = weight.shape[0], weight.shape[1] * 8 // BITS[weight.dtype]
    if scale.numel() == 1 and scale.dim() < 2:
        return scale.reshape(1, 1).expand(n, 1)
    if scale.dim() == 1:
        scale = scale[:, None]
    if scale.shape == (1, 1):
        scale = scale.expand(n, 1)
    if scale.dim() != 2 or scale.shape[0] != n or not scale.shape[1] or k % scale.shape[1]:
        arguments.fail("scale", scale, f"one number, ({n},), or ({n}, groups), of which {k} columns are a multiple")
    return scale
