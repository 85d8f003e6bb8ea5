"""Problems by which group_norm's forms are chosen, the tensors they read and write, and the parameters' gradients."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..._kernel.kernel import FLOATING, Kernel, ceil_div
from ..._util.strides import aligned
from ..core.forms import Form
from ..core.gpu import Gpu
from ..core.images import accumulator, spatial
from ..gemm.gemm import divisor
from ..reduce import segments

HALF_AND_FLOAT = tuple(dtype for dtype in FLOATING if dtype.itemsize < 8)

SUB_WARP_THREADS = 128  # of a block
PERSISTENT = {4: 128, 8: 256}  # vectors of a thread: threads of a block, at most
SHARED_MEMORY_THREADS = 512  # of a block, at most
SMALL_PLANE = 128  # bytes, below which a plane that is not whole vectors is small
SHORT_VECTORS = 32  # of 16 bytes, at most, in a group that is not whole ones and counts as of small planes
# of a block that adds up the images: channels, and threads for each, at most
FINALIZE_CHANNELS, FINALIZE_LINES = 8, 128
FINALIZE_BLOCKS = 256  # such blocks, at most, where images are dealt out over several
FINALIZE_IMAGES = 1024  # that one block adds alone

DEFINE = {
    "PERSISTENT_THREADS_4": PERSISTENT[4],
    "PERSISTENT_THREADS_8": PERSISTENT[8],
    "SHARED_MEMORY_THREADS": SHARED_MEMORY_THREADS,
    "SUB_WARP_THREADS": SUB_WARP_THREADS,
    "SEGMENT_THREADS": segments.THREADS,
    "FINALIZE_CHANNELS": FINALIZE_CHANNELS,
    "FINALIZE_LINES": FINALIZE_LINES,
}


def kernel(file: str, name: str, **domain: Any) -> Kernel:
    return Kernel(file, name, define=DEFINE, **domain)


group_norm_bwd_parameters = kernel("group_norm.cu", "group_norm_bwd_parameters<T>", T=FLOATING)


class Problem(NamedTuple):
    """Sizes by which a form is chosen: `rows` groups, `groups` per image, of `channels` planes of `pixels` elements."""

    rows: int
    groups: int
    channels: int
    pixels: int
    itemsize: int
    aligned: bool  # every tensor begins at 16 bytes
    grad_x: bool = True  # wanted of backward
    nhwc: bool = False  # channels lie side by side

    @property
    def size(self) -> int:
        """Elements of a group."""
        return self.channels * self.pixels

    @property
    def bytes(self) -> int:
        """Bytes of a group."""
        return self.size * self.itemsize

    @property
    def plane(self) -> int:
        """Bytes of a plane."""
        return self.pixels * self.itemsize

    @property
    def has_small_planes(self) -> bool:
        """True if a vector would hold elements of several channels, or the group is short and not whole vectors."""
        short = self.bytes % 16 != 0 and self.bytes // 16 <= SHORT_VECTORS
        return short or (self.plane < SMALL_PLANE and self.plane % 16 != 0)


def problem_of(x: Tensor, num_groups: int, *others: Tensor | None, grad_x: bool = True, nhwc: bool = False) -> Problem:
    """Problem of a contiguous `x` (channels_last if `nhwc`) and of other tensors of its shape."""
    at_16_bytes = all(aligned(tensor) for tensor in (x, *others) if tensor is not None)
    rows, channels = x.shape[0] * num_groups, x.shape[1] // num_groups
    return Problem(rows, num_groups, channels, spatial(x), x.element_size(), at_16_bytes, grad_x, nhwc)


def too_large(x: Tensor, num_groups: int) -> str | None:
    """Return why no kernel computes `x`, or None."""
    return "2^31 elements of a group" if x.shape[1] // num_groups * spatial(x) >= 1 << 31 else None


class Forward(NamedTuple):
    """Tensors of forward, all laid out alike. mean, (rows, 2), holds each mean and the remainder of its rounding."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None
    y: Tensor
    mean: Tensor
    rstd: Tensor
    eps: float


class Backward(NamedTuple):
    """Tensors of backward; gradients that are not wanted are None."""

    grad_y: Tensor
    x: Tensor
    weight: Tensor | None
    mean: Tensor
    rstd: Tensor
    grad_x: Tensor | None
    grad_weight: Tensor | None
    grad_bias: Tensor | None


class Sums(NamedTuple):
    """Sums of grad_y and of grad_y xhat over each plane, in `of_plane` parts: (images, channels, of_plane, 2)."""

    values: Tensor
    of_plane: int


class GroupNormForm(Form[Problem]):
    """A form that launches one kernel, or two: `launch` gives the one that writes y, or grad_x where it is wanted."""

    def run(self, problem: Problem, gpu: Gpu, of: Any) -> Any:
        """Launch it on a `Forward`; or on a `Backward`, and return the `Sums`."""
        raise NotImplementedError

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        if problem.nhwc:
            return "channels lie side by side"
        if problem.itemsize == 8:
            return "fp64 is computed in two passes alone"
        return None if problem.aligned else "a tensor does not begin at 16 bytes"


def add_images(sums: Sums, of: Backward) -> None:
    """The gradients of the parameters; of many images and few channels, those of several images first."""
    values, count = sums
    images, channels = of.x.shape[:2]
    blocks = ceil_div(channels, FINALIZE_CHANNELS)
    each = max(FINALIZE_IMAGES, ceil_div(images, max(1, FINALIZE_BLOCKS // blocks)))
    if images > each:
        grid = blocks, ceil_div(images, each)
        partials = values.new_empty(grid[1] * channels * 2)
        block = FINALIZE_CHANNELS, FINALIZE_LINES
        launch = group_norm_bwd_parameters.configure(grid, block, overlap=True)
        launch(values, None, None, partials, images, each, channels, count, T=of.x.dtype)
        values, images, count = partials, grid[1], 1
    block = FINALIZE_CHANNELS, min(FINALIZE_LINES, max(8, 1 << (images - 1).bit_length()))
    launch = group_norm_bwd_parameters.configure(blocks, block, overlap=True)
    launch(values, of.grad_weight, of.grad_bias, None, images, images, channels, count, T=of.x.dtype)


def lanes_for(threads: int, problem: Problem) -> int:
    """Number of a row's threads that together sum the vectors of one channel."""
    return min(32, threads & -threads, 1 << (problem.plane // 64).bit_length())


def sums_of(problem: Problem, of: Backward, count: int = 1) -> Sums:
    size = problem.rows * problem.channels * count * 2
    return Sums(of.x.new_empty(size, dtype=accumulator(of.x.dtype)), count)


@functools.lru_cache(maxsize=4096)
def _groups(groups: int, channels: int, pixels: int) -> np.ndarray:
    return np.array([groups, channels, *divisor(pixels)], dtype=np.int64)


@functools.lru_cache(maxsize=4096)
def images_of(groups: int) -> np.ndarray:
    """`struct Divisor`, by the groups of an image."""
    return np.array(divisor(groups), dtype=np.int64)


def division(problem: Problem) -> np.ndarray:
    """`struct Groups`."""
    return _groups(*problem[1:4])
