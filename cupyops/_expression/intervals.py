"""Bounds of a mask on the distance k - q, outside of which blocks of keys need not be looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .indexed import Formula

_FLIPPED = {"<": ">", "<=": ">=", ">": "<", ">=": "<=", "==": "=="}
_Linear = dict[str, int]  # how often each name is added, and under "" what is


@dataclass(frozen=True)
class Interval:
    """k - q, compared with a sum of numbers."""

    op: str
    limit: tuple[tuple[str, int], ...]

    def bounds(self, numbers: Mapping[str, float]) -> tuple[int | None, int | None]:
        """The least and the largest distance; None where there is none."""
        limit = sum(count * (int(numbers[name]) if name else 1) for name, count in self.limit)
        least = limit + 1 if self.op == ">" else limit if self.op in (">=", "==") else None
        most = limit - 1 if self.op == "<" else limit if self.op in ("<=", "==") else None
        return least, most


def intervals(mask: Formula, numbers: Sequence[str]) -> tuple[list[Interval], Formula | None]:
    """The conditions that bound k - q by integers among `numbers`, and the mask without them; None where nothing is left."""
    from pycparser.c_generator import CGenerator

    found, left = [], []
    for node in _conditions(mask.expression):
        one = _interval(node, numbers)
        if one is None:
            left.append(node)
        else:
            found.append(one)
    if not found:
        return [], mask
    text = " && ".join(f"({CGenerator().visit(node)})" for node in left)
    return found, Formula.of(mask.assigned, text) if text else None


def _conditions(node: Any) -> list[Any]:
    """The conditions that are to hold, all of them."""
    if type(node).__name__ == "BinaryOp" and node.op == "&&":
        return [*_conditions(node.left), *_conditions(node.right)]
    return [node]


def _interval(node: Any, numbers: Sequence[str]) -> Interval | None:
    if type(node).__name__ != "BinaryOp" or node.op not in _FLIPPED:
        return None
    left, right = _linear(node.left, numbers), _linear(node.right, numbers)
    if left is None or right is None:
        return None
    total = _sum(left, right, -1)
    q, k = total.pop("q", 0), total.pop("k", 0)
    if (q, k) not in ((1, -1), (-1, 1)):
        return None
    # of k - q + total, or of q - k + total, which is 0 where k - q is the total
    limit = tuple((name, -k * count) for name, count in total.items() if count)
    return Interval(node.op if k > 0 else _FLIPPED[node.op], limit)


def _linear(node: Any, numbers: Sequence[str]) -> _Linear | None:
    """A sum of names and integers; None of anything else."""
    kind = type(node).__name__
    if (
        kind == "Constant"
        and node.type == "int"
        and node.value.isdigit()
        and (node.value == "0" or node.value[0] != "0")
    ):
        return {"": int(node.value)}
    if kind == "ID" and (node.name in numbers or node.name in ("q", "k")):
        return {node.name: 1}
    if kind == "UnaryOp" and node.op in ("-", "+"):
        inner = _linear(node.expr, numbers)
        return inner if inner is None or node.op == "+" else _sum({}, inner, -1)
    if kind == "BinaryOp" and node.op in ("+", "-"):
        left, right = _linear(node.left, numbers), _linear(node.right, numbers)
        return None if left is None or right is None else _sum(left, right, 1 if node.op == "+" else -1)
    return None


def _sum(left: _Linear, right: _Linear, sign: int) -> _Linear:
    return {name: left.get(name, 0) + sign * right.get(name, 0) for name in {**left, **right}}
