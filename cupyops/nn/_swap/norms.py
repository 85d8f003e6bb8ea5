"""Normalisations that are written in steps: which of ours each is, and the class that makes it so."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.nn import Module

from ... import nn
from ..._dispatch.norm_lowered import of_autocast
from ..._util import torch_private
from ...ops._layer_norm import layer_norm, layer_norm_lowered
from ...ops._rms_norm import rms_norm, rms_norm_lowered
from . import calls, proof, readers, sums
from .classes import Class, Recipe, derived, is_library, kind, recipe_of
from .tracing import Unknown, graph_of, name_of, probe

# what a normalisation in steps is made of
_STEPS = {"to", "float", "type", "type_as", "getattr", "pow", "square", "mul", "truediv", "div", "mean", "var", "sub"}
_STEPS |= {"add", "radd", "rsqrt", "sqrt"}


def recognised(module: Module) -> Recipe:
    """The recipe of a module that normalises its input's last dimension in steps; raises `Unknown`."""
    parameters = {name: p for name, p in module._parameters.items() if p is not None}
    if module._modules or module._buffers or len(parameters) > 2:
        raise Unknown("no normalisation")
    graph = graph_of(module)
    names = {name_of(node) for node in graph.nodes if node.op in ("call_function", "call_method")}
    if not names & {"rsqrt", "sqrt"} or not names & {"mean", "var"} or names - _STEPS:
        raise Unknown("no normalisation in steps that are known")
    if any(p.dim() != 1 for p in parameters.values()):
        raise Unknown("it normalises, and its parameters are not one for each element of the last dimension")
    eps = _where(module, _eps(graph))
    weight, bias = (*parameters, None, None)[:2]
    for function in ("rms_norm", "layer_norm"):
        for offset in (0, 1) if weight else (0,):
            if function == "rms_norm" and bias:
                continue
            values = (function, weight, bias, offset, eps, _is_cast_last(graph), False)
            if _is_proven(module, values):
                what = function if not offset else f"{function} of 1 + weight in float32"
                return Recipe("norm", values, what, exact=False)
    raise Unknown("it normalises, and computes none of rms_norm and layer_norm")


def _eps(graph: fx.Graph) -> float:
    """The number that is added before the root."""
    roots = [node for node in graph.nodes if name_of(node) in ("rsqrt", "sqrt")]
    inside = roots[0].args[0]
    if len(roots) != 1 or not isinstance(inside, fx.Node):
        raise Unknown("more than one root")
    numbers = [x for x in inside.args if isinstance(x, (int, float))] if name_of(inside) in ("add", "radd") else [0.0]
    if len(numbers) != 1:
        raise Unknown("what it adds before the root is no number")
    return float(numbers[0])


def _where(module: Module, eps: float) -> float | str:
    """The attribute that has eps, which somebody may change, or its value."""
    names = [name for name, value in vars(module).items() if type(value) is float and value == eps]
    return names[0] if len(names) == 1 else eps


def _is_cast_last(graph: fx.Graph) -> bool:
    """Whether the result is given the input's dtype at the end; else it has the wider dtype of input and weight."""
    (output,) = next(node for node in graph.nodes if node.op == "output").args
    return isinstance(output, fx.Node) and name_of(output) in ("to", "type_as", "type")


@kind
def norm(cls: Class, values: tuple[Any, ...]) -> tuple[tuple[type, ...], dict[str, Any]]:
    """A class that normalises by an operator where input and weight are such as was proven, and as before elsewhere."""
    function, weight, bias, offset, eps, cast, lowers = values
    before, centred = cls.forward, function == "layer_norm"

    def lowering(self: Module, x: Any) -> Lowering | None:
        scale = None if weight is None else getattr(self, weight)
        shift = None if bias is None else getattr(self, bias)
        if x.dtype is not torch.float32 or not _serves(x, scale, offset):
            return None
        if (half := _lowered(self, x, scale, shift)) is None:
            return None
        number = getattr(self, eps) if isinstance(eps, str) else eps
        if offset:
            scale = offset + scale  # type: ignore[operator]
        return Lowering(half, x.shape[-1:], scale, shift, number, centred)

    @functools.wraps(before)
    def forward(self: Module, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return before(self, *args, **kwargs)
        x = args[0]
        if lowers and (y := sums.taken(self, x)) is not None:
            return y
        scale = None if weight is None else getattr(self, weight)  # a replica has no parameters, but has these
        shift = None if bias is None else getattr(self, bias)
        if not _serves(x, scale, offset):
            return before(self, x)
        number = getattr(self, eps) if isinstance(eps, str) else eps
        if offset:
            scale = offset + scale  # type: ignore[operator]
        if lowers and x.dtype is torch.float32 and (half := _lowered(self, x, scale, shift)) is not None:
            return Lowering(half, x.shape[-1:], scale, shift, number, centred)(x)
        if not centred:
            y = rms_norm(x, x.shape[-1:], scale, number)
        else:
            y = layer_norm(x, x.shape[-1:], scale, shift, number)
        return y.to(x.dtype if cast or scale is None else torch.promote_types(x.dtype, scale.dtype))

    def rms(self: Module, x: Tensor) -> tuple[Any, ...] | None:
        """The arguments of rms_norm after `x` of a half type; None where the module's own steps are to run."""
        scale = None if weight is None else getattr(self, weight)
        if scale is None or offset or not _serves(x, scale, offset):
            return None
        return x.shape[-1:], scale, getattr(self, eps) if isinstance(eps, str) else eps

    roles = {} if centred else {"_cupyops_rms": rms}
    return (cls,), {"forward": forward, **({"_cupyops_lowering": lowering, **roles} if lowers else {})}


def _serves(x: Any, scale: Tensor | None, offset: int) -> bool:
    """Whether the operator computes what the steps do. These go to float32 also from float64; 1 + weight is rounded in
    half types, which the steps are not."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.dtype is torch.float64:
        return False
    if scale is None:
        return not torch.is_autocast_enabled(x.device.type)
    if x.shape[-1:] != scale.shape:
        return False
    if scale.dtype is torch.float32:
        return x.dtype is torch.float32 or torch.is_autocast_enabled(x.device.type)
    return scale.dtype is x.dtype and not offset


def _is_proven(module: Module, values: tuple[Any, ...]) -> bool:
    """Whether the steps and the operator have the same results and gradients, of rows large and small."""
    _, weight, bias, *_ = values
    _, methods = norm(type(module), values)
    names = [name for name in (weight, bias) if name]
    size = module._parameters[weight].shape[0] if weight else 24  # type: ignore[union-attr]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for scale in (1.0, 1e-3, 30.0):
            parameters = {name: proof.random((size,), dtype, seed) for seed, name in enumerate(names, 1)}
            x = scale * proof.random((2, 3, size), dtype, 7) + scale / 3
            theirs, ours = (probe(module, parameters) for _ in range(2))
            if not proof.alike(
                lambda x: type(module).forward(theirs, x),  # noqa: B023 - called here
                lambda x: methods["forward"](ours, x),  # noqa: B023
                (x,),
                ([*theirs.parameters()], [*ours.parameters()]),
            ):
                return False
    return True


# --- results of a half type, under autocast ---------------------------------------------------------------------------

# On an H100 a step of GPT-2 takes 0.956 of what it takes where norms do not round their result themselves, of ViT 0.947.
_OURS: dict[Class, Class] = {nn.LayerNorm: torch.nn.LayerNorm, nn.RMSNorm: torch.nn.RMSNorm}


def lowerable(names: dict[Module, list[str]]) -> set[Module]:
    """The norms of a model, by the names of its modules, whose results products alone read."""
    once = {module for module, called in names.items() if len(called) == 1}
    return readers.lowerable(names, {module for module in once if _may_normalise(module)})


def _may_normalise(module: Module) -> bool:
    if is_library(type(module).__module__):
        return type(module) in _OURS.values()
    parameters = [p for p in module._parameters.values() if p is not None]
    return not module._modules and len(parameters) <= 2 and all(p.dim() == 1 for p in parameters)


def lowering(module: Module, ours: Class, what: str) -> tuple[Class, str]:
    """The class, and what it is in words, of a norm that is to have the class `ours`, and gives its result to products
    alone; any other is what it was."""
    recipe, half = recipe_of(ours), f"{what}, half under autocast"
    if recipe is not None and recipe.kind == "norm":
        return derived(type(module), replace(recipe, values=(*recipe.values[:-1], True))), half
    if recipe is not None and recipe.kind == "calls" and _is_layer_norm(module):
        return derived(type(module), Recipe("lowered", recipe.values, what, exact=False)), half
    if ours in _OURS:
        return derived(_OURS[ours], Recipe("lowered", (), what, exact=False)), half
    return ours, what


def _is_layer_norm(module: Module) -> bool:
    """Whether a subclass of torch.nn.LayerNorm does what that does, by its function."""
    if not isinstance(module, torch.nn.LayerNorm):
        return False
    try:
        x, *nodes = graph_of(module).nodes
    except Unknown:
        return False
    given: dict[str, Any] = {node.name: node.target for node in nodes if node.op == "get_attr"}
    steps = [node for node in nodes if node.op not in ("get_attr", "output")]
    if len(steps) != 1 or steps[0].target is not torch.nn.functional.layer_norm or nodes[-1].args != (steps[0],):
        return False
    names = ("input", "normalized_shape", "weight", "bias", "eps")
    found = dict(zip(names, steps[0].args)) | steps[0].kwargs
    found |= {
        name: given.get(one.name, one) for name, one in found.items() if isinstance(one, fx.Node) and one is not x
    }
    parameters = {name: name for name in ("weight", "bias") if module._parameters.get(name) is not None}
    wanted = {"input": x, "normalized_shape": tuple(module.normalized_shape), **parameters, "eps": module.eps}
    found["normalized_shape"] = tuple(found.get("normalized_shape", ()))
    return {name: one for name, one in found.items() if one is not None} == wanted


class Lowering(NamedTuple):
    """What a norm computes of a tensor of float32, as a half type."""

    half: torch.dtype
    sizes: Sequence[int]
    scale: Tensor | None
    shift: Tensor | None
    eps: float | None
    centred: bool

    def __call__(self, x: Tensor) -> Tensor:
        if self.centred:
            return layer_norm_lowered(x, self.sizes, self.scale, self.shift, self.eps or 0.0, self.half)
        return rms_norm_lowered(x, self.sizes, self.scale, self.eps, self.half)


@kind
def lowered(cls: Class, values: tuple[Any, ...]) -> tuple[tuple[type, ...], dict[str, Any]]:
    """A class whose result is at once of the half type to which autocast would cast it: on that of cupyops.nn, or on one
    that `calls` makes by `values`."""
    if values:
        bases, methods = calls.calls(cls, values)
        before = methods.get("forward", cls.forward)  # which may call another method of the class
    else:
        bases, methods = tuple(ours for ours, theirs in _OURS.items() if theirs is cls), {}
        before = bases[0].forward
    centred = not issubclass(cls, torch.nn.RMSNorm)

    def lowering(self: Any, x: Any) -> Lowering | None:
        bias = getattr(self, "bias", None)
        if (half := _lowered(self, x, self.weight, bias)) is None:
            return None
        return Lowering(half, self.normalized_shape, self.weight, bias, self.eps, centred)

    @functools.wraps(before)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if len(args) != 1 or kwargs:
            return before(self, *args, **kwargs)
        if (y := sums.taken(self, args[0])) is not None:
            return y
        of = lowering(self, args[0])
        return before(self, *args) if of is None else of(args[0].float())

    def rms(self: Any, x: Tensor) -> tuple[Any, ...] | None:
        alike = self.weight is not None and self.weight.dtype is x.dtype and x.shape[-1:] == self.weight.shape
        return (self.normalized_shape, self.weight, self.eps) if alike else None

    roles = {} if centred else {"_cupyops_rms": rms}
    return bases, {**methods, "forward": forward, "_cupyops_lowering": lowering, **roles}


def _lowered(module: Module, x: Any, *parameters: Tensor | None) -> torch.dtype | None:
    """The half type in which a norm is to give its result now; None where it is to give that of its input."""
    if not isinstance(x, Tensor) or (half := of_autocast(x)) is None:
        return None
    if module._forward_hooks or module._backward_hooks or module._backward_pre_hooks or torch_private.module_hooks():
        return None  # somebody else reads it
    # on a GPU autocast has a half type normalised in float32, on a CPU as it is
    wide = x.dtype is torch.float32 or (x.is_cuda and x.dtype in (torch.float16, torch.bfloat16))
    return half if wide and all(one is None or one.dtype is torch.float32 for one in parameters) else None
