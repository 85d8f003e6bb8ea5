"""Calls that differ from another in one of its numbers or flags."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

from .._util.torch_private import tree_flatten, tree_unflatten
from .call import Call
from .case import Case


def near(value: Any) -> tuple[Any, ...]:
    """The other flag; a number a little larger and a little smaller; nothing for what is neither."""
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, float):
        return value + 0.5, value * 0.5
    return (value + 1, value - 1) if isinstance(value, int) else ()


def neutral(value: Any) -> tuple[Any, ...]:
    """The other flag; numbers for which a function may have nothing to do."""
    if isinstance(value, bool):
        return (not value,)
    return tuple(type(value)(n) for n in (0, 1, -1, 2) if n != value) if isinstance(value, (int, float)) else ()


def other_numbers(case: Case, others: Callable[[Any], tuple[Any, ...]]) -> Iterator[tuple[Call, str]]:
    """Calls with one number or flag replaced, each by all that `others` gives for it, and a description."""
    call = case.call.like(case.call.args, {**_defaults(case), **case.call.kwargs})
    leaves, form = tree_flatten((call.args, call.kwargs))
    for place, leaf in enumerate(leaves):
        for other in others(leaf):
            args, kwargs = tree_unflatten([*leaves[:place], other, *leaves[place + 1 :]], form)
            yield call.like(args, kwargs), f"{other!r} for {leaf!r}"


def _defaults(case: Case) -> dict[str, Any]:
    """The numbers and flags that the call leaves to the function's own signature."""
    try:
        parameters = list(inspect.signature(case.target.function).parameters.values())
    except (TypeError, ValueError):  # as of what is built in
        return {}
    left = parameters[len(case.call.args) :]
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {one.name: one.default for one in left if one.kind in kinds and isinstance(one.default, (bool, int, float))}
