"""The logits of a linear layer a part at a time, their losses, and the gradients of the layer's tensors.

Rows are taken in chunks: a GEMM of PyTorch's gives a chunk's logits, our kernel the losses and, in the place of the logits,
their gradients, and a second GEMM that of the input. What is left is the weight's gradient, a sum over all rows.

In fp32 and fp64 it is added up chunk by chunk: three GEMMs. In a half type each chunk that is added rounds it once more, by
at most half a last place, so that no more than ADDED are. What the rows before those give is rounded once: it is made in
tiles of classes, each from the gradients of all these rows. Those of the first are kept, in the memory of the weight's
gradient itself, which has room for as many rows as the input has features, and those of the next in what the tiles leave
of the scratch; the logits of the rows after these are computed again. Both times they are the same, bit for bit, as the
GEMM is the same: the first time, too, it writes a tile, as wide and as aligned, which is then copied.

A GEMM of a half type is fast where all its sizes are multiples of 16 bytes. So there the last classes that are not make
a GEMM of their own, with weights of zero up to the next multiple.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..._kernel.kernel import FLOATING, Kernel, ceil_div
from ..._util.strides import is_dry
from ..core import persistent
from ..core.forms import Form, Forms, Launch
from ..core.gpu import Gpu, gpu
from . import linear_parts, losses

HALF = (torch.float16, torch.bfloat16)


def kernel(name: str, **domain: Any) -> Kernel:
    """A kernel of fused_linear_cross_entropy.cu."""
    return Kernel("fused_linear_cross_entropy.cu", f"linear_cross_entropy_{name}", define=losses.DEFINE, **domain)


linear_cross_entropy_keep = kernel("keep<T>", T=HALF)
linear_cross_entropy_tile = kernel("tile<T>", T=HALF)
linear_cross_entropy_bias = kernel("bias<T>", T=FLOATING)

ADDED = 4  # chunks that are added to a half type's weight gradient: without them the logits would be computed twice
CLASS_STEP = 256  # the number of classes of a tile is a multiple of it, which suits a GEMM
ROW_STEP = 64  # the same of the rows of a chunk: with more rows in the chunks that are added, fewer are computed twice
TILE = 4096  # classes of a tile: enough for a GEMM of all rows, and few enough tiles that the host is ahead
LINE = 128  # elements of a half type, 256 bytes: cuBLAS sees no alignment beyond that
PERSISTENT_BYTES = 1 << 14  # of a row from which on shared memory is faster than a cache
ROW_BLOCK = 1024
TILE_BLOCK = 256

X, WEIGHT, BIAS = 1, 2, 4  # bits of `wanted`: the gradients that are to be computed


class Given(NamedTuple):
    """Arguments of every launch; tensors are contiguous."""

    x: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    class_weight: Tensor | None
    ignore_index: int
    label_smoothing: float
    scratch: int  # bytes; 0 for as many as any operator may use

    def options(self, scale_step: int) -> np.ndarray | None:
        """The kernels' `Options`; None on a dry run, whose sizes may be symbols."""
        if is_dry(self.x):
            return None
        packed = struct.pack("=qdii", self.ignore_index, self.label_smoothing, self.weight.shape[0], scale_step)
        return np.frombuffer(packed, np.uint8)


class Problem(NamedTuple):
    """Rows of logits that become losses and gradients."""

    rows: int
    classes: int
    dtype: torch.dtype
    smoothed: bool


class Persistent(Form[Problem]):
    name = "persistent"
    summary = "a block or a cluster keeps a row of logits in shared memory, and writes its gradient there"
    kernel = kernel("persistent<T, THREADS, BLOCKS, OWN>", **losses.persistent_domain())

    def why_not(self, problem: Problem, gpu: Gpu) -> str | None:
        if problem.smoothed:
            return "with label smoothing the target is not the class alone"
        if problem.dtype is torch.float64:
            return "fp64 has one kernel, two_pass"
        return None if self._plan(problem, gpu) else "the shared memory of a block, or of a cluster, holds no row"

    def why_slower(self, problem: Problem, gpu: Gpu) -> str | None:
        short = problem.classes * problem.dtype.itemsize < PERSISTENT_BYTES
        return "a cache holds so short a row" if short else None

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        plan = self._plan(problem, gpu)
        assert plan is not None
        launch = plan.launch(self.kernel, problem.rows, T=problem.dtype)
        return replace(launch, named={"rows": problem.rows, **launch.named})

    def _plan(self, problem: Problem, gpu: Gpu) -> persistent.Plan | None:
        threads = losses.persistent_threads(problem.dtype)
        return persistent.plan(problem.classes, problem.dtype.itemsize, 1, gpu, threads)


class TwoPass(Form[Problem]):
    name = "two_pass"
    summary = "a block reads a row of logits, and reads it again to write its gradient there"
    kernel = kernel("two_pass<T>", T=FLOATING)

    def launch(self, problem: Problem, gpu: Gpu) -> Launch:
        threads = 1 << (ceil_div(problem.classes * problem.dtype.itemsize, 64) - 1).bit_length()
        return Launch(self.kernel, problem.rows, min(ROW_BLOCK, max(32, threads)), template={"T": problem.dtype})


ROWS = Forms("fused_linear_cross_entropy", "forward", (Persistent(), TwoPass()))


class Scale(NamedTuple):
    """Scale of the rows' gradients: `factors` multiply in the kernels, `alpha` in the GEMMs after them."""

    factors: Tensor | None
    step: int = 0
    alpha: float = 1.0


class Gradients(NamedTuple):
    """Gradients of the input, the weight and the bias; None for one that is not wanted."""

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class Division(NamedTuple):
    """`stride` from one row of a chunk's logits to the next, so that each begins at 16 bytes; 0 rows in tiles: no tiles."""

    rows: int  # of a chunk, at most
    stride: int
    tiled: int = 0  # first rows, whose part of the weight's gradient is made in tiles
    classes: int = 1  # of a tile
    kept: int = 0  # the first of these, whose gradients wait in the memory of the weight's gradient
    stored: int = 0  # and the next, whose gradients wait at the end of the scratch, behind the tile


class Tail(NamedTuple):
    """The classes from `first` on, a multiple of 16 bytes, with zeros up to the next; None: no GEMM of their own."""

    first: int
    weight: Tensor | None
    bias: Tensor | None


@functools.lru_cache(maxsize=1024)
def _division(rows: int, features: int, classes: int, dtype: torch.dtype, scratch: int) -> Division:
    width = 16 // dtype.itemsize
    stride, elements = ceil_div(classes, width) * width, scratch // dtype.itemsize
    most = max(elements // stride, 1)
    step = ROW_STEP if most > ROW_STEP else 1
    most -= most % step
    if dtype not in HALF or rows <= (1 + ADDED) * most:
        return Division(most, stride)
    tiled = rows - ADDED * most  # to wait is to be copied twice: that takes longer than to be added
    tile = ceil_div(_even(stride, min(elements // tiled, TILE), CLASS_STEP), width) * width
    kept = min(features, tiled)
    stored = min(max(elements - tiled * tile, 0) // stride, tiled - kept)
    return Division(most, stride, tiled, tile, kept, stored)


def _even(count: int, most: int, step: int) -> int:
    """The size of a part, of parts alike in size, of `count`: at most `most`, a multiple of `step` where there is room."""
    if most >= count:
        return max(count, 1)
    step = step if most >= step else 1
    most = max(most // step * step, 1)
    part = ceil_div(count, ceil_div(count, most))
    return ceil_div(part, step) * step


def _parts(begin: int, end: int, most: int) -> Iterator[tuple[int, int]]:
    """Divide rows into parts of equal size, at most `most`; the first part is what is left over."""
    size = _even(end - begin, most, ROW_STEP)
    first = (end - begin) % size
    if first:
        yield begin, begin + first
    for start in range(begin + first, end, size):
        yield start, start + size


def _waiting(division: Division) -> Iterator[tuple[int, int]]:
    """Yield chunks of the rows whose gradients wait for the tiles, the rest first; stored ones are all in the last."""
    count, most = division.kept + division.stored, division.rows
    if count:
        size = most if count > 2 * most else _even(count, most, ROW_STEP)  # as large as may be, unless the rest is much
        last = count - max(size, division.stored)
        yield from ((max(end - size, 0), end) for end in range(last % size or size, last + 1, size) if last)
        yield last, count


def compute(given: Given, each: Tensor, scale: Scale, wanted: int) -> Gradients:
    """The loss of each row, and the gradients that are wanted."""
    x, weight, bias = given.x, given.weight, given.bias
    gradients = Gradients(
        torch.empty_like(x) if wanted & X else None,
        torch.empty_like(weight) if wanted & WEIGHT else None,
        torch.empty_like(bias) if wanted & BIAS and bias is not None else None,
    )
    if is_dry(x):
        return gradients
    if x.shape[0]:
        if gradients != (None, None, None) or not linear_parts.compute(given, each):
            Work(given, each, scale, gradients).run()
    else:
        for one in gradients[1:]:
            if one is not None:
                one.zero_()
    return gradients


class Work:
    """State that the parts of one call share."""

    def __init__(self, given: Given, each: Tensor, scale: Scale, gradients: Gradients) -> None:
        self.given, self.scale, self.gradients = given, scale, gradients
        x, weight = given.x, given.weight
        (self.rows, features), self.classes = x.shape, weight.shape[0]
        scratch = given.scratch or gpu(x.device).scratch
        division = _division(self.rows, features, self.classes, x.dtype, scratch)
        self.division = division if gradients.weight is not None else Division(division.rows, division.stride)
        _, stride, tiled, tile, kept, stored = self.division
        least = LINE + tile + stride if tiled else 0
        size = max(min(division.rows, self.rows) * stride, tiled * tile + stored * stride, least)
        self.scratch = torch.empty(size, dtype=x.dtype, device=x.device)
        self.store = self.scratch[size - stored * stride :]
        self.buffer, self.twice = self.scratch, list[tuple[int, int]]()
        if kept + stored < tiled:
            self.buffer, most = self.first_buffer()
            self.twice = list(_parts(kept + stored, tiled, most))
        self.stats = torch.empty((3, self.rows), dtype=each.dtype, device=x.device)
        self.sums = None if gradients.bias is None else torch.zeros(self.classes, dtype=each.dtype, device=x.device)
        self.tensors = given.target, given.class_weight, scale.factors, each, self.stats
        self.options = given.options(scale.step)
        self.tail = _tail(given)

    def run(self) -> None:
        """First the rows that are computed twice, as the memory of the weight's gradient is free for them."""
        most, _, tiled, _, kept, stored = self.division
        for begin, end in self.twice:
            self.first_time(begin, end)
        for begin, end in _waiting(self.division):
            d = self.chunk(begin, end)
            if begin < kept:
                self.keep(begin, min(end, kept), d)
        for first, last, tile in self.tiles():
            self.tile(first, last, tile)
        for begin, end in _parts(tiled, self.rows, most):
            d = self.chunk(begin, end)
            self.weight_gradient(d, 0, self.classes, slice(begin, end), int(begin > 0))
        if self.gradients.bias is not None and self.sums is not None:
            self.gradients.bias.copy_(self.sums)

    def tiles(self) -> Iterator[tuple[int, int, Tensor]]:
        """First and last class, and the place of the tile: a row for each of `tiled`, as long as a multiple of 16 bytes."""
        _, stride, tiled, width, _, _ = self.division
        for first in range(0, self.classes if tiled else 0, width):
            columns = min(width, stride - first)
            yield first, min(first + width, self.classes), self.scratch[: tiled * columns].view(tiled, columns)

    def first_buffer(self) -> tuple[Tensor, int]:
        """Buffer for logits that are computed again later, and the rows at a time that fit beside the tile."""
        scratch, weight, (_, stride, _, tile, _, _) = self.scratch, self.gradients.weight, self.division
        size = scratch.numel() - LINE
        most = size // (tile + stride)
        if weight is None or weight.numel() // stride <= most:
            return scratch[LINE + most * tile :], most
        return weight.view(-1), min(weight.numel() // stride, size // tile)

    def first_time(self, begin: int, end: int) -> None:
        """Compute rows' losses from logits that are computed again later, with the same products as in the tiles."""
        d = self.logits_in(self.buffer, begin, end)
        for first, last, tile in self.tiles():
            columns = tile.shape[1]
            again = self.scratch[begin * columns % LINE :][: (end - begin) * columns].view(end - begin, columns)
            self.logits(begin, end, first, last, again)
            words = [t.view(torch.complex128) for t in (d[:, first : first + columns], again)]  # 16 bytes each
            words[0].copy_(words[1])
        self.losses(begin, end, d)

    def chunk(self, begin: int, end: int) -> Tensor:
        """Compute losses of rows whose logits are computed once, in the scratch's end; return the logits' gradients."""
        d = self.logits_in(self.scratch[-(end - begin) * self.division.stride :], begin, end)
        self.logits(begin, end, 0, self.classes, d)
        self.losses(begin, end, d)
        return d

    def logits_in(self, buffer: Tensor, begin: int, end: int) -> Tensor:
        stride = self.division.stride
        return buffer[: (end - begin) * stride].view(end - begin, stride)

    def losses(self, begin: int, end: int, d: Tensor) -> None:
        """Turn logits into their gradients, adding up losses; compute the input's and these rows' part of the bias's."""
        gradients, (rows, stride), dtype, device = self.gradients, d.shape, d.dtype, d.device
        problem = Problem(rows, self.classes, dtype, self.given.label_smoothing > 0)
        launch, wanted = ROWS.launch(problem, gpu(device)), int(gradients != (None, None, None))
        launch(d, *self.tensors, begin, self.rows, stride, options=self.options, gradients=wanted)
        if gradients.x is not None:
            self.input_gradient(d, gradients.x[begin:end])
        if self.sums is not None:
            add = linear_cross_entropy_bias[ceil_div(self.classes, 32), (32, 8)]
            add(d, self.sums, rows, self.classes, stride, self.scale.alpha, T=dtype)

    def keep(self, begin: int, end: int, d: Tensor) -> None:
        """The gradients of rows' logits, each tile's in the tile's own part of the weight's gradient."""
        to, division = self.gradients.weight, self.division
        assert to is not None
        launch = linear_cross_entropy_keep[end - begin, TILE_BLOCK]
        launch(d, to, begin, division.kept, self.classes, division.classes, to.shape[1], division.stride, T=d.dtype)

    def tile(self, first: int, last: int, tile: Tensor) -> None:
        """Compute the weight's gradient for some classes, from the gradients of all rows' logits in tiles."""
        gradients, (_, stride, tiled, _, kept, stored) = self.gradients, self.division
        assert gradients.weight is not None
        for begin, end in self.twice:
            self.logits(begin, end, first, last, tile[begin:end])
        target, class_weight, factors, _, stats = self.tensors
        where = kept, kept + stored, self.rows, first, last - first, tile.shape[1], stride
        sources = gradients.weight[first:] if kept else None, self.store[first:] if stored else None
        launch = linear_cross_entropy_tile[tiled, TILE_BLOCK]
        launch(tile, *sources, target, class_weight, factors, stats, *where, self.options, T=tile.dtype)
        self.weight_gradient(tile, first, last, slice(tiled), 0)

    # --- products ---

    def logits(self, begin: int, end: int, first: int, last: int, out: Tensor) -> None:
        """Compute the logits of rows and classes; fill with zeros where `out` is wider."""
        x, weight, bias = self.given.x[begin:end], self.given.weight, self.given.bias
        middle = min(last, self.tail.first)
        if first < middle:
            _affine(x, weight[first:middle], None if bias is None else bias[first:middle], out[:, : middle - first])
        if middle < last:
            assert self.tail.weight is not None
            _affine(x, self.tail.weight, self.tail.bias, out[:, middle - first :])
            out[:, last - first :].zero_()

    def input_gradient(self, d: Tensor, out: Tensor) -> None:
        first, alpha = self.tail.first, self.scale.alpha
        if self.tail.weight is not None:  # first, since the smaller part is rounded twice
            _product(out, d[:, first:], self.tail.weight, alpha)
        if first:
            _product(out, d[:, :first], self.given.weight[:first], alpha, int(self.tail.weight is not None))

    def weight_gradient(self, d: Tensor, first: int, last: int, rows: slice, beta: int) -> None:
        """Compute the weight's gradient for some classes from logits' gradients of some rows; add to it if `beta`."""
        x, out, middle = self.given.x[rows], self.gradients.weight, min(last, self.tail.first)
        for begin, end in ((first, middle), (middle, last)):
            if out is not None and begin < end:
                _product(out[begin:end], d[:, begin - first : end - first].t(), x, self.scale.alpha, beta)


def _tail(given: Given) -> Tail:
    weight, bias = given.weight, given.bias
    classes, features = weight.shape
    width = 16 // weight.element_size()
    first = classes // width * width
    if first == classes or weight.dtype not in HALF:
        return Tail(classes, None, None)
    padded = weight.new_zeros(width, features)
    padded[: classes - first] = weight[first:]
    if bias is not None:
        bias = torch.cat((bias[first:], bias.new_zeros(width - classes + first)))
    return Tail(first, padded, bias)


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


def _product(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: int = 0) -> None:
    """out = alpha a b + beta out."""
    torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)
