"""add: input + alpha * other."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._dispatch.core.forms import Forms
from .._dispatch.elementwise.broadcast import Flat, Strided, broadcast_shape, empty_output, fill
from .._dispatch.elementwise.broadcast_params import FORM, PerChannel, PerChannelUnaligned, PerColumn
from .._dispatch.elementwise.elementwise import UP_TO_FLOAT32, by_vectors
from .._dispatch.reduce import sum_var
from .._kernel.kernel import FLOATING, Kernel
from .._operator.floating import operator
from .._util import arguments, tracing
from .._util.strides import alike, is_dry
from ..errors import InputError

add_fwd_flat = Kernel("add.cu", "add_fwd_flat<T>", T=UP_TO_FLOAT32)
add_fwd_params = Kernel("add.cu", "add_fwd_params<T, FORM>", T=UP_TO_FLOAT32, FORM=FORM)
add_fwd_strided = Kernel("add.cu", "add_fwd_strided<T>", T=FLOATING)
add_number = Kernel("add.cu", "add_number<T>", T=FLOATING)

FORWARD = Forms(
    "add",
    "forward",
    [
        Flat(add_fwd_flat),
        PerColumn(add_fwd_params),
        PerChannel(add_fwd_params),
        PerChannelUnaligned(add_fwd_params),
        Strided(add_fwd_strided),
    ],
)
BLOCK = 256  # of add_number
NUMBERS = (int, float, complex, np.number, np.bool_, torch.SymInt, torch.SymFloat)
LARGEST = float(np.finfo(np.float32).max)


@operator("cupyops::add", sharding="..., ..., size=... -> ...")
def _add(x: Tensor, other: Tensor, alpha: float, size: list[int] | None = None) -> Tensor:
    return torch.add(x, other, alpha=alpha)


@_add.forward
def forward(x, other, alpha, size):
    other = other if size is None else other.expand(x.shape)
    y = empty_output(x, other)
    if alpha == 1 and x.stride() != y.stride() == other.stride():
        x, other = other, x  # the one that is broadcast is the second
    fill(FORWARD, y, (x, other), alpha)
    return y, ()


@_add.backward
def backward(saved, grad_y, alpha, size, needs_grad):
    if needs_grad.other and size is not None:
        return grad_y, _summed(grad_y, alpha, tuple(size))
    if not needs_grad.other or alpha == 1:
        return grad_y, grad_y
    grad_other = torch.empty_like(grad_y)
    add_number[by_vectors(grad_other, BLOCK)](grad_y, grad_other, alpha, -0.0, grad_y.numel(), T=grad_y.dtype)
    return grad_y, grad_other


@_add.unsupported
def unsupported(x, other, alpha, size):
    return None if size is not None or x.shape == other.shape else "shapes differ"


@_add.reference_backward
def reference_backward(saved, grad_y, alpha, size):
    return grad_y, (grad_y if size is None else grad_y.sum_to_size(size)) * alpha


@operator("cupyops::add_scalar", sharding="... -> ...")
def _add_scalar(x: Tensor, value: float) -> Tensor:
    return torch.add(x, value)


@_add_scalar.forward
def forward_number(x, value):
    y, x = alike(x)
    if y.dtype != torch.float64 and abs(value) > LARGEST:
        value = math.copysign(math.inf, value)
    add_number[by_vectors(y, BLOCK)](x, y, 1.0, value, y.numel(), T=y.dtype)
    return y, ()


def backward_number(saved, grad_y):
    return grad_y


_add_scalar.backward(backward_number)
_add_scalar.reference_backward(backward_number)


@_add.interface(twin=torch.add)
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
    summed = sum_var.total(grad_y, dims, grad_y.dtype if alpha == 1 else sum_var.accumulator(grad_y.dtype))
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
        raise InputError(
            f"input is {arguments.describe(input)}, other {arguments.describe(other)}, expected shapes that "
            f"broadcast: {error}"
        ) from None
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
