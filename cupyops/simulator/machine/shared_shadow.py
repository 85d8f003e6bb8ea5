"""What is remembered of shared memory, to find races and reads of what nobody has written.

Threads run in lockstep here, so a missing barrier would never show in the results. Instead each granule of memory keeps
who touched it last and when; a barrier makes everything before it old.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import Race, Uninitialized
from .faults import fault
from .granules import COARSEST, Granules, split
from .group import Group
from .knowledge import LATER, Series
from .shared_records import IN_FLIGHT, NEVER, PC_MASK, SEVERAL_THREADS, Access, Reads, Record, pc_of, thread_of, warp_of
from .state import State
from .tickets import Tickets

_WAITS = {
    Series.PHASES: "wait for the mbarrier that the copy reports to",
    Series.STORES: "cp.async.bulk.wait_group.read",
    Series.PRODUCTS: "wgmma.wait_group",
}


class SharedShadow:
    """Races within a block, asynchronous copies in flight, and reads of shared memory that was never written.

    Args:
        granule: bytes of the narrowest access that the kernel may make.
    """

    def __init__(self, state: State, granule: int) -> None:
        self._state = state
        self._granules = Granules(granule)
        count = len(state.shared_memory.buffer) // COARSEST
        self._writes, self._reads = Record(count), Reads(count)
        self._atomics: Record | None = None
        self._has_copies = False
        self._arriving: Tickets | None = None  # where copies write that report to mbarriers
        self._readers: dict[int, Tickets] = {}  # what bulk copies (-1), and each warpgroup's products, may still read
        # when threads wrote it last by stores of their own, where that must be made known to other units
        self._stored_at = np.zeros(count, np.int64) if state.code.reads_beside else None

    # --- accesses ---

    def read(self, group: Group, position: np.ndarray, width: int, pc: int) -> None:
        """A load of `width` bytes at each position."""
        access = self._access("read", group, position, width, pc)
        written = self._writes.when.take(access.granule)
        self._readable(access, written)
        self._against(self._writes, written, "written", access)
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

    def atomic(self, group: Group, position: np.ndarray, width: int, pc: int) -> None:
        """An atomic update."""
        access = self._access("update atomically", group, position, width, pc)
        if self._atomics is None:
            self._atomics = Record(len(self._writes.who))
        written = self._writes.when.take(access.granule)
        self._readable(access, written)
        self._against(self._writes, written, "written", access)
        self._against_reads(access)
        self._atomics.note(access)

    def landed(self, group: Group, position: np.ndarray, width: int) -> None:
        """A cp.async has landed: from here on it is a write by the thread that waited."""
        access = self._access("write", group, position, width, 0)
        self._writes.when[access.granule] = access.when  # `who` is the copy's still

    # --- what goes on beside the threads ---

    def start_copy(
        self, group: Group, position: np.ndarray, size: int, pc: int, series: int, reduces: bool = False
    ) -> None:
        """A copy by each thread into `size` bytes from its position is under way, and reports to an mbarrier."""
        place = int(np.bitwise_or.reduce(position)) | size
        self._split(self._granules.narrow(place & -place))
        granule = self._spans(position, size)
        access = Access(self._state, "copy to", group, self._owner(group, position), granule, pc)
        if self._arriving is None:
            self._arriving = Tickets(len(self._writes.who))
        if reduces and self._is_added_to(granule):
            self._readable_beside(access)  # others may add to the same place
        else:
            if reduces:
                self._readable(access, self._writes.when.take(granule))
            self._overwrite(access, True)
        self._arriving.note(granule, series, LATER, pc)

    def _is_added_to(self, granule: np.ndarray) -> bool:
        """Whether all that is under way to these granules are reductions."""
        assert self._arriving is not None
        if (self._writes.when.take(granule) != IN_FLIGHT).any() or (self._arriving.of(granule)[1] != LATER).any():
            return False
        instructions = self._state.listing.instructions
        return all("reduce" in instructions[pc].modifiers for pc in np.unique(self._arriving.pc.take(granule)))

    def arrived(self, position: np.ndarray, size: int, series: int, count: int) -> None:
        """Its bytes have come: they are for those who know that `count` of the series are over."""
        assert self._arriving is not None
        self._arriving.note(self._spans(position, size), series, count)

    def bulk_read(self, group: Group, position: np.ndarray, pc: int, series: int, count: int) -> None:
        """A bulk copy of one thread reads these bytes, until the thread knows that `count` of the series are over."""
        self._read_beside("a bulk copy", group, np.unique(position), 1, None, pc, -1, np.array([series]), count)

    def product_read(
        self,
        group: Group,
        chunk: np.ndarray,
        unit: np.ndarray,
        pc: int,
        number: int,
        series: np.ndarray,
        count: np.ndarray,
    ) -> None:
        """Products of warpgroups read 16 bytes from each position: `unit` says for which of the group's warpgroups.

        `number`: of the warpgroup in its block. Of each warpgroup's series the product is `count`.
        """
        self._split(self._granules.narrow(16))
        self._read_beside("a matrix product", group, chunk, 128, unit, pc, number, series, count)

    def _read_beside(
        self,
        what: str,
        group: Group,
        position: np.ndarray,
        each: int,
        unit: np.ndarray | None,
        pc: int,
        number: int,
        series: np.ndarray,
        count: Any,
    ) -> None:
        finest = False
        while True:
            wide = self._granules.of(position, 16)[:, :] if each > 1 else position[None] >> self._granules.shift
            granule = wide if each > 1 else np.unique(wide)[None]
            of = np.zeros(granule.shape[1], np.int64) if unit is None else unit
            bad = self._unsound(group, granule, of, each, pc)
            if bad is None:
                break
            if finest or not self._refine():
                raise self._beside_fault(what, group, granule, of, each, pc, *bad)
            finest = True
        if number not in self._readers:
            self._readers[number] = Tickets(len(self._writes.who))
        counts = np.broadcast_to(np.asarray(count), series.shape)
        self._readers[number].note(granule, series[of], counts[of], pc)

    def _refine(self) -> bool:
        """Granules as narrow as can be, to name a place exactly. Whether that is narrower than they were."""
        pieces = self._granules.narrow_all()
        self._split(pieces)
        return pieces > 1

    def _unsound(
        self, group: Group, granule: np.ndarray, of: np.ndarray, each: int, pc: int
    ) -> tuple[str, np.ndarray] | None:
        """What is wrong with a read beside the threads, and where; None: nothing."""
        when = self._writes.when.take(granule)
        if (when == NEVER).any():
            return "unwritten", when == NEVER
        landing = when == IN_FLIGHT
        knowledge = self._state.knowledge
        if landing.any():
            bad = landing
            if self._arriving is not None and knowledge is not None:
                series, count = self._arriving.of(granule)
                rows = np.flatnonzero(np.bincount(series.reshape(-1) + 1)) - 1
                least = np.full((int(rows[-1]) + 2, group.size // each), -1, np.int32)  # -1, the last: of no series
                least[rows[rows >= 0]] = knowledge.least(group.threads, each, rows[rows >= 0])
                bad = landing & (least[series, of] < count)
                bad |= landing & (series < 0)
            if bad.any():
                return "landing", bad
        stored = ~landing
        if not stored.any():
            return None
        first = group.threads[::each][of]
        block = first // group.batch.threads_per_block
        who = self._writes.who.take(granule)
        epoch = (self._state.epoch << 32).take(block)
        if self._state.cluster_size > 1:
            horizon = (self._state.cluster_epoch << 32).take(block)
            epoch = np.where(thread_of(who) // group.batch.threads_per_block == block, epoch, horizon)
        bad = stored & (when >= epoch)
        if each == 1 and bad.any():  # what the thread itself has written, or its warp before it met
            warps = group.batch.per_thread["warp"]
            now = epoch | self._state.warp_epoch.take(warps[first])
            bad &= (thread_of(who) != first) & ((warp_of(who) != warps[first]) | (when >= now))
        if bad.any():
            return "unordered", bad
        if self._stored_at is not None:
            at, fenced = self._stored_at.take(granule), self._state.fenced_at
            by_reader = fenced[group.threads].reshape(-1, each).min(1)[of]
            bad = stored & (at > fenced.take(thread_of(who))) & (at > by_reader)
            if bad.any():
                return "unfenced", bad
        return None

    def _beside_fault(
        self,
        reader: str,
        group: Group,
        granule: np.ndarray,
        of: np.ndarray,
        each: int,
        pc: int,
        kind: str,
        bad: np.ndarray,
    ) -> Race | Uninitialized:
        row, column = _first(bad)
        place = int(granule[row, column])
        guilty = np.arange(group.size) // each == of[column]
        detail, listing, also = self._place(place), self._state.listing, pc_of(self._writes.who[place])
        if kind == "unwritten":
            what = "read of shared memory that was never written"
            return fault(Uninitialized, listing, group, guilty, what, pc, detail=detail)
        if kind == "landing":
            what = "read of shared memory while an asynchronous copy to it is in flight, with no wait in between"
            detail = self._told_to(place, detail)
        elif kind == "unordered":
            what = f"{reader} reads shared memory that another thread has written, with no barrier in between"
            detail += f", which {group.batch.thread_name(int(thread_of(self._writes.who[place])))} has written"
        else:
            what = f"{reader} reads shared memory that stores have written, with no fence.proxy.async in between"
            detail += f", which {group.batch.thread_name(int(thread_of(self._writes.who[place])))} has written"
        return fault(Race, listing, group, guilty, what, pc, detail=detail, also=also)

    def _told_to(self, granule: int, detail: str) -> str:
        """`detail`, with the mbarrier that a copy to the granule reports to."""
        if self._arriving is None or self._state.knowledge is None:
            return detail
        series = int(self._arriving.of(np.array([granule]))[0][0])
        if series < 0:
            return detail
        _, rank, offset = self._state.knowledge.name(series)
        whose = f" of the block of rank {rank}" if self._state.cluster_size > 1 else ""
        return f"{detail}; the copy reports to the mbarrier at offset {offset}{whose}, for which this thread has not waited"

    def _readable_beside(self, access: Access) -> None:
        """Nothing that goes on beside the threads reads what is to be overwritten."""
        for tickets in self._readers.values():
            bad = self._open(tickets, access)
            if bad is None:
                continue
            place = int(access.granule[_first(bad)])
            series = int(tickets.of(np.array([place]))[0][0])
            assert self._state.knowledge is not None
            kind = self._state.knowledge.name(series)[0]
            reader = "a matrix product" if kind is Series.PRODUCTS else "a bulk copy"
            what = f"{access.verb} shared memory that {reader} may still read, with no {_WAITS[kind]} in between"
            guilty = bad.any(axis=0) if bad.shape[1] == access.group.size else np.True_
            pc = int(tickets.pc[place])
            raise fault(
                Race, self._state.listing, access.group, guilty, what, access.pc, detail=self._place(place), also=pc
            )

    def _open(self, tickets: Tickets, access: Access) -> np.ndarray | None:
        """Where the threads do not know that work is over; None: nowhere."""
        series, count = tickets.of(access.granule)
        if not np.count_nonzero(count):
            return None
        assert self._state.knowledge is not None
        bad = self._state.knowledge.unaware(access.group.threads[None], series, count) & (series >= 0)
        return bad if bad.any() else None

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
        """Each granule has become so many."""
        if pieces == 1:
            return
        self._writes.split(pieces)
        self._reads.split(pieces)
        if self._atomics is not None:
            self._atomics.split(pieces)
        for tickets in (self._arriving, *self._readers.values()):
            if tickets is not None:
                tickets.split(pieces)
        if self._stored_at is not None:
            self._stored_at = split(self._stored_at, pieces)

    # --- the rules ---

    def _readable(self, access: Access, written: np.ndarray) -> None:
        """Somebody has written what is read, and no copy to it is under way."""
        if int(written.min()) >= 0:
            return
        bad = written < 0
        if self._arriving is not None:
            bad &= (written != IN_FLIGHT) | self._unaware(access)
            if not bad.any():
                return
        count, column = _first(bad)
        group, place = access.group, int(access.granule[count, column])
        guilty = bad.any(axis=0) if bad.shape[1] == group.size else np.True_
        detail = self._place(place)
        if written[count, column] == IN_FLIGHT:
            what = "read of shared memory while an asynchronous copy to it is in flight, with no wait in between"
            detail, also = self._told_to(place, detail), pc_of(self._writes.who[place])
            raise fault(Race, self._state.listing, group, guilty, what, access.pc, detail=detail, also=also)
        what = "read of shared memory that was never written"
        raise fault(Uninitialized, self._state.listing, group, guilty, what, access.pc, detail=detail)

    def _unaware(self, access: Access) -> np.ndarray:
        """Where the threads do not know that a copy which reports to an mbarrier has come; everywhere for a cp.async."""
        assert self._arriving is not None and self._state.knowledge is not None
        series, count = self._arriving.of(access.granule)
        return (series < 0) | self._state.knowledge.unaware(access.group.threads[None], series, count)

    def _overwrite(self, access: Access, in_flight: bool, changes: Callable[[], np.ndarray] | None = None) -> None:
        """The rules for a store or the start of a copy, and what is remembered of it.

        `changes` tells which granules will hold another value than they do.
        """
        granule = access.granule
        written = self._writes.when.take(granule)
        self._against(self._writes, written, "written", access, changes)
        if self._against_reads(access):
            self._reads.forget(granule)
        if self._atomics is not None:
            self._against(self._atomics, self._atomics.when.take(granule), "updated atomically", access)
        if self._has_copies:
            self._not_in_flight(access, written)
        if self._readers:
            self._readable_beside(access)
        self._has_copies |= in_flight
        if self._arriving is not None:
            self._arriving.forget(granule)
        if self._stored_at is not None:
            self._stored_at[granule] = 0 if in_flight else self._state.now(access.pc)
        self._writes.who[granule] = access.who
        self._writes.when[granule] = IN_FLIGHT if in_flight else access.when

    def _not_in_flight(self, access: Access, written: np.ndarray) -> None:
        if int(written.min()) > IN_FLIGHT:
            return
        bad = written == IN_FLIGHT
        if self._arriving is not None:
            bad &= self._unaware(access)
            if not bad.any():
                return
        place = int(access.granule[_first(bad)])
        what = "write of shared memory while an asynchronous copy to it is in flight, with no wait in between"
        also, detail = pc_of(self._writes.who[place]), self._told_to(place, self._place(place))
        guilty = bad.any(axis=0)
        raise fault(Race, self._state.listing, access.group, guilty, what, access.pc, detail=detail, also=also)

    def _against_reads(self, access: Access) -> bool:
        """Whether any of it was read in this epoch, if that is no race."""
        reads = self._reads.recent(access)
        if reads is not None:
            self._against(reads, reads.when.take(access.granule), "read", access)
        return reads is not None

    def _changes(self, access: Access, values: Sequence[Any]) -> np.ndarray:
        """Where a store changes what is there, by granule and thread; everywhere, where its values are not known."""
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
        """A recorded access by another thread in the same epoch conflicts, unless their warp has synchronised since.

        Threads may write one value to one place by one instruction, in whatever order they come to it.
        """
        if not np.count_nonzero(when >= access.horizon):
            return
        who = record.who.take(access.granule)
        bad = when >= access.since(who)
        bad &= thread_of(who) != access.group.threads
        bad &= (warp_of(who) != access.warp) | (when >= access.when)
        if changes is not None and bad.any():
            bad &= ((who & PC_MASK) != access.pc) | changes()
        if not bad.any():
            return
        first = _first(bad)
        other = who[first]
        thread = int(thread_of(other))
        party = "several threads have" if thread == SEVERAL_THREADS else f"{access.group.batch.thread_name(thread)} has"
        what = f"{access.verb} shared memory that another thread has {done}, with no barrier in between"
        detail = f"{self._place(int(access.granule[first]))}, which {party} {done}"
        mine = int(access.group.threads[first[1]])
        guilty, also = bad.any(axis=0), pc_of(record.other(int(access.granule[first]), mine))
        raise fault(Race, self._state.listing, access.group, guilty, what, access.pc, detail=detail, also=also)

    def _one_value(self, access: Access, position: np.ndarray, width: int, values: Sequence[Any]) -> None:
        """Threads of one instruction may write one place only if they write one value."""
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
        return f"shared memory, offset {(granule << self._granules.shift) % self._state.shared_stride}"


def _first(bad: np.ndarray) -> tuple[int, int]:
    """The first true element of the first thread, a column, that has one."""
    column, row = np.unravel_index(int(np.argmax(bad.T)), bad.T.shape)
    return int(row), int(column)
