"""Calls of this library's operators in a program: by recorded plans, without PyTorch's dispatcher.

A registered operator costs the host 55 to 235 us a call: the dispatcher, the author's Python, the launches in full. All that
depends on sizes that a program knows, so that after three calls a plan makes the same allocations and launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from .._operator.derivation import plans, registration
from .._operator.derivation.constants import MISS
from .._util import observed
from .kernel_group import Call
from .lowering import name_of
from .size import Real, Size
from .values import Value


def function_of(call: Call) -> Callable[..., Any]:
    """Return the function for a call of the graph: the operator, or for one of ours a function that replays plans."""
    target: Callable[..., Any] = call.node.target
    form, tensors = _form(call.args)
    if _inside(target) is None or call.kwargs or not tensors:
        return target
    if _has_size(call.args) or any(one.numel == 0 for one in tensors):
        return target
    try:
        planned = _planned(target, form, len(tensors))
    except TypeError:  # an argument without a hash
        return target
    return lambda *args: planned(*_tensors(args))


def _inside(target: Any) -> Callable[..., Any] | None:
    """The function that a plan records: an operator's below autograd, or one that a pattern has put into the graph."""
    return target if isinstance(target, FunctionType) else registration.inside(target)


@functools.lru_cache(maxsize=1024)
def _planned(target: Any, form: tuple[Any, ...], count: int) -> Callable[..., Any]:
    """One function for calls with the same arguments besides tensors, so that equal layers share their plans."""
    inside = _inside(target)
    assert inside is not None

    shared: set[int] = set()  # places of results that share memory with an argument or with another: these are copied

    def plain(*tensors: Any) -> Any:
        found = inside(*_filled(form, iter(tensors)))
        if not observed.recorder():  # the first call of a signature, which is not recorded, may look at addresses
            seen = {one.untyped_storage()._cdata for one in tensors}
            for k, one in enumerate(found):
                if one.untyped_storage()._cdata in seen or 0 in one.stride():
                    shared.add(k)
                seen.add(one.untyped_storage()._cdata)
        return [one.clone() if k in shared else one for k, one in enumerate(found)]

    held = plans.Plans(name_of(target), plain, 0, lambda: [inside], suspends=True)
    names = ", ".join(f"x{k}" for k in range(count))
    source = f"""
def planned({names}):
    if not observed.unplanned:
        for entry in table.get(x0.shape, ()):
            found = entry({names})
            if found is not MISS:
                return found
    return plans.call(({names},))
"""
    scope = {"observed": observed, "table": held.table, "MISS": MISS, "plans": held}
    exec(compile(source, f"<plans of {target}>", "exec"), scope)
    return scope["planned"]  # type: ignore[return-value]


def _has_size(args: Any) -> bool:
    """Return True if a number among the arguments is known only at each call."""
    return isinstance(args, (Size, Real)) or (isinstance(args, (list, tuple)) and any(map(_has_size, args)))


_TENSOR = "a tensor"


def _form(args: Any) -> tuple[Any, list[Value]]:
    """(the arguments with a mark in the place of tensors, as nested tuples; the tensors in order)."""
    if isinstance(args, Value):
        return (_TENSOR,), [args]
    if isinstance(args, (list, tuple)):
        parts = [_form(one) for one in args]
        return ("list", *(form for form, _ in parts)), [t for _, tensors in parts for t in tensors]
    return ("value", args), []


def _filled(form: tuple[Any, ...], tensors: Any) -> Any:
    """The arguments again."""
    kind, *rest = form
    if kind == _TENSOR:
        return next(tensors)
    return [_filled(one, tensors) for one in rest] if kind == "list" else rest[0]


def _tensors(args: Sequence[Any]) -> list[Any]:
    from torch import Tensor

    found: list[Any] = []
    for one in args:
        if isinstance(one, Tensor):
            found.append(one)
        elif isinstance(one, (list, tuple)):
            found += _tensors(one)
    return found
