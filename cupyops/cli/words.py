"""What is said about words of the command line that will not do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console

from ..errors import InputError


def complain(error: object) -> None:
    """The error's text on the standard error."""
    Console(stderr=True).print(str(error), markup=False, highlight=False, soft_wrap=True, style="red")


def near(word: str, known: Iterable[str]) -> str:
    """`; did you mean known?`, or nothing where none is like `word`."""
    found = difflib.get_close_matches(word, list(known), 1)
    return f"; did you mean {found[0]}?" if found else ""


def folder(option: str, path: Path) -> Path:
    """`path`, which can be made a folder. Raises `InputError` where it, or what it should be in, is a file."""
    there = next((one for one in (path, *path.parents) if one.exists()), path)
    if there.exists() and not there.is_dir():
        raise InputError(f"{option} is {str(path)!r}: {str(there)!r} is a file, expected a folder")
    return path
