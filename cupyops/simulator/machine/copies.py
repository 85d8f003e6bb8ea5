"""cp.async: copies of a few bytes for each thread.

A copy reads its source when it is issued. Its bytes land when the thread waits for its group, or when somebody asks the
mbarrier that it was tied to; until then reading them is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from ..memory import WORDS
from ..translate.function import Load
from .group import Group
from .mbarriers import MBarriers
from .spaces import Spaces
from .state import State


@dataclass
class _Copy:
    """A cp.async of some threads, under way."""

    threads: np.ndarray
    position: np.ndarray  # in shared memory
    data: np.ndarray  # (threads, bytes)
    number: np.ndarray  # of each thread's group of copies
    serial: int  # of the instruction

    def part(self, mask: np.ndarray) -> _Copy:
        """Return the copies of some of the threads."""
        return _Copy(self.threads[mask], self.position[mask], self.data[mask], self.number[mask], self.serial)


@dataclass
class _Tied:
    """Threads that arrive at an mbarrier once the copies that they have begun so far have landed."""

    group: Group
    address: np.ndarray
    position: int
    serial: int  # of the first copy that does not matter
    pc: int


class Copies:
    """Copies of a batch."""

    def __init__(self, state: State, spaces: Spaces, barriers: MBarriers) -> None:
        self._state = state
        self._spaces = spaces
        self._barriers = barriers
        self._pending: list[_Copy] = []
        self._tied: list[_Tied] = []
        self._serial = 0
        self._group_number = np.zeros(state.batch.threads, np.int64)
        barriers.deliver.append(self._deliver)

    def start(self, group: Group, destination: Any, source: Any, size: int, source_size: Any, pc: int) -> None:
        """cp.async: `size` bytes for each thread; what `source_size` leaves out is zero."""
        position = self._spaces.shared.positions(group, destination, size, "asynchronous copy", pc)
        source = group.spread(source, np.uint64)
        wanted = None if source_size is None else np.minimum(group.spread(source_size).astype(np.int64), size)
        if wanted is None or bool((wanted == size).all()):
            data = self._fetch(group, source, size, size, pc)
        else:
            data = np.zeros((group.size, size), np.uint8)
            for one in np.unique(wanted[wanted > 0]):
                lanes = wanted == one
                data[lanes] = self._fetch(group.subset(lanes), source[lanes], int(one), size, pc)
        if self._spaces.shared.shadow is not None:
            self._spaces.shared.shadow.write(group, position, size, pc, in_flight=True)
        number = self._group_number.take(group.threads)
        self._pending.append(_Copy(group.threads, position, data, number, self._serial))
        self._serial += 1

    def _fetch(self, group: Group, source: np.ndarray, count: int, size: int, pc: int) -> np.ndarray:
        """The first `count` bytes at each address, which is a multiple of `size`; zeros behind them."""
        self._spaces.global_.check_alignment(group, source, size, "asynchronous copy", pc)
        if count == size:
            return (
                self._spaces.global_.load(group, source, Load(WORDS[size], size, 1, pc))
                .view(np.uint8)
                .reshape(-1, size)
            )
        element = min(count & -count, 4)  # the largest power of two that divides it
        dtype = {1: np.uint8, 2: np.uint16, 4: np.uint32}[element]
        columns = [
            self._spaces.global_.load(group, source + np.uint64(start), Load(dtype, element, 1, pc))
            for start in range(0, count, element)
        ]
        return _padded(columns, size)

    def commit(self, group: Group) -> None:
        """cp.async.commit_group."""
        self._group_number[group.threads] += 1

    def wait(self, group: Group, allowed: int | None, pc: int) -> None:
        """cp.async.wait_group: of these threads' groups at most the last `allowed` are still under way; None: wait_all."""
        numbers = self._group_number[group.threads]
        end = np.zeros(group.batch.threads, np.int64)  # for each thread, the first group that may be under way still
        end[group.threads] = numbers + 1 if allowed is None else numbers - allowed
        self._finish(lambda copy: copy.number < end.take(copy.threads))

    def _finish(self, done: Callable[[_Copy], np.ndarray]) -> None:
        """Land the copies of those threads for which `done` says so."""
        left, landing = [], []
        for copy in self._pending:
            mask = done(copy)
            count = np.count_nonzero(mask)
            if count == len(mask):
                landing.append(copy)
            elif count == 0:
                left.append(copy)
            else:
                landing.append(copy.part(mask))
                left.append(copy.part(~mask))
        self._pending = left
        for size in {copy.data.shape[1] for copy in landing}:
            self._land([copy for copy in landing if copy.data.shape[1] == size], size)

    def _land(self, copies: list[_Copy], size: int) -> None:
        """Write the copies' bytes, `size` of each thread, to shared memory, in the order in which they were asked for."""
        threads = np.concatenate([copy.threads for copy in copies])
        position = np.concatenate([copy.position for copy in copies])
        data = np.concatenate([copy.data for copy in copies])
        whole = WORDS[size]
        self._state.shared_memory.view(whole)[position // size] = data.view(whole)[:, 0]
        if self._spaces.shared.shadow is not None:
            self._spaces.shared.shadow.landed(Group(self._state.batch, threads, len(threads)), position, size)

    def arrive_when_done(self, group: Group, address: Any, in_count: bool, pc: int) -> None:
        """cp.async.mbarrier.arrive: threads arrive once their copies have come; `in_count`: as some of those expected."""
        address = group.spread(address)
        if not in_count:  # the phase expects one more
            self._barriers.arrive(group, address, np.int64(-1), np.uint32(0), False, pc)
        position = self._barriers.position(group, address, pc)
        for one in np.unique(position):
            lanes = position == one
            self._tied.append(_Tied(group.subset(lanes), address[lanes], int(one), self._serial, pc))

    def _deliver(self, barrier: int) -> bool:
        """Land the copies that are tied to this mbarrier."""
        due = [tied for tied in self._tied if tied.position == barrier]
        self._tied = [tied for tied in self._tied if tied.position != barrier]
        for tied in due:
            mine = np.zeros(self._state.batch.threads, np.bool_)
            mine[tied.group.threads] = True
            self._finish(partial(_is_tied, mine, tied.serial))
            self._barriers.arrive(tied.group, tied.address, np.uint32(1), np.uint32(0), False, tied.pc)
        return True


def _is_tied(threads: np.ndarray, serial: int, copy: _Copy) -> np.ndarray:
    """Mask of a copy's threads that are among `threads`, if it was begun before number `serial`."""
    return threads[copy.threads] & (copy.serial < serial)


def _padded(columns: list[np.ndarray], size: int) -> np.ndarray:
    """Columns of words as rows of `size` bytes, zeros behind."""
    data = np.ascontiguousarray(np.stack(columns, axis=-1)).view(np.uint8)
    return np.concatenate([data, np.zeros((len(data), size - data.shape[1]), np.uint8)], axis=1)
