"""Records of shared memory for work that goes on beside the threads: copies, and products of matrices.

Such work is known by the series that it is of and its count in there (`knowledge.py`): who does not know that it is over may
neither read what it writes, nor overwrite what it reads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ..errors import Race, Uninitialized
from .faults import fault
from .granules import split
from .group import Group
from .knowledge import LATER, Series
from .shared_records import IN_FLIGHT, NEVER, Access, Record, first_of, pc_of, thread_of, warp_of
from .state import EPOCH_SHIFT, State
from .tickets import Tickets
from .warp_order import EPOCHS

_WAITS = {
    Series.PHASES: "wait for the mbarrier that the copy reports to",
    Series.STORES: "cp.async.bulk.wait_group.read",
    Series.PRODUCTS: "wgmma.wait_group",
}


class Reading(NamedTuple):
    """Work that reads shared memory, by one thread or by warpgroups of a group.

    Attributes:
        what: it is called in messages.
        each: how many threads ask for it together.
        kind: a number that other work has which may read the same places at the same time.
        series, until: by which it is known to be over; of each of those who ask, in the order of the group.
    """

    what: str
    group: Group
    each: int
    kind: int
    series: np.ndarray
    until: np.ndarray
    pc: int


class Beside:
    """Records of one batch.

    Args:
        writes: the last write of each granule.
        place: names a granule.
    """

    def __init__(self, state: State, writes: Record, place: Callable[[int], str]) -> None:
        self._state, self._writes, self._place = state, writes, place
        self._arriving: Tickets | None = None  # where copies write that report to mbarriers
        self._readers: dict[int, Tickets] = {}  # what bulk copies, and the products of each warpgroup, may still read
        # when threads wrote it last by stores of their own, where that must be made known to other units
        self._stored_at = np.zeros(len(writes.who), np.int64) if state.code.reads_beside else None

    def split(self, pieces: int) -> None:
        """Split each granule into `pieces`."""
        for tickets in (self._arriving, *self._readers.values()):
            if tickets is not None:
                tickets.split(pieces)
        if self._stored_at is not None:
            self._stored_at = split(self._stored_at, pieces)

    # --- what is written ---

    def start(self, granule: np.ndarray, series: int, pc: int) -> None:
        """Note that a copy to these granules begins, which reports to an mbarrier."""
        if self._arriving is None:
            self._arriving = Tickets(len(self._writes.who))
        self._arriving.note(granule, series, LATER, pc)

    def arrived(self, granule: np.ndarray, series: int, count: int) -> None:
        """Note that a copy has arrived, for those who know that `count` of the series are over."""
        assert self._arriving is not None
        self._arriving.note(granule, series, count)

    def is_added_to(self, granule: np.ndarray) -> bool:
        """Return True if all copies under way to these granules are reductions, of which there may be several."""
        if self._arriving is None or (self._writes.when.take(granule) != IN_FLIGHT).any():
            return False
        if (self._arriving.of(granule)[1] != LATER).any():
            return False
        instructions = self._state.listing.instructions
        return all(
            "reduce" in instructions[pc].modifiers or instructions[pc].opcode == "red"
            for pc in np.unique(self._arriving.pc.take(granule))
        )

    def unaware(self, access: Access) -> np.ndarray | None:
        """Mask of threads that know of no copy that has arrived and told an mbarrier; None: there have been none."""
        if self._arriving is None:
            return None
        assert self._state.knowledge is not None
        series, count = self._arriving.of(access.granule)
        return (series < 0) | self._state.knowledge.unaware(access.group.threads[None], series, count)

    def overwrite(self, access: Access, in_flight: bool) -> None:
        """A store, or with `in_flight` the start of a copy."""
        self.check_readers(access)
        if self._arriving is not None:
            self._arriving.forget(access.granule)
        if self._stored_at is not None:
            self._stored_at[access.granule] = 0 if in_flight else self._state.now(access.pc)

    def told_to(self, granule: int, detail: str) -> str:
        """`detail`, with the mbarrier that a copy to the granule reports to."""
        if self._arriving is None or self._state.knowledge is None:
            return detail
        series = int(self._arriving.of(np.array([granule]))[0][0])
        if series < 0:
            return detail
        _, rank, offset = self._state.knowledge.name(series)
        whose = f" of the block of rank {rank}" if self._state.cluster_size > 1 else ""
        return f"{detail}; the copy reports to the mbarrier at offset {offset}{whose}, for which this thread has not waited"

    # --- what is read ---

    def check_readers(self, access: Access) -> None:
        """Check that no work under way still reads memory that is overwritten."""
        for tickets in self._readers.values():
            series, count = tickets.of(access.granule)
            if not np.count_nonzero(count):
                continue
            assert self._state.knowledge is not None
            bad = self._state.knowledge.unaware(access.group.threads[None], series, count) & (series >= 0)
            if not bad.any():
                continue
            place = int(access.granule[first_of(bad)])
            kind = self._state.knowledge.name(int(tickets.of(np.array([place]))[0][0]))[0]
            reader = "a matrix product" if kind is Series.PRODUCTS else "a bulk copy"
            what = f"{access.verb} shared memory that {reader} may still read, with no {_WAITS[kind]} in between"
            guilty = bad.any(axis=0) if bad.shape[1] == access.group.size else np.True_
            detail, also = self._place(place), int(tickets.pc[place])
            raise fault(Race, self._state.listing, access.group, guilty, what, access.pc, detail=detail, also=also)

    def read(self, reading: Reading, granule: np.ndarray, unit: np.ndarray) -> Race | Uninitialized | None:
        """Note that work beside the threads begins to read granules, `unit` by column; return the fault, if it is one."""
        wrong = self._wrong(reading, granule, unit)
        if wrong is not None:
            return self._fault(reading, granule, unit, *wrong)
        if reading.kind not in self._readers:
            self._readers[reading.kind] = Tickets(len(self._writes.who))
        self._readers[reading.kind].note(granule, reading.series[unit], reading.until[unit], reading.pc)
        return None

    def _wrong(self, reading: Reading, granule: np.ndarray, unit: np.ndarray) -> tuple[str, np.ndarray] | None:
        when = self._writes.when.take(granule)
        if (bad := when == NEVER).any():
            return "unwritten", bad
        landing = when == IN_FLIGHT
        if landing.any() and (bad := landing & self._unknown(reading, granule, unit)).any():
            return "landing", bad
        if landing.all():
            return None
        if (bad := ~landing & self._unordered(reading, granule, unit, when)).any():
            return "unordered", bad
        if self._stored_at is not None:
            at, fenced = self._stored_at.take(granule), self._state.fenced_at
            by_reader = fenced[reading.group.threads].reshape(-1, reading.each).min(1)[unit]
            writer = thread_of(self._writes.who.take(granule))
            if (bad := ~landing & (at > fenced.take(writer)) & (at > by_reader)).any():
                return "unfenced", bad
        return None

    def _unknown(self, reading: Reading, granule: np.ndarray, unit: np.ndarray) -> Any:
        """Mask of granules for which some of those who ask do not know that a copy has arrived."""
        if self._arriving is None or self._state.knowledge is None:
            return np.True_
        series, count = self._arriving.of(granule)
        rows = np.flatnonzero(np.bincount(series.reshape(-1) + 1)) - 1
        rows = rows[rows >= 0]
        if not len(rows):
            return np.True_
        least = np.zeros((int(rows[-1]) + 1, reading.group.size // reading.each), np.int32)
        least[rows] = self._state.knowledge.least(reading.group.threads, reading.each, rows)
        return (series < 0) | (least[series, unit] < count)

    def _unordered(self, reading: Reading, granule: np.ndarray, unit: np.ndarray, when: np.ndarray) -> np.ndarray:
        """Mask of granules that threads have written since they last met those who ask."""
        batch = reading.group.batch
        first = reading.group.threads[:: reading.each][unit]
        block, who = first // batch.threads_per_block, self._writes.who.take(granule)
        epoch = (self._state.met << EPOCH_SHIFT).take(block)
        if self._state.cluster_size > 1:
            horizon = (self._state.cluster_epoch << EPOCH_SHIFT).take(block)
            epoch = np.where(thread_of(who) // batch.threads_per_block == block, epoch, horizon)
        bad: np.ndarray = when >= epoch
        if reading.each == 1 and bad.any():  # what the thread itself has written is, and its warp before it met
            warps = batch.per_thread["warp"]
            met = (when & ((1 << EPOCH_SHIFT) - 1)) < self._state.warp_epoch.take(warps[first])
            bad &= (thread_of(who) != first) & ((warp_of(who) != warps[first]) | ~met)
        if self._state.order and bad.any():
            bad &= ~self._behind(first, reading.each, who, when)
        return bad

    def _behind(self, first: np.ndarray, each: int, who: np.ndarray, when: np.ndarray) -> np.ndarray:
        """Mask of writes of the same block behind which all warps are ordered that ask, `each` threads from `first` on."""
        state, batch = self._state, self._state.batch
        writer, moment = np.broadcast_to(thread_of(who), when.shape), when >> EPOCH_SHIFT
        warp, other = batch.per_thread["warp"][first], writer % batch.threads_per_block // 32
        behind: np.ndarray = writer // batch.threads_per_block == first // batch.threads_per_block
        for number in range(-(-each // 32)):
            now = state.epoch[first // batch.threads_per_block]
            behind = behind & state.order.ordered(EPOCHS, warp + number, other, moment, now)
        return behind

    def _fault(
        self, reading: Reading, granule: np.ndarray, unit: np.ndarray, kind: str, bad: np.ndarray
    ) -> Race | Uninitialized:
        row, column = first_of(bad)
        place, group, listing = int(granule[row, column]), reading.group, self._state.listing
        guilty = np.arange(group.size) // reading.each == unit[column]
        detail, who = self._place(place), self._writes.who[place]
        if kind == "unwritten":
            what = "read of shared memory that was never written"
            return fault(Uninitialized, listing, group, guilty, what, reading.pc, detail=detail)
        if kind == "landing":
            what = "read of shared memory while an asynchronous copy to it is in flight, with no wait in between"
            return fault(
                Race, listing, group, guilty, what, reading.pc, detail=self.told_to(place, detail), also=pc_of(who)
            )
        detail += f", which {group.batch.thread_name(int(thread_of(who)))} has written"
        what = (
            f"{reading.what} reads shared memory that "
            + {
                "unordered": "another thread has written, with no barrier in between",
                "unfenced": "stores have written, with no fence.proxy.async in between",
            }[kind]
        )
        return fault(Race, listing, group, guilty, what, reading.pc, detail=detail, also=pc_of(who))
