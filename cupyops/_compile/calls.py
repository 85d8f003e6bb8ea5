"""Calls of this library's operators in a program: by recorded plans, without PyTorch's dispatcher.

A registered operator costs the host 55 to 235 us a call: the dispatcher, the author's Python, the launches in full. All that
depends on sizes that a program knows, so that after three calls a plan makes the same allocations and launches.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

from torch.utils import _pytree as pytree

from .._operator.derivation import plans, registration
from .._operator.derivation.constants import MISS
from .._util import observed
from .kernel_group import Call
from .lowering import name_of
from .size import Real, Size
from .values import Value


class TENSOR:
    """Stands in the place of tensors among the arguments of a call."""


def planned_arguments(call: Call) -> list[Any] | None:
    """The arguments of a call of ours that is replayed from plans, `TENSOR` for each tensor; None of any other call."""
    leaves = pytree.tree_leaves(list(call.args))
    if _inside(call.node.target) is None or call.kwargs or not any(isinstance(one, Value) for one in leaves):
        return None
    if any(isinstance(one, (Size, Real)) or (isinstance(one, Value) and one.numel == 0) for one in leaves):
        return None
    found: list[Any] = pytree.tree_map(lambda one: TENSOR if isinstance(one, Value) else one, list(call.args))
    return found


def function_of(target: Any, arguments: list[Any] | None) -> Callable[..., Any]:
    """Return the function for a call of the graph: the operator, or for one of ours a function that replays plans."""
    if arguments is None:
        return target  # type: ignore[no-any-return]
    leaves, form = pytree.tree_flatten_with_path(arguments)
    places = [pytree.keystr(path) for path, one in leaves if one is TENSOR]
    try:
        planned = _planned(target, form, tuple(one for _, one in leaves))
    except TypeError:  # an argument without a hash
        return target  # type: ignore[no-any-return]
    found = eval(f"lambda *args: planned({', '.join(f'args{place}' for place in places)})", {"planned": planned})
    return found  # type: ignore[no-any-return]


def _inside(target: Any) -> Callable[..., Any] | None:
    """The function that a plan records: an operator's below autograd, or one that a pattern has put into the graph."""
    return target if isinstance(target, FunctionType) else registration.inside(target)


@functools.lru_cache(maxsize=1024)
def _planned(target: Any, form: pytree.TreeSpec, leaves: tuple[Any, ...]) -> Callable[..., Any]:
    """One function for calls with the same arguments besides tensors, so that equal layers share their plans."""
    inside = _inside(target)
    assert inside is not None
    shared: set[int] = set()  # places of results that share memory with an argument or with another: these are copied

    def plain(*tensors: Any) -> Any:
        given = iter(tensors)
        found = inside(*pytree.tree_unflatten([next(given) if one is TENSOR else one for one in leaves], form))
        if not observed.recorder():  # the first call of a signature, which is not recorded, may look at addresses
            seen = {one.untyped_storage()._cdata for one in tensors}
            for k, one in enumerate(found):
                if one.untyped_storage()._cdata in seen or 0 in one.stride():
                    shared.add(k)
                seen.add(one.untyped_storage()._cdata)
        return [one.clone() if k in shared else one for k, one in enumerate(found)]

    held = plans.Plans(name_of(target), plain, 0, lambda: [inside], suspends=True)
    names = ", ".join(f"x{k}" for k in range(leaves.count(TENSOR)))
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
