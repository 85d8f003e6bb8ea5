"""Launch configuration of the GEMM that matmul, linear and conv2d share (cuda_src/common/gemm.cuh).

The structs of gemm_layout.cuh travel as 64-bit integers: what is built here is packed once per geometry and kept.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError
from ..kernel import Kernel, ceil_div
from ..layout import is_dry as _is_fake

TILES = (64, 128)
MAX_INDEX = 2**31 - 2**16  # the kernels index each dimension of a matrix with 32 bits, and tiles hang over the edge

_THREADS = {64: 128, 128: 256}
_MIN_SPLIT = 128  # the least share of k that is worth a block and a second kernel


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


def is_dry(tensor: Tensor) -> bool:
    """Whether this is the dry run that learns shapes: nothing is launched, and sizes may be symbols."""
    return type(tensor) not in (Tensor, torch.nn.Parameter) and _is_fake(tensor)


def plan(problem: Problem, dtype: torch.dtype, device: torch.device) -> Launch:
    """The launch for a problem; operators keep it per geometry."""
    p, columns, sms = problem, problem.n + problem.ones, _sm_count(device)
    tile = choose_tile(p.m, columns, p.batches, sms)
    tiles = ceil_div(p.m, tile) * ceil_div(columns, tile) * p.batches
    splits, k_split = choose_splits(tiles, p.k, sms)
    layouts = (*p.a.packed(p.k), *p.b.packed(p.k), *p.out.packed(p.n))
    sizes = (p.m, p.n, p.k, p.batches, int(p.ones), splits, k_split)
    gemm = np.array((*sizes, *divisor(p.batch_inner), int(p.bias_along_m), *layouts), dtype=np.int64)
    elements = p.batches * p.m * ceil_div(columns, 8) * 8
    block = (32, 8) if splits >= 16 else (256, 1)
    return Launch(
        tile,
        (tiles * splits, _THREADS[tile], shared_bytes(dtype, tile)),
        gemm,
        elements * splits if splits > 1 else 0,
        (ceil_div(elements, block[0]), block, 256 * (8 if dtype == torch.float64 else 4)),
    )


def _sm_count(device: torch.device) -> int:
    """The number of multiprocessors that tiles are spread over."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 64


def choose_tile(m: int, n: int, batches: int, sms: int) -> int:
    """128 where that still gives every multiprocessor a tile and little of the tiles hangs over the edge, else 64."""
    large, small = (ceil_div(m, tile) * ceil_div(n, tile) * batches * tile * tile for tile in (128, 64))
    return 128 if large >= sms * 128 * 128 and large <= 1.25 * small else 64


def choose_splits(tiles: int, k: int, sms: int) -> tuple[int, int]:
    """(splits, k per split): k is split where the tiles alone would leave half of the multiprocessors idle."""
    splits = min(2 * sms // tiles, k // _MIN_SPLIT) if 0 < 2 * tiles <= sms else 1
    k_split = ceil_div(max(k, 1), max(splits, 1) * 32) * 32  # whole k-steps of every engine
    return max(ceil_div(k, k_split), 1), k_split


def shared_bytes(dtype: torch.dtype, tile: int) -> int:
    """The ring of gemm_tile(), stages x two panels, for whichever engine the card has for this dtype; at its end the
    ring serves store_by_warp()."""
    size = 8 if dtype == torch.float64 else 4
    width = 16 // size
    depth = 16 if tile == 64 and size == 4 else 8
    ring = 2 * 2 * depth * (tile + width) * size
    output = _THREADS[tile] // 32 * 4 * width * (8 * width + 4) * size
    tensor_cores = 3 * 2 * tile * (32 + 8) * 2
    return max(ring, output) if size <= dtype.itemsize else tensor_cores


def too_large(*sizes: int, tiles: int) -> str | None:
    """Why the kernels cannot index a problem, if they cannot."""
    if any(size > MAX_INDEX for size in sizes):
        return f"a dimension over {MAX_INDEX}"
    return "over 2^31 - 1 tiles" if tiles > 2**31 - 1 else None


def check_dtypes(**tensors: Tensor | None) -> None:
    """All the tensors have one dtype; autocast, where it is on, makes them so, but leaves float64 alone."""
    given = [(name, value) for name, value in tensors.items() if value is not None]
    name, first = given[0]
    autocast = torch.is_autocast_enabled(first.device.type)

    def key(dtype: torch.dtype) -> Any:
        return "cast by autocast" if autocast and dtype.is_floating_point and dtype != torch.float64 else dtype

    for other, value in given[1:]:
        if key(value.dtype) != key(first.dtype):
            raise InputError(f"{other} is {value.dtype}, but {name} is {first.dtype}; expected one dtype")
