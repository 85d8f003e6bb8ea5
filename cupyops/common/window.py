"""Windows over planes: their arguments, the sizes they give, and how blocks share the planes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .. import check
from ..kernel import ceil_div
from ..layout import alignment
from .gemm import divisor

BLOCK = 128
BAND_BYTES = 44 << 10  # of shared memory of a block, where there is enough work
WHOLE_BYTES = 8 << 10  # where a window is a whole plane
MAX_BYTES = 48 << 10
FILL = 132 * 8  # blocks that small work is divided into
FILL_THREADS = 132 * 2048 * 2
EACH_LANE = 32  # elements of a plane with one window, where several threads share it
STRIP = 4  # rows that a thread goes down, channels last, where there is enough work
SHAPES = ((0, 0), (2, 2), (3, 1), (3, 2))  # size and stride of windows that kernels are compiled for; zeros: any


class Bands(NamedTuple):
    """A launch over contiguous planes; `struct Window` and `struct Bands` for the kernel."""

    grid: int
    block: int
    shared: int
    window: np.ndarray
    bands: np.ndarray
    fits: bool
    shape: dict[str, int]  # K and S


def planes(name: str, value: Any) -> None:
    """`value` is a tensor of planes, with elements but for the batch."""
    check.tensor(name, value)
    if value.dim() not in (3, 4) or 0 in value.shape[-3:]:
        check.fail(name, value, "a tensor of shape (N, C, H, W) or (C, H, W), with none of C, H, W zero")
    if value.dtype is torch.bool or value.dtype.is_complex:
        check.fail(name, value, "a tensor of a real dtype")


def window(
    size: Sequence[int], kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: Any
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Kernel, stride, padding and dilation, two ints each, that fit planes of `size`."""
    kernel = check.ints("kernel_size", kernel_size, 2, minimum=1)
    default = stride is None or (isinstance(stride, (list, tuple)) and len(stride) == 0)
    steps = kernel if default else check.ints("stride", stride, 2, minimum=1)
    pads, dilations = check.ints("padding", padding, 2, minimum=0), check.ints("dilation", dilation, 2, minimum=1)
    if any(2 * pad > k for pad, k in zip(pads, kernel)):
        check.fail("padding", padding, f"at most half of kernel_size, which is {kernel_size}")
    check.choice("ceil_mode", ceil_mode, (False, True))
    found = kernel, steps, pads, dilations
    if min(output_size(size, found, ceil_mode)) < 1:
        check.fail("kernel_size", kernel_size, f"a window that fits planes of {tuple(size)}, padding included")
    return found


def output_size(size: Sequence[int], window: tuple[list[int], ...], ceil_mode: bool) -> list[int]:
    """Windows in each direction. With ceil_mode the last may stick out, but must begin before the right padding."""
    out = []
    for length, kernel, stride, pad, dilation in zip(size, *window):
        room = length + 2 * pad - dilation * (kernel - 1) - 1
        count = (room + (stride - 1 if ceil_mode else 0)) // stride + 1
        out.append(count - 1 if ceil_mode and (count - 1) * stride >= length + pad else count)
    return out


def is_channels_last(x: Tensor) -> bool:
    """Whether PyTorch takes these strides for channels_last (c10's is_channels_last_strides_2d, for its output strides)."""
    shape, strides = x.shape, x.stride()
    if len(shape) != 4 or strides[1] == 0:
        return False
    least = 0
    for dim in (1, 3, 2, 0):
        if shape[dim] == 0 or strides[dim] < least or (dim == 0 and least == strides[1]):
            return False
        least = strides[dim] * max(shape[dim], 1)
    return True


# --- for the kernels: geometry is (H, W, OH, OW, kernel, stride, padding, dilation), twelve ints ---


def specialised(geometry: tuple[int, ...]) -> tuple[int, int]:
    """K and S of the kernels that are compiled for this window, else zeros."""
    h, w, out_h, out_w, kernel, across, stride, along, *pads, dilation, other = geometry
    if (kernel, stride) not in SHAPES or (across, along, dilation, other) != (kernel, stride, 1, 1) or h * w >= 1 << 31:
        return 0, 0
    inside = pads == [0, 0] and out_h * stride <= h and out_w * stride <= w
    return (kernel, stride) if inside or kernel > stride else (0, 0)


@functools.lru_cache(maxsize=4096)
def fwd_bands(count: int, geometry: tuple[int, ...], itemsize: int, staged: tuple[int, ...] = ()) -> Bands:
    """Bands of rows of outputs; in shared memory what these read, and results of so many bytes each."""
    h, w, out_h, out_w, kh, _, sh, _, _, _, dh, _ = geometry

    def bytes_of(rows: int, planes: int) -> int:
        read = min((rows - 1) * sh + (kh - 1) * dh + 1, h)
        results = ((planes - 1) * out_h + rows) * out_w
        return _room(((planes - 1) * h + read) * w, itemsize) + sum(_room(results, size) for size in staged)

    return _bands(count, geometry, specialised(geometry), (out_h, out_w), bytes_of)


@functools.lru_cache(maxsize=4096)
def bwd_bands(count: int, geometry: tuple[int, ...], itemsize: int, places: int = 0) -> Bands:
    """Bands of rows of tiles of inputs; in shared memory these, and the gradients and places of windows that reach them."""
    h, w, out_h, out_w, kh, _, sh, _, _, _, dh, _ = geometry

    def banded(known: tuple[int, int]) -> Bands:
        def bytes_of(rows: int, planes: int) -> int:
            elements = rows * max(known[1], 1)
            windows = ((planes - 1) * out_h + min((elements + (kh - 1) * dh) // sh + 1, out_h)) * out_w
            elements = ((planes - 1) * h + min(elements, h)) * w
            return _room(windows, itemsize) + _room(windows, places) + _room(elements, itemsize)

        return _bands(count, geometry, known, _tiles(geometry, known[1]), bytes_of)

    bands = banded(specialised(geometry))
    return bands if bands.fits else banded((0, 0))


def _room(count: int, itemsize: int) -> int:
    """Bytes of a run that begins anywhere."""
    return ceil_div(count * itemsize, 16) * 16 + 16


def _tiles(geometry: tuple[int, ...], step: int) -> tuple[int, int]:
    """Rows and columns of the tiles of inputs that threads own: elements, where the windows are not specialised."""
    (h, w), pads = geometry[:2], geometry[8:10]
    return (ceil_div(h + pads[0], step), ceil_div(w + pads[1], step)) if step else (h, w)


def _bands(
    count: int,
    geometry: tuple[int, ...],
    known: tuple[int, int],
    size: tuple[int, int],
    bytes_of: Callable[[int, int], int],
) -> Bands:
    """Bands of planes whose threads own columns of `size`, rows and columns. bytes_of(rows, planes) is what these need."""
    height, width = size
    target = min(BAND_BYTES, max(1024, ceil_div(count * bytes_of(height, 1), FILL)))
    each = max(1, min(target // bytes_of(height, 1), count))
    parts = max(1, min(bytes_of(height, 1) // target, height))
    while each == 1 and parts < height and bytes_of(ceil_div(height, parts), 1) > target:
        parts += max(1, parts // 32)
    rows = ceil_div(height, parts)
    parts = ceil_div(height, rows)
    shared = bytes_of(rows, each)
    fits = shared <= MAX_BYTES and geometry[0] * geometry[1] < 1 << 31  # places in a plane are ints
    across = ceil_div(width, ceil_div(width, BLOCK))
    groups = BLOCK // across
    strip = ceil_div(rows, ceil_div(groups, each))
    strips = ceil_div(rows, strip)
    groups = min(groups, each * strips)
    packed = [count, each, rows, fits, groups, strip, *(n for value in (parts, across, strips) for n in divisor(value))]
    block = ceil_div(groups * across, 32) * 32
    return Bands(
        ceil_div(count, each) * parts,
        block,
        shared if fits else 0,
        _array(geometry, np.int32),
        _array(packed),
        fits,
        _shape(known if fits else (0, 0)),
    )


class Whole(NamedTuple):
    """A launch over planes of `size` elements, `each` to a block and `lanes` threads to a plane."""

    grid: int
    shared: int
    size: int
    each: int
    lanes: int
    fits: bool  # whether the planes of a block fit into shared memory
    divisor: np.ndarray  # `size`, as struct Divisor


@functools.lru_cache(maxsize=4096)
def whole_planes(count: int, size: int, itemsize: int) -> Whole:
    """Planes with one window each."""
    lanes = BLOCK if size > 32 * EACH_LANE else 1 << (ceil_div(size, EACH_LANE) - 1).bit_length()
    groups = BLOCK // lanes
    target = min(WHOLE_BYTES, max(1024, ceil_div(count * size * itemsize, FILL)))
    each = max(1, target // (size * itemsize))
    each -= each % groups if each > groups else 0
    shared = _room(each * size, itemsize)
    fits = shared <= MAX_BYTES
    return Whole(ceil_div(count, each), shared if fits else 0, size, each, lanes, fits, _array(divisor(size)))


class Cells(NamedTuple):
    """A launch over images channels last; `struct Window` and `struct Cells` for the kernel."""

    grid: int
    threads: int
    window: np.ndarray
    cells: np.ndarray
    shape: dict[str, Any]  # K, S and VECTORS


@functools.lru_cache(maxsize=4096)
def cells(images: int, channels: int, geometry: tuple[int, ...], itemsize: int, aligned: bool, backward: bool) -> Cells:
    """Strips of the outputs or, backward, of the tiles of the inputs.

    A thread has 16 bytes of their channels where these and the addresses, if `aligned`, allow it.
    """
    known = specialised(geometry) if geometry[0] * geometry[1] * channels < 1 << 31 else (0, 0)
    height, width = _tiles(geometry, known[1]) if backward else geometry[2:4]
    wide = aligned and channels % (16 // itemsize) == 0
    vectors = channels // (16 // itemsize) if wide else channels
    row = images * width * vectors
    strip = max(1, min(STRIP, row * height // FILL_THREADS))
    strips = ceil_div(height, strip)
    packed = [strip, *(n for value in (vectors, width, strips) for n in divisor(value))]
    threads, shape = row * strips, _shape(known) | dict(VECTORS=wide)
    return Cells(ceil_div(threads, BLOCK), threads, _array(geometry, np.int32), _array(packed), shape)


def aligned(*tensors: Tensor) -> bool:
    """Whether all begin at a 16-byte boundary."""
    return all(alignment(tensor) == 16 for tensor in tensors)


@functools.lru_cache(maxsize=4096)
def steps(geometry: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The strides, as `struct Divisor`."""
    return _array(divisor(geometry[6])), _array(divisor(geometry[7]))


def _shape(known: tuple[int, int]) -> dict[str, int]:
    return dict(zip("KS", known))


def _array(values: Sequence[int], dtype: Any = np.int64) -> np.ndarray:
    return np.array(values, dtype=dtype)
