"""Rotary embeddings: functions of (q, k, cos, sin), and whether a model's tables are such as `cupyops.rope` takes."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.nn import Module

from ..._util import observed
from ...ops._rope import rope
from . import proof, tracing
from .classes import Class, Recipe, kind
from .tracing import State

NAME = "rope"
_PARAMETERS = ("q", "k", "cos", "sin")


@functools.cache
def recognised(function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return a function that computes the same as one of (q, k, cos, sin, unsqueeze_dim=1) by `cupyops.rope`, or None."""
    parameters = inspect.signature(function).parameters
    if tuple(parameters)[:4] != _PARAMETERS or "unsqueeze_dim" not in parameters:
        return None
    if any(p.default is p.empty for p in list(parameters.values())[4:]):
        return None
    of = _Of(function, tuple(p.default for p in list(parameters.values())[4:]))
    try:
        holds = tracing.state_of(of).check(_Of)
        torch.fx.Tracer().trace(of)  # a condition that depends on the tensors raises
    except Exception:
        return None
    for interleaved in (False, True):
        shapes = frozenset(partial for partial in (False, True) if _is_proven(function, interleaved, partial))
        if False in shapes:
            return _by_rope(function, interleaved, True in shapes, functools.partial(holds, of))
    return None


class _Of(Module):
    def __init__(self, function: Callable[..., Any], defaults: tuple[Any, ...]) -> None:
        super().__init__()
        self.function, self.defaults = function, defaults

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return self.function(q, k, cos, sin, *self.defaults)


def _by_rope(
    function: Callable[..., Any], interleaved: bool, partial: bool, holds: Callable[[], bool] = lambda: True
) -> Callable[..., Any]:
    default = inspect.signature(function).parameters["unsqueeze_dim"].default

    @functools.wraps(function)
    def rotate(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **kwargs: Any) -> Any:
        dim = kwargs.get("unsqueeze_dim", default)
        if args or kwargs.keys() - {"unsqueeze_dim"} or not holds() or not _serves(q, k, cos, sin, dim, partial):
            return function(q, k, cos, sin, *args, **kwargs)
        pairs, positions = cos.shape[-1] // 2, None
        cos, sin = cos[..., :pairs].flatten(0, -2), sin[..., :pairs].flatten(0, -2)
        if cos.shape[0] != q.shape[2 if dim == 1 else 1]:  # each of the batch has positions of its own
            positions = torch.arange(cos.shape[0], device=cos.device).view(q.shape[0], -1)
        return _turned(q, cos, sin, positions, interleaved, dim), _turned(k, cos, sin, positions, interleaved, dim)

    return rotate


def _turned(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None, interleaved: bool, dim: int) -> Tensor:
    """x turned, its heads and rows in the order in which they lie, as the function's result has them: so that whoever
    takes them back to the order of the projection copies nothing."""
    if dim == 1 and x.stride(1) < x.stride(2):
        return rope(x.transpose(1, 2), cos, sin, positions, interleaved=interleaved, seq_dim=1).transpose(1, 2)
    return rope(x, cos, sin, positions, interleaved=interleaved, seq_dim=2 if dim == 1 else 1)


def _serves(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dim: Any, partial: bool) -> bool:
    """Return whether the tensors are such as was proven: of one dtype, and tables of three dimensions."""
    if dim not in (1, 2) or q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or sin.shape != cos.shape:
        return False
    if not q.dtype == k.dtype == cos.dtype == sin.dtype or q.dtype is torch.float64:
        return False
    if cos.requires_grad or sin.requires_grad:
        return False
    seq, size = (2 if dim == 1 else 1), q.shape[-1]
    if k.shape[-1] != size or k.shape[0] != q.shape[0] or not q.shape[seq] == k.shape[seq] == cos.shape[1]:
        return False
    if cos.shape[0] not in (1, q.shape[0]):
        return False
    return cos.shape[-1] == size or (partial and cos.shape[-1] < size)


def _is_proven(function: Callable[..., Any], interleaved: bool, partial: bool) -> bool:
    """Return whether both agree, in three dtypes, for tables that a batch shares and not, in both layouts."""
    ours = _by_rope(function, interleaved, partial)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for dim, batch in ((1, 1), (1, 2), (2, 2)):
            size = 12 if partial else 8
            shapes = [(2, heads, 5, size) if dim == 1 else (2, 5, heads, size) for heads in (3, 1)]
            q, k = (proof.random(shape, dtype, 1 + at) for at, shape in enumerate(shapes))
            angles = proof.random((batch, 5, 4), torch.float32, 3)
            angles = torch.cat((angles, angles), -1)
            cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
            if not _serves(q, k, cos, sin, dim, partial):
                return False
            named = {"unsqueeze_dim": dim}
            if not proof.alike(
                lambda q, k: function(q, k, cos, sin, **named),  # noqa: B023 - called here
                lambda q, k: ours(q, k, cos, sin, **named),  # noqa: B023
                (q, k),
            ):
                return False
    return True


# --- the tables -------------------------------------------------------------------------------------------------------

_MARK = "_cupyops_halves"  # of a table whose halves are equal: its version when it was made


def has_tables(model: Module) -> bool:
    """Return whether all rotary embeddings of a model make tables of two equal halves; `cupyops.rope` takes one."""
    embeddings = [module for module in model.modules() if makes_tables(module)]
    return bool(embeddings) and all(map(_halves_are_equal, embeddings))


def makes_tables(module: Module) -> bool:
    """Return whether a module is a rotary embedding."""
    return any(name.endswith("inv_freq") for name, _ in module.named_buffers(recurse=False))


def tables_of(module: Module) -> Recipe:
    """The recipe of a rotary embedding whose tables have been seen to have equal halves, in its present state."""
    named = {name for code in tracing.codes(inspect.unwrap(type(module).forward)) for name in code.co_names}
    values = {name: value for name, value in vars(module).items() if name in named and type(value) in tracing.PLAIN}
    values.pop("training", None)
    functions = (("", "forward", tracing.digest(type(module).forward)),)
    return Recipe("tables", (), "tables of rope", False, State(tuple(values.items()), functions=functions))


@kind
def tables(cls: Class, values: tuple[Any, ...], state: State) -> tuple[tuple[type, ...], dict[str, Any]]:
    """A class that marks the tables that it makes while it is as it was."""
    before: Any = cls.forward
    holds = state.check(cls)

    @functools.wraps(before)
    def forward(self: Module, *args: Any, **kwargs: Any) -> Any:
        made = cls.forward(self, *args, **kwargs)
        if not is_dynamo_compiling() and isinstance(made, tuple) and holds(self):
            for table in made:
                if type(table) is Tensor and not table.is_inference():  # which counts no versions
                    setattr(table, _MARK, table._version)
        return made

    return (cls,), {"forward": forward}


def of_known_tables(function: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """`ours` for tables that a swapped embedding has marked, and `function` for others."""

    @functools.wraps(function)
    def run(q: Any, k: Any, cos: Any, sin: Any, *args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            known = not observed.is_left_to_compilers(q)
        else:
            marks = [(getattr(table, _MARK, None), table) for table in (cos, sin)]
            known = all(mark is not None and mark == table._version for mark, table in marks)
        return (ours if known else function)(q, k, cos, sin, *args, **kwargs)

    return run


def _halves_are_equal(module: Module) -> bool:
    kinds = getattr(getattr(module, "config", None), "layer_types", None)
    has_kinds = "layer_type" in inspect.signature(type(module).forward).parameters
    try:
        for layer in dict.fromkeys(kinds or ()) if has_kinds else (None,):
            made = copy.deepcopy(module).to("cpu")  # which may note what it has seen
            named = {} if layer is None else {"layer_type": layer}
            with torch.no_grad():
                found = type(module).forward(made, torch.zeros(1, 7, 4), torch.arange(7)[None], **named)
            for table in found:
                a, b = table.chunk(2, -1)
                if table.dim() != 3 or not torch.equal(a, b):
                    return False
    except Exception:
        return False
    return True
