"""What is remembered of global memory: races between blocks, and reads of what no kernel has written.

Blocks run one after the other or side by side, in no order that a kernel may count on. Each granule keeps which blocks
touched it last in each way.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import Race, Uninitialized
from ..memory import POISON, WORDS, Allocation
from .faults import fault
from .global_records import NEVER, NOBODY, BlockRecord, Owners, Way
from .group import Group
from .state import State

# times count instructions issued, then the instruction within the stretch that was issued at once
_PC_BITS, _PC_MASK = 20, (1 << 20) - 1


class GlobalShadow:
    """Races between the blocks of one launch, and reads of global memory that no kernel has written.

    Only allocations that the kernel writes are watched. A fence by the writer and then an atomic, volatile or acquiring
    access by the reader order the two.
    """

    def __init__(self, state: State, granule: int) -> None:
        self._state = state
        self._granule = granule
        self._owners: dict[int, Owners] = {}  # by allocation, where no two blocks have met
        self._records: dict[int, dict[Way, BlockRecord]] = {}  # where they have
        self._fences: defaultdict[int, list[int]] = defaultdict(list)  # by block: when it ran them
        self._acquired: defaultdict[int, int] = defaultdict(lambda: NEVER)  # when it last met what others had released

    def read(
        self, group: Group, allocation: Allocation, position: np.ndarray, width: int, pc: int, strong: bool
    ) -> None:
        """A load of `width` bytes at each position."""
        if allocation.written is not None:
            self._written(group, allocation, position, width, pc)
        if strong:
            self.acquire(group, pc)
            return
        if allocation.number not in self._state.watched:
            return
        access = _Access("read", group, allocation, self._blocks(group), pc)
        records = self._records_if_met(Way.READ, access, position, width)
        if records is None:
            return
        for granule in self._granules(position, width):
            self._against(records[Way.WRITE], "written", access, granule)
            self._against(records[Way.ATOMIC], "updated atomically", access, granule)
            records[Way.READ].note(access.block, granule, self._now(pc))

    def write(
        self,
        group: Group,
        allocation: Allocation,
        position: np.ndarray,
        values: Sequence[Any],
        width: int,
        pc: int,
        strong: bool,
    ) -> None:
        """A store."""
        if allocation.written is not None:
            _mark_written(allocation, position, width)
        access = _Access("write", group, allocation, self._blocks(group), pc)
        records = self._records_if_met(Way.ATOMIC if strong else Way.WRITE, access, position, width)
        if records is None:
            return
        writes = records[Way.WRITE]
        element = width // len(values)
        for number, granule in enumerate(self._granules(position, width)):
            if strong:
                records[Way.ATOMIC].note(access.block, granule, self._now(pc))
                continue
            place = number * self._granule // element
            value, index = np.asarray(values[place]), position // element + place
            self._against(writes, "written", access, granule, _differ(allocation.view(value.dtype)[index], value))
            self._against(records[Way.READ], "read", access, granule)
            self._against(records[Way.ATOMIC], "updated atomically", access, granule)
            writes.note(access.block, granule, self._now(pc))
            self._one_writer(writes, access, granule, value)

    def atomic(self, group: Group, allocation: Allocation, position: np.ndarray, width: int, pc: int) -> None:
        """An atomic update."""
        if allocation.written is not None:
            self._written(group, allocation, position, width, pc)
            _mark_written(allocation, position, width)
        self.acquire(group, pc)
        access = _Access("update atomically", group, allocation, self._blocks(group), pc)
        records = self._records_if_met(Way.ATOMIC, access, position, width)
        if records is None:
            return
        for granule in self._granules(position, width):
            self._against(records[Way.WRITE], "written", access, granule)
            self._against(records[Way.READ], "read", access, granule)
            records[Way.ATOMIC].note(access.block, granule, self._now(pc))

    def fence(self, group: Group, pc: int) -> None:
        """A membar or fence of device scope or wider: earlier accesses of these blocks are before what follows."""
        for block in np.unique(self._blocks(group)).tolist():
            self._fences[block].append(self._now(pc))

    def acquire(self, group: Group, pc: int) -> None:
        """What other blocks have released so far is before what these blocks do from here on."""
        for block in np.unique(self._blocks(group)).tolist():
            self._acquired[block] = self._now(pc)

    def cluster_barrier(self, blocks: np.ndarray) -> None:
        """These blocks have come through a barrier together: all that they did is before all that they will do."""
        for block in blocks.tolist():
            self._fences[block].append(self._now(_PC_MASK))
            self._acquired[block] = self._now(_PC_MASK)

    # --- the rules ---

    def _now(self, pc: int) -> int:
        return self._state.clock << _PC_BITS | pc

    def _blocks(self, group: Group) -> np.ndarray:
        return group.once("block number", lambda: group.batch.block_numbers.take(group.get("block")))

    def _records_if_met(
        self, way: Way, access: _Access, position: np.ndarray, width: int
    ) -> dict[Way, BlockRecord] | None:
        """The records of the allocation, once two blocks have met there; before, the access is noted right here."""
        number = access.allocation.number
        if number in self._records:
            return self._records[number]
        if number not in self._owners:
            self._owners[number] = Owners(len(access.allocation.buffer), self._granule)
        if self._owners[number].takes(way, access.block, position, width, self._now(access.pc)):
            return None
        self._records[number] = self._owners.pop(number).records()
        return self._records[number]

    def _granules(self, position: np.ndarray, width: int) -> list[np.ndarray]:
        first = position // self._granule
        return [first + k if k else first for k in range(max(1, width // self._granule))]

    def _against(
        self, record: BlockRecord, done: str, access: _Access, granule: np.ndarray, harmful: np.ndarray | None = None
    ) -> None:
        """Another block has made an access of this kind, and nothing orders the two."""
        if not record.used:
            return
        for other, time in record.last_two(granule):
            bad = (other != NOBODY) & (other != access.block)
            if harmful is not None:
                bad &= harmful
            if bad.any():
                bad[bad] = ~self._ordered(other[bad], time[bad], access.block[bad])
            if bad.any():
                first = int(np.argmax(bad))
                party = f"block {_block_name(access.group, int(other[first]))} has"
                self._report(access, bad, granule, done, party, int(time[first]) & _PC_MASK)

    def _ordered(self, other: np.ndarray, time: np.ndarray, block: np.ndarray) -> np.ndarray:
        """Whether `other` has fenced since `time`, and `block` has met it after that."""
        cases, number = np.unique(np.stack([other, time, block]), axis=1, return_inverse=True)
        found = np.empty(cases.shape[1], np.bool_)
        for case, (writer, when, reader) in enumerate(cases.T.tolist()):
            fences = self._fences[writer]
            after = bisect_right(fences, when)
            found[case] = after < len(fences) and self._acquired[reader] >= fences[after]
        return found[number.reshape(-1)]

    def _one_writer(self, record: BlockRecord, access: _Access, granule: np.ndarray, value: np.ndarray) -> None:
        """Blocks that write one place with one instruction write one value."""
        lost = record.block[granule] != access.block
        if not lost.any() or value.ndim == 0:
            return
        order = np.argsort(granule, kind="stable")
        last = order[np.searchsorted(granule[order], granule, "right") - 1]  # whose value stays
        lost &= _differ(value[last], value)
        if lost.any():
            party = f"block {_block_name(access.group, int(access.block[last[int(np.argmax(lost))]]))} has"
            self._report(access, lost, granule, "written", party, access.pc)

    def _report(self, access: _Access, bad: np.ndarray, granule: np.ndarray, done: str, party: str, also: int) -> None:
        name, first = access.allocation.name, int(np.argmax(bad))
        what = f"race between blocks: {access.verb} `{name}` where another block has {done}"
        offset = int(granule[first]) * self._granule - access.allocation.low
        detail = f"offset {offset} of `{name}`, which {party} {done}"
        raise fault(Race, self._state.listing, access.group, bad, what, access.pc, detail=detail, also=also)

    def _written(self, group: Group, allocation: Allocation, position: np.ndarray, width: int, pc: int) -> None:
        """Nothing that was read is as `torch.empty` left it."""
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
    """What is going on: the threads' blocks, and what they do to which memory."""

    verb: str
    group: Group
    allocation: Allocation
    block: np.ndarray
    pc: int


def _differ(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Whether the bits do."""
    bits = f"u{other.dtype.itemsize}"
    return one.view(bits) != other.view(bits)


def _mark_written(allocation: Allocation, position: np.ndarray, width: int) -> None:
    assert allocation.written is not None
    all_written = np.ones(width, np.uint8).view(WORDS[width])
    allocation.written.view(WORDS[width])[position >> (width.bit_length() - 1)] = all_written


def _block_name(group: Group, number: int) -> str:
    x, y, _ = group.batch.grid
    return f"({number % x},{number // x % y},{number // (x * y)})"
