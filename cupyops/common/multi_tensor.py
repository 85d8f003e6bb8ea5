"""One launch over many tensors, as common/multi_tensor.cuh has it: tables of addresses, one block for each chunk."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernel import FLOATING, addressing, ceil_div, executors
from ..layout import laid_out_alike

# As the header has them: the threads of a block, and the bytes of a tensor that it owns.
BLOCK = 256
CHUNK_BYTES = BLOCK * 4 * 16

_PLAIN = (Tensor, torch.nn.Parameter)
_SERVED = frozenset(FLOATING)

Columns = tuple[tuple[int, ...], ...]


class Launch(NamedTuple):
    """A table of `tensors` tensors, the first of which is the `start`-th of all, and the grid."""

    table: np.ndarray
    start: int
    tensors: int
    blocks: int


def capacity(arrays: int) -> int:
    """How many tensors of so many arrays each a launch names."""
    return (4096 - 128) // (8 * arrays + 12)


@cache
def struct(arrays: int) -> np.dtype:
    """`Table<arrays>` of the header."""
    tensors = capacity(arrays)
    fields = [("arrays", np.uint64, (arrays, tensors)), ("sizes", np.int64, tensors), ("chunk_ends", np.int32, tensors)]
    return np.dtype(fields, align=True)


def launches(arrays: Sequence[Sequence[Tensor] | None], per_chunk: int | None = None) -> list[Launch]:
    """The launches for tensors given array by array: `arrays[0]` are those whose sizes count. None is null throughout.

    Those of an earlier call where every tensor is where it was.
    """
    first = arrays[0]
    assert first is not None
    address = addressing(first[0].device)
    null = (0,) * len(first)
    columns = tuple(null if array is None else tuple(map(address, array)) for array in arrays)
    sizes = tuple([tensor.numel() for tensor in first])
    return tables(columns, sizes, per_chunk or CHUNK_BYTES // first[0].element_size())


@lru_cache(maxsize=64)
def tables(columns: Columns, sizes: tuple[int, ...], chunk: int) -> list[Launch]:
    """The launches for tensors of these addresses and sizes, `chunk` elements to a block."""
    width, found = capacity(len(columns)), []
    for start in range(0, len(sizes), width):
        part = slice(start, start + width)
        ends = list(accumulate(ceil_div(size, chunk) for size in sizes[part]))
        table = np.zeros(1, struct(len(columns)))
        table["arrays"][0, :, : len(ends)] = [column[part] for column in columns]
        table["sizes"][0, : len(ends)] = sizes[part]
        table["chunk_ends"][0, : len(ends)] = ends
        found.append(Launch(table, start, len(ends), ends[-1]))
    return found


class Moving:
    """The launches over tensors of which one array is to move: tables of their own, in which it is written anew."""

    def __init__(self, arrays: Sequence[Sequence[Tensor] | None]) -> None:
        first = arrays[0]
        assert first is not None
        self._address = addressing(first[0].device)
        self.launches = [one._replace(table=one.table.copy()) for one in launches(arrays)]

    def move(self, index: int, tensors: Sequence[Tensor]) -> None:
        """From now on the array of that index is `tensors`, of the sizes that it had."""
        addresses = list(map(self._address, tensors))
        for table, start, count, _ in self.launches:
            table["arrays"][0, index, :count] = addresses[start : start + count]


def why_not(tensors: Sequence[Tensor]) -> str | None:
    """Why a kernel cannot read these tensors, of one shape, as flat arrays of one dtype; None where it can."""
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
