"""avg_pool2d: the average of each window of each plane."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .. import check
from ..common.window import BLOCK, cells, fwd_bands, gather_bands, is_channels_last, output_size, planes
from ..common.window import window as arguments
from ..kernel import FLOATING, Kernel, ceil_div
from ..layout import is_dry
from ..operator import operator

avg_pool2d_fwd = Kernel("avg_pool2d.cu", "avg_pool2d_fwd<T>", T=FLOATING)
avg_pool2d_bwd = Kernel("avg_pool2d.cu", "avg_pool2d_bwd<T>", T=FLOATING)
avg_pool2d_fwd_last = Kernel("avg_pool2d.cu", "avg_pool2d_fwd_last<T, VECTORS>", T=FLOATING, VECTORS=(False, True))
avg_pool2d_bwd_last = Kernel("avg_pool2d.cu", "avg_pool2d_bwd_last<T, VECTORS>", T=FLOATING, VECTORS=(False, True))

SUM_BYTES = {torch.float16: 4, torch.bfloat16: 4, torch.float32: 4, torch.float64: 8}


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
    geometry, averaging = (
        (*size, *out, *kernel_size, *stride, *padding, 1, 1),
        _averaging(divisor_override, count_include_pad),
    )
    if layout is torch.channels_last:
        wide, threads, structs = _cells(y, x.shape[1], geometry, False)
        grid = ceil_div(threads, BLOCK)
        avg_pool2d_fwd_last[grid, BLOCK](x, y, threads, x.shape[1], *structs, averaging, T=x.dtype, VECTORS=wide)
    else:
        bands = fwd_bands(y.numel() // (out[0] * out[1]), geometry, x.element_size())
        avg_pool2d_fwd[bands.grid, BLOCK, bands.shared](x, y, bands.window, bands.bands, averaging, T=x.dtype)
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
    if layout is torch.channels_last:
        wide, threads, structs = _cells(grad_x, shape[1], geometry, True)
        grid = ceil_div(threads, BLOCK)
        avg_pool2d_bwd_last[grid, BLOCK](grad_y, grad_x, threads, shape[1], *structs, averaging, T=dtype, VECTORS=wide)
    else:
        bands, windows, steps = gather_bands(grad_x.numel() // (size[0] * size[1]), geometry, SUM_BYTES[dtype])
        avg_pool2d_bwd[bands.grid, BLOCK, bands.shared](
            grad_y, grad_x, bands.window, bands.bands, windows, *steps, averaging, T=dtype
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
    size = list(input.shape[-2:])
    kernel, steps, pads, _ = arguments(size, kernel_size, stride, padding, 1, ceil_mode)
    check.choice("count_include_pad", count_include_pad, (False, True))
    if divisor_override is not None and (
        isinstance(divisor_override, bool) or not isinstance(divisor_override, int) or divisor_override == 0
    ):
        check.fail("divisor_override", divisor_override, "an int other than 0, or None")
    return _avg_pool2d(input, kernel, steps, pads, bool(ceil_mode), bool(count_include_pad), divisor_override, size)


# --- launches ---


@functools.lru_cache(maxsize=256)
def _averaging(divisor_override: int | None, count_include_pad: bool) -> np.ndarray:
    """`struct Averaging`."""
    return np.array([divisor_override or 0, count_include_pad], dtype=np.int64)


def _cells(
    result: Tensor, channels: int, geometry: tuple[int, ...], backward: bool
) -> tuple[bool, int, tuple[np.ndarray, np.ndarray]]:
    """Whether threads own 16 bytes of channels, how many threads, and `struct Window` and `struct Cells`."""
    vector = 16 // result.element_size()
    wide = channels % vector == 0
    vector = vector if wide else 1
    return wide, result.numel() // vector, cells(channels, geometry, vector, backward)
