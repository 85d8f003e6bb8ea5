"""The state spaces: global, shared, local, parameters, and generic addresses, which lead to one of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import memory
from ..errors import OutOfBounds, Race
from ..memory import Allocation
from ..translate.function import Load
from .faults import fault
from .global_shadow import GlobalShadow
from .group import Group, Selection
from .shared_shadow import SharedShadow
from .space import ATOMIC, Access, Part, Space
from .state import Reach, State

_ATOMIC_ACCESS = frozenset(("relaxed", "acquire", "release"))
_FAR = 1 << 36  # bytes from a tensor, more than an index that went astray leads: 8 bytes times 32 bits
_WILD = "no tensor is near; a pointer inside a struct is cupyops.address(x), asked for inside simulate()"


class Global(Space):
    """Global memory: the caller's arrays and the module's variables."""

    name = "global"

    def __init__(self, state: State, shadow: GlobalShadow | None) -> None:
        super().__init__(state)
        self.shadow = shadow
        # what looks whether a read comes before a copy under way has stored; None where none is
        self.unstored: Callable[[Group, Allocation, np.ndarray, int, int], None] | None = None

    def parts(self, group: Group, address: Any, width: int, verb: str, pc: int) -> list[Part]:
        address = group.spread(address, np.uint64)
        low, high = int(np.minimum.reduce(address)), int(np.maximum.reduce(address))
        allocation = self.state.memory.at(low)
        if (
            allocation is None
            or allocation.number in self.state.memory.closed
            or low < allocation.base + allocation.low
            or high + width > allocation.base + allocation.high
        ):
            return self._several(group, address, width, verb, pc)
        self.check_alignment(group, address, width, verb, pc)
        if self.state.profile is not None:
            self.state.profile.global_access(group, address, width, pc)
        offset = (address - np.uint64(allocation.base)).view(np.int64)
        if allocation.gaps is not None:
            self._check_gaps(group, None, allocation, offset, width, verb, pc)
        return [(None, allocation, offset)]

    def _several(self, group: Group, address: np.ndarray, width: int, verb: str, pc: int) -> list[Part]:
        """Addresses in more than one allocation, or outside all of them."""
        parts: list[Part] = []
        number = memory.number_of(address)
        for one in np.unique(number):
            mask = number == one
            allocation = self.state.memory.allocations.get(int(one))
            if allocation is None:
                raise self._stray(group, mask, address, width, verb, pc)
            if allocation.number in self.state.memory.closed:
                raise self._not_given(group, mask, allocation, address, width, verb, pc)
            offset = (address - np.uint64(allocation.base)).view(np.int64)
            bad = mask & ((offset < allocation.low) | (offset + width > allocation.high))
            if bad.any():
                raise self._stray(group, bad, address, width, verb, pc)
            if allocation.gaps is not None:
                self._check_gaps(group, mask, allocation, offset[mask], width, verb, pc)
            parts.append((mask, allocation, offset[mask]))
        self.check_alignment(group, address, width, verb, pc)
        if self.state.profile is not None:
            self.state.profile.global_access(group, address, width, pc)
        return parts if len(parts) > 1 else [(None, *parts[0][1:])]

    def _check_gaps(
        self,
        group: Group,
        mask: np.ndarray | None,
        allocation: Allocation,
        offset: np.ndarray,
        width: int,
        verb: str,
        pc: int,
    ) -> None:
        """Check that no access of these lanes lies between the elements of a view."""
        bad = allocation.in_gaps(offset, width)
        if bad is None:
            return
        guilty = bad
        if mask is not None:
            guilty = mask.copy()
            guilty[mask] = bad
        what = f"{verb} of {width} bytes between the elements of `{allocation.name}`"
        at = int(offset[int(np.argmax(bad))]) - allocation.low
        raise fault(OutOfBounds, self.state.listing, group, guilty, what, pc, detail=f"offset {at}: {allocation.told}")

    def _stray(
        self, group: Group, mask: np.ndarray, address: np.ndarray, width: int, verb: str, pc: int
    ) -> OutOfBounds:
        """The error for addresses that lie in no allocation, by the one that they are nearest to."""
        first = int(address[int(np.argmax(mask))])
        near = self.state.memory.nearest(first)
        if near is not None and near.number not in self.state.memory.closed and abs(first - near.base) < _FAR:
            bounds = (near.low, near.high)
            return self.out_of_bounds(group, mask, first - near.base, width, bounds, verb, f"`{near.name}`", pc)
        null = first < 4096
        what = f"{verb} of {width} bytes through " + ("a null pointer" if null else "a wild pointer")
        detail = f"address {first:#x}" + ("" if null else f": {_WILD}")
        return fault(OutOfBounds, self.state.listing, group, mask, what, pc, detail=detail)

    def _not_given(
        self,
        group: Group,
        mask: np.ndarray,
        allocation: Allocation,
        address: np.ndarray,
        width: int,
        verb: str,
        pc: int,
    ) -> OutOfBounds:
        """The error for a tensor that lives, but that nobody has given to this launch: it may be gone on a GPU."""
        what = f"{verb} of {width} bytes of a tensor that this launch was not given"
        offset = int(address[int(np.argmax(mask))]) - allocation.base
        detail = (
            f"offset {offset} of what an earlier launch called `{allocation.name}`: a pointer that was kept. Pass the "
            "tensor, or ask for the pointer by cupyops.address"
        )
        return fault(OutOfBounds, self.state.listing, group, mask, what, pc, detail=detail)

    def before_read(self, group: Group, access: Access) -> None:
        if self.unstored is not None:
            assert isinstance(access.region, Allocation)
            self.unstored(group, access.region, access.position, access.width, access.pc)
        if self.shadow is not None:
            assert isinstance(access.region, Allocation)
            self.shadow.read(group, access)

    def before_write(self, group: Group, access: Access, values: Sequence[Any]) -> None:
        if self.shadow is not None:
            assert isinstance(access.region, Allocation)
            self.shadow.write(group, access, values)


class Shared(Space):
    """Shared memory: each block's own, or in a cluster that of any of its blocks.

    Args:
        anywhere: whether addresses may name the memory of other blocks of the cluster, as those of .shared::cluster do.
    """

    name = "shared"
    shadow: SharedShadow | None = None  # of the batch under way

    def __init__(self, state: State, anywhere: bool) -> None:
        super().__init__(state)
        self._anywhere = anywhere

    def parts(self, group: Group, address: Any, width: int, verb: str, pc: int) -> list[Part]:
        return [(None, self.state.shared_memory, self.positions(group, address, width, verb, pc))]

    def positions(
        self, group: Group, address: Any, width: int, verb: str, pc: int, anywhere: bool | None = None
    ) -> np.ndarray:
        """Byte positions within the shared memory of the whole batch. `anywhere`: in place of the space's own."""
        state = self.state
        address = group.spread(address, np.uint32)
        # as signed numbers, so that a little before the start is not far behind the end
        address = address.view(f"i{address.itemsize}").astype(np.int64)
        offset = address
        if state.cluster_size > 1:
            offset = self._in_cluster(group, address, width, verb, pc, self._anywhere if anywhere is None else anywhere)
        where, gaps = "the block's shared memory", state.shared_gaps
        self.check_offsets(group, offset, width, state.shared_bytes, where, verb, pc, gaps)
        if state.profile is not None:
            state.profile.shared_access(group, offset, width, pc)
        return offset + state.shared_start(group, address)

    def _in_cluster(
        self, group: Group, address: np.ndarray, width: int, verb: str, pc: int, anywhere: bool
    ) -> np.ndarray:
        """The offsets of addresses that name a block."""
        state = self.state
        offset = address & (state.rank_unit - 1)
        rank, own = state.named_rank(address), group.get("cluster_ctarank")
        before = offset >= state.rank_unit - 256  # a little before the start of the block that follows
        if before.any():
            offset, rank = np.where(before, offset - state.rank_unit, offset), np.where(before, rank + 1, rank)
            rank = rank & 0xFF
        bad = rank >= state.cluster_size
        if bad.any():
            what = f"{verb} of {width} bytes of the shared memory of a block that the cluster has not"
            first = int(np.argmax(bad))
            detail = f"address {int(address[first]):#x}: rank {int(rank[first])} of {state.cluster_size}"
            raise fault(OutOfBounds, state.listing, group, bad, what, pc, detail=detail)
        others = rank != own
        if others.any():
            if not anywhere:
                what = (
                    f"{verb} of another block's shared memory by an instruction for the block's own: the address bears "
                    "the rank of the block that took it"
                )
                first = int(np.argmax(others))
                detail = (
                    f"address {int(address[first]):#x}: rank {int(rank[first])}, in the block of rank {int(own[first])}"
                )
                raise fault(OutOfBounds, state.listing, group, others, what, pc, detail=detail)
            self._of_others(group, others, rank, verb, pc)
        return offset

    def _of_others(self, group: Group, others: np.ndarray, rank: np.ndarray, verb: str, pc: int) -> None:
        """Check that another block's memory is there: once the cluster has met, and until that block exits."""
        state = self.state
        own = group.get("block")
        early = others & ~state.has_met[own]
        if early.any():
            what = f"{verb} of another block's shared memory before the cluster has met: that block may not have begun"
            raise fault(Race, state.listing, group, early, what, pc)
        block = own // state.cluster_size * state.cluster_size + rank
        for one in np.unique(block[others]):
            reach = Reach(group, block == one, verb, pc)
            if state.has_exited(int(one)):
                raise state.outlived(reach)
            if verb != ATOMIC:  # by atomics blocks may tell each other that they are done
                state.reached[int(one)] = reach

    def before_read(self, group: Group, access: Access) -> None:
        if self.shadow is None:
            return
        if self._is_atomic(access) or (access.strong and self.state.code.fences):
            self.shadow.poll(group, access.position, access.width, access.pc)
            self.state.meet(group, access.pc)
        else:
            self.shadow.read(group, access.position, access.width, access.pc)

    def before_write(self, group: Group, access: Access, values: Sequence[Any]) -> None:
        if self.shadow is None:
            return
        is_atomic = self._is_atomic(access)
        store = self.shadow.atomic if is_atomic else self.shadow.flag
        # the first store to a place is one that others must not meet: what they would read is nothing
        may_meet = is_atomic or (access.strong and self._has_fenced(group))
        if may_meet and self.shadow.is_written(group, access.position, access.width):
            store(group, access.position, access.width, access.pc)
        else:
            self.shadow.write(group, access.position, access.width, access.pc, values)

    def _is_atomic(self, access: Access) -> bool:
        """Return True for relaxed, acquire and release, as of cuda::atomic; volatile orders no lanes of a warp."""
        return access.strong and not _ATOMIC_ACCESS.isdisjoint(self.state.listing.instructions[access.pc].modifiers)

    def _has_fenced(self, group: Group) -> bool:
        """Return True if warps have run fences, after which a volatile store says what is done."""
        return bool(self.state.order.has_fenced[group.get("warp")].all())


class Local(Space):
    """Local memory: arrays of a single thread."""

    name = "local"

    def parts(self, group: Group, address: Any, width: int, verb: str, pc: int) -> list[Part]:
        state = self.state
        offset = group.spread(address, np.uint64).astype(np.int64)
        where, gaps = "the thread's local memory", state.local_gaps
        self.check_offsets(group, offset, width, state.local_bytes, where, verb, pc, gaps)
        return [(None, state.local_memory, offset + group.threads * state.local_bytes)]

    def before_write(self, group: Group, access: Access, values: Sequence[Any]) -> None:
        if len(self.state.local_written):
            for byte in range(access.width):
                self.state.local_written[access.position + byte] = True

    def unwritten(self, group: Group, address: Any, start: int, width: int) -> np.ndarray:
        """Mask of threads that have written none of the bytes from `start` behind their addresses on."""
        places = self._bytes(group, address, start + width)[start:]
        return ~np.any([self.state.local_written[place] for place in places], axis=0)

    def forget(self, group: Group, address: Any, start: int, width: int, undefined: Any) -> None:
        """Mark what these threads have stored there as undefined."""
        chosen = group.spread(undefined, np.bool_)
        for place in self._bytes(group, address, start + width)[start:]:
            self.state.local_written[place[chosen]] = False

    def _bytes(self, group: Group, address: Any, width: int) -> list[np.ndarray]:
        size = self.state.local_bytes
        offset = np.clip(group.spread(address, np.uint64).astype(np.int64), 0, size - width)
        return [offset + group.threads * size + byte for byte in range(width)]


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

    def __init__(self, state: State, spaces: tuple[Space, Space, Local, Space]) -> None:
        super().__init__(state)
        self._local = spaces[2]
        self._spaces = spaces  # global, shared, local, parameters: by the number in the address

    def load(self, group: Group, address: Any, what: Load) -> Any:
        pieces = self.split(group, group.spread(address, np.uint64), what.pc)
        if len(pieces) == 1:
            space, _, own = pieces[0]
            return space.load(group, own, what)
        loaded = ((mask, space.load(group.subset(mask), own, what)) for space, mask, own in pieces if mask is not None)
        return self.joined(group, what, loaded)

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

    def is_local(self, group: Group, address: Any) -> np.ndarray:
        """Mask of addresses of arrays of the thread."""
        return memory.space_of(group.spread(address, np.uint64)) == memory.LOCAL_BASE >> 60

    def unwritten(self, group: Group, address: Any, start: int, width: int) -> np.ndarray:
        """Mask of threads that have written none of the bytes of such an array from `start` behind their addresses on."""
        here = self.is_local(group, address)
        return here & self._local.unwritten(group, self._own(group, address), start, width) if here.any() else here

    def forget(self, group: Group, address: Any, start: int, width: int, undefined: Any) -> None:
        """Mark what these threads have stored in such arrays as undefined."""
        chosen = self.is_local(group, address) & undefined
        if chosen.any():
            self._local.forget(group, self._own(group, address), start, width, chosen)

    def _own(self, group: Group, address: Any) -> np.ndarray:
        return group.spread(address, np.uint64) & np.uint64(memory.SHARED_BASE - 1)

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
    """State spaces of one launch."""

    global_: Global
    shared: Shared
    cluster: Shared
    local: Local
    parameters: Parameters
    generic: Generic

    @classmethod
    def of(cls, state: State, shadow: GlobalShadow | None) -> Spaces:
        """The spaces of one launch."""
        global_, own, cluster = Global(state, shadow), Shared(state, False), Shared(state, True)
        local, parameters = Local(state), Parameters(state)
        return cls(global_, own, cluster, local, parameters, Generic(state, (global_, cluster, local, parameters)))
