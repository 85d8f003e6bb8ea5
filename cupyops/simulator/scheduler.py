"""Which threads run next. Groups of threads wait at the start of a basic block; those at the same block run together.

The lowest block goes first, which brings diverged threads together again at loop ends and after branches. Before an
instruction of whole warps, a group waits while other live lanes of its warps are elsewhere. A group that has waited long
is served all the same, so that spin locks end. With a seed the order is drawn instead: results must not depend on it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np

from .barriers import Barriers
from .errors import Deadlock, StepLimit
from .function import CompiledBlock
from .group import Batch, Group, Index
from .state import State

_PATIENCE = 3000  # steps that a group may be passed over


class Scheduler:
    """Runs one batch of blocks to its end."""

    def __init__(
        self,
        state: State,
        batch: Batch,
        run_block: Callable[[CompiledBlock, Group], Any],
        limit: int,
        chooser: random.Random | None,
    ) -> None:
        self._state = state
        self._batch = batch
        self._run_block = run_block
        self._limit = limit
        self._chooser = chooser
        self._everyone = Group(batch, None, batch.threads)
        self._ready: dict[int, list[Index]] = {0: [None]}
        self._since: dict[int, int] = {0: 0}  # when the oldest group came to the block
        self._passed_over: set[int] = set()  # blocks whose groups wait for lanes, or for other threads' progress
        self.barriers = Barriers(state, batch)
        self.steps = 0

    def run(self) -> None:
        """Until every thread has left. Raises `Deadlock` or `StepLimit`."""
        while self._ready or self.barriers.waiting:
            if not self._ready:
                raise Deadlock(self.barriers.describe())
            self._step()

    def _step(self) -> None:
        number, forced = self._choose()
        group = self._gather(self._ready.pop(number))
        block = self._state.code.blocks[number]
        self.steps += 1
        if block.gathers and not forced and self._is_partial(group):
            self._ready[number] = [group.index]
            self._passed_over.add(number)
            return
        self._passed_over.discard(number)
        if self.steps > self._limit:
            where = self._state.listing.short(block.first) if block.size else "the end"
            raise StepLimit(
                f"{self._state.listing.kernel}: no end after {self.steps - 1} steps; threads are at {where}. "
                "An endless loop, or a limit too low for this launch"
            )
        state = self._state
        result = self._run_block(block, group)
        if state.progressed:  # something that others may wait for
            self._passed_over.clear()
            state.progressed = False
        for target, index in self._after(block, group, result):
            self._arrive(target, index)
        state.spinning = False

    def _choose(self) -> tuple[int, bool]:
        """(block, whether it runs even if lanes are missing)."""
        if len(self._ready) == 1:
            return next(iter(self._ready)), True
        candidates = [number for number in self._ready if number not in self._passed_over]
        forced = not candidates
        candidates = candidates or list(self._ready)
        chosen = self._chooser.choice(sorted(candidates)) if self._chooser is not None else min(candidates)
        oldest = min(self._ready, key=self._since.__getitem__)
        if self.steps - self._since[oldest] > _PATIENCE:
            self._since[oldest] = self.steps
            return oldest, True
        return chosen, forced

    def _gather(self, waiting: list[Index]) -> Group:
        """All groups that wait at one block, as one."""
        index = waiting[0]
        if len(waiting) > 1:
            threads = self._everyone.threads
            index = np.sort(np.concatenate([threads[one] for one in waiting]))
        if index is None:
            return self._everyone
        if isinstance(index, slice):
            return Group(self._batch, index, index.stop - index.start)
        size = len(index)
        if size == self._batch.threads:
            return self._everyone
        if int(index[-1]) - int(index[0]) == size - 1:  # a slice is cheaper to read and write through
            return Group(self._batch, slice(int(index[0]), int(index[-1]) + 1), size)
        return Group(self._batch, index, size)

    def _is_partial(self, group: Group) -> bool:
        """Whether a live lane of the group's warps is elsewhere."""
        if group is self._everyone:
            return False
        live = self._state.live_lanes()
        warp = group.get("warp")
        return bool(np.any(live[warp] & ~group.lanes_present()[warp]))

    # --- where they go ---

    def _after(self, block: CompiledBlock, group: Group, result: Any) -> list[tuple[int, Index]]:
        if block.ends == "jump":
            return [(block.targets[0], group.index), *self.barriers.released()]
        if block.ends == "branch":
            return [*_branch(block, group, result), *self.barriers.released()]
        if block.ends == "switch":
            return _switch(block, group, result)
        if block.ends == "barrier":
            return self.barriers.wait(block, group, result)
        self._state.exited[slice(None) if group.index is None else group.index] = True
        self._passed_over.clear()
        return self.barriers.leave(group)

    def _arrive(self, target: int, index: Index) -> None:
        if self._state.spinning:
            self._passed_over.add(target)
        else:
            self._passed_over.discard(target)
        if target in self._ready:
            self._ready[target].append(index)
        else:
            self._ready[target] = [index]
            self._since[target] = self.steps


def _branch(block: CompiledBlock, group: Group, condition: Any) -> list[tuple[int, Index]]:
    taken, otherwise = block.targets
    if not isinstance(condition, np.ndarray) or condition.ndim == 0:
        return [(taken if condition else otherwise, group.index)]
    count = int(np.count_nonzero(condition))
    if count == group.size:
        return [(taken, group.index)]
    if count == 0:
        return [(otherwise, group.index)]
    threads = group.threads
    return [(taken, threads[condition]), (otherwise, threads[~condition])]


def _switch(block: CompiledBlock, group: Group, chosen: Any) -> list[tuple[int, Index]]:
    chosen = np.minimum(group.spread(chosen), len(block.targets) - 1)
    threads = group.threads
    return [(block.targets[int(one)], threads[chosen == one]) for one in np.unique(chosen)]
