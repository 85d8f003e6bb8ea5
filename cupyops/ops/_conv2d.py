"""conv2d: cross-correlation of images with a bank of filters."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._dispatch.conv import convolution, pointwise, small_conv
from .._dispatch.conv.implicit_gemm import TILED, Correlation, Direct, PatchSums, forward_problem, geometry_of, tiles
from .._dispatch.conv.small_conv import Fma, FmaWeight
from .._dispatch.core import library, shardings
from .._dispatch.core.forms import Forms, Library
from .._dispatch.core.gpu import gpu
from .._dispatch.core.library import ByPyTorch
from .._dispatch.core.rows import is_symbolic
from .._dispatch.gemm import gemm
from .._kernel.kernel import Kernel, ceil_div
from .._operator.floating import operator
from .._util.strides import is_dry

conv2d_fwd = Kernel("conv2d.cu", "conv2d_fwd<T, TILE>", **TILED)
conv2d_bwd_weight = Kernel("conv2d.cu", "conv2d_bwd_weight<T, TILE>", **TILED)
conv2d_channels_last = Kernel("conv2d.cu", "conv2d_channels_last<T>", T=gemm.HALF)

DIRECT: dict[str, Any] = dict(define=small_conv.DEFINE, T=(torch.float32,), K=small_conv.TAPS)
FORMS: dict[str, Any] = dict(NF=(1, 4, 8), FORWARD=(False, True), where=lambda T, K, NF, FORWARD: NF == 4 or K == 3)
WEIGHT: dict[str, Any] = dict(NF=(1, 4), where=lambda T, K, NF: NF == 1 or K == 3)  # else registers do not suffice
conv2d_direct = Kernel("conv2d_direct.cu", "conv2d_direct<T, K, NF, FORWARD>", **DIRECT, **FORMS)
conv2d_direct_bwd_weight = Kernel("conv2d_direct.cu", "conv2d_direct_bwd_weight<T, K, NF>", **DIRECT, **WEIGHT)

PRODUCT = pointwise.Product()
FORWARD, BACKWARD = (
    Forms(
        "conv2d",
        direction,
        [*(Direct(Fma(conv2d_direct, n, FORWARD=forward)) for n in (8, 1, 4)), PRODUCT, *cudnn, *tiles(conv2d_fwd)],
    )
    for direction, forward, cudnn in (
        ("forward", True, [ByPyTorch(lambda problem, gpu: None)]),
        ("backward", False, []),
    )
)
BACKWARD_WEIGHT = Forms(
    "conv2d",
    "backward_weight",
    [*(Direct(FmaWeight(conv2d_direct_bwd_weight, filters)) for filters in (4, 1)), PRODUCT, *tiles(conv2d_bwd_weight)],
)


@operator("cupyops::conv2d", autocast="lower", sharding=shardings.conv2d)
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
def forward(x, weight, bias, stride, padding, dilation, groups):
    memory = convolution.memory_format(x, weight)
    x, weight = x.contiguous(memory_format=memory), weight.contiguous(memory_format=memory)
    size = convolution.output_size(x.shape[2:], weight.shape[2:], stride, padding, dilation)
    y = torch.empty((x.shape[0], weight.shape[0], *size), dtype=x.dtype, device=x.device, memory_format=memory)
    bias = bias if bias is None else bias.contiguous()
    if not is_dry(y):
        _correlate(y, x, weight, bias, geometry_of(x, weight, stride, padding, dilation, groups), False)
    return y, ()


@_conv2d.backward(reads={"x": ("weight", "bias"), "weight": ("x",), "bias": ()}, apart=True)
def backward(saved, grad_y, x, weight, bias, stride, padding, dilation, groups, needs_grad):
    # of one that is not read, which a frozen layer does not keep, the other and the result tell how it lay
    sums = needs_grad.weight or needs_grad.bias
    memory = convolution.memory_format(x if sums else grad_y, weight if needs_grad.x else grad_y)
    grad_x = torch.empty_like(x, memory_format=memory) if needs_grad.x else None
    x = x.contiguous(memory_format=memory) if sums else grad_x
    weight = weight.contiguous(memory_format=memory) if needs_grad.x else torch.empty_like(weight, memory_format=memory)
    grad_y = grad_y.contiguous(memory_format=memory)
    grad_weight = torch.empty_like(weight, memory_format=memory) if needs_grad.weight else None
    grad_bias = torch.empty_like(bias, memory_format=torch.contiguous_format) if needs_grad.bias else None
    if is_dry(grad_y):
        return grad_x, grad_weight, grad_bias
    geometry = geometry_of(x, weight, stride, padding, dilation, groups)
    if geometry.in_vectors:
        grad_y = _channels_last(grad_y)  # once, for both
    if grad_x is not None:
        _correlate(grad_x, grad_y, weight, None, geometry, True)
    if grad_weight is not None or grad_bias is not None:
        _sum_patches(grad_weight, grad_bias, grad_y, x, weight, geometry)
    return grad_x, grad_weight, grad_bias


@_conv2d.unsupported
def unsupported(x, weight, bias, stride, padding, dilation, groups):
    images, channels, height, width = x.shape
    if channels == 0 or 0 in weight.shape:
        return "no channels"  # PyTorch has a shape of its own for that
    pixels = images * (height + 2 * padding[0]) * (width + 2 * padding[1])  # of x, and no fewer than of y
    taps = max(weight.shape[0], weight.shape[1]) * weight.shape[2] * weight.shape[3]
    tiles = groups * ceil_div(weight.shape[0], 32) * ceil_div(max(pixels, taps), 32)
    if reason := gemm.too_large(pixels, taps, tiles=tiles):
        return reason
    if is_symbolic(*x.shape, *weight.shape) or not x.is_cuda or not x.numel():
        return None
    return library.faster(FORWARD, forward_problem(x, weight, bias, stride, padding, dilation, groups), x.device)


@_conv2d.interface(twin=torch.nn.functional.conv2d)
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


def _channels_last(x: Tensor) -> Tensor:
    """Return an image or a filter with its channels contiguous: itself or a copy."""
    if pointwise.is_channels_last(x):
        return x
    copy = torch.empty_like(x, memory_format=torch.channels_last)
    images, channels, pixels = x.shape[0], x.shape[1], x.shape[2] * x.shape[3]
    grid = images * ceil_div(channels, 64) * ceil_div(pixels, 64)
    conv2d_channels_last[grid, 256](x, copy, channels, pixels, T=x.dtype)
    return copy


def _correlate(out, image, weight, bias, of, transposed):
    """out = image correlated with weight; transposed: from the gradient `image` of the output, that of the input."""
    if out.numel() == 0:
        return
    if of.in_vectors:
        image = _channels_last(image)
    last = pointwise.is_channels_last(image) and (pointwise.is_channels_last(out) or not image.is_contiguous())
    out_last = last and pointwise.is_channels_last(out)
    problem = Correlation(of, tuple(out.shape), tuple(image.shape), last, out_last, transposed)
    launch = (BACKWARD if transposed else FORWARD).plan(problem, gpu(out.device))
    if isinstance(launch, Library):
        if launch.by == pointwise.Product.name:
            return pointwise.correlate(out, image, weight, bias, transposed)
        # where a call is explained: others have taken the reference
        return library.call("torch.conv2d", out, lambda: out.copy_(torch.conv2d(image, weight, bias, *of[1:5])))
    if launch.kernel is conv2d_direct:
        launch(image, weight, bias, out)
        return
    filters = weight
    if last and transposed:  # (group, channel, r, s, filter)
        filters = weight.unflatten(0, (of.groups, -1)).permute(0, 2, 3, 4, 1).contiguous()
    elif last:
        filters = weight.contiguous(memory_format=torch.channels_last)
    gemm.run(launch, filters, image, out, bias)


def _sum_patches(grad_weight, grad_bias, grad_y, x, weight, of):
    """grad_weight and grad_bias; either may be None."""
    if of.in_vectors:
        x, grad_y = _channels_last(x), _channels_last(grad_y)
    last, weight_last = all(map(pointwise.is_channels_last, (x, grad_y))), pointwise.is_channels_last(weight)
    wanted = (grad_weight is not None, grad_bias is not None)
    problem = PatchSums(of, tuple(grad_y.shape), tuple(x.shape), last, weight_last, *wanted)
    launch = BACKWARD_WEIGHT.plan(problem, gpu(x.device))
    if isinstance(launch, Library):
        pointwise.sum_pixels(grad_weight, grad_bias, grad_y, x)
    elif launch.kernel is conv2d_direct_bwd_weight:
        small_conv.sum_partials(launch, (grad_y, x), grad_weight, grad_bias)
    else:
        gemm.run(launch, grad_y, x, grad_weight, column=grad_bias)
