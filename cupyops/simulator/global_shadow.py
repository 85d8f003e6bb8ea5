"""What is remembered of global memory: races between blocks, and reads of what no kernel has written.

Blocks run one after the other or side by side, in no order that a kernel may count on. Each granule keeps which block
touched it last in each way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from .errors import Race, Uninitialized
from .faults import fault
from .group import Group
from .memory import POISON, Allocation
from .state import State

_NOBODY, _SEVERAL = -1, -2


class GlobalShadow:
    """Races between the blocks of one launch, and reads of global memory that no kernel has written.

    Only allocations that the kernel writes are watched. A fence by the writer and then an atomic, volatile or acquiring
    access by the reader order the two.
    """

    def __init__(self, state: State, granule: int, blocks: int) -> None:
        self._state = state
        self._granule = granule
        self._records: dict[int, tuple[_BlockRecord, _BlockRecord, _BlockRecord]] = {}
        self.released = np.full(blocks, -1, np.int64)  # by block: when it last ran a fence
        self.acquired = np.full(blocks, -1, np.int64)  # when it last met others through an atomic or a strong load

    def read(
        self, group: Group, allocation: Allocation, position: np.ndarray, width: int, pc: int, strong: bool
    ) -> None:
        """A load of `width` bytes at each position."""
        if allocation.written is not None:
            self._written(group, allocation, position, width, pc)
        if allocation.number not in self._state.watched:
            return
        block = self._blocks(group)
        if strong:
            self.acquired[block] = self._state.clock
        writes, reads, atomics = self._of(allocation)
        for granule in self._granules(position, width):
            self._against(writes, "written", "read", group, allocation, block, granule, pc, strong)
            if not strong:
                self._against(atomics, "updated atomically", "read", group, allocation, block, granule, pc)
                reads.note(block, granule, self._state.clock, pc)

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
        block = self._blocks(group)
        writes, reads, atomics = self._of(allocation)
        for number, granule in enumerate(self._granules(position, width)):
            changed = self._changes(allocation, position, values, width, number)
            self._against(writes, "written", "write", group, allocation, block, granule, pc, strong, changed)
            if not strong:
                self._against(reads, "read", "write", group, allocation, block, granule, pc)
                self._against(atomics, "updated atomically", "write", group, allocation, block, granule, pc)
            (atomics if strong else writes).note(block, granule, self._state.clock, pc)

    def atomic(self, group: Group, allocation: Allocation, position: np.ndarray, width: int, pc: int) -> None:
        """An atomic update."""
        if allocation.written is not None:
            self._written(group, allocation, position, width, pc)
            _mark_written(allocation, position, width)
        block = self._blocks(group)
        self.acquired[block] = self._state.clock
        writes, reads, atomics = self._of(allocation)
        for granule in self._granules(position, width):
            self._against(writes, "written", "update atomically", group, allocation, block, granule, pc)
            self._against(reads, "read", "update atomically", group, allocation, block, granule, pc)
            atomics.note(block, granule, self._state.clock, pc)

    def fence(self, group: Group) -> None:
        """A membar or fence of device scope or wider: earlier writes of these blocks are out."""
        self.released[np.unique(self._blocks(group))] = self._state.clock

    # --- the rules ---

    def _blocks(self, group: Group) -> np.ndarray:
        return group.batch.block_numbers[group.get("block")]

    def _of(self, allocation: Allocation) -> tuple[_BlockRecord, _BlockRecord, _BlockRecord]:
        found = self._records.get(allocation.number)
        if found is None:
            count = -(-len(allocation.buffer) // self._granule)
            found = self._records[allocation.number] = (_BlockRecord(count), _BlockRecord(count), _BlockRecord(count))
        return found

    def _granules(self, position: np.ndarray, width: int) -> list[np.ndarray]:
        first = position // self._granule
        return [first + k if k else first for k in range(max(1, width // self._granule))]

    def _changes(
        self, allocation: Allocation, position: np.ndarray, values: Sequence[Any], width: int, number: int
    ) -> np.ndarray | None:
        """Whether the store puts another value there: blocks that all write one value do no harm. None: cannot tell."""
        if self._granule * len(values) != width:
            return None
        value = np.asarray(values[number])
        return allocation.view(value.dtype)[position // value.itemsize + number].view(
            f"u{value.itemsize}"
        ) != value.view(f"u{value.itemsize}")

    def _against(
        self,
        record: _BlockRecord,
        done: str,
        verb: str,
        group: Group,
        allocation: Allocation,
        block: np.ndarray,
        granule: np.ndarray,
        pc: int,
        strong: bool = False,
        changed: np.ndarray | None = None,
    ) -> None:
        if not record.used:
            return
        other = record.block[granule]
        bad = (other != _NOBODY) & (other != block)
        if not bad.any():
            return
        # published: the other block has fenced since, and this one has met it after that
        released = np.where(other >= 0, self.released[np.maximum(other, 0)], -1)
        bad &= ~((released > record.time[granule]) & (self.acquired[block] >= released))
        if changed is not None:
            bad &= changed
        if bad.any() and not strong:
            first = int(np.argmax(bad))
            party = f"block {_block_name(group, int(other[first]))} has" if other[first] >= 0 else "several blocks have"
            what = f"race between blocks: {verb} `{allocation.name}` where another block has {done}"
            offset = int(granule[first]) * self._granule - allocation.low
            detail = f"offset {offset} of `{allocation.name}`, which {party} {done}"
            also = int(record.pc[granule[first]])
            raise fault(Race, self._state.listing, group, bad, what, pc, detail=detail, also=also)

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


class _BlockRecord:
    """For each granule, the last block that touched it in one way, when, and by which instruction."""

    def __init__(self, granules: int) -> None:
        self._granules = granules
        self.used = False
        self.block = self.time = self.pc = np.empty(0)

    def note(self, block: np.ndarray, granule: np.ndarray, clock: int, pc: int) -> None:
        """This access is the last one now. Accesses by several blocks are nobody's in particular."""
        if not self.used:
            self.used = True
            self.block = np.full(self._granules, _NOBODY, np.int64)
            self.time = np.full(self._granules, -1, np.int64)
            self.pc = np.zeros(self._granules, np.int32)
        before = self.block[granule]
        several = (before != _NOBODY) & (before != block)
        self.block[granule] = np.where(several, _SEVERAL, block) if several.any() else block
        lost = self.block[granule] != block
        if lost.any():
            self.block[granule[lost]] = _SEVERAL
        self.time[granule] = clock
        self.pc[granule] = pc


def _mark_written(allocation: Allocation, position: np.ndarray, width: int) -> None:
    assert allocation.written is not None
    size = min(width, 8)
    kind = np.dtype(f"u{size}").type
    every = int.from_bytes(b"\1" * size, "little")
    for step in range(0, width, size):
        allocation.written.view(kind)[(position + step) // size] = every


def _block_name(group: Group, number: int) -> str:
    x, y, _ = group.batch.grid
    return f"({number % x},{number // x % y},{number // (x * y)})"
