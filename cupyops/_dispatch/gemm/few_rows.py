"""Products of at most 64 rows, which are bound by reading the weights once (cuda_src/few_rows.cu)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..._kernel.kernel import HALF, Kernel, ceil_div
from ..._util.strides import aligned
from ..core.forms import Form, Launch
from ..core.gpu import Gpu
from . import gemm

DTYPES = (*HALF, torch.float32)
NORMALISED = (torch.bfloat16, torch.float32)  # x times the weight of a norm may be too large for fp16
MOST_ROWS = 64
MOST_PARTS = 4  # weights of one launch
PAIR = 32  # columns of a tile in which as many of a gate and of what it is multiplied by take turns, by 16
LEAST_WEIGHT = 2**20  # elements, from which on reading them takes longer than a launch
LARGE_WEIGHT = (
    2**27
)  # elements of one weight, from which on cuBLAS reads it sooner: measured of 2^25, and of 128256 x 2048
LONG_ROW = 8192  # bytes of a row of a weight, from which on two blocks share it where tiles are few
PREFETCHED = 48 << 10  # bytes of a block's weights that L2 is asked for while the launch before ends


class Tuned(NamedTuple):
    """Template values of a kernel by MMA."""

    M: int  # rows of x, in 8
    N: int  # columns of a tile, in 16
    WARPS: int
    STAGES: int
    CHUNKS: int  # of 64 bytes of a row of a weight, in a stage
    BLOCKS: int = 2  # of a multiprocessor at one time

    @property
    def rows(self) -> int:
        """Number of rows of x that a block has."""
        return 8 * self.M

    @property
    def columns(self) -> int:
        """Number of columns of a tile."""
        return 16 * self.N

    def shared(self, norm: bool = False) -> int:
        """Bytes of shared memory of the rings, in whose place the sums are."""
        return self.WARPS * self.STAGES * self.CHUNKS * (2 * self.N + self.M + norm) * 512


class TunedFma(NamedTuple):
    """Template values of a kernel by FMA."""

    ROWS: int
    N: int  # columns of a warp
    WARPS: int
    STAGES: int
    BLOCKS: int = 2  # of a multiprocessor at one time

    @property
    def rows(self) -> int:
        """Number of rows of x that a block has."""
        return self.ROWS

    @property
    def columns(self) -> int:
        """Number of columns of a tile."""
        return self.N * self.WARPS

    def shared(self, norm: bool = False) -> int:
        """Bytes of shared memory of the rings, and of the sums."""
        return self.WARPS * self.STAGES * self.N * 512 + self.ROWS * (self.columns + 1) * 4


# Measured on an H200 with layers of Llama of 1.2 B parameters: 1, 8, 16, 32 and 64 rows of bf16, 1 and 8 of fp32; fp16 is
# taken as bf16. The first that has as many rows and finds room in shared memory is taken;
# of a gate those of GATED, which find room on every card.
BY_MMA = (Tuned(1, 2, 8, 3, 2, 1), Tuned(2, 2, 8, 3, 2, 1), Tuned(4, 2, 8, 3, 2, 1), Tuned(8, 2, 8, 2, 2, 1))
GATED = (Tuned(1, 4, 8, 2, 1, 2), Tuned(2, 4, 8, 2, 1, 2), Tuned(4, 4, 8, 2, 1, 2), Tuned(8, 4, 4, 3, 1, 2))
BY_FMA = (TunedFma(1, 4, 8, 4), TunedFma(4, 4, 8, 4), TunedFma(8, 4, 8, 4))  # which take more rows in groups
# rows up to which it is measured faster, on an H200: of one weight, of a gate, of several weights of one x, and of these
# behind a norm; of float16 what bfloat16 gave
MOST_MEASURED = {
    torch.float16: (16, 16, 64, 16),
    torch.bfloat16: (16, 16, 64, 16),
    torch.float32: (8, 8, 8, 8),
}


def _domain(among: Sequence[Tuned | TunedFma]) -> dict[str, Any]:
    """Template values of a kernel, each combination of which is one of those that are tuned."""
    every = [one._asdict() for one in among]
    return {name: tuple(sorted({one[name] for one in every})) for name in every[0]}


few_rows_mma = Kernel(
    "few_rows.cu",
    "few_rows_mma<T, M, N, WARPS, STAGES, CHUNKS, BLOCKS, NORM>",
    T=HALF,
    **_domain(BY_MMA + GATED),
    NORM=(False, True),
    where=lambda T, M, N, WARPS, STAGES, CHUNKS, BLOCKS, NORM: (
        (M, N, WARPS, STAGES, CHUNKS, BLOCKS) in BY_MMA + GATED and (not NORM or T in NORMALISED)
    ),
    strided=True,
)
few_rows_fma = Kernel(
    "few_rows.cu",
    "few_rows_fma<T, ROWS, N, WARPS, STAGES, BLOCKS, NORM>",
    T=(torch.float32,),
    **_domain(BY_FMA),
    NORM=(False, True),
    where=lambda ROWS, N, WARPS, STAGES, BLOCKS: (ROWS, N, WARPS, STAGES, BLOCKS) in BY_FMA,
    strided=True,
)


def why_slower(
    rows: int,
    weight: int,
    dtype: torch.dtype,
    gpu: Gpu,
    weights: int = 1,
    gated: bool = False,
    norm: bool = False,
) -> str | None:
    """Return why PyTorch's product, or another form, is faster, or None: what measuring may change is all here.

    Args:
        rows: of x.
        weight: elements of all weights.
        dtype: of both.
        weights: how many there are, of the same x.
        gated: two of them are those of a gate.
        norm: an RMS norm of x comes first.
    """
    if weight < LEAST_WEIGHT:
        return f"reading less than {LEAST_WEIGHT} elements of weight is not what takes the time"
    if not gpu.library:
        return None
    most = MOST_MEASURED[dtype][3 if norm else 2 if weights > 1 else 1 if gated else 0]
    if rows > most:
        return f"it is measured to be as fast as cuBLAS up to {most} rows alone"
    if weights == 1 and not gated and weight >= LARGE_WEIGHT:
        return "cuBLAS reads so large a weight sooner, in 126 us where this takes 135"
    return None


class Division(NamedTuple):
    """Columns of the result that a block has, and whether two weights are those of a gate."""

    columns: int
    gated: bool


class FewRows(Form[Any]):
    """A block reads rows of a weight once for all rows of x."""

    name = "few_rows"
    summary = "a block, or a cluster that shares k, reads its rows of the weight once for all rows of x"
    uses = (few_rows_mma, few_rows_fma)

    def __init__(self, gated: bool = False) -> None:
        self.gated = gated

    def why_not(self, problem: Any, gpu: Gpu) -> str | None:
        """It takes few rows whose vectors, and those of the weight, lie along k."""
        p = gemm.gemm_of(problem)
        if 0 < gpu.capability < 8:
            return "its instructions are of compute capability 8.0"
        if p.dtype not in DTYPES:
            return f"it is not for {p.dtype}"
        if p.m > MOST_ROWS:
            return f"there are more than {MOST_ROWS} rows"
        if p.batches > 1 or p.ones or p.bias_along_m or p.out[:2] != (p.n, 1) or not (p.m and p.n and p.k):
            return "it has no batches, no column of ones, no bias along m, no sizes of 0, and contiguous results"
        if _tuned(p.m, p.dtype, gpu, self.gated, False) is None:
            return "there is too little shared memory"
        if p.a.k != 1 or p.b.k != 1 or not all(p.in_vectors) or p.k * p.dtype.itemsize % 16:
            return "the rows of x and of the weight must be contiguous, and whole vectors"
        return None

    def why_slower(self, problem: Any, gpu: Gpu) -> str | None:
        """Ask what was measured, by rows and size of the weight."""
        p = gemm.gemm_of(problem)
        return why_slower(p.m, p.n * p.k * (1 + self.gated), p.dtype, gpu, gated=self.gated)

    def launch(self, problem: Any, gpu: Gpu) -> Launch:
        """A block, or a cluster, for each tile of columns."""
        p = gemm.gemm_of(problem)
        return launch_of(p.m, (p.n,), p.k, p.dtype, gpu, self.gated)


def is_chosen(rows: int, features: int, k: int, dtype: torch.dtype, gpu: Gpu, form: FewRows) -> bool:
    """Return True if a layer of contiguous operands is computed by a form of these kernels."""
    problem = gemm.Problem(rows, features, k, gemm.Layout(k, 1), gemm.Layout(k, 1), gemm.Layout(features, 1), dtype)
    return form.why_not(problem, gpu) is None and form.why_slower(problem, gpu) is None


def are_served(problems: Sequence[gemm.Problem], gpu: Gpu, gated: bool, norm: bool) -> bool:
    """Return True if one launch can compute these products of the same x, with an RMS norm before them or without."""
    first = problems[0]
    if len(problems) > MOST_PARTS or any(FORM.why_not(one, gpu) is not None for one in problems):
        return False
    return not norm or (first.dtype in NORMALISED and _tuned(first.m, first.dtype, gpu, gated, True) is not None)


def _tuned(rows: int, dtype: torch.dtype, gpu: Gpu, gated: bool, norm: bool) -> Tuned | TunedFma | None:
    """Return the template values for so many rows on a card; None where its shared memory is too little."""
    by_mma = GATED if gated else BY_MMA + GATED
    among: Sequence[Tuned | TunedFma] = by_mma if dtype in HALF else BY_FMA
    wide = [one for one in among if rows <= one.rows] or among[-1:]
    return next((one for one in wide if one.shared(norm) <= gpu.shared), None)


@functools.lru_cache(maxsize=4096)
def launch_of(
    rows: int, features: tuple[int, ...], k: int, dtype: torch.dtype, gpu: Gpu, gated: bool = False, norm: bool = False
) -> Launch:
    """The launch for weights of so many features each; of a gate those of one of the two. norm: x has an RMS norm first."""
    tuned = _tuned(rows, dtype, gpu, gated, norm)
    assert tuned is not None
    columns, groups = tuned.columns, ceil_div(rows, tuned.rows)
    tiles = sum(ceil_div(n * (1 + gated), columns) for n in features) * groups
    received = (min(rows, tuned.rows) * (columns + 2 * norm) + 2 * PAIR) * 4  # of two blocks
    pays = k * dtype.itemsize >= LONG_ROW and tiles <= gpu.multiprocessors
    cluster = 2 if pays and gpu.has_clusters and tuned.shared(norm) + received <= gpu.shared else 1
    return Launch(
        few_rows_mma if dtype in HALF else few_rows_fma,
        tiles * cluster,
        32 * tuned.WARPS,
        tuned.shared(norm) + (received if cluster > 1 else 0),
        {"T": dtype, **tuned._asdict(), "NORM": norm},
        cluster=cluster if cluster > 1 else None,
        overlap=gpu.has_clusters,
        extra=Division(columns, gated),
    )


FORM = FewRows()


def serves(launch: Launch[Any]) -> bool:
    """Return True if a launch is of these kernels."""
    return launch.kernel in FewRows.uses


def run(
    launch: Launch[Division],
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    results: Sequence[Tensor],
    residual: Tensor | None = None,
    function: int = 0,
    kept: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> None:
    """Launch it for a matrix x and weights (n, k), of a gate both; the results, residual and kept are contiguous.

    Args:
        function: an index into `activations.FUNCTIONS`.
        kept: where what the function is given goes: as the result, or of a gate [2, m, n] or [m, 2 n].
        norm: the weight of an RMS norm of x, contiguous, of a launch for that.
    """
    features = tuple(one.shape[0] for one in weights)
    n = features[0]
    strides = (0, 0) if kept is None else (n, x.shape[0] * n) if kept.shape[-1] == n else (2 * n, n)
    pitches = tuple(one.stride(0) * one.element_size() for one in weights)
    columns, gated = launch.extra
    prefetch = PREFETCHED // columns // 16 * 16 if launch.overlap else 0  # bytes of a row of a weight
    of = (x.shape[0], x.shape[1], x.stride(0), function, int(gated), *strides, prefetch)
    sizes = _sizes(of, features, pitches, columns)
    launch(x, *_filled(weights), *_filled(biases), *_filled(results), residual, kept, norm, eps, sizes)


@functools.lru_cache(maxsize=4096)
def _sizes(of: tuple[int, ...], features: tuple[int, ...], pitches: tuple[int, ...], columns: int) -> Any:
    """`struct few_rows::Sizes`; tiles behind the last part are never looked for."""
    tiles, total = [], 0
    for n in features:
        total += ceil_div(n, columns)
        tiles.append(total)
    tiles += [2**31 - 1] * (MOST_PARTS - len(tiles))
    if of[4]:
        tiles = [2**31 - 1] * MOST_PARTS
    return np.array((*of, *_filled(features, 0), *_filled(pitches, 0), *tiles), dtype=np.int64)


def _filled(values: Sequence[Any], by: Any = None) -> list[Any]:
    return [*values, *[by] * (MOST_PARTS - len(values))]


def whole(matrix: Tensor) -> Tensor:
    """Return the matrix if it begins at a 16-byte boundary; else a copy that does."""
    return matrix if aligned(matrix) else gemm.padded(matrix)
