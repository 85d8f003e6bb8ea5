"""max_pool2d: the maximum of each window of each plane."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .._dispatch.core.forms import Forms
from .._dispatch.core.gpu import gpu
from .._dispatch.pool.pool import BANDS, NHWC, Bands, Nhwc, Problem, Scalar, output_size, planes
from .._dispatch.pool.pool import window as arguments
from .._kernel.kernel import Kernel
from .._operator.floating import operator
from .._util.strides import aligned, is_dry, suggested_format

FILE = "max_pool2d.cu"
INDEX: dict[str, Any] = {"I": (torch.uint8, torch.int64)}  # i * kw + j, h * W + w
max_pool2d_fwd_bands = Kernel(FILE, "max_pool2d_fwd_bands<T, K, S>", **BANDS)
max_pool2d_bwd_bands = Kernel(FILE, "max_pool2d_bwd_bands<T, K, S>", **BANDS)
max_pool2d_fwd_nhwc = Kernel(FILE, "max_pool2d_fwd_nhwc<T, I, K, S, ALIGNED>", **INDEX, **NHWC)
max_pool2d_bwd_nhwc = Kernel(FILE, "max_pool2d_bwd_nhwc<T, I, K, S, ALIGNED>", **INDEX, **NHWC)

FORWARD, BACKWARD = (
    Forms("max_pool2d", direction, [Bands(bands, backward), Nhwc(nhwc, backward), Scalar(nhwc, backward)])
    for direction, bands, nhwc, backward in (
        ("forward", max_pool2d_fwd_bands, max_pool2d_fwd_nhwc, False),
        ("backward", max_pool2d_bwd_bands, max_pool2d_bwd_nhwc, True),
    )
)

Window = tuple[list[int], ...]  # kernel, stride, padding, dilation
MAX_WINDOW = 256  # elements, whose places a byte holds


@operator("cupyops::max_pool2d", sharding="...HW -> ...HW")
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
def forward(x, kernel_size, stride, padding, dilation, ceil_mode, size):
    y, argmax = _maxima(x, (kernel_size, stride, padding, dilation), ceil_mode, torch.uint8)
    return y, (argmax,)


@_max_pool2d.backward
def backward(saved, grad_y, kernel_size, stride, padding, dilation, size):
    return _gather(grad_y, saved[0], (kernel_size, stride, padding, dilation), size)


@_max_pool2d.reference_backward
def reference_backward(saved, grad_y, kernel_size, stride, padding, dilation, size):
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
def unsupported(x, kernel_size, stride, padding, dilation, ceil_mode, size):
    return f"a window of more than {MAX_WINDOW} elements" if math.prod(kernel_size) > MAX_WINDOW else None


@operator("cupyops::max_pool2d_with_indices", sharding="...HW -> ...HW, ...HW")
def _max_pool2d_with_indices(
    x: Tensor, kernel_size: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil_mode: bool
) -> tuple[Tensor, Tensor]:
    return F.max_pool2d_with_indices(x, kernel_size, stride, padding, dilation, ceil_mode)


@_max_pool2d_with_indices.forward
def forward_with_indices(x, kernel_size, stride, padding, dilation, ceil_mode):
    return _maxima(x, (kernel_size, stride, padding, dilation), ceil_mode, torch.int64), ()


@_max_pool2d_with_indices.backward
def backward_with_indices(saved, grad_y, grad_indices, indices, x, kernel_size, stride, padding, dilation):
    return _gather(grad_y, indices, (kernel_size, stride, padding, dilation), x.shape[-2:])


@_max_pool2d.interface(twin=torch.nn.functional.max_pool2d)
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
        A window with a NaN gives NaN; the gradient of equal maxima goes to the first. Kernels keep the places of the maxima
        and not `input`: the gradient with `create_graph=True` is a function of the gradient that arrives, and where PyTorch
        has zeros for its derivative by `input`, there is none.

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


def _maxima(x: Tensor, window: Window, ceil_mode: bool, index: torch.dtype) -> tuple[Tensor, Tensor]:
    """The maxima and their places."""
    layout = suggested_format(x)
    x, size = x.contiguous(memory_format=layout), x.shape[-2:]
    out = output_size(size, window, ceil_mode)
    y = torch.empty((*x.shape[:-2], *out), dtype=x.dtype, device=x.device, memory_format=layout)
    argmax = torch.empty_like(y, dtype=index)
    if not is_dry(y) and y.numel() > 0:  # on a dry run sizes may be symbols
        problem = _problem(x, (*size, *out), window, layout, aligned(x), index)
        FORWARD.launch(problem, gpu(x.device))(x, y, argmax)
    return y, argmax


def _gather(grad_y: Tensor, argmax: Tensor, window: Window, size: Sequence[int]) -> Tensor:
    """The gradient of planes of `size`."""
    layout = suggested_format(argmax)
    shape = (*grad_y.shape[:-2], *size)
    grad_x = torch.empty(shape, dtype=grad_y.dtype, device=grad_y.device, memory_format=layout)
    if not is_dry(grad_x) and grad_x.numel() > 0:
        sizes, both_aligned = (*size, *grad_y.shape[-2:]), aligned(grad_y) and aligned(argmax)
        problem = _problem(grad_x, sizes, window, layout, both_aligned, argmax.dtype)
        BACKWARD.launch(problem, gpu(grad_y.device))(grad_y, argmax, grad_x)
    return grad_x


def _problem(
    x: Tensor, sizes: tuple[int, ...], window: Window, layout: torch.memory_format, aligned: bool, index: torch.dtype
) -> Problem:
    images, channels = (1, *x.shape)[-4:-2]
    geometry = (*sizes, *window[0], *window[1], *window[2], *window[3])
    return Problem(images, channels, geometry, x.dtype, layout is torch.channels_last, aligned, index)


def _starts(place: Tensor, dim: int, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """First positions of the windows along one dimension."""
    return torch.arange(place.shape[dim], device=place.device) * stride[dim] - padding[dim]
