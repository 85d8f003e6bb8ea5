"""add: input + alpha * other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._dispatch import spread, totals
from .._dispatch.broadcast import BLOCK, arrange, broadcast_shape, empty_output
from .._kernel.kernel import FLOATING, Kernel, ceil_div
from .._operator.operator import operator
from .._util import arguments, tracing
from .._util.strides import alike, is_dry
from ..errors import InputError

BOTH = (False, True)
add_fwd = Kernel("add.cu", "add_fwd<T>", T=FLOATING)
add_fwd_broadcast = Kernel("add.cu", "add_fwd_broadcast<T>", T=FLOATING)
add_scalar_fwd = Kernel("add.cu", "add_scalar_fwd<T>", T=FLOATING)
add_fwd_spread = Kernel("add.cu", "add_fwd_spread<T, OTHER, FORM>", T=FLOATING, OTHER=BOTH, FORM=spread.FORMS)
add_bwd_other = Kernel("add.cu", "add_bwd_other<T>", T=FLOATING)

VECTOR = {dtype: 16 // dtype.itemsize for dtype in FLOATING}  # elements per thread
NUMBERS = (int, float, complex, np.number, np.bool_, torch.SymInt, torch.SymFloat)
LARGEST = float(np.finfo(np.float32).max)


@operator("cupyops::add")
def _add(x: Tensor, other: Tensor, alpha: float, size: list[int] | None = None) -> Tensor:
    return torch.add(x, other, alpha=alpha)


@_add.forward
def _(x, other, alpha, size):
    other = other if size is None else other.expand(x.shape)
    y = empty_output(x, other)
    n, dtype = y.numel(), y.dtype
    if (x.is_contiguous() and other.is_contiguous()) or x.stride() == y.stride() == other.stride():
        add_fwd[ceil_div(n, BLOCK * VECTOR[dtype]), BLOCK](x, other, y, alpha, n, T=dtype)
        return y, ()
    for whole, part, swapped in ((x, other, False), (other, x, True)):
        if (found := spread.plan(y, whole, part)) is not None:
            given = (whole, part, y, found.spread, alpha, n)
            add_fwd_spread[found.grid, BLOCK](*given, T=dtype, OTHER=swapped, FORM=found.form)
            return y, ()
    grid, layout, (x, other) = arrange(y, x, other)
    add_fwd_broadcast[grid, BLOCK](x, other, y, layout, alpha, n, T=dtype)
    return y, ()


@_add.backward
def _(saved, grad_y, alpha, size, needs_grad):
    if needs_grad.other and size is not None:
        return grad_y, _summed(grad_y, alpha, tuple(size))
    if not needs_grad.other or alpha == 1:
        return grad_y, grad_y
    grad_other = torch.empty_like(grad_y)
    n, dtype = grad_y.numel(), grad_y.dtype
    add_bwd_other[ceil_div(n, BLOCK * VECTOR[dtype]), BLOCK](grad_y, grad_other, alpha, n, T=dtype)
    return grad_y, grad_other


@_add.unsupported
def _(x, other, alpha, size):
    return None if size is not None or x.shape == other.shape else "shapes differ"


@_add.reference_backward
def _(saved, grad_y, alpha, size):
    return grad_y, (grad_y if size is None else grad_y.sum_to_size(size)) * alpha


@operator("cupyops::add_scalar")
def _add_scalar(x: Tensor, value: float) -> Tensor:
    return torch.add(x, value)


@_add_scalar.forward
def _(x, value):
    y, x = alike(x)
    n, dtype = y.numel(), y.dtype
    if dtype != torch.float64 and abs(value) > LARGEST:
        value = math.copysign(math.inf, value)
    add_scalar_fwd[ceil_div(n, BLOCK * VECTOR[dtype]), BLOCK](x, y, value, n, T=dtype)
    return y, ()


@_add_scalar.backward
def _(saved, grad_y):
    return grad_y


@_add_scalar.reference_backward
def _(saved, grad_y):
    return grad_y


@_add.interface
def add(input: Tensor, other: Tensor | float, *, alpha: float = 1) -> Tensor:
    """Sum, input + alpha * other with broadcasting; as `torch.add`, but without `out`.

    Args:
        input: any shape, any dtype; kernels serve fp16, bf16, fp32 and fp64.
        other: a tensor that broadcasts with `input`, or a number. Where the two are of different dtypes, or of an integer,
            boolean or complex one, PyTorch computes the sum, by its rules of type promotion.
        alpha: a number; a complex one only for a complex result, a float not for an integer one.

    Returns:
        Tensor of the broadcast shape. Nothing is kept for backward.

    Raises:
        InputError: an argument is no tensor, array or number; the shapes do not broadcast; the tensors are on different
            devices (one number in a 0-d tensor on the CPU may be); `alpha` does not suit the dtype of the result.

    Example:
        >>> cupyops.add(torch.tensor([1.0, 2.0]), torch.tensor([[10.0], [20.0]]), alpha=2)
        tensor([[21., 22.],
                [41., 42.]])
    """
    if isinstance(input, Tensor) and input.is_floating_point() and type(alpha) in (int, float):
        if isinstance(other, Tensor) and other.dtype == input.dtype and other.device == input.device:
            _check_alpha(alpha, input.dtype)
            # dim() first: tuples compare their sizes before their lengths, which would tie a symbolic size to another
            if input.dim() != other.dim() or input.shape != other.shape:
                # autograd's own expand, whose backward sums
                input = input.expand(broadcast_shape(input=input, other=other))
                other = other.view(*(1,) * (input.dim() - other.dim()), *other.shape)
                if other.shape != input.shape:
                    # for backward, which keeps no tensor: other has as many dimensions, and is broadcast to input
                    return _add(input, other, alpha, list(other.shape))
            return _add(input, other, alpha, None)
        if type(other) in (int, float, bool):
            _check_alpha(alpha, input.dtype)
            _check_number("other", other)
            return _add_scalar(input, float(alpha * other))
    return _by_pytorch(input, other, alpha)


def _summed(grad_y: Tensor, alpha: float, size: tuple[int, ...]) -> Tensor:
    """The gradient of an `other` of that size: alpha times sums over what it is broadcast along."""
    if not is_dry(grad_y) and grad_y.numel() == 0:
        return grad_y.sum_to_size(size)
    dims = [dim for dim, kept in enumerate(size) if kept != grad_y.shape[dim]]
    summed = totals.total(grad_y, dims, grad_y.dtype if alpha == 1 else totals.accumulator(grad_y))
    return summed if alpha == 1 else (summed * alpha).to(grad_y.dtype)


def _by_pytorch(input: Tensor | complex, other: Tensor | complex, alpha: Tensor | complex) -> Tensor:
    """The sum where the kernels have no case, after the same checks."""
    for name, value in (("input", input), ("other", other), ("alpha", alpha)):
        if not isinstance(value, (Tensor, *NUMBERS)) or (name == "alpha" and isinstance(value, Tensor) and value.dim()):
            arguments.fail(name, value, "a number" if name == "alpha" else "a tensor, an array or a number")
        _check_number(name, value)
    tensors = {name: value for name, value in (("input", input), ("other", other)) if isinstance(value, Tensor)}
    if len(tensors) == 2:
        broadcast_shape(**tensors)
        if not any(tensor.dim() == 0 and tensor.device.type == "cpu" for tensor in tensors.values()):
            arguments.same_device(**tensors)
    try:
        result = torch.result_type(input, other)
    except RuntimeError as error:
        raise InputError(f"input is {arguments.describe(input)}, other {arguments.describe(other)}: {error}") from None
    alpha = alpha.item() if isinstance(alpha, (Tensor, np.generic)) else alpha
    _check_alpha(alpha, result)
    if tracing.active is None:
        return torch.add(input, other, alpha=alpha)
    dtype, note = str(result).removeprefix("torch."), "numbers, integers or mixed dtypes"
    with tracing.operator("cupyops::add", "reference", dtype, note):
        return torch.add(input, other, alpha=alpha)


def _check_number(name: str, value: object) -> None:
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        arguments.fail(name, value, "an integer of at most 64 bits")


def _check_alpha(alpha: Any, result: torch.dtype) -> None:
    _check_number("alpha", alpha)
    if isinstance(alpha, bool):
        if result != torch.bool:
            arguments.fail("alpha", alpha, f"an int or a float: the result is {result}")
    elif isinstance(alpha, complex):
        if not result.is_complex:
            arguments.fail("alpha", alpha, f"a real number: the result is {result}")
    elif isinstance(alpha, float):
        if not (result.is_floating_point or result.is_complex):
            arguments.fail("alpha", alpha, f"an int: the result is {result}")
        if result not in (torch.float64, torch.complex128) and LARGEST < abs(alpha) < math.inf:
            arguments.fail("alpha", alpha, "a number that fits float32, in which the sum is computed")
