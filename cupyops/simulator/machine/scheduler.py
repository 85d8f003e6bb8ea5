"""Scheduler of threads. Groups of threads wait at the start of a basic block; those at the same block run together.

The lowest block goes first, which brings diverged threads together again at loop ends and after branches. Before a
warp-wide instruction a group waits while lanes that it names are elsewhere; lanes that wait at different copies of one
instruction meet when nothing else can run. Threads that have just found a lock taken, or read a flag, let others go first.
With a seed the order is drawn instead: results must not depend on it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import Enum, auto
from typing import Any

import numpy as np

from ..errors import Deadlock, OutOfBounds, StepLimit, WarpFault
from ..translate.function import CompiledBlock
from .barriers import Barriers
from .faults import fault
from .global_shadow import GlobalShadow
from .group import Batch, Group, Index
from .meetings import Asked, Meetings, Stand, lanes_named, names_lanes
from .state import State
from .warps import absent_lanes, lanes_alike

_PATIENCE = 3000  # steps that a group may be passed over
_IDLE = 400  # times that mbarriers are asked in vain, while nothing else can run, until that is taken for good


class _Urgency(Enum):
    """Treatment of a group whose warps lack lanes."""

    NONE = auto()  # it waits
    PART = auto()  # the complete ones of its warps go on
    STUCK = auto()  # nothing else can run: it goes on without them


class Scheduler:
    """Runs one batch of blocks to its end."""

    def __init__(
        self,
        state: State,
        batch: Batch,
        shadow: GlobalShadow | None,
        run_block: Callable[[CompiledBlock, Group], Any],
        meetings: Meetings,
        limit: int,
        chooser: random.Random | None,
        leave: Callable[[Group], None],
        waiting: Callable[[], list[str]],
    ) -> None:
        self._state = state
        self._batch = batch
        self._run_block = run_block
        self._meetings = meetings
        self._limit = limit
        self._chooser = chooser
        self._leave = leave  # looks whether a group may exit
        self._waiting = waiting  # who waits for mbarriers
        self._everyone = Group(batch, None, batch.threads)
        self._ready: dict[int, list[Index]] = {0: [None]}
        self._since: dict[int, int] = {0: 0}  # when the oldest group came to the block
        self._lacking: set[int] = set()  # blocks whose groups wait for lanes of their warps
        self._spinning: set[int] = set()  # blocks whose groups wait for what other threads do
        self._halfway: list[Stand] = []  # have met others at a block's first instruction, and wait at its next
        self.barriers = Barriers(state, batch, shadow)
        self.steps = 0

    def run(self) -> None:
        """Run until every thread has left. Raises `Deadlock` or `StepLimit`."""
        while self._ready or self.barriers.waiting or self._halfway:
            if not self._ready and not self._halfway:
                raise self._deadlock()
            self._step()

    def _step(self) -> None:
        chosen = self._choose()
        if chosen is None:
            return
        number, urgency = chosen
        group = self._gather(self._ready.pop(number))
        block = self._state.code.blocks[number]
        self.steps += 1
        if block.members is not None and urgency is not _Urgency.STUCK:
            together = self._together(block, group, urgency)
            if together is None:
                if urgency is _Urgency.PART:
                    self._meet()
                return
            group = together
        self._lacking.discard(number)
        self._spinning.discard(number)
        if self.steps > self._limit:
            raise self._too_long(block)
        result = self._run(block, group)
        while (following := self._straight_on(block, group, result)) is not None:
            self.steps += 1
            if self.steps > self._limit:
                raise self._too_long(following)
            block = following
            result = self._run(block, group)
        self._go_on(block, group, result)

    def _run(self, block: CompiledBlock, group: Group) -> Any:
        self._state.spinning = self._state.progressed = False
        return self._run_block(block, group)

    def _straight_on(self, block: CompiledBlock, group: Group, result: Any) -> CompiledBlock | None:
        """The block to which the whole group goes, where nobody else could run before it; None: ask who is next."""
        if self._ready or self._lacking or self._spinning or self._halfway or self._chooser is not None:
            return None
        if block.ends not in ("jump", "branch") or self._state.spinning or self.barriers.has_arrivals:
            return None
        target = block.targets[0] if block.ends == "jump" else _one_way(block, group, result)
        if target is None:
            return None
        following = self._state.code.blocks[target]
        return following if following.members is None else None

    def _go_on(self, block: CompiledBlock, group: Group, result: Any) -> None:
        """The group has run the block: on to the next ones."""
        after = self._after(block, group, result)
        if self._state.progressed:  # something that others may wait for
            self._spinning.clear()
        for target, index in after:
            self._arrive(target, index)

    def _deadlock(self) -> Deadlock:
        found = [*self.barriers.describe(), *self._waiting()]
        return Deadlock(
            "\n".join([f"{self._state.listing.kernel}: deadlock: every thread that is left waits at a barrier", *found])
        )

    def _too_long(self, block: CompiledBlock) -> StepLimit:
        where = self._state.listing.short(block.first) if block.size else "the end"
        return StepLimit(
            f"{self._state.listing.kernel}: no end after {self.steps - 1} steps; threads are at {where}. "
            "An endless loop, or a limit too low for this launch: raise max_steps"
        )

    def _choose(self) -> tuple[int, _Urgency] | None:
        """The next block: of those whose groups wait for nothing, if there are any. None: lanes have met instead."""
        if len(self._ready) == 1 and self._chooser is None and not self._lacking and not self._spinning:
            return next(iter(self._ready)), _Urgency.NONE
        held = self._lacking | self._spinning
        candidates = [number for number in self._ready if number not in held] if held else list(self._ready)
        if not candidates:
            return self._last_resort()
        oldest = min(self._ready, key=self._since.__getitem__)
        if self.steps - self._since[oldest] > _PATIENCE:
            self._since[oldest] = self.steps
            return oldest, _Urgency.PART
        if self._chooser is not None:
            return self._chooser.choice(sorted(candidates)), _Urgency.NONE
        return min(candidates), _Urgency.NONE

    def _last_resort(self) -> tuple[int, _Urgency] | None:
        """Choose what runs when every group waits.

        Warps that are complete go on without the others, then lanes that stand at different copies of one instruction; then
        spinning groups take their turns.
        """
        for number in sorted(self._lacking & self._ready.keys()):
            complete = self._complete(self._state.code.blocks[number], self._gather(self._ready[number]))
            if complete is None or complete.any():
                return number, _Urgency.PART
        if self._meet():
            return None
        spinning = self._spinning & self._ready.keys()
        if spinning and self._state.idle > _IDLE:
            raise self._deadlock()
        if spinning:
            return min(spinning, key=lambda number: (self._since[number], number)), _Urgency.PART
        return self._stuck(), _Urgency.STUCK

    def _stuck(self) -> int:
        """The block that goes on as it is. Raises `WarpFault` where lanes are named that will not come."""
        stands = sorted(self._stands(), key=lambda stand: stand.pc)
        instructions = self._state.code.instructions
        asking = [stand for stand in stands if instructions[stand.pc].opcode == "activemask"]  # it takes who is there
        first = (asking or stands)[0]
        if names_lanes(first.block.members):
            raise self._missing(first)
        return first.block.index

    def _missing(self, stand: Stand) -> WarpFault:
        """Describe the lanes that are missing, and where they are instead."""
        group = stand.group
        mask = group.spread(lanes_named(self._state, stand.block, group), np.uint32)
        places = [(other.pc, other.group.threads) for other in self._stands()] + self.barriers.places()
        warp = group.get("warp")
        absent = mask & ~lanes_alike(group, mask)
        if (contrary := absent & group.lanes_present()[warp]).any():
            first = int(np.argmax(contrary != 0))
            lane = int(contrary[first]).bit_length() - 1
            other = mask[(warp == warp[first]) & (group.get("laneid") == lane)]
            what = "lanes of one warp-wide instruction name masks that contradict each other"
            detail = f"mask {int(mask[first]):#010x} names lane {lane}, which names mask {int(other[0]):#010x}"
            return fault(WarpFault, self._state.listing, group, contrary != 0, what, stand.pc, detail=detail)
        return absent_lanes(self._state, group, mask, absent, stand.pc, places)

    # --- lanes that meet ---

    def _meet(self) -> bool:
        """Run instructions whose lanes wait at different copies of them; return True if there were any."""
        count = self.steps
        while found := self._meetings.find(self._stands()):
            self.steps += 1
            if self.steps > self._limit:
                raise self._too_long(found[0][0].block)
            for stand, mask in found:
                self._depart(stand, mask)
            for stand in self._meetings.hold([stand.part(mask) for stand, mask in found]):
                self._resume(stand)
        return self.steps > count

    def _stands(self) -> list[Stand]:
        """All threads that are at warp-wide instructions."""
        blocks = self._state.code.blocks
        gathering = [number for number in self._ready if blocks[number].members is not None]
        return [*(Stand(blocks[number], self._gather(self._ready[number])) for number in gathering), *self._halfway]

    def _depart(self, stand: Stand, mask: np.ndarray) -> None:
        """Remove these threads from a stand: they wait no more."""
        stays = not mask.all()
        if stand.answers:
            self._halfway.remove(stand)
            if stays:
                self._halfway.append(stand.part(~mask))
            return
        number = stand.block.index
        if stays:
            self._ready[number] = [stand.group.threads[~mask]]
            return
        del self._ready[number]
        self._lacking.discard(number)
        self._spinning.discard(number)

    def _resume(self, stand: Stand) -> None:
        """Threads that have met others: to the end of their block, or to its next exchange."""
        self._state.spinning = self._state.progressed = False
        try:
            result = self._meetings.run_on(stand)
        except Asked:
            self._halfway.append(stand)
        else:
            self._go_on(stand.block, stand.group, result)

    # --- groups ---

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

    def _together(self, block: CompiledBlock, group: Group, urgency: _Urgency) -> Group | None:
        """Return the part of the group that runs now; the others stay. While other groups can run, it waits to be whole."""
        complete = self._complete(block, group)
        if complete is None:
            return group
        number = block.index
        self._lacking.add(number)
        if urgency is _Urgency.NONE or not complete.any():
            self._ready[number] = [group.index]
            return None
        self._ready[number] = [group.threads[~complete]]
        return group.subset(complete)

    def _complete(self, block: CompiledBlock, group: Group) -> np.ndarray | None:
        """Mask of threads that have all the lanes around them that the block's first instruction needs; None: all."""
        members = block.members
        if members is None or (group is self._everyone and members.register is None):
            return None
        live, present = self._state.live_lanes(), group.lanes_present()
        if members.lanes == 128:
            warps, per_block = np.arange(self._batch.warps), self._batch.warps_per_block
            warpgroup = warps // per_block * per_block + warps % per_block // 4
            missing = np.isin(warpgroup, warpgroup[(live & ~present) != 0])[group.get("warp")]
        else:
            mask = lanes_named(self._state, block, group)
            if group is self._everyone and not isinstance(mask, np.ndarray):
                return None
            missing = live[group.get("warp")] & ~lanes_alike(group, mask) & mask != 0
        return ~missing if missing.any() else None

    # --- where they go ---

    def _after(self, block: CompiledBlock, group: Group, result: Any) -> list[tuple[int, Index]]:
        if block.ends == "jump":
            return [(block.targets[0], group.index), *self.barriers.released()]
        if block.ends == "branch":
            return [*_branch(block, group, result), *self.barriers.released()]
        if block.ends == "switch":
            return self._switch(block, group, result)
        if block.ends == "barrier":
            return self.barriers.wait(block, group, result)
        self._state.exited[slice(None) if group.index is None else group.index] = True
        self._state.check_outlived()
        self._leave(group)
        self._lacking.clear()
        self._spinning.clear()
        return self.barriers.leave(group)

    def _switch(self, block: CompiledBlock, group: Group, chosen: Any) -> list[tuple[int, Index]]:
        """brx.idx: each thread to the target that it names."""
        chosen = group.spread(chosen)
        beyond = chosen >= len(block.targets)
        if beyond.any():
            what = f"a branch to target {int(chosen[beyond][0])} of a table of {len(block.targets)}"
            raise fault(OutOfBounds, self._state.listing, group, beyond, what, block.first + block.size - 1)
        threads = group.threads
        return [(block.targets[int(one)], threads[chosen == one]) for one in np.unique(chosen)]

    def _arrive(self, target: int, index: Index) -> None:
        self._lacking.discard(target)
        (self._spinning.add if self._state.spinning else self._spinning.discard)(target)
        if target in self._ready:
            self._ready[target].append(index)
        else:
            self._ready[target] = [index]
            self._since[target] = self.steps


def _one_way(block: CompiledBlock, group: Group, condition: Any) -> int | None:
    """Return the block to which a branch leads the whole group, or None if its threads part."""
    taken, otherwise = block.targets
    if not isinstance(condition, np.ndarray) or condition.ndim == 0:
        return taken if condition else otherwise
    count = int(np.count_nonzero(condition))
    return taken if count == group.size else None if count else otherwise


def _branch(block: CompiledBlock, group: Group, condition: Any) -> list[tuple[int, Index]]:
    target = _one_way(block, group, condition)
    if target is not None:
        return [(target, group.index)]
    taken, otherwise = block.targets
    threads = group.threads
    return [(taken, threads[condition]), (otherwise, threads[~condition])]
