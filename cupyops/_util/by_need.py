"""The library of operators, which is loaded when it is first asked for: its import takes longer than all the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_library: list[Callable[[], Any]] = []


def loaded_by(load: Callable[[], Any]) -> None:
    """`load()` imports the library, at once where that has been done; it is called by who looks for all that there is."""
    _library[:] = [load]


def load() -> None:
    """Before one looks among all operators, or all forms: those of the library are to be there."""
    for one in _library:
        one()
