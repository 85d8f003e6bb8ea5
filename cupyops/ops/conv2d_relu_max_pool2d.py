"""conv2d_relu_max_pool2d: a layer of a small network, convolution to pooling, in one kernel."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import check
from ..common import convolution, gemm
from ..kernel import FLOATING, Kernel, ceil_div
from ..operator import operator

FILE, SIZES = "conv2d_relu_max_pool2d.cu", (3, 5)
conv2d_relu_max_pool2d_fwd = Kernel(FILE, "conv2d_relu_max_pool2d_fwd<T, K>", T=FLOATING, K=SIZES)
conv2d_relu_max_pool2d_bwd = Kernel(FILE, "conv2d_relu_max_pool2d_bwd<T, K>", T=FLOATING, K=SIZES)
conv2d_relu_max_pool2d_bwd_weight = Kernel(FILE, "conv2d_relu_max_pool2d_bwd_weight<T, K>", T=FLOATING, K=SIZES)
conv2d_relu_max_pool2d_bwd_sum = Kernel(FILE, "conv2d_relu_max_pool2d_bwd_sum<T>", T=FLOATING)

MAX_CHANNELS = 64  # of input and output: with more, the tensor cores or a larger tile are worth three launches
FILTERS, CHANNELS = 4, 2  # of a thread; as the .cu file has them
WINDOWS, THREADS = 64, 256  # of a block, at most
SHARED = 32 * 1024  # bytes for a block, of which several are to run at once
MOST_SHARED = 46 * 1024  # that every GPU gives without being asked
BLOCKS = 264  # that a large GPU runs at once: more would only make more parts to add


@operator("cupyops::conv2d_relu_max_pool2d", autocast="lower")
def _conv2d_relu_max_pool2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    pool: list[int],  # kernel size, then stride
) -> Tensor:
    return F.max_pool2d(F.relu(F.conv2d(x, weight, bias, stride, padding, dilation, groups)), pool[:2], pool[2:])


@_conv2d_relu_max_pool2d.forward
def _(x, weight, bias, stride, padding, dilation, groups, pool):
    memory = convolution.memory_format(x, weight)
    x, weight = x.contiguous(), weight.contiguous()
    images, channels, height, width = x.shape
    filters, taps = weight.shape[0], weight.shape[2]
    out = [size // 2 for size in convolution.output_size((height, width), (taps, taps), stride, padding, dilation)]
    y = x.new_empty((images, filters, *out))
    place = torch.empty_like(y, dtype=torch.uint8)
    if not gemm.is_dry(y) and y.numel():
        tile = _tile(images, *out, taps, _itemsize(x.dtype), channels, filters)
        geometry = (channels, height, width, filters, *out, *padding, tile.height, tile.width, tile.pitch, tile.chunk)
        launch = conv2d_relu_max_pool2d_fwd[(images * tile.tiles, tile.blocks), tile.threads, tile.shared]
        launch(x, weight, bias if bias is None else bias.contiguous(), y, place, *geometry, T=x.dtype, K=taps)
    return y.contiguous(memory_format=memory), (place,)


@_conv2d_relu_max_pool2d.backward
def _(saved, grad_y, x, weight, bias, padding, needs_grad):
    memory, shape = convolution.memory_format(x, weight), weight.shape
    x, weight, grad_y = x.contiguous(), weight.contiguous(), grad_y.contiguous()
    grad_x = torch.empty_like(x) if needs_grad.x else None
    grad_weight = torch.empty_like(weight) if needs_grad.weight else None
    grad_bias = bias.new_empty(bias.shape) if needs_grad.bias else None
    if not gemm.is_dry(grad_y):
        sizes = (*x.shape[1:], shape[0], *grad_y.shape[2:], *padding)
        if grad_x is not None and x.numel():
            _launch_input(grad_y, saved[0], weight, grad_x, sizes)
        if grad_weight is not None or grad_bias is not None:
            _launch_weight(grad_y, saved[0], x, weight, grad_weight, grad_bias, sizes)
    if memory is torch.channels_last:
        gradients = (grad_x, grad_weight)
        grad_x, grad_weight = (g if g is None else g.contiguous(memory_format=memory) for g in gradients)
    return grad_x, grad_weight, grad_bias


@_conv2d_relu_max_pool2d.unsupported
def _(x, weight, bias, stride, padding, dilation, groups, pool):
    if (stride, dilation, groups, pool) != ([1, 1], [1, 1], 1, [2, 2, 2, 2]):
        return "not stride 1, dilation 1, one group, and pooling by 2"
    if weight.shape[2] != weight.shape[3] or weight.shape[2] not in SIZES:
        return "a kernel other than 3 x 3 and 5 x 5"
    if max(weight.shape[:2]) > MAX_CHANNELS:
        return f"more than {MAX_CHANNELS} channels"
    if 0 in x.shape[1:] or max(*x.shape[2:], *padding) > 1 << 15 or x.shape[0] * x.shape[2] * x.shape[3] >> 33:
        return "no elements, or too many"
    return None


@_conv2d_relu_max_pool2d.interface
def conv2d_relu_max_pool2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    pool_kernel_size: int | tuple[int, int] = 2,
    pool_stride: int | tuple[int, int] | None = None,
) -> Tensor:
    """`max_pool2d(relu(conv2d(input, weight, bias)))` in one kernel, for layers that are small.

    The kernels serve 3 x 3 and 5 x 5 filters with stride 1, no dilation and one group, pooled by 2, of at most 64 channels
    in and out; all else is computed by PyTorch, operation by operation.

    Args:
        input: (n, channels, h, w) or (channels, h, w); fp16, bf16, fp32 and fp64 by kernels (summed in fp32, fp64 in fp64).
        weight: (out_channels, channels / groups, kernel_h, kernel_w), of the dtype of `input`.
        bias: (out_channels,), of the dtype of `input`.
        stride, padding, dilation, groups: of the convolution, as `conv2d`.
        pool_kernel_size: height and width of the window, int or a pair.
        pool_stride: from one window to the next; by default `pool_kernel_size`.

    Returns:
        Tensor (n, out_channels, h', w') or (out_channels, h', w'). A window with a NaN gives NaN; the gradient of equal
        maxima goes to the first.

    Raises:
        InputError: an argument is no tensor, or of a wrong shape, dtype, device or range; no window fits.

    Example:
        >>> x, weight = torch.arange(16.0).view(1, 1, 4, 4), torch.ones(1, 1, 3, 3)
        >>> cupyops.conv2d_relu_max_pool2d(x, weight, padding=1)
        tensor([[[[45., 54.],
                  [81., 90.]]]])
    """
    convolution.check_tensors(input, weight, bias, groups)
    input, stride, padding, dilation = convolution.window(input, weight, stride, padding, dilation)
    kernel = check.ints("pool_kernel_size", pool_kernel_size, 2, 1)
    pool = [*kernel, *(kernel if pool_stride is None else check.ints("pool_stride", pool_stride, 2, 1))]
    size = convolution.output_size(input.shape[-2:], weight.shape[2:], stride, padding, dilation)
    if any(extent < k for extent, k in zip(size, kernel)):
        check.fail("pool_kernel_size", pool_kernel_size, f"a window that fits the convolution's {tuple(size)}")
    if input.dim() == 3:
        batch = input.unsqueeze(0)
        return _conv2d_relu_max_pool2d(batch, weight, bias, stride, padding, dilation, groups, pool).squeeze(0)
    return _conv2d_relu_max_pool2d(input, weight, bias, stride, padding, dilation, groups, pool)


# --- launches ---


class Tile(NamedTuple):
    """How windows are dealt to blocks: `tiles` of `height` x `width` windows cover an image."""

    height: int
    width: int
    pitch: int  # of a tile's rows in shared memory
    tiles: int
    threads: int
    blocks: int  # for all filters
    chunk: int  # channels in shared memory at a time
    shared: int  # bytes


def _launch_input(grad_y, place, weight, grad_x, sizes):
    """grad_x: a correlation of what grad_y is before the pooling, by filters turned round."""
    channels, height, width, filters, *_ = sizes
    taps = weight.shape[2]
    images = grad_x.shape[0]
    tile = _tile(images, ceil_div(height, 2), ceil_div(width, 2), taps, _itemsize(weight.dtype), filters, channels)
    launch = conv2d_relu_max_pool2d_bwd[(images * tile.tiles, tile.blocks), tile.threads, tile.shared]
    rest = (tile.height, tile.width, tile.pitch, tile.chunk)
    launch(grad_y, place, weight, grad_x, *sizes, *rest, T=weight.dtype, K=taps)


def _launch_weight(grad_y, place, x, weight, grad_weight, grad_bias, sizes):
    """grad_weight and grad_bias, either of which may be None."""
    channels, filters, taps = weight.shape[1], weight.shape[0], weight.shape[2]
    tile, splits = _weight_tile(*grad_y.shape[2:], taps, _itemsize(x.dtype), channels)
    columns = (ceil_div(channels, tile.chunk), ceil_div(filters, 32))
    tiles = x.shape[0] * tile.tiles
    count = max(1, min(tiles, BLOCKS // (columns[0] * columns[1])))
    size = weight.numel() + filters
    parts = x.new_empty((count, size), dtype=torch.float64 if x.dtype is torch.float64 else torch.float32)
    launch = conv2d_relu_max_pool2d_bwd_weight[(count, *columns), tile.threads, tile.shared]
    rest = (tile.height, tile.width, tile.pitch, tile.chunk, splits)
    launch(grad_y, place, x, parts, tiles, *sizes, *rest, T=x.dtype, K=taps)
    launch = conv2d_relu_max_pool2d_bwd_sum[ceil_div(size, 32), (32, 8)]
    launch(parts, grad_weight, grad_bias, count, size, filters, T=x.dtype)


def _itemsize(dtype: torch.dtype) -> int:
    """Bytes of a number in shared memory."""
    return 8 if dtype is torch.float64 else 4


def _cut(height: int, width: int) -> tuple[int, int, int]:
    """Height and width of tiles of at most WINDOWS windows, evenly, and their number."""
    wide = ceil_div(width, ceil_div(width, 16))
    tall = ceil_div(height, ceil_div(height, max(1, WINDOWS // wide)))
    return tall, wide, ceil_div(height, tall) * ceil_div(width, wide)


@functools.lru_cache(maxsize=1024)
def _tile(images: int, height: int, width: int, taps: int, itemsize: int, channels: int, filters: int) -> Tile:
    """For a correlation with `filters` outputs, each summed over `channels`."""
    tall, wide, count = _cut(height, width)
    groups = ceil_div(filters, FILTERS)
    # no fewer blocks than fill the GPU, though each reads the images again
    blocks = max(ceil_div(groups, THREADS // (tall * wide)), min(groups, 2 * BLOCKS // (images * count)))
    groups = ceil_div(groups, blocks)
    blocks = ceil_div(ceil_div(filters, FILTERS), groups)
    vector = 16 // itemsize
    weights = groups * FILTERS * ceil_div(taps * taps, vector) * vector
    pitch = _pitch(wide, taps)
    channel = itemsize * (weights + (2 * tall + taps - 1) * pitch)
    chunk = ceil_div(channels, ceil_div(channels, max(1, SHARED // channel)))
    return Tile(tall, wide, pitch, count, tall * wide * groups, blocks, chunk, chunk * channel)


@functools.lru_cache(maxsize=1024)
def _weight_tile(height: int, width: int, taps: int, itemsize: int, channels: int) -> tuple[Tile, int]:
    """For the gradient of weight, and how many warps share the windows of the same channels."""
    tall, wide, count = _cut(height, width)
    pitch = 2 * wide + taps - 1
    patch, grads = itemsize * (2 * tall + taps - 1) * pitch, tall * wide * 33 * (itemsize + 4)
    chunk = max(1, min(channels, 32, (MOST_SHARED - grads) // patch))
    groups = ceil_div(chunk, CHANNELS)
    splits = max(1, min(8, 16 // groups))
    threads = 32 * groups * splits
    shared = max(chunk * patch + grads, threads * itemsize)
    return Tile(tall, wide, pitch, count, threads, 1, chunk, shared), splits


@functools.cache
def _pitch(wide: int, taps: int) -> int:
    """An even one for which the pairs that a half-warp reads, of neighbouring windows, lie in as many banks as can be."""
    least = 2 * wide + taps - 1
    return max(range(least, least + 16, 2), key=lambda pitch: (_banks(pitch, wide), -pitch))


def _banks(pitch: int, wide: int) -> int:
    return len({(2 * (window // wide) * pitch + 2 * (window % wide)) % 32 for window in range(16)})
