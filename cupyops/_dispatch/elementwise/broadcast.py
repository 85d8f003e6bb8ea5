"""Elementwise launches over inputs that are broadcast, or not laid out alike. See common/elementwise/broadcast.cuh."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..._kernel.kernel import Kernel, ceil_div
from ..._util.strides import is_dry, restride
from ...errors import InputError
from ..core.forms import Form, Forms, Launch
from ..core.gpu import Gpu, gpu
from .elementwise import why_not_size

BLOCK = 256
MAX_DIMS = 5  # that a kernel walks: the size of `struct Layout`, which a launch checks

Strides = tuple[int, ...]


def broadcast_shape(**tensors: Tensor | None) -> tuple[int, ...]:
    """The shape that the tensors given broadcast to. Raises `InputError` where they do not."""
    given = [(name, value.shape) for name, value in tensors.items() if value is not None]
    result: list[int] = []
    for position in range(max(len(shape) for _, shape in given)):
        size = 1
        for _, shape in given:
            here = shape[-1 - position] if position < len(shape) else 1
            if here != 1 and size != 1 and here != size:
                shapes = ", ".join(f"{name} of shape {tuple(shape)}" for name, shape in given)
                raise InputError(
                    f"{shapes} cannot be broadcast together: {size} and {here} in dimension {-1 - position}; "
                    "expected sizes that are equal or 1"
                )
            size = here if here != 1 else size
        result.append(size)
    return tuple(reversed(result))


def broadcast_shapes(*shapes: Sequence[int]) -> tuple[int, ...]:
    """Replace `torch.broadcast_shapes`, whose first call imports SymPy: that takes half a second, or three from a slow disk.

    Raises:
        ValueError: the shapes cannot be broadcast together; `RuntimeError` where sizes are symbols.
    """
    if any(type(size) is not int for shape in shapes for size in shape):
        return tuple(torch.broadcast_shapes(*shapes))  # type: ignore[arg-type]
    return np.broadcast_shapes(*map(tuple, shapes))


def expanded(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, each over the shape that all of them broadcast to."""
    first = tensors[0]
    # dim() first: tuples compare their sizes before their lengths, which would tie a symbolic size to another
    if all(tensor.dim() == first.dim() and tensor.shape == first.shape for tensor in tensors[1:]):
        return tensors
    shape = broadcast_shapes(*[tensor.shape for tensor in tensors])
    return tuple(tensor.expand(shape) for tensor in tensors)


def empty_output(first: Tensor, *others: Tensor) -> Tensor:
    """An empty output with the strides that PyTorch's elementwise operators give for these inputs of one shape.

    Contiguous, channels_last and any other dense order are kept; else the output is dense, its dimensions in the order of
    the first input whose strides tell (a broadcast dimension tells nothing), then of the next.
    """
    inputs = (first, *others)
    if first.is_contiguous() and (1 not in first.shape or all(tensor.is_contiguous() for tensor in others)):
        return torch.empty_like(first, memory_format=torch.contiguous_format)
    if first.dim() == 4 and all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in inputs):
        return torch.empty_like(first, memory_format=torch.channels_last)
    if all(tensor.stride() == first.stride() for tensor in others):
        output = torch.empty_like(first)
        if output.stride() == first.stride():
            return output
    strides, step = [0] * first.dim(), 1
    for dim in innermost_first(first.shape, [tensor.stride() for tensor in inputs]):
        strides[dim] = step
        step = step * first.shape[dim]
    return torch.empty_strided(first.shape, strides, dtype=first.dtype, device=first.device)


def innermost_first(shape: Sequence[int], strides: Sequence[Sequence[int]]) -> list[int]:
    """The dimensions in the order of TensorIterator: an insertion sort, since not every two can be compared."""

    def outer(a: int, b: int) -> int:
        """Positive if dimension `a` belongs outside `b`, negative if inside, 0 if no input tells."""
        for stride in strides:
            if stride[a] == 0 or stride[b] == 0:
                continue
            if stride[a] != stride[b]:
                return 1 if stride[a] > stride[b] else -1
            if shape[a] > shape[b]:
                return 1
        return 0

    order = list(reversed(range(len(shape))))
    for start in range(1, len(order)):
        moving = start
        for before in range(start - 1, -1, -1):
            verdict = outer(order[before], order[moving])
            if verdict > 0:
                order[before], order[moving] = order[moving], order[before]
                moving = before
            elif verdict < 0:
                break
    return order


class Broadcast(NamedTuple):
    """An elementwise launch over inputs that are broadcast, or laid out otherwise than the dense output."""

    shape: tuple[int, ...]
    output: Strides
    inputs: tuple[Strides, ...]  # over the output's shape, 0 where broadcast
    itemsize: int  # of an element of which 16 bytes make a vector


class Flat(Form[Broadcast]):
    """Arrays that are laid out alike."""

    name = "flat"
    summary = "a thread owns a vector; the inputs are laid out as the output is"

    def why_not(self, problem: Broadcast, gpu: Gpu) -> str | None:
        if reason := why_not_size(self.kernel, problem.itemsize):
            return reason
        return None if laid_out_as_output(problem) else "an input is laid out otherwise than the output"

    def launch(self, problem: Broadcast, gpu: Gpu) -> Launch:
        n = math.prod(problem.shape)
        return Launch(self.kernel, ceil_div(n, BLOCK * (16 // problem.itemsize)), BLOCK, args=(n,))


class Strided(Form[Broadcast]):
    """Inputs of any strides, located dimension by dimension."""

    name = "strided"
    summary = "a thread owns a vector of the output, and locates it in each input by divisions"

    def __init__(self, kernel: Kernel, inputs: int = 0) -> None:
        self.kernel, self.inputs = kernel, inputs

    def why_not(self, problem: Broadcast, gpu: Gpu) -> str | None:
        return None if self._layout(problem) is not None else f"more than {MAX_DIMS} dimensions are to be walked"

    def launch(self, problem: Broadcast, gpu: Gpu) -> Launch:
        layout, width, _ = self._layout(problem)  # type: ignore[misc]
        n = math.prod(problem.shape)
        return Launch(self.kernel, ceil_div(n, BLOCK * width), BLOCK, args=(layout, n))

    def _layout(self, problem: Broadcast) -> tuple[np.ndarray, int, int] | None:
        """Pack the layout for as many inputs as the kernel's has: where one is left out, the last is walked once more."""
        inputs = problem.inputs + problem.inputs[-1:] * (self.inputs - len(problem.inputs))
        return packed_layout(problem.shape, problem.output, 16 // problem.itemsize, *inputs)


def walked(output: Tensor, inputs: Sequence[Tensor | None]) -> Sequence[Any]:
    """The inputs, copied as the dense `output` is laid out where their dimensions are too many for a kernel to walk."""
    strides = tuple(one.stride() for one in inputs if one is not None)
    if _walked_dims(tuple(output.shape), output.stride(), strides) <= MAX_DIMS:
        return inputs
    return [one if one is None else restride(one, output.stride()) for one in inputs]


@functools.lru_cache(maxsize=4096)
def _walked_dims(shape: tuple[int, ...], strides: Strides, inputs: tuple[Strides, ...]) -> int:
    return len(merged(shape, strides, inputs))


def launched(
    forms: Forms[Broadcast], output: Tensor, inputs: Sequence[Tensor | None], itemsize: int = 0
) -> tuple[Launch, Sequence[Tensor | None]]:
    """The launch that fills the dense `output`, which has elements; and the inputs, copied where a kernel cannot walk them.

    The inputs have the output's shape, or are None. Elements are of `itemsize` bytes, by default as the output's.
    """
    inputs = walked(output, inputs)
    strides = tuple(one.stride() for one in inputs if one is not None)
    problem = Broadcast(tuple(output.shape), output.stride(), strides, itemsize or output.element_size())
    return forms.launch(problem, gpu(output.device)), inputs


def fill(
    forms: Forms[Broadcast], output: Tensor, inputs: Sequence[Tensor | None], *numbers: Any, **template: Any
) -> None:
    """Fill the dense `output`: launch a kernel that takes (*inputs, output, *numbers, what its form adds)."""
    if is_dry(output) or output.numel() == 0:
        return
    launch, inputs = launched(forms, output, inputs)
    launch(*inputs, output, *numbers, T=output.dtype, **template)


def is_dense(shape: Sequence[int], strides: Strides) -> bool:
    """Return True if a tensor of these strides is contiguous."""
    step = 1
    for size, stride in zip(reversed(shape), reversed(strides)):
        if size != 1 and stride != step:
            return False
        step *= size
    return True


def laid_out_as_output(problem: Broadcast, inputs: int | None = None) -> bool:
    """Return True if the inputs, or the first `inputs` of them, have the output's strides in dimensions larger than 1."""
    return all(
        size == 1 or all(stride[dim] == problem.output[dim] for stride in problem.inputs[:inputs])
        for dim, size in enumerate(problem.shape)
    )


@functools.lru_cache(maxsize=4096)
def packed_layout(
    shape: tuple[int, ...], strides: tuple[int, ...], vector: int, *input_strides: tuple[int, ...]
) -> tuple[np.ndarray, int, int] | None:
    """(`Layout` as bytes, its width, its dimensions); None if those are more than `MAX_DIMS`."""
    dims = merged(shape, strides, input_strides)
    if len(dims) > MAX_DIMS:
        return None
    sizes = [size for size, _ in dims]
    columns = [[steps[j] for _, steps in dims] for j in range(len(input_strides))]
    fits = (len(dims) == 1 or sizes[0] % vector == 0) and all(
        column[0] in (0, 1) and (column[0] == 0 or all(step % vector == 0 for step in column[1:])) for column in columns
    )
    width = vector if fits else 1
    sizes[0] = ceil_div(sizes[0], width)
    columns = [[column[0] * width, *column[1:]] for column in columns]
    wide = int(np.prod(sizes, dtype=object) >= 2**31)
    # for a wide launch the 32-bit constants are not used, and may not exist
    magic = [(0, 0) if wide else _divider(size) for size in sizes]
    pad = [0] * (MAX_DIMS - len(dims))
    longs = [*sizes, *pad, *[step for column in columns for step in (*column, *pad)]]
    unsigned = [*[m for m, _ in magic], *pad, *[s for _, s in magic], *pad]
    packed = struct.pack(f"={len(longs)}q{len(unsigned)}I4i", *longs, *unsigned, len(dims), width, wide, 0)
    return np.frombuffer(packed, np.uint8), width, len(dims)


def merged(
    shape: Sequence[int], strides: Sequence[int], input_strides: Sequence[Sequence[int]]
) -> list[tuple[int, tuple[int, ...]]]:
    """(size, each input's stride) of each dimension, innermost first, neighbours merged that all inputs walk as one."""
    merged: list[tuple[int, tuple[int, ...]]] = []
    for dim in sorted((d for d, size in enumerate(shape) if size != 1), key=lambda d: strides[d]):
        size, steps = shape[dim], tuple(stride[dim] for stride in input_strides)
        if merged and all(step == merged[-1][0] * inner for step, inner in zip(steps, merged[-1][1])):
            merged[-1] = (size * merged[-1][0], merged[-1][1])
        else:
            merged.append((size, steps))
    return merged or [(1, (0,) * len(input_strides))]


def _divider(divisor: int) -> tuple[int, int]:
    """(multiplier, shift) that divide numbers below 2^31 (Granlund and Montgomery, 1994)."""
    shift = (divisor - 1).bit_length()
    return ((1 << 32) * ((1 << shift) - divisor)) // divisor + 1, shift
