"""The template parameters of a kernel: which values they take, and the instances that come of them."""

from __future__ import annotations

import itertools
import keyword
import re
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import InputError, LaunchError
from .ctype import c_token, canonical


class Template:
    """A kernel's name with its template parameters, such as `"layer_norm_fwd<T, VEC>"`, and the domain of each.

    Attributes:
        base: the name.
        template: the parameters.
        domain: for each parameter whose values are declared, these values.
    """

    def __init__(
        self, name: str, domain: Mapping[str, tuple[Any, ...]], where: Callable[..., bool] | None = None
    ) -> None:
        self.base, self.template = _parse(name)
        if unknown := set(domain) - set(self.template):
            raise InputError(f"kernel {name} has no template parameter {', '.join(sorted(unknown))}")
        self.domain = {key: tuple(map(canonical, values)) for key, values in domain.items()}
        self._where = where

    def values(self, given: Mapping[str, Any]) -> tuple[Any, ...]:
        """The values of one instance, in order. Raises `LaunchError` where there is no such instance."""
        ordered = tuple(self._value(name, given) for name in self.template)
        if extra := set(given) - set(self.template):
            raise LaunchError(f"{self}: no template parameter {', '.join(sorted(extra))}")
        if not self._exists(ordered):
            raise LaunchError(f"{self}: there is no {self.expression(ordered)}")
        return ordered

    def _value(self, name: str, given: Mapping[str, Any]) -> Any:
        if name not in given:
            raise LaunchError(f"{self}: template parameter {name} is not given; launch with {name}=...")
        value = canonical(given[name])
        try:
            c_token(value)  # refuses what the compiler must never see
        except LaunchError as error:
            raise LaunchError(f"{self}: {name}: {error}") from None
        if name in self.domain and value not in self.domain[name]:
            allowed = ", ".join(str(choice) for choice in self.domain[name])
            raise LaunchError(f"{self}: {name}={value} is not one of {allowed}")
        return value

    def _exists(self, values: tuple[Any, ...]) -> bool:
        return self._where is None or self._where(**dict(zip(self.template, values)))

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
        return f"{self.base}<{', '.join(c_token(value) for value in values)}>" if values else self.base

    def __repr__(self) -> str:
        return f"{self.base}<{', '.join(self.template)}>" if self.template else self.base


def _parse(name: str) -> tuple[str, tuple[str, ...]]:
    """`"norm<T, VEC>"` -> `("norm", ("T", "VEC"))`."""
    match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*(?:<([\w\s,]*)>)?\s*", name) if isinstance(name, str) else None
    if match is None:
        raise InputError(f'kernel name {name!r} is not of the form "name" or "name<T, N>"')
    template = tuple(part.strip() for part in (match.group(2) or "").split(",") if part.strip())
    for part in template:  # each is given as T=..., and a leading underscore is the fast path's
        if not part.isidentifier() or keyword.iskeyword(part) or part.startswith("_") or template.count(part) > 1:
            raise InputError(f"kernel name {name!r}: template parameter {part!r} cannot be the name of an argument")
    return match.group(1), template
