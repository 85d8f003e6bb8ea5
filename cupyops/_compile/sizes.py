"""Symbolic sizes of a graph as numbers: a program is made for the sizes of one call, and kept for the calls with the same.

A graph with dynamic sizes has symbols in its shapes. Those of its inputs are known at each call; those that data decides
(the number of elements that are not zero) never are, and what has them stays PyTorch's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
PLAIN = {torch.SymInt: int, torch.SymFloat: float, torch.SymBool: bool}


class Sizes:
    """Values of the symbols of a graph."""

    def __init__(self, values: Mapping[Any, Any] | None = None) -> None:
        self.values = dict(values or {})

    @property
    def key(self) -> tuple[Any, ...]:
        """The values, in the order of their symbols in the inputs."""
        return tuple(self.values.values())

    def knows(self, meta: Any) -> bool:
        """Return True if all numbers in a node's result follow from the symbols."""
        if isinstance(meta, torch.Tensor):
            return all(self.knows(n) for n in (*meta.shape, *meta.stride(), meta.storage_offset()))
        if isinstance(meta, (tuple, list)):
            return all(self.knows(one) for one in meta)
        if isinstance(meta, SYMBOLIC):
            return all(symbol in self.values for symbol in meta.node.expr.free_symbols)
        return True

    def number(self, value: Any) -> Any:
        """A number without symbols."""
        if isinstance(value, SYMBOLIC):
            return PLAIN[type(value)](value.node.expr.xreplace(self.values))
        return value

    def numbers(self, values: Sequence[Any]) -> tuple[int, ...]:
        """Integers without symbols."""
        return tuple(self.number(n) for n in values)


class Symbols:
    """Places of a graph's symbols in its arguments."""

    def __init__(self, graph: GraphModule) -> None:
        self.places: list[tuple[Any, int, int | None]] = []  # (symbol, argument, dimension or None for a number)
        self._hints: dict[Any, Any] = {}
        seen = set()
        for k, node in enumerate(graph.graph.find_nodes(op="placeholder")):
            meta = node.meta.get("val")
            numbers = enumerate(meta.shape) if isinstance(meta, torch.Tensor) else [(None, meta)]
            for dim, number in numbers:
                if not isinstance(number, SYMBOLIC):
                    continue
                symbol = number.node.expr
                if symbol.is_Symbol and symbol not in seen:
                    seen.add(symbol)
                    self.places.append((symbol, k, dim))
                    self._hints[symbol] = number.node.hint  # type: ignore[union-attr]

    def sizes(self, args: Sequence[Any]) -> Sizes:
        """The values in the arguments of a call."""
        if not self.places:
            return Sizes()
        return Sizes({symbol: args[k] if dim is None else args[k].shape[dim] for symbol, k, dim in self.places})

    def hinted(self) -> Sizes:
        """The values in the call that the graph was made for."""
        return Sizes(self._hints)
