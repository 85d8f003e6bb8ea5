"""Division of a reduction of strided inputs among blocks and threads. See common/reduce/reduction.cuh."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from torch import Tensor

from ..._kernel.kernel import Kernel, ceil_div
from ..._util.strides import aligned
from ..core.forms import Form, Forms, Launch
from ..core.gpu import Gpu, gpu
from ..core.rows import SMALL_BYTES, SMALL_ROWS
from ..elementwise.broadcast import Strides, innermost_first, is_dense, packed_layout
from ..elementwise.elementwise import why_not_size

FORM = ("kContiguous", "kRows", "kColumns", "kStrided")  # of fold()
THREADS = 256  # of a block
MOST_THREADS = 512  # of a block where there is one for each result, or tile of columns
REGISTER_VECTORS = 4  # of a thread that has its part of a row in registers
DEFINE = {"FOLD_THREADS": MOST_THREADS, "REGISTER_VECTORS": REGISTER_VECTORS}

# Into how many blocks a launch is cut does not depend on the GPU: all of them give the same bits.
BLOCKS = 1024
ROW_BLOCKS = 8192  # of rows: the last ones to end are short
ENOUGH_BLOCKS = 128  # that need not be cut into more
LOADS = 4  # units of a row that a thread has, about
SHORT_VECTORS = 32  # of a row that is too short for threads of its own to have it in registers
DEEP = 4  # units of columns that a thread has at least, where few columns make a block
UNITS = 16  # of columns that a thread has at least, where a reduction is cut into slabs
ENOUGH_THREADS = 1 << 18  # to fill a GPU: with fewer rows' worth, more of them share a row
LANES = 8  # of columns: 128 bytes
COLUMN_THREADS = 1 << 16  # for whose vectors there are registers, so many being under way at once
FEWEST_THREADS = 128  # of a block of them
MOST_UNITS = 1 << 30  # of a slab


class Reduction(NamedTuple):
    """Inputs of one shape, with elements, some of whose dimensions are reduced."""

    shape: tuple[int, ...]
    dims: tuple[int, ...]  # what is reduced
    results: Strides  # of the output, in the dimensions that are kept
    inputs: tuple[Strides, ...]
    itemsize: int  # of an element of which 16 bytes make a vector
    aligned: bool  # whether every input begins at a whole vector

    @property
    def vector(self) -> int:
        """Elements that make 16 bytes."""
        return 16 // self.itemsize

    @property
    def kept(self) -> tuple[int, ...]:
        """The dimensions that are not reduced."""
        return tuple(dim for dim in range(len(self.shape)) if dim not in self.dims)

    @property
    def order(self) -> list[int]:
        """The dimensions longer than 1, innermost in memory first."""
        return [dim for dim in innermost_first(self.shape, self.inputs) if self.shape[dim] > 1] or [0]

    @property
    def in_rows(self) -> bool:
        """True if the dimension innermost in memory is reduced."""
        return self.order[0] not in self.kept

    def count(self, dims: Sequence[int]) -> int:
        """Number of elements of those dimensions."""
        return math.prod(self.shape[dim] for dim in dims)

    def layout_reduced(self, width: int = 1) -> tuple[np.ndarray, int, int] | None:
        """Return the `struct Layout` of the reduced dimensions, the width of its units, its dimensions; None if too many."""
        return self._layout(self.dims, width)

    def layout_kept(self, width: int = 1) -> tuple[np.ndarray, int, int] | None:
        """`struct Layout` of the dimensions kept, with the output's strides; see `layout_reduced`."""
        return self._layout(self.kept, width, self.results)

    def _layout(self, of: tuple[int, ...], width: int, *more: Strides) -> tuple[np.ndarray, int, int] | None:
        rank = {dim: place for place, dim in enumerate(self.order)}
        steps = [tuple(one[d] for d in of) for one in self.inputs]
        return packed_layout(tuple(self.shape[d] for d in of), tuple(rank.get(d, 0) for d in of), width, *steps, *more)


def walkable(problem: Reduction) -> bool:
    """Return True if the dimensions kept, and those reduced, are few enough for a kernel to walk."""
    return problem.layout_reduced() is not None and problem.layout_kept() is not None


# --- rows of a contiguous input, each of which one thread or one group of threads has as a whole ---


class RowForm(Form[Reduction]):
    """One contiguous input whose last dimensions are reduced to contiguous results; kernels take (..., rows, size)."""

    def why_not(self, problem: Reduction, gpu: Gpu) -> str | None:
        if reason := why_not_size(self.kernel, problem.itemsize):
            return reason
        if not is_dense(problem.shape, problem.inputs[0]):
            return "the input is not contiguous"
        kept, reduced = longer_dims(problem.shape, problem.dims)
        if kept and reduced and kept[-1] > reduced[0]:
            return "the reduced dimensions are not the last ones"
        return self.why_not_row(problem, problem.count(reduced))

    def why_not_row(self, problem: Reduction, size: int) -> str | None:
        """Return why it does not serve rows of that size, or None."""
        raise NotImplementedError

    @staticmethod
    def rows(problem: Reduction) -> dict[str, int]:
        """Number of rows, and the size of each."""
        kept, reduced = longer_dims(problem.shape, problem.dims)
        return {"rows": problem.count(kept), "size": problem.count(reduced)}


class ThreadPerRow(RowForm):
    """Short rows, by way of shared memory; or from where they are, if the kernel `reads_vectors` and rows are whole ones."""

    name = "thread_per_row"
    summary = "a thread owns a row, which the block has copied to shared memory with all of its rows"

    def __init__(self, kernel: Kernel, reads_vectors: bool = False) -> None:
        super().__init__(kernel)
        self.reads_vectors = reads_vectors

    def why_not_row(self, problem: Reduction, size: int) -> str | None:
        if size == 1:
            return "nothing is reduced"
        return None if size * problem.itemsize <= SMALL_BYTES else f"a row is more than {SMALL_BYTES} bytes"

    def why_slower(self, problem: Reduction, gpu: Gpu) -> str | None:
        size = self.rows(problem)["size"]
        return None if self.reads_vectors or size % problem.vector else "rows are whole vectors"

    def launch(self, problem: Reduction, gpu: Gpu) -> Launch:
        found = self.rows(problem)
        in_place = self.reads_vectors and problem.aligned and found["size"] % problem.vector == 0
        shared = 0 if in_place else SMALL_ROWS * found["size"] * problem.itemsize
        return Launch(self.kernel, ceil_div(found["rows"], SMALL_ROWS), (SMALL_ROWS, 1), shared, named=found)


class Registers(RowForm):
    """Rows of whole vectors, all of which are under way at once."""

    name = "registers"
    summary = "a group of threads, up to a block, has a row in registers"

    def why_not_row(self, problem: Reduction, size: int) -> str | None:
        if size % problem.vector or not problem.aligned:
            return "rows are no whole vectors at 16-byte boundaries"
        most = MOST_THREADS * REGISTER_VECTORS
        return None if size // problem.vector <= most else f"a row is more than {most} vectors"

    def why_slower(self, problem: Reduction, gpu: Gpu) -> str | None:
        few = self.rows(problem)["size"] // problem.vector <= SHORT_VECTORS
        return f"a row is no more than {SHORT_VECTORS} vectors" if few else None

    def launch(self, problem: Reduction, gpu: Gpu) -> Launch:
        found = self.rows(problem)
        along = power_of_two(ceil_div(found["size"] // problem.vector, REGISTER_VECTORS))
        side = max(THREADS // 2 // along, 1) if along <= 32 else 1
        return Launch(self.kernel, ceil_div(found["rows"], side), (along, side), named=found)


# --- any strides: fold(), and what combines its slabs ---


class Fold(Form[Reduction]):
    """A launch of fold(). Its grid is (tiles of results, slabs of what is reduced).

    Args:
        kernel: None in the forms of users' reductions, each of which has its own.
        loads: units of a row that a thread has, about: more where a state costs more to combine with its neighbours'.
    """

    form = ""

    def __init__(self, kernel: Kernel | None, loads: int = LOADS) -> None:
        self.kernel, self.loads = kernel, loads  # type: ignore[assignment]

    def why_not(self, problem: Reduction, gpu: Gpu) -> str | None:
        if not walkable(problem):
            return "the dimensions are too many to walk"
        if reason := why_not_size(self.kernel, problem.itemsize, FORM=self.form):
            return reason
        return self.why_not_vectors(problem)

    def why_not_vectors(self, problem: Reduction) -> str | None:
        """Return why this form cannot load the inputs in vectors, or None."""
        raise NotImplementedError

    def cut(
        self, problem: Reduction, block: tuple[int, int], tiles: int, slabs: int, results: int, units: int, *,
        width: int = 1, layouts: tuple[np.ndarray, np.ndarray] | None = None, unit: int = 1, whole: int = 0,
        period: int = 1,
    ) -> Launch[int]:  # fmt: skip
        """The launch for `units` of each of `results`, which in columns are units of `width`, cut into about `slabs`.

        `unit`: what a unit is, in elements, where the kernel counts in these. `whole`, `period`: see `struct Division`.
        `extra` is how many partial results are to be combined, 0 where there is one.
        """
        slab_units = max(ceil_div(units, max(1, slabs, ceil_div(units, MOST_UNITS))), 1)
        slabs = max(ceil_div(units, slab_units), 1)
        total = problem.count(problem.dims) if unit > 1 else units
        division = struct.pack("=5q", results, total, slab_units * unit, whole, period)
        kept, reduced = layouts or (problem.layout_kept()[0], problem.layout_reduced()[0])  # type: ignore[index]
        partials = slabs * period if slabs * period > 1 else 0
        args = kept, reduced, np.frombuffer(division, np.uint8), results * width  # of a slab
        template = {"FORM": self.form}
        return Launch(self.kernel, (tiles, slabs), block, template=template, args=args, extra=partials)  # type: ignore[arg-type]

    def rows_of(self, results: int, units: int) -> tuple[int, int, int, int]:
        """(threads along a row, rows side by side, tiles, slabs)."""
        along, most = min(THREADS, power_of_two(ceil_div(units, self.loads))), min(THREADS, power_of_two(units))
        while along < most and results * along < ENOUGH_THREADS:
            along *= 2
        if ENOUGH_BLOCKS <= results < BLOCKS and units >= MOST_THREADS * LOADS:
            along = MOST_THREADS
        side = max(THREADS // along, 1)
        tiles = ceil_div(results, side)
        cut = min(ROW_BLOCKS // tiles, units // (along * self.loads))
        return along, side, tiles, 1 if tiles >= ENOUGH_BLOCKS else cut


class Contiguous(Fold):
    """Reduction of one run of neighbours; vectors begin where the run first meets their alignment, wherever it begins."""

    name, form = "contiguous", "kContiguous"
    summary = "threads along a run of neighbours take its vectors, and the unaligned elements at its ends"

    def why_not_vectors(self, problem: Reduction) -> str | None:
        if not problem.in_rows or problem.layout_reduced()[2] > 1:  # type: ignore[index]
            return "the reduced elements are not one run of neighbours"
        first = problem.order[0]
        alike = all(one and one[first] == 1 for one in problem.inputs)
        return None if alike else "neighbours are apart in an input"

    def launch(self, problem: Reduction, gpu: Gpu) -> Launch:
        results, units = problem.count(problem.kept), ceil_div(problem.count(problem.dims), problem.vector)
        along, side, tiles, slabs = self.rows_of(results, units)
        return self.cut(problem, (along, side), tiles, slabs, results, units, unit=problem.vector)


def why_no_vectors(problem: Reduction, crossed: Sequence[int], count: int) -> str | None:
    """Return why neighbours cannot be loaded in vectors across dimensions with steps, or None; there are `count` of them."""
    first, vector = problem.order[0], problem.vector
    if not problem.aligned:
        return "an input begins within a vector"
    if len(problem.inputs) == 1 and problem.shape and not problem.inputs[0][first]:
        return "the input is broadcast along its innermost dimension"
    walked = [one for one in problem.inputs if problem.shape and one[first]]
    if count % vector or any(one[d] % vector for one in walked for d in crossed if problem.shape[d] > 1):
        return "a step of an input is no whole number of vectors"
    return None


class Rows(Fold):
    """Reduction of the dimension innermost in memory, in whole vectors."""

    name, form = "rows", "kRows"
    summary = "threads along what is reduced take its vectors, each located by divisions"

    def why_not_vectors(self, problem: Reduction) -> str | None:
        if not problem.in_rows:
            return "the innermost dimension in memory is kept"
        if reason := why_no_vectors(problem, problem.kept, problem.count(problem.dims)):
            return reason
        whole = problem.layout_reduced(problem.vector)[1] > 1  # type: ignore[index]
        return None if whole else "neighbours are no whole vectors"

    def launch(self, problem: Reduction, gpu: Gpu) -> Launch:
        results, units = problem.count(problem.kept), problem.count(problem.dims) // problem.vector
        along, side, tiles, slabs = self.rows_of(results, units)
        layouts = problem.layout_kept()[0], problem.layout_reduced(problem.vector)[0]  # type: ignore[index]
        return self.cut(problem, (along, side), tiles, slabs, results, units, layouts=layouts)


class Columns(Fold):
    """Reduction that keeps the innermost dimension, in whole vectors; or several contiguous rows are whole vectors."""

    name, form = "columns", "kColumns"
    summary = "a thread owns the columns of a vector in every few rows"

    def why_not_vectors(self, problem: Reduction) -> str | None:
        if problem.in_rows:
            return "the innermost dimension in memory is reduced"
        if self._fits(problem):
            return None
        if not problem.aligned or not _contiguous_columns(problem):
            return why_no_vectors(problem, problem.dims, problem.count(problem.kept)) or "neighbours are apart"
        return None

    def launch(self, problem: Reduction, gpu: Gpu) -> Launch:
        results, units, vector = problem.count(problem.kept), problem.count(problem.dims), problem.vector
        if self._fits(problem):
            layouts = problem.layout_kept(vector)[0], problem.layout_reduced()[0]  # type: ignore[index]
            return self._columns(problem, results // vector, units, layouts)
        # as many rows side by side as are whole vectors: what is left of the last ones ends within a unit
        period = vector // math.gcd(results, vector)
        whole, units, results = results * units, ceil_div(units, period), results * period // vector
        reduced = packed_layout((units,), (1,), 1, (results * vector,))
        kept = packed_layout((results * vector,), (1,), vector, (1,), (1,))
        return self._columns(problem, results, units, (kept[0], reduced[0]), whole, period)  # type: ignore[index]

    def _columns(
        self, problem: Reduction, results: int, units: int, layouts: tuple[np.ndarray, np.ndarray], whole: int = 0,
        period: int = 1,
    ) -> Launch:  # fmt: skip
        """Launch over tiles of columns; where rows straddle sectors (`period` > 1), twice as many threads share a tile."""
        straddle = period > 1
        lanes, threads = (4 * LANES, MOST_THREADS // 2) if straddle else (LANES, MOST_THREADS)
        while threads > FEWEST_THREADS and ceil_div(results, lanes) * threads > COLUMN_THREADS:
            threads //= 2
        deep = units >= threads // lanes * DEEP
        block = finalizing_block(results, units, lanes, threads) if deep else finalizing_block(results, units)
        tiles = ceil_div(results, block[0])
        parts = _full(tiles, COLUMN_THREADS // (block[0] * block[1]))
        slabs = 1 if tiles >= ENOUGH_BLOCKS and not straddle else min(parts, units // (block[1] * UNITS))
        return self.cut(
            problem, block, tiles, slabs, results, units, width=problem.vector, layouts=layouts, whole=whole,
            period=period,
        )  # fmt: skip

    @staticmethod
    def _fits(problem: Reduction) -> bool:
        """Return True if each row begins at a whole vector."""
        apart = why_no_vectors(problem, problem.dims, problem.count(problem.kept))
        return apart is None and problem.layout_kept(problem.vector)[1] > 1  # type: ignore[index]


def _contiguous_columns(problem: Reduction) -> bool:
    """Return True if the only input is contiguous and its first dimensions are reduced to contiguous results."""
    first = max(problem.dims, default=0) < min(problem.kept, default=0)
    results = is_dense([problem.shape[d] for d in problem.kept], problem.results)
    return len(problem.inputs) == 1 and first and results and is_dense(problem.shape, problem.inputs[0])


class Strided(Fold):
    """Any strides, element by element."""

    name, form = "strided", "kStrided"
    summary = "a thread owns a result, or several share one; each element is located by divisions"

    def why_not_vectors(self, problem: Reduction) -> str | None:
        return None

    def launch(self, problem: Reduction, gpu: Gpu) -> Launch:
        results, units = problem.count(problem.kept), problem.count(problem.dims)
        if problem.in_rows:
            along, side, tiles, slabs = self.rows_of(results, units)
            return self.cut(problem, (side, along), tiles, slabs, results, units)
        lanes = 4 * LANES
        deep = units >= MOST_THREADS // lanes * DEEP
        block = finalizing_block(results, units, lanes, MOST_THREADS) if deep else finalizing_block(results, units)
        tiles = ceil_div(results, block[0])
        slabs = 1 if tiles >= ENOUGH_BLOCKS else min(BLOCKS // tiles, units // (block[1] * UNITS))
        return self.cut(problem, block, tiles, slabs, results, units)


def fold_forms(kernel: Kernel | None, loads: int = LOADS) -> list[Form[Reduction]]:
    """Every way in which fold() walks its inputs."""
    return [form(kernel, loads) for form in (Contiguous, Rows, Columns, Strided)]


def launched(
    forms: Forms[Reduction], inputs: Sequence[Tensor], dims: Sequence[int], results: Strides, itemsize: int
) -> tuple[Launch, Sequence[Tensor]]:
    """The launch, and the inputs, copied where their dimensions are too many to walk. They have one shape, and elements.

    `results` are the strides of the output in the dimensions that are kept.
    """
    problem = _problem(inputs, dims, results, itemsize)
    if not _walkable(problem):
        # [results x what is reduced], contiguous: one dimension of each
        order = [*problem.kept, *dims]
        back = sorted(range(len(order)), key=order.__getitem__)
        inputs = [tensor.permute(order).contiguous().permute(back) for tensor in inputs]
        problem = _problem(inputs, dims, results, itemsize)
    return forms.launch(problem, gpu(inputs[0].device)), inputs


def chosen(forms: Forms[Reduction], x: Tensor, dims: Sequence[int]) -> Form[Reduction] | None:
    """The form for contiguous results of one input; None where that is copied first."""
    kept = [size for dim, size in enumerate(x.shape) if dim not in dims]
    results = tuple(math.prod(kept[place + 1 :]) for place in range(len(kept)))
    problem = _problem((x,), dims, results, x.element_size())
    return forms.choose(problem, gpu(x.device)) if _walkable(problem) else None


def _problem(inputs: Sequence[Tensor], dims: Sequence[int], results: Strides, itemsize: int) -> Reduction:
    whole = all(aligned(tensor, 16 // itemsize * tensor.element_size()) for tensor in inputs)
    strides = tuple(tensor.stride() for tensor in inputs)
    return Reduction(tuple(inputs[0].shape), tuple(dims), results, strides, itemsize, whole)


_walkable = functools.lru_cache(maxsize=4096)(walkable)


def finalizing_block(results: int, units: int, wide: int = 32, threads: int = 0) -> tuple[int, int]:
    """A block whose x runs over results: `wide`, by default as a warp, and wider only where units to reduce are few."""
    threads = threads or (THREADS if units < BLOCKS else MOST_THREADS)
    x = min(wide, power_of_two(results))
    while x < min(results, threads) and threads // x > units:
        x *= 2
    return x, threads // x


def longer_dims(shape: Sequence[int], dims: Sequence[int]) -> tuple[list[int], list[int]]:
    """The dimensions kept, and those reduced; one of size 1 is neither."""
    longer = [dim for dim, size in enumerate(shape) if size > 1]
    return [dim for dim in longer if dim not in dims], [dim for dim in longer if dim in dims]


def power_of_two(least: int) -> int:
    """The smallest that is no less."""
    return 1 << (max(least, 1) - 1).bit_length()


def _full(tiles: int, at_once: int) -> int:
    """Into how many slabs to cut, the fewest by which nearly all of the blocks that run at once always do."""
    slabs = max(at_once // tiles, 1)
    while slabs * tiles < BLOCKS and -slabs * tiles % at_once > slabs * tiles // 8:
        slabs += 1
    return slabs
