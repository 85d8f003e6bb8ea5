"""The text of a function, where it is what the function runs: a file may have been changed since it was imported."""

from __future__ import annotations
import __future__

import ast
import functools
import inspect
import itertools
import linecache
import types
from collections.abc import Iterator

_SCOPES = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)  # whose names are not those around them


def parsed(function: types.FunctionType) -> ast.FunctionDef | None:
    """The text of a function with an argument, if that is what it runs; None of others."""
    try:
        lines, start = inspect.getsourcelines(function)
        if lines[0][0].isspace():  # of a class; without its indentation the lines of its docstring would be others
            lines, start = ["if True:\n", *lines], start - 1
        (tree,) = ast.parse("".join(lines)).body
        (tree,) = tree.body if isinstance(tree, ast.If) else (tree,)
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if not isinstance(function, types.FunctionType) or not isinstance(tree, ast.FunctionDef) or not tree.args.args:
        return None
    ast.increment_lineno(tree, start - 1)
    code = compiled(tree, function)
    return tree if code is not None and _are_same(code, function.__code__) else None


def compiled(tree: ast.FunctionDef, function: types.FunctionType) -> types.CodeType | None:
    """The code of a text, inside a function that has what is around it as its arguments."""
    free = [ast.arg(name) for name in function.__code__.co_freevars]
    inner = ast.FunctionDef(tree.name, _without_values(tree.args), tree.body, [], None)
    around = ast.FunctionDef("around", ast.arguments([], free, None, [], [], None, []), [inner], [], None)
    for one in (inner, around):
        one.type_params = []  # type: ignore[attr-defined]  # of Python 3.12
    imports = _imports(function.__code__.co_filename)
    module = ast.fix_missing_locations(ast.copy_location(ast.Module([*imports, around], []), tree))
    flags = function.__code__.co_flags & _FUTURE
    try:
        code = compile(module, function.__code__.co_filename, "exec", flags=flags, dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    for _ in range(2):
        code = next((one for one in code.co_consts if isinstance(one, types.CodeType)), None)  # type: ignore[assignment]
        if code is None:
            return None
    return code


_FUTURE = sum(getattr(__future__, name).compiler_flag for name in __future__.all_feature_names)


def _without_values(args: ast.arguments) -> ast.arguments:
    """Parameters without annotations; their defaults count for how many there are alone."""

    def plain(given: list[ast.arg]) -> list[ast.arg]:
        return [ast.arg(one.arg) for one in given]

    nothing: list[ast.expr] = [ast.Constant(None) for _ in args.defaults]
    keyword: list[ast.expr | None] = [None if one is None else ast.Constant(None) for one in args.kw_defaults]
    vararg, kwarg = (None if one is None else ast.arg(one.arg) for one in (args.vararg, args.kwarg))
    return ast.arguments(
        plain(args.posonlyargs), plain(args.args), vararg, plain(args.kwonlyargs), keyword, kwarg, nothing
    )  # type: ignore[arg-type]


def _are_same(one: types.CodeType, other: types.CodeType) -> bool:
    """Return whether two codes do the same, wherever their text is."""
    names = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars", "co_argcount", "co_kwonlyargcount")
    if any(getattr(one, name) != getattr(other, name) for name in names) or len(one.co_consts) != len(other.co_consts):
        return False
    for a, b in zip(one.co_consts, other.co_consts):
        if isinstance(a, types.CodeType) and isinstance(b, types.CodeType):
            if not _are_same(a, b):
                return False
        elif type(a) is not type(b) or repr(a) != repr(b):
            return False
    return True


@functools.lru_cache(maxsize=256)
def _imports(file: str) -> list[ast.stmt]:
    """The imports of a module outside its functions: methods of what is imported are called by other instructions."""
    try:
        body = ast.parse("".join(linecache.getlines(file))).body
    except (SyntaxError, ValueError):
        return []
    inside = itertools.chain.from_iterable(bodies(one) for one in body if not isinstance(one, _SCOPES))
    return [one for one in itertools.chain(body, *inside) if isinstance(one, (ast.Import, ast.ImportFrom))]


def bodies(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements in a text, those of functions inside left out."""
    for field in ("body", "orelse", "finalbody"):
        body = getattr(tree, field, None)
        if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
            yield body
            for one in body:
                if not isinstance(one, _SCOPES):
                    yield from bodies(one)
