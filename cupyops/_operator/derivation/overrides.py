"""Arguments with a say in what a function of PyTorch does: they are to see one that they know, and no kernel of ours.

A tensor whose class has a `__torch_function__` of its own, a proxy of torch.fx, a function mode: each intercepts functions
of PyTorch. A tensor with a `__torch_dispatch__` of its own intercepts what these do, and one that is sparse, quantised or
nested has no memory that a kernel could read. So PyTorch's function of the same meaning is called with the arguments as they
are; where there is none, the reference.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.fx import Proxy
from torch.nn import Parameter

from ..._util import observed, torch_private
from .distributed import is_spread

_PLAIN = frozenset((Tensor, Parameter, bool, int, float, str, tuple, list, torch.Size, torch.dtype, type(None)))
_TRACERS = (torch_private.FakeTensor, torch_private.FunctionalTensor)  # which are to see our op


def of_functions(values: Iterable[Any]) -> str | None:
    """Describe the first value that overrides PyTorch's functions; None where none does."""
    for value in values:
        kind = type(value)
        if kind not in _PLAIN and not isinstance(value, _TRACERS) and torch_private.has_torch_function(kind):
            return f"{kind.__name__} overrides PyTorch's functions"
    return None


def of_layout(values: Iterable[Any]) -> str | None:
    """Describe the first tensor whose memory no kernel could read; None where there is none."""
    for value in values:
        if isinstance(value, Tensor):
            if value.is_nested:
                return "a nested tensor"
            if value.layout is not torch.strided:
                return f"a tensor of layout {str(value.layout).removeprefix('torch.')}"
            if value.is_quantized:
                return "a quantised tensor"
            if not is_dynamo_compiling() and torch_private.is_legacy_batched(value):
                return "a batch of gradients"
    return None


def of_dispatch(values: Iterable[Any]) -> str | None:
    """Describe the first tensor that overrides what PyTorch's functions do; None where none does.

    Not the tracers of PyTorch, which are to see our op, nor DTensors, which we know.
    """
    for value in values:
        kind = type(value)
        if (
            kind in _PLAIN
            or isinstance(value, _TRACERS)
            or is_spread(value)
            or kind.__name__ == "AsyncCollectiveTensor"
        ):
            continue
        if torch_private.has_torch_dispatch(kind):
            return f"{kind.__name__} overrides what PyTorch's functions do"
    return None


def node(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The node of a call of `function` in the graph that torch.fx traces; None where no argument is a proxy."""
    for value in (*args, *kwargs.values()):
        for one in value if type(value) in (tuple, list) else (value,):
            if isinstance(one, Proxy):
                return type(one).__torch_function__(function, (type(one),), *_short(function, args, kwargs))
    return None


def asking(
    function: Callable[..., Any], twin: Callable[..., Any] | None, shown: Callable[..., Any]
) -> Callable[..., Any]:
    """`function`, but where an argument or a mode has a say: then `twin`, or a node of `shown` in a graph of torch.fx.

    torch.compile is shown the twin on a GPU: it fuses that, while a registered operator is a border for it, and costs the
    host more at each call than its kernel gains.
    """
    fuses = twin is not None and getattr(torch.nn.functional, twin.__name__, None) is twin
    parameters = list(inspect.signature(shown).parameters.values())
    required = sum(one.default is one.empty for one in parameters)
    optional = [one.name for one in parameters[required:]]

    def ask(*args: Any, **kwargs: Any) -> Any:
        if (found := node(shown, args, kwargs)) is not None:
            return found
        if twin is None:
            return function(*args, **kwargs)
        if fuses and observed.is_left_to_compilers(args[0]) and "axis" not in kwargs:
            return twin(*args[:required], **dict(zip(optional, args[required:])), **kwargs)
        values = (*args, *kwargs.values())
        asked: Any = of_functions(values) or of_layout(values) or of_dispatch(values)
        if not asked and not is_dynamo_compiling() and torch_private.function_mode_enabled():
            asked = torch_private.asks_function_modes()
        if not asked:
            return function(*args, **kwargs)
        args, kwargs = _short(shown, args, kwargs, named=True)
        return twin(*args, **kwargs)

    return ask


def _short(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], named: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments as one would write them: without those that are defaults, and `dim` for `axis`.

    Of several overloads of a function of PyTorch, none has all the parameters. `named`: give by name what may be left out,
    since PyTorch's function may have that in another place, or by name alone.
    """
    if is_dynamo_compiling():
        return args, kwargs
    parameters = inspect.signature(function).parameters
    if "axis" in kwargs and "axis" not in parameters and "dim" not in kwargs:
        kwargs = {"dim" if name == "axis" else name: value for name, value in kwargs.items()}
    bound = inspect.signature(function).bind(*args, **kwargs).arguments
    given = {name: value for name, value in bound.items() if value is not parameters[name].default}
    first = []
    for name, one in parameters.items():
        if one.kind is one.KEYWORD_ONLY or name not in given or (named and one.default is not one.empty):
            break
        first.append(given.pop(name))
    return tuple(first), given
