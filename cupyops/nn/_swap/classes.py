"""The classes that modules are given, and the way back from them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module
from torch.nn.utils import parametrize

from ... import nn
from ..._util import torch_private
from ..twin import not_scriptable
from .tracing import NOTHING, State

Class = type[Module]
MARK = "_cupyops_swapped"  # in a derived class: the class that the module had, and the recipe


@dataclass(frozen=True)
class Recipe:
    """The way in which a class is derived from a module's own: enough to do so again where a module is unpickled.

    Attributes:
        kind: a key of `KINDS`.
        values: what a kind is to know, hashable.
        what: for the report.
        exact: whether each operator rounds where the module did.
        state: the state of a module in which the class's forward stands for the module's own.
    """

    kind: str
    values: tuple[Any, ...]
    what: str
    exact: bool
    state: State = NOTHING


Kind = Callable[[Class, tuple[Any, ...], State], tuple[tuple[type, ...], dict[str, Any]]]
# (class, values, state) -> the bases and the methods of the derived class
KINDS: dict[str, Kind] = {}


def kind(function: Kind) -> Any:
    """Register a function of `KINDS` by its name."""
    KINDS[function.__name__] = function
    return function


@functools.cache
def twins() -> dict[Class, Class]:
    """Each class of torch.nn that has a subclass of the same name, and of the same state, in cupyops.nn."""
    pairs = [(getattr(torch.nn, name, None), getattr(nn, name)) for name in nn.__all__]
    return {t: ours for t, ours in pairs if t is not None and issubclass(ours, t) and ours.__init__ is t.__init__}


def counterpart(cls: Class) -> Class | None:
    """The twin of a class; of one that `torch.nn.utils.parametrize` made, the same on the twin of its base."""
    return _on(cls, twins().get)


def original(cls: Class) -> Class | None:
    """The class that a module had before it was given this one; None for one that it was not given."""
    back = {ours: theirs for theirs, ours in twins().items()}
    return _on(cls, lambda base: vars(base)[MARK][0] if MARK in vars(base) else back.get(base))


def _on(cls: Class, of: Callable[[Class], Class | None]) -> Class | None:
    if cls.__module__ != parametrize.__name__:
        return of(cls)
    base = of(cls.__bases__[0])
    return None if base is None else type(cls.__name__, (base,), dict(vars(cls)))


_derived: dict[tuple[Class, Recipe], Class] = {}


def derived(cls: Class, recipe: Recipe) -> Class:
    """A subclass of a module's class by a recipe. It has the name of the class, for those who look at names."""
    if (cls, recipe) not in _derived:
        _derived[cls, recipe] = _derive(cls, recipe)
    return _derived[cls, recipe]


def forget() -> None:
    """Derive classes anew from now on: somebody may have given theirs another forward since."""
    _derived.clear()


def _derive(cls: Class, recipe: Recipe) -> Class:
    bases, methods = KINDS[recipe.kind](cls, recipe.values, recipe.state)
    about: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    about |= {"__reduce_ex__": _reduce, "__prepare_scriptable__": _prepare_scriptable, MARK: (cls, recipe)}
    return type(cls.__name__, bases, {**about, **methods})


def _prepare_scriptable(self: Module) -> Any:
    raise not_scriptable(self)


def is_library(module: str) -> bool:
    """Return whether a Python module is PyTorch's or ours; the models of the benchmark are such as anybody writes."""
    root, _, rest = module.partition(".")
    return root == "torch" or (root == "cupyops" and rest.partition(".")[0] != "bench")


def is_unheard(module: Module) -> bool:
    """Return whether nobody listens to a module, or has given it a forward of its own."""
    own = module.__dict__
    heard = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    return not (heard or "forward" in own or torch_private.module_hooks())


def is_derived(cls: type) -> bool:
    """Return whether a class is one that `derived` made, or one on it."""
    return hasattr(cls, MARK)


def recipe_of(cls: type) -> Recipe | None:
    """Recipe by which a class was derived; None for other classes."""
    return getattr(cls, MARK)[1] if is_derived(cls) else None


def _reduce(self: Module, protocol: Any) -> Any:
    """Copy and pickle a module as usual, but derive its class anew, since no Python module has it by a name."""
    theirs, recipe = getattr(type(self), MARK)
    state = self.__getstate__() if hasattr(self, "__getstate__") else self.__dict__
    return _again, (theirs, recipe), state


def _again(cls: Class, recipe: Recipe) -> Module:
    made = derived(cls, recipe)
    return made.__new__(made)
