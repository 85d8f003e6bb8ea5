"""A simulated launch in the terminal: a summary, the arrays, and a table of the lines that ran."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import narrow
from .occupancy import SOURCE as LIMITS
from .page import describe
from .report import Launch, LineFacts, Remark, number

_MARKED = 3  # of the hottest lines
_BAR = 8  # characters
_NARROW = 60  # columns under which the table of lines is a list
_WORTH = 0.01


def show(console: Console, launch: Launch) -> None:
    """Print the whole report."""
    console.print(_summary(launch))
    changed = [array for array in launch.arrays if array.changed]
    for array in changed:
        title = Text(f"{array.ctype} {array.name}", style="bold") + Text(f"  {describe(array)}", style="not bold")
        console.print(title, soft_wrap=True)
    if launch.arrays and not changed:
        console.print("no array has changed", style="yellow")
    if launch.lines:
        narrow.show(console, _lines(launch), _NARROW)
    for line, remark in _remarks(launch):
        console.print(
            Text(f"{line.file}:{line.number}: ", style="bold")
            + Text(f"{remark.kind}: {remark.what}. ", style=_style(remark))
            + Text(remark.advice, style="not bold"),
        )


def _summary(launch: Launch) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column()
    for name, value in _facts(launch):
        table.add_row(name, Text(value))
    return table


def _facts(launch: Launch) -> Iterator[tuple[str, str]]:
    grid, block = (" x ".join(map(str, extents)) for extents in (launch.grid, launch.block))
    yield "kernel", f"{launch.kernel} in {launch.file}, {launch.arch}, grid {grid}, block {block}"
    if launch.report is not None:
        yield "ran", f"{launch.report.seconds:.3g} s in the simulator (no measure of a GPU's time)"
        yield "instructions", f"{launch.report.thread_instructions:,} by threads, {launch.issued:,} issued by warps"
    if (resources := launch.resources) is not None:
        constant = ", ".join(f"bank {bank}: {size:,}" for bank, size in resources.constant.items())
        spills = "spilled registers or local arrays" if resources.stack else "no spills"
        yield "registers", f"{resources.registers} per thread; stack frame {resources.stack:,} bytes ({spills})"
        yield "shared memory", f"{resources.shared:,} bytes static, {launch.shared:,} dynamic"
        yield "constant memory", f"{sum(resources.constant.values()):,} bytes ({constant})"
    if (occupancy := launch.occupancy) is not None:
        held = f"{occupancy.blocks} blocks, {occupancy.warps} of {occupancy.most} warps per multiprocessor"
        refused = "" if occupancy.blocks else "; a GPU refuses this launch"
        limits = ", ".join(occupancy.limited_by)
        yield "occupancy", f"{occupancy.share:.0%} in theory: {held}; limited by {limits}{refused}"
        yield "", f"({LIMITS})"


def _lines(launch: Launch) -> Table:
    """File by file, the lines with instructions of their own. In a narrow terminal the source text is cut short."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("line", no_wrap=True, justify="right")
    table.add_column("source", min_width=12)
    for name in ("issued", "", "threads\n/warp", "global\nsectors", "shared\nwavefronts"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    marked = {(line.file, line.number) for line in launch.hottest(_MARKED)}
    hottest = max((line.share for line in launch.lines), default=0.0) or 1.0
    ran = [line for line in launch.lines if line.counts.warps]
    for file, lines in groupby(ran, key=lambda line: line.file):
        table.add_section()
        table.add_row("", Text(file, style="bold"))
        for line in lines:
            hot = (line.file, line.number) in marked
            table.add_row(*_cells(line, line.share / hottest, hot))
    return table


def _cells(line: LineFacts, heat: float, hot: bool) -> Iterator[Text]:
    remarks = {remark.kind: remark for remark in line.remarks()}
    yield Text(("> " if hot else "") + str(line.number), style="bold red" if hot else "dim")
    yield Text(line.text.strip(), style="bold" if hot else "", no_wrap=True, overflow="ellipsis")
    yield Text(f"{line.share:.1%}", style="bold red" if hot else "")
    yield Text("█" * max(round(heat * _BAR), 1), style="red" if hot else "yellow")
    yield Text(number(line.threads_per_warp), style=_style(remarks.get("divergence")))
    for measure, kind in ((line.sectors, "coalescing"), (line.wavefronts, "bank conflicts")):
        text = f"{number(measure[0])} ({number(measure[1])})" if measure is not None else ""
        yield Text(text, style=_style(remarks.get(kind)))


def _remarks(launch: Launch) -> Iterator[tuple[LineFacts, Remark]]:
    for line in launch.hottest(len(launch.lines)):
        if line.share >= _WORTH:
            yield from ((line, remark) for remark in line.remarks())


def _style(remark: Remark | None) -> str:
    return "" if remark is None else "bold red" if remark.severe else "yellow"
