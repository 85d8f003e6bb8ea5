"""max_pool2d: the maximum of each window of each plane."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..common.gemm import divisor
from ..common.window import BLOCK, bwd_bands, cells, fwd_bands, is_channels_last, output_size, planes
from ..common.window import window as arguments
from ..kernel import FLOATING, Kernel, ceil_div
from ..layout import is_dry
from ..operator import operator

PLACES = (torch.uint8, torch.int64)  # i * kw + j, h * W + w
max_pool2d_fwd = Kernel("max_pool2d.cu", "max_pool2d_fwd<T, I, K>", T=FLOATING, I=PLACES, K=(0, 2, 3))
max_pool2d_fwd_last = Kernel(
    "max_pool2d.cu", "max_pool2d_fwd_last<T, I, VECTORS>", T=FLOATING, I=PLACES, VECTORS=(False, True)
)
max_pool2d_fwd_2x2 = Kernel("max_pool2d.cu", "max_pool2d_fwd_2x2<T>", T=FLOATING)
max_pool2d_bwd = Kernel("max_pool2d.cu", "max_pool2d_bwd<T, I>", T=FLOATING, I=PLACES)
max_pool2d_bwd_gather = Kernel("max_pool2d.cu", "max_pool2d_bwd_gather<T, I>", T=FLOATING, I=PLACES)
max_pool2d_bwd_last = Kernel(
    "max_pool2d.cu", "max_pool2d_bwd_last<T, I, VECTORS>", T=FLOATING, I=PLACES, VECTORS=(False, True)
)
max_pool2d_bwd_2x2 = Kernel("max_pool2d.cu", "max_pool2d_bwd_2x2<T>", T=FLOATING)

Window = tuple[list[int], ...]  # kernel, stride, padding, dilation
TILING_2X2 = (2, 2, 2, 2, 0, 0, 1, 1)
SUM_BYTES = {torch.float16: 4, torch.bfloat16: 4, torch.float32: 4, torch.float64: 8}
MAX_PHASES = 16
MAX_WINDOW = 256  # of which a byte holds the place


@operator("cupyops::max_pool2d")
def _max_pool2d(
    x: Tensor,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
    size: list[int],  # of the planes of x, for a backward that does not keep x
) -> Tensor:
    return F.max_pool2d(x, kernel_size, stride, padding, dilation, ceil_mode)


@_max_pool2d.forward
def _(x, kernel_size, stride, padding, dilation, ceil_mode, size):
    y, argmax = _forward(x, (kernel_size, stride, padding, dilation), ceil_mode, torch.uint8)
    return y, (argmax,)


@_max_pool2d.backward
def _(saved, grad_y, kernel_size, stride, padding, dilation, size):
    return _backward(grad_y, saved[0], (kernel_size, stride, padding, dilation), size)


@_max_pool2d.reference_backward
def _(saved, grad_y, kernel_size, stride, padding, dilation, size):
    place = saved[0].long()
    h = _starts(place, -2, stride, padding)[:, None] + place // kernel_size[1] * dilation[0]
    w = _starts(place, -1, stride, padding) + place % kernel_size[1] * dilation[1]
    inside = (h >= 0) & (h < size[0]) & (w >= 0) & (w < size[1])
    # reshape and not flatten, which has no rule for the batched gradients of torch.autograd.grad(is_grads_batched=True)
    planes, window = grad_y.shape[:-2], grad_y.shape[-2] * grad_y.shape[-1]
    index = torch.where(inside, h * size[1] + w, 0).reshape(*planes, window)
    grad = torch.where(inside, grad_y, 0).reshape(*planes, window)
    grad_x = grad.new_zeros(*planes, size[0] * size[1]).scatter_add(-1, index, grad)
    return grad_x.reshape(*planes, *size)


@_max_pool2d.unsupported
def _(x, kernel_size, stride, padding, dilation, ceil_mode, size):
    return f"a window of more than {MAX_WINDOW} elements" if math.prod(kernel_size) > MAX_WINDOW else None


@operator("cupyops::max_pool2d_with_indices")
def _max_pool2d_with_indices(
    x: Tensor, kernel_size: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil_mode: bool
) -> tuple[Tensor, Tensor]:
    return F.max_pool2d_with_indices(x, kernel_size, stride, padding, dilation, ceil_mode)


@_max_pool2d_with_indices.forward
def _(x, kernel_size, stride, padding, dilation, ceil_mode):
    return _forward(x, (kernel_size, stride, padding, dilation), ceil_mode, torch.int64), ()


@_max_pool2d_with_indices.backward
def _(saved, grad_y, grad_indices, indices, x, kernel_size, stride, padding, dilation):
    return _backward(grad_y, indices, (kernel_size, stride, padding, dilation), x.shape[-2:])


@_max_pool2d.interface
def max_pool2d(
    input: Tensor,
    kernel_size: int | Sequence[int],
    stride: int | Sequence[int] | None = None,
    padding: int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Maximum over windows of each plane; as `torch.nn.functional.max_pool2d`.

    Args:
        input: (N, C, H, W) or (C, H, W); kernels serve fp16, bf16, fp32 and fp64, contiguous and channels_last.
        kernel_size: height and width of the window, or one number for both, as for the next three.
        stride: from one window to the next; by default `kernel_size`.
        padding: of -inf on every side, at most half of `kernel_size`.
        dilation: from one element of a window to the next.
        ceil_mode: keep a last window that only partly fits, if it begins inside the input or its left padding.
        return_indices: return also the places of the maxima, int64, as h * W + w.

    Returns:
        Tensor of shape (N, C, OH, OW) or (C, OH, OW), channels_last where `input` is; with `return_indices`, a pair.
        A window with a NaN gives NaN; the gradient of equal maxima goes to the first.

    Raises:
        InputError: `input` has another number of dimensions or no elements in one but the batch, a size is not positive,
            `padding` exceeds half of `kernel_size`, or no window fits.

    Example:
        >>> cupyops.max_pool2d(torch.arange(16.0).view(1, 4, 4), 2)
        tensor([[[ 5.,  7.],
                 [13., 15.]]])
    """
    planes("input", input)
    found = arguments(input.shape[-2:], kernel_size, stride, padding, dilation, ceil_mode)
    if return_indices:
        return _max_pool2d_with_indices(input, *found, bool(ceil_mode))
    return _max_pool2d(input, *found, bool(ceil_mode), list(input.shape[-2:]))


# --- launches ---


def _forward(x: Tensor, window: Window, ceil_mode: bool, places: torch.dtype) -> tuple[Tensor, Tensor]:
    layout = torch.channels_last if is_channels_last(x) else torch.contiguous_format
    x, size = x.contiguous(memory_format=layout), x.shape[-2:]
    out = output_size(size, window, ceil_mode)
    y = torch.empty((*x.shape[:-2], *out), dtype=x.dtype, device=x.device, memory_format=layout)
    argmax = torch.empty_like(y, dtype=places)
    if is_dry(y) or y.numel() == 0:
        return y, argmax  # what would be launched depends on sizes that may be symbols
    vector, geometry = 16 // x.element_size(), (*size, *out, *window[0], *window[1], *window[2], *window[3])
    if layout is torch.channels_last:
        wide = x.shape[1] % vector == 0
        threads = y.numel() // (vector if wide else 1)
        structs = cells(x.shape[1], geometry, vector if wide else 1, False)
        grid = ceil_div(threads, BLOCK)
        max_pool2d_fwd_last[grid, BLOCK](x, y, argmax, threads, x.shape[1], *structs, T=x.dtype, I=places, VECTORS=wide)
    elif places is torch.uint8 and _tiles_2x2(geometry, vector):
        grid = ceil_div(y.numel() // (vector // 2), BLOCK)
        max_pool2d_fwd_2x2[grid, BLOCK](x, y, argmax, y.numel() // out[1], _divisor(size[1] // vector), T=x.dtype)
    else:
        known = 2 if window[0] == [2, 2] else 3 if window[0] == [3, 3] else 0
        bands = fwd_bands(y.numel() // (out[0] * out[1]), geometry, x.element_size())
        max_pool2d_fwd[bands.grid, BLOCK, bands.shared](
            x, y, argmax, bands.window, bands.bands, T=x.dtype, I=places, K=known
        )
    return y, argmax


def _backward(grad_y: Tensor, argmax: Tensor, window: Window, size: Sequence[int]) -> Tensor:
    layout = torch.channels_last if is_channels_last(argmax) else torch.contiguous_format
    shape, out = (*grad_y.shape[:-2], *size), grad_y.shape[-2:]
    grad_x = torch.empty(shape, dtype=grad_y.dtype, device=grad_y.device, memory_format=layout)
    count = grad_x.numel()
    if is_dry(grad_x) or count == 0:
        return grad_x
    vector, geometry = 16 // grad_y.element_size(), (*size, *out, *window[0], *window[1], *window[2], *window[3])
    types: dict[str, Any] = dict(T=grad_y.dtype, I=argmax.dtype)
    if layout is torch.channels_last:
        wide = shape[1] % vector == 0
        threads = count // (vector if wide else 1)
        structs = cells(shape[1], geometry, vector if wide else 1, True)
        grid = ceil_div(threads, BLOCK)
        max_pool2d_bwd_last[grid, BLOCK](grad_y, argmax, grad_x, threads, shape[1], *structs, **types, VECTORS=wide)
    elif argmax.dtype is torch.uint8 and _tiles_2x2(geometry, vector):
        grid, groups = ceil_div(count // (2 * vector), BLOCK), _divisor(size[1] // vector)
        max_pool2d_bwd_2x2[grid, BLOCK](grad_y, argmax, grad_x, grad_y.numel() // out[1], groups, T=grad_y.dtype)
    else:
        bands, phases = bwd_bands(count // (size[0] * size[1]), geometry, SUM_BYTES[grad_y.dtype]), _phases(geometry)
        if bands.fits and phases[0] * phases[1] <= MAX_PHASES:
            max_pool2d_bwd[bands.grid, BLOCK, bands.shared](
                grad_y, argmax, grad_x, bands.window, bands.bands, _divisor(geometry[5]), *phases, **types
            )
        else:
            structs = cells(1, geometry, 1, True)
            max_pool2d_bwd_gather[ceil_div(count, BLOCK), BLOCK](grad_y, argmax, grad_x, count, *structs, **types)
    return grad_x


@functools.lru_cache(maxsize=4096)
def _phases(geometry: tuple[int, ...]) -> tuple[int, int]:
    """Windows as far apart as this have no element in common: powers of two."""
    kernel, stride, dilation = geometry[4:6], geometry[6:8], geometry[10:12]
    spans = ((k - 1) * d + 1 for k, d in zip(kernel, dilation))
    down, across = (1 << (ceil_div(span, step) - 1).bit_length() for span, step in zip(spans, stride))
    return down, across


@functools.lru_cache(maxsize=4096)
def _divisor(value: int) -> np.ndarray:
    return np.array(divisor(value), dtype=np.int64)


def _tiles_2x2(geometry: tuple[int, ...], vector: int) -> bool:
    """Whether windows of 2 x 2 cover each element once, in rows of whole vectors."""
    h, w, out_h, out_w = geometry[:4]
    return geometry[4:] == TILING_2X2 and h == 2 * out_h and w == 2 * out_w and w % vector == 0


def _starts(place: Tensor, dim: int, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """Where the windows begin, along one dimension."""
    return torch.arange(place.shape[dim], device=place.device) * stride[dim] - padding[dim]
