"""Data under way from shared to global memory: bulk copies and TMA tiles of threads that wait for their groups.

A copy reads shared memory no later than a `wait_group.read` returns, and has stored when a `wait_group` does: at that moment
here, or with a seed at any before. Stores for which nobody waits are there when the kernel ends.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arithmetic import combine
from ..arithmetic.operation import DTYPES, VIEWS
from ..errors import Race
from ..memory import Allocation
from .atomics import Atomics
from .beside import Reading
from .faults import fault
from .group import Group
from .knowledge import Series
from .spaces import Spaces
from .state import State

_BULK = -1  # the kind of reading that copies are; those of products are the numbers of their warpgroups
_LOGIC = frozenset(("and", "or", "xor"))


@dataclass(frozen=True)
class Reduction:
    """Reduction of data with what is in memory already."""

    operation: str
    type_: str
    dtype: Any

    @classmethod
    def of(cls, operation: str, type_: str) -> Reduction:
        """The one that PTX names so."""
        if operation in _LOGIC:
            type_ = f"b{type_[1:]}"
        return cls(operation, type_, DTYPES[VIEWS[type_]].type)

    def of_two(self, old: np.ndarray, data: np.ndarray) -> np.ndarray:
        """Combine the value in memory with the data."""
        return np.asarray(combine(self.operation, self.type_)(old, data)).view(old.dtype)


@dataclass(eq=False)
class Departure:
    """Bytes under way to global memory."""

    group: Group  # the thread that has asked for it
    thread: int
    positions: np.ndarray  # of each byte in shared memory
    addresses: np.ndarray  # where it goes
    reduction: Reduction | None
    pc: int
    low: int  # the first and the last of the addresses
    high: int
    number: int = 0  # of the thread's groups of copies
    data: np.ndarray | None = None  # once it has been read
    read: bool = False  # the thread has waited for that


def bulk_reading(group: Group, series: int, count: int, pc: int) -> Reading:
    """Reading by a bulk copy, which is known to be over with `count` of a series."""
    return Reading("a bulk copy", group, 1, _BULK, np.array([series]), np.array([count]), pc)


class Departures:
    """Departures of a batch."""

    def __init__(self, state: State, spaces: Spaces, atomics: Atomics, chooser: random.Random | None) -> None:
        self._state, self._spaces, self._atomics, self._chooser = state, spaces, atomics, chooser
        self._pending: list[Departure] = []
        self._committed = np.zeros(state.batch.threads, np.int64)
        spaces.global_.unstored = None

    def start(self, departure: Departure) -> None:
        """Begin a copy, whose source may be read until its thread has waited."""
        departure.number = int(self._committed[departure.thread])
        if (shadow := self._spaces.shared.shadow) is not None:
            assert self._state.knowledge is not None
            series = self._series(departure.thread)
            reading = bulk_reading(departure.group, series, departure.number + 1, departure.pc)
            shadow.bulk_read(reading, departure.positions)
        self._pending.append(departure)
        self._spaces.global_.unstored = self.check if self._state.check else None
        if self._chooser is not None and self._chooser.random() < 0.5:
            self._read(self._chooser.choice(self._pending))

    def commit(self, group: Group) -> None:
        """cp.async.bulk.commit_group."""
        self._committed[group.threads] += 1

    def wait(self, group: Group, allowed: int, reads_only: bool) -> None:
        """cp.async.bulk.wait_group: of these threads' groups at most the last `allowed` are still under way."""
        if not self._pending:
            return
        end = np.full(group.batch.threads, -1)
        end[group.threads] = self._committed[group.threads] - allowed
        due = [one for one in self._pending if one.number < end[one.thread]]
        if self._chooser is not None:
            self._chooser.shuffle(due)
        for one in due:
            self._read(one)
            one.read = True
            if self._state.knowledge is not None:
                threads = np.array([one.thread])
                self._state.knowledge.learn(threads, self._series(one.thread), one.number + 1)
            if not reads_only:
                self._store(one)

    def leave(self, group: Group) -> None:
        """Let these threads exit; none may have copies that still read."""
        if not self._pending or not self._state.check:
            return
        gone = np.zeros(group.batch.threads, np.bool_)
        gone[group.threads] = True
        for one in self._pending:
            if gone[one.thread] and not one.read:
                what = (
                    "a thread exits while its bulk copy may still read the block's shared memory, with no "
                    "cp.async.bulk.wait_group.read in between"
                )
                raise fault(Race, self._state.listing, one.group, np.True_, what, one.pc)

    def finish(self) -> None:
        """The kernel ends: all have stored."""
        for one in list(self._pending):
            self._read(one)
            self._store(one)

    def check(self, group: Group, allocation: Allocation, position: np.ndarray, width: int, pc: int) -> None:
        """Check that a read of global memory touches nothing that a copy is still to store."""
        address = position + allocation.base
        low, high = int(address.min()), int(address.max()) + width
        for one in self._pending:
            if one.low >= high or one.high < low:
                continue
            bad = np.zeros(len(address), np.bool_)
            for byte in range(width):
                bad |= np.isin(address + byte, one.addresses.astype(np.int64))
            if bad.any():
                what = (
                    f"read of `{allocation.name}` where a bulk copy is still to store, with no cp.async.bulk.wait_group "
                    "in between"
                )
                detail = f"offset {int(position[int(np.argmax(bad))]) - allocation.low} of `{allocation.name}`"
                raise fault(Race, self._state.listing, group, bad, what, pc, detail=detail, also=one.pc)

    def _series(self, thread: int) -> int:
        assert self._state.knowledge is not None
        block, number = divmod(thread, self._state.batch.threads_per_block)
        return self._state.knowledge.series(Series.STORES, block, number)

    def _read(self, one: Departure) -> None:
        if one.data is None:
            one.data = self._state.shared_memory.buffer[one.positions]

    def _store(self, one: Departure) -> None:
        self._pending.remove(one)
        if not self._pending:
            self._spaces.global_.unstored = None
        assert one.data is not None
        threads, reduction = one.group.threads, one.reduction
        size = 1 if reduction is None else np.dtype(reduction.dtype).itemsize
        addresses, data = one.addresses[::size], one.data if reduction is None else one.data.view(reduction.dtype)
        many = Group(one.group.batch, np.repeat(threads, len(addresses)), len(addresses))
        if reduction is None:
            self._spaces.global_.store(many, addresses, (data,), np.uint8, 1, one.pc)
        else:
            values = (data,)
            self._atomics.update(
                many, "global", reduction.operation, reduction.type_, addresses, values, reduction.dtype, False, one.pc
            )
