"""Checks of PyTorch's as conditions of Python; what a launch of cupyops checks by itself is left out."""

from __future__ import annotations

import ast
import re
from dataclasses import replace

from . import values
from .expressions import children, condition, python
from .program import Node, text, under
from .scope import NotTranslated, Scope
from .values import Value

_ASSERTS = re.compile(
    r"AT_(CHECK|ASSERTM?)|CHECK_(EQ|NE|GT|GE|LT|LE)|"
    r"TORCH_(CHECK(_(EQ|NE|GT|GE|LT|LE|VALUE|INDEX|TYPE|NOT_IMPLEMENTED))?|INTERNAL_ASSERT(_DEBUG_ONLY)?)|assert"
)
_SIGNS = {"EQ": "==", "NE": "!=", "GT": ">", "GE": ">=", "LT": "<", "LE": "<="}


def is_check(name: str) -> bool:
    """Return True if a macro is one of PyTorch's checks, or C's."""
    return _ASSERTS.fullmatch(name) is not None


def refusals(node: Node, name: str, given: Node, scope: Scope) -> list[tuple[str, str]]:
    """Return (condition, message) pairs in Python for a call that checks; none where a launch checks the same."""
    nodes = children(given)
    if not nodes:
        raise NotTranslated(node, f"a check of nothing: {text(node)[:60]!r}")
    last = name.rpartition("_")[2]
    if last in _SIGNS and len(nodes) > 1:
        left, right = (python(one, scope) for one in nodes[:2])
        if not left.type.is_number or not right.type.is_number:
            raise NotTranslated(node, f"{text(node)[:60]!r}")
        found: Value | None = values.computed(_SIGNS[last], left, right)
        rest = nodes[2:]
    else:
        found, rest = _needed(nodes[0], scope), nodes[1:]
        found = found and scope.done(found, node)
    messages = [python(one, scope) for one in rest]
    scope.read(given)
    if found is None or found.truth is True:
        return []
    shown = message(messages) if messages else repr(f"{found.code} does not hold")
    return [(f"not {found.code if found.binds > values.NOT else f'({found.code})'}", shown)]


def _needed(node: Node, scope: Scope) -> Value | None:
    """A condition without what a launch checks itself, of several that all have to hold; None where nothing is left."""
    if node.type == "parenthesized_expression":
        inner = _needed(children(node)[0], scope)
        scope.read(node)
        return inner
    if node.type == "binary_expression" and text(under(node, "operator")) in ("&&", "and"):
        sides = [_needed(under(node, side), scope) for side in ("left", "right")]
        scope.read(node)
        left, right = sides
        if left is None or right is None:
            return left or right
        code = f"{left.at(values.AND)} and {right.at(values.AND + 1)}"
        return replace(left, code=code, binds=values.AND)
    asked = condition(node, scope)
    return None if asked.checked else asked


def message(parts: list[Value]) -> str:
    """The Python of what a check says, of its parts."""
    if all(one.type.kind == "string" for one in parts) and len(parts) == 1:
        return parts[0].code
    if all(one.type.kind == "string" and one.code[0] in "'\"" for one in parts):
        return repr("".join(_literal_text(one.code) for one in parts))
    return f"''.join(map(str, ({', '.join(one.code for one in parts)},)))"


def _literal_text(code: str) -> str:
    return str(ast.literal_eval(code))
