"""The text of a forward, with calls in the place of residual sums that norms read, and of activations of layers."""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import types
from collections.abc import Callable
from typing import Any

from . import texts

CALLED: dict[str, Callable[..., Any]] = {}
"""What a text calls: `added(norm, a, b)` for a + b, `after(block)` for the norm that reads what a block returns, and
`activated(act, layer, x)` for act(layer(x))."""
_PREFIX = "_cupyops_"  # of these among a function's globals
_DEPTH = 3  # of decorators


@functools.lru_cache(maxsize=256)
def with_sums(
    function: Any, norms: tuple[str, ...], acts: tuple[str, ...] = (), layers: tuple[str, ...] = ()
) -> types.FunctionType | None:
    """A copy of a forward that calls `added` and `activated`; None where no norm reads a sum in it, and no activation is
    one of a layer. Decorators are copied around it."""
    inner = inspect.unwrap(function)
    if not isinstance(inner, types.FunctionType) or not isinstance(function, types.FunctionType):
        return None
    tree = texts.parsed(inner)
    if tree is None or not _join(tree, acts, layers) | _rewrite(tree, norms):
        return None
    code = texts.compiled(tree, inner)
    if code is None:
        return None
    inner.__globals__.update({f"{_PREFIX}{name}": function for name, function in CALLED.items()})
    cells = dict(zip(inner.__code__.co_freevars, inner.__closure__ or ()))
    closure = tuple(cells[name] for name in code.co_freevars)
    made = types.FunctionType(code, inner.__globals__, inner.__name__, inner.__defaults__, closure or None)
    made.__kwdefaults__ = inner.__kwdefaults__
    functools.update_wrapper(made, inner)
    del made.__wrapped__  # type: ignore[attr-defined]
    return _around(function, inner, made)


def _around(function: types.FunctionType, inner: Any, made: types.FunctionType, depth: int = 0) -> Any:
    """The decorators of `function`, which are closures, around `made` in the place of `inner`."""
    if function is inner:
        return made
    cells, found = list(function.__closure__ or ()), False
    for at, cell in enumerate(cells):
        try:
            inside = cell.cell_contents
        except ValueError:
            continue
        if isinstance(inside, types.FunctionType) and depth < _DEPTH:
            copied = _around(inside, inner, made, depth + 1)
            if copied is not None:
                cells[at], found = types.CellType(copied), True
    if not found:
        return None
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(copy, function)
    copy.__wrapped__ = made  # type: ignore[attr-defined]
    return copy


def _rewrite(tree: ast.FunctionDef, norms: tuple[str, ...]) -> bool:
    """Put calls of `added` into a text; whether there are some."""
    me, found = tree.args.args[0].arg, False
    for body in texts.bodies(tree):
        for at, statement in enumerate(body):
            total = getattr(statement, "value", None)
            if not isinstance(total, ast.BinOp) or not isinstance(total.op, ast.Add):
                continue
            norm = None
            if name := _target(statement):
                norm = _reader(body[at + 1 :], name, me, norms)
                ends = body is tree.body and norm is None and _is_last(body[at + 1 :], name)
            else:
                ends = body is tree.body and isinstance(statement, ast.Return)
            if norm is None and not ends:
                continue
            this: ast.expr = ast.Name(me, ast.Load())
            if norm is None:
                reader = ast.Call(ast.Name(f"{_PREFIX}after", ast.Load()), [this], [])
            else:
                reader = ast.Attribute(this, norm, ast.Load())  # type: ignore[assignment]
            call = ast.Call(ast.Name(f"{_PREFIX}added", ast.Load()), [reader, total.left, total.right], [])
            statement.value = ast.copy_location(call, total)  # type: ignore[attr-defined]
            found |= norm is not None
    ast.fix_missing_locations(tree)
    return found


def _join(tree: ast.FunctionDef, acts: tuple[str, ...], layers: tuple[str, ...]) -> bool:
    """Put calls of `activated` into a text, for `self.act(self.layer(x))` in one statement or two; whether there are any."""
    me, found = tree.args.args[0].arg, False
    for body in texts.bodies(tree):
        for at, (one, following) in enumerate(itertools.pairwise(body)):
            name, act = _target(one), getattr(following, "value", None)
            given = _given(act, me, acts)
            if name is None or name != _target(following) or _given(getattr(one, "value", None), me, layers) is None:
                continue
            if isinstance(given, ast.Name) and given.id == name:
                act.args[0] = one.value  # type: ignore[union-attr, attr-defined]
                body[at] = ast.copy_location(ast.Pass(), one)
    for node in ast.walk(tree):
        layer: Any = _given(node, me, acts)
        if (x := _given(layer, me, layers)) is not None:
            node.args = [node.func, layer.func, x]  # type: ignore[attr-defined]
            node.func = ast.copy_location(ast.Name(f"{_PREFIX}activated", ast.Load()), node)  # type: ignore[attr-defined]
            found = True
    ast.fix_missing_locations(tree)
    return found


def _given(node: Any, me: str, names: tuple[str, ...]) -> ast.expr | None:
    """What one of these modules inside is called with, if an expression is that."""
    if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords or isinstance(node.args[0], ast.Starred):
        return None
    of = node.func
    if not isinstance(of, ast.Attribute) or of.attr not in names or not isinstance(of.value, ast.Name):
        return None
    return node.args[0] if of.value.id == me else None


def _target(statement: ast.stmt) -> str | None:
    """The one name that a statement gives its value to."""
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    plain = isinstance(statement, (ast.Assign, ast.AnnAssign)) and len(targets) == 1
    return targets[0].id if plain and isinstance(targets[0], ast.Name) else None


def _reader(body: list[ast.stmt], name: str, me: str, norms: tuple[str, ...]) -> str | None:
    """The norm that is first called with what a name holds, before the name holds something else."""
    for statement in body:
        for node in ast.walk(statement):
            if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
                continue
            function, given = node.func, node.args[0]
            if not isinstance(function, ast.Attribute) or function.attr not in norms:
                continue
            names = [one.id for one in (function.value, given) if isinstance(one, ast.Name)]
            if names == [me, name]:
                return function.attr
        if _target(statement) == name:
            return None
    return None


def _is_last(body: list[ast.stmt], name: str) -> bool:
    """Whether what a name holds is what a forward returns, alone or in a tuple."""
    if not body or any(_target(statement) == name for statement in body):
        return False
    returned = body[-1].value if isinstance(body[-1], ast.Return) else None
    return isinstance(returned, ast.Name) and returned.id == name


def first(function: Any, norms: tuple[str, ...]) -> str | None:
    """The norm that a forward calls with its first argument."""
    tree = texts.parsed(inspect.unwrap(function))
    if tree is None or len(tree.args.args) < 2:
        return None
    return _reader(tree.body, tree.args.args[1].arg, tree.args.args[0].arg, norms)
