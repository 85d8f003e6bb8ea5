"""Weights of 8 and 4 bits as the tests of quantized_linear make them, and PyTorch's layer of what they stand for."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

import cupyops

KINDS = ("int8", "float8_e4m3fn", "uint4")


def numbers(weight: Tensor, kind: str) -> Tensor:
    """Numbers that a kind can store, in float64, made of the lowest 8 bits of integers."""
    weight = weight % 256
    if kind == "uint4":
        return (weight % 16).double()
    if kind == "int8":
        return weight.double() - 128
    return ((weight.float() - 128) / 16).to(torch.float8_e4m3fn).double()


def stored(weight: Tensor, kind: str) -> Tensor:
    """The same, as quantized_linear takes them."""
    exact = numbers(weight, kind)
    if kind != "uint4":
        return exact.to(getattr(torch, kind))
    first, second = exact.to(torch.uint8).unflatten(-1, (-1, 2)).unbind(-1)
    return first + 16 * second


def dequantised(weight: Tensor, scale: Tensor, zero_point: Tensor | None, kind: str) -> Tensor:
    """What they stand for, in the wider of float32 and the dtype of the scales."""
    wide = torch.promote_types(scale.dtype, torch.float32)
    groups = scale.view(1, 1) if not scale.dim() else scale[:, None] if scale.dim() == 1 else scale
    zero = torch.tensor(8.0 if kind == "uint4" else 0.0) if zero_point is None else zero_point.view(groups.shape)
    of_group = weight.shape[1] // groups.shape[1]
    each = [one.to(wide).repeat_interleave(of_group, 1) if one.dim() else one.to(wide) for one in (zero, groups)]
    return (numbers(weight, kind).to(wide) - each[0]) * each[1]


def linear(
    x: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor | None = None, bias: Tensor | None = None, *, kind: str
) -> Tensor:
    """quantized_linear of integers from 0 to 255 that are made numbers of a kind first."""
    return cupyops.quantized_linear(x, stored(weight, kind), scale, zero_point, bias)


def by_torch(
    x: Tensor, weight: Tensor, scale: Tensor, zero_point: Tensor | None = None, bias: Tensor | None = None, *, kind: str
) -> Tensor:
    """The same by PyTorch."""
    return F.linear(x, dequantised(weight, scale, zero_point, kind).to(x.dtype), bias)
