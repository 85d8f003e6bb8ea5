"""Loads and stores: global, shared, local and generic addresses, with bounds and alignment checked.

A space turns addresses into positions within one or several `Region`s; reading and writing there is common to all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .. import memory
from ..errors import Misaligned, OutOfBounds, Race
from ..memory import Allocation, Region
from .faults import fault
from .global_shadow import GlobalShadow
from .group import Group, Selection
from .shared_shadow import SharedShadow
from .state import State

# Lanes (None: all), the region that their addresses lie in, and the positions there, in bytes.
Part = tuple[np.ndarray | None, Region, np.ndarray]


class Access(NamedTuple):
    """A load or a store that is about to be made."""

    region: Region
    position: np.ndarray  # in bytes
    width: int
    pc: int
    strong: bool  # volatile, relaxed, acquire or release: made to meet what others do


class Space:
    """What the spaces have in common."""

    name = ""

    def __init__(self, state: State) -> None:
        self.state = state

    def parts(self, group: Group, address: Any, width: int, verb: str, pc: int) -> list[Part]:
        """Where the addresses lead. Raises `OutOfBounds` or `Misaligned`."""
        raise NotImplementedError

    def before_read(self, group: Group, access: Access) -> None:
        """Checks on a read."""

    def before_write(self, group: Group, access: Access, values: Sequence[Any]) -> None:
        """Checks on a write."""

    def load(self, group: Group, address: Any, dtype: Any, size: int, count: int, pc: int, strong: bool = False) -> Any:
        """`count` elements from each thread's address: an array, or a tuple. `strong`: volatile, relaxed, acquire."""
        if strong:
            self.state.spinning = True  # perhaps a flag that another thread is to set
        parts = self.parts(group, address, size * count, "read", pc)
        if len(parts) == 1 and parts[0][0] is None:
            _, region, position = parts[0]
            self.before_read(group, Access(region, position, size * count, pc, strong))
            return region.take(position, dtype, size, count)
        result = [np.empty(group.size, dtype) for _ in range(count)]
        for mask, region, position in parts:
            assert mask is not None
            self.before_read(group.subset(mask), Access(region, position, size * count, pc, strong))
            taken = region.take(position, dtype, size, count)
            for values, part in zip(result, taken if count > 1 else (taken,)):
                values[mask] = part
        return tuple(result) if count > 1 else result[0]

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
        self, group: Group, offset: np.ndarray, width: int, size: int, where: str, verb: str, pc: int
    ) -> None:
        """Every access lies within the `size` bytes of `where`, and is aligned."""
        if int(offset.min()) < 0 or int(offset.max()) + width > size:
            bad = (offset < 0) | (offset + width > size)
            first = int(offset[int(np.argmax(bad))])
            raise self.out_of_bounds(group, bad, first, width, (0, size), verb, where, pc)
        self.check_alignment(group, offset, width, verb, pc)

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
        return fault(OutOfBounds, self.state.listing, group, bad, what, pc, detail=detail)


class Global(Space):
    """Global memory: the caller's arrays and the module's variables."""

    name = "global"

    def __init__(self, state: State, shadow: GlobalShadow | None) -> None:
        super().__init__(state)
        self.shadow = shadow

    def parts(self, group: Group, address: Any, width: int, verb: str, pc: int) -> list[Part]:
        address = group.spread(address, np.uint64)
        low, high = int(address.min()), int(address.max())
        allocation = self.state.memory.at(low)
        if (
            allocation is None
            or low < allocation.base + allocation.low
            or high + width > allocation.base + allocation.high
        ):
            return self._several(group, address, width, verb, pc)
        self.check_alignment(group, address, width, verb, pc)
        if self.state.profile is not None:
            self.state.profile.global_access(group, address, width, pc)
        return [(None, allocation, (address - np.uint64(allocation.base)).view(np.int64))]

    def _several(self, group: Group, address: np.ndarray, width: int, verb: str, pc: int) -> list[Part]:
        """Addresses in more than one allocation, or outside all of them."""
        parts: list[Part] = []
        number = memory.number_of(address)
        for one in np.unique(number):
            mask = number == one
            allocation = self.state.memory.allocations.get(int(one))
            if allocation is None:
                raise self._stray(group, mask, address, width, verb, pc)
            offset = (address - np.uint64(allocation.base)).view(np.int64)
            bad = mask & ((offset < allocation.low) | (offset + width > allocation.high))
            if bad.any():
                first = int(offset[int(np.argmax(bad))])
                bounds = (allocation.low, allocation.high)
                raise self.out_of_bounds(group, bad, first, width, bounds, verb, f"`{allocation.name}`", pc)
            parts.append((mask, allocation, offset[mask]))
        self.check_alignment(group, address, width, verb, pc)
        if self.state.profile is not None:
            self.state.profile.global_access(group, address, width, pc)
        return parts if len(parts) > 1 else [(None, *parts[0][1:])]

    def _stray(
        self, group: Group, mask: np.ndarray, address: np.ndarray, width: int, verb: str, pc: int
    ) -> OutOfBounds:
        """The error for addresses in no allocation's window."""
        first = int(address[int(np.argmax(mask))])
        near = self.state.memory.nearest(first)
        if near is not None:
            bounds = (near.low, near.high)
            return self.out_of_bounds(group, mask, first - near.base, width, bounds, verb, f"`{near.name}`", pc)
        what = f"{verb} of {width} bytes through " + ("a null pointer" if first < 4096 else "a wild pointer")
        return fault(OutOfBounds, self.state.listing, group, mask, what, pc, detail=f"address {first:#x}")

    def before_read(self, group: Group, access: Access) -> None:
        if self.shadow is not None:
            assert isinstance(access.region, Allocation)
            self.shadow.read(group, access.region, access.position, access.width, access.pc, access.strong)

    def before_write(self, group: Group, access: Access, values: Sequence[Any]) -> None:
        if self.shadow is not None:
            assert isinstance(access.region, Allocation)
            self.shadow.write(group, access.region, access.position, values, access.width, access.pc, access.strong)


class Shared(Space):
    """Shared memory: each block's own, and in a cluster its neighbours'."""

    name = "shared"
    shadow: SharedShadow | None = None  # of the batch under way

    def parts(self, group: Group, address: Any, width: int, verb: str, pc: int) -> list[Part]:
        return [(None, self.state.shared_memory, self.positions(group, address, width, verb, pc))]

    def positions(self, group: Group, address: Any, width: int, verb: str, pc: int) -> np.ndarray:
        """Byte positions within the shared memory of the whole batch."""
        state = self.state
        address = group.spread(address, np.uint32)
        # as signed numbers, so that a little before the start is not far behind the end
        address = address.view(f"i{address.itemsize}").astype(np.int64)
        offset = address
        if state.cluster_size > 1:
            offset = address & (state.rank_unit - 1)
            self._begun(group, address, verb, pc)
        self.check_offsets(group, offset, width, state.shared_bytes, "the block's shared memory", verb, pc)
        if state.profile is not None:
            state.profile.shared_access(group, offset, width, pc)
        return offset + state.shared_start(group, address)

    def _begun(self, group: Group, address: np.ndarray, verb: str, pc: int) -> None:
        """Another block's memory is there once the cluster has met: before that it need not have begun."""
        own = group.get("block")
        early = self.state.cluster_epoch[own] == 0
        if early.any():
            early &= self.state.shared_start(group, address) != own * self.state.shared_stride
        if early.any():
            what = f"{verb} of another block's shared memory before the cluster has met: that block may not have begun"
            raise fault(Race, self.state.listing, group, early, what, pc)

    def before_read(self, group: Group, access: Access) -> None:
        if self.shadow is not None:
            self.shadow.read(group, access.position, access.width, access.pc)

    def before_write(self, group: Group, access: Access, values: Sequence[Any]) -> None:
        if self.shadow is not None:
            self.shadow.write(group, access.position, access.width, access.pc, values)


class Local(Space):
    """Local memory: arrays of a single thread."""

    name = "local"

    def parts(self, group: Group, address: Any, width: int, verb: str, pc: int) -> list[Part]:
        state = self.state
        offset = group.spread(address, np.uint64).astype(np.int64)
        self.check_offsets(group, offset, width, state.local_bytes, "the thread's local memory", verb, pc)
        return [(None, state.local_memory, offset + group.threads * state.local_bytes)]


class Parameters(Space):
    """The kernel's parameters, where they are indexed rather than named."""

    name = "parameter"

    def parts(self, group: Group, address: Any, width: int, verb: str, pc: int) -> list[Part]:
        offset = group.spread(address, np.uint64).astype(np.int64)
        size = len(self.state.parameters.buffer)
        self.check_offsets(group, offset, width, size, "the kernel's parameters", verb, pc)
        return [(None, self.state.parameters, offset)]


class Generic(Space):
    """Addresses that say themselves which space they belong to."""

    name = "generic"

    def __init__(self, state: State, spaces: tuple[Space, ...]) -> None:
        super().__init__(state)
        self._spaces = spaces  # global, shared, local, parameters: by the number in the address

    def load(self, group: Group, address: Any, dtype: Any, size: int, count: int, pc: int, strong: bool = False) -> Any:
        address = group.spread(address, np.uint64)
        pieces = self.split(group, address, pc)
        if len(pieces) == 1:
            space, _, own = pieces[0]
            return space.load(group, own, dtype, size, count, pc, strong)
        result = [np.empty(group.size, dtype) for _ in range(count)]
        for space, mask, own in pieces:
            assert mask is not None
            loaded = space.load(group.subset(mask), own, dtype, size, count, pc, strong)
            for values, part in zip(result, loaded if count > 1 else (loaded,)):
                values[mask] = part
        return tuple(result) if count > 1 else result[0]

    def store(
        self, group: Group, address: Any, values: Sequence[Any], dtype: Any, size: int, pc: int, strong: bool = False
    ) -> None:
        address = group.spread(address, np.uint64)
        pieces = self.split(group, address, pc)
        for space, mask, own in pieces:
            if mask is None:
                space.store(group, own, values, dtype, size, pc, strong)
            else:
                picked = Selection(group, mask, group).pick_all(values)
                space.store(group.subset(mask), own, picked, dtype, size, pc, strong)

    def split(self, group: Group, address: np.ndarray, pc: int) -> list[tuple[Space, np.ndarray | None, np.ndarray]]:
        """(space, lanes, address within the space); lanes are None where all go to one space."""
        if int(address.max()) < memory.SHARED_BASE:
            return [(self._spaces[0], None, address)]
        number, own = memory.space_of(address), address & np.uint64(memory.SHARED_BASE - 1)
        found = np.unique(number)
        if found[-1] >= len(self._spaces):
            bad = number >= len(self._spaces)
            raise fault(OutOfBounds, self.state.listing, group, bad, "access through a wild pointer", pc)
        if len(found) == 1:
            return [(self._spaces[int(found[0])], None, own)]
        return [(self._spaces[int(one)], number == one, own[number == one]) for one in found]


@dataclass(frozen=True)
class Spaces:
    """All of them."""

    global_: Global
    shared: Shared
    local: Local
    parameters: Parameters
    generic: Generic

    @classmethod
    def of(cls, state: State, shadow: GlobalShadow | None) -> Spaces:
        """The spaces of one launch."""
        first = Global(state, shadow), Shared(state), Local(state), Parameters(state)
        return cls(*first, Generic(state, first))
