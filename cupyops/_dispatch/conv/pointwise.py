"""Convolutions by one tap of images in channels_last: products of matrices whose rows are pixels, and so their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.forms import Form, Library
from ..core.gpu import Gpu
from ..gemm import gemm, linear
from .implicit_gemm import Correlation, PatchSums

# elements of image and result, up to which wgmma is measured to be faster than cuDNN where filters are more than channels
MOST, MOST_OF_FEW = 2**25, 2**26  # the second with that few channels
FEW = 64  # fewer are not measured


class Product(Form[Any]):
    """The product of a linear layer, by the form that the layer's has: the filters are its weight."""

    name = "product"
    measured = "forward without a gradient 1.04 to 1.19 times as fast as cuDNN where it is chosen, on an H100"
    summary = "one tap, channels_last: the product of linear, whose rows are the pixels, or of its gradients"

    def why_not(self, problem: Correlation | PatchSums, gpu: Gpu) -> str | None:
        """It multiplies images as they lie in memory."""
        of = problem.geometry
        if of.taps != 1 or of.stride != (1, 1) or of.padding != (0, 0) or of.groups != 1:
            return "it is for one tap, stride 1, no padding and one group"
        if of.dtype not in gemm.HALF:
            return "it is for half types"
        ends = problem.last, problem.out_last if isinstance(problem, Correlation) else problem.weight_last
        return None if all(ends) else "an image is not in channels_last"

    def why_slower(self, problem: Correlation | PatchSums, gpu: Gpu) -> str | None:
        """Compare with cuDNN, and where that may not be taken with the kernels that read patches."""
        if gpu.capability != 9:
            return "it is measured on Hopper alone"
        if not gpu.library or isinstance(problem, PatchSums) or problem.transposed:
            return None
        if problem.for_backward:
            return "backward's products are not measured to be faster than cuDNN"
        (filters, channels), (images, _, height, width) = problem.geometry.weight[:2], problem.out
        if height * width == 1:
            return "images of one pixel are not measured"
        m, rows = images * height * width, (channels, 1)
        product = linear.problem(
            (m, channels), rows, False, (filters, channels), rows, True, False, problem.geometry.dtype
        )
        if not linear.PRODUCT.choose(product, gpu).name.startswith("wgmma"):
            return "wgmma is not measured to be as fast as cuBLAS"
        most = MOST_OF_FEW if channels == FEW else MOST
        if channels < FEW or filters < 2 * channels or m * (filters + channels) > most:
            return "it is measured to be faster than cuDNN where filters are more than channels, and elements few"
        return None

    def launch(self, problem: Correlation | PatchSums, gpu: Gpu) -> Library:
        """Leave the launch to linear, which chooses it itself."""
        return Library(self.name)


def is_channels_last(image: Tensor) -> bool:
    """Return True if an image or a filter has contiguous channels and no gaps."""
    return image.is_contiguous(memory_format=torch.channels_last)


def correlate(out: Tensor, image: Tensor, weight: Tensor, bias: Tensor | None, transposed: bool) -> None:
    """Compute `out` from the pixels of `image`; transposed: an image's gradient from that of the result."""
    linear.multiply(_pixels(image), _matrix(weight), bias, _pixels(out), turn_b=not transposed)


def sum_pixels(grad_weight: Tensor | None, grad_bias: Tensor | None, grad_y: Tensor, x: Tensor) -> None:
    """The gradients of filters and bias; either may be None."""
    rows, pixels = _pixels(grad_y), _pixels(x)
    if grad_weight is not None:
        linear.multiply(rows, pixels, None, _matrix(grad_weight), turn_a=True)
    if grad_bias is not None:
        linear.multiply(rows, pixels[:, :0], None, None, grad_bias, turn_a=True)


def _pixels(image: Tensor) -> Tensor:
    """A row of channels for each pixel: a view."""
    return image.permute(0, 2, 3, 1).view(-1, image.shape[1])


def _matrix(weight: Tensor) -> Tensor:
    return weight.permute(0, 2, 3, 1).view(weight.shape[:2])
