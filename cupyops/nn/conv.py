"""Convolutions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .._dispatch.conv import convolution
from .._dispatch.core import library
from .._util import torch_private, tracing
from .._util.arguments import autocast_dtype
from ..ops._conv2d import conv2d
from ..ops._linear import linear
from .blocks import is_of_blocks, of_blocks
from .twin import Twin, parameter


class Conv2d(Twin, torch.nn.Conv2d):
    """2D convolution (cross-correlation); as `torch.nn.Conv2d`, by `cupyops.conv2d`.

    A `padding_mode` other than "zeros" pads with `torch.nn.functional.pad` first.

    Example:
        >>> cupyops.nn.Conv2d(1, 8, 3, padding=1)(torch.zeros(2, 1, 5, 5)).shape
        torch.Size([2, 8, 5, 5])
    """

    def forward(self, input: Tensor) -> Tensor:
        if type(input) is not Tensor and (node := self._cupyops_leaf(input)) is not None:
            return node  # type: ignore[no-any-return]
        return self._conv_forward(input, parameter(self, "weight"), parameter(self, "bias"))

    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if _by_cudnn(input):
            if self.stride == self.kernel_size and _is_of_patches(self, input, weight):
                return of_patches(input, weight, bias)
            if self.stride == (2, 2) and is_of_blocks(self, input, weight):
                return of_blocks(self, input, weight)
            input = _as_filters_lie(input, weight)
            return super()._conv_forward(input, weight, bias)
        input, padding = _padded(self, input)
        return conv2d(input, weight, bias, self.stride, padding, self.dilation, self.groups)


def _by_cudnn(input: Tensor) -> bool:
    """Return whether `conv2d` would call cuDNN anyway, so that the module may call it at once."""
    if type(input) is not Tensor or torch.compiler.is_compiling() or tracing.active is not None:
        return False
    if not library.is_wanted(input):
        return False
    return input.dtype in (torch.float16, torch.bfloat16) or torch.is_autocast_enabled("cuda")


def _as_filters_lie(input: Tensor, weight: Tensor) -> Tensor:
    """Cast a float32 image to autocast's half type and to channels_last at once, where the filters are in channels_last."""
    if input.dtype is not torch.float32 or input.dim() != 4 or not torch.is_autocast_enabled("cuda"):
        return input
    last = torch.channels_last
    if not weight.is_contiguous(memory_format=last) or input.is_contiguous(memory_format=last):
        return input
    return input.to(torch.get_autocast_dtype("cuda"), memory_format=last)


# --- images cut into patches, as at the beginning of a vision transformer ---

# Elements of images below which the calls of a product take the host longer than they save: on an H200's host those for one
# image of 224 x 224 take 98 us, and the convolution 37. With eight images a whole ViT took 3.50 ms, and 3.54 by convolution.
FEW = 2**20


def of_patches(input: Tensor, weight: Tensor, bias: Tensor | None, multiply: Callable[..., Tensor] = linear) -> Tensor:
    """The convolution whose stride is its kernel's size, of images that hold whole patches: a product with each of them."""
    (out, channels, height, width), dtype = weight.shape, autocast_dtype(input) or input.dtype
    apart = input.unflatten(3, (-1, width)).unflatten(2, (-1, height))
    is_last = convolution.memory_format(input, weight) is torch.channels_last
    order, filters = ((0, 2, 4, 3, 5, 1), weight.permute(0, 2, 3, 1)) if is_last else ((0, 2, 4, 1, 3, 5), weight)
    patches = apart.permute(order).to(dtype, memory_format=torch.contiguous_format)  # cast and copied at once
    rows = patches.reshape(-1, channels * height * width)
    y = multiply(rows, filters.flatten(1), bias).view(*patches.shape[:3], out).permute(0, 3, 1, 2)
    return y if is_last else y.contiguous()


def _is_of_patches(conv: torch.nn.Conv2d, input: Tensor, weight: Tensor) -> bool:
    """Return whether a convolution whose stride is its kernel's size is faster as a product."""
    if weight.shape[2:] != conv.kernel_size or conv.groups != 1 or conv.padding_mode != "zeros":
        return False  # PyTorch says what is wrong, or computes with filters that somebody has put there
    if conv.padding not in ((0, 0), "valid") or conv.dilation != (1, 1) or input.numel() < FEW:
        return False
    if not is_faster_of_patches(input, weight):
        return False
    return not (torch_private.functorch_active() or torch_private.forward_mode())


def is_faster_of_patches(input: Tensor, weight: Tensor) -> bool:
    """Return whether a convolution whose stride is its kernel's size, without padding, is faster as a product.

    cuDNN reads channels by vectors of eight, and has slow kernels where there are fewer, as of coloured images.
    """
    if input.dim() != 4 or input.shape[1] % 8 == 0 or not input.numel() or weight.shape[1] != input.shape[1]:
        return False
    height, width = weight.shape[2:]
    return not (input.shape[2] % height or input.shape[3] % width or height * width == 1)


def _padded(conv: torch.nn.Conv2d, input: Tensor) -> tuple[Tensor, Any]:
    """The input and the padding that is left to the kernel: zeros, or what the module pads with itself."""
    if conv.padding_mode == "zeros":
        return input, conv.padding
    return torch.nn.functional.pad(input, conv._reversed_padding_repeated_twice, mode=conv.padding_mode), (0, 0)
