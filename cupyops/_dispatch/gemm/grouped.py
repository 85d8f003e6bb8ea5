"""Forms of products of groups on Hopper's tensor cores (cuda_src/grouped_mm_wgmma.cu), for mixtures of experts.

A group is some rows of one operand; where they end is read on the device. Rows are multiplied by a matrix of their group,
or, as for that matrix's gradient, groups of two operands' rows by each other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..._kernel.kernel import Kernel, ceil_div
from ..._util.strides import aligned, is_dry
from ..core import library
from ..core.forms import Forms, Launch, Library
from ..core.gpu import Gpu, gpu
from . import gemm, wgmma
from .gemm import HALF
from .wgmma import THREADS, K, Operand, Operands

VECTOR = 8  # elements of a half type in 16 bytes
MEASURED_FROM, MEASURED_SIDE = 16384 * 2048 * 768, 768  # multiply-adds, and a side of a matrix
MOST_GROUPS = 512  # of which tiles are counted in shared memory


class Problem(NamedTuple):
    """Product of groups of rows, y[rows, n], with a matrix [k, n] each; or of groups of k, y[groups, m, n].

    Attributes:
        outside: whether the second operand is stored with k outside.
        strides: elements from one row of the first operand to the next; from one row and one matrix of the second.
    """

    rows: int
    m: int
    n: int
    k: int
    groups: int
    dtype: torch.dtype
    outside: bool
    strides: tuple[int, int, int]


class Grouped(wgmma.Tile):
    """The tile of 128 x 256, of one group."""

    function = ""

    def __init__(self) -> None:
        super().__init__("wgmma_128x256", 128, 256, 4, 2, 1.0, late=True)
        self.summary += ", of one group; where groups end is read on the device"

    def made(self) -> Kernel:
        """The kernel."""
        for name in ("CLUSTER", "PINGPONG"):
            del self.fixed[name]
        return self.kernel_of("grouped_mm_wgmma.cu", self.function, **self.stored())

    def why_not(self, problem: Any, gpu: Gpu) -> str | None:
        """It takes half types whose rows are whole vectors, on Hopper alone."""
        if gpu.capability != 9:
            return "wgmma is of compute capability 9.0"
        if gpu.shared < self.shared:
            return f"it takes {self.shared} bytes of shared memory"
        return why_not(problem)

    def why_slower(self, problem: Any, gpu: Gpu) -> str | None:
        """Require the sizes measured on an H100, from which it is 1.02 to 1.22 times as fast as PyTorch's."""
        sides = self.sides(problem)
        if gpu.library and (problem.rows * sides[0] * sides[1] < MEASURED_FROM or min(sides) < MEASURED_SIDE):
            return "it is not measured to be faster than PyTorch's"
        return None

    def sides(self, problem: Problem) -> tuple[int, int]:
        """Sides of a group's matrix."""
        return problem.k, problem.n

    def grid(self, tiles: int, gpu: Gpu) -> dict[str, Any]:
        """Launch parameters for at most `tiles` tiles."""
        return dict(kernel=self.kernel, grid=min(tiles, gpu.multiprocessors), block=THREADS, shared=self.shared)

    def together(self, gpu: Gpu) -> int:
        """Rows of tiles that blocks work on at one time."""
        return max(1, round((gpu.multiprocessors * self.n / self.m) ** 0.5))

    def box(self, p: Problem, m: int, batches: int = 1) -> Operand:
        """The result."""
        return Operand((batches, m, p.n), (m * p.n, p.n, 1), (1, K, self.piece), True)


class Rows(Grouped):
    """Groups of rows, each with a matrix of its own."""

    function = "grouped_mm_rows"

    def stored(self) -> dict[str, Any]:
        """The matrices of groups may be stored either way."""
        return dict(B_MN=(False, True))

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        """Enough blocks for the most tiles that so many groups can have."""
        p = problem
        row, inner, matrix = p.strides
        sizes, box = ((p.groups, p.k, p.n), (1, K, K)) if p.outside else ((p.groups, p.n, p.k), (1, self.n, K))
        a = Operand((1, p.rows, p.k), (p.rows * row, row, 1), (1, self.m, K), False)
        return Launch(
            **self.grid((ceil_div(p.rows, self.m) + p.groups) * ceil_div(p.n, self.n), gpu),
            template={"T": p.dtype, **self.fixed, "B_MN": p.outside},
            extra=Operands(a, Operand(sizes, (matrix, inner, 1), box, True), self.box(p, p.rows)),
            args=(p.rows, p.n, p.k, p.groups, self.together(gpu)),
        )


class Shares(Grouped):
    """Groups of both operands' rows, over which is summed."""

    function = "grouped_mm_shares"

    def sides(self, problem: Problem) -> tuple[int, int]:
        """Sides of a group's matrix, which is the result."""
        return problem.m, problem.n

    def stored(self) -> dict[str, Any]:
        """Both operands have k outside."""
        return {}

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        """A block for each tile, or as many as run at once."""
        p = problem
        a, b = (
            Operand((1, p.rows, size), (p.rows * row, row, 1), (1, K, K), False)
            for size, row in zip((p.m, p.n), p.strides)
        )
        return Launch(
            **self.grid(ceil_div(p.m, self.m) * ceil_div(p.n, self.n) * p.groups, gpu),
            template={"T": p.dtype, **self.fixed},
            extra=Operands(a, b, self.box(p, p.m, p.groups)),
            args=(p.rows, p.m, p.n, p.groups, self.together(gpu)),
        )


PYTORCH = library.ByPyTorch(lambda problem, gpu: None)
ROWS: Forms[Problem] = Forms("grouped_mm", "rows", [Rows(), PYTORCH])
SHARES: Forms[Problem] = Forms("grouped_mm", "shares", [Shares(), PYTORCH])


def why_not(p: Problem) -> str | None:
    """Return why no kernel computes a problem of these sizes and dtypes, or None."""
    if p.dtype not in HALF:
        return f"{p.dtype} is not multiplied by wgmma"
    if not (p.rows and p.m and p.n and p.k and p.groups):
        return "a size of 0"
    if p.n % VECTOR or p.k % VECTOR or p.m % VECTOR:
        return f"the rows of operands and the result must be whole vectors, of {VECTOR} elements"
    if p.groups > MOST_GROUPS:
        return f"over {MOST_GROUPS} groups"
    return gemm.too_large(p.rows, p.n, p.k, tiles=(p.rows // 128 + p.groups) * ceil_div(p.n, 256))


def rows_problem(a: Tensor, b: Tensor) -> Problem:
    """Problem of a (rows, k) times b (groups, k, n), which `multiply_rows` may have to copy."""
    (groups, k, n), rows = b.shape, a.shape[0]
    outside = not _is_turned(b)
    inner = b.stride(1) if outside else b.stride(2)
    return Problem(rows, VECTOR, n, k, groups, a.dtype, outside, (a.stride(0), inner, b.stride(0)))


def multiply_rows(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """y (rows, n): each group's rows of `a` (rows, k) with its matrix of `b` (groups, k, n)."""
    y = a.new_empty((a.shape[0], b.shape[2]))
    if is_dry(y):
        return y
    a, b = _in_vectors(a), _in_vectors(b)
    return _run(ROWS.plan(rows_problem(a, b), gpu(y.device)), a, b, offs, y)


def multiply_shares(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """y (groups, m, n): the sum over each group's rows of `a` (rows, m) with those of `b` (rows, n)."""
    (rows, m), n, groups = a.shape, b.shape[1], offs.shape[0]
    y = a.new_empty((groups, m, n))
    if is_dry(y):
        return y
    a, b = _in_vectors(a), _in_vectors(b)
    problem = Problem(rows, m, n, VECTOR, groups, a.dtype, True, (a.stride(0), b.stride(0), 0))
    return _run(SHARES.plan(problem, gpu(y.device)), a, b, offs, y, turned=True)


def _run(launch: Launch[Any] | Library, a: Tensor, b: Tensor, offs: Tensor, y: Tensor, turned: bool = False) -> Tensor:
    if isinstance(launch, Library):
        first = a.mT if turned else a
        library.call("torch.grouped_mm", y, lambda: y.copy_(torch.nn.functional.grouped_mm(first, b, offs=offs)))
        return y
    of: Operands = launch.extra
    launch(of.a.map(a), of.b.map(b), of.y.map(y, written=True), y, offs.contiguous())
    return y


def _is_turned(b: Tensor) -> bool:
    """Return True if the columns of the matrices are contiguous, as in a transposed weight."""
    return b.stride(1) == 1 and b.stride(2) != 1


def _in_vectors(x: Tensor) -> Tensor:
    """Return `x` if its lines are contiguous and begin at whole vectors, as TMA requires; else a copy."""
    turned = x.dim() == 3 and _is_turned(x)
    line = x.mT if turned else x
    steps = line.stride()[:-1]
    if line.stride(-1) == 1 and aligned(x) and all(step >= line.shape[-1] and step % VECTOR == 0 for step in steps):
        return x
    copy = line.clone(memory_format=torch.contiguous_format)
    return copy.mT if turned else copy
