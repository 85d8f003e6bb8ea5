"""The public face of an operator: a function of the author's signature that replays plans, and else calls the author's."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

from torch.compiler import is_dynamo_compiling

from ..._util import observed, torch_private
from .constants import MISS
from .overrides import asking
from .plans import Plans

_FIXED = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def public(
    function: Callable[..., Any], in_full: Callable[..., Any], name: str, twin: Callable[..., Any] | None = None
) -> Any:
    """`function` with plans in front of it; `in_full` is called where there is none, with arrays and `axis` too, or `twin`,
    where an argument is to see a function of PyTorch.
    """
    scope: dict[str, Any] = {
        "__builtins__": __builtins__,
        "_is_dynamo_compiling": is_dynamo_compiling,
        "_author": function,
    }
    # a code object of its own: by that torch.compile tells two functions apart
    code = _always_in_full.__code__.replace(co_name=function.__name__)
    shown = types.FunctionType(code, scope, function.__name__)
    functools.update_wrapper(shown, function)
    scope["_full"] = in_full = asking(in_full, twin, shown)
    _write(shown, scope, function, in_full, name, twin)
    return shown


def _write(
    shown: Any,
    scope: dict[str, Any],
    function: Callable[..., Any],
    in_full: Callable[..., Any],
    name: str,
    twin: Callable[..., Any] | None,
) -> None:
    """Give `shown` the code that its calls go through.

    Of calls for which PyTorch's own function is faster, that is the twin, with nothing of ours around it.
    """
    parameters = list(inspect.signature(function).parameters.values())
    others = bool(parameters) and parameters[-1].kind is inspect.Parameter.VAR_KEYWORD
    parameters = parameters[:-1] if others else parameters
    if not parameters or any(one.kind not in _FIXED for one in parameters):
        return
    names = [one.name for one in parameters]
    by_name = frozenset(one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY)

    def of_values(*values: Any, function: Callable[..., Any] = in_full) -> Any:
        given = {name: value for name, value in zip(names, values) if name in by_name}
        return function(*values[: len(names) - len(given)], **given)

    def settled(args: tuple[Any, ...], reason: str, alike: bool) -> Callable[..., Any]:
        if twin is not None and isinstance(reason, observed.Faster):
            return _in_order(parameters, twin)
        return _in_order(parameters, function) if alike else of_values  # none of such arguments has a say

    def with_others(values: tuple[Any, ...], others: dict[str, Any]) -> Any:
        first, *rest = zip(parameters, values)
        left = {one.name: value for one, value in rest if value is not one.default}
        return in_full(first[1], **left, **others)

    plans = Plans(name, of_values, _first(parameters), lambda: [function], suspends=True, settled=settled)
    scope |= {"_observed": observed, "_table": plans.table, "_MISS": MISS, "_plans": plans, "_others": with_others}
    listed = ", ".join(names)
    more = "**_more" if others or ("dim" in names and "axis" not in names) else ""
    source = f"""
def shown({_listed(parameters, more)}):
    if _is_dynamo_compiling():
        return _full({_passed(parameters)}{", **_more" if more else ""})
    {f"if _more: return _others(({listed},), _more)" if more else ""}
    if not _observed.unplanned:
        try:
            _entries = _table.get({names[plans.first]}.shape, ())
        except Exception:
            _entries = ()
        for _entry in _entries:
            _found = _entry({listed})
            if _found is not _MISS:
                return _found
    return _plans.call(({listed},))
"""
    found: dict[str, Any] = {}
    exec(compile(source, f"<plans of {name}>", "exec"), dict(scope), found)
    shown.__defaults__ = function.__defaults__  # type: ignore[attr-defined]
    shown.__kwdefaults__ = function.__kwdefaults__  # type: ignore[attr-defined]
    shown.__code__ = found["shown"].__code__
    torch_private.forget_signature(shown)


def _in_order(parameters: list[inspect.Parameter], function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` of the values of its parameters in order, those included that have to be named."""
    if all(one.kind is not inspect.Parameter.KEYWORD_ONLY for one in parameters):
        return function
    listed = ", ".join(one.name for one in parameters)
    made: Callable[..., Any] = eval(f"lambda {listed}: _function({_passed(parameters)})", {"_function": function})
    return made


def _always_in_full(*args: Any, **kwargs: Any) -> Any:
    return _full(*args, **kwargs)  # type: ignore[name-defined]  # noqa: F821


def author_of(shown: Any) -> Callable[..., Any] | None:
    """The author's function behind a public one; None of any other function."""
    found: Callable[..., Any] | None = getattr(shown, "__globals__", {}).get("_author")
    return found


def plans_of(shown: Any) -> Plans | None:
    """The plans of a public function, once it has been called."""
    found: Plans | None = shown.__globals__.get("_plans")
    return found


def _first(parameters: list[inspect.Parameter]) -> int:
    """The place of the first parameter annotated as a tensor, or else of the first."""
    shown = [str(one.annotation) for one in parameters]
    return next((index for index, one in enumerate(shown) if "Tensor" in one), 0)


def _listed(parameters: list[inspect.Parameter], more: str) -> str:
    """The parameters as a signature has them; the values of defaults are set afterwards."""
    found, before = [], None
    for one in parameters:
        if before is inspect.Parameter.POSITIONAL_ONLY and one.kind is not before:
            found.append("/")
        if one.kind is inspect.Parameter.KEYWORD_ONLY and before is not one.kind:
            found.append("*")
        found.append(one.name if one.default is one.empty else f"{one.name}=None")
        before = one.kind
    if before is inspect.Parameter.POSITIONAL_ONLY:
        found.append("/")
    return ", ".join([*found, more] if more else found)


def _passed(parameters: list[inspect.Parameter]) -> str:
    """The parameters as a call of the author's function gives them."""
    keyword = inspect.Parameter.KEYWORD_ONLY
    return ", ".join(f"{one.name}={one.name}" if one.kind is keyword else one.name for one in parameters)
