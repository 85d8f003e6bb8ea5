"""Forms of rope: evenly spaced rows, rows of whole vectors, rows in shared memory, heads that share a position."""

from __future__ import annotations

import functools
import math
import struct
from typing import Any, NamedTuple

import numpy as np
import torch

from .._kernel.kernel import FLOATING, Kernel, ceil_div
from .core.forms import Form, Forms, Launch
from .core.gpu import Gpu
from .elementwise.broadcast import merged, packed_layout

BLOCK = 128
CHUNK = 8  # heads of a thread, at most
STAGED_THREADS = 256
STAGED_BYTES_EACH = 32  # of one element of each pair of a thread, at most
STAGED_WHOLE = 8  # so many rows are whole vectors
STAGED_BYTES = 16384  # of a block's rows, at most
STAGED_CHUNK = 4  # runs of a block, at most
STAGED_BLOCKS = 2048  # of the grid, from which on a block has several runs

DEFINE = {"ROPE_BLOCK": BLOCK, "ROPE_STAGED_THREADS": STAGED_THREADS, "ROPE_STAGED_BYTES_EACH": STAGED_BYTES_EACH}
BELOW_FP64 = tuple(dtype for dtype in FLOATING if dtype is not torch.float64)


def vector_of_heads(dtype: torch.dtype, interleaved: bool) -> int:
    """Elements of a vector of rope_heads(): 16 bytes of neighbours, or 8 of each half; fp64 has single elements."""
    return 1 if dtype is torch.float64 else (16 if interleaved else 8) // dtype.itemsize


rope_even = Kernel("rope.cu", "rope_even<T>", define=DEFINE, T=BELOW_FP64)
rope_rows = Kernel("rope.cu", "rope_rows<T>", define=DEFINE, T=BELOW_FP64)
rope_staged = Kernel("rope.cu", "rope_staged<T>", define=DEFINE, T=BELOW_FP64)
rope_heads = Kernel(
    "rope.cu",
    "rope_heads<T, NEIGHBOURS, N>",
    define=DEFINE,
    T=FLOATING,
    NEIGHBOURS=(False, True),
    N=(1, 2, 4, 8),
    where=lambda T, NEIGHBOURS, N: vector_of_heads(T, NEIGHBOURS) == N if N > 1 else not NEIGHBOURS,
)

Walk = tuple[int, tuple[int, ...]]  # of a dimension: its size, and strides


class Problem(NamedTuple):
    """Rows of x, each with a position."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dim: int  # the dimension that counts positions
    positions: tuple[int, ...] | None  # the strides of the positions that are given; None where there are none
    half: int  # how many pairs turn
    apart: int  # elements from a row of the tables to the next
    boundary: int  # elements that the addresses of all tensors are multiples of
    interleaved: bool
    dtype: torch.dtype

    @property
    def size(self) -> int:
        """Elements of a row."""
        return self.shape[-1]

    @property
    def vector(self) -> int:
        """Elements of 16 bytes."""
        return 16 // self.dtype.itemsize

    @property
    def width(self) -> int:
        """Elements that rows and their parts are multiples of, with the addresses, at most a vector."""
        apart = [stride for count, stride in zip(self.shape[:-1], self.strides) if count > 1]
        return math.gcd(self.boundary, self.size, 2 * self.half if self.interleaved else self.half, self.apart, *apart)

    @property
    def dense(self) -> tuple[int, ...]:
        """The strides of rows of y."""
        return tuple(math.prod(self.shape[d + 1 :]) for d in range(len(self.shape) - 1))

    def walked(self, with_y: bool = False) -> list[Walk]:
        """The dimensions before the last, merged, with their strides in x and among positions, and in y."""
        steps = [0] * (len(self.shape) - 1)
        steps[self.dim] = 1 if self.positions is None else self.positions[-1]
        if self.positions is not None and len(self.positions) == 2:
            steps[0] = self.positions[0]
        strides = (self.strides[:-1], tuple(steps), self.dense)
        return merged(self.shape[:-1], self.dense, strides if with_y else strides[:2])

    @property
    def heads_width(self) -> int:
        """Elements of an access of rope_heads()."""
        vector = vector_of_heads(self.dtype, self.interleaved)
        return vector if self.width % vector == 0 else 1


@functools.lru_cache(maxsize=4096)
def is_walkable(problem: Problem) -> bool:
    """Return True if the kernels can read x where it is."""
    in_rows = problem.strides[-1] == 1 or problem.size <= 1
    return in_rows and _layout(problem.walked(with_y=True)) is not None


class Rows(Form[Problem]):
    """Halves of whole vectors, row by row."""

    name = "rows"
    summary = "the threads of a row share its vectors"
    measured = "3864 GB/s of 4x32x4096x128 bf16 on an H200, by heads 3763"
    uses = (rope_rows,)

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        """Vectors of halves."""
        if problem.interleaved or problem.width != problem.vector:
            return "halves of rows are no whole vectors"
        return "it has no kernel for fp64" if problem.dtype is torch.float64 else None

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        """A row to each threadIdx.y."""
        walked, half, size = problem.walked(), problem.half, problem.size
        rows = _count(walked)
        grid, block = _blocks(max(half, size - 2 * half) // problem.width, rows)
        return Launch(rope_rows, grid, block, template={"T": problem.dtype}, args=(rows, half, size, _layout(walked)))


class Even(Rows):
    """Rows that are evenly spaced and turn as a whole."""

    name = "even"
    summary = "a thread has a vector of each half; nothing is divided"
    measured = "one token, 128x1x32x128 bf16, in 4.1 us on an H200"
    uses = (rope_even,)

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        """Whole rows of a power of two of vectors, of which 32 bits count."""
        if reason := super().why_not(problem, gpu):
            return reason
        walked, half, units = problem.walked(), problem.half, problem.half // problem.width
        if problem.positions is not None or len(walked) > 1:
            return "rows are not evenly spaced"
        if problem.size != 2 * half or units & (units - 1):
            return "rows do not turn as a whole, or halves are no power of two of vectors"
        (rows, (x_row, step)), limit = walked[0], 2**31 - BLOCK
        return None if max(rows * units, x_row, step * problem.apart) < limit else "there are too many elements"

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        """A thread for each vector of halves."""
        units = problem.half // problem.width
        ((rows, (x_row, step)),) = problem.walked()
        even = struct.pack("=3Ii", rows, x_row, step * problem.apart, units.bit_length() - 1)
        template = {"T": problem.dtype}
        return Launch(rope_even, ceil_div(rows * units, BLOCK), BLOCK, template=template, args=(_bytes(even),))


class Staged(Form[Problem]):
    """Dense rows that are no whole vectors, in shared memory."""

    name = "staged"
    summary = "a block copies its rows to shared memory, turns them there, and stores them in vectors"
    measured = "3410 GB/s of 4x32x4096x126 bf16 on an H200, by single elements 1104"
    uses = (rope_staged,)

    def __init__(self, blocks: int = STAGED_BLOCKS) -> None:
        self.blocks = blocks

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        """Dense rows, of which some fit."""
        rows = zip(problem.shape[:-1], problem.strides, problem.dense)
        if problem.strides[-1] != 1 or any(stride != dense for count, stride, dense in rows if count > 1):
            return "rows of x are apart"
        if problem.dtype is torch.float64:
            return "it has no kernel for fp64"
        fits = 0 < problem.half <= STAGED_THREADS
        return (
            None if fits and STAGED_WHOLE * problem.size * problem.dtype.itemsize <= STAGED_BYTES else "rows are long"
        )

    def why_slower(self, problem: Problem, gpu: Gpu) -> str | None:
        """Vectors need no shared memory."""
        return "its vectors are as fast" if problem.heads_width > 1 else None

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        """A tile of rows of some runs to a block."""
        walked, half, size, itemsize = problem.walked(), problem.half, problem.size, problem.dtype.itemsize
        times = walked.pop()[0] if len(walked) > 1 and walked[-1][1][1] == 0 else 1  # the same positions again
        rows = _count(walked)
        sharers, most = STAGED_THREADS // half, min(STAGED_THREADS, STAGED_BYTES // (size * itemsize))
        each = min(STAGED_BYTES_EACH // itemsize * sharers, most // STAGED_WHOLE * STAGED_WHOLE)
        apart, step = (1, 2) if problem.interleaved else (half, 1)
        tiles = ceil_div(rows, each)
        chunk = max(1, min(STAGED_CHUNK, tiles * times // self.blocks))
        sizes = struct.pack("=2q6i", rows, times, each, sharers, apart, step, tiles, chunk)
        grid, shared = tiles * ceil_div(times, chunk), 2 * each * size * itemsize
        args = (_bytes(sizes), half, size, _layout(walked))
        return Launch(rope_staged, grid, STAGED_THREADS, shared, {"T": problem.dtype}, args=args)


class Heads(Form[Problem]):
    """Heads of one position."""

    name = "heads"
    summary = "a thread has a unit of a position in some heads, and reads its angles once"
    measured = "3668 GB/s of 4x32x4096x128 interleaved bf16 on an H200"
    uses = (rope_heads,)

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        """A position to each threadIdx.y, some heads to a block."""
        walked, half, n = problem.walked(with_y=True), problem.half, problem.heads_width
        neighbours = problem.interleaved and n > 1
        apart, step = (1, 2) if problem.interleaved else (half, 1)
        turned = half * (2 if neighbours else 1) // n
        units = turned + (problem.size - 2 * half) // n
        rows = _count(walked)
        _, (threads, together) = _blocks(units, rows)
        heads, x_stride, y_stride = _heads(walked, rows, together)
        rows //= heads
        chunk = max(1, min(CHUNK, heads, units * rows * heads // (gpu.multiprocessors * gpu.threads)))
        groups = ceil_div(rows, together)
        sizes = struct.pack("=4q6i", rows, heads, x_stride, y_stride, groups, chunk, turned, units, apart, step)
        template = {"T": problem.dtype, "NEIGHBOURS": neighbours, "N": n}
        args = (_bytes(sizes), half, _layout(walked))
        return Launch(rope_heads, groups * ceil_div(heads, chunk), (threads, together), template=template, args=args)


ROTATION = Forms("rope", "rotation", [Even(), Rows(), Staged(), Heads()])


def _heads(walked: list[Walk], rows: int, together: int) -> tuple[int, int, int]:
    """Take the heads out of the dimensions to walk, and return their number and strides in x and y."""
    for count, (of_x, of_position, of_y) in sorted(walked, reverse=True):
        if of_position == 0 and rows // count >= together:
            walked.remove((count, (of_x, 0, of_y)))
            return count, of_x, of_y
    return 1, 0, 0


def _blocks(units: int, rows: int) -> tuple[int, tuple[int, int]]:
    """Return (grid, block) for `rows` rows of `units` units."""
    threads = min(max(units, 1), BLOCK)
    together = max(1, BLOCK // threads)
    return ceil_div(rows, together), (threads, together)


def _count(walked: list[Walk]) -> int:
    return math.prod(count for count, _ in walked)


def _layout(walked: list[Walk]) -> np.ndarray | None:
    """Pack the `Layout` of the dimensions to walk; None if they are too many."""
    inputs = len(walked[0][1]) if walked else 3
    counts, order = tuple(count for count, _ in walked), tuple(range(1, len(walked) + 1))
    found = packed_layout(counts, order, 1, *[tuple(step[j] for _, step in walked) for j in range(inputs)])
    return found[0] if found else None


def _bytes(packed: bytes) -> np.ndarray[Any, Any]:
    return np.frombuffer(packed, np.uint8)
