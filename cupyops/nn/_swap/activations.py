"""Activations of whatever class, and the gated products of one with another projection."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import Module

from ... import nn
from ..._dispatch.gemm import epilogues
from ..._util import observed
from ...ops._gated_linear import gated_linear
from ...ops._geglu import geglu
from ...ops._gelu import gelu
from ...ops._relu import relu
from ...ops._silu import silu
from ...ops._swiglu import swiglu
from ..activation import is_small
from . import proof
from .classes import Class, Recipe, is_unheard, kind
from .tracing import State, Traced, Unknown, name_of, probe

Function = Callable[..., Tensor]
ACTIVATIONS: dict[str, Function] = {
    "relu": relu,
    "silu": silu,
    "gelu": gelu,
    "gelu_tanh": functools.partial(gelu, approximate="tanh"),
}
PYTORCHS: dict[str, Function] = {
    "relu": torch.relu,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": functools.partial(torch.nn.functional.gelu, approximate="tanh"),
}
GATED: dict[str, Function] = {"silu": swiglu, "gelu": geglu, "gelu_tanh": functools.partial(geglu, approximate="tanh")}
_STEPS = {"mul", "add", "sub", "pow", "tanh", "erf", "sigmoid", "truediv", "neg", "square"}
_FUNCTIONS = {"relu", "silu", "gelu"}
_POINTS = torch.linspace(-12, 12, 1201, dtype=torch.float64)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def recognised(module: Module, traced: Traced) -> Recipe:
    """The recipe of a module that is an activation, written in steps or as a call of PyTorch's; raises `Unknown`."""
    if module._modules or any(p is not None for p in (*module._parameters.values(), *module._buffers.values())):
        raise Unknown("no activation")
    nodes = [node for node in traced.graph.nodes if node.op not in ("placeholder", "output")]
    names = [name_of(node) for node in nodes]
    if not nodes or {node.op for node in nodes} - {"call_function", "call_method"}:
        raise Unknown("no activation")
    if set(names) - _STEPS - _FUNCTIONS or any(node.kwargs.get("inplace") for node in nodes):
        raise Unknown("no activation in steps that are known")
    state, theirs = traced.state, probe(module, {})
    theirs.training = dict(state.values).get("training", module.training)

    def proven(function: Function, dtype: torch.dtype) -> bool:
        return proof.alike(functools.partial(type(module).forward, theirs), function, (_POINTS.to(dtype),))

    for name, function in ACTIVATIONS.items():
        if proven(function, torch.float64):
            dtypes = tuple(dtype for dtype in _DTYPES if proven(function, dtype))
            is_one = len(names) == 1 and names[0] in _FUNCTIONS
            return Recipe("activation", (name, dtypes), name, exact=is_one, state=state)
    raise Unknown("an activation that is none of cupyops", near=True)


@kind
def activation(cls: Class, values: tuple[Any, ...], state: State) -> tuple[tuple[type, ...], dict[str, Any]]:
    """A class that calls an operator, for inputs of the dtypes for which it is proven."""
    (name, dtypes), before, holds = values, cls.forward, state.check(cls)
    function, pytorchs = ACTIVATIONS[name], PYTORCHS[name]

    @functools.wraps(before)
    def forward(self: Module, *args: Any, **kwargs: Any) -> Any:
        if (
            len(args) != 1
            or kwargs
            or not holds(self)
            or not isinstance(args[0], Tensor)
            or args[0].dtype not in dtypes
        ):
            return cls.forward(self, *args, **kwargs)
        x = args[0]
        if is_small(x):
            return pytorchs(x)
        return function(x)

    return (cls,), {"forward": forward, _IS: (name, dtypes, holds)}


# --- gated products -------------------------------------------------------------------------------------------------


_IS = "_cupyops_activation"  # of a class: the activation's name, its dtypes and whether a module is as it was


def name_of_activation(module: Any, dtype: torch.dtype = torch.float32) -> str | None:
    """Return the name in `ACTIVATIONS` of what a module computes; None for others, and for modules with hooks."""
    if not isinstance(module, Module) or not is_unheard(module):
        return None
    cls = type(module)
    if (known := getattr(cls, _IS, None)) is not None:
        name, dtypes, holds = known
        return name if dtype in dtypes and holds(module) else None
    if cls in (torch.nn.SiLU, nn.SiLU):
        return "silu" if not module.inplace else None
    if cls in (torch.nn.GELU, nn.GELU):
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(module.approximate)  # type: ignore[call-overload, no-any-return]
    return None


def projected(act: Module, gate: Module, up: Module, first: int | None, x: Tensor, is_last: bool) -> Tensor:
    """act(gate(x)) * up(x), or of the halves of gate(x): with plain layers in one operator, where that is worth it.

    is_last: whether the module calls `gate` after `up`.
    """
    name = None if observed.is_left_to_compilers(x) else name_of_activation(act, x.dtype)
    if name in GATED and _are_joined(gate, up, first, x, name):
        return gated_linear(x, gate.weight, None if gate is up else up.weight, name)  # type: ignore[arg-type]
    if first is not None:
        halves = gate(x).chunk(2, -1)
        gated, other = halves[first], halves[1 - first]
    elif is_last:
        other = up(x)
        gated = gate(x)
    else:
        gated, other = gate(x), up(x)
    if name is not None and gated.dtype is not x.dtype:  # under autocast
        name = name_of_activation(act, gated.dtype)
    if name not in GATED or gated.dtype is not other.dtype or gated.shape != other.shape:
        return act(gated) * other  # type: ignore[no-any-return]
    return GATED[name](gated, other)


def _are_joined(gate: Module, up: Module, first: int | None, x: Tensor, name: str) -> bool:
    """Return whether one operator is worth it for two layers of this library, which are but products and nobody hears."""
    if type(gate) is not nn.Linear or type(up) is not nn.Linear or first or type(x) is not Tensor:
        return False
    weight: Any = gate._parameters.get("weight")  # not what FSDP puts there for the time of a call
    other: Any = up._parameters.get("weight")
    if type(weight) is not torch.nn.Parameter or type(other) is not torch.nn.Parameter:
        return False
    features = weight.shape[0] if gate is not up else weight.shape[0] // 2
    if not epilogues.is_gate_worth_it(x, features, name):
        return False
    if gate._parameters.get("bias") is not None or up._parameters.get("bias") is not None:
        return False
    if weight.shape != other.shape or weight.dtype is not other.dtype or weight.device != other.device:
        return False
    return x.shape[-1:] == weight.shape[1:] and is_unheard(gate) and is_unheard(up)


def recognised_gate(module: Module, traced: Traced) -> Recipe:
    """The recipe of a module that is act(gate(x)) * up(x), and modules that are called after it; raises `Unknown`."""
    if not module._modules or any(p is not None for p in (*module._parameters.values(), *module._buffers.values())):
        raise Unknown("no gated product")
    graph = traced.graph
    x = next(node for node in graph.nodes if node.op == "placeholder")
    (node,) = next(node for node in graph.nodes if node.op == "output").args
    after: list[str] = []
    while isinstance(node, fx.Node) and node.op == "call_module" and len(node.all_input_nodes) == 1:
        after.insert(0, _single(node))
        node = node.args[0]
    if not isinstance(node, fx.Node) or name_of(node) != "mul" or node.op == "call_module":
        raise Unknown("no gated product")
    act, gate, up = _factors(module, *node.args)
    is_last = gate > up  # a node is greater than those before it
    values = (act, *_projections(gate, up, x), tuple(after), is_last)
    calls = sum(one.op == "call_module" for one in graph.nodes)
    others = {name_of(one) for one in graph.nodes if one.op in ("call_function", "call_method")}
    if calls != 1 + len(after) + len(set(values[1:3])) or others - {"mul", "chunk", "getitem", "getattr"}:
        raise Unknown("a gated product and more")
    name = name_of_activation(getattr(module, act))
    if not _is_gate_proven(module, values, traced.state):
        raise Unknown("a gated product that computes something else", near=True)
    return Recipe("gate", values, "swiglu" if name == "silu" else "geglu", exact=False, state=traced.state)


def _factors(module: Module, *factors: Any) -> tuple[str, fx.Node, fx.Node]:
    """The activation's name, what it is called with, and the other factor."""
    reason = Unknown("its gate has no activation")
    for one, other in (factors, factors[::-1]):
        if isinstance(one, fx.Node) and one.op == "call_module" and isinstance(other, fx.Node):
            act = getattr(module, _single(one))
            if name_of_activation(act) in GATED and isinstance(one.args[0], fx.Node):
                return _single(one), one.args[0], other
            if not act._modules and not act._parameters:
                reason = Unknown(f"{type(act).__name__} has no gated operator", near=True)
    raise reason


def _projections(gate: fx.Node, up: fx.Node, x: fx.Node) -> tuple[str, str, int | None]:
    """The names of the two projections of x; of one that is halved, its name twice and which half is the gate."""
    if gate.op == up.op == "call_module" and gate.args == up.args == (x,) and gate is not up:
        return _single(gate), _single(up), None
    halves = [(node.args[0], node.args[1]) for node in (gate, up) if name_of(node) == "getitem"]
    if len(halves) == 2 and halves[0][0] is halves[1][0] and [at for _, at in halves] in ([0, 1], [1, 0]):
        chunk: Any = halves[0][0]
        dim = chunk.kwargs.get("dim", chunk.args[2] if len(chunk.args) > 2 else 0)
        source = chunk.args[0]
        halved = name_of(chunk) == "chunk" and chunk.args[1:2] == (2,) and dim == -1
        if halved and source.op == "call_module" and source.args == (x,):
            return _single(source), _single(source), 0 if halves[0][1] == 0 else 1
    raise Unknown("its gate is of no two projections of its input")


def _single(node: fx.Node) -> str:
    name = str(node.target)
    if "." in name or node.kwargs or len(node.args) != 1:
        raise Unknown("it calls a module inside another")
    return name


@kind
def gate(cls: Class, values: tuple[Any, ...], state: State) -> tuple[tuple[type, ...], dict[str, Any]]:
    """A class with the product in one kernel, or its two layers in one operator; other modules are called as before."""
    act, left, right, first, after, is_last = values
    before, holds = cls.forward, state.check(cls)

    @functools.wraps(before)
    def forward(self: Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs or not holds(self) or not isinstance(args[0], Tensor):
            return cls.forward(self, *args, **kwargs)
        inside = self._modules
        if act not in inside or left not in inside or right not in inside:  # it was deleted, or put elsewhere
            return cls.forward(self, *args)
        y = projected(inside[act], inside[left], inside[right], first, args[0], is_last)  # type: ignore[arg-type]
        for name in after:
            y = getattr(self, name)(y)
        return y

    return (cls,), {"forward": forward}


def _is_gate_proven(module: Module, values: tuple[Any, ...], state: State) -> bool:
    """Compare with small modules in place of those inside: what they compute does not matter, how they are joined does."""
    act, left, right, first, after, _ = values
    wide = 8 if first is None else 16
    small: dict[str, Module] = {left: _linear(6, wide, 1), right: _linear(6, wide, 2)}
    small |= {name: _linear(8, 8, 3 + at) for at, name in enumerate(after)}
    small[act] = probe(module._modules[act], {})  # type: ignore[arg-type]
    _, methods = gate(type(module), values, State())
    x = proof.random((2, 3, 6), torch.float32, 7)
    one = probe(module, {}, small)
    one.training = dict(state.values).get("training", module.training)
    return proof.alike(
        lambda x: type(module).forward(one, x),
        lambda x: methods["forward"](one, x),
        (x,),
        tuple([p for name in small for p in small[name].parameters()] for _ in range(2)),  # type: ignore[arg-type]
    )


def _linear(inputs: int, outputs: int, seed: int) -> Module:
    made = torch.nn.Linear(inputs, outputs, device="meta").to_empty(device="cpu")
    for at, parameter in enumerate(made.parameters()):
        parameter.data.copy_(proof.random(parameter.shape, torch.float32, 10 * seed + at) / 2)
    return made
