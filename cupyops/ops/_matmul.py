"""matmul: the product of matrices, batched and broadcast."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

from .._dispatch.core import library, shardings
from .._dispatch.core.forms import Forms, Library
from .._dispatch.core.gpu import gpu
from .._dispatch.core.rows import is_symbolic
from .._dispatch.elementwise.broadcast import broadcast_shapes
from .._dispatch.gemm import few_rows, gemm, wgmma
from .._dispatch.gemm.gemm import Layout, Problem
from .._kernel.kernel import ceil_div
from .._operator.floating import operator
from .._util import arguments
from .._util.strides import is_dry
from ..errors import InputError

PRODUCT = Forms("matmul", "product", [few_rows.FewRows(), *wgmma.forms(gemm.DENSE)])


@operator("cupyops::matmul", autocast="lower", sharding=shardings.matmul)
def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a (..., m, k) and b (..., k, n), with equal batch dimensions."""
    return torch.matmul(a, b)


@_matmul.forward
def forward(a, b):
    y = a.new_empty((*a.shape[:-1], b.shape[-1]))
    _multiply(a, b, y)
    return y, ()


@_matmul.backward(reads={"a": ("b",), "b": ("a",)}, apart=True)
def backward(saved, grad_y, a, b, needs_grad):
    grad_a = grad_b = None
    if needs_grad.a:
        grad_a = a.new_empty(a.shape)
        _multiply(grad_y, b.mT, grad_a)
    if needs_grad.b:
        grad_b = b.new_empty(b.shape)
        _multiply(a.mT, grad_y, grad_b)
    return grad_a, grad_b


@_matmul.unsupported
def unsupported(a, b):
    (m, k), n, batches = a.shape[-2:], b.shape[-1], math.prod(a.shape[:-2])
    if reason := gemm.too_large(m, n, k, batches, tiles=batches * ceil_div(m, 32) * ceil_div(n, 32)):
        return reason
    if is_symbolic(m, n, k, batches) or not a.is_cuda or not m * n * k * batches:
        return None
    problem = _problem(a.shape, a.stride(), b.shape, b.stride(), a.dtype)
    return library.faster(PRODUCT, problem, a.device) if problem else None


@_matmul.interface(twin=torch.matmul)
def matmul(input: Tensor, other: Tensor) -> Tensor:
    """Matrix product; as `torch.matmul`.

    Args:
        input: (..., m, k), or (k,); fp16, bf16, fp32 and fp64 by kernels (summed in fp32, fp64 in fp64), any other
            dtype by PyTorch.
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
    _check(input, other)
    if input.dim() == other.dim() == 2:
        return _matmul(input, other)
    a = input.unsqueeze(0) if input.dim() == 1 else input
    b = other.unsqueeze(1) if other.dim() == 1 else other
    k = a.shape[-1]
    if b.dim() == 2 and a.dim() > 2:  # one product of many rows
        y = _matmul(a.reshape(math.prod(a.shape[:-1]), k), b).reshape(*a.shape[:-1], b.shape[1])
    else:
        batch = _broadcast(input, other)
        y = _matmul(a.expand(*batch, *a.shape[-2:]), b.expand(*batch, *b.shape[-2:]))
    y = y.squeeze(-1) if other.dim() == 1 else y
    return y.squeeze(-1 if other.dim() == 1 else -2) if input.dim() == 1 else y


def _check(input: Tensor, other: Tensor) -> None:
    arguments.tensor("input", input)
    arguments.tensor("other", other)
    arguments.same_device(input=input, other=other)
    gemm.check_dtypes(input=input, other=other)
    for name, value in (("input", input), ("other", other)):
        if value.dim() < 1:
            arguments.fail(name, value, "at least 1 dimension")
    k = input.shape[-1]
    if k != other.shape[-2 if other.dim() > 1 else 0]:
        wanted = f"({k},)" if other.dim() == 1 else f"(..., {k}, n)"
        found = f"other has shape {tuple(other.shape)}"
        raise InputError(f"{found}, expected {wanted} to fit input of shape {tuple(input.shape)}")


def _broadcast(input: Tensor, other: Tensor) -> tuple[int, ...]:
    try:
        return broadcast_shapes(input.shape[:-2], other.shape[:-2])
    except (RuntimeError, ValueError):
        raise InputError(
            f"other has shape {tuple(other.shape)}, expected batch dimensions that broadcast with those of input, of "
            f"shape {tuple(input.shape)}"
        ) from None


def _multiply(a: Tensor, b: Tensor, y: Tensor) -> None:
    """y = a b, with a and b of any strides and y contiguous."""
    if is_dry(y):
        return
    problem = _problem(a.shape, a.stride(), b.shape, b.stride(), a.dtype)
    if problem is None:
        return _multiply(a.contiguous(), b.contiguous(), y)
    launch = PRODUCT.plan(problem, gpu(y.device))
    if isinstance(launch, Library):
        return library.call("torch.matmul", y, lambda: torch.matmul(a, b, out=y))
    if copies := gemm.prepared(problem, launch, a, b):
        return _multiply(*copies, y)
    if few_rows.serves(launch):
        return few_rows.run(launch, a.reshape(a.shape[-2:]), [b.reshape(b.shape[-2:]).T], [None], [y])
    return wgmma.run(launch, a, b, y)


@functools.lru_cache(maxsize=4096)
def _problem(shape_a, stride_a, shape_b, stride_b, dtype):
    """The GEMM; None for batches that are broadcast in turns, such as (2, 1, 3) with (1, 4, 1)."""
    batches = _merged(shape_a[:-2], stride_a[:-2], stride_b[:-2])
    if len(batches) > 2:
        return None
    (outer, outer_a, outer_b), (inner, inner_a, inner_b) = [(1, 0, 0)] * (2 - len(batches)) + batches
    (m, k), n = shape_a[-2:], shape_b[-1]
    a = Layout(*stride_a[-2:], inner_a, outer_a)
    b = Layout(*stride_b[:-3:-1], inner_b, outer_b)
    y = Layout(n, 1, m * n, inner * m * n)
    return Problem(m, n, k, a, b, y, dtype, outer * inner, inner)


def _merged(sizes, strides_a, strides_b):
    """(size, stride of a, stride of b) of each batch dimension; neighbours that one stride steps through made one."""
    merged = []
    for size, a, b in zip(sizes, strides_a, strides_b):
        if size == 1:
            continue
        if merged and merged[-1][1:] == (size * a, size * b):
            merged[-1] = (merged[-1][0] * size, a, b)
        else:
            merged.append((size, a, b))
    return merged
