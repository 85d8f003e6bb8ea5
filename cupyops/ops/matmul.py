"""matmul: the product of matrices, batched and broadcast."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import check
from ..errors import InputError
from ..kernel import FLOATING, Kernel, ceil_div
from ..operator import operator
from . import _gemm
from ._gemm import Layout, Problem

matmul_fwd = Kernel("matmul.cu", "matmul_fwd<T, TILE>", T=FLOATING, TILE=_gemm.TILES)
matmul_sum = Kernel("matmul.cu", "matmul_sum<T>", T=FLOATING)


@operator("cupyops::matmul", autocast="lower")
def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a (..., m, k) and b (..., k, n), with equal batch dimensions."""
    return torch.matmul(a, b)


@_matmul.forward
def _(a, b):
    y = a.new_empty((*a.shape[:-1], b.shape[-1]))
    _multiply(a, b, y)
    return y, ()


@_matmul.backward
def _(saved, grad_y, a, b, needs_grad):
    grad_a = grad_b = None
    if needs_grad.a:
        grad_a = a.new_empty(a.shape)
        _multiply(grad_y, b.mT, grad_a)
    if needs_grad.b:
        grad_b = b.new_empty(b.shape)
        _multiply(a.mT, grad_y, grad_b)
    return grad_a, grad_b


@_matmul.unsupported
def _(a, b):
    (m, k), n, batches = a.shape[-2:], b.shape[-1], math.prod(a.shape[:-2])
    return _gemm.too_large(m, n, k, batches, tiles=batches * ceil_div(m, 64) * ceil_div(n, 64))


@_matmul.interface
def matmul(input: Tensor, other: Tensor) -> Tensor:
    """Matrix product; as `torch.matmul`.

    Args:
        input: (..., m, k), or (k,); fp16, bf16, fp32 and fp64 by kernels (summed in fp32, fp64 in fp64), any other dtype
            that PyTorch multiplies by PyTorch.
        other: (..., k, n), or (k,), of the dtype of `input`. Batch dimensions broadcast, without a copy.

    Returns:
        Tensor (..., m, n), contiguous, without the dimension that a one-dimensional argument lacks.

    Raises:
        InputError: an argument is no tensor or has no dimension; k or the batch dimensions do not fit; dtypes or
            devices differ.

    Example:
        >>> cupyops.matmul(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([1.0, -1.0]))
        tensor([-1., -1.])
    """
    check.tensor("input", input)
    check.tensor("other", other)
    check.same_device(input=input, other=other)
    _gemm.check_dtypes(input=input, other=other)
    for name, value in (("input", input), ("other", other)):
        if value.dim() < 1:
            check.fail(name, value, "at least 1 dimension")
    a = input.unsqueeze(0) if input.dim() == 1 else input
    b = other.unsqueeze(1) if other.dim() == 1 else other
    k = a.shape[-1]
    if k != b.shape[-2]:
        wanted = f"({k},)" if other.dim() == 1 else f"(..., {k}, n)"
        raise InputError(f"other has shape {tuple(other.shape)}, expected {wanted} to fit input of shape {tuple(input.shape)}")
    if b.dim() == 2 and a.dim() > 2:  # one product of many rows
        y = _matmul(a.reshape(math.prod(a.shape[:-1]), k), b).reshape(*a.shape[:-1], b.shape[1])
    else:
        batch = _broadcast(input, other)
        y = _matmul(a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:]))
    y = y.squeeze(-1) if other.dim() == 1 else y
    return y.squeeze(-1 if other.dim() == 1 else -2) if input.dim() == 1 else y


def _broadcast(input: Tensor, other: Tensor) -> torch.Size:
    try:
        return torch.broadcast_shapes(input.shape[:-2], other.shape[:-2])
    except RuntimeError:
        raise InputError(
            f"other has shape {tuple(other.shape)}, expected batch dimensions that broadcast with those of input, of shape "
            f"{tuple(input.shape)}"
        ) from None


def _multiply(a: Tensor, b: Tensor, y: Tensor) -> None:
    """y = a b, with a and b of any strides and y contiguous."""
    if _gemm.is_dry(y):
        return
    batch, strides = _merged(y.shape[:-2], a.stride()[:-2], b.stride()[:-2])
    if len(batch) > 2:  # broadcast in turns, such as (2, 1, 3) with (1, 4, 1): such batches are written out
        a, b = a.contiguous(), b.contiguous()
        batch, strides = _merged(y.shape[:-2], a.stride()[:-2], b.stride()[:-2])
    (outer, inner), (outer_a, inner_a), (outer_b, inner_b) = ((1,) * (2 - len(batch)) + tuple(batch), *strides)
    (m, k), n = a.shape[-2:], b.shape[-1]
    problem = Problem(
        m,
        n,
        k,
        Layout(a.stride(-2), a.stride(-1), inner_a, outer_a),
        Layout(b.stride(-1), b.stride(-2), inner_b, outer_b),
        Layout(n, 1, m * n, inner * m * n),
        outer * inner,
        inner,
    )
    _gemm.run(matmul_fwd, matmul_sum, problem, (a, b), (y,))


def _merged(sizes, *strides):
    """Batch dimensions with neighbours that can be stepped through as one made one: sizes, and each operand's strides
    (at least two of them, from the left with 0)."""
    merged: list[list[int]] = []  # [size, stride of a, stride of b]
    for size, *steps in zip(sizes, *strides):
        if size == 1:
            continue
        if merged and all(before == size * step for before, step in zip(merged[-1][1:], steps)):
            merged[-1] = [merged[-1][0] * size, *steps]
        else:
            merged.append([size, *steps])
    padding = [0] * max(0, 2 - len(merged))
    return [entry[0] for entry in merged], [padding + [entry[i] for entry in merged] for i in (1, 2)]
