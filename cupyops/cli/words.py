"""What is said about words of the command line that will not do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from rich.console import Console


def complain(error: object) -> None:
    """The error's text on the standard error."""
    Console(stderr=True).print(str(error), markup=False, highlight=False, soft_wrap=True, style="red")


def near(word: str, known: Iterable[str]) -> str:
    """`; did you mean known?`, or nothing where none is like `word`."""
    found = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {found[0]}?" if found else ""
