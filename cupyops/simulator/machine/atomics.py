"""Atomic updates of global and shared memory."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from ..arithmetic import combine
from ..memory import Allocation, Region
from .group import Group, Selection
from .space import ATOMIC
from .spaces import Spaces
from .state import State

# those whose order does not matter, or only to the old values that nobody asked for
_UFUNCS = {
    "add": np.add, "min": np.minimum, "max": np.maximum,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor,
}  # fmt: skip


class Atomics:
    """atom and red."""

    def __init__(self, state: State, spaces: Spaces, chooser: random.Random | None = None) -> None:
        self._state = state
        self._spaces = spaces
        self._order = None if chooser is None else np.random.default_rng(chooser.randrange(2**32))

    def update(
        self,
        group: Group,
        space: str,
        operation: str,
        type_: str,
        address: Any,
        values: tuple[Any, ...],
        dtype: Any,
        wanted: bool,
        pc: int,
    ) -> Any:
        """Update the element at each address; the old ones, if `wanted`. Threads take turns in order, or in a drawn one."""
        if space == "":
            return self._generic(group, operation, type_, address, values, dtype, wanted, pc)
        size = np.dtype(dtype).itemsize
        target = {"shared": self._spaces.shared, "cluster": self._spaces.cluster}.get(space, self._spaces.global_)
        old = np.empty(group.size, dtype)
        for mask, region, position in target.parts(group, address, size, ATOMIC, pc):
            part = group if mask is None else group.subset(mask)
            own = [
                part.spread(value)
                for value in (values if mask is None else Selection(group, mask, group).pick_all(values))
            ]
            self._check(part, region, position, size, pc)
            view, index = region.view(dtype), position // size
            flush = (
                target is self._spaces.global_
                and (operation, type_) == ("add", "f32")
                and _may_flush(view[index], own[0])
            )
            turns = slice(None) if self._order is None else self._order.permutation(len(index))
            found = _apply(view, index[turns], operation, type_, [value[turns] for value in own], wanted, flush)
            if found is not None:
                found[turns] = found.copy()
            if found is None or bool((view[index] != found).any()):
                self._state.progressed = True
            else:
                self._state.spinning = True  # nothing changed: perhaps a lock that another holds
            if found is not None:
                old[slice(None) if mask is None else mask] = found
        return old

    def update_side_by_side(
        self,
        group: Group,
        space: str,
        operation: str,
        type_: str,
        address: Any,
        values: tuple[Any, ...],
        dtype: Any,
        wanted: bool,
        pc: int,
    ) -> tuple[Any, ...]:
        """Update elements that lie side by side, one value of each thread after the other; the old ones, if `wanted`."""
        size = np.dtype(dtype).itemsize
        address = group.spread(address, np.uint64)
        whole = [(self._spaces.global_, None, address)] if space else self._spaces.generic.split(group, address, pc)
        for one, mask, own in whole:  # aligned and inside as a whole, before anything is changed
            one.parts(group if mask is None else group.subset(mask), own, size * len(values), ATOMIC, pc)
        return tuple(
            self.update(group, space, operation, type_, address + np.uint64(place * size), (value,), dtype, wanted, pc)
            for place, value in enumerate(values)
        )

    def _check(self, group: Group, region: Region, position: np.ndarray, size: int, pc: int) -> None:
        in_global, in_shared = self._spaces.global_.shadow, self._spaces.shared.shadow
        if isinstance(region, Allocation):
            if in_global is not None:
                scopes = {"cta"} if self._state.cluster_size > 1 else {"cta", "cluster"}
                of_block = not scopes.isdisjoint(self._state.listing.instructions[pc].modifiers)
                in_global.atomic(group, region, position, size, pc, of_block)
        elif in_shared is not None:
            in_shared.atomic(group, position, size, pc)
            self._state.meet(group, pc)

    def _generic(
        self,
        group: Group,
        operation: str,
        type_: str,
        address: Any,
        values: tuple[Any, ...],
        dtype: Any,
        wanted: bool,
        pc: int,
    ) -> np.ndarray:
        old = np.empty(group.size, dtype)
        for space, mask, own in self._spaces.generic.split(group, group.spread(address, np.uint64), pc):
            part = group if mask is None else group.subset(mask)
            picked = values if mask is None else Selection(group, mask, group).pick_all(values)
            where = "cluster" if space is self._spaces.cluster else space.name
            found = self.update(part, where, operation, type_, own, picked, dtype, wanted, pc)
            old[slice(None) if mask is None else mask] = found
        return old


def _may_flush(old: np.ndarray, value: np.ndarray) -> bool:
    """Return True if a float32 sum may involve subnormals, which global memory's units take and leave as zeros."""
    return any(bool(((np.abs(part) < 2.0**-100) & (part != 0)).any()) for part in (old, value))


def _apply(
    view: np.ndarray, index: np.ndarray, operation: str, type_: str, values: list[np.ndarray], wanted: bool, flush: bool
) -> np.ndarray | None:
    # floats are added one after the other all the same, as ufunc.at does; min and max of floats have rules of their own
    is_integer = view.dtype.kind in "iu" and "f" not in type_
    plain = operation in _UFUNCS and (is_integer or type_ in ("f32", "f64") and operation == "add") and not flush
    if plain and not wanted:
        _UFUNCS[operation].at(view, index, values[0])
        return None
    if plain and operation == "add" and view.dtype.kind in "iu":
        return _fetch_add(view, index, values[0])
    return _in_turn(view, index, operation, type_, values, flush)


def _in_turn(
    view: np.ndarray, index: np.ndarray, operation: str, type_: str, values: list[np.ndarray], flush: bool
) -> np.ndarray:
    """Update elements in turns, so that threads of one element come one after the other; return the old values."""
    order = np.argsort(index, kind="stable")
    ordered = index[order]
    first = np.concatenate(([True], ordered[1:] != ordered[:-1]))
    starts = np.flatnonzero(first)
    turn = np.arange(len(index)) - starts[np.cumsum(first) - 1]
    old = np.empty(len(index), view.dtype)
    for one in range(int(turn.max()) + 1):
        lanes = order[turn == one]
        where = index[lanes]
        old[lanes] = view[where]
        view[where] = _combined(operation, type_, old[lanes], [value[lanes] for value in values], flush)
    return old


def _combined(operation: str, type_: str, old: np.ndarray, values: list[np.ndarray], flush: bool) -> np.ndarray:
    if operation == "cas":
        return np.where(old == values[0], values[1], old)
    if operation == "exch":
        return values[0]
    result = combine(operation, type_, flush)(old, values[0])
    return np.asarray(result).view(old.dtype)


def _fetch_add(view: np.ndarray, index: np.ndarray, value: np.ndarray) -> np.ndarray:
    """Old values of an integer addition, by running sums over the threads of each element."""
    order = np.argsort(index, kind="stable")
    ordered, added = index[order], value[order]
    before = np.cumsum(added, dtype=view.dtype) - added
    first = np.concatenate(([True], ordered[1:] != ordered[:-1]))
    starts = np.flatnonzero(first)
    segment = np.cumsum(first) - 1
    old = np.empty(len(index), view.dtype)
    old[order] = view[ordered] + (before - before[starts][segment])
    np.add.at(view, index, value)
    return old
