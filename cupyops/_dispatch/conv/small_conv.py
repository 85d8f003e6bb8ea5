"""Forms of convolutions of few channels: a block has a tile of an image in shared memory.

cuda_src/small_conv/ has the kernels' common parts. Sums over channels are split among threads, and the gradient of weight
among blocks. So the numbers that decide how, though they are an H200's, are the same for every GPU: and so are the bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._kernel.kernel import Kernel, ceil_div
from ...errors import LaunchError
from ..core.forms import Form, Launch
from ..core.gpu import Gpu

TAPS = (3, 5)
MAX_CHANNELS = 64  # of input and output: with more, the larger tiles of a GEMM read less

WINDOWS = 64  # of a tile, at most
CHANNELS = 2  # of a thread of the gradient of weight
THREADS = 512  # of a block, at most
THREADS_OF_8 = 448  # the same where a thread has 8 filters
LANES = 16  # of a warp that differ in filters where a thread of the gradient of weight has several
SHARED = 96 << 10  # bytes of a block; two such blocks fit on a large GPU's multiprocessor
FEW, MANY = 120, 240  # blocks that leave an H200 idle, and that fill it
WEIGHT_BLOCKS = 264  # blocks that an H200 runs at once: more would only make more partials to add


DEFINE = {
    "SMALL_CONV_CHANNELS": CHANNELS,
    "SMALL_CONV_THREADS": THREADS,
    "SMALL_CONV_THREADS_OF_8": THREADS_OF_8,
    "SMALL_CONV_LANES": LANES,
}
conv2d_direct_sum = Kernel("conv2d_direct.cu", "conv2d_direct_sum<T>", define=DEFINE, T=(torch.float32,))


class Sizes(NamedTuple):
    """x is (images, channels, height, width), the result (images, filters, out_height, out_width)."""

    images: int
    channels: int
    height: int
    width: int
    filters: int
    out_height: int
    out_width: int
    pad_height: int
    pad_width: int


class Problem(NamedTuple):
    """A correlation: `outputs` planes, `windows` of 2 x 2 pixels each, summed over `inputs` planes."""

    sizes: Sizes
    taps: int
    dtype: torch.dtype
    windows: tuple[int, int]
    inputs: int
    outputs: int

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the shared memory of FMAs."""
        return 8 if self.dtype is torch.float64 else 4

    @property
    def tile(self) -> tuple[int, int, int]:
        """Height and width of tiles of at most WINDOWS windows, evenly, and their number in an image."""
        height, width = self.windows
        wide = ceil_div(width, ceil_div(width, 16))
        tall = ceil_div(height, ceil_div(height, max(1, WINDOWS // wide)))
        return tall, wide, ceil_div(height, tall) * ceil_div(width, wide)

    @property
    def tiles(self) -> int:
        """Tiles of all images."""
        return self.sizes.images * self.tile[2]


def direct(sizes: Sizes, taps: int, dtype: torch.dtype) -> Problem:
    """Describe the correlation of conv2d, or of its gradient of x."""
    return Problem(sizes, taps, dtype, _windows(*sizes[5:7]), sizes.channels, sizes.filters)


def unsupported(
    x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> str | None:
    """Return why these kernels do not serve a convolution, or None."""
    if stride != [1, 1] or dilation != [1, 1] or groups != 1:
        return "not stride 1, dilation 1 and one group"
    images, channels, height, width = x.shape
    filters, _, tall, wide = weight.shape
    if tall != wide or tall not in TAPS:
        return "a kernel other than 3 x 3 and 5 x 5"
    if channels > MAX_CHANNELS or filters > MAX_CHANNELS:
        return f"more than {MAX_CHANNELS} channels"
    if not channels * height * width or max(height, width, *padding) > 1 << 15 or images * height * width >> 33:
        return "no elements, or too many"
    return None


class Fma(Form[Problem]):
    """Form by FMAs: a thread has a window of some filters, and a share of the channels."""

    summary = "a thread has a window of {} filters and a share of the channels"

    def __init__(self, kernel: Kernel, filters: int, **template: Any) -> None:
        self.kernel, self.filters, self.template = kernel, filters, template
        self.name, self.summary = f"fma_{filters}", self.summary.format(filters)

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        """There are instances for some dtypes and taps only."""
        if self._has(problem):
            return None
        return f"there is no kernel of {self.filters} filters to a thread for {problem.dtype} and {problem.taps} taps"

    def why_slower(self, problem: Problem, gpu: Gpu) -> str | None:
        """Many filters to a thread take many tiles, one filter a single plane."""
        if self.filters == 8 and (problem.outputs <= 16 or problem.tiles < MANY):
            return f"{problem.outputs} filters or {problem.tiles} tiles are too few"
        return "there are several filters" if self.filters == 1 and problem.outputs > 1 else None

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        """A block for each tile and some filters; no fewer blocks than fill the GPU, though each reads the images again."""
        (tall, wide, _), mine, taps, tiles = problem.tile, self.filters, problem.taps, problem.tiles
        most_threads = THREADS_OF_8 if mine == 8 else THREADS
        groups = ceil_div(problem.outputs, mine)
        blocks = max(ceil_div(groups, most_threads // (tall * wide)), min(groups, ceil_div(FEW, tiles)))
        groups = ceil_div(groups, blocks)
        team = tall * wide * groups
        splits = 1 if mine > 4 else max(1, min(problem.inputs, most_threads // team))  # teams that share the channels
        threads = ceil_div(team * splits, 32) * 32
        row = 2 * wide + taps - 1
        pair = 2 * row + (2 * wide - 2 * row) % 32
        itemsize = problem.itemsize
        channel = itemsize * (taps * taps * ((groups * mine | 3) + 1) + (2 * tall + taps - 1) // 2 * pair)
        chunk = ceil_div(problem.inputs, ceil_div(problem.inputs, max(1, _shared(gpu) // channel)))
        shared = max(chunk * channel, 4 * itemsize * threads if threads >= 2 * team else 0)
        grid = (tiles, ceil_div(problem.outputs, groups * mine))
        template = {"T": problem.dtype, "K": taps, "NF": mine, **self.template}
        args = (*problem.sizes[1:], tall, wide, pair, groups, chunk)
        return Launch(self.kernel, grid, threads, shared, template, args=args)

    def _has(self, problem: Problem) -> bool:
        try:
            self.kernel.values({"T": problem.dtype, "K": problem.taps, "NF": self.filters, **self.template})
        except LaunchError:
            return False
        return True


class FmaWeight(Form[Problem]):
    """The gradient of weight by FMAs: a warp has some filters and channels, and warps share the windows."""

    summary = "a warp has {} filters and {} channels, and a share of the windows"

    def __init__(self, kernel: Kernel, filters: int = 1, blocks: int = WEIGHT_BLOCKS) -> None:
        self.kernel, self.of_thread, self.blocks = kernel, filters, blocks
        lanes = LANES if filters > 1 else 32
        self.filters, self.channels = lanes * filters, 32 // lanes * CHANNELS  # of a warp
        self.name, self.summary = f"fma_weight_{filters}", self.summary.format(self.filters, self.channels)

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        """Several filters to a thread have too many sums for its registers where there are many taps."""
        return f"there is no kernel for {problem.taps} taps" if self.of_thread > 1 and problem.taps > 3 else None

    def why_slower(self, problem: Problem, gpu: Gpu) -> str | None:
        """Warps of many filters take many filters."""
        few = self.of_thread > 1 and problem.outputs <= 32
        return f"there are {problem.outputs} filters" if few else None

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        """Blocks that stride over the tiles; no fewer than fill the GPU, though each reads the gradients again."""
        (tall, wide, _), tiles, taps, itemsize = problem.tile, problem.tiles, problem.taps, problem.itemsize
        window = 4 * (self.filters + 1) * itemsize  # bytes of its gradients
        most = self.blocks // (2 if self.of_thread > 1 else 1)  # a multiprocessor holds one block of many filters
        row = 2 * wide + taps - 1
        patch, grads = itemsize * (2 * tall + taps - 1) * row, tall * wide * window
        fit = max(1, min(32, (_shared(gpu) - grads) // patch) // self.channels)  # groups of warps
        columns = ceil_div(problem.outputs, self.filters)
        groups = ceil_div(problem.inputs, self.channels)
        groups = ceil_div(groups, max(ceil_div(groups, fit), min(groups, ceil_div(FEW, max(1, tiles) * columns))))
        chunk = min(self.channels * groups, problem.inputs)
        splits = max(1, min(8, 16 // groups))  # warps that share the windows of the same channels
        threads, chunks = 32 * groups * splits, ceil_div(problem.inputs, chunk)
        grid = (max(1, min(tiles, most // (chunks * columns))), chunks, columns)
        shared = max(chunk * patch + grads, taps * threads * itemsize)
        template = {"T": problem.dtype, "K": taps, "NF": self.of_thread}
        args = (tiles, *problem.sizes[1:], tall, wide, 2 * row, chunk, splits)
        return Launch(self.kernel, grid, threads, shared, template, args=args)

    def kernels(self) -> tuple[Kernel, ...]:
        """Kernels: the gradient, and the sum over what blocks found."""
        return self.kernel, conv2d_direct_sum


def sum_partials(launch: Launch, of: tuple[Tensor, ...], grad_weight: Tensor | None, grad_bias: Tensor | None) -> None:
    """Compute grad_weight and grad_bias, either of which may be None, by the launch of a gradient of weight on `of`."""
    count, taps, dtype = launch.grid[0], launch.template["K"], of[0].dtype  # type: ignore[index]
    _, channels, _, _, filters = launch.args[:5]
    size = filters * (channels * taps * taps + 1)
    partials = of[0].new_empty((count, size), dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    launch(*of, partials)
    grid, block = ceil_div(size, 32), (32, 8 if size > 4096 else 32)
    conv2d_direct_sum[grid, block](partials, grad_weight, grad_bias, count, size, filters, T=dtype)


def _shared(gpu: Gpu) -> int:
    """Bytes of shared memory that a block may have."""
    return min(SHARED, gpu.shared)


def _windows(height: int, width: int) -> tuple[int, int]:
    """Number of windows of 2 x 2 pixels that cover an image, along each side."""
    return ceil_div(height, 2), ceil_div(width, 2)
