"""Selection of kernels' instances by the values of their template parameters."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch

from .._kernel.kernel import Kernel
from .._kernel.launch.ctype import FLOATING, c_token, canonical
from ..errors import InputError, LaunchError

Instance = tuple[Kernel, dict[str, Any]]


class Restriction:
    """Restriction of template parameters to some values, for kernels of which only a part is wanted.

    Args:
        dtypes: the floating-point types that are wanted; None for all.
        values: for a parameter the value, or the values, that are wanted.

    Raises:
        InputError: what is none of them.
    """

    def __init__(self, dtypes: torch.dtype | Iterable[torch.dtype] | None, values: Mapping[str, Any]) -> None:
        given = FLOATING if dtypes is None else (dtypes,) if isinstance(dtypes, torch.dtype) else tuple(dtypes)
        if unknown := [dtype for dtype in given if dtype not in FLOATING]:
            raise InputError(f"dtypes has {unknown[0]!r}, expected one of {', '.join(map(str, FLOATING))}")
        self.left_out = set(FLOATING) - set(given)
        self.values = {name: tuple(_values(name, value)) for name, value in values.items()}

    def instances(self, kernels: Iterable[Kernel]) -> list[Instance]:
        """The wanted instances, as template values by name.

        Raises:
            InputError: no kernel has such a parameter, none is left, or a kernel declares no values for a parameter.
        """
        every = list({id(kernel): kernel for kernel in kernels}.values())
        parameters = {name for kernel in every for name in kernel.template}
        if every and (unknown := self.values.keys() - parameters):
            known = ", ".join(sorted(parameters)) or "none"
            raise InputError(f"no kernel has a template parameter {', '.join(sorted(unknown))}; there is {known}")
        found = [(kernel, values) for kernel in every for values in self._instances_of(kernel)]
        if every and not found:
            names = ", ".join(map(str, every))
            raise InputError(
                f"of {names} no instance is left with these dtypes and template values; leave some of them out"
            )
        return found

    def _instances_of(self, kernel: Kernel) -> Iterator[dict[str, Any]]:
        for chosen in itertools.product(*(self._choices(kernel, name) for name in kernel.template)):
            values = dict(zip(kernel.template, chosen))
            with suppress(LaunchError):  # a combination that there is not
                kernel.values(values)
                yield values

    def _choices(self, kernel: Kernel, name: str) -> list[Any]:
        declared, wanted = kernel.domain.get(name), self.values.get(name)
        if declared is None and wanted is None:
            raise InputError(f"{kernel}: no values declared for {name}; give {name}=... to warmup()")
        among = wanted if declared is None else declared
        return [v for v in among or () if (wanted is None or v in wanted) and not self._is_left_out(v)]

    def _is_left_out(self, value: Any) -> bool:
        return isinstance(value, torch.dtype) and value in self.left_out


def _values(name: str, given: Any) -> Iterator[Any]:
    for value in given if isinstance(given, (tuple, list, set, frozenset)) else (given,):
        try:
            c_token(canonical(value))
        except LaunchError as error:
            raise InputError(f"{name} is {value!r}: {error}") from None
        yield canonical(value)
