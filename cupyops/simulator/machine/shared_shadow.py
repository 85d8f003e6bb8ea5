"""Checks of shared memory: races, and reads of what nobody has written.

Threads run in lockstep here, so a missing barrier would never show in the results. Instead each granule of memory keeps
who touched it last and when; a barrier makes everything before it old.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import Race, Uninitialized
from .beside import Beside, Reading
from .faults import fault
from .granules import COARSEST, Granules
from .group import Group
from .shared_records import (
    IN_FLIGHT,
    NEVER,
    PC_MASK,
    SEVERAL_THREADS,
    Access,
    Reads,
    Record,
    first_of,
    pc_of,
    thread_of,
    warp_of,
)
from .state import EPOCH_SHIFT, State

_WARP_EPOCH = (1 << EPOCH_SHIFT) - 1


class SharedShadow:
    """Races within a block, asynchronous copies in flight, and reads of shared memory that was never written.

    Args:
        granule: bytes of the narrowest access that the kernel may make.
    """

    def __init__(self, state: State, granule: int) -> None:
        self._state = state
        self._granules = Granules(granule)
        count = len(state.shared_memory.buffer) // COARSEST
        self._writes, self._reads = Record(count), Reads(state, count)
        self._latest = -1  # the latest epoch of any block when there was a write
        self._atomics: Record | None = None
        self._polls: Record | None = None  # loads that are made to meet atomics
        self._has_copies = False
        self._beside = Beside(state, self._writes, self._place) if state.code.beside else None

    # --- accesses ---

    def read(self, group: Group, position: np.ndarray, width: int, pc: int) -> None:
        """A load of `width` bytes at each position."""
        access = self._access("read", group, position, width, pc)
        written = self._writes.when.take(access.granule)
        self._readable(access, written)
        self._against_writes(access, written)
        if self._atomics is not None:
            self._against(self._atomics, self._atomics.when.take(access.granule), "updated atomically", access)
        self._reads.note(access)

    def write(
        self,
        group: Group,
        position: np.ndarray,
        width: int,
        pc: int,
        values: Sequence[Any] = (),
        in_flight: bool = False,
    ) -> None:
        """A store, or with `in_flight` the start of an asynchronous copy into shared memory."""
        access = self._access("write", group, position, width, pc)
        self._overwrite(access, in_flight, lambda: self._changes(access, values))
        if len(values):
            self._one_value(access, position, width, values)

    def flag(self, group: Group, position: np.ndarray, width: int, pc: int) -> None:
        """A volatile store that other warps may poll; within a warp it is as any other."""
        if self._polls is not None:
            access = self._access("write", group, position, width, pc)
            who, when = self._polls.who.take(access.granule), self._polls.when.take(access.granule)
            self._against(self._polls, np.where(warp_of(who) == access.warp, when, NEVER), "read", access)
        self.atomic(group, position, width, pc)

    def atomic(self, group: Group, position: np.ndarray, width: int, pc: int) -> None:
        """An atomic update."""
        access = self._access("update atomically", group, position, width, pc)
        if self._atomics is None:
            self._atomics = Record(len(self._writes.who), self._state.code.meets)
        written = self._writes.when.take(access.granule)
        self._readable(access, written)
        self._against_writes(access, written)
        self._against_reads(access)
        self._atomics.note(access)

    def poll(self, group: Group, position: np.ndarray, width: int, pc: int) -> None:
        """A load that is made to meet what atomics do."""
        access = self._access("read", group, position, width, pc)
        written = self._writes.when.take(access.granule)
        self._readable(access, written)
        self._against_writes(access, written)
        if self._polls is None:
            self._polls = Record(len(self._writes.who), self._state.code.meets)
        self._polls.note(access)

    def is_written(self, group: Group, position: np.ndarray, width: int) -> bool:
        """Return True if something was written at all these places."""
        access = self._access("write", group, position, width, 0)  # which may split the granules
        return int(self._writes.when.take(access.granule).min()) >= 0

    def landed(self, group: Group, position: np.ndarray, width: int) -> None:
        """A cp.async has landed: from here on it is a write by the thread that waited."""
        access = self._access("write", group, position, width, 0)
        self._latest = self._state.latest_epoch
        self._writes.when[access.granule] = access.when  # `who` is the copy's still

    # --- what goes on beside the threads ---

    def start_copy(
        self, group: Group, position: np.ndarray, size: int, pc: int, series: int, reduces: bool = False
    ) -> None:
        """A copy by each thread into `size` bytes from its position is under way, and reports to an mbarrier."""
        assert self._beside is not None
        place = int(np.bitwise_or.reduce(position)) | size
        self._split(self._granules.narrow(place & -place))
        granule = self._spans(position, size)
        access = Access(self._state, "copy to", group, self._owner(group, position), granule, pc)
        if reduces and self._beside.is_added_to(granule):
            self._beside.check_readers(access)
        else:
            if reduces:
                self._readable(access, self._writes.when.take(granule))
            self._overwrite(access, True)
        self._beside.start(granule, series, pc)

    def arrived(self, position: np.ndarray, size: int, series: int, count: int) -> None:
        """Note that a copy has arrived, for those who know that `count` of the mbarrier's series are over."""
        assert self._beside is not None
        self._beside.arrived(self._spans(position, size), series, count)

    def bulk_read(self, reading: Reading, position: np.ndarray) -> None:
        """Note that a bulk copy of one thread reads these bytes."""
        unit = np.zeros(1, np.int64)
        self._read_beside(reading, lambda: np.unique(position >> self._granules.shift)[None], unit)

    def product_read(self, reading: Reading, chunk: np.ndarray, unit: np.ndarray) -> None:
        """Products of warpgroups read 16 bytes from each position: `unit` says for which of the group's warpgroups."""
        self._read_beside(reading, lambda: self._granules.of(chunk, 16), unit)

    def _read_beside(self, reading: Reading, granules: Callable[[], np.ndarray], unit: np.ndarray) -> None:
        assert self._beside is not None
        granule = granules()
        wrong = self._beside.read(reading, granule, np.broadcast_to(unit, granule.shape[1:]))
        if wrong is None:
            return
        pieces = self._granules.narrow_all()  # to name the place exactly, or to find that it is another
        self._split(pieces)
        granule = granules()
        wrong = self._beside.read(reading, granule, np.broadcast_to(unit, granule.shape[1:]))
        if wrong is not None:
            raise wrong

    # --- granules ---

    def _access(self, verb: str, group: Group, position: np.ndarray, width: int, pc: int) -> Access:
        """Every position is a multiple of `width`."""
        self._split(self._granules.narrow(width))
        granule = self._granules.of(position, width)
        return Access(self._state, verb, group, self._owner(group, position), granule, pc)

    def _owner(self, group: Group, position: np.ndarray) -> np.ndarray:
        """The block whose memory it is."""
        return position // self._state.shared_stride if self._state.cluster_size > 1 else group.get("block")

    def _spans(self, position: np.ndarray, size: int) -> np.ndarray:
        """The granules of `size` bytes from each position, which they begin: a column for each."""
        return (position >> self._granules.shift)[None] + np.arange(-(-size >> self._granules.shift))[:, None]

    def _split(self, pieces: int) -> None:
        """Split each granule into `pieces`."""
        if pieces == 1:
            return
        self._writes.split(pieces)
        self._reads.split(pieces)
        for record in (self._atomics, self._polls):
            if record is not None:
                record.split(pieces)
        if self._beside is not None:
            self._beside.split(pieces)

    # --- the rules ---

    def _readable(self, access: Access, written: np.ndarray) -> None:
        """Check that what is read has been written, and that no copy to it is under way."""
        if int(written.min()) >= 0:
            return
        bad = written < 0
        if self._beside is not None and (unaware := self._beside.unaware(access)) is not None:
            bad &= (written != IN_FLIGHT) | unaware
            if not bad.any():
                return
        count, column = first_of(bad)
        group, place = access.group, int(access.granule[count, column])
        guilty = bad.any(axis=0) if bad.shape[1] == group.size else np.True_
        detail = self._place(place)
        if written[count, column] == IN_FLIGHT:
            what = "read of shared memory while an asynchronous copy to it is in flight, with no wait in between"
            if self._beside is not None:
                detail = self._beside.told_to(place, detail)
            also = pc_of(self._writes.who[place])
            raise fault(Race, self._state.listing, group, guilty, what, access.pc, detail=detail, also=also)
        if self._is_pad(access, bad):
            return
        what = "read of shared memory that was never written"
        raise fault(Uninitialized, self._state.listing, group, guilty, what, access.pc, detail=detail)

    def _is_pad(self, access: Access, bad: np.ndarray) -> bool:
        """Return True if structs are copied of which only pads are missing: parts of vectors that are only stored again."""
        copied = self._state.listing.copied(access.pc)
        if not any(copied) or bad.all(axis=0).any():
            return False
        rows = np.arange(len(bad)) * len(copied) // len(bad)
        return len(bad) >= len(copied) and not bad[~np.array(copied)[rows]].any()

    def _overwrite(self, access: Access, in_flight: bool, changes: Callable[[], np.ndarray] | None = None) -> None:
        """The rules for a store or the start of a copy, and what is remembered of it.

        `changes` tells which granules will hold another value than they do.
        """
        granule = access.granule
        written = self._writes.when.take(granule)
        self._against_writes(access, written, changes)
        if self._against_reads(access):
            self._reads.forget(granule)
        for record, done in ((self._atomics, "updated atomically"), (self._polls, "read")):
            if record is not None:
                self._against(record, record.when.take(granule), done, access)
        if self._has_copies:
            self._not_in_flight(access, written)
        if self._beside is not None:
            self._beside.overwrite(access, in_flight)
        self._has_copies |= in_flight
        self._latest = self._state.latest_epoch
        self._writes.who[granule] = access.who
        self._writes.when[granule] = IN_FLIGHT if in_flight else access.when

    def _not_in_flight(self, access: Access, written: np.ndarray) -> None:
        if int(written.min()) > IN_FLIGHT:
            return
        bad = written == IN_FLIGHT
        if self._beside is not None and (unaware := self._beside.unaware(access)) is not None:
            bad &= unaware
            if not bad.any():
                return
        place = int(access.granule[first_of(bad)])
        what = "write of shared memory while an asynchronous copy to it is in flight, with no wait in between"
        also, detail = pc_of(self._writes.who[place]), self._place(place)
        if self._beside is not None:
            detail = self._beside.told_to(place, detail)
        guilty = bad.any(axis=0)
        raise fault(Race, self._state.listing, access.group, guilty, what, access.pc, detail=detail, also=also)

    def _against_writes(
        self, access: Access, written: np.ndarray, changes: Callable[[], np.ndarray] | None = None
    ) -> None:
        if self._state.cluster_size > 1 or self._latest >= self._state.least_epoch:
            self._against(self._writes, written, "written", access, changes)

    def _against_reads(self, access: Access) -> bool:
        """Check an access against reads of this epoch; return True if there were any."""
        reads = self._reads.recent(access)
        if reads is not None:
            self._against(reads, reads.when.take(access.granule), "read", access)
        return reads is not None

    def _changes(self, access: Access, values: Sequence[Any]) -> np.ndarray:
        """Mask of stores that change what is there, by granule and thread; True where the values are not known."""
        changed = np.ones(access.granule.shape, np.bool_)
        each, size = max(1, len(changed) // max(1, len(values))), 1 << self._granules.shift
        for row in range(len(changed) if len(values) else 0):
            value = np.asarray(values[row // each])
            if value.itemsize > size * each:
                continue
            start = access.granule[row - row % each] * size
            there = self._state.shared_memory.view(value.dtype)[start // value.itemsize]
            bits = f"u{value.itemsize}"
            changed[row] = there.view(bits) != value.view(bits)
        return changed

    def _against(
        self,
        record: Record,
        when: np.ndarray,
        done: str,
        access: Access,
        changes: Callable[[], np.ndarray] | None = None,
    ) -> None:
        """Raise if an access by another thread in the same epoch conflicts, unless their warp has synchronised since."""
        if not np.count_nonzero(when >= access.horizon):
            return
        who = record.who.take(access.granule)
        bad = when >= access.since(who)
        bad &= thread_of(who) != access.group.threads
        in_warp = warp_of(who) == access.warp
        since_warp_met = (when & _WARP_EPOCH) >= access.warp_epoch
        bad &= ~in_warp | since_warp_met | (self._apart(access, who, when) & in_warp)
        if bad.any():
            bad &= ~np.asarray(record.is_behind(access, who, when))
        if changes is not None and bad.any():
            bad &= ((who & PC_MASK) != access.pc) | changes()
        if not bad.any():
            return
        first = first_of(bad)
        other = who[first]
        thread = int(thread_of(other))
        party = "several threads have" if thread == SEVERAL_THREADS else f"{access.group.batch.thread_name(thread)} has"
        what = f"{access.verb} shared memory that another thread has {done}, with no barrier in between"
        detail = f"{self._place(int(access.granule[first]))}, which {party} {done}"
        mine = int(access.group.threads[first[1]])
        guilty, also = bad.any(axis=0), pc_of(record.other(int(access.granule[first]), mine))
        raise fault(Race, self._state.listing, access.group, guilty, what, access.pc, detail=detail, also=also)

    def _apart(self, access: Access, who: np.ndarray, when: np.ndarray) -> Any:
        """Mask of accesses whose lanes, of one warp, have met others since, but not each other."""
        order, shape = self._state.lane_epochs, when.shape
        if not order:
            return False
        group, thread = access.group, thread_of(who)
        warp, lane = (np.broadcast_to(one, shape) for one in (group.get("warp"), group.get("laneid")))
        slots = group.batch.per_thread["laneid"]
        other = np.where(thread == SEVERAL_THREADS, -1, slots.take(np.minimum(thread, len(slots) - 1)).astype(np.int64))
        return order.unordered(warp, lane, other, when & _WARP_EPOCH)

    def _one_value(self, access: Access, position: np.ndarray, width: int, values: Sequence[Any]) -> None:
        """Check that threads of one instruction write one value to one place."""
        if not np.count_nonzero(self._writes.who.take(access.granule) != access.who):
            return
        group = access.group
        self._split(self._granules.narrow_all())  # so that a granule lies within one value
        granule = self._granules.of(position, width)
        last = self._writes.who.take(granule)
        lost, winner = last != access.who, np.searchsorted(group.threads, thread_of(last))
        each = max(1, len(granule) // len(values))
        for number in range(len(granule)):
            value = values[number // each]
            if not isinstance(value, np.ndarray) or value.ndim == 0:
                continue
            bits = value.view(f"u{value.itemsize}")
            bad = lost[number] & (bits[winner[number]] != bits)
            if bad.any():
                what = "threads of one instruction write different values to one place"
                detail = self._place(int(granule[number, int(np.argmax(bad))]))
                raise fault(Race, self._state.listing, group, bad, what, access.pc, detail=detail)

    def _place(self, granule: int) -> str:
        offset = (granule << self._granules.shift) % self._state.shared_stride
        if self._state.shared_gaps is None:
            return f"shared memory, offset {offset}"
        place = self._state.shared_gaps.nearest(offset)
        return f"shared memory, offset {offset - place.low} of " + (
            f"`{place.name}`" if place.name else "the dynamic part"
        )
