"""What is remembered of shared memory, to find races and reads of what nobody has written.

Threads run in lockstep here, so a missing barrier would never show in the results. Instead each granule of memory keeps
who touched it last and when; a barrier makes everything before it old.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..errors import Race, Uninitialized
from .faults import fault
from .group import Group
from .state import State

# When: the block's epoch and the warp's, in one number that only grows; below zero where there is no time.
_EPOCH_SHIFT = 32
_NEVER, _IN_FLIGHT = -1, -4
# Who: warp, thread and instruction, in one number. All ones stand for several of them.
_WARP_SHIFT, _THREAD_SHIFT = 44, 20
_SEVERAL_THREADS, _SEVERAL_WARPS = (1 << 24) - 1, (1 << 19) - 1
_SEVERAL_BLOCKS = _SEVERAL_WARPS - 1  # of a cluster
_PC_MASK = (1 << _THREAD_SHIFT) - 1


class _Record:
    """For each granule, who made the last access of one kind, and when."""

    def __init__(self, granules: int) -> None:
        self.who = np.zeros(granules, np.int64)
        self.when = np.full(granules, _NEVER, np.int64)


class _Lanes:
    """The threads of an access as columns beside their granules: who they are, and the epochs that they live in."""

    def __init__(self, state: State, group: Group, owner: np.ndarray, pc: int) -> None:
        self.thread = group.threads[:, None]
        self.warp = group.get("warp")[:, None]
        self.warps_per_block = group.batch.warps_per_block
        self.who = (self.warp << _WARP_SHIFT) | (self.thread << _THREAD_SHIFT) | pc
        self.epoch = (state.epoch[owner] << _EPOCH_SHIFT)[:, None]
        self.cluster_epoch = (state.cluster_epoch[owner] << _EPOCH_SHIFT)[:, None]
        self.when = self.epoch | state.warp_epoch[self.warp]


class SharedShadow:
    """Races within a block, asynchronous copies in flight, and reads of shared memory that was never written."""

    def __init__(self, state: State, granule: int) -> None:
        self._state = state
        self._shift = granule.bit_length() - 1
        granules = len(state.shared_memory.buffer) >> self._shift
        self._writes, self._reads = _Record(granules), _Record(granules)
        self._atomics: _Record | None = None
        self._has_copies = False

    # --- accesses ---

    def read(self, group: Group, position: np.ndarray, width: int, pc: int) -> None:
        """A load of `width` bytes at each position."""
        lanes, granule = self._lanes(group, position, pc), self._granules(position, width)
        self._readable(group, granule, pc)
        self._against(self._writes, "written", group, lanes, granule, "read", pc)
        if self._atomics is not None:
            self._against(self._atomics, "updated atomically", group, lanes, granule, "read", pc)
        _note_shared(self._reads, lanes, granule)

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
        lanes, granule = self._lanes(group, position, pc), self._granules(position, width)
        self._against(self._writes, "written", group, lanes, granule, "write", pc)
        self._against(self._reads, "read", group, lanes, granule, "write", pc)
        if self._atomics is not None:
            self._against(self._atomics, "updated atomically", group, lanes, granule, "write", pc)
        if self._has_copies:
            self._not_in_flight(group, granule, pc)
        self._has_copies |= in_flight
        self._writes.who[granule] = lanes.who
        self._writes.when[granule] = _IN_FLIGHT if in_flight else lanes.when
        self._reads.when[granule] = _NEVER
        if len(values):
            self._one_value(group, lanes, granule, values, pc)

    def atomic(self, group: Group, position: np.ndarray, width: int, pc: int) -> None:
        """An atomic update."""
        if self._atomics is None:
            self._atomics = _Record(len(self._writes.who))
        lanes, granule = self._lanes(group, position, pc), self._granules(position, width)
        self._readable(group, granule, pc)
        self._against(self._writes, "written", group, lanes, granule, "update atomically", pc)
        self._against(self._reads, "read", group, lanes, granule, "update atomically", pc)
        _note_shared(self._atomics, lanes, granule)

    def landed(self, group: Group, position: np.ndarray, width: int) -> None:
        """A cp.async has landed: from here on it is a write by the thread that waited."""
        lanes, granule = self._lanes(group, position, 0), self._granules(position, width)
        self._writes.when[granule] = lanes.when  # `who` is the copy's still

    def start_copy(self, group: Group, position: int, size: int, pc: int) -> None:
        """A bulk copy by one thread into `size` bytes from `position` is under way."""
        granule = self._span(position, size)
        lanes = self._lanes(group, np.array([position]), pc)
        self._against(self._writes, "written", group, lanes, granule[None], "copy to", pc)
        self._against(self._reads, "read", group, lanes, granule[None], "copy to", pc)
        self._not_in_flight(group, granule[None], pc)
        self._has_copies = True
        self._writes.who[granule] = lanes.who[0]
        self._writes.when[granule] = _IN_FLIGHT
        self._reads.when[granule] = _NEVER

    def arrived(self, position: int, size: int) -> None:
        """A bulk copy has landed: its bytes belong to whoever has waited for it."""
        self._writes.when[self._span(position, size)] = 0

    def read_by_unit(self, group: Group, position: np.ndarray, pc: int) -> None:
        """A matrix unit or a bulk copy reads bytes for all of the group: they must have been written."""
        self._readable(group, np.unique(position >> self._shift)[None], pc)

    # --- the rules ---

    def _lanes(self, group: Group, position: np.ndarray, pc: int) -> _Lanes:
        owner = position // self._state.shared_stride if self._state.cluster_size > 1 else group.get("block")
        return _Lanes(self._state, group, owner, pc)

    def _granules(self, position: np.ndarray, width: int) -> np.ndarray:
        """A row for each thread."""
        first = (position >> self._shift)[:, None]
        count = width >> self._shift
        return first if count <= 1 else first + np.arange(count)

    def _span(self, position: int, size: int) -> np.ndarray:
        return np.arange(position >> self._shift, (position + size - 1 >> self._shift) + 1)

    def _readable(self, group: Group, granule: np.ndarray, pc: int) -> None:
        when = self._writes.when[granule]
        if int(when.min()) >= 0:
            return
        bad = when < 0
        row, column = np.unravel_index(int(np.argmax(bad)), bad.shape)
        guilty = bad.any(axis=1) if len(bad) == group.size else np.True_
        place = int(granule[row, column])
        detail = self._place(place)
        if when[row, column] == _IN_FLIGHT:
            what = "race: read of shared memory while an asynchronous copy to it is in flight, with no wait in between"
            also = int(self._writes.who[place]) & _PC_MASK
            raise fault(Race, self._state.listing, group, guilty, what, pc, detail=detail, also=also)
        what = "read of shared memory that was never written"
        raise fault(Uninitialized, self._state.listing, group, guilty, what, pc, detail=detail)

    def _not_in_flight(self, group: Group, granule: np.ndarray, pc: int) -> None:
        bad = self._writes.when[granule] == _IN_FLIGHT
        if bad.any():
            row, column = np.unravel_index(int(np.argmax(bad)), bad.shape)
            place = int(granule[row, column])
            what = "race: write of shared memory while an asynchronous copy to it is in flight, with no wait in between"
            also = int(self._writes.who[place]) & _PC_MASK
            raise fault(
                Race, self._state.listing, group, bad.any(axis=1), what, pc, detail=self._place(place), also=also
            )

    def _against(
        self, record: _Record, done: str, group: Group, lanes: _Lanes, granule: np.ndarray, verb: str, pc: int
    ) -> None:
        """A recorded access by another thread in the same epoch conflicts, unless their warp has synchronised since."""
        when = record.when[granule]
        bad = when >= (lanes.epoch if self._state.cluster_size == 1 else self._since(group, lanes, record.who[granule]))
        if not bad.any():
            return
        who = record.who[granule]
        bad &= ((who >> _THREAD_SHIFT) & _SEVERAL_THREADS) != lanes.thread
        bad &= ((who >> _WARP_SHIFT) != lanes.warp) | (when >= lanes.when)
        if not bad.any():
            return
        row, column = np.unravel_index(int(np.argmax(bad)), bad.shape)
        other = int(who[row, column])
        thread = (other >> _THREAD_SHIFT) & _SEVERAL_THREADS
        party = "several threads have" if thread == _SEVERAL_THREADS else f"{group.batch.thread_name(thread)} has"
        what = f"race: {verb} shared memory that another thread has {done}, with no barrier in between"
        detail = f"{self._place(int(granule[row, column]))}, which {party} {done}"
        guilty = bad.any(axis=1)
        raise fault(Race, self._state.listing, group, guilty, what, pc, detail=detail, also=other & _PC_MASK)

    def _since(self, group: Group, lanes: _Lanes, who: np.ndarray) -> np.ndarray:
        """When these threads and others last passed a barrier together: one of the cluster, if their blocks differ."""
        warp, per_block = who >> _WARP_SHIFT, group.batch.warps_per_block
        is_elsewhere = (warp != _SEVERAL_WARPS) & (warp // per_block != lanes.warp // per_block)
        return np.where(is_elsewhere, lanes.cluster_epoch, lanes.epoch)

    def _one_value(self, group: Group, lanes: _Lanes, granule: np.ndarray, values: Sequence[Any], pc: int) -> None:
        """Threads of one instruction may write one place only if they write one value."""
        last = self._writes.who[granule]
        lost = last != lanes.who
        if not lost.any():
            return
        winner = np.searchsorted(group.threads, (last >> _THREAD_SHIFT) & _SEVERAL_THREADS)
        each = max(1, granule.shape[1] // len(values))
        for column in range(granule.shape[1]):
            value = values[column // each]
            if not isinstance(value, np.ndarray) or value.ndim == 0:
                continue
            bits = value.view(f"u{value.itemsize}")
            bad = lost[:, column] & (bits[winner[:, column]] != bits)
            if bad.any():
                what = "race: threads of one instruction write different values to one place"
                detail = self._place(int(granule[int(np.argmax(bad)), column]))
                raise fault(Race, self._state.listing, group, bad, what, pc, detail=detail)

    def _place(self, granule: int) -> str:
        return f"shared memory, offset {(granule << self._shift) % self._state.shared_stride}"


def _note_shared(record: _Record, lanes: _Lanes, granule: np.ndarray) -> None:
    """Remember an access that several threads may make in one epoch: of one warp, or of several."""
    before, when = record.who[granule], record.when[granule]
    mine = np.broadcast_to(lanes.who, granule.shape)
    others = (when >= lanes.epoch) & (((before ^ mine) >> _THREAD_SHIFT) != 0)
    record.who[granule] = np.where(others, _merged(before, mine, lanes.warps_per_block), mine) if others.any() else mine
    record.when[granule] = lanes.when
    winner = record.who[granule]
    lost = ((winner ^ mine) >> _THREAD_SHIFT) != 0
    if lost.any():  # threads of this very instruction
        where, both = granule[lost], _merged(winner[lost], mine[lost], lanes.warps_per_block)
        record.who[where] = both
        several = (both >> _WARP_SHIFT) >= _SEVERAL_BLOCKS
        record.who[where[several]] = both[several]


def _merged(one: np.ndarray, other: np.ndarray, per_block: int) -> np.ndarray:
    """Several threads, of one warp, of several, or of several blocks with `per_block` warps each."""
    first, second, pc = one >> _WARP_SHIFT, other >> _WARP_SHIFT, other & _PC_MASK
    is_known = np.maximum(first, second) < _SEVERAL_BLOCKS
    is_far = np.where(is_known, first // per_block != second // per_block, np.minimum(first, second) == _SEVERAL_BLOCKS)
    is_far |= np.maximum(first, second) == _SEVERAL_BLOCKS
    warp = np.where(first == second, first, np.where(is_far, _SEVERAL_BLOCKS, _SEVERAL_WARPS))
    return (warp << _WARP_SHIFT) | (_SEVERAL_THREADS << _THREAD_SHIFT) | pc
