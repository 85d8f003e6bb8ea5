"""One launch over many tensors, as optim/multi_tensor.cuh has it: tables of addresses, one block for each chunk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._kernel.kernel import FLOATING, addressing, ceil_div, executors
from .._util import torch_private
from .._util.strides import laid_out_alike

BLOCK = 256
CHUNK_VECTORS = 4  # of 16 bytes, of each thread, in a chunk
CHUNK_BYTES = BLOCK * CHUNK_VECTORS * 16  # of a tensor, that a block owns
TABLE_BYTES = 4096 - 128  # of a launch's parameters, the rest of which are numbers
DEFINE = {"OPTIM_THREADS": BLOCK, "OPTIM_CHUNK_VECTORS": CHUNK_VECTORS, "OPTIM_TABLE_BYTES": TABLE_BYTES}

_PLAIN = (Tensor, torch.nn.Parameter)
_SERVED = frozenset(FLOATING)


class TableLaunch(NamedTuple):
    """A table of `tensors` tensors, the first of which is the `start`-th of all, and the grid."""

    table: np.ndarray
    start: int
    tensors: int
    blocks: int


def capacity(arrays: int) -> int:
    """Number of tensors that one launch can name, with `arrays` arrays each."""
    return TABLE_BYTES // (8 * arrays + 12)


@cache
def struct(arrays: int) -> np.dtype:
    """`Table<arrays>` of the header."""
    tensors = capacity(arrays)
    fields = [("arrays", np.uint64, (arrays, tensors)), ("sizes", np.int64, tensors), ("chunk_ends", np.int32, tensors)]
    return np.dtype(fields, align=True)


def tables(columns: Sequence[Sequence[int]], sizes: Sequence[int], chunk: int) -> list[TableLaunch]:
    """The launches for tensors of these addresses, array by array, and sizes; `chunk` elements to a block."""
    width, found = capacity(len(columns)), []
    for start in range(0, len(sizes), width):
        part = slice(start, start + width)
        ends = list(accumulate(ceil_div(size, chunk) for size in sizes[part]))
        table = np.zeros(1, struct(len(columns)))
        table["arrays"][0, :, : len(ends)] = [column[part] for column in columns]
        table["sizes"][0, : len(ends)] = sizes[part]
        table["chunk_ends"][0, : len(ends)] = ends
        found.append(TableLaunch(table, start, len(ends), ends[-1]))
    return found


class MovingTables:
    """The launches over tensors given array by array, of which one array may move from call to call.

    `arrays[0]` are those whose sizes count. None is null throughout.
    """

    def __init__(self, arrays: Sequence[Sequence[Tensor] | None]) -> None:
        first = arrays[0]
        assert first is not None
        self._address = addressing(first[0].device)
        null = [0] * len(first)
        self._columns = [null if array is None else list(map(self._address, array)) for array in arrays]
        sizes = [tensor.numel() for tensor in first]
        self.launches = tables(self._columns, sizes, CHUNK_BYTES // first[0].element_size())

    def move(self, index: int, tensors: Sequence[Tensor]) -> None:
        """Replace the array of that index by `tensors`, of the sizes that it had."""
        addresses = list(map(self._address, tensors))
        if addresses == self._columns[index]:
            return
        self._columns[index] = addresses
        for table, start, count, _ in self.launches:
            table["arrays"][0, index, :count] = addresses[start : start + count]


class SameLayout:
    """Guard that tensors have the metadata of those it was made of, at any address, and that the same executor launches.

    To look at each in Python costs microseconds, and there are hundreds. This asks of all at once, in C: types, dtypes,
    devices, sizes and strides.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._executors = executors.copy()
        self._check = torch_private.tensor_guard(tensors)

    @staticmethod
    def can_tell() -> bool:
        """Return True if this PyTorch has the guard that it calls."""
        return torch_private.available

    def __call__(self, tensors: Iterable[Tensor]) -> bool:
        return executors == self._executors and bool(self._check(*tensors))


def why_not(tensors: Sequence[Tensor]) -> str | None:
    """Return why a kernel cannot read these tensors, of one shape, as flat arrays of one dtype, or None."""
    first = tensors[0]
    dtype, device, kind, shape = first.dtype, first.get_device(), first.device.type, first.shape
    if kind not in executors:
        return f"tensors on {kind}"
    contiguous = True
    for tensor in tensors:
        if type(tensor) not in _PLAIN:
            return f"a {type(tensor).__name__}"
        if tensor.layout is not torch.strided:
            return "not a dense layout"
        if tensor.dtype is not dtype or dtype not in _SERVED:
            return f"tensors of {dtype} and {tensor.dtype}" if tensor.dtype is not dtype else f"a tensor of {dtype}"
        if tensor.get_device() != device or (device < 0 and tensor.device.type != kind):
            return "tensors on different devices"
        if tensor.shape != shape:
            return "tensors of different shapes"
        if tensor.is_neg():
            return "negative bit"
        contiguous = contiguous and tensor.is_contiguous()
    return None if contiguous or laid_out_alike(tensors) else "tensors that differ in strides, or have gaps"
