"""The arguments of the normalisations over rows: checked, and in the form that the kernels take."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._kernel.kernel import FLOATING
from ..._util import arguments, torch_private
from ..core.images import accumulator
from ..core.images import contiguous as contiguous


def floating(name: str, value: Tensor) -> None:
    """A tensor of a dtype that there are kernels for."""
    arguments.tensor(name, value)
    if value.dtype not in FLOATING:
        arguments.fail(name, value, "a tensor of dtype float16, bfloat16, float32 or float64")


def shape(normalized_shape: Sequence[int], input: Tensor) -> list[int]:
    """`normalized_shape` as a list, with which the shape of `input` ends."""
    if not isinstance(normalized_shape, (tuple, list)) or not normalized_shape:
        arguments.fail("normalized_shape", normalized_shape, "a sequence of at least one int")
    sizes = arguments.ints("normalized_shape", normalized_shape, len(normalized_shape), 0)
    if list(input.shape[-len(sizes) :]) != sizes:
        arguments.fail("input", input, f"a tensor of shape (*, {', '.join(map(str, sizes))}), as normalized_shape says")
    return sizes


def parameter(name: str, value: Tensor | None, sizes: list[int], input: Tensor) -> None:
    """`weight` or `bias`: of shape `sizes`, on the device of `input`."""
    if value is None:
        return
    floating(name, value)
    if list(value.shape) != sizes:
        arguments.fail(name, value, f"a tensor of shape {tuple(sizes)}, normalized_shape")
    arguments.same_device(input=input, **{name: value})


def number(name: str, value: Any) -> float:
    """A real number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        arguments.fail(name, value, "a number")
    return float(value)


def split(x: Tensor, normalized_shape: Sequence[int]) -> tuple[int, int]:
    """(rows, elements of a row)."""
    return math.prod(x.shape[: x.dim() - len(normalized_shape)]), math.prod(normalized_shape)


def layer_in_steps(
    x: Tensor, normalized_shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """layer_norm of elementary operations: PyTorch's forward mode over its backward of layer_norm is wrong in `weight`."""
    wide = x.to(accumulator(x.dtype))
    dims = tuple(range(-len(normalized_shape), 0))
    centred = wide - wide.mean(dims, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


# --- rms_norm and add_rms_norm ---

# what this PyTorch's autocast does with rms_norm: an older one leaves it alone
RMS_AUTOCAST = "fp32" if torch_private.has_kernel("aten::rms_norm", "AutocastCUDA") else None


def rms_checked(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> tuple[list[int], float | None]:
    """`normalized_shape` and `eps`, when all arguments have been checked."""
    floating("input", input)
    sizes = shape(normalized_shape, input)
    parameter("weight", weight, sizes, input)
    return sizes, None if eps is None else number("eps", eps)


def rms_eps(eps: float | None, dtype: torch.dtype) -> float:
    """PyTorch's default: the machine epsilon of what is computed in."""
    return torch.finfo(accumulator(dtype)).eps if eps is None else eps


def mixed(x: Tensor, weight: Tensor | None) -> str | None:
    """Return why the kernels do not take `weight`, or None."""
    return f"weight is {weight.dtype}, input {x.dtype}" if weight is not None and weight.dtype != x.dtype else None


def rms_in_steps(x: Tensor, normalized_shape: list[int], weight: Tensor | None, eps: float | None) -> Tensor:
    """rms_norm of elementary operations, for transforms: PyTorch's fused one has no forward mode."""
    wide = x.to(accumulator(x.dtype))
    dims = tuple(range(-len(normalized_shape), 0))
    y = wide * torch.rsqrt(wide.square().mean(dims, keepdim=True) + rms_eps(eps, x.dtype))
    return (y if weight is None else y * weight).to(x.dtype)
