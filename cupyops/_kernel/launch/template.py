"""The template parameters of a kernel: which values they take, and the instances that come of them."""

from __future__ import annotations

import inspect
import itertools
import keyword
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ...errors import InputError, LaunchError
from ..compile.declarations import split
from .ctype import WrongDtype, c_token, canonical, is_type


class Template:
    """A kernel's name with its template parameters, such as `"layer_norm_fwd<T, VEC>"`, and the domain of each.

    What stands between the brackets and is a value in C++, as in `"f<float, 4>"`, is one already; `::Add` is the type `Add`
    of the source, and `Add` a parameter.

    Attributes:
        base: the name, with the namespaces before it.
        template: the parameters.
        domain: for each parameter whose values are declared, these values.
        enumerations: the types of parameters that are enumerations.
    """

    extension = False  # whether dtypes are named as C++ extensions name them
    enumerations: Mapping[str, str] = MappingProxyType({})

    def __init__(
        self, name: str, domain: Mapping[str, tuple[Any, ...]], where: Callable[..., bool] | None = None
    ) -> None:
        self.base, self._written = _parse(name)
        self._of_defaults = not self._written and name.rstrip().endswith(">")  # `f<>`: each parameter has its default
        self.template = tuple(part for part in self._written if _is_parameter(part))
        if unknown := set(domain) - set(self.template):
            raise InputError(
                f"kernel {name} has no template parameter {', '.join(sorted(unknown))}; "
                f"it has {', '.join(self.template) or 'none'}"
            )
        self.domain = {key: tuple(map(canonical, values)) for key, values in domain.items()}
        self._where, self._asked = where, _asked(name, self.template, where)

    def values(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        """The values of one instance, in order. Raises `LaunchError` where there is no such instance."""
        ordered = tuple(self._value(name, given) for name in self.template)
        if extra := set(given) - set(self.template):
            raise LaunchError(
                f"{self}: no template parameter {', '.join(sorted(extra))}; it has {', '.join(self.template) or 'none'}"
            )
        if not self._exists(ordered):
            raise LaunchError(f"{self}: there is no {self.expression(ordered)}; give values for which where= holds")
        return ordered

    def _value(self, name: str, given: Mapping[str, Any]) -> Any:
        if name not in given:
            raise LaunchError(
                f"{self}: template parameter {name} is not given; launch with {name}=..."
                # if one argument has a value, the others may have one
                + (f", or write ::{name} where a type of the source is meant" if self.template != self._written else "")
            )
        value = canonical(given[name])
        try:
            c_token(value)  # refuses what the compiler must never see
        except LaunchError as error:
            raise LaunchError(f"{self}: {name}: {error}") from None
        if name in self.domain and value not in self.domain[name]:
            allowed = ", ".join(str(choice) for choice in self.domain[name])
            raise WrongDtype(f"{self}: {name}={value} is not one of {allowed}; give one of these", value)
        return value

    def _exists(self, values: tuple[Any, ...]) -> bool:
        return self._where is None or self._where(
            **{name: value for name, value in zip(self.template, values) if name in self._asked}
        )

    def combinations(self) -> list[tuple[Any, ...]]:
        """The template values of every instance that is declared, for ahead-of-time compilation."""
        missing = [name for name in self.template if name not in self.domain]
        if missing:
            raise InputError(f"{self}: no values declared for {', '.join(missing)}; give {missing[0]}=(...) to Kernel")
        every = itertools.product(*(self.domain[name] for name in self.template))
        return [values for values in every if self._exists(values)]

    def instances(self) -> list[str]:
        """The name expressions of the combinations."""
        return [self.expression(values) for values in self.combinations()]

    def expression(self, values: tuple[Any, ...]) -> str:
        """The C++ name of one instance, such as `relu_fwd<float>`."""
        given = dict(zip(self.template, values))
        tokens = [self._token(part, given[part]) if part in given else part for part in self._written]
        return f"{self.base}<{', '.join(tokens)}>" if tokens or self._of_defaults else self.base

    def _token(self, name: str, value: Any) -> str:
        """A value in C++: a number for one of an enumeration is converted to it."""
        token = c_token(value, self.extension)
        return f"({self.enumerations[name]}){token}" if name in self.enumerations and type(value) is int else token

    def __repr__(self) -> str:
        return f"{self.base}<{', '.join(self._written)}>" if self._written or self._of_defaults else self.base


_NAME = re.compile(r"\s*(?:::)?((?:[A-Za-z_]\w*::)*[A-Za-z_]\w*)\s*(?:<(.*)>)?\s*", re.ASCII | re.DOTALL)
_VALUE = re.compile(r"[\w \t:*<>,()+\-.']+", re.ASCII)
_WORDS = re.compile(r"\w+(?: \w+)+", re.ASCII)  # of which each is a word of C: `unsigned int`


def _parse(name: str) -> tuple[str, tuple[str, ...]]:
    """`"ns::norm<T, VEC>"` -> `("ns::norm", ("T", "VEC"))`."""
    match = _NAME.fullmatch(name) if isinstance(name, str) else None
    inside = (match.group(2) or "") if match is not None else ""
    if match is None or (inside.strip() and not (_VALUE.fullmatch(inside) and _is_balanced(inside))):
        raise InputError(
            f'kernel name {name!r} is not of the form "name", "name<T, N>" or "name<float, 4>", with "ns::" before it where '
            "the kernel is in a namespace"
        )
    parts = tuple(" ".join(part.split()) for part in split(inside))
    for part in filter(_WORDS.fullmatch, parts):
        if not all(map(is_type, part.split())):
            raise InputError(
                f"kernel name {name!r}: {part!r} is neither a template parameter nor a value of C++; give one of the two"
            )
    for part in filter(_is_parameter, parts):  # each is given as T=..., and a leading underscore is the fast path's
        if keyword.iskeyword(part) or part.startswith("_") or parts.count(part) > 1:
            raise InputError(
                f"kernel name {name!r}: template parameter {part!r} cannot be the name of an argument; rename it"
            )
    return match.group(1), parts


def _is_parameter(part: str) -> bool:
    """Return True if the text between the brackets is a parameter's name; else it is a value, as C++ has it."""
    return part.isidentifier() and not is_type(part) and part not in ("true", "false")


def _is_balanced(text: str) -> bool:
    opened = ""
    for sign in re.findall(r"[<>()]", text):
        if sign in "<(":
            opened += sign
        elif sign == ">" and opened.endswith("("):
            continue  # it compares
        elif opened[-1:] + sign in ("<>", "()"):
            opened = opened[:-1]
        else:
            return False
    return not opened


def _asked(name: str, template: tuple[str, ...], where: Callable[..., bool] | None) -> frozenset[str]:
    """The template parameters that `where` takes: those it names, or all. Raises `InputError` for a name that is none."""
    if where is None:
        return frozenset()
    try:
        parameters = inspect.signature(where).parameters.values()
    except (TypeError, ValueError):  # a function of C, which does not say
        return frozenset(template)
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return frozenset(template)
    named = [one for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
    unknown = [one.name for one in named if one.name not in template and one.default is one.empty]
    if unknown or len(named) < len(parameters):
        shown = unknown[0] if unknown else "an argument without a name"
        raise InputError(
            f"kernel {name}: where= takes {shown}, expected one of its template parameters: {', '.join(template) or 'none'}"
        )
    return frozenset(one.name for one in named) & frozenset(template)
