"""avg_pool2d: the average of each window of each plane."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .._dispatch.window import (
    BLOCK,
    SHAPES,
    aligned,
    bwd_bands,
    cells,
    fwd_bands,
    is_channels_last,
    output_size,
    planes,
    steps,
    whole_planes,
    window,
)
from .._kernel.kernel import FLOATING, Kernel, ceil_div
from .._operator.operator import operator
from .._util import arguments
from .._util.strides import is_dry

DOMAIN: dict[str, Any] = dict(T=FLOATING, K=(0, 2, 3), S=(0, 1, 2), where=lambda K, S, **_: (K, S) in SHAPES)
ALIGNED = (False, True)
PACKS = 2  # of 16 bytes, to a thread of avg_pool2d_bwd_whole
avg_pool2d_fwd = Kernel("avg_pool2d.cu", "avg_pool2d_fwd<T, K, S>", **DOMAIN)
avg_pool2d_bwd = Kernel("avg_pool2d.cu", "avg_pool2d_bwd<T, K, S>", **DOMAIN)
avg_pool2d_fwd_last = Kernel("avg_pool2d.cu", "avg_pool2d_fwd_last<T, K, S, ALIGNED>", ALIGNED=ALIGNED, **DOMAIN)
avg_pool2d_bwd_last = Kernel("avg_pool2d.cu", "avg_pool2d_bwd_last<T, K, S, ALIGNED>", ALIGNED=ALIGNED, **DOMAIN)
avg_pool2d_fwd_whole = Kernel("avg_pool2d.cu", "avg_pool2d_fwd_whole<T>", T=FLOATING)
avg_pool2d_bwd_whole = Kernel("avg_pool2d.cu", "avg_pool2d_bwd_whole<T>", T=FLOATING)


@operator("cupyops::avg_pool2d")
def _avg_pool2d(
    x: Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    ceil_mode: bool,
    count_include_pad: bool,
    divisor_override: int | None,
    size: list[int],  # of the planes of x, which backward does not keep
) -> Tensor:
    return F.avg_pool2d(x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)


@_avg_pool2d.forward
def _(x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, size):
    layout = torch.channels_last if is_channels_last(x) else torch.contiguous_format
    x = x.contiguous(memory_format=layout)
    out = output_size(size, (kernel_size, stride, padding, (1, 1)), ceil_mode)
    y = torch.empty((*x.shape[:-2], *out), dtype=x.dtype, device=x.device, memory_format=layout)
    if is_dry(y) or y.numel() == 0:
        return y, ()
    geometry = (*size, *out, *kernel_size, *stride, *padding, 1, 1)
    averaging, itemsize = _averaging(divisor_override, count_include_pad), x.element_size()
    if layout is torch.channels_last:
        c = cells(*x.shape[:2], geometry, itemsize, aligned(x), False)
        avg_pool2d_fwd_last[c.grid, BLOCK](
            x, y, c.threads, x.shape[1], c.window, c.cells, averaging, T=x.dtype, **c.shape
        )
    elif _whole(geometry):
        w = whole_planes(y.numel(), size[0] * size[1], itemsize)
        d = divisor_override or w.size
        avg_pool2d_fwd_whole[w.grid, BLOCK, w.shared](x, y, y.numel(), w.size, d, w.each, w.lanes, w.fits, T=x.dtype)
    else:
        b = fwd_bands(y.numel() // (out[0] * out[1]), geometry, itemsize)
        avg_pool2d_fwd[b.grid, b.block, b.shared](x, y, b.window, b.bands, averaging, T=x.dtype, **b.shape)
    return y, ()


@_avg_pool2d.backward
def _(saved, grad_y, kernel_size, stride, padding, count_include_pad, divisor_override, size):
    layout = torch.channels_last if is_channels_last(grad_y) else torch.contiguous_format
    shape, dtype = (*grad_y.shape[:-2], *size), grad_y.dtype
    grad_x = torch.empty(shape, dtype=dtype, device=grad_y.device, memory_format=layout)
    if is_dry(grad_x) or grad_x.numel() == 0:
        return grad_x
    geometry = (*size, *grad_y.shape[-2:], *kernel_size, *stride, *padding, 1, 1)
    averaging = _averaging(divisor_override, count_include_pad)
    itemsize = grad_x.element_size()
    if layout is torch.channels_last:
        c = cells(*shape[:2], geometry, itemsize, aligned(grad_y), True)
        avg_pool2d_bwd_last[c.grid, BLOCK](
            grad_y, grad_x, c.threads, shape[1], c.window, c.cells, *steps(geometry), averaging, T=dtype, **c.shape
        )
    elif _whole(geometry):
        w = whole_planes(grad_y.numel(), size[0] * size[1], itemsize)
        count, d = grad_x.numel(), divisor_override or w.size
        grid = ceil_div(count, PACKS * 16 // itemsize * BLOCK)
        avg_pool2d_bwd_whole[grid, BLOCK](grad_y, grad_x, count, w.divisor, d, T=dtype)
    else:
        b = bwd_bands(grad_x.numel() // (size[0] * size[1]), geometry, itemsize)
        avg_pool2d_bwd[b.grid, b.block, b.shared](
            grad_y, grad_x, b.window, b.bands, *steps(geometry), averaging, T=dtype, **b.shape
        )
    return grad_x


@_avg_pool2d.interface
def avg_pool2d(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """Average over windows of each plane; as `torch.nn.functional.avg_pool2d`.

    Args:
        input: (N, C, H, W) or (C, H, W); kernels serve fp16, bf16, fp32 and fp64, contiguous and channels_last.
        kernel_size: height and width of the window, or one number for both, as for the next two.
        stride: from one window to the next; by default `kernel_size`.
        padding: of zeros on every side, at most half of `kernel_size`.
        ceil_mode: keep a last window that only partly fits, if it begins inside the input or its left padding.
        count_include_pad: divide by how many elements a window has with those of the padding, not by those inside alone.
        divisor_override: divide by this number instead.

    Returns:
        Tensor of shape (N, C, OH, OW) or (C, OH, OW), channels_last where `input` is.

    Raises:
        InputError: `input` has another number of dimensions or no elements in one but the batch, a size is not positive,
            `padding` exceeds half of `kernel_size`, no window fits, or `divisor_override` is 0.

    Example:
        >>> cupyops.avg_pool2d(torch.arange(16.0).view(1, 4, 4), 2)
        tensor([[[ 2.5000,  4.5000],
                 [10.5000, 12.5000]]])
    """
    planes("input", input)
    size = input.shape[-2:]
    kernel, steps, pads, _ = window(size, kernel_size, stride, padding, 1, ceil_mode)
    arguments.choice("count_include_pad", count_include_pad, (False, True))
    if divisor_override is not None and (
        isinstance(divisor_override, bool) or not isinstance(divisor_override, int) or divisor_override == 0
    ):
        arguments.fail("divisor_override", divisor_override, "an int other than 0, or None")
    options = bool(ceil_mode), bool(count_include_pad), divisor_override
    return _avg_pool2d(input, kernel, steps, pads, *options, list(size))


# --- launches ---


@functools.lru_cache(maxsize=256)
def _averaging(divisor_override: int | None, count_include_pad: bool) -> np.ndarray:
    """`struct Averaging`."""
    return np.array([divisor_override or 0, count_include_pad], dtype=np.int64)


def _whole(geometry: tuple[int, ...]) -> bool:
    """Whether there is one window, all of its plane, which has 16 elements or more."""
    return geometry[:2] == geometry[4:6] and geometry[8:10] == (0, 0) and 16 <= geometry[0] * geometry[1] < 1 << 31
