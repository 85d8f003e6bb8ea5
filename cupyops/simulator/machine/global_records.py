"""Which blocks touched each granule of an allocation, and when, for each way of touching it.

As long as no two blocks meet it is enough to know the one block of each granule. That is how most launches end.
"""

from __future__ import annotations

from enum import IntEnum
from typing import NamedTuple

import numpy as np

from .granules import COARSEST, Granules, split

NOBODY, NEVER = -1, -1
_LONGEST_LOG = 1 << 21  # threads that have read, in all: 32 MiB


class _Reading(NamedTuple):
    """A load by some threads."""

    block: np.ndarray
    position: np.ndarray
    width: int
    now: int


class Way(IntEnum):
    """Of touching memory."""

    WRITE = 0
    READ = 1
    ATOMIC = 2


class Owners:
    """For each granule, the one block that has touched it, and when it last did so in each way.

    Where several blocks read what none has written, their reads are kept as they come, until one writes.

    Args:
        size: bytes of the allocation.
        granule: bytes of the narrowest access that the kernel may make.
    """

    def __init__(self, size: int, granule: int) -> None:
        self._granules = Granules(granule)
        self._block = np.full(-(-size // COARSEST), NOBODY, np.int64)
        self._times: dict[Way, np.ndarray] = {}
        self._log: list[_Reading] = []
        self._logged = 0  # threads in the log

    def takes(self, way: Way, block: np.ndarray, position: np.ndarray, width: int, now: int) -> bool:
        """Note an access, if no two blocks conflict there. Otherwise nothing is noted."""
        if not self._log and self._owned(way, block, position, width, now):
            return True
        if way is not Way.READ or self._times.keys() - {Way.READ} or self._logged > _LONGEST_LOG:
            return False
        self._log.append(_Reading(block, position, width, now))
        self._logged += len(position)
        return True

    def _owned(self, way: Way, block: np.ndarray, position: np.ndarray, width: int, now: int) -> bool:
        """Note an access, if no other block has touched the place."""
        self._split(self._granules.narrow(width))
        granule = self._granules.of(position, width)
        owner = self._block.take(granule)
        if np.count_nonzero(owner != block):
            if np.count_nonzero((owner != block) & (owner != NOBODY)):
                return False
            self._block[granule] = block
            if np.count_nonzero(self._block.take(granule) != block):  # two blocks want what was nobody's
                self._block[granule] = owner
                return False
        if way not in self._times:
            self._times[way] = np.full(len(self._block), NEVER, np.int64)
        self._times[way][granule] = now
        return True

    def _split(self, pieces: int) -> None:
        if pieces > 1:
            self._block = split(self._block, pieces)
            self._times = {way: split(time, pieces) for way, time in self._times.items()}

    def records(self) -> dict[Way, BlockRecord]:
        """The same in the form that knows of several blocks, with the finest granules."""
        self._split(self._granules.narrow_all())
        records = {way: BlockRecord(self._block, self._times.get(way)) for way in Way}
        for reading in self._log:
            for granule in self._granules.of(reading.position, reading.width):
                records[Way.READ].note(reading.block, granule, reading.now)
        return records


class BlockRecord:
    """For each granule, the last block that touched it in one way and when, and the last one before that was another.

    Blocks run the same text: where one fences, so do the others. Two of them are enough to find whether one is missing.
    """

    def __init__(self, block: np.ndarray, time: np.ndarray | None) -> None:
        """From the one block of each granule and when it last did so, `NEVER` where it did not; None: nobody did."""
        self._granules = len(block)
        self.used = self._shared = False  # by several blocks
        self.block = self._time = self._previous = self._previous_time = np.empty(0, np.int64)
        if time is not None:
            self._begin()
            self.block, self._time = np.where(time == NEVER, NOBODY, block), time

    def last_two(self, granule: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """(block, time) of each that there is."""
        last = self.block.take(granule), self._time.take(granule)
        if not self._shared:
            return [last]
        return [last, (self._previous.take(granule), self._previous_time.take(granule))]

    def note(self, block: np.ndarray, granule: np.ndarray, now: int) -> None:
        """This access is the last one now."""
        if not self.used:
            self._begin()
        before = self.block[granule]
        moved = (before != NOBODY) & (before != block)
        if moved.any():
            self._shared, where = True, granule[moved]
            self._previous[where], self._previous_time[where] = before[moved], self._time[where]
        self.block[granule], self._time[granule] = block, now
        lost = self.block[granule] != block  # to another block that runs the same instruction
        if lost.any():
            self._shared, where = True, granule[lost]
            self._previous[where], self._previous_time[where] = block[lost], now

    def _begin(self) -> None:
        self.used = True
        self.block, self._previous = (np.full(self._granules, NOBODY, np.int64) for _ in range(2))
        self._time, self._previous_time = (np.full(self._granules, NEVER, np.int64) for _ in range(2))
