"""The logits of a linear layer a part at a time, their losses, and the gradients of the layer's tensors.

Rows are taken in chunks: a GEMM of PyTorch's gives a chunk's logits, our kernel the losses and, in the place of the logits,
their gradients, and a second GEMM that of the input. What is left is the weight's gradient, a sum over all rows.

In fp32 and fp64 it is added up chunk by chunk: three GEMMs. In a half type that would round it once for each chunk: for
eight chunks the error is up to 3 times that of PyTorch's one rounding. An accumulator in fp32 would be twice as large as
the weight. So, unless one chunk holds all rows, it is made in tiles of classes, each from the gradients of all rows and
rounded once. Those of the first rows are kept, in the memory of the weight's gradient itself, which has room for as many
rows as the input has features; those of the other rows are computed again: for twice as many rows as features, half a GEMM
more.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernel import FLOATING, Kernel, ceil_div
from ..layout import is_dry

HALF = (torch.float16, torch.bfloat16)
FILE = "fused_linear_cross_entropy.cu"
linear_cross_entropy_rows = Kernel(FILE, "linear_cross_entropy_rows<T>", T=FLOATING)
linear_cross_entropy_tile = Kernel(FILE, "linear_cross_entropy_tile<T>", T=HALF)
linear_cross_entropy_bias = Kernel(FILE, "linear_cross_entropy_bias<T>", T=FLOATING)

SCRATCH = 240 << 20  # bytes of logits, or of their gradients, at a time
ROW_STEP = 64  # rows of a chunk are a multiple of it, and the classes of a tile of CLASS_STEP: what suits a GEMM
CLASS_STEP = 256
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
    kept: int  # rows, of whole chunks, whose gradients wait in the memory of the weight's gradient


@functools.lru_cache(maxsize=1024)
def _division(rows: int, features: int, classes: int, dtype: torch.dtype, scratch: int) -> Division:
    width = 16 // dtype.itemsize
    stride, elements = ceil_div(classes, width) * width, scratch // dtype.itemsize
    chunk = _even(rows, elements // stride, ROW_STEP)
    tile = ceil_div(_even(stride, elements // max(rows, 1), CLASS_STEP), width) * width
    at_once = chunk >= rows or dtype not in HALF
    return Division(chunk, tile, stride, at_once, min(features, rows) // chunk * chunk)


def _even(count: int, most: int, step: int) -> int:
    """The size of a part, of parts alike in size, of `count`: at most `most`, a multiple of `step` where there is room."""
    if most >= count:
        return max(count, 1)
    step = step if most >= step else 1
    most = max(most // step * step, 1)
    part = ceil_div(count, ceil_div(count, most))
    return ceil_div(part, step) * step


def _parts(count: int, size: int) -> Iterator[tuple[int, int]]:
    for begin in range(0, count, size):
        yield begin, min(begin + size, count)


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
    division = _division(rows, features, weight.shape[0], x.dtype, SCRATCH)
    tiled = not division.at_once and bool(wanted & (WEIGHT | BIAS))
    size = max(division.rows * division.stride, rows * division.classes if tiled else 0)
    scratch = torch.empty(size, dtype=x.dtype, device=x.device)
    stats = torch.empty((3, rows), dtype=each.dtype, device=x.device)
    _by_rows(given, each, stats, scale, gradients, division, scratch)
    if tiled:
        _by_classes(given, stats, scale, gradients, division, scratch)
    return gradients


def _logits(given: Given, rows: slice, classes: slice, out: Tensor) -> None:
    x, weight = given.x[rows], given.weight[classes].t()
    if given.bias is None:
        torch.mm(x, weight, out=out)
    else:
        torch.addmm(given.bias[classes], x, weight, out=out)


def _product(out: Tensor, a: Tensor, b: Tensor, alpha: float, beta: int = 0) -> None:
    """out = alpha a b + beta out."""
    torch.addmm(out, a, b, beta=beta, alpha=alpha, out=out)


def _by_rows(
    given: Given,
    each: Tensor,
    stats: Tensor,
    scale: Scale,
    gradients: Gradients,
    division: Division,
    scratch: Tensor,
) -> None:
    """Chunks of rows: the losses, the input's gradient and, where it can be added up, the weight's."""
    x, weight, everything = given.x, given.weight, slice(None)
    (count, _), (classes, _) = x.shape, weight.shape
    options, dtype, stride = given.options(scale.step), x.dtype, division.stride
    tensors = given.target, given.class_weight, scale.factors, each, stats
    wanted = gradients != (None, None, None)
    block = min(ROW_BLOCK, max(32, 1 << (ceil_div(classes * dtype.itemsize, 64) - 1).bit_length()))
    for begin, end in _parts(count, division.rows):
        chunk = scratch[: (end - begin) * stride].view(end - begin, stride)
        d = chunk[:, :classes]
        _logits(given, slice(begin, end), everything, d)
        launch = linear_cross_entropy_rows[end - begin, block]
        launch(chunk, *tensors, begin, count, stride, options, int(wanted), T=dtype)
        if gradients.x is not None:
            _product(gradients.x[begin:end], d, weight, scale.alpha)
        if division.at_once:
            if gradients.weight is not None:
                _product(gradients.weight, d.t(), x[begin:end], scale.alpha, int(begin > 0))
            _sum_columns(gradients.bias, chunk, classes, scale.alpha, begin > 0)
        elif gradients.weight is not None and end <= division.kept:
            for first, last in _parts(classes, division.classes):
                _kept(gradients.weight, first, last, division.kept)[begin:end].copy_(d[:, first:last])


def _by_classes(
    given: Given, stats: Tensor, scale: Scale, gradients: Gradients, division: Division, scratch: Tensor
) -> None:
    """Tiles of classes: the weight's gradient and the bias's, from the logits' gradients of all rows."""
    x, classes, rows = given.x, given.weight.shape[0], given.x.shape[0]
    width, options = 16 // x.element_size(), given.options(scale.step)
    tensors = given.target, given.class_weight, scale.factors, stats
    kept = division.kept if gradients.weight is not None else 0
    for first, last in _parts(classes, division.classes):
        stride = ceil_div(last - first, width) * width
        tile = scratch[: rows * stride].view(rows, stride)
        d = tile[:, : last - first]
        if kept:
            assert gradients.weight is not None
            d[:kept].copy_(_kept(gradients.weight, first, last, kept))
        if kept < rows:
            _logits(given, slice(kept, rows), slice(first, last), d[kept:])
            launch = linear_cross_entropy_tile[rows - kept, TILE_BLOCK]
            launch(tile, *tensors, kept, rows, first, last - first, stride, options, T=x.dtype)
        if gradients.weight is not None:
            _product(gradients.weight[first:last], d.t(), x, scale.alpha)
        if gradients.bias is not None:
            _sum_columns(gradients.bias[first:last], tile, last - first, scale.alpha, False)


def _kept(grad_weight: Tensor, first: int, last: int, rows: int) -> Tensor:
    """Where the first rows' gradients of a tile's logits wait: in the tile's own part of the weight's gradient."""
    return grad_weight[first:last].view(-1)[: rows * (last - first)].view(rows, last - first)


def _sum_columns(grad_bias: Tensor | None, d: Tensor, columns: int, factor: float, add: bool) -> None:
    if grad_bias is None:
        return
    rows, stride = d.shape
    launch = linear_cross_entropy_bias[ceil_div(columns, 32), (32, 8)]
    launch(d, grad_bias, rows, columns, stride, factor, int(add), T=d.dtype)
