"""Names that the derivatives of a body read: nothing else is kept for backward, and derivatives of 1 are not computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import InputError
from .syntax import Body


@dataclass(frozen=True)
class Slopes:
    """Dependencies of an expression: its names; for each, the names that the derivative by it reads.

    ones: those by which the derivative is 1.
    """

    names: frozenset[str] = frozenset()
    reads: dict[str, frozenset[str]] = field(default_factory=dict)
    ones: frozenset[str] = frozenset()


def slopes(body: Body, y: str, names: Sequence[str]) -> Slopes:
    """Return the slopes of y by `names`. For anything but one assignment of sums and products they read every name."""
    try:
        statements = body.statements
    except InputError:  # the text has a reference of its own
        statements = []
    if len(statements) == 1 and type(statements[0]).__name__ == "Assignment":
        (one,) = statements
        if one.op == "=" and getattr(one.lvalue, "name", "") == y:
            return _slopes_of(one.rvalue, frozenset(names))
    return _any(frozenset(names) & body.words)


def _any(names: frozenset[str]) -> Slopes:
    return Slopes(names, dict.fromkeys(names, names))


def _slopes_of(node: Any, known: frozenset[str]) -> Slopes:
    kind = type(node).__name__
    if kind == "ID":
        own = frozenset({node.name} & known)
        return Slopes(own, dict.fromkeys(own, frozenset()), own)
    if kind == "BinaryOp" and node.op in "+-*/":
        return _of_two(node.op, _slopes_of(node.left, known), _slopes_of(node.right, known))
    if kind == "UnaryOp" and node.op == "-":
        one = _slopes_of(node.expr, known)
        return Slopes(one.names, one.reads)
    return _any(frozenset().union(*(_slopes_of(child, known).names for _, child in node.children())))


def _of_two(op: str, a: Slopes, b: Slopes) -> Slopes:
    names = a.names | b.names
    if op == "/" and b.names:
        return _any(names)
    factors = (b.names, a.names) if op == "*" else (frozenset(), frozenset())
    reads: dict[str, frozenset[str]] = {}
    for one, factor in zip((a, b), factors):
        for name, read in one.reads.items():
            reads[name] = reads.get(name, frozenset()) | read | factor
    ones = (a.ones | b.ones if op == "+" else a.ones if op == "-" else frozenset()) - (a.names & b.names)
    return Slopes(names, reads, ones)
