"""Functions inside forwards: copies of a module's methods whose names `F`, `nn`, `CrossEntropyLoss` and
`apply_rotary_pos_emb` mean ours.

A copy has the globals of the original, so whatever else it names is found where it was, also what is changed later. Only
the names that are to mean something else are other names in it, and those are added to the globals.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn import functional as F

from ... import ops
from ..._util import observed
from . import packed, positions, rotary, tables
from .classes import Class, Recipe, is_library, kind, twins
from .tracing import State, Unknown, codes, is_pytorchs

_NAMES = """avg_pool2d batch_norm conv2d cross_entropy dropout embedding gelu group_norm kl_div layer_norm linear log_softmax
nll_loss relu rms_norm scaled_dot_product_attention silu softmax"""


def _softmax(input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None) -> Tensor:
    return ops.softmax(input, dim, dtype)


def _log_softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    return ops.log_softmax(input, dim, dtype)


# with the parameters of PyTorch's, one of which is for its own warnings
OURS: dict[str, Callable[..., Any]] = {name: getattr(ops, name) for name in _NAMES.split()}
OURS |= {"softmax": _softmax, "log_softmax": _log_softmax, "scaled_dot_product_attention": packed.attention}
_THEIRS = {name: getattr(F, name) for name in OURS}
_DEPTH = 5  # of decorators, and of functions of the same file that a method calls
_PREFIX = "_cupyops_"
_HARMLESS = {"transformers.modeling_utils.PreTrainedModel"}  # what it does when a class is derived changes nothing


def _names(scope: dict[str, Any], name: str) -> types.ModuleType:
    """A Python module, `torch.nn` or `torch.nn.functional`, as a file names it, with functions of cupyops for PyTorch's own.

    What somebody has put in the place of one of them, or of the module in that file, is what is found, whenever that was.
    """
    like = scope[name]
    instead: dict[str, Any] = {known: (theirs, OURS[known]) for known, theirs in _THEIRS.items() if is_pytorchs(theirs)}
    if like is torch.nn:
        instead = {known: (getattr(like, known), ours) for known, ours in _losses().items()}
        instead["functional"] = F, _names(vars(like), "functional")

    def reading(attribute: str) -> property:
        theirs, ours = instead.get(attribute, (None, None))

        def read(_: Any) -> Any:
            found = getattr(scope[name], attribute)
            return ours if found is theirs else found

        return property(read)

    # properties are ten times as fast as `__getattr__` of a Python module
    methods: dict[str, Any] = {known: reading(known) for known in vars(like) if not known.startswith("__")}
    methods["__getattr__"] = lambda _, attribute: getattr(scope[name], attribute)
    return type("Names", (types.ModuleType,), methods)(f"cupyops.{name}")  # type: ignore[no-any-return]


class Options(NamedTuple):
    """Options for functions that PyTorch does not have under the same name.

    Attributes:
        rotates: whether the tables of the model's rotary embeddings are known to be such as `cupyops.rope` takes.
        exact: whether each operator is to round where the module did.
    """

    rotates: bool
    exact: bool


@functools.cache
def _losses() -> dict[str, Any]:
    """The loss modules, which forwards make for one call: by their names in torch.nn, those of cupyops.nn."""
    return {of.__name__: ours for of, ours in twins().items() if of.__name__.endswith("Loss")}


def recognised(module: Module, options: Options) -> Recipe:
    """The recipe of a module whose methods call functions that cupyops has; raises `Unknown`."""
    cls = type(module)
    told = {f"{b.__module__}.{b.__qualname__}" for b in cls.__mro__[:-1] if "__init_subclass__" in vars(b)}
    if is_library(cls.__module__) or not told <= _HARMLESS:
        raise Unknown("no module of torch.nn")
    found = [name for _, names in _methods(cls, options).values() for name in names]
    twin = next((base for base in cls.__mro__ if base in twins()), None)
    if twin is not None and _asks_super(cls, twin):
        found.append(f"cupyops.nn.{twin.__name__} as its base")
    if not found:
        raise Unknown("no module of torch.nn")
    names = tuple(dict.fromkeys(found))
    return Recipe("calls", (options, names), f"{', '.join(names)} in its forward", exact=rotary.NAME not in names)


@kind
def calls(cls: Class, values: tuple[Any, ...], state: State) -> tuple[tuple[type, ...], dict[str, Any]]:
    """A class with copies of the methods of its own that call functions of PyTorch which cupyops has."""
    twin = next((base for base in cls.__mro__ if base in twins()), None)
    bases = (cls, twins()[twin]) if twin is not None and _asks_super(cls, twin) else (cls,)
    return bases, {name: _while_it_is(cls, name, *made) for name, made in _methods(cls, values[0]).items()}


def _while_it_is(cls: Class, name: str, copied: Callable[..., Any], found: list[str]) -> Callable[..., Any]:
    """A method that is `copied` while the class has the method of which that is a copy.

    torch.compile has the class's own, whose functions it fuses, unless that calls experts: of them it would not make groups.
    """
    before: Any = getattr(cls, name)
    is_fused = tables.OF_EXPERTS not in found

    @functools.wraps(before)
    def method(self: Module, *args: Any, **kwargs: Any) -> Any:
        now = getattr(cls, name)
        ours = now is before and not (is_fused and observed.compiler_fuses())
        return copied(self, *args, **kwargs) if ours else now(self, *args, **kwargs)

    return method


def _asks_super(cls: Class, twin: Class) -> bool:
    """Return whether a subclass of a module of torch.nn has its forward, or calls it by `super()`."""
    forward = inspect.unwrap(cls.forward)
    return forward is twin.forward or {"super", "forward"} <= set(forward.__code__.co_names)


def _methods(cls: Class, options: Options) -> dict[str, tuple[Any, list[str]]]:
    """The methods of a class, by name, that are to be others, with the names of what these call."""
    made: dict[str, tuple[Any, list[str]]] = {}
    for base in cls.__mro__:
        if base.__module__.split(".")[0] == "torch" or base is object:
            break
        for name, method in vars(base).items():
            if not isinstance(method, types.FunctionType) or getattr(cls, name, None) is not method:
                continue  # nothing to call, or another class has one in its place
            if name != "forward" and (name not in _called(cls) or name.startswith("__")):
                continue
            found: list[str] = []
            if (copied := rewritten(method, options, found)) is not None:
                made[name] = copied, found
    return made


def _called(cls: Class) -> set[str]:
    """The names that a class's forward names: its methods among them."""
    return {name for code in codes(inspect.unwrap(cls.forward)) for name in code.co_names}


def rewritten(function: Any, options: Options, found: list[str], depth: int = 0) -> Any:
    """A copy of a function that calls ours, None where it calls none; `found` gets their names.

    Decorators that are closures around the function are copied with it.
    """
    if not isinstance(function, types.FunctionType):
        return None
    cells = {}
    for at, cell in enumerate(function.__closure__ or ()):
        try:
            inside = cell.cell_contents
        except ValueError:
            continue
        copied: Any = rewritten(inside, options, found, depth + 1) if depth < _DEPTH else None
        if copied is None and (copied := tables.table_of(inside, options.exact)) is not None:
            found.append(copied.name)
        if copied is not None:
            cells[at] = types.CellType(copied)
    names = _renamed(function, options, found, depth)
    if not names and not cells:
        return None
    function.__globals__.update(names)
    closure = tuple(cells.get(at, cell) for at, cell in enumerate(function.__closure__ or ()))
    code = _with_names(function.__code__, {name.removeprefix(_PREFIX) for name in names})
    made = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure or None)
    made.__kwdefaults__ = function.__kwdefaults__
    functools.update_wrapper(made, function)
    made.__wrapped__ = inspect.unwrap(function)  # type: ignore[attr-defined]
    makes_mask = any(positions.creates_mask(function.__globals__[name.removeprefix(_PREFIX)]) for name in names)
    return positions.told(made) if makes_mask else made


def _renamed(function: types.FunctionType, options: Options, found: list[str], depth: int) -> dict[str, Any]:
    """Return what a function's globals must have under other names."""
    scope, names = function.__globals__, dict[str, Any]()
    if is_library(scope.get("__name__", "")):
        return {}
    for name in _globals(function):
        value: Any = scope.get(name)
        if name.startswith(_PREFIX):
            continue
        if value is F or value is torch.nn:
            used = _attributes(function, name, functional=value is torch.nn)
            if used:
                names[_PREFIX + name] = scope.get(_PREFIX + name) or _names(scope, name)
                found += sorted(used)
        elif isinstance(value, type) and value is getattr(torch.nn, name, None) and name in _losses():
            names[_PREFIX + name] = _losses()[name]
            found.append(name)
        elif (table := tables.table_of(value, options.exact)) is not None:
            names[_PREFIX + name] = table
            found.append(table.name)
        elif isinstance(value, types.FunctionType) and depth < _DEPTH:
            ours: Any = None
            theirs = str(value.__name__)
            if theirs in OURS and value is _THEIRS[theirs] and is_pytorchs(value):
                ours = OURS[theirs]
                found.append(theirs)
            elif options.rotates and (ours := rotary.recognised(value)) is not None:
                ours = rotary.of_known_tables(value, ours)
                found.append(rotary.NAME)
            elif positions.creates_mask(value) and positions.are_counted(function):
                ours = positions.creating(value)
                found.append(positions.NAME)
            elif value.__globals__ is scope:
                ours = rewritten(value, options, found, depth + 1)
            if ours is not None:
                names[_PREFIX + name] = _while_it_means(function, name, value, ours)
    return names


def _while_it_means(function: types.FunctionType, name: str, value: Any, ours: Any) -> Any:
    """A function that is `ours` while a global of another function's file is `value`; else what the global is then."""
    file = sys.modules.get(function.__globals__.get("__name__", ""))
    if file is None or vars(file) is not function.__globals__:
        return ours

    @functools.wraps(value)
    def run(*args: Any, **kwargs: Any) -> Any:
        now = getattr(file, name)
        return ours(*args, **kwargs) if now is value else now(*args, **kwargs)

    return run


def _globals(function: types.FunctionType) -> list[str]:
    """The names that a function reads as globals and does nothing else with."""
    read: dict[str, bool] = {}
    for code in codes(function):
        for step in dis.get_instructions(code):
            if isinstance(step.argval, str) and step.argval in code.co_names:
                read[step.argval] = read.get(step.argval, True) and step.opname == "LOAD_GLOBAL"
    return [name for name, only in read.items() if only]


def _attributes(function: types.FunctionType, name: str, functional: bool) -> set[str]:
    """Return the names of our functions that a function reads from a Python module: `softmax` for `F.softmax`.

    functional: whether the Python module is torch.nn, whose `functional.softmax` and `CrossEntropyLoss` count.
    """
    taken: set[str] = set()
    for code in codes(function):
        steps = [s for s in dis.get_instructions(code) if s.opname not in ("CACHE", "PRECALL", "PUSH_NULL")]
        for at, step in enumerate(steps):
            if step.opname == "LOAD_GLOBAL" and step.argval == name:
                path = [one.argval for one in steps[at + 1 : at + 3] if one.opname in ("LOAD_ATTR", "LOAD_METHOD")]
                if functional and path[:1] == ["functional"] and len(path) == 2:
                    taken |= {path[1]} & OURS.keys()
                elif functional:
                    taken |= {*path[:1]} & _losses().keys()
                else:
                    taken |= {*path[:1]} & OURS.keys()
    return taken


def _with_names(code: types.CodeType, names: set[str]) -> types.CodeType:
    """A code that reads the globals `names` under the other names, in the functions inside it too."""
    inside = tuple(_with_names(one, names) if isinstance(one, types.CodeType) else one for one in code.co_consts)
    renamed = tuple(_PREFIX + name if name in names else name for name in code.co_names)
    return code.replace(co_consts=inside, co_names=renamed)
