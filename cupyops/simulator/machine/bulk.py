"""Bulk copies and TMA tiles: cp.async.bulk, cp.reduce.async.bulk, and the stores that other blocks send (st.async).

A copy reads global memory when it is issued. What it reads of shared memory it may read until the wait that says that it
has; here it does so at the last moment, or with a seed at any.
"""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np

from ..errors import Misaligned, OutOfBounds
from ..tensormap import TensorMap
from ..translate.function import Load
from . import tiles
from .arrivals import Arrival, Arrivals
from .atomics import Atomics
from .departures import Departure, Departures, Reduction, bulk_reading
from .faults import fault
from .group import Group
from .mbarriers import MBarriers
from .spaces import Spaces
from .state import State

_REDUCED = {"tf32": "f32", "u8": "u32", "u16": "u32"}  # types by which elements of a tensor map are added


class Bulk:
    """Bulk copies and TMA tiles of a batch."""

    def __init__(
        self, state: State, spaces: Spaces, atomics: Atomics, barriers: MBarriers, chooser: random.Random | None
    ) -> None:
        self._state, self._spaces, self._barriers = state, spaces, barriers
        self._arrivals = Arrivals(state, spaces, barriers, chooser)
        self._departures = Departures(state, spaces, atomics, chooser)
        self.commit, self.wait = self._departures.commit, self._departures.wait

    def leave(self, group: Group) -> None:
        """Let these threads exit."""
        self._departures.leave(group)
        self._arrivals.leave()

    def finish(self) -> None:
        """Complete the copies to global memory, as all threads have exited."""
        self._departures.finish()

    # --- to shared memory ---

    def load(self, group: Group, destination: Any, source: Any, size: Any, barrier: Any, blocks: Any, pc: int) -> None:
        """cp.async.bulk from global to shared memory; `blocks`: a mask of those of the cluster, or None."""
        for number, (one, dst, src, count, bar) in enumerate(self._each(group, destination, source, size, barrier)):
            self._check(one, int(count[0]), (int(dst[0]), int(src[0])), pc)
            addresses = src[0] + np.arange(int(count[0]), dtype=np.uint64)
            data = self._gather_global(one, addresses, pc)
            for place, report in self._in_blocks(one, dst, bar, self._mask(group, blocks, number), pc):
                self._arrive(one, place, data, None, report, pc)

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
        for number, (one, dst, map_at, bar) in enumerate(self._each(group, destination, tensor, barrier)):
            map_ = tiles.tensor_map(self._state, self._spaces, one, map_at, pc)
            given = [group.spread(coordinate)[number : number + 1] for coordinate in coordinates]
            place = tiles.coordinates(self._state, one, map_, given, pc)
            addresses, inside, offsets = self._tile(one, map_, place, dst, pc)
            size = map_.element_size
            data = np.zeros((len(offsets), size), np.uint8)
            data[:] = np.frombuffer(int(map_.fill_bits).to_bytes(size, "little"), np.uint8)
            if inside.any():
                data[inside] = self._gather_global(one, _bytes(addresses[inside], size), pc).reshape(-1, size)
            else:
                self._look_at(one, map_, pc)
            order = (offsets[:, None] + np.arange(size)).reshape(-1)
            for to, report in self._in_blocks(one, dst, bar, self._mask(group, blocks, number), pc):
                self._arrive(one, to, data.reshape(-1), order, report, pc)

    def from_shared(
        self, group: Group, destination: Any, source: Any, size: Any, barrier: Any, reduction: Any, pc: int
    ) -> None:
        """cp.async.bulk and cp.reduce.async.bulk from the block's shared memory to that of a block of the cluster."""
        shared = self._spaces.shared
        for one, dst, src, count, bar in self._each(group, destination, source, size, barrier):
            self._check(one, int(count[0]), (int(dst[0]), int(src[0])), pc)
            from_ = self._span(one, src, int(count[0]), "read", pc, anywhere=False)
            start = self._span(one, dst, int(count[0]), "asynchronous copy", pc)
            report = self._report(one, start, bar, pc)
            positions = from_ + np.arange(int(count[0]))
            if shared.shadow is not None:
                series, until = self._barriers.series(report), self._barriers.count(report)
                shared.shadow.bulk_read(bulk_reading(one, series, until, pc), positions)
            put = partial(self._put, one, start, positions, reduction and Reduction.of(*reduction), pc)
            size_ = int(count[0])
            at = np.array([start])
            self._arrivals.start(Arrival(one, at, size_, size_, report, pc, put), reduction is not None)

    def _put(self, group: Group, start: int, positions: np.ndarray, reduction: Reduction | None, pc: int) -> None:
        data = self._state.shared_memory.buffer[positions]
        if reduction is None:
            self._state.shared_memory.buffer[start : start + len(data)] = data
        else:
            own = self._state.shared_memory.buffer[start : start + len(data)].view(reduction.dtype)
            own[:] = reduction.of_two(own, data.view(reduction.dtype))

    def send(
        self,
        group: Group,
        destination: Any,
        values: tuple[Any, ...],
        dtype: Any,
        barrier: Any,
        pc: int,
        reduction: tuple[str, str] | None = None,
    ) -> None:
        """st.async and red.async: values to the shared memory of a block of the cluster, told to an mbarrier there."""
        columns = np.stack([group.spread(value).astype(dtype, copy=False) for value in values], axis=-1)
        width = columns.itemsize * len(values)
        start = self._spaces.shared.positions(group, destination, width, "asynchronous store", pc, True)
        report = self._barriers.position(group, barrier, pc, True)
        memory = self._state.shared_memory.buffer
        for one in np.unique(report):
            lanes = report == one
            where = start[lanes][:, None] + np.arange(width)
            data = np.ascontiguousarray(columns[lanes]).view(np.uint8).reshape(-1, width)
            put = partial(memory.__setitem__, where, data)
            if reduction is not None:
                put = partial(self._add, where, data, Reduction.of(*reduction))
            arrival = Arrival(group.subset(lanes), start[lanes], width, data.size, int(one), pc, put)
            self._arrivals.start(arrival, reduction is not None)

    def _add(self, where: np.ndarray, data: np.ndarray, reduction: Reduction) -> None:
        """Thread after thread: several may have sent to one place."""
        memory = self._state.shared_memory.buffer
        for place, value in zip(where, data):
            memory[place] = reduction.of_two(memory[place].view(reduction.dtype), value.view(reduction.dtype)).view(
                np.uint8
            )

    def _arrive(
        self,
        group: Group,
        destination: np.ndarray,
        data: np.ndarray,
        order: np.ndarray | None,
        barrier: np.ndarray,
        pc: int,
    ) -> None:
        size = len(data) if order is None else int(order.max()) + 1
        start = self._span(group, destination, size, "asynchronous copy", pc)
        where = slice(start, start + size) if order is None else start + order
        put = partial(self._state.shared_memory.buffer.__setitem__, where, data)
        self._arrivals.start(
            Arrival(group, np.array([start]), size, len(data), self._report(group, start, barrier, pc), pc, put)
        )

    def _report(self, group: Group, start: int, barrier: np.ndarray, pc: int) -> int:
        """Position of the mbarrier that a copy to `start` reports to: in the block that the copy goes to."""
        position = int(self._barriers.position(group, barrier, pc, True)[0])
        if position // self._state.shared_stride != start // self._state.shared_stride:
            what = "a bulk copy into the shared memory of one block reports to an mbarrier of another"
            detail = f"the mbarrier at {self._barriers.name(position)}"
            raise fault(OutOfBounds, self._state.listing, group, np.True_, what, pc, detail=detail)
        return position

    # --- to global memory ---

    def store(self, group: Group, destination: Any, source: Any, size: Any, reduction: Any, pc: int) -> None:
        """cp.async.bulk and cp.reduce.async.bulk from shared to global memory."""
        for one, dst, src, count in self._each(group, destination, source, size):
            self._check(one, int(count[0]), (int(dst[0]), int(src[0])), pc)
            start = self._span(one, src, int(count[0]), "read", pc, anywhere=False)
            places = dst[0] + np.arange(int(count[0]), dtype=np.uint64)
            self._depart(one, start + np.arange(int(count[0])), places, reduction and Reduction.of(*reduction), pc)

    def tile_store(
        self, group: Group, tensor: Any, coordinates: tuple[Any, ...], source: Any, operation: str | None, pc: int
    ) -> None:
        """cp.async.bulk.tensor and its reductions to global memory; what lies outside the tensor is left out."""
        for number, (one, src, map_at) in enumerate(self._each(group, source, tensor)):
            map_ = tiles.tensor_map(self._state, self._spaces, one, map_at, pc)
            given = [group.spread(coordinate)[number : number + 1] for coordinate in coordinates]
            place = tiles.coordinates(self._state, one, map_, given, pc, stored=True)
            addresses, inside, offsets = self._tile(one, map_, place, src, pc)
            if not inside.any():
                continue
            size = map_.element_size
            start = self._span(one, src, map_.tile_bytes, "read", pc, anywhere=False)
            order = (offsets[inside][:, None] + np.arange(size)).reshape(-1)
            reduction = None
            if operation is not None:
                reduction = Reduction.of(operation, _REDUCED.get(map_.element, map_.element))
            self._depart(one, start + order, _bytes(addresses[inside], size), reduction, pc)

    def _depart(
        self, group: Group, positions: np.ndarray, addresses: np.ndarray, reduction: Reduction | None, pc: int
    ) -> None:
        # that they lie within a tensor is found out now, and not when they are written
        many = Group(group.batch, np.repeat(group.threads, len(addresses)), len(addresses))
        self._spaces.global_.parts(many, addresses, 1, "write", pc)
        ends = int(addresses.min()), int(addresses.max())
        self._departures.start(Departure(group, int(group.threads[0]), positions, addresses, reduction, pc, *ends))

    # --- what they have in common ---

    def _each(self, group: Group, *values: Any) -> list[tuple[Any, ...]]:
        """Each thread as a group of its own, with its values."""
        spread = [group.spread(value) for value in values]
        return [
            (one, *(value[number : number + 1] for value in spread)) for number, one in enumerate(group.one_by_one())
        ]

    def _mask(self, group: Group, blocks: Any, number: int) -> int | None:
        """The blocks to which the copy of a group's thread goes; None where it goes to one."""
        return None if blocks is None else int(group.spread(blocks)[number])

    def _in_blocks(
        self, group: Group, destination: np.ndarray, barrier: np.ndarray, mask: int | None, pc: int
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Destinations and mbarriers of a copy, at the same offsets in each block of the mask."""
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

    def _tile(
        self, group: Group, map_: TensorMap, place: list[int], shared: np.ndarray, pc: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        base = int(shared[0]) & (self._state.rank_unit - 1)
        try:
            addresses, inside, offsets = (part.reshape(-1) for part in map_.tile(place, base))
        except (Misaligned, ValueError) as error:
            kind = Misaligned if isinstance(error, Misaligned) else OutOfBounds
            raise fault(kind, self._state.listing, group, np.True_, str(error), pc) from None
        return addresses, inside, offsets

    def _look_at(self, group: Group, map_: TensorMap, pc: int) -> None:
        """Check the start of a map: for a tile that reads nothing a GPU still looks there, and stops where no memory is."""
        try:
            self._spaces.global_.parts(group, np.array([map_.address], np.uint64), 1, "read", pc)
        except OutOfBounds:
            what = "a tile that is wholly outside of the tensor, by a map that begins where no memory is"
            detail = f"the map begins at {map_.address:#x}, where a GPU looks; leave out such copies"
            raise fault(OutOfBounds, self._state.listing, group, np.True_, what, pc, detail=detail) from None

    def _check(self, group: Group, size: int, addresses: tuple[int, ...], pc: int) -> None:
        if size % 16 or any(address % 16 for address in addresses):
            what = "a bulk copy whose size or addresses are no multiples of 16"
            detail = f"{size} bytes, addresses {', '.join(map(hex, addresses))}"
            raise fault(Misaligned, self._state.listing, group, np.True_, what, pc, detail=detail)

    def _span(self, group: Group, address: np.ndarray, size: int, verb: str, pc: int, anywhere: bool = True) -> int:
        """Position of `size` bytes, all of which are in shared memory."""
        ends = [size - 1] if self._state.shared_gaps is None else [*range(15, size, 16), size - 1]
        for end in ends:
            self._spaces.shared.positions(group, address + address.dtype.type(max(end, 0)), 1, verb, pc, anywhere)
        return int(self._spaces.shared.positions(group, address, 1, verb, pc, anywhere)[0])

    def _gather_global(self, group: Group, addresses: np.ndarray, pc: int) -> np.ndarray:
        many = Group(group.batch, np.repeat(group.threads, len(addresses)), len(addresses))
        return self._spaces.global_.load(many, addresses, Load(np.uint8, 1, 1, pc))


def _bytes(addresses: np.ndarray, size: int) -> np.ndarray:
    """Addresses of every byte of elements of `size` bytes."""
    return (addresses.astype(np.uint64)[:, None] + np.arange(size, dtype=np.uint64)).reshape(-1)
