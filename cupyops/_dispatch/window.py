"""Windows over planes: their arguments, checked, and how many fit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .._util import arguments


def planes(name: str, value: Any) -> None:
    """`value` is a tensor of planes, with elements but for the batch."""
    arguments.tensor(name, value)
    if value.dim() not in (3, 4) or 0 in value.shape[-3:]:
        arguments.fail(name, value, "a tensor of shape (N, C, H, W) or (C, H, W), with none of C, H, W zero")
    if value.dtype is torch.bool or value.dtype.is_complex:
        arguments.fail(name, value, "a tensor of a real dtype")


def window(
    size: Sequence[int], kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: Any
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Kernel, stride, padding and dilation, two ints each, that fit planes of `size`."""
    kernel = arguments.ints("kernel_size", kernel_size, 2, minimum=1)
    default = stride is None or (isinstance(stride, (list, tuple)) and len(stride) == 0)
    steps = kernel if default else arguments.ints("stride", stride, 2, minimum=1)
    pads, dilations = (
        arguments.ints("padding", padding, 2, minimum=0),
        arguments.ints("dilation", dilation, 2, minimum=1),
    )
    if any(2 * pad > k for pad, k in zip(pads, kernel)):
        arguments.fail("padding", padding, f"at most half of kernel_size, which is {kernel_size}")
    arguments.choice("ceil_mode", ceil_mode, (False, True))
    found = kernel, steps, pads, dilations
    if min(output_size(size, found, ceil_mode)) < 1:
        arguments.fail("kernel_size", kernel_size, f"a window that fits planes of {tuple(size)}, padding included")
    return found


def output_size(size: Sequence[int], window: tuple[Sequence[int], ...], ceil_mode: bool) -> list[int]:
    """Windows in each direction. With ceil_mode the last may stick out, but must begin before the right padding."""
    out = []
    for length, kernel, stride, pad, dilation in zip(size, *window):
        last = length + 2 * pad - dilation * (kernel - 1) - 1
        count = (last + (stride - 1 if ceil_mode else 0)) // stride + 1
        out.append(count - 1 if ceil_mode and (count - 1) * stride >= length + pad else count)
    return out
