"""mbarriers: phases that end when all expected threads have arrived and all announced bytes have come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import BarrierFault
from .faults import fault
from .group import Group
from .spaces import Shared
from .state import State


@dataclass
class _Phase:
    number: int
    expected: int  # arrivals in each phase
    pending: int  # arrivals that are still missing
    bytes: int = 0  # that are still to come


class MBarriers:
    """The mbarriers of a batch, by their position in shared memory."""

    def __init__(self, state: State, shared: Shared, deliver: Callable[[int], None]) -> None:
        self._state = state
        self._shared = shared
        self._deliver = deliver  # lands the copies that report to an mbarrier
        self._barriers: dict[int, _Phase] = {}

    def position(self, group: Group, address: Any, pc: int) -> np.ndarray:
        """Where in shared memory each thread's mbarrier lies."""
        address = group.spread(address)
        return self._shared.positions(group, address, 8, "mbarrier access", pc)

    def init(self, group: Group, address: Any, count: Any, pc: int) -> None:
        """mbarrier.init."""
        position, count = self.position(group, address, pc), group.spread(count)
        if self._shared.shadow is not None:
            self._shared.shadow.write(group, position, 8, pc)
        for one, expected in zip(position, count):
            self._barriers[int(one)] = _Phase(0, int(expected), int(expected))

    def invalidate(self, group: Group, address: Any, pc: int) -> None:
        """mbarrier.inval."""
        for one in self.position(group, address, pc):
            self._barriers.pop(int(one), None)

    def arrive(self, group: Group, address: Any, arrivals: Any, bytes_: Any, drop: bool, pc: int) -> np.ndarray:
        """mbarrier.arrive, expect_tx and complete_tx; returns the phase that was current."""
        position = self.position(group, address, pc)
        arrivals = group.spread(arrivals).astype(np.int64)
        bytes_ = group.spread(bytes_).astype(np.int64)
        token = np.empty(group.size, np.uint64)
        for one in np.unique(position):
            lanes = position == one
            phase = self._at(group, int(one), lanes, pc)
            token[lanes] = phase.number
            phase.bytes += int(bytes_[lanes].sum())
            phase.pending -= int(arrivals[lanes].sum())
            if drop:
                phase.expected -= int(arrivals[lanes].sum())
            if phase.pending < 0:
                what = f"more arrivals at an mbarrier than the {phase.expected} that it expects"
                raise fault(BarrierFault, self._state.listing, group, lanes, what, pc)
            self._advance(int(one), phase)
        return token

    def transferred(self, position: int, count: int) -> None:
        """A bulk copy of `count` bytes has landed."""
        phase = self._barriers.get(position)
        if phase is not None:
            phase.bytes -= count
            self._advance(position, phase)

    def stored(self, group: Group, address: Any, count: int, pc: int) -> None:
        """st.async: each thread has stored `count` bytes."""
        for one in self.position(group, address, pc):
            self.transferred(int(one), count)

    def test(self, group: Group, address: Any, phase: Any, parity: bool, pc: int) -> np.ndarray:
        """mbarrier.test_wait and try_wait: whether the phase (a token, or its parity) is over."""
        position, asked = self.position(group, address, pc), group.spread(phase).astype(np.int64)
        over = np.empty(group.size, np.bool_)
        for one in np.unique(position):
            lanes = position == one
            self._deliver(int(one))
            current = self._at(group, int(one), lanes, pc).number
            over[lanes] = (current & 1) != asked[lanes] if parity else current != asked[lanes]
        if not over.all():
            self._state.spinning = True  # others first
        return over

    def _at(self, group: Group, position: int, lanes: np.ndarray, pc: int) -> _Phase:
        phase = self._barriers.get(position)
        if phase is None:
            what = "an mbarrier is used before mbarrier.init"
            raise fault(BarrierFault, self._state.listing, group, lanes, what, pc)
        if self._shared.shadow is not None:
            self._shared.shadow.atomic(group.subset(lanes), np.full(np.count_nonzero(lanes), position), 8, pc)
        return phase

    def _advance(self, position: int, phase: _Phase) -> None:
        if phase.pending == 0 and phase.bytes == 0:
            phase.number += 1
            phase.pending = phase.expected
            self._state.passed_cluster(position // self._state.shared_stride)
        self._state.progressed = True
