"""conv2d: cross-correlation of images with a bank of filters."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import check
from ..common import gemm
from ..common.gemm import Layout, Problem, divisor
from ..errors import InputError
from ..kernel import FLOATING, Kernel, ceil_div
from ..operator import operator

conv2d_fwd = Kernel("conv2d.cu", "conv2d_fwd<T, TILE>", T=FLOATING, TILE=gemm.TILES)
conv2d_bwd_weight = Kernel("conv2d.cu", "conv2d_bwd_weight<T, TILE>", T=FLOATING, TILE=gemm.TILES)
conv2d_sum = Kernel("conv2d.cu", "conv2d_sum<T>", T=FLOATING)
conv2d_channels_last = Kernel("conv2d.cu", "conv2d_channels_last<T>", T=gemm.HALF)


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
    memory = _memory_format(x, weight)
    x, weight = x.contiguous(memory_format=memory), weight.contiguous(memory_format=memory)
    sides = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation)
    size = [(extent + 2 * p - d * (taps - 1) - 1) // s + 1 for extent, taps, s, p, d in sides]
    y = torch.empty((x.shape[0], weight.shape[0], *size), dtype=x.dtype, device=x.device, memory_format=memory)
    bias = bias if bias is None else bias.contiguous()
    if not gemm.is_dry(y):
        _correlate(y, x, weight, bias, stride, padding, dilation, groups)
    return y, ()


@_conv2d.backward
def _(saved, grad_y, x, weight, bias, stride, padding, dilation, groups, needs_grad):
    memory = _memory_format(x, weight)
    x, weight = x.contiguous(memory_format=memory), weight.contiguous(memory_format=memory)
    grad_y = grad_y.contiguous(memory_format=memory)
    grad_x = torch.empty_like(x, memory_format=memory) if needs_grad.x else None
    grad_weight = torch.empty_like(weight, memory_format=memory) if needs_grad.weight else None
    grad_bias = torch.empty_like(bias, memory_format=torch.contiguous_format) if needs_grad.bias else None
    if not gemm.is_dry(grad_y):
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
    check.tensor("input", input)
    check.tensor("weight", weight)
    check.optional_tensor("bias", bias)
    check.same_device(input=input, weight=weight, bias=bias)
    gemm.check_dtypes(input=input, weight=weight, bias=bias)
    _check_shapes(input, weight, bias, groups)
    stride, dilation = check.ints("stride", stride, 2, 1), check.ints("dilation", dilation, 2, 1)
    if isinstance(padding, str):
        input, padding = _padding_by_name(input, weight, padding, stride, dilation)
    else:
        padding = check.ints("padding", padding, 2, 0)
    for extent, taps, p, d in zip(input.shape[-2:], weight.shape[2:], padding, dilation):
        if d * (taps - 1) + 1 > extent + 2 * p:
            raise InputError(
                f"weight has shape {tuple(weight.shape)}, expected a kernel (dilation {tuple(dilation)}) no larger than "
                f"the padded input: input has shape {tuple(input.shape)}, padding is {tuple(padding)}"
            )
    if input.dim() == 3:
        return _conv2d(input.unsqueeze(0), weight, bias, stride, padding, dilation, groups).squeeze(0)
    return _conv2d(input, weight, bias, stride, padding, dilation, groups)


def _check_shapes(input: Tensor, weight: Tensor, bias: Tensor | None, groups: Any) -> None:
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        check.fail("groups", groups, "an int of at least 1")
    if input.dim() not in (3, 4):
        check.fail("input", input, "shape (n, channels, h, w) or (channels, h, w)")
    sizes = weight.shape[:1] if weight.dim() == 4 and weight.shape[1] == 0 else weight.shape
    if weight.dim() != 4 or min(sizes) < 1:
        check.fail("weight", weight, "shape (out_channels, channels / groups, kernel_h, kernel_w), none of them 0")
    channels = input.shape[-3]
    if weight.shape[0] % groups:
        check.fail("weight", weight, f"a number of output channels that groups={groups} divides")
    if channels != weight.shape[1] * groups:
        raise InputError(
            f"input has shape {tuple(input.shape)}, {channels} channels, expected {weight.shape[1] * groups} to fit "
            f"weight of shape {tuple(weight.shape)} and groups={groups}"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise InputError(
            f"bias has shape {tuple(bias.shape)}, expected ({weight.shape[0]},), the output channels of weight"
        )


def _padding_by_name(input: Tensor, weight: Tensor, padding: str, stride: list[int], dilation: list[int]) -> Any:
    """(input, padding) for "valid" and "same"; the odd zero of "same" goes right and below, as PyTorch's."""
    check.choice("padding", padding, ("valid", "same"))
    if padding == "valid":
        return input, [0, 0]
    if max(stride) > 1:
        check.fail("stride", tuple(stride), 'stride 1, since padding is "same"')
    total = [d * (taps - 1) for taps, d in zip(weight.shape[2:], dilation)]
    if any(t % 2 for t in total):
        input = torch.nn.functional.pad(input, (0, total[1] % 2, 0, total[0] % 2))
    return input, [t // 2 for t in total]


# --- geometry ----------------------------------------------------------------------------------------------------


def _memory_format(x: Tensor, weight: Tensor) -> torch.memory_format:
    """Of the output, and of everything inside: cuDNN's rule, which has no channels_last for float64."""
    if x.dtype == torch.float64 and x.device.type == "cuda":
        return torch.contiguous_format
    last = _like_channels_last(x) or _like_channels_last(weight)
    return torch.channels_last if last else torch.contiguous_format


def _like_channels_last(x: Tensor) -> bool:
    """Whether PyTorch takes strides as channels_last; where both formats fit, it takes them as contiguous."""
    least = 0
    for dim in (1, 3, 2, 0):
        size, step = x.shape[dim], x.stride(dim)
        if size == 0 or step < least or (dim == 1 and step == 0) or (dim == 0 and least == x.stride(1)):
            return False
        least = step * max(size, 1)
    return True


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
