"""The gradient of a reduction: what a result's is to each element of the input. See common/reduce/reduce_backward.cuh."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..._kernel.kernel import Kernel, ceil_div
from ..._util.strides import aligned, is_dry
from ..core.forms import Form, Forms, Launch
from ..core.gpu import Gpu, gpu
from ..elementwise.broadcast import Broadcast, Strides, empty_output, is_dense, walked
from ..elementwise.broadcast import Strided as StridedBroadcast
from ..elementwise.elementwise import why_not_size
from ..gemm.gemm import divisor
from .reduction import BLOCKS, SHORT_VECTORS, THREADS, UNITS, longer_dims, power_of_two

VECTORS = 4  # that a thread has of a row, or of columns, at once
SHORT_UNITS = 2  # that a thread has of short rows
DEFINE = {"BACKWARD_VECTORS": VECTORS, "BACKWARD_SHORT_UNITS": SHORT_UNITS}


class Gradient(NamedTuple):
    """A gradient of the input's shape, which has elements, and the results that it is made of."""

    shape: tuple[int, ...]
    dims: tuple[int, ...]  # that were reduced
    gradient: Strides
    inputs: tuple[Strides, ...]  # of the input, and of the results over its shape
    itemsize: int
    aligned: bool  # whether input and gradient begin at 16-byte boundaries
    masks: bool = False  # whether forward left a bit for each element

    @property
    def vector(self) -> int:
        """Elements that make 16 bytes."""
        return 16 // self.itemsize

    @property
    def rows(self) -> tuple[int, int] | None:
        """(rows, size), where the input is contiguous and the last dimensions were reduced."""
        kept, reduced = longer_dims(self.shape, self.dims)
        last = not kept or bool(reduced and kept[-1] < reduced[0])
        return (self._count(kept), self._count(reduced)) if last and self._is_contiguous else None

    @property
    def columns(self) -> tuple[int, int] | None:
        """(rows, size), where the input is contiguous and the first dimensions were reduced."""
        kept, reduced = longer_dims(self.shape, self.dims)
        first = not reduced or bool(kept and reduced[-1] < kept[0])
        return (self._count(reduced), self._count(kept)) if first and self._is_contiguous else None

    @property
    def _is_contiguous(self) -> bool:
        reduced = self._count(self.dims)
        return reduced < 1 << 31 and is_dense(self.shape, self.inputs[0]) and is_dense(self.shape, self.gradient)

    def _count(self, dims: Sequence[int]) -> int:
        return math.prod(self.shape[dim] for dim in dims) if self.shape else 1


class _OneKernel(Form[Gradient]):
    def why_not(self, problem: Gradient, gpu: Gpu) -> str | None:
        if reason := why_not_size(self.kernel, problem.itemsize):
            return reason
        if problem.masks:
            return "forward has left masks"
        return self.why_not_shape(problem)

    def why_not_shape(self, problem: Gradient) -> str | None:
        """Return why it does not serve that shape, or None."""
        raise NotImplementedError


class ShortRows(_OneKernel):
    """Rows of a few vectors, all of which together are cut into vectors."""

    name = "short_rows"
    summary = (
        "a thread owns vectors of the whole array, each of which may have the end of a row and the next one's start"
    )

    def why_not_shape(self, problem: Gradient) -> str | None:
        if problem.rows is None:
            return "the input is not contiguous, or not its last dimensions were reduced"
        many = ceil_div(problem.rows[1], problem.vector) > SHORT_VECTORS
        return f"a row is more than {SHORT_VECTORS} vectors" if many else None

    def launch(self, problem: Gradient, gpu: Gpu) -> Launch:
        rows, size = problem.rows  # type: ignore[misc]
        whole = problem.aligned and size >= problem.vector
        units = ceil_div(rows * size, problem.vector if whole else 1)
        by_size = np.array(divisor(size), dtype=np.int64)
        named = {"rows": rows, "size": size, "aligned": whole, "by_size": by_size}
        return Launch(self.kernel, ceil_div(units, SHORT_UNITS * THREADS), THREADS, named=named)


class MaskedRows(ShortRows):
    """Variant of `ShortRows` that reads a bit for each element, left by forward, and not the input."""

    name = "masked_rows"
    summary = "the same, by the masks that forward left of rows that a thread owned"

    def why_not(self, problem: Gradient, gpu: Gpu) -> str | None:
        return None if problem.masks else "forward has left no masks"


class Rows(_OneKernel):
    """Contiguous rows."""

    name = "rows"
    summary = "a thread owns vectors of the gradient in a row, and the unaligned elements at its ends"

    def why_not_shape(self, problem: Gradient) -> str | None:
        return "the input is not contiguous, or not its last dimensions were reduced" if problem.rows is None else None

    def launch(self, problem: Gradient, gpu: Gpu) -> Launch:
        rows, size = problem.rows  # type: ignore[misc]
        vectors = ceil_div(size, problem.vector)
        along = min(THREADS, power_of_two(ceil_div(vectors, VECTORS)))
        parts, side = ceil_div(vectors, along * VECTORS), THREADS // along
        named = {"rows": rows, "size": size, "parts": parts}
        return Launch(self.kernel, ceil_div(rows, side) * parts, (along, side), named=named)


class Columns(_OneKernel):
    """Contiguous columns, where input and gradient begin at 16-byte boundaries."""

    name = "columns"
    summary = "a thread owns the columns of a vector in every few rows"

    def why_not_shape(self, problem: Gradient) -> str | None:
        if problem.columns is None:
            return "the input is not contiguous, or not its first dimensions were reduced"
        return None if problem.aligned else "a tensor begins within a vector"

    def launch(self, problem: Gradient, gpu: Gpu) -> Launch:
        size, number = problem.columns  # type: ignore[misc]
        period = problem.vector // math.gcd(number, problem.vector)  # rows that are whole vectors
        across, units = number * period // problem.vector, ceil_div(size, period)
        lanes = min(THREADS // 2, power_of_two(across))
        tiles, deep = ceil_div(across, lanes), THREADS // lanes
        slabs = max(1, min(ceil_div(2 * BLOCKS, tiles), units // (deep * UNITS)))
        named = {"rows": size, "size": number, "period": period}
        return Launch(self.kernel, (tiles, slabs), (lanes, deep), named=named)


class Strided(_OneKernel):
    """Any strides."""

    name = "strided"
    summary = "a thread owns a vector of the gradient, and locates it in the input and in the results by divisions"

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        self._broadcast = StridedBroadcast(kernel)

    def why_not_shape(self, problem: Gradient) -> str | None:
        return None

    def launch(self, problem: Gradient, gpu: Gpu) -> Launch:
        return self._broadcast.launch(Broadcast(problem.shape, problem.gradient, problem.inputs, problem.itemsize), gpu)


def gradient(
    forms: Forms[Gradient],
    x: Tensor,
    dims: Sequence[int],
    keepdim: bool,
    results: Sequence[Tensor],
    options: Sequence[Any] = (),
    places: Sequence[Tensor] = (),
    masks: bool = False,
) -> Tensor:
    """The gradient of x from tensors of the results' shape.

    Kernels take (x, *results, *places, grad_x, *options, ...), those of any strides the results over the shape of x and no
    `places`.
    """
    grad_x = empty_output(x)
    if is_dry(x) or x.numel() == 0:
        return grad_x
    over = walked(grad_x, (x, *[over_input(one, dims, keepdim, x.shape) for one in results]))
    strides = tuple(tensor.stride() for tensor in over)
    whole = aligned(x) and aligned(grad_x)
    problem = Gradient(tuple(x.shape), tuple(dims), grad_x.stride(), strides, x.element_size(), whole, masks)
    launch = forms.launch(problem, gpu(x.device))
    if launch.args:  # of any strides
        launch(*over, grad_x, *options, T=x.dtype)
    else:
        dense = [one.contiguous() for one in (*results, *places)]
        launch(x, *dense, grad_x, *options, T=x.dtype)
    return grad_x


def over_input(result: Tensor, dims: Sequence[int], keepdim: bool, size: Sequence[int]) -> Tensor:
    """A tensor of the results' shape over what was reduced to them: a view."""
    if not keepdim:
        for dim in dims:
            if len(size):
                result = result.unsqueeze(dim)
    return result.expand(size)
