"""Sums over columns, or over a channel's elements, in a pass over gradients. See cuda_src/common/reduce/column.cuh."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..._kernel.kernel import FLOATING, Kernel, ceil_div
from ..core.forms import Form, Launch
from ..core.gpu import Gpu
from ..elementwise.elementwise import why_not_size

BLOCK = 256  # threads of a pass
FINISH = 1024  # threads that add up partial sums, at most
DEFINE = {"COLUMN_THREADS": BLOCK, "COLUMN_FINALIZE_THREADS": FINISH}

# Into how many parts the rows are cut does not depend on the GPU: all of them give the same bits.
BLOCKS = 528  # of columns
WARPS = 16384  # of channels
FEWEST_INNER = 32  # elements of a channel that lie side by side and are worth a warp; fewer are read as columns
FEWEST_VECTORS = 8  # of a thread, where the rows are cut
FEWEST_FOLDED = 4  # periods at a time of a block that has whole ones and adds up the rows of each

column_finalize = Kernel("column_finalize.cu", "column_finalize<T>", T=FLOATING, define=DEFINE)


class Sums(NamedTuple):
    """A dense array [outer x channels x inner], in memory order, of which the elements of each channel are summed."""

    outer: int
    channels: int
    inner: int
    itemsize: int


class Columns(Form[Sums]):
    """Rows of channels x inner columns."""

    name = "columns"
    summary = "a thread owns the vector of the same columns in every few rows; blocks leave partial sums"

    def __init__(self, kernel: Kernel, sums: int) -> None:
        self.kernel, self.sums = kernel, sums

    def why_not(self, problem: Sums, gpu: Gpu) -> str | None:
        return why_not_size(self.kernel, problem.itemsize)

    def why_slower(self, problem: Sums, gpu: Gpu) -> str | None:
        wide = problem.inner >= FEWEST_INNER
        return f"{problem.inner} elements of a channel lie side by side, which a warp can read" if wide else None

    def launch(self, problem: Sums, gpu: Gpu) -> Launch:
        outer, channels, inner, itemsize = problem
        columns, width = channels * inner, 16 // itemsize
        times = width // math.gcd(columns, width)  # rows that are whole vectors: a period
        period = columns * times // width
        rows = ceil_div(outer, times)
        whole = BLOCK // period >= (FEWEST_FOLDED if times > 1 else FEWEST_FOLDED + 1)
        folded = whole and times > 1
        block = (period, BLOCK // period) if whole else block_of(period, rows)
        tiles = ceil_div(period, block[0])
        slab_rows = ceil_div(rows, max(1, min(BLOCKS // tiles, rows // (FEWEST_VECTORS * block[1]))))
        slabs = ceil_div(rows, slab_rows)
        size = struct.pack("=7q", outer * columns, columns, inner, period, rows, slab_rows, folded)
        left = columns if folded else period * width
        return _pass(self.kernel, tiles * slabs, block, size, (self.sums, slabs, left), channels, inner)

    def kernels(self) -> tuple[Kernel, ...]:
        return (self.kernel, column_finalize)


class Channels(Form[Sums]):
    """A channel's elements lie side by side, so that a warp can read along them."""

    name = "channels"
    summary = "a warp owns a part of a channel; where that is all of it, it has the sum, else it leaves a partial one"

    def __init__(self, kernel: Kernel, sums: int) -> None:
        self.kernel, self.sums = kernel, sums

    def why_not(self, problem: Sums, gpu: Gpu) -> str | None:
        if reason := why_not_size(self.kernel, problem.itemsize, UNALIGNED=False):
            return reason
        whole = problem.inner % (16 // problem.itemsize) == 0
        return None if whole else f"{problem.inner} elements of a channel are no whole vectors"

    def launch(self, problem: Sums, gpu: Gpu) -> Launch:
        return self._launch(problem, unaligned=False)

    def kernels(self) -> tuple[Kernel, ...]:
        return (self.kernel, column_finalize)

    def _launch(self, problem: Sums, unaligned: bool) -> Launch:
        outer, channels, inner, itemsize = problem
        units = inner // (16 // itemsize) + 2 * unaligned
        slab_units = ceil_div(outer * units, max(1, min(WARPS // channels, outer * units // (FEWEST_VECTORS * 32))))
        slab_units = min(ceil_div(slab_units, 32) * 32, outer * units)  # what a warp reads at once, several times
        slabs = ceil_div(outer * units, slab_units)
        numbers = (outer * channels * inner, channels, inner, units, slab_units, slabs, outer * units)
        size = struct.pack("=9q", *numbers, 32 % units, 32 // units * channels * inner)
        partial, grid = (self.sums, slabs, channels), ceil_div(slabs * channels * 32, BLOCK)
        return _pass(self.kernel, grid, (BLOCK, 1), size, partial, channels, 1, UNALIGNED=unaligned)


class ChannelsUnaligned(Channels):
    """Variant of `Channels` for channels whose elements begin and end within vectors."""

    name = "channels_unaligned"
    summary = "the same, of the part of a vector that lies in the channel"

    def why_not(self, problem: Sums, gpu: Gpu) -> str | None:
        return None

    def launch(self, problem: Sums, gpu: Gpu) -> Launch:
        return self._launch(problem, unaligned=True)


class Pass(NamedTuple):
    """A pass over gradients: its `struct Columns` or `struct Channels`, its partial sums, and what adds them up."""

    size: np.ndarray
    partial: tuple[int, int, int] | None = None
    finalize: Launch[None] | None = None


def _pass(
    kernel: Kernel,
    grid: int,
    block: tuple[int, int],
    size: bytes,
    partial: tuple[int, int, int],
    channels: int,
    inner: int,
    **template: bool,
) -> Launch[Pass]:
    """Return the launch of the pass, its partial sums, [sums x slabs x width], and the launch that adds them up."""
    sums, slabs, width = partial
    extra = Pass(np.frombuffer(size, np.uint8))
    if slabs > 1 or not template:  # a warp that has all of a channel leaves nothing to add up
        extra = Pass(extra.size, partial, _finalize(slabs * width // (channels * inner), channels, inner, sums))
    return Launch(kernel, grid, block, template=template, extra=extra)


def _finalize(slabs: int, channels: int, inner: int, sums: int) -> Launch:
    x, _ = block_of(channels, slabs)
    y = min(FINISH // x, 1 << (max(ceil_div(slabs, 4), 1) - 1).bit_length())
    named = {"slabs": slabs, "channels": channels, "inner": inner}
    return Launch(column_finalize, (ceil_div(channels, x), sums), (x, y), named=named)


def sum_gradients(
    launch: Launch[Pass],
    inputs: Sequence[Tensor | None],
    grad_x: Tensor | None,
    grads: Sequence[Tensor | None],
    *numbers: Any,
    **template: Any,
) -> None:
    """Launch a pass of (*inputs, grad_x, *grads, partial, size, *numbers), and what adds partial sums up into `grads`."""
    like = inputs[0]
    assert like is not None
    size, shape, finalize = launch.extra
    shape = shape if any(grad is not None for grad in grads) else None
    partial = like.new_empty(shape, dtype=torch.promote_types(like.dtype, torch.float32)) if shape else None
    launch(*inputs, grad_x, *grads, partial, size, *numbers, T=like.dtype, **template)
    if partial is not None and finalize is not None:
        finalize(partial, *grads, *[None] * (2 - len(grads)), T=like.dtype)


@functools.lru_cache(maxsize=4096)
def pattern(shape: tuple[int, ...], strides: tuple[int, ...], factor: tuple[int, ...]) -> tuple[int, int, int] | None:
    """(outer, channels, inner) of a factor of that shape, over a dense tensor; None if it varies along dimensions apart."""
    padded = (1,) * (len(shape) - len(factor)) + tuple(factor)
    order = sorted((d for d, size in enumerate(shape) if size != 1), key=lambda d: -strides[d])
    varying = [d for d in order if padded[d] != 1]
    outer = channels = inner = 1
    for dim in order:
        if dim in varying:
            channels *= shape[dim]
        elif channels == 1 and varying:
            outer *= shape[dim]
        else:
            inner *= shape[dim]
    start = order.index(varying[0]) if varying else 0
    # the channels are counted as a contiguous factor counts them, and without a gap
    if order[start : start + len(varying)] != sorted(varying):
        return None
    return outer, channels, inner


def block_of(columns: int, rows: int) -> tuple[int, int]:
    """A block of about 256 threads for a [rows x columns] reduction over rows: wider than a warp only where rows are few."""
    x = min(32, columns)
    while x < min(columns, BLOCK) and BLOCK // x > rows:
        x *= 2
    return x, BLOCK // x
