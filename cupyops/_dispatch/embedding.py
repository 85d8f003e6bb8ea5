"""Forms of embedding: copies of rows; lists of the positions that name a row, linked or sorted; sums over these lists."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from .._kernel.kernel import FLOATING, Kernel, ceil_div
from .core.forms import Form, Forms, Launch
from .core.gpu import Gpu

THREADS = 256  # of a block, at most
LOADS = 4  # of a thread of forward, about, where there are more threads than half of what the GPU holds
LISTED = 32  # positions of a list that is not long
LINKED = 1 << 15  # indices, at most, whose lists are linked
LEAST_SLOTS = 8
LINKED_SLOTS, SLOTS = 32, 128  # positions at which the short lists of a block begin, at most: linked, sorted
LISTERS = 256  # blocks that have them, at least, as far as these limits allow
LISTER_BYTES = 24 << 10  # of what a block adds up, about: it waits for one load after the other
WARP = 32
WARP_BYTES = 1 << 13  # of zeros for a warp of backward, about
LEAST_PIECE = 2 * (LISTED + 1)  # positions; so a list has no more pieces than it has LISTED + 1 positions
ADDERS = 1 << 10  # blocks for long lists, at most
STATIC_SHARED = 15 << 10  # bytes of shared memory of a block of backward besides its positions
MANY = 1 << 26  # indices, up to which any GPU's shared memory holds a piece, the square root

DEFINE = {
    "EMBEDDING_THREADS": THREADS,
    "EMBEDDING_LISTED": LISTED,
    "EMBEDDING_LINKED": LINKED,
    "EMBEDDING_LINKED_SLOTS": LINKED_SLOTS,
    "EMBEDDING_SLOTS": SLOTS,
}
FILE = "embedding.cu"
SUMS: dict[str, Any] = dict(  # fp64 takes any row
    define=DEFINE, T=FLOATING, ALIGNED=(False, True), where=lambda T, ALIGNED: not ALIGNED or T is not torch.float64
)
LISTS: dict[str, Any] = dict(define=DEFINE, T=(torch.float32,))  # whatever the type of the table
embedding_fwd = Kernel(FILE, "embedding_fwd<T, ALIGNED>", **SUMS)
embedding_bwd_linked = Kernel(FILE, "embedding_bwd_linked<T>", **LISTS)
embedding_bwd_sorted = Kernel(FILE, "embedding_bwd_sorted<T>", **LISTS)
embedding_bwd = Kernel(FILE, "embedding_bwd<T, ALIGNED>", **SUMS)


class Problem(NamedTuple):
    """`indices` indices of `rows` rows of `size`; aligned: tensors and rows begin at 16-byte boundaries."""

    indices: int
    rows: int
    size: int
    dtype: torch.dtype
    aligned: bool
    linked: bool = True  # the lists of backward

    @property
    def width(self) -> int:
        """Elements of a vector."""
        return 16 // self.dtype.itemsize

    @property
    def units(self) -> int:
        """Vectors of a row; where rows begin anywhere, one more."""
        return self.size // self.width if self.aligned else ceil_div(self.size, self.width) + 1


class Lists(NamedTuple):
    """Division of the lists of positions in backward: it depends on the sizes alone, and so do the bits."""

    piece: int  # positions of a long list that are added at once
    pieces: int  # of long lists, at most
    stride: int  # from a list to the next: LISTED, or 1 where indices are sorted


def lists_of(count: int, linked: bool) -> Lists:
    """Divide the lists so that, if all indices name one row, there are about as many pieces as positions in a piece."""
    return Lists(max(LEAST_PIECE, math.isqrt(count - 1) + 1), count // (LISTED + 1), LISTED if linked else 1)


class Rows(Form[Problem]):
    """Copies of rows, by vectors or from any address."""

    uses = (embedding_fwd,)

    def __init__(self, aligned: bool) -> None:
        self.aligned = aligned
        self.name = "aligned" if aligned else "unaligned"
        self.summary = f"threads in x run along a row, by {'vectors' if aligned else 'what is a vector of the result'}"

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        """Vectors need alignment."""
        if self.aligned and not problem.aligned:
            return "rows do not begin at 16-byte boundaries"
        return "it has no kernel for fp64" if self.aligned and problem.dtype is torch.float64 else None

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        """A row to each threadIdx.y."""
        units = problem._replace(aligned=self.aligned).units
        loads = LOADS if problem.indices * units > gpu.multiprocessors * gpu.threads // 2 else 1
        along = min(THREADS, _threads(ceil_div(units, loads)))
        block = along, THREADS // along
        return Launch(embedding_fwd, ceil_div(problem.indices, block[1]), block, template=self._template(problem))

    def _template(self, problem: Problem) -> dict[str, Any]:
        return {"T": problem.dtype, "ALIGNED": self.aligned}


class Sums(Rows):
    """Rows of zeros, sums of short lists and of pieces of long ones, each by blocks of its own."""

    uses = (embedding_bwd,)

    def __init__(self, aligned: bool) -> None:
        super().__init__(aligned)
        self.summary = "blocks for pieces of long lists, for short lists, and for rows of zeros"

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        """Launch blocks in three roles: for pieces of long lists, for short lists, and for rows of zeros."""
        p = problem._replace(aligned=self.aligned)
        piece, pieces, stride = lists_of(p.indices, p.linked)
        along = _threads(ceil_div(p.units, ceil_div(p.units, THREADS)))
        most = LINKED_SLOTS if p.linked else SLOTS
        row_bytes = 16 * ceil_div(p.size, p.width)
        slots = min(most, max(LEAST_SLOTS, min(p.indices // LISTERS, LISTER_BYTES // row_bytes)))
        listers = ceil_div(p.indices, slots)
        adders = min(pieces, ADDERS, listers)
        batch = max(1, WARP_BYTES * p.width // (16 * p.size))  # rows of a warp that writes zeros
        if batch >= WARP:
            warps = max(1, gpu.multiprocessors * (gpu.threads // (2 * WARP)))  # that short rows are for, at least
            batch = max(1, min(batch, p.rows // warps) // WARP) * WARP
        block = along, THREADS // along
        grid = adders + listers + ceil_div(p.rows, batch * (block[0] * block[1] // WARP))
        args = (p.indices, piece, pieces, adders, listers, slots, batch, stride)
        return Launch(embedding_bwd, grid, block, 4 * piece, self._template(p), args=args)


class Linked(Form[Problem]):
    """Lists in any order, by atomics."""

    name = "linked"
    summary = "a thread puts its index into the list of its row, by atomics"
    uses = (embedding_bwd_linked,)

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        """A block finds the positions of a long list in a bit for each index."""
        return f"there are more than {LINKED} indices" if problem.indices > LINKED else None

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        """A thread for each index."""
        return _each_index(embedding_bwd_linked, problem, True)


class Sorted(Form[Problem]):
    """Lists of indices that PyTorch has sorted."""

    name = "sorted"
    summary = "of sorted indices, the thread of a row's first finds how many there are"
    uses = (embedding_bwd_sorted,)

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        """A thread for each index."""
        return _each_index(embedding_bwd_sorted, problem, False)


FORWARD = Forms("embedding", "forward", [Rows(True), Rows(False)])
LISTING = Forms("embedding", "lists", [Linked(), Sorted()])
BACKWARD = Forms("embedding", "backward", [Sums(True), Sums(False)])


def too_many(count: int, rows: int, gpu: Gpu) -> str | None:
    """Return why the kernels cannot serve so many indices and rows, or None."""
    if count > MANY and (count >= 1 << 31 or count > ((gpu.shared - STATIC_SHARED) // 4) ** 2):
        return "2^31 indices or more, or a piece of them larger than shared memory"
    return "2^31 rows or more" if rows >= 1 << 31 else None


def _each_index(kernel: Kernel, problem: Problem, linked: bool) -> Launch:
    piece, pieces, _ = lists_of(problem.indices, linked)
    args = (problem.rows, problem.indices, piece, pieces)
    return Launch(kernel, ceil_div(problem.indices, THREADS), THREADS, template={"T": torch.float32}, args=args)


def _threads(least: int) -> int:
    """Number of threads of a row, at least `least`: whole warps, or a power of two within one."""
    return ceil_div(least, 32) * 32 if least > 32 else 1 << (max(least, 1) - 1).bit_length()
