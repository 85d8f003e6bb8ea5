"""Results in sentences, and as one HTML file that needs no other."""

from __future__ import annotations

import base64
import html
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from .._kernel.compile.source import cuda_src
from .._operator.operator import operators
from .._warmup.reachable import kernels_of
from . import charts
from .results import BASE, BEHIND, NEAR, Results, Row, mean

_STYLE = """
:root { color-scheme: light dark; --paper: #fff; --ink: #1f2328; --line: #8884; --good: #1a7f4b; --bad: #c8402a; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #121212; --ink: #e3e5e8; --good: #56c58a; --bad: #ff8a75; }
  img { filter: invert(.93) hue-rotate(180deg); } /* white becomes the colour of the page, and hues stay */
}
body {
  font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 1.5rem auto; padding: 0 1rem;
  background: var(--paper); color: var(--ink);
}
h1 { margin: 0; font-size: 1.1rem; font-weight: 600; opacity: .75; } h2 { margin: 2rem 0 .5rem; font-size: 1.2rem; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: 3px 8px; border-bottom: 1px solid var(--line); text-align: right; }
th { cursor: pointer; position: sticky; top: 0; background: var(--paper); }
td:nth-child(-n+4), th:nth-child(-n+4) { text-align: left; }
.missed td:last-child, .missed th:last-child { text-align: left; } .missed td { vertical-align: top; }
.missed td:first-child { white-space: nowrap; }
.answer { font-size: 1.4em; line-height: 1.35; margin: .3rem 0 1rem; }
.good { color: var(--good); } .bad { color: var(--bad); font-weight: 600; }
img { max-width: 100%; }
.wide { overflow-x: auto; } table:not(.missed) td:nth-child(n+5) { white-space: nowrap; }
.more { padding-left: 1.2em; } .more li { overflow-wrap: anywhere; }
@media (max-width: 45rem) {
  .answer { font-size: 1.15em; } .wide img { max-width: none; } .wide td:last-child { max-width: 24rem; }
  .wide table { width: max-content; min-width: 100%; }
}
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; } dd { margin: 0; overflow-wrap: anywhere; }
"""
_MOST = 40  # rows of a picture; the table has them all
_MISSED = (
    "<div class=wide><table class=missed><thead><tr><th>row</th><th>way</th><th>target</th><th>ours</th>"
    "<th>what is lost</th></tr></thead><tbody>"
)
_BESIDE = (
    "<h2 id=beside>Odd sizes beside rounder ones</h2><div class=wide><table><thead><tr><th>row</th><th>dtype</th>"
    "<th>way</th><th>beside</th><th>ours</th><th>beside</th><th>ratio</th></tr></thead><tbody>"
)
_SORT = r"""
const keyOf = cell => {
  const text = cell.textContent.trim(), v = text.replaceAll(",", "").replace(/ ?(GB\/s|TFLOP\/s|us|MB|%|x)$/, "");
  return isNaN(+v) || v === "" ? text : +v;
};
const compare = (a, b) => {
  if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
  return a > b ? 1 : a < b ? -1 : 0;
};
for (const th of document.querySelectorAll("th")) th.onclick = () => {
  const body = th.closest("table").tBodies[0], i = th.cellIndex, down = th.dataset.down = th.dataset.down ? "" : "1";
  const sorted = [...body.rows].sort((a, b) => (down ? -1 : 1) * compare(keyOf(a.cells[i]), keyOf(b.cells[i])));
  sorted.forEach(row => body.append(row));
};
"""


def peers(results: Results) -> list[str]:
    """Names of all that have figures beside ours, PyTorch first."""
    found = {who for row in results.rows for who in (*row.figures, *row.wrong)} - {"ours"}
    return [*(who for who in BASE if who in found), *sorted(found - set(BASE))]


def summary(results: Results) -> Iterator[str]:
    """Summarise the rows in sentences, the answer first."""
    better = "the better of PyTorch and torch.compile" if "compile" in peers(results) else "PyTorch"
    if rows := results.slowest_rows():
        behind = sum(speedup < BEHIND for speedup, _ in rows)
        yield (
            f"On {results.machine.get('gpu', 'this GPU')} cupyops is {mean(speedup for speedup, _ in rows):.2f} times as "
            f"fast as {better}, forward and backward together; {behind} of {len(rows)} rows are more than "
            f"{1 - BEHIND:.0%} slower."
        )
    for what, found in (
        ("forward or backward alone", results.slowest()),
        ("rows limited by memory", results.slowest_rows(units=("GB/s", "us"))),
    ):
        if found:
            behind = sum(speedup < BEHIND for speedup, _ in found)
            yield (
                f"{what.capitalize()}: {mean(speedup for speedup, _ in found):.2f} times as fast as {better} (geometric "
                f"mean of {len(found)}); {behind} of them are more than {1 - BEHIND:.0%} slower. The slowest is "
                f"{found[0][1]}, {found[0][0]:.2f} times as fast."
            )
    if near := results.nearness():
        low = sum(ratio < NEAR for ratio, _ in near)
        yield (
            f"Odd sizes beside rounder ones: {low} of {len(near)} reach less than {NEAR:.0%} of the rounder size's rate. "
            f"The slowest is {near[0][1]}, {near[0][0]:.0%}."
        )
    wanted = [reached for row, way in results.measured() if (reached := row.reached(way)) is not None]
    if wanted:
        yield (
            f"{sum(wanted)} of {len(wanted)} targets are reached. A target is a figure that a case of the benchmark sets "
            "for its kernel in advance, such as the speed at which the GPU copies memory."
        )
    alone = [row.op for row in results.rows if not row.compared]
    if alone:
        yield f"The results of {len(alone)} rows are not compared: those of {', '.join(dict.fromkeys(alone))}."
    for name, times in results.host.items():
        took = ", ".join(f"{'cupyops' if who == 'ours' else who} {us:.2f} us" for who, us in times.items())
        yield f"Host time of a small call, {name}: {took}."
    if results.ceilings:
        rates = ", ".join(f"{name} {rate:,.0f} {_of(name)}" for name, rate in results.ceilings.items())
        yield f"The most that this GPU reaches: {rates}."


def _of(ceiling: str) -> str:
    return "TFLOP/s" if ceiling.startswith("matmul") else "GB/s"


def page(results: Results, path: Path) -> None:
    """The report as one HTML file."""
    others = peers(results)
    head = ["operator", "size", "dtype", "way", "ours", *others, "speed-up", "target", "of the ceiling", "memory"]
    first, *pictures = [
        f'<h2 id="{name}">{name.capitalize()}</h2><p class=wide><img alt="{name}" src="data:image/png;base64,'
        f'{base64.b64encode(charts.png(figure)).decode()}"></p>'
        for name, figure in charts.charts(results, _MOST)
    ] or [""]
    machine = "".join(f"<dt>{html.escape(k)}</dt><dd>{html.escape(str(v))}</dd>" for k, v in results.machine.items())
    wrong = "".join(f"<li>{html.escape(f'{name}, {who}: {reason}')}</li>" for name, who, reason in results.left_out())
    missed = "".join(
        f"<tr><td>{html.escape(row.name)}</td><td>{way}</td><td>{row.want[way]:g} {row.unit}</td>"
        f"<td>{_rate(row, 'ours', way)}</td><td>{html.escape(lost(row))}</td></tr>"
        for row, way in results.measured()
        if row.reached(way) is False
    )
    beside = "".join(_beside_line(row, way) for row, way in results.measured())
    body = "".join(_line(row, way, others, results) for row in results.rows for way in row.ways())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>cupyops benchmark</title><style>{_STYLE}</style><h1>cupyops beside its peers</h1>"
        + _told(results, first)
        + f"<dl>{machine}</dl>{''.join(pictures)}<h2>Every figure</h2><div class=wide><table><thead><tr>"
        + "".join(f"<th>{html.escape(name)}</th>" for name in head)
        + f"</tr></thead><tbody>{body}</tbody></table></div>"
        + (f"<h2 id=missed>Targets that are not reached</h2>{_MISSED}{missed}</tbody></table></div>" if missed else "")
        + (f"{_BESIDE}{beside}</tbody></table></div>" if beside else "")
        + (f"<h2>Left out</h2><ul>{wrong}</ul>" if wrong else "")
        + f"<script>{_SORT}</script></html>\n",
        encoding="utf-8",
    )


def _told(results: Results, picture: str) -> str:
    """The answer, a picture of it, and the rest of the summary as a list."""
    lines = [html.escape(line) for line in summary(results)]
    more = "".join(f"<li>{line}</li>" for line in lines[1:])
    return f"<p class=answer>{''.join(lines[:1])}</p>{picture}<h2>Summary</h2><ul class=more>{more}</ul>"


_LOST = re.compile(r"\b(?:What is lost|Lost): (.*)", re.DOTALL)


def lost(row: Row) -> str:
    """Return why a wanted figure is not reached: by the row, or the head of a file of the operator's kernels."""
    if row.lost:
        return row.lost
    said = next((found[1] for path in _files(row.op) if (found := _LOST.search(_head(path)))), "")
    return said[:1].upper() + said[1:]


def _files(op: str) -> Iterator[Path]:
    """The .cu files of a built-in operator's kernels, that of its own name first."""
    own = cuda_src() / f"{op}.cu"
    operator = operators().get(f"cupyops::{op}")
    kernels = [] if operator is None else kernels_of(operator)
    paths = {kernel.source.path for kernel in kernels if not kernel.is_text}
    yield from sorted({path for path in {own, *paths} if path and path.is_file()}, key=lambda path: (path != own, path))


def _head(path: Path) -> str:
    """The comment with which a file begins."""
    lines = itertools.takewhile(lambda line: line.startswith("//"), path.read_text(encoding="utf-8").splitlines())
    return " ".join(line.removeprefix("//").strip() for line in lines)


def _line(row: Row, way: str, others: list[str], results: Results) -> str:
    speedup, reached, ours = row.speedup(way), row.reached(way), row.rate("ours", way)
    ceiling = (
        results.ceilings.get("copy" if row.unit == "GB/s" else f"matmul {row.dtype}") if row.unit != "us" else None
    )
    size = row.size if row.compared else f"{row.size} (not compared)"
    cells = [_cell(html.escape(text)) for text in (row.op, size, row.dtype, way)]
    cells += [_cell(_rate(row, who, way), _quartiles(row, who, way)) for who in ("ours", *others)]
    cells.append(_cell("") if speedup is None else _cell(f"{speedup:.2f}x", "", _mood(speedup >= BEHIND)))
    cells.append(_cell("") if reached is None else _cell(f"{row.want[way]:g} {row.unit}", "", _mood(reached)))
    cells.append(_cell(f"{ours / ceiling:.0%}") if ceiling and ours else _cell(""))
    cells.append(_cell(f"{row.memory['ours'] / 1e6:,.1f} MB") if "ours" in row.memory else _cell(""))
    return f"<tr>{''.join(cells)}</tr>"


def _beside_line(row: Row, way: str) -> str:
    if row.beside is None or (ratio := row.to_beside(way)) is None:
        return ""
    cells = [_cell(html.escape(text)) for text in (f"{row.op} {row.size}", row.dtype, way, row.beside.size)]
    cells += [_cell(_rate(one, "ours", way), _quartiles(one, "ours", way)) for one in (row, row.beside)]
    cells.append(_cell(f"{ratio:.2f}x", "", _mood(ratio >= NEAR)))
    return f"<tr>{''.join(cells)}</tr>"


def _cell(text: str, title: str = "", mood: str = "") -> str:
    return f"<td{f' title={title!r}' if title else ''}{f' class={mood}' if mood else ''}>{text}</td>"


def _mood(good: bool) -> str:
    return "good" if good else "bad"


def rate(row: Row, who: str, way: str) -> str:
    """A figure as tables show it; "-" for what is left out."""
    if who in row.wrong:
        return "-"
    found = row.rate(who, way)
    return "" if found is None else f"{found:,.0f}" if found >= 1000 else f"{found:,.1f}"


def _rate(row: Row, who: str, way: str) -> str:
    """Write a rate with its unit."""
    found = rate(row, who, way)
    return f"{found} {row.unit}" if found.strip("-") else found


def _quartiles(row: Row, who: str, way: str) -> str:
    figure = row.figures.get(who, {}).get(way)
    return (
        ""
        if figure is None
        else f"{figure.us:g} us, quartiles {figure.low:g} to {figure.high:g} us, {figure.samples} samples"
    )
