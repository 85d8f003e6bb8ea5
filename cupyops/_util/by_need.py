"""The library of operators, which is loaded when it is first asked for: its import takes longer than all the rest."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

_waiting: list[Callable[[], Any]] = []  # what imports the library, until that has been done


def loaded_by(load: Callable[[], Any]) -> None:
    """`load()` imports the library: once, for who first looks for one of its operators, or for all that there is."""
    _waiting[:] = [load]


def load() -> None:
    """The operators and forms of the library are to be there. It does nothing where they are: torch.compile can follow."""
    if _waiting:
        _waiting[0]()
        _waiting.clear()
