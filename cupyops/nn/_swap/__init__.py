"""`cupyops.swap(model)`: the modules inside any model run operators of cupyops, and back."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch.nn import Module
from torch.nn.utils import parametrize

from ... import nn
from ..._operator.derivation.distributed import is_spread
from ...errors import InputError
from . import activations, batch_norms, calls, classes, norms, quantized, rotary, tracing
from .classes import Class, Recipe, counterpart, derived, is_derived, twins
from .hugging_face import settings
from .report import Kept, Reason, Replaced, Swap, shown
from .tracing import Unknown

Choice = Class | str

# Modules that work with the weights of those inside them, and when.
_BYPASSES: dict[Class, str] = {
    torch.nn.TransformerEncoderLayer: "in eval mode, with no gradient wanted, PyTorch's fused kernel may run in place of "
    "the modules inside (torch.backends.mha.set_fastpath_enabled(False) prevents it)",
}
_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict, torch.nn.ParameterList, torch.nn.ParameterDict)
_ORDINARY = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_CONTAINERS = (torch.nn.Sequential, *_LISTS)


def swap(
    model: Module,
    *,
    only: Choice | Iterable[Choice] | None = None,
    skip: Choice | Iterable[Choice] = (),
    exact: bool = False,
    keep_logits: bool = True,
) -> Swap:
    """Have the modules of a model run operators of cupyops, in place: by what a module computes, whatever its class.

    Each module stays the object that it is; only its class changes, to a subclass that has the same state and another
    `forward`. So parameters, buffers, hooks, attributes, parametrizations, the training mode, memory formats, the
    `state_dict` and every reference to a module (an optimizer's, a second parent's, DDP's) are what they were, and the
    model itself may be a `torch.nn.Linear`. A new object in the parent's place would have to be given all that, and
    would leave the other references on the old one. The model is pickled as one of cupyops; `torch.compile` compiles it
    again when its classes change.

    These are replaced, where their parameters are ordinary tensors:

    - a module whose class is exactly that of torch.nn, or that with parametrizations, by that of cupyops.nn of the same
      name; a subclass that has the forward of such a class, or calls it by `super()`, has ours below it then;
    - normalisations and activations that are written in steps, and gated products (`act(gate(x)) * up(x)`): the graph of
      the module's forward says which operator it may be, and both are compared, results and gradients on random input.
      What replaces the forward holds for the input dtypes for which that is proven and for the state in which the forward
      was read: attributes, `training`, functions and constants that it reads are compared at each call. Where something
      differs, the module's own forward runs. A forward that does more than compute, as one that stores an attribute or
      calls a function unknown to torch.fx, is left alone;
    - a `torch.nn.Linear` whose weight torchao has quantised, in 8 bits and alone, by `cupyops.quantized_linear`;
    - calls inside forwards: functions of `torch.nn.functional` that cupyops has, and rotary embeddings, which are compared
      as well, together with the model's tables;
    - in models of Hugging Face's transformers, attention where it is PyTorch's ("sdpa"), and the loss function.

    Passes that look for modules by their exact class, such as `quantize_dynamic`, find none afterwards and say nothing:
    they come before. So it is with what looks for ops of PyTorch, such as a policy of selective checkpointing that saves
    `aten.mm`: it is to name `torch.ops.cupyops.linear.default` and so on.

    Args:
        model: any module.
        only: replace none but these: types of modules and names in the model (`"encoder.layers.0"`), one or several. A
            module is meant together with all that are inside it.
        skip: leave these as they are; in the same form.
        exact: replace only a function of PyTorch by ours of the same name, never several steps by one: steps are rounded
            to a half type after each of them, an operator once at the end, which is nearer and not the same.
        keep_logits: False to have language models of transformers make no logits when they train: called with `labels`, in
            half types or under autocast, in training mode and with gradients, head and loss are one
            `cupyops.fused_linear_cross_entropy`, and the output's `logits` are None. `.settings` says of a model whether it
            is so: its forward must give the logits to transformers' own loss and into the output alone, by a head that is
            an ordinary Linear. Where the head has hooks, and under torch.compile, logits are made as before.

    Returns:
        Swap: `.replaced`, `.kept` with a reason for each, `.undo()`; a context manager that undoes it at the end.

    Raises:
        InputError: `model` is no module, or a ScriptModule; `only` or `skip` name what is not there; `exact` without
            `keep_logits`.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Sigmoid(), torch.nn.ReLU())
        >>> print(cupyops.swap(model))
        2 replaced, 1 kept
        modules  type              outcome
        ----------------------------------------------------------
        0        torch.nn.Linear   now cupyops.nn.Linear
        2        torch.nn.ReLU     now cupyops.nn.ReLU
        1        torch.nn.Sigmoid  kept: cupyops.nn has no Sigmoid
    """
    if not isinstance(model, Module):
        raise InputError(f"model is {type(model).__name__}, expected a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise InputError(
            "model is a ScriptModule, whose code is fixed; swap before torch.jit.trace, or use torch.export or "
            "torch.compile: torch.jit.script cannot compile operators of cupyops"
        )
    if exact and not keep_logits:
        raise InputError("exact=True keeps the logits, whose losses the fused ones are near to; swap with one of both")
    names: dict[Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(module, []).append(name)
    wanted = None if only is None else _chosen("only", only, names)
    unwanted = _chosen("skip", skip, names)

    def choice(called: list[str]) -> Reason | None:
        if not unwanted.isdisjoint(called):
            return Reason("skip names it")
        return Reason("only does not name it") if wanted is not None and wanted.isdisjoint(called) else None

    classes.forget()
    known: dict[Any, Recipe | Reason | None] = {}
    replaced: list[Replaced] = []
    kept: list[Kept] = []
    changed = []
    options = calls.Options(rotates=not exact and rotary.has_tables(model), exact=exact)
    for module, called in reversed(names.items()):  # those inside first: a gated product asks what its activation is
        before, reason = type(module), None
        ours, what = _successor(module, called[0], options, known)
        if isinstance(ours, Reason):
            reason = ours
        elif ours is not None and (reason := choice(called)) is None:
            module.__class__ = ours
            changed.append((module, before, ours))
            replaced += [Replaced(name, before, ours, what) for name in called]
        if reason is not None and reason.told:
            kept += [Kept(name, before, reason.text, reason.near) for name in called]
    order = {name: at for at, name in enumerate(name for called in names.values() for name in called)}
    replaced.sort(key=lambda one: order[one.name])
    kept.sort(key=lambda one: order[one.name])
    said, resets = settings(names, choice, exact, keep_logits)
    return Swap(replaced, kept, changed, said, resets)


def _successor(
    module: Module, name: str, options: calls.Options, known: dict[Any, Recipe | Reason | None]
) -> tuple[Class | Reason | None, str]:
    """The class that a module is to have, and what that is in words; or why there is none; None where there is nothing."""
    if not options.exact and (recipe := quantized.recognised(module)) is not None:
        return derived(type(module), recipe), recipe.what
    ours = counterpart(type(module))
    if ours is not None:
        twin = next(base for base in ours.__mro__ if getattr(nn, base.__name__, None) is base)
        return _refusal(module, ours) or ours, shown(twin)
    if not options.exact and (recipe := batch_norms.in_sequence(module)) is not None:
        return _made(module, recipe)
    if options.rotates and rotary.makes_tables(module) and not is_derived(type(module)):
        return _made(module, rotary.tables_of(module))
    reason = _why_not(module, name)
    if reason is None or not _may_be_derived(module):
        return reason, ""
    if (key := _key(module)) not in known:
        known[key] = _recognised(module, options.exact)
    found = known[key]
    if isinstance(found, Recipe):
        return _made(module, found)
    try:
        return _made(module, calls.recognised(module, options))
    except Unknown:
        return found or reason, ""


_PATTERNS = (norms.recognised, activations.recognised, activations.recognised_gate, batch_norms.recognised)


def _recognised(module: Module, exact: bool) -> Recipe | Reason | None:
    """The recipe of a module by what it computes; why it is none, if it is near to a pattern; None of any other."""
    try:
        traces = tracing.traces(module)
    except Unknown:
        return None
    reason = None
    for traced in traces:
        for recognise in _PATTERNS:
            try:
                found = recognise(module, traced)
            except Unknown as unknown:
                reason = Reason(str(unknown)) if unknown.near and reason is None else reason
                continue
            if not exact or found.exact:
                training = dict(found.state.values).get("training")
                if training is None:
                    return found
                return replace(found, what=f"{found.what} in {'training' if training else 'evaluation'}")
            reason = reason or Reason(f"{found.what} rounds once, and exact is asked for")
    return reason


def _key(module: Module) -> Any:
    """A key that is equal for modules that compute the same: class, mode, attributes, and the kinds of modules inside."""
    own = vars(module).keys() - vars(Module()).keys()
    values = [(name, vars(module)[name]) for name in sorted(own)]
    plain = (bool, int, float, str, type(None))
    return (
        type(module),
        module.training,
        tuple(module._buffers),
        *((name, type(value), value if isinstance(value, plain) else id(value)) for name, value in values),
        *((name, None if p is None else (p.shape, p.dtype)) for name, p in module.named_parameters(recurse=False)),
        *((name, type(one), activations.name_of_activation(one)) for name, one in module.named_children()),
    )


def _made(module: Module, recipe: Recipe) -> tuple[Class | Reason, str]:
    try:
        ours = derived(type(module), recipe)
    except TypeError as error:  # bases that cannot stand in this order, a metaclass of another mind
        return Reason(f"no class can be derived from its own ({error})"), ""
    return _refusal(module, ours) or ours, recipe.what


def _may_be_derived(module: Module) -> bool:
    """Return whether a module is one that somebody has written: neither of PyTorch nor made at run time."""
    cls = type(module)
    if isinstance(module, (torch.jit.ScriptModule, torch.fx.GraphModule)) or cls in _BYPASSES:
        return False
    if cls.__module__ == parametrize.__name__ or isinstance(module, torch.nn.modules.lazy.LazyModuleMixin):
        return False
    if any(getattr(cls, name) is not getattr(object, name) for name in ("__new__", "__reduce__", "__reduce_ex__")):
        return False  # it is made and pickled in a way of its own
    return not classes.is_library(cls.__module__) and "parametrizations" not in module._modules


def _refusal(module: Module, ours: Class) -> Reason | None:
    """Return why a module cannot be given a class, as where attributes of its own would hide the class's methods."""
    methods = {
        name for base in ours.__mro__ if _is_ours(base) for name in vars(base) if not name.startswith("_cupyops")
    }
    methods -= {name for name in methods if name.startswith("__")}
    if shadowed := methods & vars(module).keys():
        return Reason(f"its {', '.join(sorted(shadowed))} was replaced on the object itself")
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and type(tensor) not in _ORDINARY and not is_spread(tensor):
            return Reason(f"its {name} is a {type(tensor).__name__}, which may compute something else")
    return None


def _why_not(module: Module, name: str) -> Reason | None:
    """Return why there is nothing of the same name to replace a module by; None if it is ours already."""
    cls = type(module)
    if isinstance(module, torch.jit.ScriptModule):
        return Reason("a ScriptModule, whose code is fixed")
    if any(_is_ours(base) for base in cls.__mro__):
        return None
    if isinstance(module, torch.nn.modules.lazy.LazyModuleMixin):
        return Reason("lazy: swap after the first call, which makes its parameters")
    if cls.__module__.startswith("torch.ao."):
        return Reason("quantized, or prepared for it")
    twin = next((base for base in cls.__mro__ if base in twins()), None)
    if twin is not None:
        return Reason(f"a subclass of {shown(twin)}, which may compute something else")
    if cls in _BYPASSES:
        return Reason(_BYPASSES[cls])
    if cls is Module or isinstance(module, _CONTAINERS) or "parametrizations" in name.split("."):
        return None
    if not module._modules.keys() <= {"parametrizations"}:
        return Reason("holds others", told=False) if _may_be_derived(module) else None
    if shown(cls).startswith("torch.nn."):
        return Reason(f"cupyops.nn has no {cls.__name__}", near=False)
    return Reason("no module of torch.nn", near=False)


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
    return getattr(nn, cls.__name__, None) is cls or is_derived(cls)
