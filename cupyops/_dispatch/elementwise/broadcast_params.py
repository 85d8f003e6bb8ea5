"""Elementwise launches with parameters that are broadcast: the host's half of common/elementwise/broadcast_params.cuh."""

from __future__ import annotations

import functools
import math
import struct

import numpy as np

from ..._kernel.kernel import Kernel, ceil_div
from ..core.forms import Form, Launch
from ..core.gpu import Gpu
from ..gemm.gemm import divisor
from .broadcast import BLOCK, Broadcast, Strides, laid_out_as_output, merged
from .elementwise import why_not_size

MOST = (1 << 31) - 1  # elements of a stride, and of what is counted in an int
FORM = ("kPerColumn", "kPerChannel", "kPerChannelUnaligned")


class Params(Form[Broadcast]):
    """The first input is laid out as the output; the others are parameters, one for each channel.

    Args:
        vectors: of a thread, about, where the GPU has no room for as many threads as there are vectors.
    """

    form = ""

    def __init__(self, kernel: Kernel, vectors: int = 1) -> None:
        self.kernel, self.vectors = kernel, vectors

    def why_not(self, problem: Broadcast, gpu: Gpu) -> str | None:
        if reason := why_not_size(self.kernel, problem.itemsize, FORM=self.form):
            return reason
        if not laid_out_as_output(problem, 1):
            return "the input is laid out otherwise than the output"
        found = {pattern(problem.shape, problem.output, one) for one in problem.inputs[1:]}
        if len(found) > 1 or None in found:
            return "the parameters do not all vary along the same neighbouring dimensions"
        channels, inner = found.pop()  # type: ignore[misc]
        return self.why_not_channels(channels, inner if channels > 1 else 1, 16 // problem.itemsize)

    def why_not_channels(self, channels: int, inner: int, width: int) -> str | None:
        """Return why `channels` parameters of `inner` neighbours each, in vectors of `width`, are not served, or None."""
        raise NotImplementedError

    def launch(self, problem: Broadcast, gpu: Gpu) -> Launch:
        width = 16 // problem.itemsize
        channels, inner = pattern(problem.shape, problem.output, problem.inputs[1])  # type: ignore[misc]
        inner = inner if channels > 1 else 1  # one number is a row of one column
        row = row_vectors(channels, width) if inner == 1 else 1
        vectors = math.prod(problem.shape) // width
        at_once = gpu.multiprocessors * gpu.threads
        step = max(ceil_div(vectors, self.vectors), min(vectors, at_once), 1)
        step = min(ceil_div(step, row), MOST // (row * width)) * row
        grid = ceil_div(max(min(step, vectors), 1), BLOCK)
        packed = _packed(channels, inner, step, width, vectors)
        return Launch(self.kernel, grid, BLOCK, template={"FORM": self.form}, args=(packed, math.prod(problem.shape)))


class PerColumn(Params):
    """Parameters that vary along the innermost dimension, or one number."""

    name, form = "per_column", "kPerColumn"
    summary = "a thread owns vectors of the same columns, whose parameters stay in registers"

    def why_not_channels(self, channels: int, inner: int, width: int) -> str | None:
        if inner > 1:
            return f"{inner} neighbours have the same parameter"
        row = row_vectors(channels, width)
        return None if max(channels, row * width) <= MOST else "there are too many columns to count in 32 bits"


class PerChannel(Params):
    """A parameter for whole vectors of neighbours."""

    name, form = "per_channel", "kPerChannel"
    summary = "a thread owns a vector, all of one channel"

    def why_not_channels(self, channels: int, inner: int, width: int) -> str | None:
        if inner == 1 or inner % width:
            return f"{inner} neighbours that have the same parameter are no whole vectors"
        return None if max(channels, inner) <= MOST else "there are too many channels to count in 32 bits"


class PerChannelUnaligned(PerChannel):
    """A parameter for as many neighbours as make a vector or more."""

    name, form = "per_channel_unaligned", "kPerChannelUnaligned"
    summary = "a thread owns a vector, of two channels at most"

    def why_not_channels(self, channels: int, inner: int, width: int) -> str | None:
        if inner < width:
            return f"{inner} neighbours that have the same parameter are less than a vector"
        return None if max(channels, inner) <= MOST else "there are too many channels to count in 32 bits"


def row_vectors(columns: int, width: int) -> int:
    """The fewest vectors that are whole rows."""
    return columns // math.gcd(columns, width)


def _packed(channels: int, inner: int, step: int, width: int, vectors: int) -> np.ndarray:
    """`struct BroadcastParams`."""
    elements = step * width
    steps = (elements // inner % channels, elements % inner)
    divisors = (*divisor(channels), *divisor(inner))
    numbers = (channels, inner, step, *steps, vectors // step, vectors % step, 0)
    return np.frombuffer(struct.pack("=6q8i", *divisors, *numbers), np.uint8)


@functools.lru_cache(maxsize=4096)
def pattern(shape: tuple[int, ...], strides: Strides, parameter: Strides) -> tuple[int, int] | None:
    """(channels, inner): element i of a dense tensor goes with number i // inner % channels; None if that is not so."""
    dims = merged(shape, strides, [parameter])
    inner = dims.pop(0)[0] if dims[0][1] == (0,) else 1
    channels = dims.pop(0)[0] if dims and dims[0][1] == (1,) else 1
    return None if any(step != (0,) for _, step in dims) or len(dims) > 1 else (channels, inner)
