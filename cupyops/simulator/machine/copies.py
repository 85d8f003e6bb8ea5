"""Asynchronous copies: cp.async, bulk copies, TMA tiles.

A copy reads its source when it is issued. Its bytes land when the thread waits for its group, or when somebody asks the
mbarrier that it reports to; until then reading them is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import Misaligned, OutOfBounds
from ..memory import WORDS, space_of
from ..tensormap import TensorMap
from .faults import fault
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

    def part(self, mask: np.ndarray) -> _Copy:
        """Some of the threads."""
        return _Copy(self.threads[mask], self.position[mask], self.data[mask], self.number[mask])


@dataclass
class _Bulk:
    """A bulk copy into shared memory, under way."""

    position: np.ndarray  # of each byte
    start: int
    size: int
    data: np.ndarray
    barrier: int  # the mbarrier's position


class Copies:
    """All copies of a batch, and the mbarriers."""

    def __init__(self, state: State, spaces: Spaces) -> None:
        self._state = state
        self._spaces = spaces
        self._pending: list[_Copy] = []
        self._bulk: list[_Bulk] = []
        self._group_number = np.zeros(state.batch.threads, np.int64)
        self.barriers = MBarriers(state, spaces.shared, self.deliver)

    # --- cp.async ---

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
        self._pending.append(_Copy(group.threads, position, data, self._group_number.take(group.threads)))

    def _fetch(self, group: Group, source: np.ndarray, count: int, size: int, pc: int) -> np.ndarray:
        """The first `count` bytes at each address, which is a multiple of `size`; zeros behind them."""
        self._spaces.global_.check_alignment(group, source, size, "asynchronous copy", pc)
        if count == size:
            return self._spaces.global_.load(group, source, WORDS[size], size, 1, pc).view(np.uint8).reshape(-1, size)
        element = min(count & -count, 4)  # the largest power of two that divides it
        dtype = {1: np.uint8, 2: np.uint16, 4: np.uint32}[element]
        columns = [
            self._spaces.global_.load(group, source + np.uint64(start), dtype, element, 1, pc)
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
        left, landing = [], []
        for copy in self._pending:
            done = copy.number < end.take(copy.threads)
            count = np.count_nonzero(done)
            if count == len(done):
                landing.append(copy)
            elif count == 0:
                left.append(copy)
            else:
                landing.append(copy.part(done))
                left.append(copy.part(~done))
        self._pending = left
        for size in {copy.data.shape[1] for copy in landing}:
            self._land([copy for copy in landing if copy.data.shape[1] == size], size)

    def _land(self, copies: list[_Copy], size: int) -> None:
        """Their bytes, `size` of each thread's, arrive in shared memory, in the order in which they were asked for."""
        threads = np.concatenate([copy.threads for copy in copies])
        position = np.concatenate([copy.position for copy in copies])
        data = np.concatenate([copy.data for copy in copies])
        whole = WORDS[size]
        self._state.shared_memory.view(whole)[position // size] = data.view(whole)[:, 0]
        if self._spaces.shared.shadow is not None:
            self._spaces.shared.shadow.landed(Group(self._state.batch, threads, len(threads)), position, size)

    def arrive_when_done(self, group: Group, address: Any, in_count: bool, pc: int) -> None:
        """cp.async.mbarrier.arrive: the copies land now, and each thread arrives (`in_count`: as one of those expected)."""
        self.wait(group, None, pc)
        if in_count:
            self.barriers.arrive(group, address, np.uint32(1), np.uint32(0), False, pc)

    # --- bulk copies ---

    def bulk_load(
        self, group: Group, destination: Any, source: Any, size: Any, barrier: Any, blocks: Any, pc: int
    ) -> None:
        """cp.async.bulk from global to shared memory; `blocks`: a mask of those of the cluster, or None."""
        destination, source, size, barrier = self._spread(group, destination, source, size, barrier)
        for number, (one, dst, src, count, bar) in enumerate(self._each(group, destination, source, size, barrier)):
            self._check_bulk(one, int(count[0]), (int(dst[0]), int(src[0])), pc)
            addresses = src[0] + np.arange(int(count[0]), dtype=np.uint64)
            data = self._gather_global(one, addresses, pc)
            for place, report in self._in_blocks(one, dst, bar, self._mask(group, blocks, number), pc):
                self._start_bulk(one, place, data, None, report, pc)

    def bulk_from_shared(self, group: Group, destination: Any, source: Any, size: Any, barrier: Any, pc: int) -> None:
        """cp.async.bulk from the block's shared memory to another's of the cluster."""
        destination, source, size, barrier = self._spread(group, destination, source, size, barrier)
        for one, dst, src, count, bar in self._each(group, destination, source, size, barrier):
            self._check_bulk(one, int(count[0]), (int(dst[0]), int(src[0])), pc)
            data = self._gather_shared(one, src, int(count[0]), np.arange(int(count[0])), pc)
            self._start_bulk(one, dst, data, None, bar, pc)

    def bulk_store(self, group: Group, destination: Any, source: Any, size: Any, pc: int) -> None:
        """cp.async.bulk from shared to global memory; done at once."""
        destination, source, size, _ = self._spread(group, destination, source, size, 0)
        for one, dst, src, count, _ in self._each(group, destination, source, size, size):
            self._check_bulk(one, int(count[0]), (int(dst[0]), int(src[0])), pc)
            data = self._gather_shared(one, src, int(count[0]), np.arange(int(count[0])), pc)
            self._scatter_global(one, dst[0] + np.arange(int(count[0]), dtype=np.uint64), data, pc)

    def tile_load(
        self,
        group: Group,
        destination: Any,
        tensor: Any,
        coordinates: tuple[Any, ...],
        barrier: Any,
        blocks: Any,
        pc: int,
    ) -> None:
        """cp.async.bulk.tensor from global to shared memory: what lies outside the tensor is filled.

        `blocks`: a mask of those of the cluster that it goes to, or None.
        """
        destination, tensor, barrier, _ = self._spread(group, destination, tensor, barrier, 0)
        for number, one in enumerate(group.one_by_one()):
            at = slice(number, number + 1)
            map_ = self._tensor_map(one, tensor[at], pc)
            base = int(destination[at][0]) & (self._state.rank_unit - 1)
            place = self._place(one, map_, [group.spread(coordinate)[at] for coordinate in coordinates], pc)
            addresses, inside, offsets = (part.reshape(-1) for part in map_.tile(place, base))
            size = map_.element_size
            data = np.zeros((len(offsets), size), np.uint8)
            data[:] = np.frombuffer(int(map_.fill_bits).to_bytes(size, "little"), np.uint8)
            if inside.any():
                spread = (addresses[inside].astype(np.uint64)[:, None] + np.arange(size, dtype=np.uint64)).reshape(-1)
                data[inside] = self._gather_global(one, spread, pc).reshape(-1, size)
            order = (offsets[:, None] + np.arange(size)).reshape(-1)
            mask = self._mask(group, blocks, number)
            for to, report in self._in_blocks(one, destination[at], barrier[at], mask, pc):
                self._start_bulk(one, to, data.reshape(-1), order, report, pc)

    def tile_store(self, group: Group, tensor: Any, coordinates: tuple[Any, ...], source: Any, pc: int) -> None:
        """cp.async.bulk.tensor from shared to global memory; what lies outside the tensor is left out."""
        source, tensor, *_ = self._spread(group, source, tensor, 0, 0)
        for number, one in enumerate(group.one_by_one()):
            at = slice(number, number + 1)
            map_ = self._tensor_map(one, tensor[at], pc)
            place = self._place(
                one, map_, [group.spread(coordinate)[at] for coordinate in coordinates], pc, stored=True
            )
            base = int(source[at][0]) & (self._state.rank_unit - 1)
            addresses, inside, offsets = (part.reshape(-1) for part in map_.tile(place, base))
            size = map_.element_size
            if not inside.any():
                continue
            order = (offsets[inside][:, None] + np.arange(size)).reshape(-1)
            data = self._gather_shared(one, source[at], map_.tile_bytes, order, pc)
            spread = (addresses[inside].astype(np.uint64)[:, None] + np.arange(size, dtype=np.uint64)).reshape(-1)
            self._scatter_global(one, spread, data, pc)

    def deliver(self, barrier: int) -> None:
        """Land the bulk copies that report to this mbarrier."""
        due = [bulk for bulk in self._bulk if bulk.barrier == barrier]
        self._bulk = [bulk for bulk in self._bulk if bulk.barrier != barrier]
        for bulk in due:
            self._state.shared_memory.buffer[bulk.position] = bulk.data
            if self._spaces.shared.shadow is not None:
                self._spaces.shared.shadow.arrived(bulk.start, bulk.size)
            self.barriers.transferred(bulk.barrier, len(bulk.data))

    # --- what bulk copies have in common ---

    def _spread(self, group: Group, *values: Any) -> tuple[np.ndarray, ...]:
        return tuple(group.spread(value) for value in values)

    def _each(self, group: Group, *values: np.ndarray) -> list[tuple[Any, ...]]:
        return [
            (one, *(value[number : number + 1] for value in values)) for number, one in enumerate(group.one_by_one())
        ]

    def _mask(self, group: Group, blocks: Any, number: int) -> int | None:
        """The blocks to which the copy of a group's thread goes; None where it goes to one."""
        return None if blocks is None else int(group.spread(blocks)[number])

    def _in_blocks(
        self, group: Group, destination: np.ndarray, barrier: np.ndarray, mask: int | None, pc: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Where a copy goes to, and the mbarrier that hears of it: at the same offsets in each block of the mask."""
        if mask is None:
            return [(destination, barrier)]
        if mask >> self._state.cluster_size:
            what = f"a copy to blocks {mask:#b} of a cluster of {self._state.cluster_size}"
            raise fault(OutOfBounds, self._state.listing, group, np.True_, what, pc)
        ranks = [np.uint32(rank) for rank in range(self._state.cluster_size) if mask >> rank & 1]
        there = self._state.map_to_rank
        return [
            (there(destination, rank, destination.dtype.type), there(barrier, rank, barrier.dtype.type))
            for rank in ranks
        ]

    def _check_bulk(self, group: Group, size: int, addresses: tuple[int, ...], pc: int) -> None:
        if size % 16 or any(address % 16 for address in addresses):
            what = "a bulk copy whose size or addresses are no multiples of 16"
            detail = f"{size} bytes, addresses {', '.join(map(hex, addresses))}"
            raise fault(Misaligned, self._state.listing, group, np.True_, what, pc, detail=detail)

    def _gather_global(self, group: Group, addresses: np.ndarray, pc: int) -> np.ndarray:
        many = Group(group.batch, np.repeat(group.threads, len(addresses)), len(addresses))
        return self._spaces.global_.load(many, addresses, np.uint8, 1, 1, pc)

    def _scatter_global(self, group: Group, addresses: np.ndarray, data: np.ndarray, pc: int) -> None:
        if len(addresses):
            many = Group(group.batch, np.repeat(group.threads, len(addresses)), len(addresses))
            self._spaces.global_.store(many, addresses, (data,), np.uint8, 1, pc)

    def _gather_shared(self, group: Group, address: np.ndarray, size: int, order: np.ndarray, pc: int) -> np.ndarray:
        """Bytes `order` of the `size` at one shared address."""
        self._spaces.shared.positions(group, address + address.dtype.type(max(size - 1, 0)), 1, "read", pc)
        start = int(self._spaces.shared.positions(group, address, 1, "read", pc)[0])
        if self._spaces.shared.shadow is not None:
            self._spaces.shared.shadow.read_by_unit(group, start + order, pc)
        return self._state.shared_memory.buffer[start + order]

    def _start_bulk(
        self,
        group: Group,
        destination: np.ndarray,
        data: np.ndarray,
        order: np.ndarray | None,
        barrier: np.ndarray,
        pc: int,
    ) -> None:
        size = len(data) if order is None else int(order.max()) + 1
        last = destination + destination.dtype.type(size - 1)
        self._spaces.shared.positions(group, last, 1, "asynchronous copy", pc)
        start = int(self._spaces.shared.positions(group, destination, 1, "asynchronous copy", pc)[0])
        if self._spaces.shared.shadow is not None:
            self._spaces.shared.shadow.start_copy(group, start, size, pc)
        position = start + (np.arange(size) if order is None else order)
        key = self.barriers.position(group, barrier, pc)
        self._bulk.append(_Bulk(position, start, size, data, int(key[0])))

    def _place(
        self, group: Group, map_: TensorMap, coordinates: list[np.ndarray], pc: int, *, stored: bool = False
    ) -> list[int]:
        """The tile's coordinates.

        A GPU stops (illegal instruction) unless the innermost is at a multiple of 16 bytes, and at a store where one is
        negative; a tile may be read from there, and be stored beyond the tensor's other end.
        """
        place = [int(coordinate[0]) for coordinate in coordinates]
        if stored and min(place) < 0:
            what = "a tile is stored at a negative coordinate"
            detail = f"coordinates {tuple(place)}, innermost first"
            raise fault(OutOfBounds, self._state.listing, group, np.True_, what, pc, detail=detail)
        offset = place[0] * map_.element_size
        if offset % 16:
            what = "a tile whose innermost coordinate is at no multiple of 16 bytes"
            detail = f"coordinate {place[0]}, elements of {map_.element_size} bytes: byte {offset}"
            raise fault(Misaligned, self._state.listing, group, np.True_, what, pc, detail=detail)
        return place

    def _tensor_map(self, group: Group, address: np.ndarray, pc: int) -> TensorMap:
        self._check_place_of_map(group, address.astype(np.uint64), pc)
        words = [
            self._spaces.generic.load(group, address.astype(np.uint64) + np.uint64(8 * k), np.uint64, 8, 1, pc)[0]
            for k in range(16)
        ]
        encoded = np.array(words, np.uint64).tobytes()
        try:
            return TensorMap.decode(encoded)
        except ValueError as error:
            raise fault(OutOfBounds, self._state.listing, group, np.True_, f"no tensor map: {error}", pc) from None

    def _check_place_of_map(self, group: Group, address: np.ndarray, pc: int) -> None:
        """A GPU reads maps from parameters, constants and global memory alone."""
        space = {1: "shared", 2: "local"}.get(int(space_of(address)[0]))
        if space is not None:
            what = f"a tensor map in {space} memory: take it as a parameter, const __grid_constant__"
            raise fault(OutOfBounds, self._state.listing, group, np.True_, what, pc)
        if address[0] % np.uint64(64):
            detail = f"address {int(address[0]):#x}"
            raise fault(
                Misaligned, self._state.listing, group, np.True_, "a tensor map at no multiple of 64", pc, detail=detail
            )


def _padded(columns: list[np.ndarray], size: int) -> np.ndarray:
    """Columns of words as rows of `size` bytes, zeros behind."""
    data = np.ascontiguousarray(np.stack(columns, axis=-1)).view(np.uint8)
    return np.concatenate([data, np.zeros((len(data), size - data.shape[1]), np.uint8)], axis=1)
