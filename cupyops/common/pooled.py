"""How convolutions that end in a pooling by 2 are dealt to blocks, as common/pooled_fma.cuh and pooled_mma.cuh have it."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch

from ..kernel import capability, ceil_div
from .gemm import HALF

CHANNELS = 2  # of a thread of the gradient of weight, as pooled_fma.cuh has it
WINDOWS = 64  # of a block, at most
THREADS = {4: 512, 8: 448}  # of a block, at most, whose threads have so many filters
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


@functools.lru_cache(maxsize=1024)
def forward(sizes: Sizes, taps: int, dtype: torch.dtype, device: torch.device) -> Launch:
    """Of conv2d_relu_max_pool2d_fwd."""
    return _correlation(sizes, sizes[5:7], taps, dtype, device, sizes.channels, sizes.filters)


@functools.lru_cache(maxsize=1024)
def backward(sizes: Sizes, taps: int, dtype: torch.dtype, device: torch.device) -> Launch:
    """Of conv2d_relu_max_pool2d_bwd: a correlation of what grad_y is before the pooling, by filters turned round."""
    windows = ceil_div(sizes.height, 2), ceil_div(sizes.width, 2)
    return _correlation(sizes, windows, taps, dtype, device, sizes.filters, sizes.channels)


@functools.lru_cache(maxsize=1024)
def backward_weight(sizes: Sizes, taps: int, dtype: torch.dtype, device: torch.device) -> tuple[Launch, int, Any]:
    """Of conv2d_relu_max_pool2d_bwd_weight, the number of its parts, and the configuration that adds them."""
    tall, wide, count = _cut(*sizes[5:7])
    tiles = sizes.images * count
    mma = _by_mma(dtype, device, sizes.channels)
    if mma:
        grid, threads, shared, rest = _weight_mma(tall, wide, tiles, taps, sizes)
    else:
        grid, threads, shared, rest = _weight_fma(tall, wide, tiles, taps, sizes, dtype)
    numbers = (tiles, *sizes[1:], tall, wide, *rest)
    size = sizes.filters * (sizes.channels * taps * taps + 1)
    launch = Launch(mma, (grid, threads, shared), numbers, {"T": dtype, "K": taps})
    return launch, grid[0], (ceil_div(size, 32), (32, 8 if size > 4096 else 32))


def _correlation(
    sizes: Sizes, windows: Any, taps: int, dtype: torch.dtype, device: torch.device, channels: int, filters: int
) -> Launch:
    """`filters` outputs, each summed over `channels`."""
    tall, wide, count = _cut(*windows)
    tiles = sizes.images * count
    if _by_mma(dtype, device, channels):
        launch = _mma(tall, wide, tiles, taps, dtype, channels, filters, sizes)
        if launch.config[2] <= WIDE_SHARED:
            return launch
    itemsize = _itemsize(dtype)
    # filters of a thread
    mine = 8 if dtype is not torch.float64 and filters > 16 and tiles >= MANY else 4
    groups = ceil_div(filters, mine)
    # no fewer blocks than fill the GPU, though each reads the images again
    blocks = max(ceil_div(groups, THREADS[mine] // (tall * wide)), min(groups, ceil_div(FEW, tiles)))
    groups = ceil_div(groups, blocks)
    threads = ceil_div(tall * wide * groups, 32) * 32
    groups = threads // (tall * wide)
    row = 2 * wide + taps - 1
    pair = 2 * row + (2 * wide - 2 * row) % 32
    channel = itemsize * (taps * taps * (groups * mine + 4) + (2 * tall + taps - 1) // 2 * pair)
    most = max(1, (WIDE_SHARED if capability(device) >= 8 else SHARED) // channel)
    chunk = ceil_div(channels, ceil_div(channels, most))
    numbers = (*sizes[1:], tall, wide, pair, chunk)
    grid = (tiles, ceil_div(filters, groups * mine))
    return Launch(False, (grid, threads, chunk * channel), numbers, {"T": dtype, "K": taps, "NF": mine})


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


def _weight_mma(tall: int, wide: int, tiles: int, taps: int, sizes: Sizes) -> Any:
    up, row, quarter = _units(tall, wide, taps, 2)
    parts, steps = ceil_div(sizes.filters, 16), ceil_div(tall * wide, 4)
    grads_row = 4 * (steps | 1)
    columns = ceil_div(sizes.channels, 32)
    shared = 16 + 64 * quarter + 64 * parts * grads_row + 16 * steps
    grid = (max(1, min(tiles, MMA_BLOCKS // columns)), columns)
    return grid, 32 * taps * parts, shared, (up, row, quarter, grads_row)


def _weight_fma(tall: int, wide: int, tiles: int, taps: int, sizes: Sizes, dtype: torch.dtype) -> Any:
    itemsize, row = _itemsize(dtype), 2 * wide + taps - 1
    patch, grads = itemsize * (2 * tall + taps - 1) * row, tall * wide * 33 * (itemsize + 4)
    chunk = max(1, min(sizes.channels, 32, (SHARED - grads) // patch))
    groups = ceil_div(chunk, CHANNELS)
    splits = max(1, min(8, 16 // groups))  # warps that share the windows of the same channels
    threads = 32 * groups * splits
    columns = (ceil_div(sizes.channels, chunk), ceil_div(sizes.filters, 32))
    grid = (max(1, min(tiles, BLOCKS // (columns[0] * columns[1]))), *columns)
    return grid, threads, max(chunk * patch + grads, threads * itemsize), (2 * row, chunk, splits)


def _by_mma(dtype: torch.dtype, device: torch.device, channels: int) -> bool:
    return dtype in HALF and channels >= MMA_CHANNELS and capability(device) >= 8


def _itemsize(dtype: torch.dtype) -> int:
    """Bytes of a number in the shared memory of FMAs."""
    return 8 if dtype is torch.float64 else 4


def _cut(height: int, width: int) -> tuple[int, int, int]:
    """Height and width of tiles of at most WINDOWS windows, evenly, and their number."""
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
