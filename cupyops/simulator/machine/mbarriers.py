"""mbarriers: phases that end when all expected threads have arrived and all announced bytes have come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import BarrierFault
from .faults import fault
from .group import Group
from .knowledge import Series, merged
from .spaces import Shared
from .state import State

_PENDING_SHIFT = 40  # of a token: the phase below, the arrivals that were missing before the token's own from here on


@dataclass
class _Phase:
    number: int
    expected: int  # arrivals in each phase
    pending: int  # arrivals that are still missing
    bytes: int = 0  # that are still to come
    announced: int = 0  # bytes in this phase
    earlier: int = 0  # phases of mbarriers that were at this place before
    arriving: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # what those know who have arrived
    told: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int32))  # what they knew whose phases are over
    announced_by: int | None = None  # the last expect_tx
    past: np.ndarray | None = None  # what lies behind those who have arrived in the phase (`WarpOrder`)
    behind: np.ndarray | None = None  # and behind those whose phases are over


class MBarriers:
    """The mbarriers of a batch, by their position in shared memory."""

    def __init__(self, state: State, shared: Shared) -> None:
        self._state = state
        self._shared = shared
        self._barriers: dict[int, _Phase] = {}
        self._asked: dict[int, tuple[np.ndarray, int]] = {}  # by mbarrier the threads that wait, and where
        self.deliver: list[Callable[[int], bool]] = []  # each lands copies that report to an mbarrier; whether all have

    def position(self, group: Group, address: Any, pc: int, anywhere: bool = False) -> np.ndarray:
        """Position in shared memory of each thread's mbarrier: in its own block's, or `anywhere` in the cluster's."""
        address = group.spread(address)
        return self._shared.positions(group, address, 8, "mbarrier access", pc, anywhere)

    def series(self, position: int) -> int:
        """Number of the series that counts the phases of an mbarrier."""
        assert self._state.knowledge is not None
        block, offset = divmod(position, self._state.shared_stride)
        return self._state.knowledge.series(Series.PHASES, block, offset)

    def count(self, position: int) -> int:
        """Number of the current phase in its series."""
        phase = self._barriers.get(position)
        return 1 if phase is None else phase.earlier + phase.number + 1

    def init(self, group: Group, address: Any, count: Any, pc: int) -> None:
        """mbarrier.init."""
        position, count = self.position(group, address, pc), group.spread(count)
        if self._shared.shadow is not None:
            self._shared.shadow.write(group, position, 8, pc)
        for one, expected in zip(position, count):
            earlier = self.count(int(one)) if int(one) in self._barriers else 0
            self._barriers[int(one)] = _Phase(0, int(expected), int(expected), earlier=earlier)

    def invalidate(self, group: Group, address: Any, pc: int) -> None:
        """mbarrier.inval."""
        for one in self.position(group, address, pc):
            self._barriers.pop(int(one), None)

    def arrive(
        self, group: Group, address: Any, arrivals: Any, bytes_: Any, drop: bool, pc: int, anywhere: bool = False
    ) -> np.ndarray:
        """mbarrier.arrive, expect_tx and complete_tx; returns the phase that was current."""
        position = self.position(group, address, pc, anywhere)
        arrivals = group.spread(arrivals).astype(np.int64)
        bytes_ = group.spread(bytes_).astype(np.int64)
        token = np.empty(group.size, np.uint64)
        self._check(group, position, pc)
        for one in np.unique(position):
            lanes = position == one
            phase = self._barriers[int(one)]
            token[lanes] = phase.number | phase.pending << _PENDING_SHIFT
            brought = int(bytes_[lanes].sum())
            phase.bytes += brought
            if brought > 0:
                phase.announced += brought
                phase.announced_by = pc
            phase.pending -= int(arrivals[lanes].sum())
            if self._state.cluster_size == 1 and self._shared.shadow is not None:
                _, until = self._state.end_past(group.threads[lanes], pc)
                phase.past = until[:, 0] if phase.past is None else np.maximum(phase.past, until[:, 0])
            if drop:
                phase.expected -= int(arrivals[lanes].sum())
            if phase.pending < 0:
                what = f"more arrivals at an mbarrier than the {phase.expected} that it expects"
                detail = f"the mbarrier at {self.name(int(one))}"
                raise fault(BarrierFault, self._state.listing, group, lanes, what, pc, detail=detail)
            if self._state.knowledge is not None:
                phase.arriving = merged(phase.arriving, self._state.knowledge.told(group.threads[lanes]))
            self._advance(int(one), phase)
        return token

    def transferred(self, position: int, count: int, told: np.ndarray | None) -> None:
        """Note that `count` bytes have arrived, sent by a thread that knew what is `told`."""
        phase = self._barriers.get(position)
        if phase is not None:
            phase.bytes -= count
            if told is not None:
                phase.arriving = merged(phase.arriving, told)
            self._advance(position, phase)

    def test(self, group: Group, address: Any, phase: Any, parity: bool, pc: int) -> np.ndarray:
        """mbarrier.test_wait and try_wait: whether the phase (a token, or its parity) is over."""
        position, asked = self.position(group, address, pc), group.spread(phase).astype(np.int64)
        asked = asked if parity else asked & ((1 << _PENDING_SHIFT) - 1)
        over = np.empty(group.size, np.bool_)
        self._check(group, position, pc)
        for one in map(int, np.unique(position)):
            lanes = position == one
            landed = [deliver(one) for deliver in self.deliver]
            found = self._barriers[one]
            current = found.number
            over[lanes] = (current & 1) != asked[lanes] if parity else current != asked[lanes]
            threads = group.threads[lanes]
            if self._state.knowledge is not None and over[lanes].any():
                aware = threads[over[lanes]]
                self._state.knowledge.learn(aware, self.series(one), found.earlier + current)
                self._state.knowledge.tell(aware, found.told)
                self._learn(one, aware, found)
            if not all(landed):
                self._state.idle = 0
            if not over[lanes].all():
                self._asked[one] = threads[~over[lanes]], pc
        if over.all():
            self._state.idle = 0
        else:
            self._state.spinning = True  # others first
            self._state.idle += 1
        return over

    def _learn(self, position: int, threads: np.ndarray, phase: _Phase) -> None:
        """Order threads that know a phase to be over behind all who have arrived in it."""
        if phase.behind is None:
            return
        order, block = self._state.order, position // self._state.shared_stride
        until = order.nothing()
        until[:, block] = phase.behind
        self._state.learn(threads, until)

    def _check(self, group: Group, position: np.ndarray, pc: int) -> None:
        """Check that the mbarriers are there, and known to these threads."""
        for one in map(int, np.unique(position)):
            if one not in self._barriers:
                what = "an mbarrier is used before mbarrier.init"
                detail = f"the mbarrier at {self.name(one)}"
                raise fault(BarrierFault, self._state.listing, group, position == one, what, pc, detail=detail)
        if self._shared.shadow is not None:
            self._shared.shadow.atomic(group, position, 8, pc)

    def _advance(self, position: int, phase: _Phase) -> None:
        if phase.pending == 0 and phase.bytes == 0:
            phase.number += 1
            phase.pending, phase.announced = phase.expected, 0
            phase.told, phase.arriving = merged(phase.told, phase.arriving), phase.arriving[:0]
            self._asked.pop(position, None)
            if self._state.cluster_size > 1:
                self._state.passed_cluster(position // self._state.shared_stride)
            elif phase.past is not None:
                phase.behind = phase.past if phase.behind is None else np.maximum(phase.behind, phase.past)
                phase.past = None
        self._state.progressed = True
        self._state.idle = 0

    # --- what messages say ---

    def name(self, position: int) -> str:
        """An mbarrier as a person finds it."""
        block, offset = divmod(position, self._state.shared_stride)
        return f"offset {offset} of the shared memory of block {self._state.batch.block_name(block)}"

    def describe(self) -> list[str]:
        """Describe who waits for which mbarrier, and what it still lacks."""
        lines = []
        for position, (threads, pc) in sorted(self._asked.items()):
            threads = threads[~self._state.exited[threads]]
            if position not in self._barriers or not len(threads):
                continue
            phase = self._barriers[position]
            first = self._state.batch.thread_name(int(threads[0]))
            lines.append(f"  {len(threads)} threads, first {first}, wait for the mbarrier at {self.name(position)}")
            lines += [*self._state.listing.describe(pc), f"  its phase {phase.number} lacks {_lacking(phase)}"]
            if phase.bytes and phase.announced_by is not None:
                lines += ["  bytes were announced last at", *self._state.listing.describe(phase.announced_by)]
        return lines


def _lacking(phase: _Phase) -> str:
    parts = []
    if phase.pending:
        parts.append(f"{phase.pending} of {phase.expected} arrivals")
    if phase.bytes > 0:
        parts.append(f"{phase.bytes} of the {phase.announced} bytes that were announced (expect_tx)")
    if phase.bytes < 0:
        parts.append(f"an announcement (expect_tx) of {-phase.bytes} bytes that have come")
    return " and ".join(parts) or "nothing: its threads ask for another phase, of the other parity"
