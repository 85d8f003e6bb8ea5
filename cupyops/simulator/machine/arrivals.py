"""Data under way to shared memory beside the threads; an mbarrier is told when it has arrived.

Bulk copies, TMA tiles, stores and reductions of other blocks (st.async, cp.reduce.async.bulk). Bytes land when somebody asks
the mbarrier, the last moment at which they may; with a seed, at any time until then and in any order. Who may use them is
another matter: those who know that the phase is over to which they were told (`knowledge.py`).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ..errors import Race
from .faults import fault
from .group import Group
from .mbarriers import MBarriers
from .spaces import Spaces
from .state import State


@dataclass
class Arrival:
    """Bytes under way."""

    group: Group  # the thread that has asked for it, or those that have by one instruction
    start: np.ndarray  # of each thread's, in the shared memory of the batch
    size: int  # bytes from there on that change hands
    bytes: int  # of them told to the mbarrier
    barrier: int  # its position
    pc: int
    put: Callable[[], None]  # stores them
    told: np.ndarray | None = None  # what the threads knew when they asked (`Knowledge`)


class Arrivals:
    """Arrivals of a batch."""

    def __init__(self, state: State, spaces: Spaces, barriers: MBarriers, chooser: random.Random | None) -> None:
        self._state, self._spaces, self._barriers, self._chooser = state, spaces, barriers, chooser
        self._pending: list[Arrival] = []
        barriers.deliver.append(self.deliver)

    def start(self, arrival: Arrival, reduces: bool = False) -> None:
        """Begin an arrival, to which its place belongs until it has landed."""
        if (shadow := self._spaces.shared.shadow) is not None:
            series = self._barriers.series(arrival.barrier)
            shadow.start_copy(arrival.group, arrival.start, arrival.size, arrival.pc, series, reduces)
        if self._state.knowledge is not None:
            arrival.told = self._state.knowledge.told(arrival.group.threads)
        self._pending.append(arrival)
        self._state.idle = 0
        if self._chooser is not None and self._chooser.random() < 0.25:
            self._land(self._chooser.choice(self._pending))

    def deliver(self, barrier: int) -> bool:
        """Land arrivals that report to this mbarrier, or with a seed some of them; return True if all have landed."""
        due = [arrival for arrival in self._pending if arrival.barrier == barrier]
        if self._chooser is not None:
            self._chooser.shuffle(due)
            due = due[: self._chooser.randint(0, len(due))] if due else due
        for arrival in due:
            self._land(arrival)
        return not any(arrival.barrier == barrier for arrival in self._pending)

    def _land(self, arrival: Arrival) -> None:
        self._pending.remove(arrival)
        arrival.put()
        if (shadow := self._spaces.shared.shadow) is not None:
            series, count = self._barriers.series(arrival.barrier), self._barriers.count(arrival.barrier)
            shadow.arrived(arrival.start, arrival.size, series, count)
        self._barriers.transferred(arrival.barrier, arrival.bytes, arrival.told)

    def leave(self) -> None:
        """Threads have exited: nothing may be on its way to a block that is gone."""
        for arrival in self._pending if self._state.check else ():
            if self._state.has_exited(int(arrival.start[0]) // self._state.shared_stride):
                what = "a block exits while an asynchronous copy into its shared memory is in flight"
                detail = f"it reports to the mbarrier at {self._barriers.name(arrival.barrier)}, which nobody waits for"
                raise fault(Race, self._state.listing, arrival.group, np.True_, what, arrival.pc, detail=detail)
