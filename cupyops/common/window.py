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
from .gemm import divisor

BLOCK = 256
BAND_BYTES = 16 << 10  # of shared memory of a block, where there is enough work
MAX_BYTES = 48 << 10
FILL = 132 * 8  # blocks that small work is divided into


class Bands(NamedTuple):
    """A launch over contiguous planes; `struct Window` and `struct Bands` for the kernel."""

    grid: int
    shared: int
    window: np.ndarray
    bands: np.ndarray
    fits: bool


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


@functools.lru_cache(maxsize=4096)
def fwd_bands(count: int, geometry: tuple[int, ...], itemsize: int) -> Bands:
    """Bands of rows of outputs, and what these read in shared memory."""
    h, w, out_h, _, kh, _, sh, _, _, _, dh, _ = geometry
    span = (kh - 1) * dh + 1

    def bytes_of(rows: int) -> int:
        return ((min((rows - 1) * sh + span, h) if rows < out_h else h) * w + 16) * itemsize

    return _bands(count, geometry, out_h, bytes_of)


@functools.lru_cache(maxsize=4096)
def bwd_bands(count: int, geometry: tuple[int, ...], itemsize: int) -> Bands:
    """Bands of rows of inputs, summed up in shared memory in numbers of `itemsize` bytes."""
    h, w = geometry[:2]
    return _bands(count, geometry, h, lambda rows: (rows * w + 16) * itemsize)


@functools.lru_cache(maxsize=4096)
def gather_bands(count: int, geometry: tuple[int, ...], itemsize: int) -> tuple[Bands, np.ndarray, list[np.ndarray]]:
    """Bands of rows of inputs, and the windows that reach them in shared memory in numbers of `itemsize` bytes.

    With them the `struct Bands` by which these windows divide, and the strides as `struct Divisor`.
    """
    h, w, out_h, out_w, kh, _, *strides = geometry[:8]

    def bytes_of(rows: int) -> int:
        windows = min((rows + kh - 2) // strides[0] + 1, out_h) if rows < h else out_h
        return (max(windows * out_w, rows * w) + 16) * itemsize

    bands = _bands(count, geometry, h, bytes_of, (h, w))
    windows = _array([*bands.bands[:5], *divisor(out_w), *divisor(out_h)])
    return bands, windows, [_array(divisor(stride)) for stride in strides]


def _bands(
    count: int,
    geometry: tuple[int, ...],
    height: int,
    bytes_of: Callable[[int], int],
    divide: tuple[int, int] | None = None,
) -> Bands:
    """`divide`: the size of the planes whose places threads have, if not the outputs'."""
    out_h, out_w = divide or (geometry[2], geometry[3])
    plane = bytes_of(height)
    target = min(BAND_BYTES, max(1024, ceil_div(count * plane, FILL)))
    each, rows = max(1, min(target // plane, count)), height
    while rows > 1 and bytes_of(rows) > target:
        rows = ceil_div(rows, 2)
    shared = -(-(bytes_of(rows) * each) // 16) * 16
    fits = shared <= MAX_BYTES and geometry[0] * geometry[1] < 1 << 31  # places in a plane are ints
    parts = ceil_div(height, rows)
    packed = [count, each, rows, parts, fits, *divisor(out_w), *divisor(out_h)]
    return Bands(ceil_div(count, each) * parts, shared if fits else 0, _array(geometry, np.int32), _array(packed), fits)


@functools.lru_cache(maxsize=4096)
def cells(channels: int, geometry: tuple[int, ...], vector: int, backward: bool) -> tuple[np.ndarray, np.ndarray]:
    """`struct Window` and `struct Cells`, of the outputs or, backward, of the inputs."""
    h, w = geometry[:2] if backward else geometry[2:4]
    numbers = [n for value in (channels // vector, w, h, *geometry[6:8]) for n in divisor(value)]
    return _array(geometry, np.int32), _array(numbers)


def _array(values: Sequence[int], dtype: Any = np.int64) -> np.ndarray:
    return np.array(values, dtype=dtype)
