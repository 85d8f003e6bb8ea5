"""Records of the threads that touched each granule of an allocation, and when, for each way of touching it.

As long as no two blocks meet it is enough to know the one block of each granule, and who of it came last. That is how most
launches end.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from .granules import COARSEST, Granules, split

NOBODY, NEVER = -1, -1
_LONGEST_LOG = 1 << 21  # threads that have read, in all: 32 MiB
# Who: the number of the block in the grid, and within it the thread, several threads of a warp, or several of the block.
_BLOCK_SHIFT, _INDEX_MASK = 11, (1 << 11) - 1
_SEVERAL_OF_WARP, SEVERAL = 1 << 10, _INDEX_MASK


def who_is(block: np.ndarray, thread: np.ndarray) -> np.ndarray:
    """The number of a thread, by that of its block in the grid and its own within the block."""
    return (block << _BLOCK_SHIFT) | thread


def block_of(who: np.ndarray) -> np.ndarray:
    """The block; that of `NOBODY` is `NOBODY`."""
    return who >> _BLOCK_SHIFT


def index_of(who: np.ndarray) -> np.ndarray:
    """The thread's number within the block; not below 1024 where it is several."""
    return who & _INDEX_MASK


def warp_of(who: np.ndarray) -> np.ndarray:
    """The warp's number within the block, of one thread or several of one warp; of others none that there is."""
    index = who & _INDEX_MASK
    return np.where(index < _SEVERAL_OF_WARP, index >> 5, index - _SEVERAL_OF_WARP)


def _merged(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Merge two different threads of a block into "several"."""
    warp = warp_of(one)
    index = np.where(warp == warp_of(other), warp + _SEVERAL_OF_WARP, SEVERAL)
    return (one & ~_INDEX_MASK) | index


class Way(IntEnum):
    """Way of touching memory."""

    WRITE = 0
    READ = 1
    ATOMIC = 2
    BLOCK_ATOMIC = 3  # an atomic of the scope of a block


class Touch(NamedTuple):
    """An access by some threads.

    Attributes:
        position: of each thread's bytes in the allocation.
    """

    way: Way
    who: np.ndarray
    position: np.ndarray
    width: int
    now: int


# Looks at what a touch meets within its block: the granules, who was there before, and when they were, by way. Gives where
# nothing orders the two.
Check = Callable[[np.ndarray, np.ndarray, dict[Way, np.ndarray]], np.ndarray]


class Owners:
    """Record of the one block that has touched each granule: which thread last did, and when in each way.

    Where several blocks read what none has written, their reads are kept as they come, until one writes.

    Args:
        size: bytes of the allocation.
        granule: bytes of the narrowest access that the kernel may make.
    """

    def __init__(self, size: int, granule: int) -> None:
        self._granules = Granules(granule)
        self._who = np.full(-(-size // COARSEST), NOBODY, np.int64)
        self._times: dict[Way, np.ndarray] = {}
        self._log: list[Touch] = []
        self._logged = 0  # threads in the log

    def takes(self, touch: Touch, check: Check, one_value: Callable[[np.ndarray, np.ndarray], None] | None) -> bool:
        """Note an access, if no two blocks conflict there. Otherwise nothing is noted.

        `check` raises what is wrong with it within its block; `one_value` is told of granules that several threads write.
        """
        if not self._log and self._owned(touch, check, one_value):
            return True
        if touch.way is not Way.READ or self._times.keys() - {Way.READ} or self._logged > _LONGEST_LOG:
            return False
        self._log.append(touch)
        self._logged += len(touch.position)
        return True

    def _owned(self, touch: Touch, check: Check, one_value: Callable[[np.ndarray, np.ndarray], None] | None) -> bool:
        """Note an access, if no other block has touched the place."""
        self._split(self._granules.narrow(touch.width))
        granule = self._granules.of(touch.position, touch.width)
        before, mine = self._who.take(granule), touch.who[None]
        if int(before.max()) != NOBODY:
            others = (before != mine) & (before != NOBODY)
            if others.any():
                if np.count_nonzero(others & (block_of(before ^ mine) != 0)):
                    return False
                concurrent = check(granule, before, {way: time.take(granule) for way, time in self._times.items()})
                if one_value is None:
                    mine = np.where(others & concurrent, _merged(before, mine), mine)
        self._who[granule] = mine
        found = self._who.take(granule)
        if np.count_nonzero(found != mine):  # threads of this very instruction
            mine = np.broadcast_to(mine, granule.shape)
            lost = found != mine
            if block_of(found[lost] ^ mine[lost]).any():
                self._who[granule] = before
                return False
            if one_value is not None:
                one_value(granule, lost)
            else:
                where, both = granule[lost], _merged(found[lost], mine[lost])
                self._who[where] = both
                several = index_of(both) == SEVERAL
                self._who[where[several]] = both[several]
        if touch.way not in self._times:
            self._times[touch.way] = np.full(len(self._who), NEVER, np.int64)
        self._times[touch.way][granule] = touch.now
        return True

    def changed(self, position: np.ndarray, width: int) -> np.ndarray | None:
        """Time of the last store or atomic at each position; None: there was none."""
        ways = [way for way in self._times if way is not Way.READ]
        granule = self._granules.of(position, max(width, self._granules.width))
        return np.max([self._times[way].take(granule).max(0) for way in ways], axis=0) if ways else None

    def _split(self, pieces: int) -> None:
        if pieces > 1:
            self._who = split(self._who, pieces)
            self._times = {way: split(time, pieces) for way, time in self._times.items()}

    def records(self) -> dict[Way, BlockRecord]:
        """Convert to records that distinguish several blocks, with the finest granules."""
        self._split(self._granules.narrow_all())
        records = {way: BlockRecord(self._who, self._times.get(way)) for way in Way}
        for touch in self._log:
            for granule in self._granules.of(touch.position, touch.width):
                records[Way.READ].note(touch.who, granule, touch.now)
        return records


class BlockRecord:
    """Record of the last access to each granule in one way, and of the last one before that by another block.

    Blocks run the same text: where one fences, so do the others. Two of them are enough to find whether one is missing.
    """

    def __init__(self, who: np.ndarray, time: np.ndarray | None) -> None:
        """Begin with each granule's last access and its time, `NEVER` where it was not in this way; None: nobody's."""
        self._granules = len(who)
        self.used = self._shared = False  # by several blocks
        self._who = self._time = self._previous = self._previous_time = np.empty(0, np.int64)
        if time is not None:
            self._begin()
            self._who, self._time = np.where(time == NEVER, NOBODY, who), time

    def last(self, granule: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(who, when)."""
        return self._who.take(granule), self._time.take(granule)

    def last_two(self, granule: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """(who, when) of each that there is."""
        last = self.last(granule)
        return [last, (self._previous.take(granule), self._previous_time.take(granule))] if self._shared else [last]

    def note(self, who: np.ndarray, granule: np.ndarray, now: int) -> None:
        """Record this access as the last one."""
        if not self.used:
            self._begin()
        before = self._who[granule]
        moved = (before != NOBODY) & (block_of(before ^ who) != 0)
        if moved.any():
            self._shared, where = True, granule[moved]
            self._previous[where], self._previous_time[where] = before[moved], self._time[where]
        self._who[granule], self._time[granule] = who, now
        lost = block_of(self._who[granule] ^ who) != 0  # to another block that runs the same instruction
        if lost.any():
            self._shared, where = True, granule[lost]
            self._previous[where], self._previous_time[where] = who[lost], now

    def _begin(self) -> None:
        self.used = True
        self._who, self._previous = (np.full(self._granules, NOBODY, np.int64) for _ in range(2))
        self._time, self._previous_time = (np.full(self._granules, NEVER, np.int64) for _ in range(2))
