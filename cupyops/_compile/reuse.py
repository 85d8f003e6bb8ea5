"""Memory of values that are dead: a kernel may write its result over an input that nothing reads afterwards.

The gradient of logits, for one, takes the place of the logits, which are as large as all other activations of a small model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import GraphModule, Node

from .index import Reject
from .kernel_group import Group
from .lowering import Lowering
from .size import about
from .trace import Trace
from .values import Buffer, Reduction, Store, Unit, Value, buffer_of, leaves, viewed

LEAST = 1 << 20  # bytes from which on it is worth it


def donated(forward: GraphModule, backward: GraphModule) -> set[str]:
    """Names of backward's placeholders that only it holds: results of forward that are neither its inputs nor the user's."""
    given = {_storage(node) for node in forward.graph.find_nodes(op="placeholder")}
    placeholders = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    results = [node for node in forward.graph.output_node().args[0] if isinstance(node, Node)]  # type: ignore[union-attr]
    users = [_storage(node) for node in results if node.name not in placeholders]
    saved = [node for node in results if node.name in placeholders and node.op != "placeholder"]
    storages = [_storage(node) for node in saved]
    return {
        node.name
        for node, storage in zip(saved, storages)
        if storage is not None and storage not in given and storage not in users and storages.count(storage) == 1
    }


def _storage(node: Node) -> int | None:
    meta = node.meta.get("val")
    return meta.untyped_storage()._cdata if isinstance(meta, torch.Tensor) else None


class Reuse:
    """Decides for each group which stores overwrite which dead buffers.

    Args:
        lowering: of the graph.
        groups: the kernels of the program, whose order with other steps `runs_after` knows.
        reads: what each store reads.
    """

    def __init__(
        self,
        lowering: Lowering,
        groups: list[Group],
        reads: dict[Store, dict[str, Buffer | Store]],
        runs_after: Callable[[Unit, Unit], bool],
    ) -> None:
        self.lowering, self.reads, self.runs_after = lowering, reads, runs_after
        self.readers: dict[str, set[Unit]] = {}
        # buffers that something else shares memory with, that are returned, or that are inputs which are written
        self.shared = {store.target.name for store in lowering.stores if store.target is not None}
        for group in groups:
            for store in group.stores:
                for leaf in reads[store].values():
                    self._read(leaf, group)
        for call in lowering.calls:
            for leaf in call.leaves():
                self._read(leaf, call)
            for made in call.outputs.values():
                if isinstance(made, Buffer) and made.aliases:
                    self.shared |= {made.name, *made.aliases}
        for one in lowering.outputs:
            if isinstance(one, Value):
                self.shared |= {buffer_of(leaf).name for leaf in leaves(viewed(one))}
        for group in sorted(groups, key=lambda g: g.order):
            self._group(group)

    def _read(self, leaf: Buffer | Store, unit: Unit) -> None:
        self.readers.setdefault(buffer_of(leaf).name, set()).add(unit)

    def _group(self, group: Group) -> None:
        found = {buffer_of(leaf).name: buffer_of(leaf) for s in group.stores for leaf in self.reads[s].values()}
        own = {store.buffer.name for store in group.stores}
        dead = [b for b in found.values() if b.name not in own and self._is_dead_after(b, group)]
        for store in group.stores:
            if not store.needed or store.target is not None or isinstance(store.value, Reduction):
                continue
            for buffer in dead:
                if self._overwrites(group, store, buffer):
                    dead.remove(buffer)
                    break

    def _is_dead_after(self, buffer: Buffer, group: Group) -> bool:
        kept = buffer.unit is None and buffer.meta is not None  # an input; what kernels make has no unit either
        if buffer.name in self.shared or (kept and buffer.name not in self.lowering.donated):
            return False
        return all(self.runs_after(group, unit) for unit in self.readers[buffer.name] - {group})

    def _overwrites(self, group: Group, store: Store, buffer: Buffer) -> bool:
        own = store.buffer
        alike = (own.shape, own.strides, own.dtype) == (buffer.shape, buffer.strides, buffer.dtype)
        if not alike or about(own.numel) * own.dtype.itemsize < LEAST or own.name in self.shared:
            return False
        store.buffer, store.overwrites = buffer, True
        try:
            Trace(group.stores, exact=self.lowering.exact)
        except Reject:
            store.buffer, store.overwrites = own, False
            return False
        self.readers[buffer.name] = self.readers.get(own.name, set())
        return True
