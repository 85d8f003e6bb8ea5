"""Objects that stand for code, as operators and kernels do: a copy is the object itself, pickle keeps where it is found."""

from __future__ import annotations

import importlib
import sys
from typing import Any, TypeVar

Self = TypeVar("Self", bound="ByName")


class ByName:
    """Copied as itself; pickled by the module that it is in, and its name there."""

    _defined_in: str = ""  # the module

    def __copy__(self: Self) -> Self:
        return self

    def __deepcopy__(self: Self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        if (name := self._name()) is not None:
            return found, (self._defined_in, name)
        return self._reduced(protocol)

    def _name(self) -> str | None:
        """Name of the object in its module, where it is an attribute there."""
        names = vars(sys.modules[self._defined_in]) if self._defined_in in sys.modules else {}
        return next((name for name, value in list(names.items()) if value is self), None)

    def _reduced(self, protocol: Any) -> Any:
        """Pickle the object where its module has no name for it."""
        return object.__reduce_ex__(self, protocol)


def found(module: str, name: str) -> Any:
    """Return the object of that name in a module."""
    return getattr(importlib.import_module(module), name)
