"""Assignments inside of expressions: `while (n-- > 0)`, `a[count++]`, `(k = k / 2) > 0`."""

from __future__ import annotations

from . import values
from .expressions import assigned, python, typed
from .program import Node, text, under
from .scope import NotTranslated, Scope
from .values import INT, Value


def update(node: Node, scope: Scope) -> Value:
    """`++n`, or `n++`, which is what `n` was before."""
    target, sign = _target(node, "argument", scope), text(under(node, "operator"))[0]
    one = values.number(1, INT, "1")
    after = _changed(target, assigned(values.computed(sign, target, one), target.type, node), node, scope)
    if text(node).startswith(sign):
        return after
    return assigned(values.computed("-" if sign == "+" else "+", after, one), target.type, node)


def assignment(node: Node, scope: Scope) -> Value:
    """`n = value`, `n += value`."""
    target, sign = _target(node, "left", scope), text(under(node, "operator")).removesuffix("=")
    right = python(under(node, "right"), scope)
    if not right.type.is_number:
        raise NotTranslated(node, f"an assignment of a {right.type} inside of an expression: {text(node)[:60]!r}")
    found = right if not sign else values.computed(sign, target, right)
    return _changed(target, assigned(found, target.type, node), node, scope)


def _target(node: Node, field: str, scope: Scope) -> Value:
    """The number that is assigned to. Raises `NotTranslated` for all but variables."""
    name = under(node, field)
    while name.type == "parenthesized_expression" and len(name.named_children) == 1:
        name = name.named_children[0]
    variable = scope.find(text(name)) if name.type == "identifier" else None
    if variable is None or not variable.value.type.is_number or variable.value.code != variable.name:
        raise NotTranslated(node, f"{node.type.replace('_', ' ')}: {text(node)[:60]!r}")
    return variable.value


def _changed(target: Value, value: Value, node: Node, scope: Scope) -> Value:
    scope.read(node)
    scope.changes += 1
    return typed(f"({target.code} := {value.code})", target.type)
