"""Batch normalisation with relu behind it, and a residual that is added between them: in one operator.

In a Sequential the modules that follow each other say where. Elsewhere the graph of a forward does; the class then has a
forward that is written from the graph, in which each of these places is one call of `normalised`. That decides anew each
time: where somebody listens to one of the modules inside, or has replaced it, they are called one by one as before.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import Module
from torch.nn import functional as F

from ... import nn
from ..._dispatch.batch_norm.act import why_apart
from ..._dispatch.core import library
from ..._util import observed
from ...ops._batch_norm_act import batch_norm_act
from ..normalization import over_batch
from . import proof
from .calls import OURS
from .classes import Class, Recipe, is_unheard, kind
from .tracing import State, Traced, Unknown, name_of, probe

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_CHANNELS = 4  # of what is compared


def is_norm(module: Any) -> bool:
    """Return whether a module is a batch normalisation of ours that nobody listens to."""
    return type(module) in NORMS and is_unheard(module)


def is_relu(module: Any) -> bool:
    """Return whether a module is a relu of ours that nobody listens to."""
    return type(module) is nn.ReLU and is_unheard(module)


def _is_nothing(module: Any) -> bool:
    return type(module) is torch.nn.Identity and is_unheard(module)


def normalised(
    norm: Any, act: Module | None, between: Sequence[Module], x: Any, residual: Any = None, adds: str = ""
) -> Any:
    """act(norm(x) + residual), in one operator where nobody can tell.

    Args:
        norm: the normalisation.
        act: a relu; None for PyTorch's function.
        between: modules that are called with what comes of it, before the sum.
        x: what is normalised.
        residual: what is added, None where nothing is.
        adds: "add", or "iadd" where it is added in place.
    """
    fits = is_norm(norm) and (act is None or is_relu(act)) and all(map(_is_nothing, between))
    if fits and (not adds or _are_alike(x, residual)) and _is_one_pass(norm, x):
        return over_batch(norm, x, *([residual] if adds else []), function=batch_norm_act)
    y = norm(x)
    for module in between:
        y = module(y)
    if adds == "iadd":
        y += residual
    elif adds:
        y = y + residual
    return F.relu(y) if act is None else act(y)


def _is_one_pass(norm: Any, x: Any) -> bool:
    """Return whether kernels compute all at once; torch.compile joins them by itself."""
    if torch.compiler.is_dynamo_compiling() or not isinstance(x, Tensor) or x.dim() < 2:
        return False
    return why_apart(x, norm.training or norm.running_mean is None) is None


def _is_apart(module: Module, x: Any) -> bool:
    """Return whether PyTorch's functions are the fastest for each step, as in evaluation, or a compiler fuses them."""
    return observed.compiler_fuses() or (not module.training and isinstance(x, Tensor) and library.at_once(x))


def _are_alike(x: Any, residual: Any) -> bool:
    if not isinstance(x, Tensor) or not isinstance(residual, Tensor):
        return False
    return x.shape == residual.shape and x.dtype is residual.dtype and x.device == residual.device


# --- one after the other ---


def in_sequence(module: Module) -> Recipe | None:
    """The recipe of a Sequential in which a relu follows a normalisation; None of another module."""
    if not isinstance(module, torch.nn.Sequential) or inspect.unwrap(type(module).forward) is not _SEQUENTIAL:
        return None
    inside = [*module._modules.values()]
    found = any(is_norm(one) and is_relu(other) for one, other in pairwise(inside))
    return Recipe("sequence", (), "batch_norm_act in its forward", exact=False) if found else None


_SEQUENTIAL = torch.nn.Sequential.forward


@kind
def sequence(cls: Class, values: tuple[Any, ...], state: State) -> tuple[tuple[type, ...], dict[str, Any]]:
    """A Sequential that calls a normalisation and the relu behind it at once."""

    before: Any = cls.forward

    @functools.wraps(before)
    def forward(self: Module, input: Any) -> Any:
        if cls.forward is not before or _is_apart(self, input):
            return cls.forward(self, input)
        norm = None
        for module in self._modules.values():
            if norm is not None and is_relu(module):
                input, norm = normalised(norm, module, (), input), None
                continue
            if norm is not None:
                input, norm = norm(input), None
            if isinstance(input, Tensor) and is_norm(module):
                norm = module
            else:
                input = module(input)  # type: ignore[misc]
        return input if norm is None else norm(input)

    return (cls,), {"forward": forward}


# --- in a forward ---


def recognised(module: Module, traced: Traced) -> Recipe:
    """The recipe of a module in whose forward relu follows a normalisation, or its sum with a residual; raises `Unknown`."""
    if not any(is_norm(one) for one in module._modules.values()):
        raise Unknown("no normalisation over a batch")
    if sum(node.op == "placeholder" for node in traced.graph.nodes) != 1:
        raise Unknown("its forward takes more than a tensor")
    if "training" in dict(traced.state.values):
        raise Unknown("its forward is another in training")
    graph, state = traced.graph, traced.state
    joined = sum([_join(module, graph, node) for node in reversed([*graph.nodes])])
    if not joined:
        raise Unknown("nothing follows its normalisations that could be joined with them")
    for node in graph.nodes:
        if node.op == "call_function" and node.target is getattr(F, name_of(node), None):
            node.target = OURS.get(name_of(node), node.target)
    graph.lint()
    code = graph.python_code("self")
    named = tuple((name, value) for name, value in code.globals.items() if name in code.src and callable(value))
    named = tuple(one for one in named if one[0] not in _SCOPE)
    values = code.src, named
    if not all(_is_proven(module, values, training) for training in (True, False)):
        raise Unknown("a normalisation over a batch, with something behind it that is not what it seems")
    return Recipe("batch_norms", values, "batch_norm_act in its forward", exact=False, state=state)


_SCOPE: dict[str, Any] = {
    "torch": torch,
    "device": torch.device,
    "inf": math.inf,
    "nan": math.nan,
    "NoneType": type(None),
}


def _join(module: Module, graph: fx.Graph, act: fx.Node) -> bool:
    """Put one call in the place of a relu and what comes before it, where that can be joined."""
    if not _is_relu_call(module, act):
        return False
    before: Any = act.args[0]
    adds, residual, y = "", None, before
    if isinstance(before, fx.Node) and name_of(before) in ("add", "iadd", "add_") and before.op != "call_module":
        adds = "iadd" if name_of(before) == "iadd" or str(before.target).endswith("_") else "add"
        if len(before.args) != 2 or before.kwargs or before.next is not act or len(before.users) != 1:
            return False
        sides = before.args if adds == "iadd" else (before.args[0], before.args[1])
        found = [(one, other) for one, other in (sides, sides[::-1]) if _norm_before(module, one) is not None]
        if not found or not all(isinstance(side, fx.Node) for side in sides) or sides[0] is sides[1]:
            return False
        y, residual = found[0]
        if adds == "iadd" and y is not sides[0]:
            return False
    if (chain := _norm_before(module, y)) is None:
        return False
    norm, between = chain
    last = before if adds else act
    if not (_is_fresh(module, norm.args[0]) or _follow_directly([norm, *between, last])):
        return False
    with graph.inserting_before(act):
        modules = [graph.get_attr(str(node.target)) for node in (norm, *between)]
        own = graph.get_attr(str(act.target)) if act.op == "call_module" else None
        made = graph.call_function(normalised, (modules[0], own, tuple(modules[1:]), norm.args[0], residual, adds))
    act.replace_all_uses_with(made)
    for node in (act, *([before] if adds else []), *reversed(between), norm):
        graph.erase_node(node)
    return True


def _inside(module: Module, node: fx.Node) -> Any:
    """The module that a node calls."""
    return module._modules.get(str(node.target))


def _is_relu_call(module: Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        return len(node.args) == 1 and not node.kwargs and type(_inside(module, node)) is nn.ReLU
    inplace = node.kwargs.get("inplace", node.args[1] if len(node.args) > 1 else False)
    return name_of(node) in ("relu", "relu_") and node.op != "placeholder" and bool(node.args) and type(inplace) is bool


def _norm_before(module: Module, node: Any) -> tuple[fx.Node, list[fx.Node]] | None:
    """The normalisation that a node is, or is the result of by way of Identity modules; each with no other use."""
    between: list[fx.Node] = []
    while isinstance(node, fx.Node) and node.op == "call_module" and len(node.args) == 1 and len(node.users) == 1:
        one = _inside(module, node)
        if type(one) in NORMS:
            return node, between
        if type(one) is not torch.nn.Identity:
            return None
        between.insert(0, node)
        node = node.args[0]
    return None


def _is_fresh(module: Module, node: Any) -> bool:
    """Return whether a node is a convolution's result that nothing else reads, or changes in place."""
    convolutions = (torch.nn.Conv1d, torch.nn.Conv2d, torch.nn.Conv3d, torch.nn.Linear)
    if not isinstance(node, fx.Node) or node.op != "call_module" or len(node.users) != 1:
        return False
    return isinstance(_inside(module, node), convolutions)


def _follow_directly(nodes: list[fx.Node]) -> bool:
    return all(one.next is other for one, other in pairwise(nodes))


@kind
def batch_norms(cls: Class, values: tuple[Any, ...], state: State) -> tuple[tuple[type, ...], dict[str, Any]]:
    """A class with the forward that was written, for modules that are as they were when it was; others take their own."""
    source, named = values
    before, holds = cls.forward, state.check(cls)
    scope = {**_SCOPE, **dict(named)}
    exec(compile(source, f"<{cls.__name__}.forward by cupyops.swap>", "exec"), scope)
    written: Callable[..., Any] = scope["forward"]

    @functools.wraps(before)
    def forward(self: Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or _is_apart(self, args[0]) or not holds(self):
            return cls.forward(self, *args, **kwargs)
        return written(self, args[0])

    return (cls,), {"forward": forward}


class _Stand(Module):
    """Stand-in for a module inside: what it computes does not matter, how it is joined with others does."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(0.5 + proof.random((), torch.float32, seed).abs())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor + torch.sin(3 * x + self.factor)


def _is_proven(module: Module, values: tuple[Any, ...], training: bool) -> bool:
    """Compare results, gradients and running statistics, with small modules in place of those inside."""
    _, methods = batch_norms(type(module), values, State())
    copies = []
    for _ in range(2):
        inside: dict[str, Module] = {}
        for seed, (name, one) in enumerate(module._modules.items()):
            if type(one) in NORMS:
                inside[name] = _small(one, seed)
            elif one is not None:
                inside[name] = probe(one, {}) if type(one) in (nn.ReLU, torch.nn.Identity) else _Stand(seed)
        copy = probe(module, {}, inside)
        copy.training = training
        for one in inside.values():
            one.train(training)
        copies.append((copy, inside))
    (theirs, apart), (ours, joined) = copies
    dims: dict[Any, int] = {nn.BatchNorm1d: 1, nn.BatchNorm2d: 2, nn.BatchNorm3d: 3}
    sizes = {dims[type(one)] for one in module._modules.values() if type(one) in NORMS}
    x = proof.random((3, _CHANNELS, *([4] * max(sizes))), torch.float32, 7)
    parameters = tuple([p for one in of.values() for p in one.parameters()] for of in (apart, joined))
    if not proof.alike(
        lambda x: type(module).forward(theirs, x),
        lambda x: methods["forward"](ours, x),
        (x,),
        parameters,  # type: ignore[arg-type]
    ):
        return False
    buffers = ([b for one in of.values() for b in one.buffers()] for of in (apart, joined))
    return all(torch.allclose(one.double(), other.double()) for one, other in zip(*buffers))


def _small(norm: Any, seed: int) -> Module:
    """A normalisation of few channels that is as another otherwise."""
    made = type(norm)(_CHANNELS, norm.eps, norm.momentum, norm.affine, norm.track_running_stats)
    for at, parameter in enumerate(made.parameters()):
        parameter.data.copy_(proof.random(parameter.shape, torch.float32, 10 * seed + at))
    return made
