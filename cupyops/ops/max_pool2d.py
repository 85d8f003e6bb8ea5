"""max_pool2d: the maximum of each window of each plane."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import check
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
max_pool2d_bwd_last = Kernel(
    "max_pool2d.cu", "max_pool2d_bwd_last<T, I, VECTORS>", T=FLOATING, I=PLACES, VECTORS=(False, True)
)
max_pool2d_bwd_2x2 = Kernel("max_pool2d.cu", "max_pool2d_bwd_2x2<T>", T=FLOATING)

BLOCK = 256
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
    check.tensor("input", input)
    if input.dim() not in (3, 4) or 0 in input.shape[-3:]:
        check.fail("input", input, "a tensor of shape (N, C, H, W) or (C, H, W), with none of C, H, W zero")
    if input.dtype is torch.bool or input.dtype.is_complex:
        check.fail("input", input, "a tensor of a real dtype")
    kernel = check.ints("kernel_size", kernel_size, 2, minimum=1)
    default = stride is None or (isinstance(stride, (list, tuple)) and len(stride) == 0)
    steps = kernel if default else check.ints("stride", stride, 2, minimum=1)
    pads, dilations = check.ints("padding", padding, 2, minimum=0), check.ints("dilation", dilation, 2, minimum=1)
    if any(2 * pad > k for pad, k in zip(pads, kernel)):
        check.fail("padding", padding, f"at most half of kernel_size, which is {kernel_size}")
    check.choice("ceil_mode", ceil_mode, (False, True))
    window = kernel, steps, pads, dilations
    if min(_output_size(input.shape[-2:], window, ceil_mode)) < 1:
        check.fail(
            "kernel_size", kernel_size, f"a window that fits planes of {tuple(input.shape[-2:])}, padding included"
        )
    if return_indices:
        return _max_pool2d_with_indices(input, *window, bool(ceil_mode))
    return _max_pool2d(input, *window, bool(ceil_mode), list(input.shape[-2:]))


# --- launches ---


def _forward(x: Tensor, window: tuple[list[int], ...], ceil_mode: bool, places: torch.dtype) -> tuple[Tensor, Tensor]:
    layout = torch.channels_last if _is_channels_last(x) else torch.contiguous_format
    x, size = x.contiguous(memory_format=layout), x.shape[-2:]
    out = _output_size(size, window, ceil_mode)
    y = torch.empty((*x.shape[:-2], *out), dtype=x.dtype, device=x.device, memory_format=layout)
    argmax = torch.empty_like(y, dtype=places)
    if is_dry(y):
        return y, argmax  # what would be launched depends on sizes that may be symbols
    vector, geometry = 16 // x.element_size(), (*size, *out, *window[0], *window[1], *window[2], *window[3])
    if layout is torch.channels_last:
        wide = bool(x.shape[1] % vector == 0)
        grid = ceil_div(y.numel(), BLOCK * (vector if wide else 1))
        max_pool2d_fwd_last[grid, BLOCK](
            x, y, argmax, y.numel(), x.shape[1], *geometry, T=x.dtype, I=places, VECTORS=wide
        )
    elif places is torch.uint8 and _tiles_2x2(size, out, window, vector):
        groups = size[1] // vector
        grid = ceil_div(y.numel() // (vector // 2), BLOCK)
        max_pool2d_fwd_2x2[grid, BLOCK](x, y, argmax, y.numel() // out[1], groups, T=x.dtype)
    else:
        known = 2 if window[0] == [2, 2] else 3 if window[0] == [3, 3] else 0
        grid = ceil_div(y.numel(), BLOCK)
        max_pool2d_fwd[grid, BLOCK](x, y, argmax, y.numel(), *geometry, T=x.dtype, I=places, K=known)
    return y, argmax


def _backward(grad_y: Tensor, argmax: Tensor, window: tuple[list[int], ...], size: Sequence[int]) -> Tensor:
    layout = torch.channels_last if _is_channels_last(argmax) else torch.contiguous_format
    shape, out = (*grad_y.shape[:-2], *size), grad_y.shape[-2:]
    grad_x = torch.empty(shape, dtype=grad_y.dtype, device=grad_y.device, memory_format=layout)
    if is_dry(grad_x):
        return grad_x
    vector, geometry = 16 // grad_y.element_size(), (*size, *out, *window[0], *window[1], *window[2], *window[3])
    types: dict[str, Any] = dict(T=grad_y.dtype, I=argmax.dtype)
    count = grad_x.numel()
    if layout is torch.channels_last:
        wide = bool(shape[1] % vector == 0)
        grid = ceil_div(count, BLOCK * (vector if wide else 1))
        max_pool2d_bwd_last[grid, BLOCK](grad_y, argmax, grad_x, count, shape[1], *geometry, **types, VECTORS=wide)
    elif argmax.dtype is torch.uint8 and _tiles_2x2(size, out, window, vector):
        groups = size[1] // vector
        grid = ceil_div(count // (2 * vector), BLOCK)
        max_pool2d_bwd_2x2[grid, BLOCK](grad_y, argmax, grad_x, grad_y.numel() // out[1], groups, T=grad_y.dtype)
    else:
        max_pool2d_bwd[ceil_div(count, BLOCK), BLOCK](grad_y, argmax, grad_x, count, *geometry, **types)
    return grad_x


# --- geometry and layout ---


def _output_size(size: Sequence[int], window: tuple[list[int], ...], ceil_mode: bool) -> list[int]:
    """Windows in each direction. With ceil_mode the last may stick out, but must begin before the right padding."""
    out = []
    for length, kernel, stride, pad, dilation in zip(size, *window):
        room = length + 2 * pad - dilation * (kernel - 1) - 1
        count = (room + (stride - 1 if ceil_mode else 0)) // stride + 1
        out.append(count - 1 if ceil_mode and (count - 1) * stride >= length + pad else count)
    return out


def _tiles_2x2(size: Sequence[int], out: Sequence[int], window: tuple[list[int], ...], vector: int) -> bool:
    """Whether windows of 2 x 2 cover each element once, in rows of whole vectors."""
    tiled = tuple(map(tuple, window)) == ((2, 2), (2, 2), (0, 0), (1, 1))
    return tiled and size[0] == 2 * out[0] and size[1] == 2 * out[1] and size[1] % vector == 0


def _starts(place: Tensor, dim: int, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """Where the windows begin, along one dimension."""
    return torch.arange(place.shape[dim], device=place.device) * stride[dim] - padding[dim]


def _is_channels_last(x: Tensor) -> bool:
    """Whether PyTorch takes these strides for channels_last (c10's is_channels_last_strides_2d, for its output strides)."""
    shape, strides = x.shape, x.stride()
    if len(shape) != 4 or strides[1] == 0:
        return False
    least = 0
    for dim in (1, 3, 2, 0):
        if shape[dim] == 0 or strides[dim] < least or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * max(shape[dim], 1)
    return True
