"""The name that was probably meant by one that is not known."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable
from typing import Any

_LIKE = 0.75  # of 1: how much of two names is the same


def near(word: str, known: Iterable[str]) -> str | None:
    """The known name most like `word`, whatever its capitals and underscores; None where none is."""
    plain: dict[str, str] = {}
    for name in known:
        plain.setdefault(_plain(name), name)
    found = difflib.get_close_matches(_plain(word), plain, 1, _LIKE)
    return plain[found[0]] if found else None


def meant(word: str, known: Iterable[str]) -> str:
    """`; did you mean known?`, or nothing where none is like `word`."""
    found = near(word, known)
    return f"; did you mean {found}?" if found else ""


def refuser(module: str, names: Collection[str]) -> Callable[[str], Any]:
    """The `__getattr__` of a module, whose error says which of its names was meant."""

    def refuse(name: str) -> Any:
        hint = "" if name.startswith("_") else meant(name, [one for one in names if not one.startswith("_")])
        raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}")

    return refuse


def _plain(name: str) -> str:
    return name.lower().replace("_", "")
