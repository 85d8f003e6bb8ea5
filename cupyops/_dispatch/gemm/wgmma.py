"""Forms of products of half types on Hopper's tensor cores (cuda_src/gemm_wgmma.cu), for matmul and linear.

TMA reads and writes by tensor maps: of an operand the rows of k, or the rows of its other index, must be whole vectors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._kernel.kernel import Kernel, ceil_div
from ..._kernel.launch.tensor_map import tensor_map
from ..core.forms import Form, Launch
from ..core.gpu import Gpu
from ..core.library import ByPyTorch
from . import gemm
from .gemm import HALF, Layout, Problem

K = 64  # of k in a stage
THREADS = 384
LINE = 128  # bytes of a line of a box, which is the swizzle
_BOTH = (False, True)

# multiply-adds per microsecond of one multiprocessor, by the share that a form reaches of it on an H100
_RATE = 3.0e6
_START = 4.0  # microseconds before the first tile is multiplied, and after the last is
FEW_K = 512  # up to which stores take as long as products
LITTLE_K = 32  # below which TMA fills more than half of a stage with zeros, which take as long as what is there
FULL = 0.9  # of the multiprocessors with work of use, from which on a form is at cuBLAS's speed, measured on an H100
FEW_WAVES, LITTLE = 3, 7168  # waves, and their k in all, up to which it is not
LARGE_OF_ONE_STAGE = 2**25  # elements of batched results of a k of one stage, from which on cuBLAS stores them sooner


class Operand(NamedTuple):
    """An operand or the result as TMA sees it: sizes and strides, the batch first, and the box of a copy."""

    sizes: tuple[int, int, int]
    strides: tuple[int, int, int]
    box: tuple[int, int, int]
    moves: bool  # whether each of a batch has its own

    def map(self, tensor: Tensor, written: bool = False) -> Any:
        """The tensor map; the swizzle is as long as a line of the box."""
        viewed = torch.as_strided(tensor, self.sizes, self.strides)
        return tensor_map(viewed, self.box, swizzle=self.box[2] * tensor.element_size(), written=written)


class Operands(NamedTuple):
    """Operands and the result of a launch; and what some forms have more."""

    a: Operand
    b: Operand
    y: Operand
    kept: Operand | None = None  # values that backward reads
    parts: int = 0  # of a launch that leaves moments
    step: int = 0  # rows of a launch at a time


class Tile(Form[Any]):
    """A persistent block multiplies by wgmma what a producer warp has TMA bring.

    Args:
        m, n: the tile of a block.
        stages: of the ring.
        slots: pieces of the result that each consumer can have on their way at once.
        share: what it reaches of the peak.
        cluster: blocks that share the second operand.
        split: blocks that share a tile's k, of products of bytes.
        pingpong: each consumer warpgroup has a tile of its own.
        late: a tile is stored during the main loop of the next.
        layouts: (a_mn, b_mn) that there are kernels for: whether an operand is stored with k outside.
    """

    def __init__(
        self,
        name: str,
        m: int,
        n: int,
        stages: int,
        slots: int,
        share: float,
        cluster: int = 1,
        split: int = 1,
        pingpong: bool = False,
        late: bool = False,
        layouts: tuple[tuple[bool, bool], ...] = ((False, False), (False, True), (True, True)),
    ) -> None:
        self.name, self.m, self.n, self.stages, self.slots, self.share = name, m, n, stages, slots, share
        self.columns = n  # of the result
        self.cluster, self.split, self.layouts, self.pingpong = cluster, split, layouts, pingpong
        how = (
            "each consumer a tile" if pingpong else f"k split over a cluster of {split}" if split > 1 else "cooperative"
        )
        self.summary = f"a persistent block has tiles of {m} x {n} by WGMMA and TMA; {how}"
        beside = m == 64 and not pingpong
        self.piece = min((n // 2 if beside else n) // split, K)
        self.fixed: dict[str, Any] = dict(M=m, N=n, STAGES=stages, SLOTS=slots, CLUSTER=cluster)
        self.fixed |= dict(PINGPONG=pingpong, LATE=late)
        self.kernel = self.made()

    def made(self) -> Kernel:
        """The kernel of this form."""
        return self.kernel_of("gemm_wgmma.cu", "gemm_wgmma", **self.stored())

    def stored(self) -> dict[str, Any]:
        """Operand layouts that a kernel takes, as a part of its domain."""
        return dict(A_MN=_BOTH, B_MN=_BOTH, where=lambda A_MN, B_MN: (A_MN, B_MN) in self.layouts)

    def kernel_of(self, file: str, function: str, **more: Any) -> Kernel:
        """A kernel of what is fixed, and of more template values; F, an activation, comes before all."""
        domain: dict[str, Any] = {name: (value,) for name, value in self.fixed.items()} | more
        names = sorted((name for name in domain if name != "where"), key=lambda name: name != "F")
        return Kernel(file, f"{function}<T, {', '.join(names)}>", arch="sm_90a", T=HALF, **domain)

    def why_not(self, problem: Any, gpu: Gpu) -> str | None:
        """It takes half types whose rows are whole vectors, on Hopper alone."""
        p = gemm.gemm_of(problem)
        if gpu.capability != 9:
            return "wgmma is of compute capability 9.0"
        if p.dtype not in HALF:
            return f"{p.dtype} is not multiplied by wgmma"
        if gpu.shared < self.shared:
            return f"it takes {self.shared} bytes of shared memory"
        if p.ones or p.bias_along_m or p.out.k != 1 or not (p.m and p.n and p.k):
            return "it has no column of ones, no bias along m, no sizes of 0, and results in rows"
        if not all(p.in_vectors):
            return "its operands must be whole vectors"
        if None in (_batch(p, p.a), _batch(p, p.b)):
            return "a batch must be one stride apart"
        if _stored(p) not in self.layouts:
            return "it has no kernel for this layout"
        return None

    def why_slower(self, problem: Any, gpu: Gpu) -> str | None:
        """A model of the time chooses among all tiles."""
        p = gemm.gemm_of(problem)
        others = [form.time(p, gpu) for form in FORMS if form.why_not(problem, gpu) is None]
        if min(others, default=self.time(p, gpu)) < self.time(p, gpu):
            return "another tile should take less time"
        if gpu.library and p.out.i % 8 == 0 and p.k % 8 == 0:
            return self._why_cublas(p, gpu)
        # of other sizes, also in padded rows, cuBLAS has a fraction of its speed
        portable = gemm.least_time(p, gpu.multiprocessors)
        return f"mma should take {portable:.1f} us" if portable < self.time(p, gpu) else None

    def _why_cublas(self, p: Problem, gpu: Gpu) -> str | None:
        """Return why cuBLAS is faster on an H100, by more than 3%, or None; benchmarks/bench_products.py measures it."""
        full, waves = self.full(p, gpu), self._waves(p, gpu)
        if full < FULL:
            return f"cuBLAS splits k, or has smaller tiles: {full:.0%} of the multiprocessors have work"
        if waves <= FEW_WAVES and waves * p.k < LITTLE:
            return "cuBLAS begins and ends sooner, which counts in so little work"
        if p.k < LITTLE_K:
            return f"cuBLAS reads a k below {LITTLE_K} sooner"
        if p.k <= FEW_K and p.batches > 1 and _stored(p) == (True, True):
            return "cuBLAS reads batches whose k lies outside sooner, where there is little of it"
        if p.k <= K and p.m * p.n * p.batches > LARGE_OF_ONE_STAGE:
            return "cuBLAS stores large results of so little k sooner"
        if self.pingpong and p.k > FEW_K and p.batches == 1:
            return f"tiles of {self.m} x {self.n} are for a k of {FEW_K} at most"
        return None

    def launch(self, problem: Any, gpu: Gpu) -> Launch[Operands]:
        """Launch as many clusters as run at once."""
        p = gemm.gemm_of(problem)
        clusters = min(self._tiles(p), max(1, gpu.multiprocessors // self.cluster))
        a_mn, b_mn = _stored(p)
        operands = Operands(
            _operand(p, p.a, p.m, a_mn, self.m),
            _operand(p, p.b, p.n, b_mn, self.n // self.cluster),
            Operand((p.batches, p.m, p.n), (p.m * p.out.i, p.out.i, 1), (1, K, self.piece), True),
        )
        pitch = p.out.i if p.out.i % 8 else 0
        group = max(1, round((gpu.multiprocessors / self.cluster * self.n / (self.m * self.cluster)) ** 0.5))
        moves = int(operands.a.moves), int(operands.b.moves)
        return Launch(
            self.kernel,
            clusters * self.cluster,
            THREADS,
            self.shared,
            {"T": p.dtype, **self.fixed, "A_MN": a_mn, "B_MN": b_mn},
            cluster=self.cluster if self.cluster > 1 else None,
            extra=operands,
            args=(p.m, p.n, p.k, p.batches, *moves, pitch, group),
        )

    @property
    def shared(self) -> int:
        """Bytes of shared memory: the ring, the slots and biases of two consumers, the barriers."""
        return (
            self.stages * (self.m + self.n) * LINE
            + 4 * self.slots * K * self.piece
            + 8 * self.n
            + 16 * self.stages
            + 16
        )

    def time(self, p: Problem, gpu: Gpu) -> float:
        """Microseconds, by waves of tiles."""
        share = self.share if p.k > FEW_K or not self.pingpong else 1.02  # it stores while it multiplies
        return _START + self._waves(p, gpu) * self.m * self.n * ceil_div(p.k, self.split) / (_RATE * share)

    def full(self, p: Problem, gpu: Gpu) -> float:
        """Useful part of the tiles' work, times the filled part of the waves; the latter alone if memory is the limit."""
        blocks, tiles = self.cluster * self.split, self._tiles(p)
        filled = tiles * blocks / (self._waves(p, gpu) * (gpu.multiprocessors // blocks * blocks))
        if self.split > 1:
            return filled
        return filled * p.m * p.n * p.batches / (tiles * self.cluster * self.m * self.n)

    def _waves(self, p: Problem, gpu: Gpu) -> int:
        return ceil_div(self._tiles(p), max(1, gpu.multiprocessors // (self.cluster * self.split)))

    def _tiles(self, p: Problem) -> int:
        """Number of tiles of clusters."""
        return ceil_div(p.m, self.m * self.cluster) * ceil_div(p.n, self.columns) * p.batches


FORMS = [
    Tile("wgmma_128x256", 128, 256, 4, 2, 1.0, cluster=2, late=True),
    Tile("wgmma_128x192", 128, 192, 5, 1, 0.98, cluster=2, late=True),
    Tile("wgmma_128x128", 128, 128, 6, 2, 0.87, cluster=2, pingpong=True),
]
_KERNELS = [form.kernel for form in FORMS]
CUBLAS = ByPyTorch(gemm.why_not_cublas)


def forms(portable: Sequence[Form[Any]]) -> list[Form[Any]]:
    """The forms of a family: these, cuBLAS where it is faster, and the portable ones."""
    return [*FORMS, CUBLAS, *portable]


def run(
    launch: Launch, a: Tensor, b: Tensor, y: Tensor | None, bias: Tensor | None = None, column: Tensor | None = None
) -> None:
    """Launch a form of a list with `FORMS`, as `gemm.run_dense`; operands lie as the problem says."""
    if launch.kernel not in _KERNELS:
        return gemm.run_dense(launch, a, b, y, bias=bias, column=column)
    of: Operands = launch.extra
    maps, pitch = (of.a.map(a), of.b.map(b)), launch.args[-2]
    assert y is not None
    launch(*maps, maps[0] if pitch else of.y.map(y, written=True), y, bias)


def _stored(p: Problem) -> tuple[bool, bool]:
    """Flags of the operands: True if it is stored with k outside."""
    return _k_outside(p.a, p.k), _k_outside(p.b, p.k)


def _k_outside(layout: Layout, k: int) -> bool:
    return layout.k != 1 or (k == 1 and layout.i == 1)


def _batch(p: Problem, layout: Layout) -> int | None:
    """Elements from one matrix of the batch to the next; 0 where all share one; None where there are two strides."""
    if p.batches == 1:
        return 0
    if p.batch_inner == 1:
        return layout.batch_outer
    outer = p.batches // p.batch_inner
    return layout.batch if outer == 1 or layout.batch_outer == layout.batch * p.batch_inner else None


def _operand(p: Problem, layout: Layout, size: int, k_outside: bool, rows: int) -> Operand:
    step = _batch(p, layout) or 0
    batches = p.batches if step else 1
    if k_outside:
        return Operand((batches, p.k, size), (step, layout.k, 1), (1, K, K), step > 0)
    return Operand((batches, size, p.k), (step, layout.i, 1), (1, rows, K), step > 0)
