"""Normalisations that are written in steps: which of ours each is, and the class that makes it so."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import Module

from ...ops._layer_norm import layer_norm
from ...ops._rms_norm import rms_norm
from ..twin import parameter
from . import proof
from .classes import Class, Recipe, kind
from .tracing import Number, State, Traced, Unknown, name_of, probe, reader

# what a normalisation in steps is made of
_STEPS = {"to", "float", "type", "type_as", "getattr", "pow", "square", "mul", "truediv", "div", "mean", "var", "sub"}
_STEPS |= {"add", "rsqrt", "sqrt"}
_SCALES = (1.0, 1e-3, 30.0)  # of the rows that are compared
_HALF = (torch.bfloat16, torch.float16)


def recognised(module: Module, traced: Traced) -> Recipe:
    """The recipe of a module that normalises its input's last dimension in steps; raises `Unknown`."""
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    if module._modules or module._buffers or len(parameters) > 2:
        raise Unknown("no normalisation")
    graph = traced.graph
    names = {name_of(node) for node in graph.nodes if node.op in ("call_function", "call_method")}
    if not names & {"rsqrt", "sqrt"} or not names & {"mean", "var"} or names - _STEPS:
        raise Unknown("no normalisation in steps that are known")
    if any(p.dim() != 1 for p in parameters.values()):
        raise Unknown("it normalises, and its parameters are not one for each element of the last dimension", near=True)
    eps = _eps(graph)
    state = traced.state.without(*traced.asked)  # each dtype is proven by itself
    if isinstance(eps, Number) and eps.path in traced.paths:
        number: float | str = eps.path
        state = state.without(eps.path)  # which is read at each call
    else:
        number = float(eps)
    weight, bias = (*parameters, None, None)[:2]
    for function in ("rms_norm", "layer_norm"):
        for offset in (0, 1) if weight else (0,):
            if function == "rms_norm" and bias:
                continue
            values = (function, weight, bias, offset, number, _is_cast_last(graph))
            if proven := _proven(module, (*values, None), state):
                what = function if not offset else f"{function} of 1 + weight in float32"
                return Recipe("norm", (*values, proven), what, exact=False, state=state)
    raise Unknown("it normalises, and computes none of rms_norm and layer_norm", near=True)


def _eps(graph: fx.Graph) -> float:
    """The number that is added before the root."""
    roots = [node for node in graph.nodes if name_of(node) in ("rsqrt", "sqrt")]
    inside = roots[0].args[0]
    if len(roots) != 1 or not isinstance(inside, fx.Node):
        raise Unknown("it normalises by more than one root", near=True)
    numbers = [x for x in inside.args if isinstance(x, (int, float))] if name_of(inside) == "add" else [0.0]
    if len(numbers) != 1:
        raise Unknown("it normalises, and adds no number before the root", near=True)
    return numbers[0]


def _is_cast_last(graph: fx.Graph) -> bool:
    """Return whether the result is given the input's dtype at the end; else it has the wider dtype of input and weight."""
    (output,) = next(node for node in graph.nodes if node.op == "output").args
    return isinstance(output, fx.Node) and name_of(output) in ("to", "type_as", "type")


@kind
def norm(cls: Class, values: tuple[Any, ...], state: State) -> tuple[tuple[type, ...], dict[str, Any]]:
    """A class that normalises by an operator where all is such as was proven, and by its own forward elsewhere.

    `values`: the operator, the names of weight and bias, what is added to the weight, eps or the path to it, whether the
    result is cast to the input's dtype, and the pairs of dtypes of input and weight for which all this is proven.
    """
    function, weight, bias, offset, eps, cast, proven = values
    before, holds, centred = cls.forward, state.check(cls), function == "layer_norm"
    number: Callable[[Module], float] = reader(eps) if isinstance(eps, str) else lambda _: eps

    @functools.wraps(before)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or not holds(self) or not isinstance(args[0], Tensor):
            return cls.forward(self, *args, **kwargs)
        x = args[0]
        scale = None if weight is None else parameter(self, weight)
        shift = None if bias is None else parameter(self, bias)
        if weight is not None and scale is None:
            return cls.forward(self, x)
        added = number(self)
        if type(added) is not float or not _serves(x, scale, proven):
            return cls.forward(self, x)
        if offset:
            scale = offset + scale
        if centred:
            y = layer_norm(x, x.shape[-1:], scale, shift, added)
        else:
            y = rms_norm(x, x.shape[-1:], scale, added)
        if y.dtype is x.dtype and (cast or scale is None or scale.dtype is x.dtype):
            return y
        return y.to(x.dtype if cast or scale is None else torch.promote_types(x.dtype, scale.dtype))

    return (cls,), {"forward": forward}


def _serves(x: Tensor, scale: Any, proven: Any) -> bool:
    """Return whether the operator is proven for such an input and weight."""
    if scale is None:
        if torch.is_autocast_enabled(x.device.type):
            return False
        return proven is None or (x.dtype, x.dtype) in proven
    if x.shape[-1:] != scale.shape:
        return False
    if proven is not None and (x.dtype, scale.dtype) not in proven:
        return False
    return x.dtype is scale.dtype or torch.is_autocast_enabled(x.device.type)


def _proven(module: Module, values: tuple[Any, ...], state: State) -> tuple[tuple[torch.dtype, torch.dtype], ...]:
    """The dtypes of input and weight of which the steps and the operator have the same results and gradients.

    None if float32 is not one. Double precision is none, as steps that go to float32 round there.
    """
    full = torch.float32, torch.float32
    if not all(_is_proven(module, values, state, *full, rows) for rows in ((2, 3), (), (4,), (2, 1, 3))):
        return ()
    wide = [(x, torch.float32) for x in _HALF] if values[1] else []
    # 1 + weight is rounded in half types, unlike in the steps
    pairs = [*wide, *((x, x) for x in _HALF if not values[3])]
    return (full, *(pair for pair in pairs if _is_proven(module, values, state, *pair)))


def _is_proven(
    module: Module,
    values: tuple[Any, ...],
    state: State,
    dtype: torch.dtype,
    of_weight: torch.dtype,
    rows: tuple[int, ...] = (2, 3),
) -> bool:
    """Return whether the steps and the operator are the same, for elements large and small."""
    _, weight, bias, *_ = values
    _, methods = norm(type(module), values, State())
    names = [name for name in (weight, bias) if name]
    size = module._parameters[weight].shape[0] if weight else 24  # type: ignore[union-attr]
    for scale in _SCALES:
        parameters = {name: proof.random((size,), of_weight, seed) for seed, name in enumerate(names, 1)}
        x = scale * proof.random((*rows, size), dtype, 7) + scale / 3
        theirs, ours = (probe(module, parameters) for _ in range(2))
        theirs.training = ours.training = dict(state.values).get("training", module.training)
        if not proof.alike(
            lambda x: type(module).forward(theirs, x),  # noqa: B023 - called here
            lambda x: methods["forward"](ours, x),  # noqa: B023
            (x,),
            ([*theirs.parameters()], [*ours.parameters()]),
            autocast=None if of_weight is dtype else dtype,
        ):
            return False
    return True
