"""Records of the last access to each granule of shared memory: who made it and when, packed into numbers.

Reads are kept as they come, and sorted out only if a write follows in the same epoch: behind a barrier nobody asks.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from .granules import split
from .group import Group
from .state import EPOCH_SHIFT, State
from .warp_order import EPOCHS

# When: the block's epoch and the warp's, in one number that only grows; below zero where there is no time.
NEVER, IN_FLIGHT = -1, -4
# Who: warp, thread and instruction, in one number. All ones stand for several threads, and for warps of several blocks;
# from _SEVERAL_WARPS on there is a number for several warps of each block.
_WARP_SHIFT, _THREAD_SHIFT = 44, 20
_SEVERAL_WARPS = 1 << 18
_SEVERAL_BLOCKS = (1 << 19) - 1
PC_MASK = (1 << _THREAD_SHIFT) - 1
SEVERAL_THREADS = (1 << 24) - 1

_LOG_GRANULES = 1 << 21  # in all reads that wait to be sorted out: 16 MiB


def warp_of(who: np.ndarray) -> np.ndarray:
    """The warp's number within the batch."""
    return who >> _WARP_SHIFT


def _block_of(warp: np.ndarray, per_block: int) -> np.ndarray:
    """The block of a warp, or of several of its warps; none has the number of several blocks."""
    return np.where(warp < _SEVERAL_WARPS, warp // per_block, warp - _SEVERAL_WARPS)


def thread_of(who: np.ndarray) -> np.ndarray:
    """The thread's number within the batch, or `SEVERAL_THREADS`."""
    return (who >> _THREAD_SHIFT) & SEVERAL_THREADS


def first_of(bad: np.ndarray) -> tuple[int, int]:
    """The first true element of the first thread, a column, that has one."""
    column, row = np.unravel_index(int(np.argmax(bad.T)), bad.T.shape)
    return int(row), int(column)


def pc_of(who: np.ndarray) -> int:
    """The number of the instruction."""
    return int(who.item()) & PC_MASK


class Access:
    """An access by the threads of a group: who they are, when it is, and the granules that each touches.

    Attributes:
        granule: a column for each thread, so that NumPy's inner loops run over the threads.
        epoch: of the block whose memory it is, a row with an element for each thread, like all that follows.
        met: the epoch in which all threads of that block last met.
        horizon: what happened before this epoch conflicts with nothing any more.
    """

    def __init__(self, state: State, verb: str, group: Group, owner: np.ndarray, granule: np.ndarray, pc: int) -> None:
        self.verb, self.group, self.granule, self.pc = verb, group, granule, pc
        self.warps_per_block = group.batch.warps_per_block
        self._state, self._owner = state, owner
        self._warp_epoch = state.warp_epoch
        if state.cluster_size == 1:
            self.epoch, self.met = state.epochs(group)
            self.horizon = self.met
        else:
            self.epoch, self.met = ((one << EPOCH_SHIFT).take(owner)[None] for one in (state.epoch, state.met))
            self.horizon = self._horizon()

    def _horizon(self) -> np.ndarray:
        """Time since which accesses count, as of now, which may be later than the access."""
        epoch = self._state.met if self._state.cluster_size == 1 else self._state.cluster_epoch
        return (epoch << EPOCH_SHIFT).take(self._owner)[None]

    @property
    def is_past(self) -> bool:
        """True if every thread's block has come through a barrier since."""
        return not np.count_nonzero(self.epoch >= self._horizon())

    @property
    def warp(self) -> np.ndarray:
        """Number of the warp within the batch."""
        return self.group.get("warp")[None]

    @cached_property
    def when(self) -> np.ndarray:
        """The block's epoch and the warp's."""
        return self.epoch | self.warp_epoch

    @cached_property
    def warp_epoch(self) -> np.ndarray:
        """The warp's epoch alone."""
        return self._warp_epoch.take(self.warp)

    @cached_property
    def who(self) -> np.ndarray:
        """Warp, thread and instruction."""
        threads = self.group.threads[None]
        return self.group.once("who", lambda: (self.warp << _WARP_SHIFT) | (threads << _THREAD_SHIFT)) | self.pc

    def since(self, who: np.ndarray) -> np.ndarray:
        """Time at which these threads and others last passed a barrier together: the cluster's, if their blocks differ."""
        if self._state.cluster_size == 1:
            return self.met
        return np.where(self.is_elsewhere(who), self.horizon, self.met)

    def is_elsewhere(self, who: np.ndarray) -> np.ndarray:
        """Mask of those who are of another block, or of several blocks."""
        return _block_of(warp_of(who), self.warps_per_block) != self.warp // self.warps_per_block

    def is_behind(self, who: np.ndarray, when: np.ndarray) -> Any:
        """Mask of accesses that are ordered behind another of their block, though its threads have not all met since."""
        if not self._state.order:
            return False
        warp = warp_of(who)
        other = np.where(warp < _SEVERAL_WARPS, warp % self.warps_per_block, -1)
        behind = self._state.order.ordered(EPOCHS, self.warp, other, when >> EPOCH_SHIFT, self.epoch >> EPOCH_SHIFT)
        return behind if self._state.cluster_size == 1 else behind & ~self.is_elsewhere(who)


class Record:
    """Record of the last access of one kind to each granule: who made it, and when."""

    def __init__(self, granules: int, ordered: bool = False) -> None:
        """`ordered`: some warps of a block may come to be ordered without the others."""
        self.who = np.zeros(granules, np.int64)
        self.when = np.full(granules, NEVER, np.int64)
        # who came last, and before that last of another warp and when, where `who` may be several warps
        self._last: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
        if ordered:
            self._last = np.zeros_like(self.who), np.zeros_like(self.who), np.full_like(self.when, NEVER)
        self._two: tuple[np.ndarray, np.ndarray] | None = (
            None  # where `who` is several threads, two different ones of them
        )

    def split(self, pieces: int) -> None:
        """Split each granule into `pieces`, with the same past."""
        self.who, self.when = split(self.who, pieces), split(self.when, pieces)
        if self._two is not None:
            self._two = split(self._two[0], pieces), split(self._two[1], pieces)
        if self._last is not None:
            last, earlier, its_when = (split(one, pieces) for one in self._last)
            self._last = last, earlier, its_when

    def is_behind(self, access: Access, who: np.ndarray, when: np.ndarray) -> Any:
        """Mask of granules behind whose last access, by `who` at `when`, this one is ordered, by less than a whole block."""
        behind = access.is_behind(who, when)
        if behind is False or self._last is None:
            return behind
        last, earlier, its_when = (one.take(access.granule) for one in self._last)
        both: Any = True
        for one, moment in ((last, when), (earlier, its_when)):
            both = both & ((warp_of(one) == access.warp) | access.is_behind(one, moment))
        return np.where(warp_of(who) >= _SEVERAL_WARPS, both, behind)

    def other(self, granule: int, thread: int) -> np.ndarray:
        """Return who made the last access: of several threads, one that is not `thread`. An array of one."""
        at = slice(granule, granule + 1)
        if self._two is None or thread_of(self.who[at])[0] != SEVERAL_THREADS:
            return self.who[at]
        first, second = (one[at] for one in self._two)
        return second if thread_of(first)[0] == thread else first

    def note(self, access: Access) -> None:
        """Remember an access that several threads may make in one epoch: of one warp, or of several."""
        granule = access.granule
        before, when = self.who.take(granule), self.when.take(granule)
        mine = np.broadcast_to(access.who, granule.shape)
        others = (when >= access.met) & (((before ^ mine) >> _THREAD_SHIFT) != 0)
        if others.any():
            others &= ~np.asarray(self.is_behind(access, before, when))  # who comes behind others stands for them
        if self._last is not None:
            self._note_last(access, mine, when)
        merged = mine
        if others.any():
            merged = np.where(others, _merged(before, mine, access.warps_per_block), mine)
            self._remember(granule[others], before[others], mine[others])
        self.who[granule], self.when[granule] = merged, access.when
        winner = self.who.take(granule)
        lost = ((winner ^ mine) >> _THREAD_SHIFT) != 0
        if lost.any():  # threads of this very instruction
            where, both = granule[lost], _merged(winner[lost], mine[lost], access.warps_per_block)
            self._remember(where, winner[lost], mine[lost])
            self.who[where] = both
            for least in (_SEVERAL_WARPS, _SEVERAL_BLOCKS):
                several = warp_of(both) >= least
                self.who[where[several]] = both[several]

    def _note_last(self, access: Access, mine: np.ndarray, when: np.ndarray) -> None:
        assert self._last is not None
        last, earlier, its_when = self._last
        granule, before = access.granule, last.take(access.granule)
        moved = (warp_of(before) != access.warp) & (when != NEVER)
        earlier[granule[moved]], its_when[granule[moved]] = before[moved], when[moved]
        last[granule] = mine
        lost = warp_of(last.take(granule)) != access.warp  # to another warp that runs the same instruction
        now = np.broadcast_to(access.when, granule.shape)
        earlier[granule[lost]], its_when[granule[lost]] = mine[lost], now[lost]

    def _remember(self, granule: np.ndarray, before: np.ndarray, mine: np.ndarray) -> None:
        """Add these threads to those before them: two that differ are kept for each granule."""
        if self._two is None:
            self._two = np.zeros_like(self.who), np.zeros_like(self.who)
        first, second = self._two
        one = thread_of(before) != SEVERAL_THREADS
        first[granule[one]], second[granule[one]] = before[one], mine[one]
        alike = ~one & (thread_of(first[granule]) != thread_of(mine))
        second[granule[alike]] = mine[alike]


class Reads:
    """The reads: kept as they come, and sorted out only where a write follows in the same epoch.

    First the epoch in which each granule was last read is found out, then who read it and when.
    """

    def __init__(self, state: State, granules: int) -> None:
        self._state = state
        self._record: Record | None = None
        self._epoch = np.full(granules, NEVER, np.int64)
        self._log: list[Access] = []  # in order, those that the record does not have yet
        self._logged = 0  # granules in the log
        self._dated = 0  # how many of the log `_epoch` has already
        self._latest = -1  # the latest epoch of any block when there was a read

    def note(self, access: Access) -> None:
        """Remember a read."""
        self._latest = self._state.latest_epoch
        self._log.append(access)
        self._logged += access.granule.size
        if self._logged > _LOG_GRANULES:
            self._settle()

    def recent(self, access: Access) -> Record | None:
        """Return the record of reads, if anybody has read these granules in this epoch."""
        if self._state.cluster_size == 1 and self._latest < self._state.least_epoch:
            self._clear()  # all blocks have come through a barrier since
            return None
        self._date()
        if not np.count_nonzero(self._epoch.take(access.granule) >= access.horizon):
            return None
        self._settle()
        return self._record

    def forget(self, granule: np.ndarray) -> None:
        """Forget these reads, since something has come after them and was compared with them."""
        self._epoch[granule] = NEVER
        if self._record is not None:
            self._record.when[granule] = NEVER

    def split(self, pieces: int) -> None:
        """Split each granule into `pieces`, with the same past."""
        self._settle()
        if self._record is not None:
            self._record.split(pieces)
        self._epoch = split(self._epoch, pieces)

    def _settle(self) -> None:
        """Move logged reads of the current epoch to the record."""
        self._date()
        for access in self._log:
            if access.is_past:
                continue
            if self._record is None:
                self._record = Record(len(self._epoch), self._state.code.meets)
            self._record.note(access)
        self._clear()

    def _date(self) -> None:
        """Note when granules were read."""
        for access in self._log[self._dated :]:
            self._epoch[access.granule] = access.epoch
        self._dated = len(self._log)

    def _clear(self) -> None:
        self._log.clear()
        self._logged = self._dated = 0


def _merged(one: np.ndarray, other: np.ndarray, per_block: int) -> np.ndarray:
    """Several threads, of one warp, of several, or of several blocks with `per_block` warps each."""
    first, second, pc = one >> _WARP_SHIFT, other >> _WARP_SHIFT, other & PC_MASK
    block = _block_of(first, per_block)
    is_far = (block != _block_of(second, per_block)) | (first == _SEVERAL_BLOCKS)
    warp = np.where(first == second, first, np.where(is_far, _SEVERAL_BLOCKS, _SEVERAL_WARPS + block))
    return (warp << _WARP_SHIFT) | (SEVERAL_THREADS << _THREAD_SHIFT) | pc
