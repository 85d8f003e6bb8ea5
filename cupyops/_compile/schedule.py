"""Assignment of stores to kernels, and the order in which all runs."""

from __future__ import annotations

import heapq
import logging
import math
from collections.abc import Iterable, Iterator
from graphlib import TopologicalSorter
from typing import Any

from .._util.torch_private import tree_leaves
from .index import Reject
from .kernel_group import Call, Group
from .lowering import Lowering, Name
from .render import MOST_ARGUMENTS, Bundle, Rendered, SideBySide
from .reuse import Reuse
from .size import about
from .trace import Trace
from .values import (
    Buffer,
    Constant,
    Pointwise,
    Range,
    Reduction,
    Scattered,
    Store,
    Unit,
    Value,
    buffer_of,
    is_read,
    leaves,
    names_of,
    viewed,
)

log = logging.getLogger("cupyops.compile")

WIDE = 4096  # elements from which on reading a tensor twice is worth a common kernel
MOST_BUFFERS, MOST_STORES = 24, 16  # of one kernel
LATEST = 3  # groups that read a buffer which are tried


class Schedule:
    """The units of a program in order."""

    def __init__(self, lowering: Lowering) -> None:
        self.lowering = lowering
        self.groups: list[Group] = []
        self.writers: list[Unit] = []
        self.store_of = {s.buffer.name: s for s in lowering.stores if s.target is None}
        self.reads: dict[Store, dict[str, Buffer | Store]] = {}
        self.readers: dict[str, list[Store | Call]] = {}
        self.by_buffer: dict[str, list[Group]] = {}
        self.adders: dict[Group, list[Group]] = {}  # kernel of sums in parts -> kernels that add them up
        self.placed: set[Store | Call] = set()
        self._copy_before_crossing_writes()
        for store in lowering.stores:
            self._note_reads(store)
        for call in lowering.calls:
            for leaf in call.leaves():
                self._note_reader(leaf, call)
        steps: list[Store | Call] = [*lowering.stores, *lowering.calls]
        for one in sorted(steps, key=lambda one: one.order):
            self._visit(one)
        self._drop_unneeded()
        self._fix_parts()
        Reuse(lowering, self.groups, self.reads, self._runs_after)
        for group in self.groups:
            trace = Trace(group.stores, exact=lowering.exact)
            trace.reorder()
            group.trace, group.kernel = trace, Rendered(trace)
        self._bundle()
        self.units = self._side_by_side(self._sorted())

    # -- what reads what -----------------------------------------------------------------------------------------------

    def _copy_before_crossing_writes(self) -> None:
        """A value that overwrites an input, but reads another one that is overwritten, gets memory of its own first."""
        written = {s.target.name for s in self.lowering.stores if s.target is not None}
        for store in list(self.lowering.stores):
            if store.target is None or isinstance(store.value, Scattered):  # whose target nothing reads as it was
                continue
            value = store.value.inputs[0]
            read = {name for leaf in leaves(value) for name in names_of(leaf)}
            if read & (written - {store.target.name}):
                self._copied_first(store)

    def _copied_first(self, store: Store) -> Store:
        """Compute what overwrites an input into memory of its own, and copy it from there."""
        value = store.value.inputs[0]
        between = Pointwise("{0}", [value], value.shape, value.dtype)
        between.strides = store.buffer.strides
        store.value.operands[0] = between
        return self._stored(between, store.order)

    def _stored(self, value: Value, order: int) -> Store:
        store = Store(value, order, self.lowering.name("b"), self.lowering.device)
        self.lowering.stores.append(store)
        self.store_of[store.buffer.name] = store
        return store

    def _note_reads(self, store: Store) -> None:
        found = {buffer_of(leaf).name: leaf for one in store.value.inputs for leaf in leaves(one)}
        self.reads[store] = found
        for leaf in found.values():
            self._note_reader(leaf, store)

    def _note_reader(self, leaf: Buffer | Store, reader: Store | Call) -> None:
        for name in names_of(leaf):
            self.readers.setdefault(name, []).append(reader)

    def _before(self, one: Store | Call) -> list[Store | Call]:
        """Stores and calls that run before one."""
        if isinstance(one, Call):
            names = set(_names((one.args, one.kwargs)))
            found: list[Any] = [leaf if isinstance(leaf, Store) else leaf.unit for leaf in one.leaves()]
            if names:
                found += [call for call in self.lowering.calls if not names.isdisjoint(call.outputs.values())]
            if one.serial:
                at = [c for c in self.lowering.calls if c.serial]
                k = at.index(one)
                found += at[k - 1 : k]
        else:
            found = [leaf if isinstance(leaf, Store) else leaf.unit for leaf in self.reads[one].values()]
        in_part = one.outputs if isinstance(one, Call) else isinstance(one.value, Scattered)
        if one.target is not None and not in_part:  # else nothing reads what was there before
            found += [r for r in self.readers.get(one.target.name, ()) if r is not one]
        return [f for f in found if f is not None]

    # -- groups --------------------------------------------------------------------------------------------------------

    def _visit(self, one: Store | Call) -> None:
        stack: list[tuple[Store | Call, bool]] = [(one, False)]
        entered: set[Store | Call] = set()
        while stack:
            node, ready = stack.pop()
            if node in self.placed:
                continue
            if ready:
                self.placed.add(node)
                if isinstance(node, Store):
                    self._place(node)
                else:
                    node.after = {self._unit(b) for b in self._before(node)} - {node}
            elif node in entered:
                raise AssertionError("steps of the program wait for each other")
            else:
                entered.add(node)
                stack.append((node, True))
                stack += [(b, False) for b in self._before(node) if b not in self.placed]

    @staticmethod
    def _unit(one: Store | Call) -> Unit:
        if isinstance(one, Call):
            return one
        assert one.group is not None
        return one.group

    def _place(self, store: Store) -> None:
        before = dict.fromkeys(self._unit(b) for b in self._before(store))  # a set in order: texts follow from it
        candidates = [u for u in before if isinstance(u, Group)]
        parts_of = self._parts_of(store)
        if parts_of is not None:
            candidates += self.adders.setdefault(parts_of, [])
        least = min(WIDE, about(store.value.numel))
        for name, leaf in self.reads[store].items():
            if about(buffer_of(leaf).numel) >= least:
                candidates += self.by_buffer.get(name, [])[-LATEST:]
        for group in sorted(dict.fromkeys(candidates), key=lambda g: -g.order):
            if self._fits(store, group, before):
                self._join(store, group, before)
                return
        group = Group(store.order)
        try:
            group.trace = Trace([store])
        except Reject as reason:
            log.debug("%s is computed in two steps: %s", store.buffer.name, reason)
            if store.target is not None:
                self._place_now(self._copied_first(store))
            self._operands_first(store)
            before = dict.fromkeys(self._unit(b) for b in self._before(store))
            group.trace = Trace([store])
        self.groups.append(group)
        self._join(store, group, before)
        if parts_of is not None:
            self.adders[parts_of].append(group)

    @staticmethod
    def _parts_of(store: Store) -> Group | None:
        value = store.value
        if isinstance(value, Reduction) and isinstance(value.source, Reduction) and value.source.parts is not None:
            made = value.source.store
            assert made is not None and isinstance(made.group, Group)
            return made.group
        return None

    def _operands_first(self, store: Store) -> None:
        """Store the operands of a value first, which is too much for one kernel."""
        for one in store.value.inputs:
            base = viewed(one)
            if not isinstance(base, (Constant, Range)) and not is_read(base):
                self._place_now(self._stored(base, store.order))
        self._note_reads(store)

    def _place_now(self, store: Store) -> None:
        self._note_reads(store)
        self.placed.add(store)
        self._place(store)

    def _join(self, store: Store, group: Group, before: Iterable[Unit]) -> None:
        store.group = group
        group.stores.append(store)
        group.after |= set(before) - {group}
        for name in (*self.reads[store], store.buffer.name):
            if name not in group.reads:
                group.reads.add(name)
                self.by_buffer.setdefault(name, []).append(group)

    def _fits(self, store: Store, group: Group, before: Iterable[Unit]) -> bool:
        if len(group.stores) >= MOST_STORES or len(group.reads | set(self.reads[store])) > MOST_BUFFERS:
            return False
        if any(self._runs_after(unit, group) for unit in before if unit is not group):
            return False
        assert group.trace is not None
        try:
            trial = Trace([*group.stores, store])
            if trial.divisions > group.trace.divisions + self._divisions(store):
                raise Reject("it goes through memory in another order")
        except Reject as reason:
            log.debug("%s has a kernel apart from %s: %s", store.buffer.name, group.stores[0].buffer.name, reason)
            return False
        group.trace = trial
        return True

    @staticmethod
    def _divisions(store: Store) -> int:
        try:
            return Trace([store]).divisions
        except Reject:
            return 0

    @staticmethod
    def _runs_after(unit: Unit, goal: Unit) -> bool:
        """Return True if `unit` waits for `goal`."""
        seen: set[Unit] = set()
        stack = [unit]
        while stack:
            one = stack.pop()
            if one is goal:
                return True
            if one not in seen:
                seen.add(one)
                stack += one.after
        return False

    def _drop_unneeded(self) -> None:
        """Mark stores that other kernels read; drop those that nobody reads."""
        for store in self.lowering.stores:
            for name in self.reads[store]:
                made = self.store_of.get(name)
                if made is not None and made.group is not store.group:
                    made.needed = True
        for group in self.groups:
            used = {s for s in group.stores if s.needed}
            stack = list(used)
            while stack:
                for name in self.reads[stack.pop()]:
                    made = self.store_of.get(name)
                    if made is not None and made.group is group and made not in used:
                        used.add(made)
                        stack.append(made)
            group.stores = [s for s in group.stores if s in used]
        self.groups = [g for g in self.groups if g.stores]

    def _fix_parts(self) -> None:
        """Fix the number of parts of column sums, which the kernels that add them up have to know."""
        for group in self.groups:
            parted = [s for s in group.stores if isinstance(s.value, Reduction) and s.value.parts is not None]
            if not parted:
                continue
            parts = Rendered(Trace(group.stores)).parts()
            for store in parted:
                value = store.value
                assert isinstance(value, Reduction)
                value.set_parts(parts)
                store.buffer.shape, store.buffer.strides = value.shape, value.strides
                store.buffer.numel = math.prod(value.shape)

    def _bundle(self) -> None:
        """Small kernels of the same text that do not wait for each other become one launch."""
        alike: dict[str, list[Group]] = {}
        for group in self.groups:
            assert isinstance(group.kernel, Rendered)
            text = group.kernel.as_run()
            if text is not None:
                alike.setdefault(text, []).append(group)
        gone: dict[Group, Group] = {}
        for groups in alike.values():
            for bundle in self._bundles(sorted(groups, key=lambda g: g.order)):
                host = bundle[0]
                host.kernel = Bundle([g.kernel for g in bundle if isinstance(g.kernel, Rendered)])
                for group in bundle[1:]:
                    gone[group] = host
        self.groups = [g for g in self.groups if g not in gone]

    def _bundles(self, groups: list[Group]) -> Iterator[list[Group]]:
        """Lists of at least two groups; the units that wait for one of them wait for the first from then on."""
        bundle: list[Group] = []
        for group in groups:
            host = bundle[0] if bundle else None
            assert isinstance(group.kernel, Rendered)
            full = (len(bundle) + 1) * len(group.kernel.arguments) > MOST_ARGUMENTS
            if host is None or full or self._runs_after(group, host) or self._runs_after(host, group):
                if len(bundle) > 1:
                    yield bundle
                bundle = [group]
                continue
            bundle.append(group)
            host.after |= group.after
            host.order = max(host.order, group.order)
            for unit in (*self.lowering.calls, *self.groups):
                if group in unit.after:
                    unit.after.discard(group)
                    unit.after.add(host)
        if len(bundle) > 1:
            yield bundle

    def _side_by_side(self, units: list[Unit]) -> list[Unit]:
        """Small kernels become parts of one launch with the next ones, until something waits for one of them."""
        found: list[Unit] = []
        parts: list[Group] = []
        for unit in units:
            if not unit.after.isdisjoint(parts):
                parts = []
            found.append(unit)
            if not (isinstance(unit, Group) and isinstance(unit.kernel, Rendered) and unit.kernel.is_small()):
                continue
            kernels = [*self._kernels(parts), unit.kernel]
            if parts and SideBySide.fits(kernels):
                found.remove(parts[-1])
                unit.kernel = SideBySide(kernels)
                parts.append(unit)
            else:
                parts = [unit]
        return found

    @staticmethod
    def _kernels(parts: list[Group]) -> list[Rendered]:
        """The kernels of a launch, which the last of its parts has."""
        last = parts[-1].kernel if parts else None
        return last.kernels if isinstance(last, SideBySide) else [last] if isinstance(last, Rendered) else []

    def _sorted(self) -> list[Unit]:
        """Sort units in the order of the graph, as far as their dependencies allow."""
        units: list[Unit] = sorted([*self.lowering.calls, *self.groups], key=lambda u: u.order)
        number = {u: k for k, u in enumerate(units)}
        waiting = TopologicalSorter({k: [number[one] for one in u.after & number.keys()] for u, k in number.items()})
        waiting.prepare()
        ready, found = list(waiting.get_ready()), []
        heapq.heapify(ready)
        while ready:
            found.append(heapq.heappop(ready))
            waiting.done(found[-1])
            for one in waiting.get_ready():
                heapq.heappush(ready, one)
        return [units[k] for k in found]


def _names(tree: object) -> Iterator[str]:
    for one in tree_leaves(tree):
        if isinstance(one, Name):
            yield str(one)
        elif isinstance(one, slice):
            yield from _names((one.start, one.stop, one.step))
