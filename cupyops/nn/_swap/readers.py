"""Which modules give their result to products alone: to linear layers, convolutions and functions that autocast lowers.

What such a module gives is rounded to the half type of autocast whoever reads it, so it may round it itself. That is proven
of the text of the forward that calls it, for every way through it: each name that may hold the result is followed, into the
modules that get it too, and whatever is not known to be a product, a view or a question about the shape is another reader.
"""

from __future__ import annotations

import ast
import builtins
import dis
import functools
import inspect
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.nn import Module
from torch.nn import functional as F

from ... import nn
from . import texts
from .tracing import Unknown

_LAYERS: Any = (torch.nn.Linear, torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d, nn.Linear, nn.Conv2d)
_PRODUCTS = {cls.forward for cls in _LAYERS}
_FUNCTIONS: tuple[Any, ...] = (torch.addmm, torch.mm, torch.bmm, torch.matmul, F.linear, F.conv1d, F.conv2d, F.conv3d)
_VIEWS = {"view", "reshape", "transpose", "permute", "flatten", "contiguous", "unsqueeze", "squeeze"}
_ASKS = {"shape", "ndim", "device", "size", "dim", "numel"}
_OF_SELF = {"hasattr", "isinstance"}  # functions that look at a module and call none of it
_ALL = {"_modules", "children", "named_children", "modules", "named_modules", "apply"}  # of a module: all inside it
_SETTING_UP = ("__init__", "_init_weights", "init_weights", "reset_parameters", "extra_repr")

Keys = frozenset[str]
_NONE: Keys = frozenset()


def lowerable(modules: Iterable[Module], candidates: set[Module]) -> set[Module]:
    """Those of `candidates` whose results are read by products alone, by the forward of the module that they are in."""
    _parsed.cache_clear()  # somebody may have given a class another forward since
    parents = {module: {name for name, one in module._modules.items() if one in candidates} for module in modules}
    foreign = _named_from_outside(parents, frozenset().union(*parents.values()))
    found: set[Module] = set()
    for module, inside in parents.items():
        names = {name for name in inside - foreign if not _is_named_elsewhere(type(module), name)}
        if not names:
            continue
        try:
            flow = _Flow(module, frozenset(names), {})
        except Unknown:
            continue
        found |= {module._modules[name] for name in flow.called - flow.escaped}  # type: ignore[misc]
    return found


def _reads_products_only(module: Any, place: int | str) -> bool:
    """Whether a module gives an argument, by its place or its name, to products alone."""
    if (
        not isinstance(module, Module)
        or module._forward_pre_hooks
        or module._forward_hooks
        or not _is_called_plainly(module)
    ):
        return False
    forward = type(module).forward
    if forward in _PRODUCTS:
        return place in (0, "input")
    if forward is torch.nn.Sequential.forward:
        return place in (0, "input") and _reads_products_only(next(iter(module._modules.values()), None), 0)
    try:
        parameters = list(inspect.signature(_text_of(module)[0]).parameters.values())[1:]
        if isinstance(place, int):
            place = parameters[place].name if place < len(parameters) else ""
        kinds = {p.name: p.kind for p in parameters}
        if kinds.get(place) is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            return False
        return place not in _Flow(module, _NONE, {place: frozenset((place,))}).escaped
    except (Unknown, ValueError, RecursionError):
        return False


def _text_of(module: Module) -> tuple[types.FunctionType, ast.FunctionDef]:
    """A module's forward and its text, where nothing else than that text runs when it is called."""
    if not _is_called_plainly(module):
        raise Unknown("it is called in a way of its own")
    cls: Any = type(module)
    return _parsed(cls)


def _is_called_plainly(module: Module) -> bool:
    call = next(vars(base)["__call__"] for base in type(module).__mro__ if "__call__" in vars(base))
    return "forward" not in vars(module) and (call is Module.__call__ or _is_of_transformers(call))


@functools.lru_cache(maxsize=512)
def _parsed(cls: Any) -> tuple[types.FunctionType, ast.FunctionDef]:
    function = inspect.unwrap(cls.forward)
    if not isinstance(function, types.FunctionType) or function.__module__.split(".")[0] == "torch":
        raise Unknown("its forward is none that somebody has written")
    tree = texts.parsed(function)
    if tree is None:
        raise Unknown("its text is not there, or is not what runs")
    for decorator in tree.decorator_list:
        of = decorator.func if isinstance(decorator, ast.Call) else decorator
        if not _is_of_transformers(_value(of, function)):
            raise Unknown("its forward is decorated")
    return function, tree


def _is_of_transformers(function: Any) -> bool:
    return str(getattr(function, "__module__", "")).split(".")[0] == "transformers"


def _value(node: ast.expr, function: types.FunctionType) -> Any:
    """What a name, with attributes, means in a function, if that is a global; None where it is not."""
    if isinstance(node, ast.Name):
        return function.__globals__.get(node.id, getattr(builtins, node.id, None))
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, function), node.attr, None)
    return None


class _Flow:
    """Where results and arguments go in a forward.

    Attributes:
        called: the modules, by name, whose results are followed.
        escaped: what is read by something else than a product: names of modules and of arguments.
    """

    def __init__(self, module: Module, names: Keys, given: dict[str, Keys]) -> None:
        self.module, self.names = module, names
        self.function, tree = _text_of(module)
        self.me = tree.args.args[0].arg
        code = self.function.__code__
        self.inner = set(code.co_cellvars)  # that functions inside read, whenever they are called
        self.locals = {*code.co_varnames, *code.co_cellvars, *code.co_freevars}
        self.called: set[str] = set()
        self.escaped: set[str] = set()
        self.holds: dict[str, Keys] = {}
        for name, held in given.items():
            self._bind(ast.Name(name, ast.Store()), held)
        self._block(tree.body)

    # --- statements ---

    def _block(self, body: list[ast.stmt]) -> None:
        for statement in body:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            held = _NONE if node.value is None else self._read(node.value)
            for target in targets:
                self._bind(target, held)
        elif isinstance(node, ast.If):
            self._other(node.test)
            before = dict(self.holds)
            self._block(node.body)
            after, self.holds = self.holds, before
            self._block(node.orelse)
            for name, held in after.items():
                self.holds[name] = held | self.holds.get(name, _NONE)
        elif isinstance(node, ast.Expr):
            self._read(node.value)
        elif isinstance(node, ast.Return):
            if node.value is not None:
                self._other(node.value)
        elif not isinstance(node, (ast.Raise, ast.Pass)):
            self._everything(node)

    def _bind(self, target: ast.expr, held: Keys) -> None:
        if isinstance(target, ast.Name):
            if target.id == self.me:
                raise Unknown("it gives its own name to another")
            self.holds[target.id] = held
            self.escaped |= held if target.id in self.inner else _NONE
            return
        self.escaped |= held
        for part in ast.walk(target):
            if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                self.holds[part.id] = _NONE
            elif isinstance(part, ast.Name) and part.id != self.me:
                self.escaped |= self.holds.get(part.id, _NONE)

    # --- expressions ---

    def _other(self, node: ast.expr) -> None:
        """An expression whose value somebody else reads."""
        self.escaped |= self._read(node)

    def _read(self, node: ast.expr) -> Keys:
        """What the value of an expression may be."""
        if isinstance(node, ast.Name):
            if node.id == self.me:
                self.escaped |= self.names
            return self.holds.get(node.id, _NONE)
        if isinstance(node, ast.Attribute):
            return self._attribute(node)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Subscript):
            self._other(node.slice)
            return self._read(node.value)
        if isinstance(node, ast.IfExp):
            self._other(node.test)
            return self._read(node.body) | self._read(node.orelse)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.MatMult):
            self._read(node.left), self._read(node.right)
            return _NONE
        if isinstance(node, ast.Compare) and all(isinstance(op, (ast.Is, ast.IsNot)) for op in node.ops):
            for one in (node.left, *node.comparators):
                self._read(one)
            return _NONE
        if isinstance(node, (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.NamedExpr)):
            self._everything(node)
            return _NONE
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.expr):
                self._other(part)
        return _NONE

    def _attribute(self, node: ast.Attribute) -> Keys:
        if self._is_me(node.value):
            self._escape(node.attr)
            return _NONE
        held = self._read(node.value)
        if node.attr not in _ASKS:
            self.escaped |= held
        return _NONE

    def _call(self, node: ast.Call) -> Keys:
        function = node.func
        if isinstance(function, ast.Attribute) and self._is_me(function.value):
            return self._of_me(node, function.attr)
        if isinstance(function, ast.Name) and function.id in _OF_SELF and self._global(function) is not None:
            arguments = [one for one in node.args if not self._is_me(one)]
        else:
            arguments = list(node.args)
        passed = [self._read(one) for one in (*arguments, *(k.value for k in node.keywords))]
        if any(function_of is self._global(function) for function_of in _FUNCTIONS):
            return _NONE
        self.escaped |= frozenset().union(*passed)
        if not isinstance(function, ast.Attribute):
            self._other(function)
            return _NONE
        held = self._read(function.value)
        if function.attr in _VIEWS:
            return held
        if function.attr not in _ASKS:
            self.escaped |= held
        return _NONE

    def _of_me(self, node: ast.Call, name: str) -> Keys:
        """A call of a module inside, or of a method."""
        plain = len(node.args) == 1 and not node.keywords and not isinstance(node.args[0], ast.Starred)
        if name in self.names and plain:
            self.called.add(name)
            self._other(node.args[0])
            return frozenset((name,))
        self._escape(name)
        inside = getattr(self.module, name, None)
        if inside is None:  # such a call raises, if it is ever come to
            return _NONE
        places: list[int | str | None] = [*range(len(node.args)), *(k.arg for k in node.keywords)]
        starred = next((at for at, one in enumerate(node.args) if isinstance(one, ast.Starred)), len(node.args))
        for place, value in zip(places, (*node.args, *(k.value for k in node.keywords))):
            held = self._read(value)
            known = place is not None and (isinstance(place, str) or place < starred)
            if held and not (known and _reads_products_only(inside, place)):  # type: ignore[arg-type]
                self.escaped |= held
        return _NONE

    def _escape(self, attribute: str) -> None:
        """An attribute of the module is read, and not only called."""
        self.escaped |= self.names if attribute in _ALL else self.names & {attribute}

    def _is_me(self, node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id == self.me

    def _global(self, node: ast.expr) -> Any:
        """What a name means that is none of the function's own."""
        root = node
        while isinstance(root, ast.Attribute):
            root = root.value
        if not isinstance(root, ast.Name) or root.id in self.locals:
            return None
        return _value(node, self.function)

    def _everything(self, node: ast.AST) -> None:
        """What is not followed: all that is named in it is read by somebody."""
        for part in ast.walk(node):
            if isinstance(part, ast.Attribute) and self._is_me(part.value):
                self._escape(part.attr)
            elif isinstance(part, ast.Name):
                self.escaped |= self.holds.get(part.id, _NONE)


# --- other places that name a module ----------------------------------------------------------------------------------


def _functions(cls: type) -> Iterator[tuple[str, types.FunctionType]]:
    """What somebody has written for a class, set-up left out."""
    for base in cls.__mro__:
        if base.__module__.split(".")[0] in ("torch", "builtins"):
            continue
        for name, value in vars(base).items():
            value = value.fget if isinstance(value, property) else value
            function = inspect.unwrap(value) if callable(value) else None
            if isinstance(function, types.FunctionType) and name not in _SETTING_UP:
                yield name, function


def _codes(function: types.FunctionType) -> Iterator[types.CodeType]:
    pending = [function.__code__]
    while pending:
        code = pending.pop()
        yield code
        pending += [one for one in code.co_consts if isinstance(one, types.CodeType)]


def _is_named_elsewhere(cls: type[Module], name: str) -> bool:
    """Whether another function of a class than its forward names an attribute: a method, or a forward that it replaces."""
    own = inspect.unwrap(cls.forward)
    return any(
        name in code.co_names for _, function in _functions(cls) if function is not own for code in _codes(function)
    )


def _named_from_outside(modules: Iterable[Module], names: Keys) -> set[str]:
    """Of these names, those that methods of the modules take of anything but themselves."""
    named: set[str] = set()
    for cls in {type(module) for module in modules}:
        for _, function in _functions(cls):
            for code in _codes(function):
                if names.isdisjoint(code.co_names):
                    continue
                before = None
                for step in dis.get_instructions(code):
                    if step.opname in ("LOAD_ATTR", "LOAD_METHOD") and before != code.co_varnames[:1]:
                        named.add(str(step.argval))
                    local = step.opname.startswith("LOAD_FAST") and isinstance(step.argval, str)
                    before = (step.argval,) if local else None
    return named
