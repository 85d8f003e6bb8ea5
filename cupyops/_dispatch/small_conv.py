"""Forms of convolutions of few channels: a block has a tile of an image in shared memory; a pooling by 2 may end them.

cuda_src/small_conv/ has the kernels' common parts. Sums over channels are split among threads, and the gradient of weight
among blocks. So the numbers that decide how, though they are an H200's, are the same for every GPU: and so are the bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._kernel.kernel import FLOATING, Kernel, ceil_div
from ..errors import LaunchError
from .forms import Form, Launch
from .gemm import HALF
from .gpu import Gpu

TAPS = (3, 5)
MAX_CHANNELS = 64  # of input and output: with more, the larger tiles of a GEMM read less

WINDOWS = 64  # of a tile, at most
CHANNELS = 2  # of a thread of the gradient of weight
THREADS = 512  # of a block, at most
THREADS_OF_8 = 448  # the same where a thread has 8 filters
LANES = 16  # of a warp that differ in filters where a thread of the gradient of weight has several
SHARED = 46 << 10  # bytes of a block that every GPU gives without being asked
WIDE_SHARED = 96 << 10  # bytes on sm_80 and later; two such blocks fit on a large GPU's multiprocessor
FEW, MANY = 120, 240  # blocks that leave an H200 idle, and that fill it
WEIGHT_BLOCKS = 264  # blocks that an H200 runs at once: more would only make more partials to add

MMA_THREADS = 448  # of a block, at most, by tensor cores
MMA_BLOCKS_EACH = 2  # blocks of a multiprocessor, each with its filters in shared memory for many tiles
MMA_CHANNELS = 8  # from which on tensor cores, which take 16 at a time, are worth it

DEFINE = {
    "SMALL_CONV_CHANNELS": CHANNELS,
    "SMALL_CONV_THREADS": THREADS,
    "SMALL_CONV_THREADS_OF_8": THREADS_OF_8,
    "SMALL_CONV_LANES": LANES,
    "SMALL_CONV_MMA_THREADS": MMA_THREADS,
}
conv2d_direct_sum = Kernel("conv2d_direct.cu", "conv2d_direct_sum<T>", define=DEFINE, T=FLOATING)


class Sizes(NamedTuple):
    """x is (images, channels, height, width), what is pooled (images, filters, out_height, out_width)."""

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
    """A correlation: `outputs` planes, `windows` of 2 x 2 pixels or poolings each, summed over `inputs` planes."""

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


def pooled(sizes: Sizes, taps: int, dtype: torch.dtype) -> Problem:
    """Problem of conv2d_relu_max_pool2d, forward and the gradient of weight."""
    return Problem(sizes, taps, dtype, sizes[5:7], sizes.channels, sizes.filters)


def pooled_input(sizes: Sizes, taps: int, dtype: torch.dtype) -> Problem:
    """Problem of its gradient of x: a correlation of grad_y before the pooling, by filters turned round."""
    return Problem(sizes, taps, dtype, _windows(*sizes[2:4]), sizes.filters, sizes.channels)


def direct(sizes: Sizes, taps: int, dtype: torch.dtype) -> Problem:
    """Problem of conv2d."""
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

    def kernels(self) -> tuple[Kernel, ...]:
        """The only kernel."""
        return (self.kernel,)

    def _has(self, problem: Problem) -> bool:
        try:
            self.kernel.values({"T": problem.dtype, "K": problem.taps, "NF": self.filters, **self.template})
        except LaunchError:
            return False
        return True


class Mma(Form[Problem]):
    """Form by tensor cores: a warp has 8 windows and 8 filters of each of its fragments."""

    summary = "a warp has 8 windows of {} filters, and a block its filters in shared memory for many tiles"

    def __init__(self, kernel: Kernel, fragments: int) -> None:
        self.kernel, self.fragments = kernel, fragments
        self.name, self.summary = f"mma_{fragments}", self.summary.format(8 * fragments)

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        """Half types on sm_80 and later."""
        if reason := _no_tensor_cores(problem, gpu):
            return reason
        if self.fragments > 2 and problem.taps > 3:
            return f"there is no kernel for {problem.taps} taps"
        shared = self._plan(problem, gpu)[1]
        return f"a block takes {shared} bytes of shared memory" if shared > _shared(gpu) else None

    def why_slower(self, problem: Problem, gpu: Gpu) -> str | None:
        """Few channels leave tensor cores idle, few tiles the GPU."""
        if problem.inputs < MMA_CHANNELS:
            return f"there are {problem.inputs} channels, of which tensor cores take 16"
        few = problem.outputs <= 16 or not _fill(problem, gpu)
        return "there are too few filters or tiles" if self.fragments > 2 and few else None

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        """Blocks that stride over the tiles of all images."""
        (threads, shared, outputs, units), (tall, wide, _), tiles = (
            self._plan(problem, gpu),
            problem.tile,
            problem.tiles,
        )
        blocks = ceil_div(problem.outputs, outputs)
        grid = (min(tiles, max(1, MMA_BLOCKS_EACH * gpu.multiprocessors // blocks)), blocks)
        template = {"T": problem.dtype, "K": problem.taps, "NB": self.fragments}
        return Launch(
            self.kernel, grid, threads, shared, template, args=(tiles, *problem.sizes[1:], tall, wide, *units)
        )

    def kernels(self) -> tuple[Kernel, ...]:
        """The only kernel."""
        return (self.kernel,)

    def _plan(self, problem: Problem, gpu: Gpu) -> tuple[int, int, int, tuple[int, int, int]]:
        """Threads, bytes of shared memory and filters of a block; the units of a pixel, a row and a quarter."""
        (tall, wide, _), taps = problem.tile, problem.taps
        units = up, _, quarter = _units(tall, wide, taps, ceil_div(problem.inputs, 16))
        groups, parts = ceil_div(tall * wide, 8), 1
        if _fill(problem, gpu):  # all filters in a block, so that the images are read once
            parts = max(1, min(ceil_div(problem.outputs, 8 * self.fragments), MMA_THREADS // 32 // groups))
        outputs = parts * 8 * self.fragments
        return 32 * groups * parts, 16 * (taps * taps * (outputs * up + 1) + 4 * quarter), outputs, units


class MmaWeight(Form[Problem]):
    """The gradient of weight by tensor cores.

    Args:
        blocks: of the grid, at most; each stores partial sums.
    """

    name = "mma_weight"
    summary = "a warp has a row of taps of 16 filters and 32 channels"

    def __init__(self, kernel: Kernel, blocks: int = WEIGHT_BLOCKS) -> None:
        self.kernel, self.blocks = kernel, blocks

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        """Half types on sm_80 and later."""
        return _no_tensor_cores(problem, gpu)

    def why_slower(self, problem: Problem, gpu: Gpu) -> str | None:
        """Few channels leave tensor cores idle."""
        few = problem.inputs < MMA_CHANNELS
        return f"there are {problem.inputs} channels, of which tensor cores take 16" if few else None

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        """Blocks that stride over the tiles of all images."""
        (tall, wide, _), tiles, taps = problem.tile, problem.tiles, problem.taps
        up, row, quarter = _units(tall, wide, taps, 2)
        parts, steps = ceil_div(problem.outputs, 16), ceil_div(tall * wide, 4)
        grads_row = 4 * (steps | 1)
        columns = ceil_div(problem.inputs, 32)
        shared = 16 + 64 * quarter + 64 * parts * grads_row + 16 * steps
        grid = (max(1, min(tiles, self.blocks // columns)), columns)
        args = (tiles, *problem.sizes[1:], tall, wide, up, row, quarter, grads_row)
        return Launch(self.kernel, grid, 32 * taps * parts, shared, {"T": problem.dtype, "K": taps}, args=args)

    def kernels(self) -> tuple[Kernel, ...]:
        """The only kernel."""
        return (self.kernel,)


class FmaWeight(Form[Problem]):
    """The gradient of weight by FMAs: a warp has some filters and channels, and warps share the windows.

    Args:
        filters: of a thread.
        pooled: whether the gradient is one number and a place for each window, and not four numbers.
        blocks: of the grid, at most; each stores partial sums.
    """

    summary = "a warp has {} filters and {} channels, and a share of the windows"

    def __init__(self, kernel: Kernel, filters: int = 1, pooled: bool = False, blocks: int = WEIGHT_BLOCKS) -> None:
        self.kernel, self.of_thread, self.pooled, self.blocks = kernel, filters, pooled, blocks
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
        window = 33 * (itemsize + 4) if self.pooled else 4 * (self.filters + 1) * itemsize  # bytes of its gradients
        most = self.blocks // (2 if self.of_thread > 1 else 1)  # a multiprocessor holds one block of many filters
        row = 2 * wide + taps - 1
        patch, grads = itemsize * (2 * tall + taps - 1) * row, tall * wide * window
        limit = SHARED if self.pooled else _shared(gpu)
        fit = max(1, min(32, (limit - grads) // patch) // self.channels)  # groups of warps
        columns = ceil_div(problem.outputs, self.filters)
        groups = ceil_div(problem.inputs, self.channels)
        groups = ceil_div(groups, max(ceil_div(groups, fit), min(groups, ceil_div(FEW, max(1, tiles) * columns))))
        chunk = min(self.channels * groups, problem.inputs)
        splits = max(1, min(8, 16 // groups))  # warps that share the windows of the same channels
        threads, chunks = 32 * groups * splits, ceil_div(problem.inputs, chunk)
        grid = (max(1, min(tiles, most // (chunks * columns))), chunks, columns)
        shared = max(chunk * patch + grads, taps * threads * itemsize)
        template = {"T": problem.dtype, "K": taps} | ({} if self.pooled else {"NF": self.of_thread})
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
    return min(WIDE_SHARED, gpu.shared) if gpu.capability >= 8 else SHARED


def _fill(problem: Problem, gpu: Gpu) -> bool:
    """Return True if there is a tile for each block that the GPU runs at once."""
    return problem.tiles >= MMA_BLOCKS_EACH * gpu.multiprocessors


def _no_tensor_cores(problem: Problem, gpu: Gpu) -> str | None:
    if problem.dtype not in HALF:
        return f"tensor cores would round {problem.dtype}"
    return None if gpu.capability >= 8 else "it needs compute capability 8.0"


def _windows(height: int, width: int) -> tuple[int, int]:
    """Number of windows of 2 x 2 pixels that cover an image, along each side."""
    return ceil_div(height, 2), ceil_div(width, 2)


def _units(tall: int, wide: int, taps: int, chunks: int) -> tuple[int, int, int]:
    """Strides of a pixel of 16 x `chunks` channels, a row and a quarter of a tile, padded so that banks differ."""
    up, reach = 2 * chunks + 1, taps // 2
    row = (wide + reach) * up
    row += (wide * up - row) % 8
    quarter = (tall + reach) * row
    return up, row, quarter + (4 - quarter) % 8
