"""`cupyops.swap(model)`: modules of torch.nn inside any model become those of cupyops.nn, and back."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch.nn import Module
from torch.nn.utils import parametrize

from .. import nn
from .._operator.derivation.distributed import is_spread
from ..errors import InputError

Class = type[Module]
Choice = Class | str

# Modules that work with the weights of those inside them, and when.
_BYPASSES: dict[Class, str] = {
    torch.nn.MultiheadAttention: "computes with the weights of its out_proj and does not call it",
    torch.nn.TransformerEncoderLayer: "in eval mode, with no gradient wanted, PyTorch's fused kernel may run in place of "
    "the modules inside (torch.backends.mha.set_fastpath_enabled(False) prevents it)",
}
_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)
_ORDINARY = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_CONTAINERS = (torch.nn.Sequential, *_LISTS)


@dataclass(frozen=True)
class Replaced:
    """A module that now is one of cupyops.nn."""

    name: str
    type: Class
    by: Class


@dataclass(frozen=True)
class Kept:
    """A module that stays as it is, and why."""

    name: str
    type: Class
    reason: str


class Swap:
    """What `swap` did; `print` it for a table. As a context manager it is undone at the end of the block.

    Attributes:
        replaced: a `Replaced` for each name of each module that was replaced.
        kept: a `Kept` for each that computes something and was not.
    """

    def __init__(self, replaced: list[Replaced], kept: list[Kept], changed: list[Module]) -> None:
        self.replaced = tuple(replaced)
        self.kept = tuple(kept)
        self._changed = changed

    def undo(self) -> None:
        """Give each module that was replaced the class of torch.nn that it had. A second call does nothing."""
        back = {ours: theirs for theirs, ours in twins().items()}
        for module in self._changed:
            theirs = _counterpart(type(module), back)  # from what it is now: it may have been parametrized since
            if theirs is not None:
                module.__class__ = theirs
        self._changed = []

    def __enter__(self) -> Swap:
        return self

    def __exit__(self, *exception: object) -> None:
        self.undo()

    def __str__(self) -> str:
        rows = [("module", "type", "outcome")]
        rows += [(one.name or "(the model)", _shown(one.type), f"now {_shown(one.by)}") for one in self.replaced]
        rows += [(one.name or "(the model)", _shown(one.type), f"kept: {one.reason}") for one in self.kept]
        sizes = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(text.ljust(size) for text, size in zip(row, sizes)).rstrip() for row in rows]
        title = f"{len(self.replaced)} replaced, {len(self.kept)} kept"
        return "\n".join([title, lines[0], "-" * max(map(len, lines)), *lines[1:]])


def swap(model: Module, *, only: Choice | Iterable[Choice] | None = None, skip: Choice | Iterable[Choice] = ()) -> Swap:
    """Make the torch.nn modules of a model those of cupyops.nn, in place, wherever there is one of the same name.

    Each module stays the object that it is; only its class changes, to a subclass that has the same state and another
    `forward`. So parameters, buffers, hooks, attributes, parametrizations, the training mode, memory formats, the
    `state_dict` and every reference to a module (an optimizer's, a second parent's, DDP's) are what they were, and the
    model itself may be a `torch.nn.Linear`. A new object in the parent's place would have to be given all that, and
    would leave the other references on the old one. The model is pickled as one of cupyops; `torch.compile` compiles it
    again when its classes change.

    A module is replaced where its class is exactly that of torch.nn, or that with parametrizations, and its parameters are
    ordinary ones: a subclass, of a module or of a tensor, may compute something else. Passes that look for modules by their
    exact class, such as `quantize_dynamic`, find none afterwards and say nothing: they come before. So it is with
    what looks for ops of PyTorch, such as a policy of selective checkpointing that saves `aten.mm`: it is to name
    `torch.ops.cupyops.linear.default` and so on.

    Args:
        model: any module.
        only: replace none but these: types of modules and names in the model (`"encoder.layers.0"`), one or several. A
            module is meant together with all that are inside it.
        skip: leave these as they are; in the same form.

    Returns:
        Swap: `.replaced`, `.kept` with a reason for each, `.undo()`; a context manager that undoes it at the end.

    Raises:
        InputError: `model` is no module, or a ScriptModule; `only` or `skip` name what is not there.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Sigmoid(), torch.nn.ReLU())
        >>> print(cupyops.swap(model))
        2 replaced, 1 kept
        module  type              outcome
        ---------------------------------------------------------
        0       torch.nn.Linear   now cupyops.nn.Linear
        2       torch.nn.ReLU     now cupyops.nn.ReLU
        1       torch.nn.Sigmoid  kept: cupyops.nn has no Sigmoid
    """
    if not isinstance(model, Module):
        raise InputError(f"model is {type(model).__name__}, expected a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            "model is a ScriptModule, whose code is fixed; swap before torch.jit.script or torch.jit.trace"
        )
    names: dict[Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    wanted = None if only is None else _chosen("only", only, names)
    unwanted = _chosen("skip", skip, names)

    table = twins()
    replaced: list[Replaced] = []
    kept: list[Kept] = []
    changed = []
    for module, called in names.items():
        before, ours = type(module), _counterpart(type(module), table)
        reason = _refusal(module, ours) if ours is not None else _why_not(module, called[0], table)
        if ours is not None and reason is None:
            if not unwanted.isdisjoint(called):
                reason = "skip names it"
            elif wanted is not None and wanted.isdisjoint(called):
                reason = "only does not name it"
            else:
                module.__class__ = ours
                changed.append(module)
                replaced += [Replaced(name, before, ours) for name in called]
        if reason is not None:
            kept += [Kept(name, before, reason) for name in called]
    return Swap(replaced, kept, changed)


def twins() -> dict[Class, Class]:
    """Each class of torch.nn that has a subclass of the same name, and of the same state, in cupyops.nn."""
    pairs = [(getattr(torch.nn, name, None), getattr(nn, name)) for name in nn.__all__]
    return {t: ours for t, ours in pairs if t is not None and issubclass(ours, t) and ours.__init__ is t.__init__}


def _counterpart(cls: Class, table: dict[Class, Class]) -> Class | None:
    """What `table` has for a class; for one that `torch.nn.utils.parametrize` made, the same on the other base."""
    if cls in table or cls.__module__ != parametrize.__name__ or cls.__bases__[0] not in table:
        return table.get(cls)
    return type(cls.__name__, (table[cls.__bases__[0]],), dict(vars(cls)))


def _refusal(module: Module, ours: Class) -> str | None:
    """Why a module of a class that has a twin cannot become one: its own attributes stand before those of any class."""
    methods = {name for base in ours.__mro__ if _is_ours(base) for name in vars(base) if not name.startswith("__")}
    if shadowed := methods & vars(module).keys():
        return f"its {', '.join(sorted(shadowed))} was replaced on the object itself"
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and type(tensor) not in _ORDINARY and not is_spread(tensor):
            return f"its {name} is a {type(tensor).__name__}, which may compute something else"
    return None


def _why_not(module: Module, name: str, table: dict[Class, Class]) -> str | None:
    """Why there is nothing to replace a module by; None for what only holds others, and for what is ours already."""
    cls = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        return "a ScriptModule, whose code is fixed"
    if any(_is_ours(base) for base in cls.__mro__):
        return None
    if isinstance(module, torch.nn.modules.lazy.LazyModuleMixin):
        return "lazy: swap after the first call, which makes its parameters"
    if cls.__module__.startswith("torch.ao."):
        return "quantized, or prepared for it"
    twin = next((base for base in cls.__mro__ if base in table), None)
    if twin is not None:
        return f"a subclass of {_shown(twin)}, which may compute something else"
    if cls in _BYPASSES:
        return _BYPASSES[cls]
    holds = cls is Module or isinstance(module, _CONTAINERS) or not module._modules.keys() <= {"parametrizations"}
    if holds or "parametrizations" in name.split("."):
        return None
    return f"cupyops.nn has no {cls.__name__}" if _shown(cls).startswith("torch.nn.") else "no module of torch.nn"


def _chosen(argument: str, choices: Choice | Iterable[Choice], names: dict[Module, list[str]]) -> set[str]:
    """The names of the modules that `only` or `skip` means, with those inside them."""
    theirs = {ours: twin for twin, ours in twins().items()}
    roots: set[str] = set()
    known = {name for called in names.values() for name in called}
    for choice in (choices,) if isinstance(choices, (str, type)) else choices:
        if isinstance(choice, str):
            if choice not in known:
                near = difflib.get_close_matches(choice, known, 1)
                hint = f"; is it {near[0]!r}?" if near else ""
                raise InputError(
                    f"{argument} names {choice!r}, but the model has no module of that name{hint}; "
                    "see model.named_modules()"
                )
            roots.add(choice)
        elif isinstance(choice, type) and issubclass(choice, Module):
            kind = theirs.get(choice, choice)
            roots.update(name for module, called in names.items() if isinstance(module, kind) for name in called)
        else:
            raise InputError(f"{argument} has {choice!r}, expected a type of module or the name of one in the model")
    return {name for name in known if not roots.isdisjoint(_paths(name))}


def _paths(name: str) -> Iterator[str]:
    """A module's name and those of all that it is inside of."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _is_ours(cls: type) -> bool:
    return getattr(nn, cls.__name__, None) is cls


def _shown(cls: type) -> str:
    """A class as users know it: `torch.nn.Linear`."""
    if _is_ours(cls):
        return f"cupyops.nn.{cls.__name__}"
    if getattr(torch.nn, cls.__name__, None) is cls:
        return f"torch.nn.{cls.__name__}"
    return f"{cls.__module__}.{cls.__qualname__}"
