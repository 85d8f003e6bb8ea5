"""Positions that a model of transformers counts itself, 0, 1, 2 ...: such are of no packed sequences.

Where it is given no padding, transformers looks at the positions, for which the host waits for the GPU. While a CUDA graph
is captured it cannot look, and makes a mask that it leaves out otherwise: with one, attention takes more than twice as long.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import threading
import types
from collections.abc import Callable
from typing import Any

from torch.compiler import is_dynamo_compiling

from . import texts

NAME = "positions"
_CREATE = ("create_causal_mask", "create_sliding_window_causal_mask")
_LENGTH = r"(?P<x>\w+)\.shape\[1\], device=(?P=x)\.device\)"
_COUNTED = {
    "position_ids": re.compile(
        rf"torch\.arange\({_LENGTH}( \+ past_seen_tokens)?(\.unsqueeze\(0\))?"
        r"|(position_ids|cache_position)\.unsqueeze\(0\)"
    ),
    "cache_position": re.compile(rf"torch\.arange\((past_seen_tokens, past_seen_tokens \+ )?{_LENGTH}"),
}


class _Thread(threading.local):
    counted = False  # in the forward that runs


_now = _Thread()


def creates_mask(function: Any) -> bool:
    """Return whether a function is one of transformers that makes a mask and looks at the positions for it."""
    return (
        getattr(function, "__module__", None) == "transformers.masking_utils"
        and getattr(function, "__name__", None) in _CREATE
        and "position_ids" in inspect.signature(function).parameters
    )


@functools.cache
def are_counted(forward: types.FunctionType) -> bool:
    """Return whether a forward that is given no positions counts them, from what lengths alone say."""
    parameters = inspect.signature(forward).parameters
    if "position_ids" not in parameters or parameters["position_ids"].default is not None:
        return False
    tree = texts.parsed(inspect.unwrap(forward))
    if tree is None:
        return False
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name) and node.id in _COUNTED]
    stores = [node.id for node in names if not isinstance(node.ctx, ast.Load)]
    assigned = [
        (target.id, ast.unparse(node.value))
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name) and target.id in _COUNTED
    ]
    plain = len(assigned) == len(stores) and all(_COUNTED[name].fullmatch(value) for name, value in assigned)
    return plain and "position_ids" in stores


def told(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A forward during which `creating()` knows whether the positions are its own."""
    parameters = inspect.signature(forward).parameters
    own = [name for name in _COUNTED if name in parameters]
    places = {name: list(parameters).index(name) for name in own}

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling():
            return forward(*args, **kwargs)
        given = (args[at] if at < len(args) else kwargs.get(name) for name, at in places.items())
        before, _now.counted = _now.counted, all(one is None for one in given)
        try:
            return forward(*args, **kwargs)
        finally:
            _now.counted = before

    return run


@functools.cache
def creating(create: Callable[..., Any]) -> Callable[..., Any]:
    """The function of transformers that makes a mask, which is given no positions that a forward has counted."""

    @functools.wraps(create)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not is_dynamo_compiling() and _now.counted and kwargs.get("position_ids") is not None:
            kwargs["position_ids"] = None
        return create(*args, **kwargs)

    return run
