"""A residual sum and the norm that reads it, in one operator: `x = x + self.attention(...)`, and then `self.norm(x)`.

The text of a block's forward says which norm reads a sum. In a copy of that forward the sum is a call of `added`, which
computes the norm as well and leaves it with the sum; the norm takes it from there, if it gets that very tensor, as it was. So
the text decides only where it is worth while: a sum is a sum whoever reads it, and a norm that is given something else
normalises it. The last sum of a block is for the first norm of the next one in a list of blocks.
"""

from __future__ import annotations

import __future__
import ast
import functools
import inspect
import textwrap
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Module

from ..._dispatch.norm_lowered import HALF, of_autocast
from ..._util import torch_private
from ...ops._add_norm_lowered import add_norm_lowered
from . import calls
from .classes import MARK, Class, Recipe, derived, kind, recipe_of

# Whether sums and norms are one operator.
SUMS = True
# Whether that is so from one block to the next.
ACROSS = True
NEXT = "_cupyops_next"  # of a block: the first norm of the next one, alone in a tuple, as it is no module inside
_ADDED, _AFTER = "_cupyops_added", "_cupyops_after"  # `added` and `after`, as the text calls them
_DEPTH = 3  # of decorators
_LISTS = (torch.nn.ModuleList, torch.nn.Sequential)


# --- when it runs -----------------------------------------------------------------------------------------------------


class _Normed:
    """What a norm makes of a sum, which lies in the sum's `_cupyops_normed` until the norm is called."""

    __slots__ = ("norm", "of", "y")

    def __init__(self, norm: Module, of: tuple[Any, ...], y: Tensor) -> None:
        self.norm, self.of, self.y = norm, of, y

    def __reduce__(self) -> Any:
        return _nothing, ()  # a tensor is pickled and copied without it


def _nothing() -> None:
    return None


def added(norm: Any, a: Any, b: Any) -> Any:
    """a + b, with what `norm` makes of it, where one kernel computes both."""
    if is_dynamo_compiling() or type(a) is not Tensor or type(b) is not Tensor:
        return a + b
    residual, x = (a, b) if a.dtype is torch.float32 else (b, a)
    if residual.dtype is not torch.float32 or x.dtype not in HALF or a.shape != b.shape or a.device != b.device:
        return a + b
    if x.dtype is not of_autocast(x) or torch_private.functorch_active() or torch_private.forward_mode():
        return a + b
    lowering = getattr(norm, "_cupyops_lowering", None)
    if lowering is None or norm._forward_pre_hooks or not _are_there(norm, residual):
        return a + b
    if (of := lowering(residual)) is None:
        return a + b
    y, summed = add_norm_lowered(residual, x, [*of.sizes], of.scale, of.shift, of.eps, of.centred)
    summed._cupyops_normed = _Normed(norm, _state(norm, summed), y)  # type: ignore[attr-defined]
    return summed


def after(block: Module) -> Module | None:
    """The norm that reads what a block returns, where one is known to."""
    found: tuple[Module | None, ...] = vars(block).get(NEXT, (None,))
    return found[0]


def _are_there(norm: Module, x: Tensor) -> bool:
    """Whether a norm's parameters are as they are when it is called: a block that follows may get them only then."""
    return all(
        type(p) is torch.nn.Parameter and p.device == x.device and p.untyped_storage().size()
        for p in norm._parameters.values()
        if p is not None
    )


def taken(norm: Module, x: Any) -> Tensor | None:
    """What `added` left for a norm with its argument; None where there is nothing, or where something has changed since."""
    if is_dynamo_compiling():
        return None
    kept: _Normed | None = getattr(x, "_cupyops_normed", None)
    if kept is None or kept.norm is not norm:
        return None
    del x._cupyops_normed
    return kept.y if kept.of == _state(norm, x) else None


def _state(norm: Module, x: Tensor) -> tuple[Any, ...]:
    parameters = [p for p in norm._parameters.values() if p is not None]
    versions = [(id(p), p._version) for p in parameters]
    return x._version, of_autocast(x), torch.is_grad_enabled(), *versions


# --- which sums -------------------------------------------------------------------------------------------------------


def fused(module: Module, ours: Class | None, candidates: set[Module]) -> tuple[Class, str] | None:
    """The class of a module in whose forward a norm reads a sum, and what that is in words; None of any other.

    Args:
        module: of any class.
        ours: what it is to have otherwise, or None.
        candidates: norms whose results products alone read.
    """
    norms = tuple(sorted(name for name, one in module._modules.items() if one in candidates))
    recipe = None if ours is None else recipe_of(ours)
    if not SUMS or not norms or (ours is not None and (recipe is None or recipe.kind != "calls")):
        return None
    made = _with_sums(type(module).forward, norms)
    if made is None:
        return None
    values = (None if recipe is None else recipe.values, norms)
    what = "residual sums with norms in its forward"
    if recipe is not None:
        what = f"{recipe.what.removesuffix(' in its forward')}, {what}"
    return derived(type(module), Recipe("sums", values, what, exact=False)), what


@kind
def sums(cls: Class, values: tuple[Any, ...]) -> tuple[tuple[type, ...], dict[str, Any]]:
    """A class whose forward has calls of `added` for sums; `values`: those of `calls`, or None, and the norms' names."""
    of_calls, norms = values
    bases, methods = ((cls,), {}) if of_calls is None else calls.calls(cls, of_calls)
    forward = _with_sums(cls.forward, norms)
    if forward is None:  # its text is not there, as where a module is unpickled
        return bases, methods
    if of_calls is not None:
        forward = calls.rewritten(forward, *of_calls, []) or forward
    return bases, {**methods, "forward": forward}


def link(modules: Iterable[Module]) -> list[tuple[Module, Module]]:
    """Of blocks that follow each other in a list: each, and the first norm of the next."""
    found = []
    for parent in modules:
        blocks = [*parent._modules.values()] if isinstance(parent, _LISTS) and ACROSS else []
        for block, after in zip(blocks, blocks[1:]):
            recipes = [getattr(recipe_of(type(one)), "kind", None) for one in (block, after)]
            if recipes != ["sums", "sums"] or type(block) is not type(after) or block is after:
                continue
            theirs, recipe = getattr(type(after), MARK)
            if (name := _first(theirs.forward, recipe.values[1])) is not None:
                found.append((block, after._modules[name]))
    return found


# --- the text ---------------------------------------------------------------------------------------------------------


def _parsed(function: types.FunctionType) -> ast.FunctionDef | None:
    """The text of a function, if that is what it runs."""
    try:
        lines, start = inspect.getsourcelines(function)
        (tree,) = ast.parse(textwrap.dedent("".join(lines))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    if not isinstance(tree, ast.FunctionDef) or not tree.args.args:
        return None
    ast.increment_lineno(tree, start - 1)
    code = _compiled(tree, function)
    return tree if code is not None and _are_same(code, function.__code__) else None


def _compiled(tree: ast.FunctionDef, function: types.FunctionType) -> types.CodeType | None:
    """The code of a text, inside a function that has what is around it as its arguments."""
    free = [ast.arg(name) for name in function.__code__.co_freevars]
    inner = ast.FunctionDef(tree.name, _without_values(tree.args), tree.body, [], None)
    around = ast.FunctionDef("around", ast.arguments([], free, None, [], [], None, []), [inner], [], None)
    for one in (inner, around):
        one.type_params = []  # type: ignore[attr-defined]  # of Python 3.12
    module = ast.fix_missing_locations(ast.copy_location(ast.Module([around], []), tree))
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
    return ast.arguments(plain(args.posonlyargs), plain(args.args), vararg, plain(args.kwonlyargs), keyword, kwarg, nothing)  # type: ignore[arg-type]


def _are_same(one: types.CodeType, other: types.CodeType) -> bool:
    """Whether two codes do the same, wherever their text is."""
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
def _with_sums(function: Any, norms: tuple[str, ...]) -> types.FunctionType | None:
    """A copy of a forward that calls `added`; None where no norm reads a sum in it. Decorators are copied around it."""
    inner = inspect.unwrap(function)
    if not isinstance(inner, types.FunctionType) or not isinstance(function, types.FunctionType):
        return None
    tree = _parsed(inner)
    if tree is None or not _rewrite(tree, norms):
        return None
    code = _compiled(tree, inner)
    if code is None:
        return None
    inner.__globals__.update({_ADDED: added, _AFTER: after})
    cells = dict(zip(inner.__code__.co_freevars, inner.__closure__ or ()))
    closure = tuple(cells[name] for name in code.co_freevars)
    made = types.FunctionType(code, inner.__globals__, inner.__name__, inner.__defaults__, closure or None)
    made.__kwdefaults__ = inner.__kwdefaults__
    functools.update_wrapper(made, inner)
    del made.__wrapped__
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
    for body in _bodies(tree):
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
                reader = ast.Call(ast.Name(_AFTER, ast.Load()), [this], [])
            else:
                reader = ast.Attribute(this, norm, ast.Load())  # type: ignore[assignment]
            call = ast.Call(ast.Name(_ADDED, ast.Load()), [reader, total.left, total.right], [])
            statement.value = ast.copy_location(call, total)  # type: ignore[attr-defined]
            found |= norm is not None
    ast.fix_missing_locations(tree)
    return found


def _bodies(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    """The lists of statements in a text, those of functions inside left out."""
    for field in ("body", "orelse", "finalbody"):
        body = getattr(tree, field, None)
        if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
            yield body
            for one in body:
                if not isinstance(one, (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
                    yield from _bodies(one)


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
            if isinstance(function.value, ast.Name) and function.value.id == me:
                if isinstance(given, ast.Name) and given.id == name:
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


def _first(function: Any, norms: tuple[str, ...]) -> str | None:
    """The norm that a forward calls with its first argument."""
    tree = _parsed(inspect.unwrap(function))
    if tree is None or len(tree.args.args) < 2:
        return None
    return _reader(tree.body, tree.args.args[1].arg, tree.args.args[0].arg, norms)
