"""Lambdas of host code, as the macros of dispatches have them: functions inside of the function."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from .expressions import children, ctype
from .program import Node, text, under, walk
from .scope import NotTranslated, Scope, changed
from .statements import Writer
from .values import VOID, Type, Value


def reader(writer: Writer) -> Callable[[Node], Value]:
    """The function that writes a lambda, or a dispatch, before the statement under way, and gives its name, or its value."""
    return lambda node: _written(writer, node) if node.type == "lambda_expression" else writer.dispatched(node)


def _written(writer: Writer, node: Node) -> Value:
    scope, body = writer.scope, under(node, "body")
    _captured(node, scope)
    outer = {one.name for frame in scope.frames for one in frame.values()}
    kept = scope.before, scope.notes, scope.written
    scope.before, scope.notes, scope.written = [], [], []
    scope.frames.append({})
    inner = replace(writer, lines=[], depth=1, loops=[], returns=None, outputs=(), returned=[])
    try:
        parameters, inner.returns = _signature(node, scope)
        inner.block(body.named_children)
    finally:
        scope.frames.pop()
        scope.before, scope.notes, scope.written = kept
    returned = [inner.returns] if inner.returns is not None else inner.returned or []
    if any(one != returned[0] for one in returned):
        raise NotTranslated(node, f"a lambda that returns {' or '.join(map(str, returned))}: {text(node)[:60]!r}")
    name = scope.declare("inner ", Type("function")).name
    rebound = sorted(_rebound(inner.lines) & outer)
    scope.before.append(f"def {name}({', '.join(one.code for one in parameters)}):")
    scope.before += [f"    nonlocal {', '.join(rebound)}"] if rebound else []
    scope.before += inner.lines
    scope.read(node)
    return Value(name, Type("function", of=(returned[0] if returned else VOID, *(one.type for one in parameters))))


def _captured(node: Node, scope: Scope) -> None:
    """Refuse what is captured by its value, where the value is another later."""
    parts = [text(one) for one in under(node, "captures").children]
    used = {text(one) for one in walk(under(node, "body")) if one.type == "identifier"}
    named = {one for one in parts if re.fullmatch(r"\w+", one)}
    if "=" in parts:
        named |= {one for one in used if scope.find(one) is not None}
    else:
        named -= {one for before, one in itertools.pairwise(parts) if before == "&"}
    unknown = [one for one in parts if not re.fullmatch(r"[\[\],&=]|&?\s*\w+", one)]
    if unknown or "this" in named or named & scope.changed:
        raise NotTranslated(node, f"what a lambda captures: {text(node)[:60]!r}")


def _signature(node: Node, scope: Scope) -> tuple[Sequence[Value], Type | None]:
    """The parameters of a lambda, as variables of it, and the type that it returns, if it says so."""
    declarator = under(node, "declarator")
    if declarator is None:
        return [], None
    returns = None
    for one in declarator.named_children:
        if one.type == "trailing_return_type":
            returns = ctype(one, scope, text(one).removeprefix("->").strip())
        elif one.type not in ("parameter_list", "comment"):
            raise NotTranslated(one, f"{text(one)[:60]!r} of a lambda")
    return _parameters(under(declarator, "parameters"), node, scope), returns


def _parameters(given: Node, node: Node, scope: Scope) -> Sequence[Value]:
    found, inside = [], changed(under(node, "body"))
    for one in children(given):
        named = next((inner for inner in walk(one) if inner.type == "identifier"), None)
        spelled = under(one, "type")
        if named is None or spelled is None or (text(named) in inside and "&" in text(one)):
            raise NotTranslated(one, f"the parameter {text(one)[:60]!r} of a lambda")
        stars = "*" * sum(inner.type == "pointer_declarator" for inner in walk(one))
        found.append(scope.declare(text(named), ctype(spelled, scope, text(spelled) + stars)).value)
    return found


def _rebound(lines: Sequence[str]) -> set[str]:
    """The names that lines of Python assign to, but for those of the functions inside."""
    found: set[str] = set()
    pending: list[ast.AST] = list(ast.parse("def f():\n" + "\n".join(lines)).body[0].body)  # type: ignore[attr-defined]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        if not isinstance(node, ast.FunctionDef):
            pending += ast.iter_child_nodes(node)
    return found
