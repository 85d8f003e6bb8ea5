"""Tables in terminals that are too narrow for them: row by row, each cell on a line of its own, nothing cut off."""

from __future__ import annotations

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text


def show(console: Console, table: Table, least: int) -> None:
    """Print a table; where the terminal has fewer than `least` columns, a list of its rows."""
    if console.width >= least:
        console.print(table)
        return
    heads = [" ".join(str(column.header).split()) for column in table.columns]
    for first, *others in zip(*(column.cells for column in table.columns)):
        console.print(_text(first), style="bold")
        for head, cell in zip(heads[1:], others):
            if head and str(cell):  # what has no head is a picture of what stands beside it
                console.print(Padding(Text(f"{head}: ", "dim") + _text(cell), (0, 0, 0, 2)))


def _text(cell: object) -> Text:
    """A cell, whole: in a table it may be cut short."""
    text = cell.copy() if isinstance(cell, Text) else Text(str(cell))
    text.no_wrap, text.overflow = False, "fold"
    return text
