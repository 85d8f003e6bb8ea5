"""Common parts of the forms of row-wise normalisations: the problem, constants shared with the CUDA, threads of a row."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..._kernel.kernel import FLOATING, Kernel, ceil_div
from ..core.forms import Form
from ..core.gpu import Gpu
from ..core.rows import PACKS, SMALL_BYTES, SMALL_ROWS, WIDEST, Share, share

WARP = 32
VECTORS = PACKS[-1]  # of a row in each thread of a wide one
SUB_WARP_THREADS = 256  # of a block, at most
SUB_WARP_BLOCKS = 3  # of a multiprocessor
FORWARD_ROWS, BACKWARD_ROWS = 4, 2  # of sub_warp, that a thread has under way at once
CENTRED_HALF_THREADS = 512  # of a row of a half type in forward of layer_norm: see kThreads in norm.cu
SHARED_MEMORY_THREADS = 512
BACKWARD_THREADS = 512  # of a multiprocessor, and of a block at most: more had no registers for sums of the gradients
TWO_PASS_THREADS = 512  # of a block, at most: two blocks run at once, one reads while the other reduces
SHIFT_THREADS = 256
PARTIAL_ROWS = 4  # rows of x, at least, for a row of partials, until there is one for each block of a wave
RESERVED = 5376  # bytes of shared memory that a block has besides, at most
_STATISTICS = 2048  # bytes of shared memory for those of the rows of a thread_per_row block

DEFINE = {
    "SUB_WARP_THREADS": SUB_WARP_THREADS,
    "SUB_WARP_BLOCKS": SUB_WARP_BLOCKS,
    "SUB_WARP_FORWARD_ROWS": FORWARD_ROWS,
    "SUB_WARP_BACKWARD_ROWS": BACKWARD_ROWS,
    "BLOCK_THREADS": WIDEST,
    "CENTRED_HALF_THREADS": CENTRED_HALF_THREADS,
    "SHARED_MEMORY_THREADS": SHARED_MEMORY_THREADS,
    "BACKWARD_THREADS": BACKWARD_THREADS,
    "SHIFT_THREADS": SHIFT_THREADS,
}


class Operator(NamedTuple):
    """One of the family."""

    centred: bool  # about the mean
    inputs: int  # tensors of rows that forward reads; backward reads one more


LAYER_NORM, RMS_NORM = Operator(True, 1), Operator(False, 1)
ADD_RMS_NORM = Operator(False, 2)


class Problem(NamedTuple):
    """Problem for which a form is chosen, forward or backward."""

    operator: Operator
    rows: int
    size: int  # elements of a row
    itemsize: int
    aligned: bool  # whether each vector of 16 bytes is one access: of rows, and tensors, that begin at such boundaries
    parameters: bool  # whether there are some; in backward, whether a gradient of one is wanted

    @property
    def width(self) -> int:
        """Elements of a vector."""
        return 16 // self.itemsize

    @property
    def row(self) -> int:
        """Bytes of a row."""
        return self.size * self.itemsize

    @property
    def acc(self) -> int:
        """Bytes of a number that is computed in."""
        return max(self.itemsize, 4)

    @property
    def gradients(self) -> int:
        """Tensors of rows that backward reads."""
        return self.operator.inputs + 1

    @property
    def shared_vectors(self) -> int:
        """Vectors that threads share: the whole ones of a row, and no fewer than the threads that its head and tail take."""
        return max(self.size // self.width, 0 if self.size % self.width == 0 else 2 * self.width)


# --- kernels ---

BOTH = (False, True)
ALL = {"T": FLOATING}
NARROW = {"T": tuple(dtype for dtype in FLOATING if dtype.itemsize <= 4)}  # of all forms; fp64 has two_pass alone
EACH = {**NARROW, "CENTRED": BOTH}


def kernel(name: str, **domain: Any) -> Kernel:
    """A kernel of norm.cu."""
    return Kernel("norm.cu", name, define=DEFINE, **domain)


def is_block(K: int, ALIGNED: bool, **_: Any) -> bool:
    """Return True if the form `block` has such an instance: aligned rows of few vectors are those of sub_warp."""
    return K == VECTORS or not ALIGNED


# --- forms ---


class Narrow(Form[Problem]):
    """A form of dtypes of at most 32 bits."""

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        return "fp64 has two_pass alone" if problem.itemsize == 8 else None


class Shared(Narrow):
    """A form whose threads share the whole vectors of a row."""

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        if problem.size < problem.width:
            return "a row is shorter than a vector"
        return super().why_not(problem, gpu)


class ThreadPerRow(Narrow):
    name = "thread_per_row"
    summary = "a thread has a row of at most 128 bytes, in shared memory"

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        if problem.row > SMALL_BYTES:
            return f"a row has {problem.row} bytes, more than {SMALL_BYTES}"
        if self.shared(problem) + _STATISTICS > gpu.shared:
            return f"{SMALL_ROWS} rows do not fit into shared memory"
        return super().why_not(problem, gpu)

    def why_slower(self, problem: Problem, gpu: Gpu) -> str | None:
        return "other forms read rows of whole vectors by vectors" if problem.row % 16 == 0 else None

    def shared(self, problem: Problem) -> int:
        """Bytes of dynamic shared memory."""
        raise NotImplementedError


class SubWarp(Narrow):
    name = "sub_warp"
    summary = "neighbouring lanes have a vector each of a row of up to 32, and several rows at a time"

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        if not problem.aligned:
            return "rows begin off 16-byte boundaries"
        if problem.row > 16 * WARP:
            return f"a row has more than {WARP} vectors"
        return super().why_not(problem, gpu)

    def blocks(self, problem: Problem, gpu: Gpu, rows: int) -> tuple[int, tuple[int, int]]:
        """The grid and the block, for `rows` rows of a thread: one wave, of small blocks where few would leave some idle."""
        lanes, threads = power_of_two(problem.row // 16), SUB_WARP_THREADS
        while threads > WARP and ceil_div(problem.rows, rows * (threads // lanes)) < gpu.multiprocessors:
            threads //= 2
        block = lanes, threads // lanes
        return count(problem.rows, rows * block[1], SUB_WARP_BLOCKS * gpu.multiprocessors), block


def power_of_two(n: int) -> int:
    """The least power of two that is at least `n`."""
    return 1 << (n - 1).bit_length()


def share_row(problem: Problem, most: int, block: int) -> Share:
    """Threads for a row, `most` at most; about `block` in a block of several rows. Aligned rows have VECTORS in each."""
    vectors = problem.shared_vectors
    if problem.aligned and vectors <= WARP:
        threads = power_of_two(ceil_div(vectors, VECTORS))
        return Share(VECTORS, threads, block // threads)
    return share(vectors * problem.width, problem.itemsize, most, block)


def blocks_for(rows: int, per_block: int, gpu: Gpu) -> int:
    """Blocks for `rows` rows, `per_block` of them in each."""
    return min(ceil_div(rows, per_block), gpu.max_blocks)


def two_pass_threads(problem: Problem) -> int:
    """Threads of a block: fewer where the row has no vectors for all."""
    return min(ceil_div(problem.row, 16 * VECTORS * WARP) * WARP, TWO_PASS_THREADS)


def count(rows: int, rows_each: int, most: int) -> int:
    """Number of rows of partials: at least one, so that the sum over no rows is 0."""
    return max(1, min(ceil_div(rows, rows_each), most))


def padded(size: int) -> int:
    """Bytes for `size` of shared memory: machine code may read 16 at a time where C reads less."""
    return ceil_div(size, 16) * 16
