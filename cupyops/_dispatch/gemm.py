"""Launch configuration of the GEMM that matmul, linear and conv2d share (cuda_src/gemm/gemm.cuh).

The structs of gemm_layout.cuh travel as 64-bit integers: what is built here is packed once per geometry and kept.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._kernel.kernel import Kernel, ceil_div
from .._util import arguments
from .._util.strides import aligned
from .._util.strides import is_dry as is_dry
from ..errors import InputError

TILES = (32, 64, 128)  # the square tiles of the result that a block can own, for every dtype
WIDE = 256  # 128 x 256, on tensor cores alone
HALF = (torch.float16, torch.bfloat16)
MAX_INDEX = 2**31 - 2**16  # the kernels index each dimension of a matrix with 32 bits, and tiles hang over the edge

_MIN_SPLIT = 64  # the least share of k that is worth a block
_WIDE_SHARED = 3 * (128 + WIDE) * (64 + 8) * 2  # bytes: more than some cards give a block
_PAD_FROM = 2**26  # products, from which on a copy in whole vectors is cheap beside reading single elements


class Speed(NamedTuple):
    """What choosing a tile goes by, roughly as an H200 has it."""

    rate: dict[int, float]  # multiply-adds per microsecond of one multiprocessor, by tile
    step: float  # microseconds that one k costs a block at least, waiting for memory


_TENSOR_CORES = Speed({32: 0.3e6, 64: 0.8e6, 128: 1.3e6, WIDE: 1.6e6}, 0.015)
_FMA = Speed({32: 0.7e5, 64: 1.15e5, 128: 1.5e5}, 0.08)
_FMA64 = Speed({32: 0.4e5, 64: 0.6e5, 128: 0.75e5}, 0.05)


class Layout(NamedTuple):
    """Element (i, k) of matrix `batch` = (outer, inner): strides in elements; k may be split in runs of `run`."""

    i: int
    k: int
    batch: int = 0
    batch_outer: int = 0
    run: int = 2**31 - 1
    stride_run: int = 0

    def packed(self, size_k: int) -> tuple[int, ...]:
        """The fields of `struct Layout`. Vectors run along the index of stride 1: k, if both are."""
        along_k = self.k == 1 and (size_k > 1 or self.i != 1) or (self.i != 1 and self.k < self.i)
        return (self.i, self.k, self.stride_run, self.batch, self.batch_outer, *divisor(self.run), int(along_k))

    def in_vectors(self, width: int) -> bool:
        """Whether rows or columns are contiguous and a whole number of vectors apart, in every batch."""
        rows = (self.k == 1 and self.i % width == 0) or (self.i == 1 and self.k % width == 0)
        return rows and self.batch % width == 0 and self.batch_outer % width == 0


class Problem(NamedTuple):
    """out[m, n] = sum over k of a[m, k] b[k, n], for each of `batches` = outer * `batch_inner`."""

    m: int
    n: int
    k: int
    a: Layout  # i = m
    b: Layout  # i = n
    out: Layout  # i = m, k = n
    batches: int = 1
    batch_inner: int = 1
    ones: bool = False  # b has one more column, of ones
    bias_along_m: bool = False


class Launch(NamedTuple):
    """Everything that a launch needs besides its tensors."""

    tile: int
    config: tuple[int, int, int]  # grid, block, bytes of shared memory
    gemm: np.ndarray[Any, Any]
    partial: int  # elements of the workspace, 0 where k is not split
    sum_config: tuple[Any, ...]
    pad: tuple[bool, bool]  # whether a and b are worth a copy with padded()

    @property
    def may_copy(self) -> bool:
        """Whether `prepare` has anything to look at."""
        return self.tile == WIDE or self.pad != (False, False)

    def prepare(self, *operands: Tensor) -> list[Tensor] | None:
        """The operands with those copied that are worth it, or that the wide tile cannot read; None if none is."""
        if not self.may_copy:
            return None
        wide = self.tile == WIDE
        copies = [pad or (wide and not aligned(t)) for t, pad in zip(operands, self.pad)]
        return [padded(t) if copy else t for t, copy in zip(operands, copies)] if any(copies) else None


def divisor(value: int) -> tuple[int, int, int]:
    """`struct Divisor`: (divisor, magic, shift), with n / divisor = (umulhi(n, magic) + n) >> shift."""
    value = max(value, 1)
    shift = (value - 1).bit_length()
    return value, ((1 << 32) * ((1 << shift) - value)) // value + 1, shift


def run(kernel: Kernel, sum_kernel: Kernel, launch: Launch, inputs: Any, outputs: Any, extra: Any = ()) -> None:
    """Launch `kernel(*inputs, *outputs, partial, gemm, *extra)`; where k is split, `sum_kernel` adds up what it left.

    `inputs` are a, b and, if the kernel takes one, the bias; `outputs` the result and, if it takes one, the column of
    sums.
    """
    dtype = inputs[0].dtype
    partial = None
    if launch.partial:
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        partial = torch.empty(launch.partial, dtype=wide, device=inputs[0].device)
    kernel[launch.config](*inputs, *outputs, partial, launch.gemm, *extra, T=dtype, TILE=launch.tile)
    if launch.partial:
        sum_kernel[launch.sum_config](partial, *inputs[2:], *outputs, launch.gemm, T=dtype)


def plan(problem: Problem, dtype: torch.dtype, device: torch.device, wide: bool = False) -> Launch:
    """The launch for a problem; operators keep it per geometry. `wide`: they have a kernel for that tile."""
    p, columns = problem, problem.n + problem.ones
    sms, shared = _device(device)
    width = 16 // dtype.itemsize
    vectors = p.a.in_vectors(width), p.b.in_vectors(width)
    wide = wide and all(vectors) and not p.ones and shared >= _WIDE_SHARED
    tile, splits, k_split = choose(p.m, columns, p.k, p.batches, dtype, sms, wide)
    tiles = _tiles(p.m, columns, p.batches, tile)
    layouts = (*p.a.packed(p.k), *p.b.packed(p.k), *p.out.packed(p.n))
    sizes = (p.m, p.n, p.k, p.batches, int(p.ones), splits, k_split)
    gemm = np.array((*sizes, *divisor(p.batch_inner), int(p.bias_along_m), *layouts), dtype=np.int64)
    elements = p.batches * p.m * ceil_div(columns, 8) * 8
    block = (32, 8) if splits >= 16 else (256, 1)
    large = p.batches == 1 and p.m * p.n * p.k >= _PAD_FROM and min(p.m, p.n) >= 128 and dtype != torch.float64
    return Launch(
        tile,
        (tiles * splits, threads(dtype, tile), shared_bytes(dtype, tile)),
        gemm,
        elements * splits if splits > 1 else 0,
        (ceil_div(elements, block[0]), block, 256 * (8 if dtype == torch.float64 else 4)),
        (large and not vectors[0], large and not vectors[1]),
    )


@functools.cache
def _device(device: torch.device) -> tuple[int, int]:
    """The number of multiprocessors that tiles are spread over, and the bytes of shared memory that a block can have."""
    if device.type != "cuda":
        return 64, 0
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, int(getattr(properties, "shared_memory_per_block_optin", 0))


def _tiles(m: int, n: int, batches: int, tile: int) -> int:
    return ceil_div(m, min(tile, 128)) * ceil_div(n, tile) * batches


def choose(
    m: int, n: int, k: int, batches: int, dtype: torch.dtype, sms: int, wide: bool = False
) -> tuple[int, int, int]:
    """(tile, splits, k per split): what should take the least time, by a rough model.

    A multiprocessor multiplies its blocks' tiles one after the other, however many it holds; a block alone waits for
    memory at each step; and split sums are written, read again and added by a second kernel.
    """
    speed = _FMA64 if dtype == torch.float64 else _FMA if dtype == torch.float32 else _TENSOR_CORES
    best: tuple[float, int, int, int] | None = None
    for tile in tiles_for(dtype, wide):
        tiles = _tiles(m, n, batches, tile)
        for splits, k_split in _splittings(tiles, k, sms):
            blocks = ceil_div(tiles * splits, sms)
            products = blocks * min(tile, 128) * tile * k_split / speed.rate[tile]
            time = max(products, k_split * speed.step)
            if splits > 1:
                time += 4.5 + m * n * batches * splits * 8 / 3e6
            if best is None or time < best[0]:
                best = (time, tile, splits, k_split)
    assert best is not None
    return best[1:]


def tiles_for(dtype: torch.dtype, wide: bool) -> tuple[int, ...]:
    """The tiles that there are kernels for."""
    return (*TILES, WIDE) if wide and dtype in HALF else TILES


def _splittings(tiles: int, k: int, sms: int) -> list[tuple[int, int]]:
    """(splits, k per split) that give each multiprocessor 1, 2 ... blocks, and that of no split."""
    found = []
    for splits in (1, *(per_sm * sms // max(tiles, 1) for per_sm in (1, 2, 3, 4))):
        splits = max(1, min(splits, k // _MIN_SPLIT))
        k_split = ceil_div(max(k, 1), splits * 32) * 32  # whole k-steps of every engine
        found.append((max(ceil_div(k, k_split), 1), k_split))
    return found


def threads(dtype: torch.dtype, tile: int) -> int:
    """kGemmThreads."""
    if tile == 32:
        return 64
    return 128 if tile == 64 or (tile == 128 and dtype in HALF) else 256


def shared_bytes(dtype: torch.dtype, tile: int) -> int:
    """The ring of gemm_tile(), stages of two panels, for whichever engine the card has for this dtype; at its end the
    ring serves store_by_warp()."""
    size = 8 if dtype == torch.float64 else 4
    width = 16 // size
    depth = 8 if size == 8 else 16
    both = min(tile, 128) + tile
    ring = 2 * depth * (both + 2 * width) * size
    output = threads(dtype, tile) // 32 * 4 * width * (8 * width + 4) * size
    depth, stages = 64 if tile == WIDE else 32, 4 if tile <= 64 else 3
    tensor_cores = stages * both * (depth + 8) * 2
    return max(ring, output) if size <= dtype.itemsize else max(ring, tensor_cores)


def padded(matrix: Tensor) -> Tensor:
    """A copy whose rows (or columns, if those were contiguous) begin at whole vectors."""
    if matrix.stride(-2) == 1 and matrix.stride(-1) != 1:
        return padded(matrix.mT).mT
    width = 16 // matrix.element_size()
    columns = matrix.shape[-1]
    copy = matrix.new_empty((*matrix.shape[:-1], ceil_div(columns, width) * width))[..., :columns]
    return copy.copy_(matrix)


def too_large(*sizes: int, tiles: int) -> str | None:
    """Why the kernels cannot index a problem, if they cannot."""
    if any(size > MAX_INDEX for size in sizes):
        return f"a dimension over {MAX_INDEX}"
    return "over 2^31 - 1 tiles" if tiles > 2**31 - 1 else None


def check_dtypes(**tensors: Tensor | None) -> None:
    """All the tensors have one dtype; autocast, where it is on, makes them so, but leaves float64 alone."""
    given = [(name, value) for name, value in tensors.items() if value is not None]
    name, first = given[0]
    autocast = arguments.autocast(first.device)

    def key(dtype: torch.dtype) -> Any:
        return "cast by autocast" if autocast and dtype.is_floating_point and dtype != torch.float64 else dtype

    for other, value in given[1:]:
        if key(value.dtype) != key(first.dtype):
            raise InputError(f"{other} is {value.dtype}, but {name} is {first.dtype}; expected one dtype")
