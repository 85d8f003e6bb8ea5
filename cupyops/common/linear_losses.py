"""The logits of a linear layer a part at a time, their losses, and the gradients of the layer's tensors.

Rows are taken in chunks: a GEMM of PyTorch's gives a chunk's logits, our kernel the losses and, in the place of the logits,
their gradients, and a second GEMM that of the input. What is left is the weight's gradient, a sum over all rows.

In fp32 and fp64 it is added up chunk by chunk: three GEMMs. In a half type that would round it once for each chunk: for
eight chunks the error is up to 3 times that of PyTorch's one rounding. So, unless one chunk holds all rows, or all but a
few, it is made in tiles of classes, each from the gradients of all rows and rounded once. Those of the first rows are
kept, in the memory of the weight's gradient itself, which has room for as many rows as the input has features, and those
of the last in what the tiles leave of the scratch; those of the rows between are computed again. So that their logits are
the same again, both times each tile has a GEMM of its own, of the same sizes, and no part of a sum is rounded in it, as
cuBLAS may do in a half type.

A GEMM of a half type is fast where all its sizes are multiples of 16 bytes. So there the last classes that are not make
a GEMM of their own, with weights of zero up to the next multiple.
"""

from __future__ import annotations

import functools
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernel import FLOATING, Kernel, ceil_div
from ..layout import is_dry
from . import held

HALF = (torch.float16, torch.bfloat16)
FILE = "fused_linear_cross_entropy.cu"
linear_cross_entropy_rows = Kernel(FILE, "linear_cross_entropy_rows<T>", T=FLOATING)
linear_cross_entropy_held = Kernel(FILE, "linear_cross_entropy_held<T, THREADS>", T=FLOATING, THREADS=held.THREADS)
linear_cross_entropy_keep = Kernel(FILE, "linear_cross_entropy_keep<T>", T=HALF)
linear_cross_entropy_tile = Kernel(FILE, "linear_cross_entropy_tile<T>", T=HALF)
linear_cross_entropy_bias = Kernel(FILE, "linear_cross_entropy_bias<T>", T=FLOATING)

SCRATCH = 240 << 20  # bytes of logits, or of their gradients, at a time
ROW_STEP = 64  # rows of a chunk are a multiple of it, and the classes of a tile of CLASS_STEP: what suits a GEMM
CLASS_STEP = 256
TILE = 2048  # classes of a tile: enough for a GEMM of all rows
FEW = 4  # a first chunk of this part of the rows may be rounded by itself: half as large, it adds half a last place
HELD = 1 << 14  # bytes of a row from which on a block holds it
ROW_BLOCK = 1024
TILE_BLOCK = 256

X, WEIGHT, BIAS = 1, 2, 4  # bits of `wanted`: the gradients that are to be computed


class Given(NamedTuple):
    """What every launch gets, contiguous."""

    x: Tensor
    weight: Tensor
    target: Tensor
    bias: Tensor | None
    class_weight: Tensor | None
    ignore_index: int
    label_smoothing: float

    def options(self, scale_step: int) -> np.ndarray | None:
        """The kernels' `Options`; None on a dry run, whose sizes may be symbols."""
        if is_dry(self.x):
            return None
        packed = struct.pack("=qdii", self.ignore_index, self.label_smoothing, self.weight.shape[0], scale_step)
        return np.frombuffer(packed, np.uint8)


class Scale(NamedTuple):
    """What the rows' gradients are multiplied by: `factors` in the kernels, `alpha` in the GEMMs after them."""

    factors: Tensor | None
    step: int = 0
    alpha: float = 1.0


class Gradients(NamedTuple):
    """Of the input, the weight and the bias; None for one that is not wanted."""

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


class Division(NamedTuple):
    """Rows of a chunk and classes of a tile; `stride` from a chunk's row to the next, so that each begins at 16 bytes."""

    rows: int
    classes: int
    stride: int
    at_once: bool  # the weight's gradient is added up by chunks
    kept: int  # first rows, whose gradients wait in the memory of the weight's gradient
    stored: int  # last rows, whose gradients wait in the scratch, behind the tile


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
    most -= most % ROW_STEP if most > ROW_STEP else 0
    if rows <= most:
        return Division(rows, stride, stride, True, 0, 0)
    if dtype in HALF and rows - most <= rows // FEW:  # no less in the first: the GEMM of a few rows is as slow
        most -= (most - (rows - rows // FEW)) // ROW_STEP * ROW_STEP
        return Division(most, stride, stride, True, 0, 0)
    if dtype not in HALF:
        return Division(_even(rows, most, ROW_STEP), stride, stride, True, 0, 0)
    tile = ceil_div(_even(stride, min(elements // rows, TILE), CLASS_STEP), width) * width
    kept = min(features, rows)
    stored = min(max(elements - rows * tile, 0) // stride, rows - kept)
    return Division(_even(rows, most, ROW_STEP), tile, stride, False, kept, stored)


def _even(count: int, most: int, step: int) -> int:
    """The size of a part, of parts alike in size, of `count`: at most `most`, a multiple of `step` where there is room."""
    if most >= count:
        return max(count, 1)
    step = step if most >= step else 1
    most = max(most // step * step, 1)
    part = ceil_div(count, ceil_div(count, most))
    return ceil_div(part, step) * step


def _parts(begin: int, end: int, size: int) -> Iterator[tuple[int, int]]:
    """Of `size`, but the first, which is what is left."""
    first = (end - begin) % size
    if first:
        yield begin, begin + first
    for start in range(begin + first, end, size):
        yield start, start + size


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
    rows, features = x.shape
    if rows == 0:
        for one in gradients[1:]:
            if one is not None:
                one.zero_()
        return gradients
    work = Work(given, each, scale, gradients)
    if work.tiled:
        with _whole_sums(x.dtype):
            work.run()
    else:
        work.run()
    return gradients


_flags = threading.Lock()


@contextmanager
def _whole_sums(dtype: torch.dtype) -> Iterator[None]:
    """No GEMM asked for here adds parts of a sum in a half type. One thread at a time, as PyTorch has but one flag."""
    of, name = torch.backends.cuda.matmul, "fp16" if dtype is torch.float16 else "bf16"
    flag = f"allow_{name}_reduced_precision_reduction"
    with _flags:
        if not getattr(of, flag):
            yield
            return
        setattr(of, flag, False)
        try:
            yield
        finally:
            setattr(of, flag, True)


class Work:
    """One call: what its parts share."""

    def __init__(self, given: Given, each: Tensor, scale: Scale, gradients: Gradients) -> None:
        self.given, self.scale, self.gradients = given, scale, gradients
        x, weight = given.x, given.weight
        (self.rows, features), self.classes = x.shape, weight.shape[0]
        self.division = division = _division(self.rows, features, self.classes, x.dtype, SCRATCH)
        self.tiled = not division.at_once and (gradients.weight is not None or gradients.bias is not None)
        self.kept = division.kept if self.tiled and gradients.weight is not None else 0
        self.stored = division.stored if self.tiled else 0
        behind = self.rows * division.classes if self.tiled else 0
        size = max(min(division.rows, self.rows) * division.stride, behind + self.stored * division.stride)
        self.scratch = torch.empty(size, dtype=x.dtype, device=x.device)
        self.store = self.scratch[behind:]
        self.stats = torch.empty((3, self.rows), dtype=each.dtype, device=x.device)
        self.tensors = given.target, given.class_weight, scale.factors, each, self.stats
        self.options = given.options(scale.step)
        self.tail = _tail(given)
        self.twice: list[tuple[int, int]] = []  # rows whose logits are computed with the losses, and for each tile

    def run(self) -> None:
        """First the rows that are computed twice, as the memory of the weight's gradient is free for them."""
        grad_weight, between = self.gradients.weight, self.rows - self.stored
        room, most = self.scratch, self.division.rows
        if self.kept and grad_weight is not None and grad_weight.numel() > room.numel():
            room = grad_weight.view(-1)
            most = _even(max(between - self.kept, 1), room.numel() // self.division.stride, ROW_STEP)
        parts = list(_parts(self.kept, between, most))
        self.twice = parts if self.tiled else []
        for begin, end in parts:
            self.chunk(begin, end, room, again=self.tiled)
        for begin, end in _parts(0, self.kept, _even(self.kept, self.division.rows, ROW_STEP)):
            self.keep(begin, end, self.chunk(begin, end, self.scratch))
        if self.stored:
            self.chunk(between, self.rows, self.store)
        for first in range(0, self.classes if self.tiled else 0, self.division.classes):
            self.tile(first, min(first + self.division.classes, self.classes))

    def chunk(self, begin: int, end: int, room: Tensor, again: bool = False) -> Tensor:
        """The losses of rows, the input's gradient and, where it can be added up, the weight's. Gives the logits'.

        again: the logits will be computed once more, tile by tile.
        """
        given, gradients, stride, dtype = self.given, self.gradients, self.division.stride, self.given.x.dtype
        d = room[: (end - begin) * stride].view(end - begin, stride)
        width = self.division.classes if again else stride
        for first in range(0, self.classes, width):
            last = min(first + width, self.classes)
            self.logits(begin, end, first, last, d[:, first : first + min(width, stride - first)])
        wanted = int(gradients != (None, None, None))
        size, device = self.classes * dtype.itemsize, d.device
        plan = None
        if size >= HELD and not given.label_smoothing:
            plan = held.plan(self.classes, dtype.itemsize, 1, device, held.clusters(device))
        if plan is not None:
            launch, options = (
                plan.launch(linear_cross_entropy_held, end - begin),
                (stride, plan.packs, self.options, wanted),
            )
            launch(d, *self.tensors, begin, end - begin, self.rows, *options, T=dtype, THREADS=plan.threads)
        else:
            block = min(ROW_BLOCK, max(32, 1 << (ceil_div(size, 64) - 1).bit_length()))
            launch = linear_cross_entropy_rows[end - begin, block]
            launch(d, *self.tensors, begin, self.rows, stride, self.options, wanted, T=dtype)
        if gradients.x is not None:
            self.input_gradient(d, gradients.x[begin:end])
        if self.division.at_once:
            if gradients.weight is not None:
                self.weight_gradient(d, 0, self.classes, slice(begin, end), int(begin > 0))
            _sum_columns(gradients.bias, d, self.classes, self.scale.alpha, begin > 0)
        return d

    def keep(self, begin: int, end: int, d: Tensor) -> None:
        """The gradients of rows' logits, each tile's in the tile's own part of the weight's gradient."""
        to, tile = self.gradients.weight, self.division.classes
        assert to is not None
        launch = linear_cross_entropy_keep[end - begin, TILE_BLOCK]
        launch(d, to, begin, self.kept, self.classes, tile, to.shape[1], d.stride(0), T=d.dtype)

    def tile(self, first: int, last: int) -> None:
        """The gradients of some classes' weights and biases, from those of all rows' logits."""
        gradients, width, dtype = self.gradients, self.division.classes, self.given.x.dtype
        stride, between = min(width, self.division.stride - first), self.rows - self.stored
        tile = self.scratch[: self.rows * stride].view(self.rows, stride)
        for begin, end in self.twice:
            self.logits(begin, end, first, last, tile[begin:end])
        kept = None if gradients.weight is None else gradients.weight[first:]
        target, class_weight, factors, _, stats = self.tensors
        where = self.kept, between, self.rows, first, last - first, stride, self.division.stride
        sources = kept if self.kept else None, self.store[first:] if self.stored else None
        launch = linear_cross_entropy_tile[self.rows, TILE_BLOCK]
        launch(tile, *sources, target, class_weight, factors, stats, *where, self.options, T=dtype)
        if gradients.weight is not None:
            self.weight_gradient(tile, first, last, slice(None), 0)
        if gradients.bias is not None:
            _sum_columns(gradients.bias[first:last], tile, last - first, self.scale.alpha, False)

    # --- products ---

    def logits(self, begin: int, end: int, first: int, last: int, out: Tensor) -> None:
        """Of rows and classes; zeros where `out` is wider."""
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
        x, out, middle = self.given.x[rows], self.gradients.weight, min(last, self.tail.first)
        assert out is not None
        for begin, end in ((first, middle), (middle, last)):
            if begin < end:
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


def _sum_columns(grad_bias: Tensor | None, d: Tensor, columns: int, factor: float, add: bool) -> None:
    if grad_bias is None:
        return
    rows, stride = d.shape
    launch = linear_cross_entropy_bias[ceil_div(columns, 32), (32, 8)]
    launch(d, grad_bias, rows, columns, stride, factor, int(add), T=d.dtype)
