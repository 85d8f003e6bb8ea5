"""A score that is what it was with something added, of which the derivative is 1: what is added."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .indexed import Formula

LOG2E = "1.4426950408889634"


def shift(score: Formula) -> Formula | None:
    """Return the term that a score adds to s, times log2(e); None where it does more, or other."""
    from pycparser.c_generator import CGenerator

    terms = list(_terms(score.expression, "+"))
    if [sign for sign, node in terms if _is_score(node)] != ["+"]:
        return None
    added = [(sign, node) for sign, node in terms if not _is_score(node)]
    if not added or any(_names_score(node) for _, node in added):
        return None
    write = CGenerator().visit
    return Formula.of(score.assigned, " ".join(f"{sign} {_scaled(node, write)}" for sign, node in added))


def _terms(node: Any, sign: str) -> Iterator[tuple[str, Any]]:
    """Yield the terms of a sum, each with its sign."""
    if type(node).__name__ == "BinaryOp" and node.op in "+-":
        yield from _terms(node.left, sign)
        yield from _terms(node.right, sign if node.op == "+" else "-" if sign == "+" else "+")
    else:
        yield sign, node


def _scaled(node: Any, write: Any) -> str:
    """A term times log2(e): of a product its first factor, which may be the same for many scores."""
    if type(node).__name__ == "BinaryOp" and node.op == "*":
        return f"({LOG2E} * ({write(node.left)})) * ({write(node.right)})"
    return f"{LOG2E} * in_reach_({write(node)})"


def _is_score(node: Any) -> bool:
    return type(node).__name__ == "ID" and node.name == "s"


def _names_score(node: Any) -> bool:
    return _is_score(node) or any(_names_score(child) for _, child in node.children())
