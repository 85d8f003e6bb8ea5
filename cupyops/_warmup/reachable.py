"""Kernels that a function may launch: those that its code mentions, through the functions and tables that it names."""

from __future__ import annotations

import functools
import inspect
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from .._dispatch.core.forms import Forms
from .._kernel.kernel import Kernel
from .._operator.derivation.public import author_of
from .._operator.operator import Operator
from ..errors import InputError

_OTHERS = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "cupy"}  # packages that launch none of ours
_SIMULATOR = ("cupyops.simulator", "cupyops._simulate")  # which holds the text of every kernel that it has run
_CONTAINERS = (tuple, list, set, frozenset)


def kernels_of(subject: Any) -> list[Kernel]:
    """A kernel itself; of anything else the kernels that it mentions, which may be more than a call needs.

    Raises:
        InputError: it mentions none.
    """
    found: dict[int, Kernel] = {}
    seen: dict[int, Any] = {}  # the objects too: an address may be used again
    pending = [subject]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if isinstance(value, Kernel):
            found[id(value)] = value
        else:
            pending += _mentioned(value)
    if not found:
        name = getattr(subject, "__qualname__", None) or repr(subject)
        raise InputError(f"{name} mentions no kernel; give the kernels themselves, or a call of it in calls=")
    return list(found.values())


def _mentioned(value: Any) -> Iterable[Any]:
    """Return the objects that a value leads to, one step on."""
    if isinstance(value, Operator):
        backward = value.definition.launch_backward
        return value.definition.forward, None if backward is None else backward.launch
    if isinstance(value, Forms):  # and not to the list of all families, in which it stands
        return value.list
    if isinstance(value, functools.partial):
        return value.func, *value.args, *value.keywords.values()
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, types.FunctionType) and (author := author_of(value)) is not None:
        return (author,)
    if isinstance(value, types.FunctionType):
        return () if _is_foreign(value) else _named_in(value)
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, _CONTAINERS):
        return value
    if isinstance(value, (type, types.ModuleType)):
        return ()
    return _inside(value)


def _is_foreign(value: Any) -> bool:
    module = getattr(value, "__module__", None) or ""
    return module.partition(".")[0] in _OTHERS or module.startswith(_SIMULATOR)


def _inside(instance: Any) -> Iterator[Any]:
    """The attributes of an object, the functions and kernels of its class, the modules in a module."""
    if isinstance(instance, torch.nn.Module):
        yield from instance.children()
    own = [cls for cls in type(instance).__mro__ if cls is not object and not _is_foreign(cls)]
    for cls in own:
        yield from (value for value in vars(cls).values() if isinstance(value, (types.FunctionType, Kernel)))
    if own:
        yield from getattr(instance, "__dict__", {}).values()


def _named_in(function: types.FunctionType) -> Iterator[Any]:
    """The values of the names in a function: its globals, what is in modules that it names, its closure, its defaults."""
    names = set(_names(function.__code__))
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType):
            if value.__name__.partition(".")[0] not in _OTHERS:
                yield from (vars(value)[inside] for inside in names & vars(value).keys())
        else:
            yield value
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not filled yet
            continue
    yield from function.__defaults__ or ()
    yield from (function.__kwdefaults__ or {}).values()
    yield inspect.unwrap(function)


def _names(code: types.CodeType) -> Iterator[str]:
    """Global names and attributes, in functions inside too."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
