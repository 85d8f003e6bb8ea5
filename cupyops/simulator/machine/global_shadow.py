"""Checks of global memory: races, and reads of what no kernel has written.

Blocks run one after the other or side by side, in no order that a kernel may count on, and so do the threads of a block
between two barriers. Each granule keeps who touched it last in each way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import Race, Uninitialized
from ..memory import POISON, WORDS, Allocation
from .faults import fault
from .global_records import (
    NEVER,
    NOBODY,
    SEVERAL,
    BlockRecord,
    Check,
    Owners,
    Touch,
    Way,
    block_of,
    index_of,
    warp_of,
    who_is,
)
from .group import Group
from .space import Access
from .state import State
from .warp_order import TIMES, Past

_PC_MASK = (1 << 20) - 1  # of times: the instruction
_DONE = {
    Way.WRITE: "written",
    Way.READ: "read",
    Way.ATOMIC: "updated atomically",
    Way.BLOCK_ATOMIC: "updated atomically",
}
# what an access in each way conflicts with
_AGAINST = {
    Way.READ: {Way.WRITE, Way.ATOMIC, Way.BLOCK_ATOMIC},
    Way.WRITE: {Way.WRITE, Way.READ, Way.ATOMIC, Way.BLOCK_ATOMIC},
    Way.ATOMIC: {Way.WRITE, Way.READ},
    Way.BLOCK_ATOMIC: {Way.WRITE, Way.READ},
}
# and with what of other blocks beside
_BETWEEN = {Way.ATOMIC: {Way.BLOCK_ATOMIC}, Way.BLOCK_ATOMIC: {Way.ATOMIC, Way.BLOCK_ATOMIC}}


class GlobalShadow:
    """Races within blocks and between them, and reads of global memory that no kernel has written.

    Only allocations that the kernel writes are watched. A barrier orders the threads of a block. A fence by the writer and
    then an atomic, volatile or acquiring access by the reader order two blocks, or two threads of one.
    """

    def __init__(self, state: State, granule: int) -> None:
        self._state = state
        self._granule = granule
        self._owners: dict[int, Owners] = {}  # by allocation, where no two blocks have met
        self._records: dict[int, dict[Way, BlockRecord]] = {}  # where they have
        # by block: when it ran them, and until when the accesses of each of its warps were before that
        self._fences: defaultdict[int, list[tuple[int, np.ndarray]]] = defaultdict(list)
        self._acquired: defaultdict[int, int] = defaultdict(lambda: NEVER)  # when it last met what others had released
        self._relaxed: set[int] = set()  # blocks that have met others by what orders nothing without a fence

    def read(self, group: Group, load: Access) -> None:
        """A load."""
        allocation, position, width, pc = load.region, load.position, load.width, load.pc
        assert isinstance(allocation, Allocation)
        if allocation.written is not None:
            self._written(group, allocation, position, width, pc)
        if load.strong:
            self.acquire(group, pc)
            return
        if allocation.number not in self._state.watched:
            return
        access = self._access("read", group, allocation, pc)
        if load.constant:
            self._unchanged(access, position, width)
        self._touch(access, Way.READ, position, width)

    def write(self, group: Group, store: Access, values: Sequence[Any]) -> None:
        """A store."""
        allocation, position, width, pc = store.region, store.position, store.width, store.pc
        assert isinstance(allocation, Allocation)
        if allocation.written is not None:
            _mark_written(allocation, position, width)
        access = self._access("write", group, allocation, pc)
        self._touch(access, Way.ATOMIC if store.strong else Way.WRITE, position, width, values)

    def atomic(
        self, group: Group, allocation: Allocation, position: np.ndarray, width: int, pc: int, of_block: bool
    ) -> None:
        """An atomic update, of the scope of a block or a wider one."""
        if allocation.written is not None:
            self._written(group, allocation, position, width, pc)
            _mark_written(allocation, position, width)
        access = self._access("update atomically", group, allocation, pc)
        self._touch(access, Way.BLOCK_ATOMIC if of_block else Way.ATOMIC, position, width)
        self.acquire(group, pc, of_block)

    def fence(self, group: Group, pc: int, past: Past, releases: bool) -> None:
        """A membar or fence: what lies behind these threads is before what follows, for other blocks too."""
        until = np.maximum(past.until[TIMES], self._state.synced[past.blocks][:, None])
        for block, own in zip(group.batch.block_numbers[past.blocks].tolist(), until):
            self._release(block, self._state.now(pc), own)
            if not releases and block in self._relaxed:
                self._acquired[block] = self._state.now(pc)

    def _release(self, block: int, now: int, until: np.ndarray) -> None:
        fences = self._fences[block]
        fences.append((now, np.maximum(fences[-1][1], until) if fences else until))

    def acquire(self, group: Group, pc: int, of_block: bool = False) -> None:
        """Order these threads' later accesses behind what others have released so far."""
        orders = self._state.meet(group, pc)
        if of_block:
            return
        blocks = np.unique(self._blocks(group)).tolist()
        if not orders:  # until they run a fence
            self._relaxed.update(blocks)
            return
        for block in blocks:
            self._acquired[block] = self._state.now(pc)

    def cluster_barrier(self, blocks: np.ndarray) -> None:
        """Let these blocks pass a barrier together: all that they did is before all that they will do."""
        for block in blocks.tolist():
            now = self._state.now(_PC_MASK)
            self._release(block, now, np.full(self._state.batch.warps_per_block, now))
            self._acquired[block] = now

    # --- the rules ---

    def _access(self, verb: str, group: Group, allocation: Allocation, pc: int) -> _Access:
        who = group.once("who of the grid", lambda: self._who(group))
        return _Access(verb, group, allocation, who, pc)

    def _who(self, group: Group) -> np.ndarray:
        return who_is(self._blocks(group), group.threads % group.batch.threads_per_block)

    def _blocks(self, group: Group) -> np.ndarray:
        return group.once("block number", lambda: group.batch.block_numbers.take(group.get("block")))

    def _touch(
        self, access: _Access, way: Way, position: np.ndarray, width: int, values: Sequence[Any] | None = None
    ) -> None:
        """Check an access of `width` bytes at each position, and record it."""
        number = access.allocation.number
        stored = values if way is Way.WRITE else None
        if number not in self._records:
            if number not in self._owners:
                self._owners[number] = Owners(len(access.allocation.buffer), self._granule)
            touch = Touch(way, access.who, position, width, self._state.now(access.pc))
            if self._owners[number].takes(touch, *self._rules(access, way, position, width, stored)):
                return
            self._records[number] = self._owners.pop(number).records()
        self._touch_shared(access, way, position, width, stored)

    def _rules(
        self, access: _Access, way: Way, position: np.ndarray, width: int, values: Sequence[Any] | None
    ) -> tuple[Check, Callable[[np.ndarray, np.ndarray], None] | None]:
        """Rules by which `Owners` judges an access where no other block has been: see `Owners.takes`."""

        def changes(granule: np.ndarray) -> np.ndarray:
            assert values is not None
            return self._changes(access.allocation, granule.shape, position, width, values)

        def check(granule: np.ndarray, before: np.ndarray, times: dict[Way, np.ndarray]) -> np.ndarray:
            concurrent = self._concurrent(access, before, np.max(list(times.values()), axis=0))
            if concurrent.any():
                for other in sorted(_AGAINST[way] & times.keys()):
                    harmful = None if values is None or other is not Way.WRITE else changes
                    self._within(access, granule, before, times[other], other, position, width, harmful)
            return concurrent

        if values is None:
            return check, None
        return check, lambda granule, lost: self._one_value(access, granule, lost, position, width, values)

    def _touch_shared(
        self, access: _Access, way: Way, position: np.ndarray, width: int, values: Sequence[Any] | None
    ) -> None:
        """Check and record an access where several blocks have been."""
        records = self._records[access.allocation.number]
        element = width // len(values) if values is not None else width
        for number, granule in enumerate(self._granules(position, width)):
            harmful = None
            if values is not None:
                place = number * self._granule // element
                value, index = np.asarray(values[place]), position // element + place
                harmful = _differ(access.allocation.view(value.dtype)[index], value)
            for other in sorted(_AGAINST[way] | _BETWEEN.get(way, set())):
                harms = harmful if other is Way.WRITE else None
                self._against(records[other], _DONE[other], access, granule, harms)
                if other in _AGAINST[way] and records[other].used:
                    before, time = records[other].last(granule)
                    changes = None if harms is None else lambda _, harms=harms: harms
                    self._within(access, granule, before, time, other, position, width, changes)
            records[way].note(access.who, granule, self._state.now(access.pc))
            if values is not None:
                self._one_writer(records[way], access, granule, value)
            if way is Way.BLOCK_ATOMIC:
                self._one_block(records[way], access, granule)

    def _granules(self, position: np.ndarray, width: int) -> list[np.ndarray]:
        first = position // self._granule
        return [first + k if k else first for k in range(max(1, width // self._granule))]

    def _changes(
        self, allocation: Allocation, shape: tuple[int, ...], position: np.ndarray, width: int, values: Sequence[Any]
    ) -> np.ndarray:
        """Mask of stores that change what is there: a row for each granule, or for each value if they are more."""
        element = width // len(values)
        rows = []
        for place, given in enumerate(values):
            value = np.asarray(given)
            rows.append(
                np.broadcast_to(_differ(allocation.view(value.dtype)[position // element + place], value), shape[1:])
            )
        each = max(1, len(rows) // shape[0])
        joined = [np.any(rows[row : row + each], axis=0) for row in range(0, len(rows), each)]
        return np.repeat(joined, max(1, shape[0] // len(joined)), axis=0)

    def _within(
        self,
        access: _Access,
        granule: np.ndarray,
        before: np.ndarray,
        time: np.ndarray,
        way: Way,
        position: np.ndarray,
        width: int,
        changes: Callable[[np.ndarray], np.ndarray] | None,
    ) -> None:
        """Raise if another thread of the block has made an access in this way, and nothing orders the two."""
        state, group = self._state, access.group
        bad = self._concurrent(access, before, time)
        if changes is not None and bad.any():
            bad &= changes(granule)
        if not bad.any():
            return
        column = int(np.argmax(bad.any(0))) if bad.ndim > 1 else int(np.argmax(bad))
        row = int(np.argmax(bad[:, column])) if bad.ndim > 1 else 0
        at = (row, column) if bad.ndim > 1 else column
        index, name = int(index_of(before[at])), access.allocation.name
        party = "several threads of it have"
        if index < 1024:
            party = f"{group.batch.thread_name(int(group.get('block')[column]) * group.batch.threads_per_block + index)} has"
        guilty, offset = bad.any(0) if bad.ndim > 1 else bad, int(position[column]) - access.allocation.low
        offset += row * (width // len(bad)) if bad.ndim > 1 else 0
        done = f"another thread has {_DONE[way]}, with no barrier in between"
        what = f"race within a block: {access.verb} `{name}` where {done}"
        detail = f"offset {offset} of `{name}`, which {party} {_DONE[way]}"
        also = int(time[at]) & _PC_MASK
        raise fault(Race, state.listing, group, guilty, what, access.pc, detail=detail, also=also)

    def _concurrent(self, access: _Access, before: np.ndarray, time: np.ndarray) -> np.ndarray:
        """Mask of accesses after one of another thread of the block, with nothing that orders the two."""
        state, group = self._state, access.group
        synced = state.synced.take(group.get("block"))
        found = (time > synced) & (before != access.who) & (block_of(before ^ access.who) == 0)
        if found.any():
            in_warp = warp_of(before) == warp_of(access.who)
            found &= ~in_warp | state.unordered_in_warp(group, index_of(before), time)
        if state.order and found.any():
            other = np.where(index_of(before) == SEVERAL, -1, warp_of(before))
            found &= ~state.order.ordered(TIMES, group.get("warp"), other, time, state.now(access.pc))
        return found

    def _one_value(
        self,
        access: _Access,
        granule: np.ndarray,
        lost: np.ndarray,
        position: np.ndarray,
        width: int,
        values: Sequence[Any],
    ) -> None:
        """Check that threads of one instruction write one value to one place."""
        element = width // len(values)
        for place, given in enumerate(values):
            value = np.asarray(given)
            if value.ndim == 0:
                continue
            index = position // element + place
            order = np.argsort(index, kind="stable")
            last = order[np.searchsorted(index[order], index, "right") - 1]  # whose value stays
            bad = _differ(value[last], value)
            if bad.any():
                name, first = access.allocation.name, int(np.argmax(bad))
                what = (
                    f"race within a block: threads of one instruction write different values to one place of `{name}`"
                )
                other = access.group.batch.thread_name(int(access.group.threads[last[first]]))
                offset = int(index[first]) * element - access.allocation.low
                detail = f"offset {offset} of `{name}`, which {other} writes too"
                raise fault(Race, self._state.listing, access.group, bad, what, access.pc, detail=detail)

    def _unchanged(self, access: _Access, position: np.ndarray, width: int) -> None:
        """ld.global.nc reads nothing that this launch has written: it may have come to the cache before."""
        number, time = access.allocation.number, None
        if number in self._records:
            found = [record for way, record in self._records[number].items() if way is not Way.READ and record.used]
            times = [record.last(one)[1] for record in found for one in self._granules(position, width)]
            time = np.max(times, axis=0) if times else None
        elif number in self._owners:
            time = self._owners[number].changed(position, width)
        if time is None or not (bad := time != NEVER).any():
            return
        name, first = access.allocation.name, int(np.argmax(bad))
        what = (
            f"read of `{name}` by ld.global.nc where this launch has written: the cache may hold what was there before. "
            "__ldg() and `const __restrict__` pointers are for what no thread writes while the kernel runs"
        )
        detail = f"offset {int(position[first]) - access.allocation.low} of `{name}`"
        also = int(time[first]) & _PC_MASK
        raise fault(Race, self._state.listing, access.group, bad, what, access.pc, detail=detail, also=also)

    def _against(
        self, record: BlockRecord, done: str, access: _Access, granule: np.ndarray, harmful: np.ndarray | None = None
    ) -> None:
        """Raise if another block has made an access of this kind, and nothing orders the two."""
        if not record.used:
            return
        block = access.block
        for who, time in record.last_two(granule):
            other = block_of(who)
            bad = (other != NOBODY) & (other != block)
            if harmful is not None:
                bad &= harmful
            if bad.any():
                bad[bad] = ~self._ordered(who[bad], time[bad], block[bad])
            if bad.any():
                first = int(np.argmax(bad))
                party = f"block {_block_name(access.group, int(other[first]))} has"
                self._report(access, bad, granule, done, party, int(time[first]) & _PC_MASK)

    def _ordered(self, who: np.ndarray, time: np.ndarray, block: np.ndarray) -> np.ndarray:
        """Mask of accesses at `time` that lie behind a fence of their block which `block` has met after that."""
        if not self._fences:
            return np.zeros(len(time), np.bool_)
        warp = np.where(index_of(who) == SEVERAL, -1, warp_of(who))
        cases, number = np.unique(np.stack([block_of(who), warp, time, block]), axis=1, return_inverse=True)
        found = np.zeros(cases.shape[1], np.bool_)
        for case, (writer, its_warp, when, reader) in enumerate(cases.T.tolist()):
            fences = self._fences[writer]
            met = bisect_right(fences, self._acquired[reader], key=lambda fence: fence[0]) - 1
            if met >= 0:
                until = fences[met][1]
                found[case] = when < int(until.max() if its_warp < 0 else until[its_warp])
        return found[number.reshape(-1)]

    def _one_writer(self, record: BlockRecord, access: _Access, granule: np.ndarray, value: np.ndarray) -> None:
        """Threads that write one place with one instruction write one value."""
        last_writer = record.last(granule)[0]
        lost = last_writer != access.who
        if not lost.any() or value.ndim == 0:
            return
        order = np.argsort(granule, kind="stable")
        last = order[np.searchsorted(granule[order], granule, "right") - 1]  # whose value stays
        lost &= _differ(value[last], value)
        if lost.any():
            other = int(last[int(np.argmax(lost))])
            party = f"block {_block_name(access.group, int(access.block[other]))} has"
            self._report(access, lost, granule, "written", party, access.pc)

    def _one_block(self, record: BlockRecord, access: _Access, granule: np.ndarray) -> None:
        """Check that threads that update one place with one instruction of the scope of a block are of one block."""
        last = block_of(record.last(granule)[0])
        bad = last != access.block
        if bad.any():
            party = f"block {_block_name(access.group, int(last[int(np.argmax(bad))]))} has"
            self._report(access, bad, granule, _DONE[Way.BLOCK_ATOMIC], party, access.pc)

    def _report(self, access: _Access, bad: np.ndarray, granule: np.ndarray, done: str, party: str, also: int) -> None:
        name, first = access.allocation.name, int(np.argmax(bad))
        what = f"race between blocks: {access.verb} `{name}` where another block has {done}"
        offset = int(granule[first]) * self._granule - access.allocation.low
        detail = f"offset {offset} of `{name}`, which {party} {done}"
        raise fault(Race, self._state.listing, access.group, bad, what, access.pc, detail=detail, also=also)

    def _written(self, group: Group, allocation: Allocation, position: np.ndarray, width: int, pc: int) -> None:
        """Check that nothing that was read is as `torch.empty` left it."""
        assert allocation.written is not None
        size = min(width, 4)
        kind = np.dtype(f"u{size}").type
        every, poison = (kind(int.from_bytes(bytes([byte]) * size, "little")) for byte in (1, POISON))
        for step in range(0, width, size):
            index = (position + step) // size
            missing = allocation.written.view(kind)[index] ^ every  # a 1 for each byte that no kernel has written
            if not missing.any():
                continue
            # bytes that something else than a kernel has written since do not hold the pattern any more
            changed = (allocation.view(kind)[index] ^ poison) & (missing * kind(0xFF))
            bad = (missing != 0) & (changed == 0)
            if bad.any():
                first = int(position[int(np.argmax(bad))]) + step - allocation.low
                what = f"read of `{allocation.name}` where nothing was written"
                detail = f"offset {first} of `{allocation.name}` ({allocation.high - allocation.low} bytes)"
                raise fault(Uninitialized, self._state.listing, group, bad, what, pc, detail=detail)


@dataclass(frozen=True)
class _Access:
    """Access under way: the threads, and what they do to which memory."""

    verb: str
    group: Group
    allocation: Allocation
    who: np.ndarray
    pc: int

    @property
    def block(self) -> np.ndarray:
        """The number of each thread's block in the grid."""
        return block_of(self.who)


def _differ(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Mask of values that differ in a bit."""
    bits = f"u{other.dtype.itemsize}"
    return one.view(bits) != other.view(bits)


def _mark_written(allocation: Allocation, position: np.ndarray, width: int) -> None:
    assert allocation.written is not None
    all_written = np.ones(width, np.uint8).view(WORDS[width])
    allocation.written.view(WORDS[width])[position >> (width.bit_length() - 1)] = all_written


def _block_name(group: Group, number: int) -> str:
    x, y, _ = group.batch.grid
    return f"({number % x},{number // x % y},{number // (x * y)})"
