"""Results of the benchmark in the terminal: a table, and what it comes to."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..bench.report import peers, rate, summary
from ..bench.results import BEHIND, Results, Row

_WIDE = 120  # columns, under which a table would be cut: a log file has 80


def show(results: Results, console: Console) -> None:
    """The table, who is left out and why, and the summary."""
    others = peers(results)
    if console.width >= _WIDE:
        console.print(_table(results, others))
    else:
        for line in _plain(results, others):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    for name, who, reason in results.left_out():
        console.print(f"{name}, {who}: {reason}", style="red", markup=False, soft_wrap=True)
    for line in summary(results):
        console.print(line, markup=False, soft_wrap=True)


def _table(results: Results, others: list[str]) -> Table:
    table = Table(title="GB/s, TFLOP/s or us of device time", title_justify="left")
    for name in ("operator", "size", "dtype", "way"):
        table.add_column(name, no_wrap=True)
    for name in ("unit", "ours", *others, "speed-up", "want"):
        table.add_column(name, justify="right", no_wrap=True)
    for row, way in results.measured():
        table.add_row(*(Text(cell, style) for cell, style in _cells(row, way, others)))
    return table


def _plain(results: Results, others: list[str]) -> Iterator[str]:
    """One line for each figure, with the names of all."""
    for row, way in results.measured():
        name, size, dtype, _, unit, ours, *rest, speedup, want = (cell for cell, _ in _cells(row, way, others))
        figures = [f"ours {ours} {unit}", *(f"{who} {one}" for who, one in zip(others, rest) if one)]
        figures += [f"speed-up {speedup}"] * bool(speedup) + [f"want {want}"] * bool(want)
        yield f"{name} {size} {dtype} {way}: {', '.join(figures)}"


def _cells(row: Row, way: str, others: list[str]) -> Iterator[tuple[str, str]]:
    """(text, style)."""
    yield from ((text, "") for text in (row.op, row.size, row.dtype, way, row.unit, rate(row, "ours", way)))
    yield from ((rate(row, who, way), "") for who in others)
    speedup, reached = row.speedup(way), row.reached(way)
    yield ("", "") if speedup is None else (f"{speedup:.2f}x", "red" if speedup < BEHIND else "green")
    yield ("", "") if reached is None else (f"{row.want[way]:g}", "green" if reached else "red")
