"""avg_pool2d: the average of each window of each plane."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .._dispatch.core.forms import Forms
from .._dispatch.core.gpu import gpu
from .._dispatch.pool.pool import BANDS, GLOBAL, NHWC, Bands, Global, Nhwc, Problem, Scalar, output_size, planes, window
from .._kernel.kernel import Kernel
from .._operator.floating import operator
from .._util import arguments
from .._util.strides import aligned, is_dry, suggested_format

FILE = "avg_pool2d.cu"
avg_pool2d_fwd_bands = Kernel(FILE, "avg_pool2d_fwd_bands<T, K, S>", **BANDS)
avg_pool2d_bwd_bands = Kernel(FILE, "avg_pool2d_bwd_bands<T, K, S>", **BANDS)
avg_pool2d_fwd_nhwc = Kernel(FILE, "avg_pool2d_fwd_nhwc<T, K, S, ALIGNED>", **NHWC)
avg_pool2d_bwd_nhwc = Kernel(FILE, "avg_pool2d_bwd_nhwc<T, K, S, ALIGNED>", **NHWC)
avg_pool2d_fwd_global = Kernel(FILE, "avg_pool2d_fwd_global<T>", **GLOBAL)
avg_pool2d_bwd_global = Kernel(FILE, "avg_pool2d_bwd_global<T>", **GLOBAL)

FORWARD, BACKWARD = (
    Forms(
        "avg_pool2d",
        direction,
        [Global(plane, backward), Bands(bands, backward), Nhwc(nhwc, backward), Scalar(nhwc, backward)],
    )
    for direction, plane, bands, nhwc, backward in (
        ("forward", avg_pool2d_fwd_global, avg_pool2d_fwd_bands, avg_pool2d_fwd_nhwc, False),
        ("backward", avg_pool2d_bwd_global, avg_pool2d_bwd_bands, avg_pool2d_bwd_nhwc, True),
    )
)


@operator("cupyops::avg_pool2d", sharding="...HW -> ...HW")
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
def forward(x, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override, size):
    layout = suggested_format(x)
    x = x.contiguous(memory_format=layout)
    out = output_size(size, (kernel_size, stride, padding, (1, 1)), ceil_mode)
    y = torch.empty((*x.shape[:-2], *out), dtype=x.dtype, device=x.device, memory_format=layout)
    if not is_dry(y) and y.numel() > 0:
        problem = _problem(x, (*size, *out, *kernel_size, *stride, *padding, 1, 1), layout, aligned(x))
        FORWARD.launch(problem, gpu(x.device))(x, y, _averaging(divisor_override, count_include_pad))
    return y, ()


@_avg_pool2d.backward
def backward(saved, grad_y, kernel_size, stride, padding, count_include_pad, divisor_override, size):
    layout = suggested_format(grad_y)
    shape = (*grad_y.shape[:-2], *size)
    grad_x = torch.empty(shape, dtype=grad_y.dtype, device=grad_y.device, memory_format=layout)
    if not is_dry(grad_x) and grad_x.numel() > 0:
        geometry = (*size, *grad_y.shape[-2:], *kernel_size, *stride, *padding, 1, 1)
        problem = _problem(grad_x, geometry, layout, aligned(grad_y))
        averaging = _averaging(divisor_override, count_include_pad)
        BACKWARD.launch(problem, gpu(grad_y.device))(grad_y, grad_x, averaging)
    return grad_x


@_avg_pool2d.interface(twin=torch.nn.functional.avg_pool2d)
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


def _problem(x: Tensor, geometry: tuple[int, ...], layout: torch.memory_format, aligned: bool) -> Problem:
    images, channels = (1, *x.shape)[-4:-2]
    return Problem(images, channels, geometry, x.dtype, layout is torch.channels_last, aligned)


@functools.lru_cache(maxsize=256)
def _averaging(divisor_override: int | None, count_include_pad: bool) -> np.ndarray:
    """`struct Averaging`."""
    return np.array([divisor_override or 0, count_include_pad], dtype=np.int64)
