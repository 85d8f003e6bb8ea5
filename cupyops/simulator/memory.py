"""Global memory: allocations, and the addresses by which kernels reach them.

Each allocation has a window of 2^40 addresses of its own, so a stray pointer never lands in a neighbour. The windows of
shared, local and parameter memory lie above all of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_WINDOW_BITS = 40
WINDOW = np.uint64(1 << _WINDOW_BITS)
SHARED_BASE = 1 << 60
LOCAL_BASE = 2 << 60
PARAMETER_BASE = 3 << 60
POISON = 0xCB  # what memory holds that nothing has written
WORDS = {size: np.dtype(f"V{size}") for size in (1, 2, 4, 8, 16, 32)}  # to move several elements as one


class Region:
    """Bytes, and typed views of them."""

    def __init__(self, buffer: np.ndarray) -> None:
        self.buffer = buffer
        self._views: dict[Any, np.ndarray] = {}

    def view(self, dtype: Any) -> np.ndarray:
        """The bytes as elements of `dtype`, from the first byte."""
        found = self._views.get(dtype)
        if found is None:
            size = np.dtype(dtype).itemsize
            found = self._views[dtype] = self.buffer[: len(self.buffer) // size * size].view(dtype)
        return found

    def take(self, position: np.ndarray, dtype: Any, size: int, count: int) -> Any:
        """`count` elements of `size` bytes from each position, a multiple of all their bytes: an array, or several."""
        width = size * count
        words = self.view(dtype if count == 1 else WORDS[width]).take(position >> (width.bit_length() - 1))
        return words if count == 1 else tuple(np.ascontiguousarray(words.view(dtype).reshape(-1, count).T))

    def put(self, position: np.ndarray, values: Sequence[Any], dtype: Any, size: int) -> None:
        """The inverse: elements, one after the other, to each position. Where two meet, the last one stays."""
        width = size * len(values)
        index = position >> (width.bit_length() - 1)
        if len(values) == 1:
            self.view(dtype)[index] = values[0]
            return
        elements = np.empty((len(position), len(values)), dtype)
        for number, value in enumerate(values):
            elements[:, number] = value
        self.view(WORDS[width])[index] = elements.view(WORDS[width])[:, 0]


class Allocation(Region):
    """A piece of global memory.

    Attributes:
        base: the address of its first byte.
        low, high: the bytes, counted from `base`, that the kernel of the current launch may touch.
        gaps: of these bytes, which ones it may not: those between the elements of views; None where there are none.
        told: what an error says of such a view.
        written: which bytes hold a value, one bool each; None where all do.
    """

    def __init__(self, number: int, buffer: np.ndarray, name: str, written: np.ndarray | None) -> None:
        super().__init__(buffer)
        self.number = number
        self.base = number << _WINDOW_BITS
        self.name = name
        self.low, self.high = 0, len(buffer)
        self.gaps: np.ndarray | None = None
        self.told = ""
        self.written = Region(written) if written is not None else None

    def restrict(self, low: int, high: int) -> None:
        """Restrict the next launch to bytes `low` to `high`."""
        self.low, self.high, self.gaps = low, high, None

    def except_for(self, gaps: np.ndarray, told: str) -> None:
        """Exclude `gaps` from the bytes that may be touched: one bool for each byte of the buffer."""
        self.gaps, self.told = gaps, told

    def in_gaps(self, offset: np.ndarray, width: int) -> np.ndarray | None:
        """Mask of the accesses of `width` bytes that touch a gap; None where none does."""
        if self.gaps is None:
            return None
        found: np.ndarray = self.gaps[offset]
        for byte in range(1, width):
            found = found | self.gaps[offset + byte]
        return found if found.any() else None


@dataclass
class Memory:
    """Every allocation that a kernel can reach. Buffers are the caller's own: what a kernel writes is seen there."""

    allocations: dict[int, Allocation] = field(default_factory=dict)
    closed: Set[int] = frozenset()  # numbers of those that the current launch was not given
    variables: set[int] = field(default_factory=set)  # numbers of those that are variables of programs
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def allocate(
        self, array: np.ndarray, name: str = "memory", *, initialized: bool = True, fill: bool = True
    ) -> Allocation:
        """Make the bytes of a C-contiguous `array` addressable, with no copy.

        With `initialized=False` the bytes are overwritten with a pattern (unless `fill` is false: they hold it already),
        and reading one that still has it before a kernel has written it is an error.
        """
        if not array.flags.c_contiguous:
            raise ValueError(f"{name}: the array must be C-contiguous")
        buffer = array.reshape(-1).view(np.uint8) if array.size else np.zeros(0, np.uint8)
        written = None
        if not initialized:
            if fill:
                buffer[:] = POISON
            # whole 16-byte words, so that it can be viewed as any element type
            written = np.zeros(-(-len(buffer) // 16) * 16, np.uint8)
        allocation = Allocation(next(self._numbers), buffer, name, written)
        self.allocations[allocation.number] = allocation
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Remove an allocation: its addresses are nobody's."""
        self.allocations.pop(allocation.number, None)

    def at(self, address: int) -> Allocation | None:
        """The allocation whose window holds `address`."""
        return self.allocations.get(address >> _WINDOW_BITS)

    def nearest(self, address: int) -> Allocation | None:
        """The allocation that a stray address was probably meant for: it lies a little before one, or behind one."""
        half = 1 << (_WINDOW_BITS - 1)
        return self.at(address + half) or self.at(address)


def number_of(address: np.ndarray) -> np.ndarray:
    """Number of the allocation in whose window each address lies."""
    return (address >> np.uint64(_WINDOW_BITS)).astype(np.int64)


def space_of(address: np.ndarray) -> np.ndarray:
    """0 for global memory, 1 for shared, 2 for local, 3 for parameters."""
    return (address >> np.uint64(60)).astype(np.int64)
