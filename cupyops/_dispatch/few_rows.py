"""Products of at most 64 rows, which are bound by reading the weights once (cuda_src/few_rows.cu)."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._kernel.kernel import HALF, Kernel, ceil_div
from .._util.strides import aligned
from . import gemm
from .forms import Form, Launch
from .gpu import Gpu

DTYPES = (*HALF, torch.float32)
NORMALISED = (torch.bfloat16, torch.float32)  # x times the weight of a norm may be too large for fp16
MOST_ROWS = 64
MOST_PARTS = 4  # weights of one launch
PAIR = 32  # columns of a tile in which as many of a gate and of what it is multiplied by take turns, by 16
LEAST_WEIGHT = 2**20  # elements, from which on reading them takes longer than a launch
RAMP = 256  # of k: how much a block could read while it begins and ends
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


# The first that has as many rows, or the last, is taken.
BY_MMA = (Tuned(1, 2, 4, 4, 2), Tuned(2, 2, 4, 4, 2), Tuned(4, 4, 4, 4, 1), Tuned(8, 4, 4, 3, 1))
BY_FMA = (TunedFma(1, 4, 8, 5), TunedFma(4, 4, 8, 5), TunedFma(8, 4, 8, 5), TunedFma(16, 4, 8, 6, 1))


def _domain(among: Sequence[Tuned | TunedFma]) -> dict[str, Any]:
    """Template values of a kernel, each combination of which is one of those that are tuned."""
    every = [one._asdict() for one in among]
    return {name: tuple(sorted({one[name] for one in every})) for name in every[0]}


few_rows_mma = Kernel(
    "few_rows.cu",
    "few_rows_mma<T, M, N, WARPS, STAGES, CHUNKS, BLOCKS, NORM>",
    T=HALF,
    **_domain(BY_MMA),
    NORM=(False, True),
    where=lambda T, M, N, WARPS, STAGES, CHUNKS, BLOCKS, NORM: (
        (M, N, WARPS, STAGES, CHUNKS, BLOCKS) in BY_MMA and (not NORM or T in NORMALISED)
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


def why_slower(rows: int, weight: int, dtype: torch.dtype) -> str | None:
    """Return why PyTorch's product, or another form, is faster, or None: what measuring may cut is all here.

    Args:
        rows: of x.
        weight: elements of all weights.
        dtype: of both.
    """
    if weight < LEAST_WEIGHT:
        return f"reading less than {LEAST_WEIGHT} elements of weight is not what takes the time"
    return None


class FewRows(Form[Any]):
    """A block reads rows of a weight once for all rows of x.

    Args:
        gated: whether the product of two weights is followed by a gate.
    """

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
        if p.a.k != 1 or p.b.k != 1 or not all(p.in_vectors) or p.k * p.dtype.itemsize % 16:
            return "the rows of x and of the weight must be contiguous, and whole vectors"
        return None

    def why_slower(self, problem: Any, gpu: Gpu) -> str | None:
        """Ask what was measured, by rows and size of the weight."""
        p = gemm.gemm_of(problem)
        return why_slower(p.m, p.n * p.k * (1 + self.gated), p.dtype)

    def launch(self, problem: Any, gpu: Gpu) -> Launch:
        """A block, or a cluster, for each tile of columns."""
        p = gemm.gemm_of(problem)
        return launch_of(p.m, (p.n,), p.k, p.dtype, gpu, self.gated)


def is_chosen(rows: int, features: int, k: int, dtype: torch.dtype, gpu: Gpu) -> bool:
    """Return True if a layer of contiguous operands is computed by these kernels."""
    problem = gemm.Problem(rows, features, k, gemm.Layout(k, 1), gemm.Layout(k, 1), gemm.Layout(features, 1), dtype)
    return FORM.why_not(problem, gpu) is None and FORM.why_slower(problem, gpu) is None


def are_served(problems: Sequence[gemm.Problem], gpu: Gpu, norm: bool) -> bool:
    """Return True if one launch can compute these products of the same x, with an RMS norm before them or without."""
    if len(problems) > MOST_PARTS or (norm and problems[0].dtype not in NORMALISED):
        return False
    return all(FORM.why_not(one, gpu) is None for one in problems)


@functools.lru_cache(maxsize=4096)
def launch_of(
    rows: int, features: tuple[int, ...], k: int, dtype: torch.dtype, gpu: Gpu, gated: bool = False, norm: bool = False
) -> Launch:
    """The launch for weights of so many features each; of a gate those of one of the two. norm: x has an RMS norm first."""
    among: Sequence[Tuned | TunedFma] = BY_MMA if dtype in HALF else BY_FMA
    tuned = next((one for one in among if rows <= one.rows), among[-1])
    columns, groups = tuned.columns, ceil_div(rows, tuned.rows)
    tiles = sum(ceil_div(n * (1 + gated), columns) for n in features) * groups
    cluster = _cluster(tiles, k, gpu, tuned.BLOCKS) if gpu.has_clusters else 1
    received = (min(rows, tuned.rows) * (columns + norm * cluster) + PAIR * cluster) * 4 if cluster > 1 else 0
    return Launch(
        few_rows_mma if dtype in HALF else few_rows_fma,
        tiles * cluster,
        32 * tuned.WARPS,
        tuned.shared(norm) + received,
        {"T": dtype, **tuned._asdict(), "NORM": norm},
        cluster=cluster if cluster > 1 else None,
        overlap=gpu.has_clusters,
        extra={"columns": columns, "gated": gated},
    )


def _cluster(tiles: int, k: int, gpu: Gpu, blocks: int) -> int:
    """Blocks that share the k of a tile: with those that run at one time a cluster more takes another wave."""
    at_once = gpu.multiprocessors * blocks
    return min((1, 2, 4, 8), key=lambda share: ceil_div(tiles * share, at_once) * (ceil_div(k, share) + RAMP))


FORM = FewRows()


def serves(launch: Launch) -> bool:
    """Return True if a launch is of these kernels."""
    return launch.kernel in FewRows.uses


def run(
    launch: Launch,
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
    extra = launch.extra
    prefetch = PREFETCHED // extra["columns"] // 16 * 16 if launch.overlap else 0  # bytes of a row of a weight
    of = (x.shape[0], x.shape[1], x.stride(0), function, int(extra["gated"]), *strides, prefetch)
    sizes = _sizes(of, features, pitches, extra["columns"])
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
