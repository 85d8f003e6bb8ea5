"""Common part of the state spaces: loads and stores, with bounds and alignment checked.

A space turns addresses into positions within one or several `Region`s; reading and writing there is the same for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..errors import Misaligned, OutOfBounds
from ..memory import Region
from ..translate.function import Load
from .faults import fault
from .group import Group, Selection
from .state import Gaps, State

# Lanes (None: all), the region that their addresses lie in, and the positions there, in bytes.
Part = tuple[np.ndarray | None, Region, np.ndarray]
ATOMIC = "atomic update"  # what messages call one


class Access(NamedTuple):
    """A load or a store that is about to be made."""

    region: Region
    position: np.ndarray  # in bytes
    width: int
    pc: int
    strong: bool  # volatile, relaxed, acquire or release: made to meet what others do
    constant: bool = False  # through the cache for what no thread writes while the kernel runs


class Space:
    """Base of the state spaces."""

    name = ""

    def __init__(self, state: State) -> None:
        self.state = state

    def parts(self, group: Group, address: Any, width: int, verb: str, pc: int) -> list[Part]:
        """Locate the addresses in regions. Raises `OutOfBounds` or `Misaligned`."""
        raise NotImplementedError

    def before_read(self, group: Group, access: Access) -> None:
        """Checks on a read."""

    def before_write(self, group: Group, access: Access, values: Sequence[Any]) -> None:
        """Checks on a write."""

    def load(self, group: Group, address: Any, what: Load) -> Any:
        """The elements at each thread's address: an array, or a tuple of several."""
        if what.strong:
            self.state.spinning = True  # perhaps a flag that another thread is to set
        dtype, size, count, pc, strong, constant = what

        def take(part: Group, region: Region, position: np.ndarray) -> Any:
            self.before_read(part, Access(region, position, size * count, pc, strong, constant))
            return region.take(position, dtype, size, count)

        parts = self.parts(group, address, size * count, "read", pc)
        if len(parts) == 1 and parts[0][0] is None:
            return take(group, *parts[0][1:])
        masked = ((mask, region, position) for mask, region, position in parts if mask is not None)
        loaded = ((mask, take(group.subset(mask), region, position)) for mask, region, position in masked)
        return self.joined(group, what, loaded)

    def joined(self, group: Group, what: Load, parts: Iterable[tuple[Any, Any]]) -> Any:
        """Join the loads of parts of a group, each (mask, elements), to those of the whole group."""
        result = [np.empty(group.size, what.dtype) for _ in range(what.elements)]
        for mask, loaded in parts:
            for values, part in zip(result, loaded if what.elements > 1 else (loaded,)):
                values[mask] = part
        return tuple(result) if what.elements > 1 else result[0]

    def store(
        self, group: Group, address: Any, values: Sequence[Any], dtype: Any, size: int, pc: int, strong: bool = False
    ) -> None:
        """Store the values one after the other at each thread's address."""
        width = size * len(values)
        for mask, region, position in self.parts(group, address, width, "write", pc):
            narrowed = values if mask is None else Selection(group, mask, group).pick_all(values)
            part = group if mask is None else group.subset(mask)
            self.before_write(part, Access(region, position, width, pc, strong), narrowed)
            region.put(position, narrowed, dtype, size)

    # --- checks that every space has ---

    def check_alignment(self, group: Group, position: np.ndarray, width: int, verb: str, pc: int) -> None:
        """Every address is a multiple of the width."""
        if width > 1 and int(np.bitwise_or.reduce(position)) & (width - 1):
            bad = (position & position.dtype.type(width - 1)) != 0
            what = f"misaligned {verb} of {width} bytes in {self.name} memory"
            detail = f"address {int(position[int(np.argmax(bad))]):#x} is no multiple of {width}"
            raise fault(Misaligned, self.state.listing, group, bad, what, pc, detail=detail)

    def check_offsets(
        self,
        group: Group,
        offset: np.ndarray,
        width: int,
        size: int,
        where: str,
        verb: str,
        pc: int,
        gaps: Gaps | None = None,
    ) -> None:
        """Every access lies within the `size` bytes of `where`, outside the gaps, and is aligned."""
        bits = int(np.bitwise_or.reduce(offset))  # mostly these alone say that all is well
        if bits < 0 or bits + width > size or bits & (width - 1):
            bad = (offset < 0) | (offset + width > size)
            if bad.any():
                raise self._outside(group, bad, offset, width, size, where, verb, pc, gaps)
            self.check_alignment(group, offset, width, verb, pc)
        if gaps is not None and np.count_nonzero(bad := gaps.inside[width - 1 :].take(offset)):
            raise self._outside(group, bad, offset, width, size, where, verb, pc, gaps)

    def _outside(
        self,
        group: Group,
        bad: np.ndarray,
        offset: np.ndarray,
        width: int,
        size: int,
        where: str,
        verb: str,
        pc: int,
        gaps: Gaps | None,
    ) -> OutOfBounds:
        """The error for offsets that lie in no variable, by the one that they are nearest to."""
        first, bounds = int(offset[int(np.argmax(bad))]), (0, size)
        if gaps is not None:
            place = gaps.nearest(first)
            bounds, where = (place.low, place.high), place.name and f"`{place.name}` in {self.name} memory" or where
        return self.out_of_bounds(group, bad, first, width, bounds, verb, where, pc)

    def out_of_bounds(
        self,
        group: Group,
        bad: np.ndarray,
        offset: int,
        width: int,
        size: tuple[int, int],
        verb: str,
        where: str,
        pc: int,
    ) -> OutOfBounds:
        """The error for `offset` outside bytes `size` of `where`."""
        low, high = size
        what = f"{verb} of {width} bytes outside {where}"
        if offset + width > high:
            start = offset - high
            if start >= 0:
                at = f"{start} bytes past the end of" if start else "just past the end of"
            else:
                at = f"across the end, {-start} bytes before it, of"
        else:
            at = f"{low - offset} bytes before the start of"
        detail = f"offset {offset - low}: {at} {where} ({high - low} bytes)"
        if low == high and self.name == "shared":
            detail += "; the launch gives `extern __shared__` its bytes: kernel[grid, block, bytes]"
        return fault(OutOfBounds, self.state.listing, group, bad, what, pc, detail=detail)
