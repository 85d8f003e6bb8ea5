"""Forms of the GEMM that matmul, linear and conv2d share (cuda_src/gemm/gemm.cuh): a form is an engine and a tile.

The structs of cuda_src/gemm/layout.cuh travel as 64-bit integers.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..._kernel.kernel import FLOATING, Kernel, ceil_div
from ..._util import arguments
from ..._util.strides import aligned
from ...errors import InputError
from ..core.forms import Form, Launch
from ..core.gpu import Gpu

TILES = (32, 64, 128)  # the square tiles of the result that a block can own
WIDE = 256  # 128 x 256, on tensor cores alone
ONE_TILE = 64  # where there is one alone, as of fp64
HALF = (torch.float16, torch.bfloat16)
MAX_INDEX = 2**31 - 2**16  # the kernels index each dimension of a matrix with 32 bits, and tiles hang over the edge

MIN_SPLIT = 64  # the least share of k that is worth a block
PAD_FROM = 2**26  # products, from which on a copy in whole vectors is cheap beside reading single elements


SMALL_FP32 = 2**25  # multiply-adds: 64x128x3136 takes 14.8 us, 30.7 by cuBLAS on an H200
LARGE_UNALIGNED = 2**33  # 4097x4095x4088 takes 294 us, 1333 by cuBLAS on an H100

TILED: dict[str, Any] = dict(  # what the kernels are compiled for
    T=FLOATING, TILE=TILES, where=lambda T, TILE: T is not torch.float64 or TILE == ONE_TILE
)


class Speed(NamedTuple):
    """Speed of a tile, roughly as measured on an H200, by which one is chosen."""

    rate: dict[int, float]  # multiply-adds per microsecond of one multiprocessor, by tile
    step: float  # microseconds that one k costs a block at least, waiting for memory


_TENSOR_CORES = Speed({32: 0.3e6, 64: 0.8e6, 128: 1.3e6, WIDE: 1.6e6}, 0.015)
_FMA = Speed({32: 0.7e5, 64: 1.15e5, 128: 1.5e5}, 0.08)
_FMA64 = Speed({ONE_TILE: 0.6e5}, 0.05)


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
        """Return True if rows or columns are contiguous and a whole number of vectors apart, in every batch."""
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
    dtype: torch.dtype
    batches: int = 1
    batch_inner: int = 1
    ones: bool = False  # b has one more column, of ones
    bias_along_m: bool = False
    tf32: bool = False  # PyTorch's flags allow that

    @property
    def columns(self) -> int:
        """Number of columns of the result, including a column for the sums."""
        return self.n + self.ones

    @property
    def in_vectors(self) -> tuple[bool, bool]:
        """Flags of a and b: True if its rows are whole vectors."""
        width = 16 // self.dtype.itemsize
        return self.a.in_vectors(width), self.b.in_vectors(width)

    @property
    def worth_padding(self) -> tuple[bool, bool]:
        """Flags of a and b: True if a copy made by `padded` is worth its time."""
        large = self.batches == 1 and self.m * self.n * self.k >= PAD_FROM and min(self.m, self.n) >= 128
        return tuple(large and self.dtype != torch.float64 and not whole for whole in self.in_vectors)  # type: ignore


class Tile(Form[Any]):
    """A block owns a tile of the result, or of the partial sums of a share of k.

    mma: half types by tensor cores; where a GPU's have not the type, its kernel takes FMAs. fma: fp32 and fp64 by FMAs.

    Args:
        kernel: of a family; of the wide tile another `Kernel` of the same function.
        wide: whether the family's list has the wide tile.
    """

    sizes: dict[str, tuple[int, ...]] = {"mma": TILES, "fma": TILES}  # by engine; fp64 has ONE_TILE alone

    def __init__(self, kernel: Kernel, engine: str, tile: int, wide: bool) -> None:
        self.kernel, self.engine, self.tile, self.wide = kernel, engine, tile, wide
        self.name = f"{engine}_{tile}"
        self.summary = f"a block has a tile of {min(tile, 128)} x {tile} by {engine.upper()}"

    def why_not(self, problem: Any, gpu: Gpu) -> str | None:
        """An engine serves its dtypes, the wide tile whole vectors alone."""
        p = gemm_of(problem)
        if (p.dtype in HALF) != (self.engine == "mma"):
            return f"{p.dtype} is multiplied by {'mma' if p.dtype in HALF else 'fma'}"
        if p.dtype is torch.float64 and self.tile != ONE_TILE:
            return f"fp64 has the tile of {ONE_TILE} alone"
        return _why_not_wide(p, gpu) if self.tile == WIDE else None

    def why_slower(self, problem: Any, gpu: Gpu) -> str | None:
        """A model of the time chooses the tile."""
        p = gemm_of(problem)
        wide = self.wide and _why_not_wide(p, gpu) is None
        among = tuple(tile for tile in tiles_for(p.dtype, wide) if tile == WIDE or tile in self.sizes[self.engine])
        best = choose(p.m, p.columns, p.k, p.batches, among, p.dtype, gpu.multiprocessors)[0]
        return None if best == self.tile else f"the tile of {best} should take less time"

    def launch(self, problem: Any, gpu: Gpu) -> Launch:
        """A block for each tile and share of k."""
        p = gemm_of(problem)
        sms = gpu.multiprocessors
        _, splits, k_split = choose(p.m, p.columns, p.k, p.batches, (self.tile,), p.dtype, sms)
        return Launch(
            self.kernel,
            _tiles(p.m, p.columns, p.batches, self.tile) * splits,
            threads(p.dtype, self.tile),
            shared_bytes(p.dtype, self.tile),
            {"T": p.dtype, "TILE": self.tile},
            args=(packed(p, splits, k_split),),
        )


def tiles(kernel: Kernel, wide: Kernel | None = None, form: type[Tile] = Tile) -> list[Tile]:
    """The forms of a family's GEMM."""
    found = [] if wide is None else [form(wide, "mma", WIDE, True)]
    each = [(engine, tile) for engine, sizes in form.sizes.items() for tile in sorted(sizes, reverse=True)]
    return [*found, *(form(kernel, engine, tile, wide is not None) for engine, tile in each)]


gemm_fwd = Kernel("gemm.cu", "gemm_fwd<T, TILE>", **TILED)
gemm_wide = Kernel("gemm.cu", "gemm_fwd<T, TILE>", T=HALF, TILE=(WIDE,))
gemm_sum = Kernel("gemm.cu", "gemm_sum<T>", T=FLOATING)

DENSE = tiles(gemm_fwd, gemm_wide)  # of matmul, linear and linear_act


def why_not_cublas(problem: Any, gpu: Gpu) -> str | None:
    """Return why the portable kernels are faster than cuBLAS: small fp32, or rows off 16-byte boundaries; else None."""
    p = gemm_of(problem)
    work = p.m * p.n * p.k
    if p.dtype is torch.float32 and work <= SMALL_FP32:
        return f"fp32 products of {SMALL_FP32} multiply-adds at most are as fast by FMAs, with k split"
    if gpu.capability == 9 and any(p.worth_padding) and p.dtype in HALF and work >= LARGE_UNALIGNED:
        return "operands off 16-byte boundaries are copied, and multiplied by wgmma, at several times the speed"
    return None


def gemm_of(problem: Any) -> Problem:
    """The GEMM of a family's problem."""
    return problem if isinstance(problem, Problem) else problem.gemm


def prepared(problem: Problem, launch: Launch, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return a and b, copied where that is worth its time or the wide tile cannot read them; None if neither is copied."""
    wide, pads = launch.template.get("TILE", WIDE) == WIDE, problem.worth_padding  # those by wgmma too
    if not wide and not any(pads):
        return None
    copies = [pad or (wide and not aligned(t)) for t, pad in zip((a, b), pads)]
    return (padded(a) if copies[0] else a, padded(b) if copies[1] else b) if any(copies) else None


def packed(p: Problem, splits: int, k_split: int) -> np.ndarray:
    """`struct Gemm`."""
    layouts = (*p.a.packed(p.k), *p.b.packed(p.k), *p.out.packed(p.n))
    sizes = (p.m, p.n, p.k, p.batches, int(p.ones), splits, k_split)
    return np.array((*sizes, *divisor(p.batch_inner), int(p.bias_along_m), *layouts), dtype=np.int64)


def divisor(value: int) -> tuple[int, int, int]:
    """`struct Divisor`: (divisor, magic, shift), with n / divisor = (umulhi(n, magic) + n) >> shift."""
    value = max(value, 1)
    shift = (value - 1).bit_length()
    return value, ((1 << 32) * ((1 << shift) - value)) // value + 1, shift


def run(
    launch: Launch, a: Tensor, b: Tensor, y: Tensor | None, bias: Tensor | None = None, column: Tensor | None = None
) -> None:
    """Launch a GEMM, and the kernel that adds up its partial sums; `column`: the sums of the rows of a."""
    gemm = launch.args[0]
    partials = workspace(gemm, a)
    launch(a, b, bias, y, column, partials)
    add_splits(gemm, partials, a.dtype, y, bias, column=column)


def run_dense(
    launch: Launch,
    a: Tensor,
    b: Tensor,
    y: Tensor | None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    function: int = 0,
    kept: Tensor | None = None,
    column: Tensor | None = None,
) -> None:
    """Run a form of DENSE with its epilogue; `function` is an index into FUNCTIONS, of which 0 is none."""
    gemm = launch.args[0]
    partials = workspace(gemm, a)
    launch(a, b, bias, residual, function, y, kept, column, partials)
    add_splits(gemm, partials, a.dtype, y, bias, residual, function, kept, column)


def workspace(gemm: np.ndarray, like: Tensor) -> Tensor | None:
    """Allocate the partial sums of a `struct Gemm`; None where k is not split."""
    m, n, _, batches, ones, splits = (int(value) for value in gemm[:6])
    if splits == 1:
        return None
    wide = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.empty(batches * m * ceil_div(n + ones, 8) * 8 * splits, dtype=wide, device=like.device)


def add_splits(
    gemm: np.ndarray,
    partials: Tensor | None,
    dtype: torch.dtype,
    y: Tensor | None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    function: int = 0,
    kept: Tensor | None = None,
    column: Tensor | None = None,
) -> None:
    """Add up partial sums in order where k is split, and apply the epilogue to the result."""
    if partials is None:
        return
    splits = int(gemm[5])
    block = (32, 8) if splits >= 16 else (256, 1)
    sums = gemm_sum[ceil_div(partials.numel() // splits, block[0]), block, 256 * partials.element_size()]
    sums(partials, bias, residual, function, y, kept, column, gemm, T=dtype)


def _why_not_wide(p: Problem, gpu: Gpu) -> str | None:
    """Return why the wide tile cannot compute a problem of a half type, or None."""
    if not all(p.in_vectors) or p.ones:
        return "its operands must be whole vectors"
    shared = shared_bytes(p.dtype, WIDE)
    return f"it takes {shared} bytes of shared memory" if gpu.shared < shared else None


def _tiles(m: int, n: int, batches: int, tile: int) -> int:
    return ceil_div(m, min(tile, 128)) * ceil_div(n, tile) * batches


def choose(
    m: int, n: int, k: int, batches: int, among: tuple[int, ...], dtype: torch.dtype, sms: int
) -> tuple[int, int, int]:
    """(tile, splits, k per split) that should take the least time."""
    return _best(m, n, k, batches, among, dtype, sms)[1:]


def least_time(p: Problem, sms: int) -> float:
    """Microseconds that the best tile should take."""
    wide = all(p.in_vectors) and not p.ones
    return _best(p.m, p.columns, p.k, p.batches, tiles_for(p.dtype, wide), p.dtype, sms)[0]


@functools.lru_cache(maxsize=4096)
def _best(
    m: int, n: int, k: int, batches: int, among: tuple[int, ...], dtype: torch.dtype, sms: int
) -> tuple[float, int, int, int]:
    """(microseconds, tile, splits, k per split) of what should take the least time, by a rough model.

    A multiprocessor multiplies its blocks' tiles one after the other, however many it holds; a block alone waits for
    memory at each step; and split sums are written, read again and added by a second kernel.
    """
    speed = _FMA64 if dtype == torch.float64 else _FMA if dtype == torch.float32 else _TENSOR_CORES
    best: tuple[float, int, int, int] | None = None
    for tile in among:
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
    return best


def tiles_for(dtype: torch.dtype, wide: bool = False) -> tuple[int, ...]:
    """The tiles that there are kernels for."""
    if dtype == torch.float64:
        return (ONE_TILE,)
    return (*TILES, WIDE) if wide and dtype in HALF else TILES


def _splittings(tiles: int, k: int, sms: int) -> list[tuple[int, int]]:
    """(splits, k per split) that give each multiprocessor 1, 2 ... blocks, and that of no split."""
    found = []
    for splits in (1, *(per_sm * sms // max(tiles, 1) for per_sm in (1, 2, 3, 4))):
        splits = max(1, min(splits, k // MIN_SPLIT))
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
    """Return why the kernels cannot index a problem, or None."""
    if any(size > MAX_INDEX for size in sizes):
        return f"a dimension over {MAX_INDEX}"
    return "over 2^31 - 1 tiles" if tiles > 2**31 - 1 else None


def check_dtypes(**tensors: Tensor | None) -> None:
    """Check that all tensors have one dtype, unless autocast casts them to one; it leaves float64 alone."""
    given = [(name, value) for name, value in tensors.items() if value is not None]
    name, first = given[0]
    autocast = arguments.autocast(first.device)

    def key(dtype: torch.dtype) -> Any:
        return "cast by autocast" if autocast and dtype.is_floating_point and dtype != torch.float64 else dtype

    for other, value in given[1:]:
        if key(value.dtype) != key(first.dtype):
            raise InputError(f"{other} is {value.dtype}, but {name} is {first.dtype}; expected one dtype")
