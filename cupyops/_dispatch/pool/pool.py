"""Forms of pooling, by how blocks and threads share planes; the arguments of windows, checked, and how many fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..._kernel.kernel import FLOATING, Kernel, ceil_div
from ..._util import arguments
from ..core.forms import Form, Launch
from ..core.gpu import Gpu
from ..gemm.gemm import divisor

BLOCK = 128
BANDS_AT_ONCE = 5  # blocks whose bands a multiprocessor holds
MOST_SHARED = 48 << 10  # bytes that every GPU gives a block without being asked
RESERVED = 1 << 10  # bytes of shared memory that the system takes of each block
BLOCKS_EACH = 8  # blocks for each multiprocessor that small work is divided into
STRIP = 4  # rows that a thread goes down where there are so many threads for each that a GPU holds:
STRIP_FROM = 2
GLOBAL_BYTES = 8 << 10  # of the planes of a block, where a window is a whole plane
EACH_LANE = 32  # elements of such a plane that one thread adds, where several share it
LEAST_GLOBAL = 16  # elements of such a plane, so that a vector lies in two planes at most
VECTORS = 2  # of a thread of the gradient of such planes
STAGED_BELOW = 4  # bytes of a result that goes through shared memory

DEFINE = {"POOL_STAGED_BELOW": STAGED_BELOW, "POOL_VECTORS": VECTORS}
BELOW_FP64 = tuple(dtype for dtype in FLOATING if dtype is not torch.float64)  # fp64 has the scalar form alone
BAND_WINDOWS = ((2, 2), (3, 1), (3, 2))  # size and stride of the windows that are unrolled in bands
NHWC_WINDOWS = ((3, 2),)  # and in vectors of channels


def _has_nhwc(**template: Any) -> bool:
    """Return True if there is an instance for neighbouring channels: vectors and byte indices, or single elements."""
    window = template["K"], template["S"]
    if not template["ALIGNED"]:
        return window == (0, 0)
    unsupported = template["T"] is torch.float64 or template.get("I") is torch.int64
    return not unsupported and window in ((0, 0), *NHWC_WINDOWS)


# Template values that the kernels are compiled for.
BANDS: dict[str, Any] = dict(
    define=DEFINE, T=BELOW_FP64, K=(2, 3), S=(1, 2), where=lambda K, S, **_: (K, S) in BAND_WINDOWS
)
NHWC: dict[str, Any] = dict(define=DEFINE, T=FLOATING, K=(0, 3), S=(0, 2), ALIGNED=(False, True), where=_has_nhwc)
GLOBAL: dict[str, Any] = dict(define=DEFINE, T=BELOW_FP64)


class Problem(NamedTuple):
    """Pooling of `images` x `channels` planes."""

    images: int
    channels: int
    geometry: tuple[int, ...]  # H, W, OH, OW, then kernel, stride, padding and dilation, two ints each
    dtype: torch.dtype
    nhwc: bool  # whether channels are neighbours
    aligned: bool  # whether all tensors begin at 16-byte boundaries
    places: torch.dtype | None = None  # the dtype of the places of maxima

    @property
    def types(self) -> dict[str, Any]:
        """T, and I where there is one."""
        return {"T": self.dtype} if self.places is None else {"T": self.dtype, "I": self.places}


class Bands(Form[Problem]):
    """Bands of rows of contiguous planes in shared memory."""

    name = "bands"
    summary = "a block copies a band of rows to shared memory; a thread goes down a strip of a column"
    measured = "contiguous planes at 3.3 to 4.3 TB/s on an H200, whose copy reaches 4.2"

    def __init__(self, kernel: Kernel, backward: bool) -> None:
        self.kernel, self.backward = kernel, backward

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        """Its kernels are for certain windows and a byte of index."""
        if problem.nhwc:
            return "channels are neighbours"
        if problem.dtype is torch.float64 or problem.places is torch.int64:
            return "it has no kernels for fp64 and 64-bit indices"
        if unrolled(problem.geometry, BAND_WINDOWS) == (0, 0):
            return "it has no kernel for this window"
        shared = self._bands(problem, gpu).shared
        return f"a band takes {shared} bytes of shared memory" if shared > MOST_SHARED else None

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        """A block for each group of planes, or band of one."""
        bands, geometry = self._bands(problem, gpu), problem.geometry
        template = {"T": problem.dtype, **_named(unrolled(geometry, BAND_WINDOWS))}
        args = (*_geometry(geometry, self.backward), bands.packed)
        return Launch(self.kernel, bands.grid, bands.block, bands.shared, template, args=args)

    def _bands(self, problem: Problem, gpu: Gpu) -> _Bands:
        geometry, step = problem.geometry, unrolled(problem.geometry, BAND_WINDOWS)[1]
        if self.backward:
            return _bands(problem, gpu, _tiles(geometry, step), _backward_bytes(problem, step))
        return _bands(problem, gpu, geometry[2:4], _forward_bytes(problem))


class Nhwc(Form[Problem]):
    """Vectors of neighbouring channels."""

    name = "nhwc"
    summary = "a thread has 16 bytes of channels, and goes down a strip of a column"
    measured = "channels_last at 2.9 to 3.6 TB/s on an H200, whose copy reaches 4.2"
    aligned = True

    def __init__(self, kernel: Kernel, backward: bool) -> None:
        self.kernel, self.backward = kernel, backward

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        """Its kernels read vectors."""
        width = 16 // problem.dtype.itemsize
        if not problem.nhwc:
            return "channels are no neighbours"
        if problem.dtype is torch.float64 or problem.places is torch.int64:
            return "it has no kernels for fp64 and 64-bit indices"
        if not problem.aligned or problem.channels % width:
            return f"channels do not come in aligned vectors of {width}"
        return None

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        """A thread for each vector of channels of each strip."""
        known = unrolled(problem.geometry, NHWC_WINDOWS, problem.channels) if self.aligned else (0, 0)
        vector = 16 // problem.dtype.itemsize if self.aligned else 1
        nhwc = problem.nhwc  # contiguous planes are images of one channel
        images, channels = (problem.images, problem.channels) if nhwc else (problem.images * problem.channels, 1)
        height, width = _tiles(problem.geometry, known[1]) if self.backward else problem.geometry[2:4]
        row = images * width * (channels // vector)
        strip = max(1, min(STRIP, row * height // (STRIP_FROM * gpu.multiprocessors * gpu.threads)))
        strips = ceil_div(height, strip)
        threads = row * strips
        numbers = (channels // vector, width, strips)
        packed = [threads, channels, strip, *(n for value in numbers for n in divisor(value))]
        template = problem.types | _named(known) | {"ALIGNED": self.aligned}
        args = (*_geometry(problem.geometry, self.backward), _array(packed))
        return Launch(self.kernel, ceil_div(threads, BLOCK), BLOCK, template=template, args=args)


class Scalar(Nhwc):
    """One channel at a time, in any layout: all that no other form has."""

    name = "scalar"
    summary = "a thread has one channel, and goes down a strip of a column"
    measured = ""
    aligned = False

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        """It serves everything."""
        return None


class Global(Form[Problem]):
    """One window, which is a whole contiguous plane."""

    name = "global_plane"
    summary = "forward, a group of threads sums a plane; backward, a thread writes two vectors"
    measured = "256x2048x7x7 in bf16 at 2.4 TB/s forward and 3.2 backward on an H200"

    def __init__(self, kernel: Kernel, backward: bool) -> None:
        self.kernel, self.backward = kernel, backward

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        """One window without padding."""
        (h, w), pads = problem.geometry[:2], problem.geometry[8:10]
        if problem.nhwc:
            return "channels are neighbours"
        if problem.dtype is torch.float64:
            return "it has no kernels for fp64"
        if problem.geometry[4:6] != (h, w) or pads != (0, 0):
            return "a window is not the whole plane"
        return None if LEAST_GLOBAL <= h * w < 1 << 31 else f"a plane has {h * w} elements"

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        """Groups of threads forward, vectors backward."""
        planes, size = problem.images * problem.channels, problem.geometry[0] * problem.geometry[1]
        itemsize, template = problem.dtype.itemsize, {"T": problem.dtype}
        if self.backward:
            grid = ceil_div(planes * size, VECTORS * 16 // itemsize * BLOCK)
            return Launch(self.kernel, grid, BLOCK, template=template, args=(planes * size, _array(divisor(size))))
        lanes = BLOCK if size > 32 * EACH_LANE else 1 << (ceil_div(size, EACH_LANE) - 1).bit_length()
        groups = BLOCK // lanes
        each = max(1, _target(planes * size * itemsize, GLOBAL_BYTES, gpu) // (size * itemsize))
        each -= each % groups if each > groups else 0
        shared = _bytes(each * size, itemsize)
        fits = shared <= MOST_SHARED
        args = (planes, size, each, lanes, fits)
        return Launch(self.kernel, ceil_div(planes, each), BLOCK, shared if fits else 0, template, args=args)


def unrolled(geometry: tuple[int, ...], windows: Sequence[tuple[int, int]], channels: int = 1) -> tuple[int, int]:
    """Size and stride of a window, where kernels for `windows` serve it; else zeros."""
    h, w, out_h, out_w, kernel, across, stride, along, *pads, dilation, other = geometry
    if (kernel, stride) not in windows or (across, along, dilation, other) != (kernel, stride, 1, 1):
        return 0, 0
    if h * w * channels >= 1 << 31:
        return 0, 0
    inside = pads == [0, 0] and out_h * stride <= h and out_w * stride <= w
    return (kernel, stride) if inside or kernel > stride else (0, 0)


# --- bands -------------------------------------------------------------------------------------------------------


class _Bands(NamedTuple):
    grid: int
    block: int
    shared: int
    packed: np.ndarray  # `struct Bands`


Bytes = Callable[[int, int], int]  # that a block needs for (rows, planes)


def _forward_bytes(problem: Problem) -> Bytes:
    """Return a function of (rows, planes): bytes of the input that the outputs read, and of the results that are staged."""
    h, w, out_h, out_w, kh, _, sh, _, _, _, dh, _ = problem.geometry
    sizes = (problem.dtype.itemsize, problem.places.itemsize) if problem.places else ()

    def bytes_of(rows: int, planes: int) -> int:
        read = min((rows - 1) * sh + (kh - 1) * dh + 1, h)
        results = ((planes - 1) * out_h + rows) * out_w
        staged = sum(_bytes(results, size) for size in sizes if size < STAGED_BELOW)
        return _bytes(((planes - 1) * h + read) * w, problem.dtype.itemsize) + staged

    return bytes_of


def _backward_bytes(problem: Problem, step: int) -> Bytes:
    """Rows of tiles of inputs, and the gradients and places of windows that reach them."""
    h, w, out_h, out_w, kh, _, sh, _, _, _, dh, _ = problem.geometry
    itemsize, places = problem.dtype.itemsize, problem.places.itemsize if problem.places else 0

    def bytes_of(rows: int, planes: int) -> int:
        height = rows * step
        windows = ((planes - 1) * out_h + min((height + (kh - 1) * dh) // sh + 1, out_h)) * out_w
        elements = ((planes - 1) * h + min(height, h)) * w
        return _bytes(windows, itemsize) + _bytes(windows, places) + _bytes(elements, itemsize)

    return bytes_of


def _bands(problem: Problem, gpu: Gpu, size: Sequence[int], bytes_of: Bytes) -> _Bands:
    """Bands of planes whose threads own columns of `size`, rows and columns."""
    height, width = size
    count = problem.images * problem.channels
    most = min(MOST_SHARED, (gpu.shared_total // BANDS_AT_ONCE - RESERVED) >> 10 << 10)
    target = _target(count * bytes_of(height, 1), most, gpu)
    each = max(1, min(target // bytes_of(height, 1), count))
    bands = max(1, min(bytes_of(height, 1) // target, height))
    while each == 1 and bands < height and bytes_of(ceil_div(height, bands), 1) > target:
        bands += max(1, bands // 32)
    rows = ceil_div(height, bands)
    bands = ceil_div(height, rows)
    across = ceil_div(width, ceil_div(width, BLOCK))
    groups = BLOCK // across
    strip = ceil_div(rows, ceil_div(groups, each))
    strips = ceil_div(rows, strip)
    groups = min(groups, each * strips)
    packed = [count, each, rows, groups, strip, *(n for value in (bands, across, strips) for n in divisor(value))]
    block = ceil_div(groups * across, 32) * 32
    return _Bands(ceil_div(count, each) * bands, block, bytes_of(rows, each), _array(packed))


def _target(total: int, most: int, gpu: Gpu) -> int:
    """Bytes of a block, of `total`: `most`, or fewer to fill the GPU."""
    return min(most, max(1024, ceil_div(total, gpu.multiprocessors * BLOCKS_EACH)))


def _bytes(count: int, itemsize: int) -> int:
    """Bytes of a buffer for a run that begins anywhere."""
    return ceil_div(count * itemsize, 16) * 16 + 16


def _tiles(geometry: tuple[int, ...], step: int) -> tuple[int, int]:
    """Rows and columns of the tiles of inputs that threads own: elements, where the windows are not unrolled."""
    (h, w), pads = geometry[:2], geometry[8:10]
    return (ceil_div(h + pads[0], step), ceil_div(w + pads[1], step)) if step else (h, w)


def _geometry(geometry: tuple[int, ...], backward: bool) -> tuple[np.ndarray, ...]:
    """`struct Window`; backward the strides too, as `struct Divisor`."""
    strides = [_array(divisor(stride)) for stride in geometry[6:8]] if backward else []
    return _array(geometry, np.int32), *strides


def _named(known: tuple[int, int]) -> dict[str, int]:
    return dict(zip("KS", known))


def _array(values: Sequence[int], dtype: Any = np.int64) -> np.ndarray:
    return np.array(values, dtype=dtype)


def planes(name: str, value: Any) -> None:
    """`value` is a tensor of planes, with elements but for the batch."""
    arguments.tensor(name, value)
    if value.dim() not in (3, 4) or 0 in value.shape[-3:]:
        arguments.fail(name, value, "a tensor of shape (N, C, H, W) or (C, H, W), with none of C, H, W zero")
    if value.dtype is torch.bool or value.dtype.is_complex:
        arguments.fail(name, value, "a tensor of a real dtype")


def window(
    size: Sequence[int], kernel_size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: Any
) -> tuple[list[int], list[int], list[int], list[int]]:
    """Kernel, stride, padding and dilation, two ints each, that fit planes of `size`."""
    kernel = arguments.ints("kernel_size", kernel_size, 2, minimum=1)
    default = stride is None or (isinstance(stride, (list, tuple)) and len(stride) == 0)
    steps = kernel if default else arguments.ints("stride", stride, 2, minimum=1)
    pads, dilations = (
        arguments.ints("padding", padding, 2, minimum=0),
        arguments.ints("dilation", dilation, 2, minimum=1),
    )
    if any(2 * pad > k for pad, k in zip(pads, kernel)):
        arguments.fail("padding", padding, f"at most half of kernel_size, which is {kernel_size}")
    arguments.choice("ceil_mode", ceil_mode, (False, True))
    found = kernel, steps, pads, dilations
    if min(output_size(size, found, ceil_mode)) < 1:
        arguments.fail("kernel_size", kernel_size, f"a window that fits planes of {tuple(size)}, padding included")
    return found


def output_size(size: Sequence[int], window: tuple[Sequence[int], ...], ceil_mode: bool) -> list[int]:
    """Windows in each direction. With ceil_mode the last may stick out, but must begin before the right padding."""
    out = []
    for length, kernel, stride, pad, dilation in zip(size, *window):
        last = length + 2 * pad - dilation * (kernel - 1) - 1
        count = (last + (stride - 1 if ceil_mode else 0)) // stride + 1
        out.append(count - 1 if ceil_mode and (count - 1) * stride >= length + pad else count)
    return out
