"""`python -m cupyops cache`: what the kernel cache holds; emptying it, or making it smaller."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from .._kernel.compile import cache, room
from .._util.settings import CACHE_LIMIT, size
from ..errors import CupyopsError, InputError
from . import words

ACTIONS = ("show", "clean", "limit")
_UNITS = ("bytes", "KiB", "MiB", "GiB")
_AGES = ((86400, "day"), (3600, "hour"), (60, "minute"))


def run(action: str, most: str | None) -> int:
    """The command; returns its exit code, 0 or, for bad arguments and where there is no cache, 2."""
    try:
        most_bytes = _checked(action, most)
        root = _root()
        there = room.entries(root)
        if action == "show":
            _show(Console(), root, there)
        else:
            gone = room.shrink(there, most_bytes)
            freed = sum(entry.bytes for entry in gone)
            print(f"{root}: removed {_kernels(len(gone))} of {len(there):,}, {in_words(freed)}")
    except (CupyopsError, OSError) as error:
        words.complain(error)
        return 2
    return 0


def _checked(action: str, most: str | None) -> int:
    """Check the arguments and return the number of bytes to be left. Raises `InputError`."""
    if action not in ACTIONS:
        raise InputError(f"{action!r}: expected one of {', '.join(ACTIONS)}{words.near(action, ACTIONS)}")
    if (action == "limit") != (most is not None):
        raise InputError("expected a size with limit, as in `cache limit 500M`, and none with show and clean")
    try:
        found = 0 if most is None else size(most)
    except ValueError:
        found = None
    if found is None:
        raise InputError(f"{most!r} is no size; expected a number of bytes such as 500M or 2G")
    return found


def _root() -> Path:
    """The cache, links followed. Raises `InputError` where there is none."""
    root = cache.location()
    if root is None:
        raise InputError("there is no kernel cache: pip install platformdirs, or set CUPYOPS_CACHE_DIR to a folder")
    return Path(os.path.realpath(root))


def _show(console: Console, root: Path, there: Sequence[room.Entry]) -> None:
    most = room.limit()
    held = "no limit" if most is None else f"a limit of {in_words(most)}"
    taken = in_words(sum(entry.bytes for entry in there))
    console.print(f"{root}: {_kernels(len(there))}, {taken}, {held} ({CACHE_LIMIT.name})", soft_wrap=True)
    if not there:
        return
    table = Table(box=None, pad_edge=False)
    for head in ("compiler and headers", "kernels", "size", "last used"):
        table.add_column(head, justify="left" if head == "compiler and headers" else "right")
    for folder in sorted({entry.folder for entry in there}):
        its = [entry for entry in there if entry.folder == folder]
        table.add_row(
            folder.name, f"{len(its):,}", in_words(sum(entry.bytes for entry in its)), _ago(max(e.used for e in its))
        )
    console.print(table)


def _kernels(count: int) -> str:
    return f"{count:,} kernel{'s' if count != 1 else ''}"


def in_words(count: float) -> str:
    """`1.5 MiB` of a number of bytes."""
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:,.0f} {_UNITS[unit]}" if unit == 0 else f"{count:,.1f} {_UNITS[unit]}"


def _ago(when: float) -> str:
    seconds = max(0.0, time.time() - when)
    for length, unit in _AGES:
        if seconds >= length:
            count = int(seconds // length)
            return f"{count} {unit}{'s' if count != 1 else ''} ago"
    return "just now"
