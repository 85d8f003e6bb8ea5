"""bar.sync and its kin: who waits, who has arrived, and when they may go on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import BarrierFault
from ..translate.function import CompiledBlock
from .faults import fault
from .global_shadow import GlobalShadow
from .group import Batch, Group, Index
from .knowledge import merged
from .state import State

_BARRIERS = 16  # of each block
CLUSTER = -1  # the number by which barrier.cluster is known here


@dataclass
class _Waiter:
    threads: np.ndarray
    block: CompiledBlock
    predicate: np.ndarray | None  # of bar.red


@dataclass
class _Barrier:
    arrived: np.ndarray  # threads, for each block of the batch
    expected: np.ndarray  # how many, by block; 0 for all of it
    announced_at: np.ndarray  # the instruction that said so, by block
    waiters: list[_Waiter] = field(default_factory=list)
    told: dict[int, np.ndarray] = field(default_factory=dict)  # by meeting what those know who have come (Knowledge)
    past: np.ndarray | None = None  # what lies behind those who have come, where only some warps meet (`WarpOrder`)
    passing: np.ndarray | None = None  # how many have come that do not wait, by block


class Barriers:
    """The barriers of all blocks of a batch."""

    def __init__(self, state: State, batch: Batch, shadow: GlobalShadow | None) -> None:
        self._state = state
        self._batch = batch
        self._shadow = shadow
        self._barriers: dict[int, _Barrier] = {}
        self._alive = np.full(batch.blocks, batch.threads_per_block)
        self._check_arrivals = False
        self._at_cluster = np.zeros(batch.threads, np.bool_)  # who has arrived there, and is to wait
        self._relaxed = np.zeros(batch.blocks, np.bool_)  # whose threads have arrived there by .relaxed, and no fence
        self.fenced = np.zeros(batch.blocks, np.bool_)  # whose threads have run a fence since the cluster met

    @property
    def waiting(self) -> bool:
        """True if any thread waits."""
        return any(barrier.waiters for barrier in self._barriers.values())

    def wait(self, block: CompiledBlock, group: Group, request: tuple[Any, Any, Any]) -> list[tuple[int, Index]]:
        """`group` comes to a barrier: (number, count or None, predicate or None). Returns who goes on, and where to."""
        number, count, predicate = request
        if isinstance(number, int) and number == CLUSTER:
            self._wait_cluster(group, block.first + block.size - 1)
        everyone = group.index is None and not self._barriers and predicate is None and count is None
        if (
            everyone
            and not isinstance(number, np.ndarray)
            and bool((self._alive == self._batch.threads_per_block).all())
        ):
            self._pass(number, np.ones(self._batch.blocks, np.bool_))  # the common case: all at once
            if self._state.knowledge is not None:
                self._state.knowledge.meet(self._together(number))
            return [(block.targets[0], group.index)]
        numbers = group.spread(number)
        for one in np.unique(numbers):
            mask = numbers == one
            self._arrive(group, mask, int(one), count, block.first + block.size - 1, True)
            own = None if predicate is None else group.spread(predicate)[mask]
            self._barriers[int(one)].waiters.append(_Waiter(group.threads[mask], block, own))
        return self._release_all()

    def arrive(self, group: Group, number: Any, count: Any, pc: int) -> None:
        """bar.arrive: counted, without waiting."""
        numbers = group.spread(number)
        for one in np.unique(numbers):
            self._arrive(group, numbers == one, int(one), count, pc, False)
        self._check_arrivals = True

    def arrive_cluster(self, group: Group, pc: int) -> None:
        """barrier.cluster.arrive: only remembered, since barrier.cluster.wait does what both do."""
        twice = self._at_cluster[group.threads]
        if twice.any():
            what = "arrives at the cluster's barrier again, with no barrier.cluster.wait in between"
            raise fault(BarrierFault, self._state.listing, group, twice, what, pc)
        self._at_cluster[group.threads] = True
        if "relaxed" in self._state.listing.instructions[pc].modifiers:
            blocks = group.get("block")
            self._relaxed[blocks] |= ~self.fenced[blocks]

    def _wait_cluster(self, group: Group, pc: int) -> None:
        without = ~self._at_cluster[group.threads]
        if without.any():
            what = "waits at the cluster's barrier without having arrived there by barrier.cluster.arrive"
            raise fault(BarrierFault, self._state.listing, group, without, what, pc)
        self._at_cluster[group.threads] = False

    @property
    def has_arrivals(self) -> bool:
        """True if the last step arrived somewhere without waiting, so that other threads may go on."""
        return self._check_arrivals

    def released(self) -> list[tuple[int, Index]]:
        """Release the threads that may go on because of what the last step did without waiting."""
        if not self._check_arrivals:
            return []
        self._check_arrivals = False
        return self._release_all()

    def leave(self, group: Group) -> list[tuple[int, Index]]:
        """`group` has exited."""
        self._alive -= np.bincount(group.get("block"), minlength=self._batch.blocks)
        return self._release_all()

    def _arrive(self, group: Group, mask: np.ndarray, number: int, count: Any, pc: int, waits: bool) -> None:
        threads, blocks = group.threads[mask], group.get("block")[mask]
        barrier = self._barriers.get(number)
        if barrier is None:
            nobody, unknown = np.zeros(self._batch.blocks, np.int64), np.zeros(self._batch.blocks, np.int64)
            barrier = self._barriers[number] = _Barrier(nobody, np.zeros_like(nobody), unknown)
        if number != CLUSTER:
            expected = np.zeros(len(threads), np.int64) if count is None else group.spread(count).astype(np.int64)[mask]
            self._check_count(group, mask, barrier, number, expected, pc)
            if count is not None:
                self._note_past(barrier, threads, pc, waits)
        barrier.arrived += np.bincount(blocks, minlength=self._batch.blocks)
        if self._state.knowledge is not None:
            for meeting, own in self._by_meeting(number, threads):
                told, before = self._state.knowledge.told(own), barrier.told.get(meeting)
                barrier.told[meeting] = told if before is None else merged(before, told)

    def _note_past(self, barrier: _Barrier, threads: np.ndarray, pc: int, waits: bool) -> None:
        """Note what lies behind those who come to a barrier that is perhaps not of the whole block."""
        if barrier.past is None or barrier.passing is None:
            barrier.past, barrier.passing = self._state.order.nothing(), np.zeros(self._batch.blocks, np.int64)
        past = self._state.end_past(threads, pc)
        barrier.past[:, past.blocks] = np.maximum(barrier.past[:, past.blocks], past.until)
        if not waits:
            barrier.passing += np.bincount(self._batch.per_thread["block"][threads], minlength=self._batch.blocks)

    def _check_count(
        self, group: Group, mask: np.ndarray, barrier: _Barrier, number: int, expected: np.ndarray, pc: int
    ) -> None:
        """Check that the barrier exists, and that all who come before it is complete expect as many threads there."""
        listing = self._state.listing
        if not 0 <= number < _BARRIERS:
            what = f"barrier {number} of a block that has {_BARRIERS}, 0 to {_BARRIERS - 1}"
            raise fault(BarrierFault, listing, group, mask, what, pc)
        if (expected % 32).any():
            count = int(expected[expected % 32 != 0][0])
            what = f"barrier {number} is to wait for {count} threads; expected a multiple of 32"
            raise fault(BarrierFault, listing, group, mask, what, pc)
        blocks = group.get("block")[mask]
        fresh = barrier.arrived[blocks] == 0
        barrier.expected[blocks[fresh]], barrier.announced_at[blocks[fresh]] = expected[fresh], pc
        wrong = barrier.expected[blocks] != expected
        if wrong.any():
            first = int(np.argmax(wrong))
            guilty = mask.copy()
            guilty[mask] = wrong
            counts = int(expected[first]), int(barrier.expected[blocks[first]])
            found, before = (f"{one} threads" if one else "all threads of the block" for one in counts)
            what = f"barrier {number} is to wait for {found}, but others have come to it that expect {before}"
            also = int(barrier.announced_at[blocks[first]])
            raise fault(BarrierFault, listing, group, guilty, what, pc, also=also)

    def _together(self, number: int) -> int:
        """Number of blocks that meet at a barrier."""
        return self._state.cluster_size if number == CLUSTER else 1

    def _by_meeting(self, number: int, threads: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """Threads by the blocks, or clusters, that meet."""
        meeting = self._batch.per_thread["block"][threads] // self._together(number)
        return [(int(one), threads[meeting == one]) for one in np.unique(meeting)]

    # --- going on ---

    def _release_all(self) -> list[tuple[int, Index]]:
        return [pair for number in list(self._barriers) for pair in self._release(number)]

    def _release(self, number: int) -> list[tuple[int, Index]]:
        barrier = self._barriers[number]
        done = self._complete(number, barrier)
        if not done.any():
            return []
        block_of = self._batch.per_thread["block"]
        going, staying = [], []
        for waiter in barrier.waiters:
            mask = done[block_of[waiter.threads]]
            going.append(_part(waiter, mask))
            if not mask.all():
                staying.append(_part(waiter, ~mask))
        going = [waiter for waiter in going if len(waiter.threads)]
        if number == CLUSTER:
            self._check_warps(going)
        elif not barrier.expected[done].any():
            self._check_agreement(going, done)
        self._reduce(going)
        self._pass(number, done & ~self._learn(barrier, going, done))
        self._tell(number, barrier, going, done)
        barrier.arrived[done] = 0
        barrier.waiters = staying
        if not staying and not barrier.arrived.any():
            del self._barriers[number]
        targets: dict[int, list[np.ndarray]] = {}
        for waiter in going:
            targets.setdefault(waiter.block.targets[0], []).append(waiter.threads)
        return [(target, np.sort(np.concatenate(threads))) for target, threads in targets.items()]

    def _learn(self, barrier: _Barrier, going: list[_Waiter], done: np.ndarray) -> np.ndarray:
        """Order those who go on behind those who have come; return the blocks of which not all threads have waited."""
        if barrier.past is None or barrier.passing is None:
            return np.zeros(len(done), np.bool_)
        partly = done & ((barrier.passing > 0) | (barrier.expected < self._alive)) & (barrier.expected > 0)
        for waiter in going:
            threads = waiter.threads[partly[self._batch.per_thread["block"][waiter.threads]]]
            if len(threads):
                self._state.learn(threads, barrier.past)
        barrier.past[:, done], barrier.passing[done] = 0, 0
        return partly

    def _tell(self, number: int, barrier: _Barrier, going: list[_Waiter], done: np.ndarray) -> None:
        """Give those who go on the knowledge of all who came."""
        if self._state.knowledge is None:
            return
        for waiter in going:
            for meeting, threads in self._by_meeting(number, waiter.threads):
                self._state.knowledge.tell(threads, barrier.told[meeting])
        for block in np.flatnonzero(done):
            barrier.told.pop(int(block) // self._together(number), None)

    def _pass(self, number: int, done: np.ndarray) -> None:
        """Mark blocks as having come through a barrier: what they did before it is over."""
        state = self._state
        if number == CLUSTER:
            state.has_met[done] = True
            size = state.cluster_size
            relaxed = np.repeat(self._relaxed.reshape(-1, size).any(1), size)
            self._relaxed[done] = self.fenced[done] = False
            for block in np.flatnonzero(done):
                state.reached.pop(int(block), None)
            done = done & ~relaxed  # who only says that it is there orders no accesses
        state.pass_barrier(done)
        if number == CLUSTER:
            state.cluster_epoch[done] = state.epoch[done]
            if self._shadow is not None:
                self._shadow.cluster_barrier(self._batch.block_numbers[done])

    def _complete(self, number: int, barrier: _Barrier) -> np.ndarray:
        """The blocks in which all that are expected have come."""
        if number == CLUSTER:
            size = self._state.cluster_size
            arrived = barrier.arrived.reshape(-1, size).sum(1)
            together = (arrived >= self._alive.reshape(-1, size).sum(1)) & (arrived > 0)
            return np.repeat(together, size)
        expected = np.where(barrier.expected == 0, self._alive, barrier.expected)
        return (barrier.arrived >= expected) & (barrier.arrived > 0)

    def _check_agreement(self, going: list[_Waiter], done: np.ndarray) -> None:
        """Check that all threads of a block have come to the same barrier of the text."""
        block_of = self._batch.per_thread["block"]
        place: dict[int, _Waiter] = {}
        for waiter in going:
            for one in np.unique(block_of[waiter.threads]):
                other = place.setdefault(int(one), waiter)
                if other.block.index != waiter.block.index:
                    raise self._fault("threads of one block wait at different barriers", int(one), [other, waiter])
        missing = done & (self._alive < self._batch.threads_per_block)
        if missing.any() and not self._state.exited_lanes:
            block = int(np.argmax(missing))
            gone = self._batch.threads_per_block - int(self._alive[block])
            raise self._fault(
                f"{gone} threads of the block have exited before its barrier. GPUs wait for the others alone, but CUDA does "
                "not promise it: let all threads come, or ask for simulate(exited_lanes=True)",
                block,
                [place[block]],
            )

    def _check_warps(self, going: list[_Waiter]) -> None:
        """Check at a cluster's barrier that warps marked `.aligned` are at one place; others may be at several, or gone."""
        place: dict[int, _Waiter] = {}
        for waiter in going:
            if "aligned" not in self._state.listing.instructions[waiter.block.first + waiter.block.size - 1].modifiers:
                continue
            for warp in np.unique(self._batch.per_thread["warp"][waiter.threads]):
                other = place.setdefault(int(warp), waiter)
                if other.block.index != waiter.block.index:
                    block = int(self._batch.per_thread["block"][waiter.threads[0]])
                    raise self._fault(
                        "threads of one warp wait at different barriers of the cluster", block, [other, waiter]
                    )

    def _fault(self, what: str, block: int, waiters: list[_Waiter]) -> BarrierFault:
        return BarrierFault("\n".join([f"{self._state.listing.kernel}: {what}", *self._places(block, waiters)]))

    def _places(self, block: int, waiters: list[_Waiter]) -> list[str]:
        lines = [f"  block {self._batch.block_name(block)}"]
        block_of = self._batch.per_thread["block"]
        for waiter in waiters:
            own = waiter.threads[block_of[waiter.threads] == block]
            if len(own):
                lines.append(f"{len(own)} threads, first {self._batch.thread_name(int(own[0]))}, wait at")
                lines += self._state.listing.describe(waiter.block.first + waiter.block.size - 1)
        return lines

    def _reduce(self, going: list[_Waiter]) -> None:
        """bar.red: a value over all threads of each block, into each one's register."""
        reduction = going[0].block.reduction if going else None
        if reduction is None:
            return
        threads = np.concatenate([waiter.threads for waiter in going])
        predicate = np.concatenate([waiter.predicate for waiter in going if waiter.predicate is not None])
        block = self._batch.per_thread["block"][threads]
        true = np.bincount(block, weights=predicate, minlength=self._batch.blocks).astype(np.int64)
        count = np.bincount(block, minlength=self._batch.blocks)
        value = {"popc": true, "or": true > 0, "and": true == count}[reduction.operation]
        register = self._state.registers[reduction.register]
        register[threads] = value[block].astype(register.dtype)

    def places(self) -> list[tuple[int, np.ndarray]]:
        """Places where threads wait: (number of the instruction, the threads)."""
        waiters = [waiter for barrier in self._barriers.values() for waiter in barrier.waiters]
        return [(waiter.block.first + waiter.block.size - 1, waiter.threads) for waiter in waiters]

    def describe(self) -> list[str]:
        """Describe who waits for whom, once nothing can go on."""
        lines = []
        for barrier in self._barriers.values():
            block_of = self._batch.per_thread["block"]
            if barrier.waiters:
                block = int(block_of[barrier.waiters[0].threads[0]])
                expected = int(barrier.expected[block]) or int(self._alive[block])
                lines += self._places(block, barrier.waiters)
                lines.append(f"  {int(barrier.arrived[block])} of {expected} threads have arrived")
        return lines


def _part(waiter: _Waiter, mask: np.ndarray) -> _Waiter:
    return _Waiter(waiter.threads[mask], waiter.block, None if waiter.predicate is None else waiter.predicate[mask])
