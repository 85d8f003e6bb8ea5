"""A simulated launch as one HTML file: facts, the hottest lines, the source with what each line cost."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import CudaLexer

from .occupancy import SOURCE as LIMITS
from .report import FIRST, ArrayFacts, Launch, LineFacts, Remark, number

_CSS = Path(__file__).with_name("page.css")
_HOTTEST = 8
_WORTH = 0.01  # the share of the instructions from which on a remark is repeated on top

_COLUMNS = (
    ("line", "Of the file."),
    ("issued", "Share of all warp instructions that this line's own are."),
    ("with calls", "The same, with those of the functions that were inlined on this line."),
    ("threads/ warp", "Threads that are active when a warp runs this line; 32 is full."),
    ("global: sectors", "32-byte sectors of global memory for each access of a warp; in brackets, how many would do."),
    ("shared: wavefronts", "Passes over shared memory for each access of a warp; in brackets, how many would do."),
    ("source", "A click shows the PTX of the line, and how often a warp ran each instruction."),
)


def render(launch: Launch) -> str:
    """The page, complete in itself: no script, and nothing that is loaded from elsewhere."""
    body = "\n".join(part for section in _sections(launch) for part in section)
    title = escape(f"{launch.kernel} in {launch.file}")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{_CSS.read_text(encoding='utf-8')}</style>\n</head>\n"
        f"<body>\n{body}\n</body>\n</html>\n"
    )


def _sections(launch: Launch) -> Iterator[Iterator[str]]:
    anchors = {file: f"f{index}" for index, file in enumerate(launch.sources)}
    yield _header(launch)
    if launch.fault is not None:  # what is wrong, and where, before anything else
        yield _fault(launch, anchors)
        yield _files(launch, anchors)
    yield _cards(launch)
    yield _hottest(launch, anchors)
    yield _worth_a_look(launch, anchors)
    yield _arguments(launch)
    yield _printed(launch)
    if launch.fault is None:
        yield _files(launch, anchors)
    yield _footer()


# --- the top -----------------------------------------------------------------------------------------------------


def _header(launch: Launch) -> Iterator[str]:
    extents = f"grid {_extents(launch.grid)}, block {_extents(launch.block)}"
    order = "" if launch.seed is None else f", order of threads drawn with seed {launch.seed}"
    checks = "" if launch.check else ", without the checks for races and unwritten memory"
    yield f"<header><h1>{escape(launch.kernel)}</h1>"
    yield f'<p class="sub">{escape(launch.file)}: {extents}, {escape(launch.arch)}{order}{checks}</p></header>'


def _fault(launch: Launch, anchors: dict[str, str]) -> Iterator[str]:
    fault = launch.fault
    assert fault is not None
    yield f'<section class="fault"><h2>{escape(fault.kind)}</h2><pre>{escape(fault.message)}</pre>'
    if fault.file is not None:
        yield f'<a href="#{anchors[fault.file]}-{fault.line}">{escape(fault.file)}:{fault.line}</a>'
    yield "</section>"


def _cards(launch: Launch) -> Iterator[str]:
    yield '<section class="cards">'
    if launch.report is not None:
        yield _card(f"{launch.issued:,}", "warp instructions")
        yield _card(f"{launch.report.thread_instructions:,}", "thread instructions")
        yield _card(f"{launch.report.seconds:.3g} s", "in the simulator", "no measure of a GPU's time")
    if (resources := launch.resources) is not None:
        spilled = ("spilled registers or local arrays", "warn") if resources.stack else ("no spills", "")
        yield _card(str(resources.registers), "registers per thread")
        yield _card(f"{resources.stack:,} B", "stack per thread", *spilled)
        constant = ", ".join(f"bank {bank}: {size:,} B" for bank, size in resources.constant.items())
        yield _card(f"{sum(resources.constant.values()):,} B", "constant memory", constant)
        shared = resources.shared + launch.shared
        yield _card(f"{shared:,} B", "shared per block", f"static {resources.shared:,}, dynamic {launch.shared:,}")
    if (occupancy := launch.occupancy) is not None:
        limits = ", ".join(occupancy.limited_by) + ("" if occupancy.blocks else "; a GPU refuses this launch")
        note = f"{occupancy.blocks} blocks, {occupancy.warps} of {occupancy.most} warps; limit: {limits}"
        yield _card(f"{occupancy.share:.0%}", "occupancy, in theory", note, meter=occupancy.share, title=LIMITS)
    yield "</section>"


def _card(value: str, what: str, note: str = "", kind: str = "", meter: float | None = None, title: str = "") -> str:
    bar = f'<div class="meter"><i style="width:{meter:.0%}"></i></div>' if meter is not None else ""
    small = f"<small>{escape(note)}</small>" if note else ""
    tip = f' title="{escape(title)}"' if title else ""
    return f'<div class="card"{tip}><b class="{kind}">{escape(value)}</b><span>{escape(what)}</span>{bar}{small}</div>'


def _hottest(launch: Launch, anchors: dict[str, str]) -> Iterator[str]:
    hottest = [line for line in launch.hottest(_HOTTEST) if line.file in anchors]
    if not hottest:
        return
    yield '<h2>Where the instructions are</h2>\n<ol class="hottest">'
    for line in hottest:
        heat = line.share / hottest[0].share
        yield (
            f'<li><a href="#{anchors[line.file]}-{line.number}"><span class="where mono">{_place(line)}</span>'
            f'<span class="track"><span class="bar" style="--heat:{heat:.3f};display:block"></span></span>'
            f'<span class="percent">{line.share:.1%}</span><code>{escape(line.text.strip())}</code></a></li>'
        )
    yield "</ol>"


def _worth_a_look(launch: Launch, anchors: dict[str, str]) -> Iterator[str]:
    ordered = sorted(launch.lines, key=lambda line: (-line.share, line.file, line.number))
    found = [(line, remark) for line in ordered if line.share >= _WORTH for remark in line.remarks()]
    found = [(line, remark) for line, remark in found if line.file in anchors]
    if not found:
        return
    yield "<h2>Worth a look</h2>\n<table><tr><th>line</th><th>what</th><th>why, and what helps</th></tr>"
    for line, remark in found:
        link = f'<a class="mono" href="#{anchors[line.file]}-{line.number}">{_place(line)}</a>'
        what = f'<span class="{_class(remark)}">{remark.kind}</span>: {remark.what}'
        yield f"<tr><td>{link}</td><td>{what}</td><td>{escape(remark.advice)}</td></tr>"
    yield "</table>"


def _arguments(launch: Launch) -> Iterator[str]:
    if not launch.arguments:
        return
    arrays = {array.name: array for array in launch.arrays}  # none where the launch ended in a fault
    last = "<th>after the launch</th>" if arrays else ""
    yield f'<h2>Arguments</h2>\n<table class="arguments"><tr><th>parameter</th><th>given</th>{last}</tr>'
    for ctype, name, given in launch.arguments:
        after = f"<td>{escape(describe(arrays[name])) if name in arrays else ''}</td>" if arrays else ""
        declared, shown = escape(f"{ctype} {name}"), escape(given)
        yield f"<tr><td><code>{declared}</code></td><td><code>{shown}</code></td>{after}</tr>"
    yield "</table>"


def describe(array: ArrayFacts) -> str:
    """Describe an array in one line: what changed, the range, the first elements."""
    total = 1
    for extent in array.shape:
        total *= extent
    parts = [f"{array.changed:,} of {total:,} changed" if array.changed else "unchanged"]
    if array.unwritten:
        parts.append(f"{array.unwritten:,} never written")
    if array.minimum is not None:
        parts.append(f"from {_short(array.minimum)} to {_short(array.maximum)}")
    if array.nans:
        parts.append(f"{array.nans:,} NaN")
    dots = " ..." if total > FIRST else ""
    return f"{'; '.join(parts)}: {' '.join(_short(value) for value in array.first)}{dots}"


def _short(value: Any) -> str:
    return "?" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _printed(launch: Launch) -> Iterator[str]:
    if launch.output:
        yield f"<h2>Printed by the kernel</h2>\n<pre>{escape(launch.output)}</pre>"


# --- the source --------------------------------------------------------------------------------------------------


def _files(launch: Launch, anchors: dict[str, str]) -> Iterator[str]:
    """Each file in a section of its own; without columns where nothing was measured."""
    yield "<h2>Source</h2>"
    lines = {(line.file, line.number): line for line in launch.lines}
    hottest = max((line.share for line in launch.lines), default=0.0) or 1.0
    fault = launch.fault
    for file, text in launch.sources.items():
        share = sum(line.share for line in launch.lines if line.file == file)
        at = fault.line if fault is not None and fault.file == file else None
        opened = " open" if share or at is not None or len(anchors) == 1 else ""
        kind, part = ("file", f" <small>{share:.1%} of the instructions</small>") if lines else ("file plain", "")
        yield f'<details class="{kind}" id="{anchors[file]}"{opened}><summary>{escape(file)}{part}</summary>'
        headings = "".join(f'<span title="{escape(what)}">{escape(name)}</span>' for name, what in _COLUMNS)
        yield f'<div class="head">{headings}</div>' if lines else ""
        for index, code in enumerate(_highlighted(text), 1):
            anchor, message = f"{anchors[file]}-{index}", fault.message if fault is not None and index == at else None
            line = lines.get((file, index))
            yield (
                _quiet_row(anchor, index, code, 5 if lines else 0, message)
                if line is None
                else _row(anchor, index, code, line, line.share / hottest)
            )
        yield "</details>"


def _highlighted(text: str) -> list[str]:
    lexer = CudaLexer(stripnl=False, ensurenl=False)
    found: str = highlight(text.replace("\r\n", "\n"), lexer, HtmlFormatter(nowrap=True, classprefix="x-"))
    return found.removesuffix("\n").split("\n")


def _quiet_row(anchor: str, index: int, code: str, columns: int, fault: str | None) -> str:
    """A line that did not run, or the one at which the launch ended."""
    cells = f'<a class="at" href="#{anchor}">{index}</a>{"<span></span>" * columns}<code>{code}</code>'
    if fault is None:
        return f'<div class="row" id="{anchor}">{cells}</div>'
    here = escape(fault.splitlines()[0])
    return f'<div class="row faulty" id="{anchor}">{cells}</div><div class="here">{here}</div>'


def _row(anchor: str, index: int, code: str, line: LineFacts, heat: float) -> str:
    """A line that ran; its own PTX, if it has any, beneath it."""
    style = f'style="--heat:{heat:.3f}"'
    cells = f'<a class="at" href="#{anchor}">{index}</a>{"".join(_measures(line))}<code>{code}</code>'
    if not line.ptx:
        return f'<div class="row" id="{anchor}" {style}>{cells}</div>'
    ptx = "\n".join(f"{warps:>9,} x  {escape(text)}" for _, text, warps in line.ptx)
    return f'<details class="row" id="{anchor}"><summary {style}>{cells}</summary><pre>{ptx}</pre></details>'


def _measures(line: LineFacts) -> Iterator[str]:
    remarks = {remark.kind: remark for remark in line.remarks()}
    own = line.counts.warps
    yield f'<span class="heat">{line.share:.1%}</span>' if own else "<span></span>"
    yield f'<span class="calls">{line.total_share:.1%}</span>' if line.total_share > line.share else "<span></span>"
    yield _measure(number(line.threads_per_warp) if own else "", remarks.get("divergence"))
    yield _measure(_with_least(line.sectors), remarks.get("coalescing"))
    yield _measure(_with_least(line.wavefronts), remarks.get("bank conflicts"))


def _measure(text: str, remark: Remark | None) -> str:
    if remark is None:
        return f"<span>{text}</span>"
    tip = escape(f"{remark.kind}: {remark.what}. {remark.advice}")
    return f'<span class="{_class(remark)}" title="{tip}">{text}</span>'


def _with_least(measure: tuple[float, float] | None) -> str:
    return f"{number(measure[0])} ({number(measure[1])})" if measure is not None else ""


def _class(remark: Remark) -> str:
    return "bad" if remark.severe else "warn"


def _place(line: LineFacts) -> str:
    return escape(f"{line.file}:{line.number}")


def _extents(extents: tuple[int, int, int]) -> str:
    return " x ".join(map(str, extents))


def _footer() -> Iterator[str]:
    yield "<footer><p>Counted by cupyops while it executed the kernel's PTX on the CPU. Instructions are PTX instructions: "
    yield "the GPU's own differ in number. Nothing here is a time of a GPU.</p></footer>"
