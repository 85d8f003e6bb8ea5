"""Forms of products of 8-bit floating-point numbers on Hopper's tensor cores (cuda_src/scaled_mm_wgmma.cu).

Both operands have k in lines, as wgmma takes bytes. In tensor maps, stages and sizes two of them count as one element of 16
bits, so that tiles are those of half types, of twice as much of k.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._kernel.kernel import HALF, Kernel
from ..._util.strides import aligned
from ..core import library
from ..core.forms import Forms, Launch
from ..core.gpu import Gpu, gpu
from . import gemm, wgmma
from .wgmma import THREADS, K, Operand, Operands

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FLOAT8 = (E4M3, E5M2)
VECTOR = 16  # bytes
LARGE_M, LARGE_SIDE = 512, 4096  # from which on it is measured, where sums are added in fp32
BAND = 4  # rows of tiles that blocks work on at one time: with more, large operands leave the L2 cache
_NAMES = {E4M3: "wgmma::E4M3", E5M2: "wgmma::E5M2"}
PAIRS = ((E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3))


class Problem(NamedTuple):
    """y[m, n] of rows of a and of columns of b."""

    m: int
    n: int
    k: int  # in elements of 16 bits
    a: torch.dtype
    b: torch.dtype
    out: torch.dtype  # float32 or a half type
    strides: tuple[int, int]  # bytes from one row of a to the next, and from one column of b to the next
    by_row: bool  # whether each row of a and each column of b has a scale of its own
    promoted: bool  # whether sums of 128 are added in fp32; else the tensor cores sum up all
    by_pytorch: str = ""  # why PyTorch's own function does not take the call; nothing where it does
    batches: int = 1


class Scaled(wgmma.Tile):
    """A tile of a product of bytes."""

    def made(self) -> Kernel:
        """The kernel."""
        for name in ("PINGPONG", "LATE"):
            del self.fixed[name]
        self.fixed["SPLIT"] = self.split
        names = tuple(_NAMES.values())
        domain: dict[str, Any] = {name: (value,) for name, value in self.fixed.items()}
        return Kernel(
            "scaled_mm_wgmma.cu",
            f"scaled_mm_wgmma<{', '.join(('T', 'A', 'B', *self.fixed))}>",
            arch="sm_90a",
            T=(torch.bfloat16, torch.float16, torch.float32),
            A=names,
            B=names,
            where=self._is_listed,
            **domain,
        )

    @property
    def of_fp32(self) -> bool:
        """True if it has results of fp32: one tile has, since PyTorch's own function is taken for them where it may be."""
        return (self.m, self.n) == (128, 128)

    def _is_listed(self, T: Any, A: str, B: str) -> bool:
        """Results of two different types are of bfloat16 or fp32: another is made of fp32."""
        pairs = {tuple(_NAMES[one] for one in pair) for pair in PAIRS}
        return (A, B) in pairs and (A == B or T is not torch.float16) and (self.of_fp32 or T is not torch.float32)

    def why_not(self, problem: Any, gpu: Gpu) -> str | None:
        """It has the pairs of types that PyTorch has, on Hopper alone."""
        p: Problem = problem
        if gpu.capability != 9:
            return "wgmma is of compute capability 9.0"
        if gpu.shared < self.shared:
            return f"it takes {self.shared} bytes of shared memory"
        if self.split > 1 and p.k < self.split * K:
            return "there is too little of k"
        if p.out is torch.float32 and not self.of_fp32:  # which mixed pairs with results of fp16 are made of
            return "results of fp32 have the tile of 128 x 128 alone"
        return why_not(p)

    def why_slower(self, problem: Any, gpu: Gpu) -> str | None:
        """Return why PyTorch's function is faster, as measured, or another tile, by a model of the time; else None."""
        p: Problem = problem
        if self.split > 1 and p.m > self.m:
            return "k is split for one row of tiles"
        if gpu.library and not p.by_pytorch and (reason := self._not_measured(p, gpu)):
            return reason
        others = [form for form in TILES if form.why_not(p, gpu) is None and (form.split == 1 or p.m <= form.m)]
        best = min((form.time(p, gpu) for form in others), default=0.0)  # type: ignore[arg-type]
        return "another tile should take less time" if best < self.time(p, gpu) else None  # type: ignore[arg-type]

    def _not_measured(self, p: Problem, gpu: Gpu) -> str | None:
        """Return why PyTorch's is taken. On an H100 it is slower with scales of rows alone, and then not for every size."""
        if not p.by_row or p.out is torch.float32:
            return "with one scale, or results of fp32, it is not measured to be faster than PyTorch's"
        if self.m == 64 and self._waves(p, gpu) == 1:  # type: ignore[arg-type]
            return None  # 1.16 to 1.9 times
        large = p.m >= LARGE_M and min(p.n, 2 * p.k) >= LARGE_SIDE and self.m > 64
        if p.promoted and large and self.full(p, gpu) >= wgmma.FULL:  # type: ignore[arg-type]
            return None  # 1.00 to 1.10 times
        return "it is not measured to be faster than PyTorch's for these sizes"

    def launch(self, problem: Any, gpu: Gpu) -> Launch:
        """Launch as many clusters as run at once, or one for each tile."""
        p: Problem = problem
        blocks, tiles = self.cluster * self.split, self._tiles(p)  # type: ignore[arg-type]
        clusters = tiles if self.split > 1 else min(tiles, max(1, gpu.multiprocessors // blocks))
        a, b = (stride // 2 for stride in p.strides)
        operands = Operands(
            Operand((1, p.m, p.k), (p.m * a, a, 1), (1, self.m, K), False),
            Operand((1, p.n, p.k), (p.n * b, b, 1), (1, self.n // self.cluster, K), False),
            Operand((1, p.m, p.n), (p.m * p.n, p.n, 1), (1, K, self.piece), True),
        )
        by_pieces = p.out.itemsize == 2 and p.n % 8 == 0
        return Launch(
            self.kernel,
            clusters * blocks,
            THREADS,
            self.shared,
            {"T": p.out, "A": _NAMES[p.a], "B": _NAMES[p.b], **self.fixed},
            cluster=blocks if blocks > 1 else None,
            extra=operands,
            args=(int(p.by_row), p.promoted, p.m, p.n, p.k, 0 if by_pieces else p.n, BAND),
        )


TILES = [
    Scaled("wgmma_64x64", 64, 64, 12, 1, 0.2, split=2),
    Scaled("wgmma_64x128", 64, 128, 8, 1, 0.52),
    Scaled("wgmma_256x128", 256, 128, 4, 2, 0.95, cluster=2),
    Scaled("wgmma_128x192", 128, 192, 5, 1, 0.975, cluster=2),
    Scaled("wgmma_128x128", 128, 128, 6, 2, 0.9),
]
PYTORCH = library.ByPyTorch(lambda problem, gpu: problem.by_pytorch or None)
PRODUCT: Forms[Problem] = Forms("scaled_mm", "product", [*TILES, PYTORCH])


def why_not(p: Problem) -> str | None:
    """Return why no kernel computes a problem of these sizes and dtypes, or None."""
    if (p.a, p.b) not in PAIRS:
        return f"{p.a} times {p.b} has no kernel"
    if not (p.m and p.n and p.k):
        return "a size of 0"
    return gemm.too_large(p.m, p.n, 2 * p.k, tiles=(p.m // 64 + 1) * (p.n // 64 + 1))


def sums_in(a: torch.dtype, b: torch.dtype, out: torch.dtype) -> torch.dtype:
    """The dtype that a kernel leaves results in, from which they are then rounded to `out`."""
    return out if out is torch.bfloat16 or (a is b and out in HALF) else torch.float32


def problem_of(a: Tensor, b: Tensor, by_row: bool, out: torch.dtype, fast: bool, by_pytorch: str = "") -> Problem:
    """Problem of a (m, k) times b (k, n), which `multiply` may have to copy."""
    (m, k), n = a.shape, b.shape[1]
    halves = (k + 1) // 2
    strides = a.stride(0), b.stride(1)
    return Problem(
        m, n, halves, a.dtype, b.dtype, sums_in(a.dtype, b.dtype, out), strides, by_row, not fast, by_pytorch
    )


def multiply(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, y: Tensor, fast: bool
) -> None:
    """y = scale_a scale_b a b + bias; y is what `sums_in` says, and contiguous."""
    a, b = in_vectors(a), in_vectors(b.mT).mT
    by_row = scale_a.numel() > 1 or scale_b.numel() > 1
    launch = PRODUCT.launch(problem_of(a, b, by_row, y.dtype, fast, "it is to be a kernel"), gpu(y.device))
    if bias is not None:
        bias = bias.to(y.dtype).contiguous()
    of: Operands = launch.extra
    maps = of.a.map(a.view(torch.int16)), of.b.map(b.mT.view(torch.int16))
    stored = maps[0] if launch.args[-2] else of.y.map(y, written=True)
    launch(*maps, stored, y, bias, scale_a.contiguous(), scale_b.contiguous())


def in_vectors(x: Tensor) -> Tensor:
    """Return `x` if its rows are even in length and begin at whole vectors, for TMA; else a copy padded with zeros."""
    rows, k = x.shape
    if k % 2 == 0 and _lies_in_vectors(x):
        return x
    padded = x.new_zeros((rows, -(-k // VECTOR) * VECTOR))
    padded[:, :k] = x
    return padded


def _lies_in_vectors(x: Tensor) -> bool:
    return x.stride(1) == 1 and x.stride(0) % VECTOR == 0 and x.stride(0) >= x.shape[1] and aligned(x)


def why_not_pytorch(
    a: Tensor, b: Tensor, by_row: bool, bias: Tensor | None, scale_result: Tensor | None, out: torch.dtype
) -> str:
    """Return why PyTorch's own function would refuse a call on this GPU, or compute another result; "" where it is right."""
    if not (a.is_cuda and _has_8_bits(a.device)):
        return "it needs compute capability 8.9"
    (m, k), n = a.shape, b.shape[1]
    if not (m and n and k) or k % VECTOR or n % VECTOR or not (_lies_in_vectors(a) and _lies_in_vectors(b.mT)):
        return "it needs sizes and strides in multiples of 16"
    if out in FLOAT8 and (scale_result is not None or by_row or not a.dtype is b.dtype is out):
        return "its results of 8 bits are of e4m3 alone, and heed no scale"
    if by_row and out is not torch.bfloat16 and not _scales_rows():
        return "with scales of rows it needs CUDA 12.9 for other results than bfloat16"
    if bias is not None and (out is torch.float32 or bias.dtype not in HALF or (out in HALF and bias.dtype is not out)):
        return "its bias is of the result's dtype"
    return ""


@functools.cache
def _has_8_bits(device: torch.device) -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device) >= (8, 9)


@functools.cache
def _scales_rows() -> bool:
    return tuple(map(int, (torch.version.cuda or "0").split(".")[:2])) >= (12, 9)
