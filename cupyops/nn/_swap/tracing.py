"""Tracing of forwards: the graph of what a module computes, and the state of the module for which the graph holds.

Python decides many things while a forward is traced: which branch it takes, which numbers it reads. A graph therefore holds
for one state of the module, which `Traced` records: `State.check` compares it at each call, and where it differs the
module's own forward runs. That is sound because a forward is traced only if its code reads nothing but what is compared:
attributes that are plain values, constants and functions of its file, and functions of PyTorch that a graph records. Code
that stores, imports, catches, asks about the process or calls anything else is refused before any of it runs. What is traced
is a copy with stand-ins for parameters and for the modules inside, so the user's module takes no part.
"""

from __future__ import annotations

import builtins
import dis
import functools
import hashlib
import inspect
import math
import operator
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn import Module
from torch.nn import functional as F

from ..._util import observed


class Unknown(Exception):
    """A module's computation is not one of the patterns.

    Attributes:
        near: whether it is close to a pattern, so that the reason is worth telling.
    """

    def __init__(self, reason: str, near: bool = False) -> None:
        super().__init__(reason)
        self.near = near


# --- what code may do -------------------------------------------------------------------------------------------------

PLAIN = (bool, int, float, str, type(None), torch.dtype)
_FORBIDDEN: tuple[str, ...] = (
    "STORE_ATTR",
    "STORE_GLOBAL",
    "STORE_SUBSCR",
    "STORE_SLICE",
    "STORE_NAME",
    "LOAD_NAME",
    "IMPORT_NAME",
)
_FORBIDDEN += ("DELETE_ATTR", "DELETE_GLOBAL", "DELETE_SUBSCR", "BEFORE_WITH", "SETUP_WITH", "BEFORE_ASYNC_WITH")
_FORBIDDEN += ("SEND", "PUSH_EXC_INFO", "LOAD_SUPER_ATTR", "LOAD_SPECIAL")
_FORBIDDEN += ("IS_OP",)  # of a stand-in it is False, where `==` refuses to be a condition
_CONDITIONS = ("COMPARE_OP", "CONTAINS_OP", "UNARY_NOT", "FOR_ITER")
_BUILTINS = (
    "len", "float", "int", "bool", "min", "max", "abs", "range", "tuple", "list", "slice", "zip", "enumerate", "sum",
)  # fmt: skip
_METADATA = {"dtype", "shape", "ndim", "device", "T", "mT"}  # of tensors
_NAMESPACES = {"nn", "functional"}  # of torch


@functools.cache
def _recorded() -> tuple[frozenset[str], frozenset[Any]]:
    """The functions of PyTorch that a graph records: their names, and those outside of classes themselves."""
    table = torch.overrides.get_overridable_functions()
    names = frozenset(getattr(one, "__name__", "") for listed in table.values() for one in listed)
    spaces = (torch, F)
    return names, frozenset(one for space in spaces for one in table[space] if not isinstance(one, type))


def _is_allowed(name: str) -> bool:
    """Return whether an attribute of this name, of a tensor or of a Python module, can be read without any other effect."""
    if name in _METADATA or name in _NAMESPACES or isinstance(getattr(torch, name, None), torch.dtype):
        return True
    return name in _recorded()[0] or name in vars(math)


def is_pytorchs(function: Any) -> bool:
    """Return whether a function of torch.nn.functional is PyTorch's own, and not one that somebody has put there."""
    return isinstance(function, types.BuiltinFunctionType) or getattr(function, "__globals__", None) is vars(F)


def codes(function: Any) -> Iterator[types.CodeType]:
    """The code of a function, and of those that are written inside it."""
    pending = [function.__code__] if isinstance(function, types.FunctionType) else []
    while pending:
        code = pending.pop()
        yield code
        pending += [one for one in code.co_consts if isinstance(one, types.CodeType)]


def digest(function: Any) -> str:
    """A digest of a function's code, the same in each process of one version of Python; "" where it has none."""

    def parts(code: types.CodeType) -> tuple[Any, ...]:
        constants = [parts(one) if isinstance(one, types.CodeType) else repr(one) for one in code.co_consts]
        return code.co_code, code.co_names, code.co_varnames, constants

    if not isinstance(function, types.FunctionType):
        return ""
    return hashlib.sha256(repr((parts(function.__code__), function.__defaults__)).encode()).hexdigest()


# --- the state --------------------------------------------------------------------------------------------------------


class State(NamedTuple):
    """The values, functions and constants that a traced forward has read beside its input.

    Attributes:
        values: paths of attributes from the module on, as `eps` or `config.eps`, and their values.
        absent: parameters and modules, as `_modules` and a name, and whether each is None.
        functions: functions by place and name, with their digests; the place "" is the module's class, any other is the
            name of a Python module.
        constants: globals by the name of their Python module and their own, and their values.
    """

    values: tuple[tuple[str, Any], ...] = ()
    absent: tuple[tuple[str, str, bool], ...] = ()
    functions: tuple[tuple[str, str, str], ...] = ()
    constants: tuple[tuple[str, str, Any], ...] = ()

    def without(self, *paths: str) -> State:
        """Return this state without some attributes, which may have any value."""
        return self._replace(values=tuple(one for one in self.values if one[0] not in paths))

    def check(self, cls: type[Module]) -> Callable[[Module], bool]:
        """A function of a module that tells whether all is as it was, for modules that had the class `cls`.

        It is False where torch.compile traces, which then has the module's own forward, and fuses that.
        """
        scope: dict[str, Any] = {"cls": cls, "same": _same, "compiler_fuses": observed.compiler_fuses}
        tests = ["not compiler_fuses()"]
        for at, (path, value) in enumerate(self.values):
            scope[f"v{at}"] = value
            tests.append(f"(self.{path} is v{at} or same(self.{path}, v{at}))")
        for store, name, is_none in self.absent:
            none = f"self.{store}.get({name!r}) is None and self.__dict__.get({name!r}) is None"
            tests.append(f"({none})" if is_none else f"not ({none})")
        for at, (place, name, known) in enumerate(self.functions):
            owner = sys.modules[place] if place else cls
            function = getattr(owner, name, None)
            if function is None or digest(function) != known:
                return lambda module: False  # another version of the class than that which was traced
            scope |= {f"f{at}": function, f"g{at}": owner}
            if place:
                tests.append(f"getattr(g{at}, {name!r}, None) is f{at}")
            elif name == "forward":
                tests.insert(1, f"cls.forward is f{at}")
            else:
                tests.append(f"getattr(self.{name}, '__func__', self.{name}) is f{at}")
        for at, (place, name, value) in enumerate(self.constants):
            scope |= {f"c{at}": value, f"d{at}": sys.modules[place]}
            tests.append(f"same(getattr(d{at}, {name!r}, None), c{at})")
        made: Callable[[Module], bool] = eval(f"lambda self: {' and '.join(tests)}", scope)
        return made


NOTHING = State()


def _same(found: Any, value: Any) -> bool:
    """Return whether a value is one that was recorded, or a copy of it."""
    if found is value:
        return True
    if type(found) is not type(value):
        return False
    if isinstance(value, functools.partial):
        return found.func is value.func and _same(found.args, value.args) and found.keywords == value.keywords
    if isinstance(value, tuple):
        return len(found) == len(value) and all(map(_same, found, value))
    return type(value) in PLAIN and bool(found == value)


def state_of(module: Module) -> State:
    """The state that a module's forward reads; raises `Unknown` where it may do more than compute."""
    return _Reading(module).state()


class _Reading:
    """Collects the state that a module's forward reads, by its code; raises `Unknown` for code that may do anything else."""

    def __init__(self, module: Module) -> None:
        self.module, self.cls = module, type(module)
        if any(getattr(self.cls, name) is not getattr(Module, name) for name in ("__getattr__", "__getattribute__")):
            raise Unknown("its attributes are found in a way of its own")
        self.values: dict[str, Any] = {}
        self.absent: dict[tuple[str, str], bool] = {}
        self._branches = False
        self.functions: dict[tuple[str, str], str] = {}
        self.constants: dict[tuple[str, str], Any] = {}
        self._seen: set[types.FunctionType] = set()
        self._attributes: set[str] = set()
        self._owners: list[tuple[str, Any]] = []
        self._unknown: set[str] = set()
        self._function(self.cls.forward)
        self.functions["", "forward"] = digest(self.cls.forward)
        for path, owner in self._owners:  # now that all names are known
            self._object(path, owner)
        if self._unknown:
            raise Unknown(f"its forward reads {min(self._unknown)}")

    def state(self) -> State:
        functions = tuple((*where, code) for where, code in self.functions.items())
        constants = tuple((*where, value) for where, value in self.constants.items())
        absent = tuple((*where, is_none) for where, is_none in self.absent.items()) if self._branches else ()
        return State(tuple(self.values.items()), absent, functions, constants)

    def _function(self, function: Any) -> None:
        if not isinstance(function, types.FunctionType):
            raise Unknown("its code is no function of Python")
        if function in self._seen:
            return
        self._seen.add(function)
        if {*function.__code__.co_freevars} - {"__class__"} or inspect.isgeneratorfunction(function):
            raise Unknown("its forward is a closure or a generator")
        for code in codes(function):
            for step in dis.get_instructions(code):
                if step.opname in _FORBIDDEN:
                    raise Unknown(f"its forward does more than compute ({step.opname})")
                self._branches |= "JUMP_IF" in step.opname or step.opname in _CONDITIONS
                if step.opname == "LOAD_GLOBAL":
                    self._global(function, step.argval)
                elif step.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                    self._attribute(step.argval)

    def _global(self, function: types.FunctionType, name: str) -> None:
        scope, place = function.__globals__, function.__globals__.get("__name__", "")
        value = scope.get(name, getattr(builtins, name, None))
        if value is torch or value is math or (name in _BUILTINS and name not in scope):
            return
        if vars(sys.modules.get(place, types)) is not scope:
            raise Unknown("its forward reads globals of no Python module")
        if value is F or value is torch.nn:
            self.functions[place, name] = ""
        elif name in scope and all(type(one) in PLAIN for one in (value if type(value) is tuple else (value,))):
            self.constants[place, name] = value
        elif _is_recorded(value):
            self.functions[place, name] = digest(value)
        else:
            self._function(value)
            self.functions[place, name] = digest(value)

    def _attribute(self, name: str) -> None:
        if name in self._attributes:
            return
        self._attributes.add(name)
        own, missing = vars(self.module), object()
        value = own.get(name, missing)
        if value is missing and name in self.module._parameters:
            self.absent["_parameters", name] = self.module._parameters[name] is None
        elif value is missing and name in self.module._modules:
            if isinstance(self.module._modules[name], _CONTAINERS):
                raise Unknown("its forward reads a list of modules")
            self.absent["_modules", name] = self.module._modules[name] is None
        elif value is missing and name in self.module._buffers:
            raise Unknown("its forward reads a buffer")
        elif value is missing and getattr(self.cls, name, None) is not getattr(Module, name, None):
            value = getattr(self.cls, name)
            if isinstance(value, types.FunctionType):
                self._function(value)
                self.functions["", name] = digest(value)
            else:
                self._value(name, value)
        elif value is missing:
            if not _is_allowed(name):
                self._unknown.add(name)  # perhaps of an object that is known later
            elif callable(function := vars(F).get(name)):
                if not is_pytorchs(function):
                    raise Unknown(f"somebody has replaced torch.nn.functional.{name}")
                self.functions[F.__name__, name] = digest(function)
        elif name in _INTERNAL:
            raise Unknown(f"its forward reads {name}")
        else:
            self._value(name, value)

    def _value(self, path: str, value: Any) -> None:
        of = (value.func, *value.args, *value.keywords.values()) if type(value) is functools.partial else ()
        parts = value if type(value) in (tuple, torch.Size) else of or (value,)
        for part in parts:
            if type(part) is types.FunctionType and not _is_recorded(part):
                self._function(part)
            elif type(part) not in PLAIN and not _is_recorded(part):
                if len(parts) > 1 or not hasattr(value, "__dict__") or callable(value) or isinstance(value, Tensor):
                    raise Unknown(f"its forward reads {path}, a {type(value).__name__}")
                self._owners.append((path, value))
                return
        self.values[path] = value

    def _object(self, path: str, owner: Any) -> None:
        """The attributes of an object, such as a configuration, whose names the code has."""
        for name in self._attributes:
            if name in vars(owner):
                self._value(f"{path}.{name}", vars(owner)[name])
                self._unknown.discard(name)
            elif hasattr(type(owner), name):
                raise Unknown(f"its forward reads {path}.{name}, which is computed")


def _is_recorded(value: Any) -> bool:
    try:
        return value in _recorded()[1]
    except TypeError:  # not hashable
        return False


_INTERNAL = vars(Module()).keys() - {"training"}
_CONTAINERS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)


# --- the graph --------------------------------------------------------------------------------------------------------


class Number(float):
    """A number that knows of which attribute it is; what is computed of it is an ordinary number."""

    path: str
    asked: set[str]
    """The paths of numbers that Python has looked at, as a condition does."""


def _looked_at(name: str) -> Callable[..., Any]:
    def method(self: Number, *others: Any) -> Any:
        self.asked.add(self.path)
        return getattr(float, name)(self, *others)

    return method


for _name in ("__bool__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__int__", "__float__"):
    setattr(Number, _name, _looked_at(_name))
Number.__hash__ = float.__hash__  # type: ignore[method-assign]


class _Proxy(fx.Proxy):
    """Proxy with operators that work in place, which torch.fx takes for those that do not."""


class _Parameter(_Proxy):
    """A stand-in for a parameter, whose dtype and shape are known, so that a condition may ask them."""

    tracer: _Tracer

    def __getattr__(self, name: str) -> Any:
        if name in ("dtype", "shape", "ndim"):
            value = getattr(self.tracer.parameters[str(self.node.target)], name)
            self.tracer.asked[f"{self.node.target}.{name}"] = value
            return value
        return super().__getattr__(name)


def _by(function: Callable[..., Any]) -> Callable[[fx.Proxy, Any], Any]:
    return lambda self, other: self.tracer.create_proxy("call_function", function, (self, other), {})


for _name in ("iadd", "isub", "imul", "itruediv", "ipow", "ifloordiv", "imod", "iand", "ior", "ixor"):
    setattr(_Proxy, f"__{_name}__", _by(getattr(operator, _name)))


class _Tracer(fx.Tracer):
    def __init__(self, parameters: dict[str, Any]) -> None:
        super().__init__(autowrap_modules=())  # type: ignore[arg-type]
        self.parameters = parameters
        self.asked: dict[str, Any] = {}  # of the parameters

    def is_leaf_module(self, m: Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return (_Parameter if node.op == "get_attr" else _Proxy)(node, self)


class Traced(NamedTuple):
    """A forward as a graph. The modules inside are called.

    Attributes:
        graph: the graph of the forward with one tensor, its other arguments by default.
        state: the state in which the forward is this graph.
        paths: attributes whose value the forward only puts into the graph, where a `Number` stands for it.
        asked: what it has asked of parameters, as `weight.dtype`.
    """

    graph: fx.Graph
    state: State
    paths: frozenset[str]
    asked: frozenset[str]


def traces(module: Module) -> list[Traced]:
    """Trace a module's forward in training and in evaluation: one graph, or two if they differ, the present mode's first.

    Raises:
        Unknown: the forward takes several tensors, may do more than compute, or depends on its input's values.
    """
    parameters = list(inspect.signature(type(module).forward).parameters.values())[1:]
    if not parameters or any(p.default is p.empty and p.kind is not p.VAR_KEYWORD for p in parameters[1:]):
        raise Unknown("its forward takes several tensors, or none")
    if parameters[0].kind in (parameters[0].VAR_POSITIONAL, parameters[0].VAR_KEYWORD):
        raise Unknown("its forward takes any arguments")
    fixed = {p.name: p.default for p in parameters[1:] if p.kind is not p.VAR_KEYWORD}
    state = state_of(module)
    if "training" not in dict(state.values):
        return [_trace(module, module.training, state, fixed)]
    found: list[Traced | Unknown] = []
    for training in (module.training, not module.training):
        try:
            found.append(_trace(module, training, state, fixed))
        except Unknown as unknown:
            found.append(unknown)
    known = [one for one in found if isinstance(one, Traced)]
    if not known:
        raise found[0]  # type: ignore[misc]
    if len(known) == 2 and str(known[0].graph) == str(known[1].graph):
        return [known[0]._replace(state=state.without("training"))]
    return known


def _trace(module: Module, training: bool, state: State, fixed: dict[str, Any]) -> Traced:
    """The graph of a copy in which nothing is the user's but values that cannot change."""
    copy = probe(module, {}, {})
    copy.training = training
    stand_ins: dict[int, Module] = {}
    for name, one in module._modules.items():
        copy._modules[name] = None if one is None else stand_ins.setdefault(id(one), Module())
    for name, p in module._parameters.items():
        meta = None if p is None else torch.nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device="meta"), False)
        copy._parameters[name] = meta
    copy._buffers = {}
    asked: set[str] = set()
    numbers = [path for path, value in state.values if type(value) is float]
    try:
        for path in numbers:
            _set(copy, path, asked)
        tracer = _Tracer({name: p for name, p in module._parameters.items() if p is not None})
        graph = tracer.trace(copy, fixed)
    except Exception as error:
        raise Unknown(f"its forward cannot be traced ({type(error).__name__})") from error
    if any(node.op == "get_attr" and node.target not in copy._parameters for node in graph.nodes):
        raise Unknown("its forward reads a tensor that is no parameter")
    values = [(path, training if path == "training" else value) for path, value in state.values]
    state = state._replace(values=(*values, *tracer.asked.items()))
    return Traced(graph, state, frozenset(numbers) - asked, frozenset(tracer.asked))


def _set(copy: Any, path: str, asked: set[str]) -> None:
    """Have a `Number` in a copy, in copies of the objects on the way to it."""
    *owners, name = path.split(".")
    for part in owners:
        owner = vars(copy)[part]
        made = object.__new__(type(owner))
        vars(made).update(vars(owner))
        vars(copy)[part] = made
        copy = made
    number = Number(getattr(copy, name))
    number.path, number.asked = path, asked
    vars(copy)[name] = number


def reader(path: str) -> Callable[[Any], Any]:
    """A function that reads an attribute by its path, which torch.compile looks into, unlike `operator.attrgetter`."""
    made: Callable[[Any], Any] = eval(f"lambda self: self.{path}")
    return made


def probe(module: Module, parameters: dict[str, Tensor], modules: dict[str, Module] | None = None) -> Module:
    """A module that computes as another does, with other parameters and other modules inside, and without hooks."""
    made = type(module).__new__(type(module))
    made.__dict__.update(module.__dict__)
    for name in ("_parameters", "_buffers", "_modules"):
        made.__dict__[name] = dict(made.__dict__[name])
    made._parameters.update({n: torch.nn.Parameter(t) for n, t in parameters.items()})
    made._modules.update(modules or {})
    for name, value in made.__dict__.items():
        if "hooks" in name:
            made.__dict__[name] = type(value)()
    return made


def name_of(node: fx.Node) -> str:
    """A node's operation in one word, whichever way it was written: `mul` for `*`, `torch.mul` and `Tensor.mul`."""
    target: Any = node.target
    if node.op == "call_module":
        return "call_module"
    return target if isinstance(target, str) else str(getattr(target, "__name__", target))
