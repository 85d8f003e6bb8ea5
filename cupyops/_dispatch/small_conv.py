"""Convolutions of few channels by tiles, those that end in a pooling by 2 too: which they are, how they are dealt to blocks.

As small_conv/fma.cuh and pooled_mma.cuh have it. `major` is the compute capability, of a CPU that which is simulated.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .._kernel.kernel import FLOATING, Kernel, ceil_div
from .gemm import HALF

conv2d_direct_sum = Kernel("conv2d_direct.cu", "conv2d_direct_sum<T>", T=FLOATING)

TAPS = (3, 5)
MAX_CHANNELS = 64  # of input and output: with more, a GEMM's larger tiles read less

CHANNELS = 2  # of a thread of the gradient of weight, as pooled_fma.cuh has it
WINDOWS = 64  # of a block, at most
THREADS = {1: 512, 4: 512, 8: 448}  # of a block, at most, whose threads have so many filters
SHARED = 46 * 1024  # bytes of a block that every GPU gives without being asked
WIDE_SHARED = 96 * 1024  # the same of sm_80 and later, when asked; two such blocks fit on a large GPU's multiprocessor
BLOCKS = 264  # that a large GPU runs at once: more would only make more parts to add
FEW, MANY = 120, 240  # blocks that leave a large GPU idle, and that fill it

MMA_THREADS = 448  # of a block, at most, by tensor cores
MMA_BLOCKS = 264  # of a grid, each with its filters in shared memory for many tiles
MMA_CHANNELS = 8  # from which on tensor cores, which take 16 at a time, are worth it


class Launch(NamedTuple):
    """A launch but for its tensors."""

    mma: bool
    config: tuple[Any, ...]
    numbers: tuple[int, ...]
    template: dict[str, Any]


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


def unsupported(
    x: Tensor, weight: Tensor, stride: list[int], padding: list[int], dilation: list[int], groups: int
) -> str | None:
    """Why these kernels do not serve a convolution; None: they do."""
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


@functools.lru_cache(maxsize=1024)
def forward(sizes: Sizes, taps: int, dtype: torch.dtype, major: int) -> Launch:
    """Of conv2d_relu_max_pool2d_fwd."""
    return _correlation(sizes, sizes[5:7], taps, dtype, major, sizes.channels, sizes.filters)


@functools.lru_cache(maxsize=1024)
def direct(sizes: Sizes, taps: int, dtype: torch.dtype, major: int) -> Launch:
    """Of conv2d_direct."""
    return _correlation(sizes, _windows(*sizes[5:7]), taps, dtype, major, sizes.channels, sizes.filters)


@functools.lru_cache(maxsize=1024)
def backward(sizes: Sizes, taps: int, dtype: torch.dtype, major: int) -> Launch:
    """Of conv2d_relu_max_pool2d_bwd: a correlation of what grad_y is before the pooling, by filters turned round."""
    return _correlation(sizes, _windows(*sizes[2:4]), taps, dtype, major, sizes.filters, sizes.channels)


@functools.lru_cache(maxsize=1024)
def backward_weight(sizes: Sizes, taps: int, dtype: torch.dtype, major: int) -> Launch:
    """Of conv2d_relu_max_pool2d_bwd_weight."""
    if _by_mma(dtype, major, sizes.channels):
        return _weight_mma(sizes, taps, dtype)
    window = 33 * (_itemsize(dtype) + 4)
    config, numbers = _weight_fma(sizes, sizes[5:7], taps, dtype, 32, CHANNELS, window, SHARED, BLOCKS)
    return Launch(False, config, numbers, {"T": dtype, "K": taps})


@functools.lru_cache(maxsize=1024)
def direct_weight(sizes: Sizes, taps: int, dtype: torch.dtype) -> Launch:
    """Of conv2d_direct_bwd_weight."""
    in_fours = sizes.filters > 32 and taps == 3  # filters of a thread: a multiprocessor holds one block of them
    filters, channels, most = (64, 2 * CHANNELS, BLOCKS // 2) if in_fours else (32, CHANNELS, BLOCKS)
    window = 4 * (filters + 1) * _itemsize(dtype)
    windows = _windows(*sizes[5:7])
    config, numbers = _weight_fma(sizes, windows, taps, dtype, filters, channels, window, WIDE_SHARED, most)
    return Launch(False, config, numbers, {"T": dtype, "K": taps, "NF": 4 if in_fours else 1})


def sum_patches(kernel: Kernel, launch: Launch, of: tuple[Tensor, ...], grad_weight: Any, grad_bias: Any) -> None:
    """grad_weight and grad_bias, either of which may be None, by a launch of backward_weight() or direct_weight()."""
    count, taps, dtype = launch.config[0][0], launch.template["K"], of[0].dtype
    channels, filters = launch.numbers[1], launch.numbers[4]
    size = filters * (channels * taps * taps + 1)
    parts = of[0].new_empty((count, size), dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    kernel[launch.config](*of, parts, *launch.numbers, **launch.template)
    add = ceil_div(size, 32), (32, 8 if size > 4096 else 32)
    conv2d_direct_sum[add](parts, grad_weight, grad_bias, count, size, filters, T=dtype)


def _correlation(
    sizes: Sizes, windows: Any, taps: int, dtype: torch.dtype, major: int, channels: int, filters: int
) -> Launch:
    """`filters` outputs, each summed over `channels`."""
    tall, wide, count = _cut(windows)
    tiles = sizes.images * count
    if _by_mma(dtype, major, channels):
        launch = _mma(tall, wide, tiles, taps, dtype, channels, filters, sizes)
        if launch.config[2] <= WIDE_SHARED:
            return launch
    itemsize = _itemsize(dtype)
    # filters of a thread
    mine = 8 if dtype is not torch.float64 and filters > 16 and tiles >= MANY else 4 if filters > 1 else 1
    groups = ceil_div(filters, mine)
    # no fewer blocks than fill the GPU, though each reads the images again
    blocks = max(ceil_div(groups, THREADS[mine] // (tall * wide)), min(groups, ceil_div(FEW, tiles)))
    groups = ceil_div(groups, blocks)
    team = tall * wide * groups
    splits = 1 if mine > 4 else max(1, min(channels, THREADS[mine] // team))  # teams of threads that share the channels
    threads = ceil_div(team * splits, 32) * 32
    row = 2 * wide + taps - 1
    pair = 2 * row + (2 * wide - 2 * row) % 32
    channel = itemsize * (taps * taps * ((groups * mine | 3) + 1) + (2 * tall + taps - 1) // 2 * pair)
    most = max(1, (WIDE_SHARED if major >= 8 else SHARED) // channel)
    chunk = ceil_div(channels, ceil_div(channels, most))
    numbers = (*sizes[1:], tall, wide, pair, groups, chunk)
    grid = (tiles, ceil_div(filters, groups * mine))
    shared = max(chunk * channel, 4 * itemsize * threads if threads >= 2 * team else 0)
    return Launch(False, (grid, threads, shared), numbers, {"T": dtype, "K": taps, "NF": mine})


def _mma(
    tall: int, wide: int, tiles: int, taps: int, dtype: torch.dtype, channels: int, filters: int, sizes: Sizes
) -> Launch:
    up, row, quarter = _units(tall, wide, taps, ceil_div(channels, 16))
    groups = ceil_div(tall * wide, 8)
    fragments = 4 if filters > 16 and tiles >= MMA_BLOCKS else 2
    parts = 1
    if tiles >= MMA_BLOCKS:  # all filters in a block, so that the images are read once
        parts = min(ceil_div(filters, 8 * fragments), MMA_THREADS // 32 // groups)
    outputs = parts * 8 * fragments
    shared = 16 * (taps * taps * (outputs * up + 1) + 4 * quarter)
    blocks = ceil_div(filters, outputs)
    grid = (min(tiles, max(1, MMA_BLOCKS // blocks)), blocks)
    numbers = (tiles, *sizes[1:], tall, wide, up, row, quarter)
    return Launch(True, (grid, 32 * groups * parts, shared), numbers, {"T": dtype, "K": taps, "NB": fragments})


def _weight_mma(sizes: Sizes, taps: int, dtype: torch.dtype) -> Launch:
    tall, wide, count = _cut(sizes[5:7])
    tiles = sizes.images * count
    up, row, quarter = _units(tall, wide, taps, 2)
    parts, steps = ceil_div(sizes.filters, 16), ceil_div(tall * wide, 4)
    grads_row = 4 * (steps | 1)
    columns = ceil_div(sizes.channels, 32)
    shared = 16 + 64 * quarter + 64 * parts * grads_row + 16 * steps
    grid = (max(1, min(tiles, MMA_BLOCKS // columns)), columns)
    numbers = (tiles, *sizes[1:], tall, wide, up, row, quarter, grads_row)
    return Launch(True, (grid, 32 * taps * parts, shared), numbers, {"T": dtype, "K": taps})


def _weight_fma(
    sizes: Sizes,
    windows: Any,
    taps: int,
    dtype: torch.dtype,
    filters: int,
    channels: int,
    window: int,
    room: int,
    most: int,
) -> tuple[Any, tuple[int, ...]]:
    """Of warps of so many filters and channels: `window` bytes are the gradients of a window in the `room` of a block."""
    tall, wide, count = _cut(windows)
    tiles = sizes.images * count
    itemsize, row = _itemsize(dtype), 2 * wide + taps - 1
    patch, grads = itemsize * (2 * tall + taps - 1) * row, tall * wide * window
    fit = min(32, (room - grads) // patch) // channels  # groups of warps
    columns = ceil_div(sizes.filters, filters)
    # no fewer blocks than fill the GPU, though each reads the gradients again
    groups = ceil_div(sizes.channels, channels)
    groups = ceil_div(groups, max(ceil_div(groups, fit), min(groups, ceil_div(FEW, max(1, tiles) * columns))))
    chunk = min(channels * groups, sizes.channels)
    splits = max(1, min(8, 16 // groups))  # warps that share the windows of the same channels
    threads = 32 * groups * splits
    chunks = ceil_div(sizes.channels, chunk)
    grid = (max(1, min(tiles, most // (chunks * columns))), chunks, columns)
    shared = max(chunk * patch + grads, taps * threads * itemsize)
    return (grid, threads, shared), (tiles, *sizes[1:], tall, wide, 2 * row, chunk, splits)


def _by_mma(dtype: torch.dtype, major: int, channels: int) -> bool:
    return dtype in HALF and channels >= MMA_CHANNELS and major >= 8


def _itemsize(dtype: torch.dtype) -> int:
    """Bytes of a number in the shared memory of FMAs."""
    return 8 if dtype is torch.float64 else 4


def _windows(height: int, width: int) -> tuple[int, int]:
    """Of 2 x 2 pixels, that cover an image."""
    return ceil_div(height, 2), ceil_div(width, 2)


def _cut(windows: tuple[int, ...]) -> tuple[int, int, int]:
    """Height and width of tiles of at most WINDOWS windows, evenly, and their number."""
    height, width = windows
    wide = ceil_div(width, ceil_div(width, 16))
    tall = ceil_div(height, ceil_div(height, max(1, WINDOWS // wide)))
    return tall, wide, ceil_div(height, tall) * ceil_div(width, wide)


def _units(tall: int, wide: int, taps: int, chunks: int) -> tuple[int, int, int]:
    """Of a pixel of so many chunks of 16 channels, of a row of pixels, of a quarter of a tile, so that banks differ."""
    up, reach = 2 * chunks + 1, taps // 2
    row = (wide + reach) * up
    row += (wide * up - row) % 8
    quarter = (tall + reach) * row
    return up, row, quarter + (4 - quarter) % 8
