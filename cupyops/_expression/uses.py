"""Dependencies of a mask, by its text: whether one map of it serves all batches and heads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .indexed import Formula


@dataclass(frozen=True)
class Uses:
    """Uses of the batch and the head in an expression: the tensor and dimension that each indexes, None for elsewhere.

    both: the tensors whose elements go by query and key.
    """

    b: frozenset[tuple[str, int] | None] = frozenset()
    h: frozenset[tuple[str, int] | None] = frozenset()
    both: frozenset[str] = frozenset()

    @classmethod
    def of(cls, formula: Formula | None) -> Uses:
        """Collect the uses in an expression."""
        if formula is None:
            return cls()
        found = list(_names(formula.expression, None))
        places = {name: frozenset(at for one, at in found if one == name) for name in "bhqk"}
        tensors = [frozenset(at[0] for at in places[name] if at is not None) for name in "qk"]
        return cls(places["b"], places["h"], tensors[0] & tensors[1])

    def differ(self, captured: Sequence[Any], tensors: Sequence[Tensor]) -> tuple[bool, bool, bool]:
        """(by batch, by head, whether an element of a tensor is read for each query and key), for these tensors.

        Those of `captured` have the names. Where a dimension has size 1, or is expanded, all is the same.
        """
        known = {one.name: x for one, x in zip(captured, tensors)}

        def by(places: frozenset[tuple[str, int] | None]) -> bool:
            return any(at is None or (known[at[0]].shape[at[1]] != 1 and known[at[0]].stride(at[1])) for at in places)

        return by(self.b), by(self.h), bool(self.both)


def _names(node: Any, at: tuple[str, int] | None) -> Iterator[tuple[str, tuple[str, int] | None]]:
    """Each name with where it is: the index of a tensor, or part of one, or None."""
    kind = type(node).__name__
    if kind == "ID":
        yield node.name, at
    elif kind == "ArrayRef":
        indices = node.subscript.exprs if type(node.subscript).__name__ == "ExprList" else [node.subscript]
        for dim, index in enumerate(indices):
            yield from _names(index, (node.name.name, dim))
    else:
        for _, child in node.children():
            yield from _names(child, at)
