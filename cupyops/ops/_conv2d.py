"""conv2d: cross-correlation of images with a bank of filters."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._dispatch import convolution, gemm, small_conv
from .._dispatch.gemm import Layout, Problem, divisor
from .._kernel.kernel import FLOATING, Kernel, capability, ceil_div
from .._operator.operator import operator

conv2d_fwd = Kernel("conv2d.cu", "conv2d_fwd<T, TILE>", T=FLOATING, TILE=gemm.TILES)
conv2d_bwd_weight = Kernel("conv2d.cu", "conv2d_bwd_weight<T, TILE>", T=FLOATING, TILE=gemm.TILES)
conv2d_sum = Kernel("conv2d.cu", "conv2d_sum<T>", T=FLOATING)
conv2d_channels_last = Kernel("conv2d.cu", "conv2d_channels_last<T>", T=gemm.HALF)

DIRECT: dict[str, Any] = {"T": (torch.float32,), "K": small_conv.TAPS}
conv2d_direct = Kernel(
    "conv2d_direct.cu", "conv2d_direct<T, K, NF, FORWARD>", **DIRECT, NF=(1, 4, 8), FORWARD=(False, True)
)
conv2d_direct_bwd_weight = Kernel(  # with four filters of a thread where its registers suffice
    "conv2d_direct.cu",
    "conv2d_direct_bwd_weight<T, K, NF>",
    **DIRECT,
    NF=(1, 4),
    where=lambda T, K, NF: NF == 1 or K == 3,
)


@operator("cupyops::conv2d", autocast="lower")
def _conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Tensor:
    return torch.nn.functional.conv2d(x, weight, bias, stride, padding, dilation, groups)


@_conv2d.forward
def _(x, weight, bias, stride, padding, dilation, groups):
    memory = convolution.memory_format(x, weight)
    x, weight = x.contiguous(memory_format=memory), weight.contiguous(memory_format=memory)
    size = convolution.output_size(x.shape[2:], weight.shape[2:], stride, padding, dilation)
    y = torch.empty((x.shape[0], weight.shape[0], *size), dtype=x.dtype, device=x.device, memory_format=memory)
    bias = bias if bias is None else bias.contiguous()
    if not gemm.is_dry(y):
        if _is_direct(x, weight, stride, padding, dilation, groups):
            _correlate_directly(y, x, weight, bias, padding, forward=True)
        else:
            _correlate(y, x, weight, bias, stride, padding, dilation, groups)
    return y, ()


@_conv2d.backward
def _(saved, grad_y, x, weight, bias, stride, padding, dilation, groups, needs_grad):
    memory = convolution.memory_format(x, weight)
    x, weight = x.contiguous(memory_format=memory), weight.contiguous(memory_format=memory)
    grad_y = grad_y.contiguous(memory_format=memory)
    grad_x = torch.empty_like(x, memory_format=memory) if needs_grad.x else None
    grad_weight = torch.empty_like(weight, memory_format=memory) if needs_grad.weight else None
    grad_bias = torch.empty_like(bias, memory_format=torch.contiguous_format) if needs_grad.bias else None
    if gemm.is_dry(grad_y):
        return grad_x, grad_weight, grad_bias
    if _is_direct(x, weight, stride, padding, dilation, groups):
        if grad_x is not None:
            reach = [weight.shape[2] - 1 - p for p in padding]
            _correlate_directly(grad_x, grad_y, weight, None, reach, forward=False)
        if grad_weight is not None or grad_bias is not None:
            sizes = small_conv.Sizes(*x.shape, *grad_y.shape[1:], *padding)
            launch = small_conv.direct_weight(sizes, weight.shape[2], x.dtype)
            small_conv.sum_patches(conv2d_direct_bwd_weight, launch, (grad_y, x), grad_weight, grad_bias)
    else:
        if _in_vectors(x, weight, groups):
            grad_y = _channels_last(grad_y)  # once, for both
        geometry = (stride, padding, dilation, groups)
        if grad_x is not None:
            _correlate(grad_x, grad_y, weight, None, *geometry, transposed=True)
        if grad_weight is not None or grad_bias is not None:
            _sum_patches(grad_weight, grad_bias, grad_y, x, weight, *geometry)
    return grad_x, grad_weight, grad_bias


@_conv2d.unsupported
def _(x, weight, bias, stride, padding, dilation, groups):
    images, channels, height, width = x.shape
    if channels == 0 or 0 in weight.shape:
        return "no channels"  # PyTorch has a shape of its own for that
    pixels = images * (height + 2 * padding[0]) * (width + 2 * padding[1])  # of x, and no fewer than of y
    taps = max(weight.shape[0], weight.shape[1]) * weight.shape[2] * weight.shape[3]
    tiles = groups * ceil_div(weight.shape[0], 32) * ceil_div(max(pixels, taps), 32)
    return gemm.too_large(pixels, taps, tiles=tiles)


@_conv2d.interface
def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
) -> Tensor:
    """Two-dimensional convolution (cross-correlation); as `torch.nn.functional.conv2d`.

    Args:
        input: (n, channels, h, w) or (channels, h, w); fp16, bf16, fp32 and fp64 by kernels (summed in fp32, fp64 in
            fp64).
        weight: (out_channels, channels / groups, kernel_h, kernel_w), of the dtype of `input`.
        bias: (out_channels,), of the dtype of `input`.
        stride, dilation: int or a pair.
        padding: int or a pair, of zeros on either side; `"valid"` for none, `"same"` for as many as keep h and w.
        groups: input and output channels are split in so many groups that do not see each other.

    Returns:
        Tensor (n, out_channels, h', w') or (out_channels, h', w'), with
        h' = (h + 2 padding - dilation (kernel_h - 1) - 1) // stride + 1; channels_last where `input` or `weight` is.

    Raises:
        InputError: an argument is no tensor, or of a wrong shape, dtype, device or range.

    Example:
        >>> cupyops.conv2d(torch.ones(1, 1, 3, 3), torch.ones(1, 1, 2, 2))
        tensor([[[[4., 4.],
                  [4., 4.]]]])
    """
    if isinstance(padding, str):  # which may pad the input by a row and a column
        convolution.check_tensors(input, weight, bias, groups)
        input, stride, padding, dilation = convolution.window(input, weight, stride, padding, dilation)
    geometry = *convolution.geometry(input, weight, bias, stride, padding, dilation, groups), groups
    if input.dim() == 3:
        return _conv2d(input.unsqueeze(0), weight, bias, *geometry).squeeze(0)
    return _conv2d(input, weight, bias, *geometry)


# --- few channels ------------------------------------------------------------------------------------------------


def _is_direct(x: Tensor, weight: Tensor, stride: list[int], *geometry: Any) -> bool:
    """Whether a tile of the image lies in shared memory once, rather than a GEMM reading patches."""
    if x.dtype is not torch.float32 or not x.is_contiguous() or capability(x.device) < 8:
        return False
    return small_conv.unsupported(x, weight, stride, *geometry) is None


def _correlate_directly(out, image, weight, bias, padding, forward):
    """out = image correlated with weight, or with weight turned round."""
    if out.numel():
        sizes = small_conv.Sizes(*image.shape, *out.shape[1:], *padding)
        launch = small_conv.direct(sizes, weight.shape[2], out.dtype, capability(out.device))
        conv2d_direct[launch.config](image, weight, bias, out, *launch.numbers, FORWARD=forward, **launch.template)


# --- geometry ----------------------------------------------------------------------------------------------------


def _in_vectors(x: Tensor, weight: Tensor, groups: int) -> bool:
    """Whether the tensor cores are to read vectors of channels, for which images that lie otherwise are copied."""
    return x.dtype in gemm.HALF and weight.shape[1] % 8 == 0 and weight.shape[0] // groups % 8 == 0


def _is_channels_last(x: Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last)


def _channels_last(x: Tensor) -> Tensor:
    """The same image, or filter, with channels contiguous."""
    if _is_channels_last(x):
        return x
    copy = torch.empty_like(x, memory_format=torch.channels_last)
    images, channels, pixels = x.shape[0], x.shape[1], x.shape[2] * x.shape[3]
    grid = images * ceil_div(channels, 64) * ceil_div(pixels, 64)
    conv2d_channels_last[grid, 256](x, copy, channels, pixels, T=x.dtype)
    return copy


def _correlate(out, image, weight, bias, stride, padding, dilation, groups, transposed=False):
    """out = image correlated with weight; transposed: from the gradient `image` of the output, that of the input."""
    if _in_vectors(image, weight, groups):
        image = _channels_last(image)
    last = _is_channels_last(image) and (_is_channels_last(out) or not image.is_contiguous())
    filters = weight
    if last and transposed:  # (group, channel, r, s, filter)
        filters = weight.unflatten(0, (groups, -1)).permute(0, 2, 3, 4, 1).contiguous()
    elif last:
        filters = weight.contiguous(memory_format=torch.channels_last)
    out_last = last and _is_channels_last(out)
    geometry = (out.shape, image.shape, weight.shape, tuple(stride), tuple(padding), tuple(dilation), groups)
    launch, packed = _correlation(*geometry, last, out_last, transposed, out.dtype, out.device)
    gemm.run(conv2d_fwd, conv2d_sum, launch, (filters, image, bias), (out, None), (packed,))


def _sum_patches(grad_weight, grad_bias, grad_y, x, weight, stride, padding, dilation, groups):
    """grad_weight and grad_bias; either may be None."""
    if _in_vectors(x, weight, groups):
        x, grad_y = _channels_last(x), _channels_last(grad_y)
    last = _is_channels_last(x) and _is_channels_last(grad_y)
    weight_last = _is_channels_last(weight)
    geometry = (grad_y.shape, x.shape, weight.shape, tuple(stride), tuple(padding), tuple(dilation), groups)
    wanted = (grad_weight is not None, grad_bias is not None)
    launch, packed = _patch_sums(*geometry, last, weight_last, *wanted, x.dtype, x.device)
    gemm.run(conv2d_bwd_weight, conv2d_sum, launch, (grad_y, x, None), (grad_weight, grad_bias), (packed,))


@functools.lru_cache(maxsize=1024)
def _correlation(out, source, weight, stride, padding, dilation, groups, last, out_last, transposed, dtype, device):
    """The launch and the packed `struct Image` of a convolution, or of its gradient with respect to the image."""
    filters, channels, area = weight[0] // groups, weight[1], weight[2] * weight[3]
    m, inner = (channels, filters) if transposed else (filters, channels)
    k = inner * area
    group = filters * channels * area
    if transposed and not last:  # (filter, channel, r, s); k = (filter, r, s)
        a = Layout(area, 1, group, run=area, stride_run=channels * area)
    else:
        a = Layout(k, 1, group)
    if transposed:
        axes = [(1, p, -d, s) for s, p, d in zip(stride, padding, dilation)]
    else:
        axes = [(s, -p, d, 1) for s, p, d in zip(stride, padding, dilation)]
    n = out[0] * out[2] * out[3]
    problem = Problem(m, n, k, a, Layout(0, 0), _image_layout(out, m, out_last), groups, groups, bias_along_m=True)
    return gemm.plan(problem, dtype, device), _image(source, out, weight, inner, axes, last)


@functools.lru_cache(maxsize=1024)
def _patch_sums(
    grad_y, x, weight, stride, padding, dilation, groups, last, weight_last, wants_weight, wants_bias, dtype, device
):
    """The launch and the packed `struct Image` of grad_weight and grad_bias."""
    filters, area = weight[0] // groups, weight[2] * weight[3]
    taps = weight[1] * area
    axes = [(s, -p, d, 1) for s, p, d in zip(stride, padding, dilation)]
    n, k = taps if wants_weight else 0, grad_y[0] * grad_y[2] * grad_y[3]
    if last and not weight_last:  # n = (r, s, channel) in an output of (channel, r, s)
        out = Layout(taps, area, filters * taps, run=weight[1], stride_run=1)
    else:
        out = Layout(taps, 1, filters * taps)
    a = _image_layout(grad_y, filters, last)
    problem = Problem(filters, n, k, a, Layout(0, 0), out, groups, groups, ones=wants_bias)
    return gemm.plan(problem, dtype, device), _image(x, grad_y, weight, weight[1], axes, last, n)


def _image_layout(shape, channels, last):
    """An image as the matrix [channel of a group][pixel]."""
    _, total, height, width = shape
    area = height * width
    if last:
        return Layout(1, total, channels)
    return Layout(area, 1, channels * area, run=area, stride_run=total * area)


def _image(source, target, weight, channels, axes, last, taps=None):
    """`struct Image`: patches of `source`, one for each pixel of `target`."""
    _, total, height, width = source
    step_channel, step_row, step_column = (1, width * total, total) if last else (height * width, width, 1)
    area = weight[2] * weight[3]
    fields = [target[0] * target[2] * target[3], channels * area if taps is None else taps]
    fields += [total * height * width, step_channel, channels * step_channel]
    fields += [*divisor(target[2] * target[3]), *divisor(target[3])]
    fields += [*divisor(channels if last else area), *divisor(weight[3])]
    for extent, step, (scale, offset, tap_step, divide) in zip((height, width), (step_row, step_column), axes):
        fields += [extent, step, scale, offset, tap_step, *divisor(divide)]
    return np.array([*fields, int(last)], dtype=np.int64)
