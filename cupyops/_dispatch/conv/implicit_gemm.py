"""Forms of conv2d: tiles of an image in shared memory where channels are few, else a GEMM whose B is an image's patches.

The GEMM's B is never stored: cuda_src/conv2d.cu reads the image as its patches, as `struct Image` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..._kernel.kernel import Kernel
from ..core.forms import Form, Launch, Library
from ..core.gpu import Gpu, gpu
from ..gemm import gemm, linear, tf32
from ..gemm.gemm import Layout, Tile, divisor
from . import convolution, small_conv

Shape = tuple[int, ...]
Pair = tuple[int, int]
Axes = list[tuple[int, int, int, int]]


TF32_CHANNELS, TF32_FILTERS = 16, 64  # up to which kernels of float32 are as fast as cuDNN's in TF32


class Geometry(NamedTuple):
    """Geometry of a convolution."""

    weight: Shape
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int
    dtype: torch.dtype
    not_direct: str | None  # why the kernels for few channels do not serve it

    @property
    def taps(self) -> int:
        """Elements of a filter's plane."""
        return self.weight[2] * self.weight[3]

    @property
    def in_vectors(self) -> bool:
        """True if tensor cores read vectors of channels, for which images in another memory format are copied."""
        return self.dtype in gemm.HALF and self.weight[1] % 8 == 0 and self.weight[0] // self.groups % 8 == 0


def geometry_of(
    x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> Geometry:
    """Geometry of a call."""
    why = small_conv.unsupported(x, weight, stride, padding, dilation, groups)
    if x.dtype is not torch.float32 or not x.is_contiguous():
        why = "few channels have kernels for contiguous float32 alone"
    return Geometry(tuple(weight.shape), tuple(stride), tuple(padding), tuple(dilation), groups, x.dtype, why)  # type: ignore


class Correlation(NamedTuple):
    """out = image correlated with weight; transposed: from the gradient `image` of the output, that of the input."""

    geometry: Geometry
    out: Shape
    image: Shape
    last: bool  # whether channels of the image are neighbours, and are read so
    out_last: bool  # the same of what is written
    transposed: bool
    for_backward: bool = False  # whether the gradients will be asked for
    tf32: bool = False  # whether PyTorch's flags allow cuDNN to round float32 to TF32

    @property
    def small(self) -> small_conv.Problem:
        """The problem in the terms of the kernels for few channels."""
        of, taps = self.geometry, self.geometry.weight[2]
        pads = [taps - 1 - p for p in of.padding] if self.transposed else of.padding
        return small_conv.direct(small_conv.Sizes(*self.image, *self.out[1:], *pads), taps, of.dtype)

    @property
    def sides(self) -> Pair:
        """Channels of a group: of the result, and of the sums."""
        filters, channels = self.geometry.weight[0] // self.geometry.groups, self.geometry.weight[1]
        return (channels, filters) if self.transposed else (filters, channels)

    @property
    def gemm(self) -> gemm.Problem:
        """The GEMM: A is the filters, B the patches."""
        of, (m, inner), area = self.geometry, self.sides, self.geometry.taps
        k, group = inner * area, m * inner * area
        if self.transposed and not self.last:  # (filter, channel, r, s); k = (filter, r, s)
            a = Layout(area, 1, group, run=area, stride_run=m * area)
        else:
            a = Layout(k, 1, group)
        n = self.out[0] * self.out[2] * self.out[3]
        out = _image_layout(self.out, m, self.out_last)
        return gemm.Problem(m, n, k, a, Layout(0, 0), out, of.dtype, of.groups, of.groups, bias_along_m=True)

    @property
    def packed(self) -> np.ndarray:
        """`struct Image`."""
        of = self.geometry
        if self.transposed:
            axes = [(1, p, -d, s) for s, p, d in zip(of.stride, of.padding, of.dilation)]
        else:
            axes = [(s, -p, d, 1) for s, p, d in zip(of.stride, of.padding, of.dilation)]
        return _packed(self.image, self.out, of, self.sides[1], axes, self.last)


def forward_problem(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
) -> Correlation:
    """Problem of forward, whose output has the memory format of its inputs.

    Images of one pixel, or of one channel, lie both ways at once: as the other of the two asks for.
    """
    size = convolution.output_size(x.shape[2:], weight.shape[2:], stride, padding, dilation)
    image, out = tuple(x.shape), (x.shape[0], weight.shape[0], *size)
    both_ways = all(shape[1] == 1 or shape[2] * shape[3] == 1 for shape in (image, out))
    last = both_ways or convolution.memory_format(x, weight) is torch.channels_last
    geometry = geometry_of(x, weight, stride, padding, dilation, groups)
    gradient = linear.wants_gradient(x, weight, bias)
    return Correlation(
        geometry, out, image, last, last, False, gradient, gpu(x.device).library and tf32.of_convolutions(x)
    )


class PatchSums(NamedTuple):
    """grad_weight and grad_bias, from the gradient `grad_y` of the output.

    Attributes:
        last: whether channels of x and of grad_y are neighbours, and are read so.
        weight_last: the same of what is written.
        wants_weight, wants_bias: which is wanted.
    """

    geometry: Geometry
    grad_y: Shape
    x: Shape
    last: bool
    weight_last: bool
    wants_weight: bool
    wants_bias: bool

    @property
    def small(self) -> small_conv.Problem:
        """The problem in the terms of the kernels for few channels."""
        of = self.geometry
        return small_conv.direct(small_conv.Sizes(*self.x, *self.grad_y[1:], *list(of.padding)), of.weight[2], of.dtype)

    @property
    def gemm(self) -> gemm.Problem:
        """The GEMM: A is grad_y, B the patches; for the bias one more tap that reads 1."""
        of = self.geometry
        filters, channels, taps = of.weight[0] // of.groups, of.weight[1], of.weight[1] * of.taps
        n, k = taps if self.wants_weight else 0, self.grad_y[0] * self.grad_y[2] * self.grad_y[3]
        if self.last and not self.weight_last:  # n = (r, s, channel) in an output of (channel, r, s)
            out = Layout(taps, of.taps, filters * taps, run=channels, stride_run=1)
        else:
            out = Layout(taps, 1, filters * taps)
        a = _image_layout(self.grad_y, filters, self.last)
        groups = of.groups
        return gemm.Problem(filters, n, k, a, Layout(0, 0), out, of.dtype, groups, groups, ones=self.wants_bias)

    @property
    def packed(self) -> np.ndarray:
        """`struct Image`."""
        of, channels = self.geometry, self.geometry.weight[1]
        axes = [(s, -p, d, 1) for s, p, d in zip(of.stride, of.padding, of.dilation)]
        taps = channels * of.taps if self.wants_weight else 0
        return _packed(self.x, self.grad_y, of, channels, axes, self.last, taps)


class Direct(Form[Any]):
    """A form of few channels, of fp32 alone."""

    def __init__(self, form: Form[small_conv.Problem]) -> None:
        self.form, self.summary = form, form.summary
        self.name = form.name.replace("fma", "direct")

    def why_not(self, problem: Correlation | PatchSums, gpu: Gpu) -> str | None:
        """Few channels, and FMAs that copy to shared memory asynchronously."""
        if problem.geometry.not_direct is not None:
            return problem.geometry.not_direct
        return "it needs compute capability 8.0" if gpu.capability < 8 else self.form.why_not(problem.small, gpu)

    def why_slower(self, problem: Correlation | PatchSums, gpu: Gpu) -> str | None:
        """Return the wrapped form's reason; or, for many channels, that cuDNN uses tensor cores if PyTorch's flags allow it.

        On an H200 in us, forward, and forward with both gradients, ours and cuDNN's in TF32: 256 x 3 x 32 x 32 to 32 filters
        24, 146 and 39, 178; 1024 x 16 x 14 x 14 to 32 72, 288 and 76, 1071; 1024 x 32 x 14 x 14 to 32 142, 487 and 83, 336;
        64 x 64 x 56 x 56 to 64 433, 1373 and 143, 513.
        """
        filters, channels = problem.geometry.weight[:2]
        if isinstance(problem, Correlation) and problem.tf32 and (channels > TF32_CHANNELS or filters > TF32_FILTERS):
            return (
                f"cuDNN takes TF32, which is faster from {TF32_CHANNELS + 1} channels or {TF32_FILTERS + 1} filters on"
            )
        return self.form.why_slower(problem.small, gpu)

    def launch(self, problem: Correlation | PatchSums, gpu: Gpu) -> Launch[Any] | Library:
        """Launch of the wrapped form."""
        return self.form.launch(problem.small, gpu)

    def kernels(self) -> tuple[Kernel, ...]:
        """Kernels of the wrapped form."""
        return self.form.kernels()


class PatchTile(Tile):
    """A tile of a GEMM whose B is patches. Half types, of which cuDNN takes nearly all on a GPU, have one tile."""

    sizes = {**Tile.sizes, "mma": (gemm.ONE_TILE,)}

    def launch(self, problem: Correlation | PatchSums, gpu: Gpu) -> Launch:
        """Launch of the product, with a `struct Image` as last argument."""
        launch = super().launch(problem, gpu)
        return replace(launch, args=(*launch.args, problem.packed))


# what their kernels are compiled for
TILED = gemm.TILED | {"where": lambda T, TILE: T is torch.float32 or TILE == gemm.ONE_TILE}


def tiles(kernel: Kernel) -> list[Tile]:
    """The forms by GEMM."""
    return gemm.tiles(kernel, form=PatchTile)


def _image_layout(shape: Shape, channels: int, last: bool) -> Layout:
    """An image as the matrix [channel of a group][pixel]."""
    _, total, height, width = shape
    area = height * width
    if last:
        return Layout(1, total, channels)
    return Layout(area, 1, channels * area, run=area, stride_run=total * area)


def _packed(
    source: Shape, target: Shape, of: Geometry, channels: int, axes: Axes, last: bool, taps: int | None = None
) -> np.ndarray:
    """`struct Image`: patches of `source`, one for each pixel of `target`."""
    _, total, height, width = source
    step_channel, step_row, step_column = (1, width * total, total) if last else (height * width, width, 1)
    fields: list[int] = [target[0] * target[2] * target[3], channels * of.taps if taps is None else taps]
    fields += [total * height * width, step_channel, channels * step_channel]
    fields += [*divisor(target[2] * target[3]), *divisor(target[3])]
    fields += [*divisor(channels if last else of.taps), *divisor(of.weight[3])]
    steps: Sequence[tuple[int, int]] = ((height, step_row), (width, step_column))
    for (extent, step), (scale, offset, tap_step, divide) in zip(steps, axes):
        fields += [extent, step, scale, offset, tap_step, *divisor(divide)]
    return np.array([*fields, int(last)], dtype=np.int64)
