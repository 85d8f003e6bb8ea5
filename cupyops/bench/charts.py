"""Pictures of results, by matplotlib: each a figure with a name."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .results import BASE, Results, Row

WHO = {"ours": "#2f6fde", "eager": "#e08a1e", "compile": "#4ba36b", "liger": "#a35bb8"}
_OTHERS = ("#2aa5b5", "#b5892a", "#d65f9c", "#7a8a2f", "#8a8f98")  # of peers that a case names itself


_COLOURS = 24  # of a picture in a page: lines and marks in a dozen, and what lies between them and the white


def charts(results: Results, most: int | None = None) -> Iterator[tuple[str, Any]]:
    """(name, figure) of every picture that the results have something for; of rows with the `most` that come off worst."""
    if any(row.speedup(way) for row, way in results.measured()):
        yield "speedups", _speedups(results)
    for unit, ceiling in (("GB/s", "copy"), ("TFLOP/s", "matmul bfloat16")):
        rows = [row for row in results.rows if row.unit == unit and row.ways()]
        if rows:
            yield (
                ("bandwidth" if unit == "GB/s" else "throughput"),
                _rates(rows, unit, results.ceilings.get(ceiling), most),
            )
    if any(row.unit == "GB/s" for row in results.rows):
        yield "sizes", _sizes(results)
    points = [(row, way) for row, way in results.measured() if all(row.work[way])]
    if points:
        yield "roofline", _roofline(results, points)
    if any(row.memory.get("ours") for row in results.rows):
        yield "memory", _memory(results, most)


def write(results: Results, folder: Path) -> list[Path]:
    """Each picture as a PNG."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for name, figure in charts(results):
        path = folder / f"{name}.png"
        figure.savefig(path, dpi=130, facecolor="white")
        found.append(path)
    return found


def png(figure: Any) -> bytes:
    """A picture's bytes, in so few colours that a page of them is small."""
    from PIL import Image  # which matplotlib brings

    buffer, small = io.BytesIO(), io.BytesIO()
    figure.savefig(buffer, format="png", dpi=80, facecolor="white")
    buffer.seek(0)
    Image.open(buffer).convert("RGB").quantize(_COLOURS).save(small, format="png", optimize=True)
    return small.getvalue()


def colours(rows: list[Row]) -> dict[str, str]:
    """Colours of all that have figures, ours first."""
    found = {who for row in rows for who in row.figures}
    others = sorted(found - set(WHO))
    named = {who: _OTHERS[index % len(_OTHERS)] for index, who in enumerate(others)}
    return {**{who: colour for who, colour in WHO.items() if who in found}, **named}


def _figure(width: float, height: float) -> tuple[Any, Any]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _speedups(results: Results) -> Any:
    """Chart of each operator's geometric mean against the best of eager and compile, and its range."""
    found: dict[str, list[float]] = {}
    for row, way in results.measured():
        if (speedup := row.speedup(way)) is not None:
            found.setdefault(f"{row.op} {way}", []).append(speedup)
    names = sorted(found, key=lambda name: math.prod(found[name]) ** (1 / len(found[name])))
    means = [math.prod(found[name]) ** (1 / len(found[name])) for name in names]
    figure, axes = _figure(9, 0.24 * len(names) + 1.4)
    shades = [WHO["ours"] if mean >= 1 else "#c8553d" for mean in means]
    axes.barh(names, [mean - 1 for mean in means], left=1, color=shades, height=0.7)  # from 1, where none is faster
    for index, name in enumerate(names):
        axes.plot([min(found[name]), max(found[name])], [index, index], color="black", linewidth=1, alpha=0.6)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel(f"times as fast as the best of {' and '.join(BASE)} (line: least to most)", loc="left")
    ranges = [one for speedups in found.values() for one in speedups]
    axes.set_xlim(min(0.7, *ranges) / 1.05, max(2.0, *ranges) * 1.05)
    ticks = [
        tick for tick in (0.25, 0.5, 0.7, 1, 1.4, 2, 3, 4, 6, 8, 16) if min(0.7, *ranges) <= tick <= max(2.0, *ranges)
    ]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()  # their labels would lie over those
    axes.xaxis.set_label_position("top")  # the bars may fill more than a screen
    axes.xaxis.tick_top()
    axes.spines[["top", "bottom"]].set_visible(False)
    axes.margins(y=0.01)
    return figure


def _rates(rows: list[Row], unit: str, ceiling: float | None, most: int | None) -> Any:
    """Ours and the peers of every row, or of those with the least speed-up."""
    lines = [(row, way) for row in rows for way in row.ways()]
    title = f"{unit} of every row"
    if most is not None and len(lines) > most:
        lines = sorted(lines, key=lambda line: line[0].speedup(line[1]) or math.inf)[:most]
        title = f"{unit} of the {most} rows with the least speed-up"
    figure, axes = _figure(9.5, 0.2 * len(lines) + 1.6)
    for who, colour in reversed(colours(rows).items()):
        points = [(rate, y) for y, (row, way) in enumerate(lines) if (rate := row.rate(who, way)) is not None]
        if points:
            size = 42 if who == "ours" else 22
            axes.scatter(*zip(*points), s=size, color=colour, label=who, zorder=3 if who == "ours" else 2)
    if ceiling is not None:
        axes.axvline(ceiling, color="black", linewidth=0.9, linestyle="--", label=f"ceiling, {ceiling:,.0f}")
    axes.set_yticks(range(len(lines)), [f"{row.name} {way}" for row, way in lines], fontsize=7)
    axes.set(xlabel=unit, xlim=(0, None))
    axes.tick_params(axis="x", top=True, labeltop=True)  # it may be many rows high
    axes.grid(axis="y", alpha=0.25)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    figure.legend(loc="outside upper center", ncols=6, frameon=False, fontsize=8)
    axes.set_title(title, loc="left")
    return figure


def _sizes(results: Results) -> Any:
    """Bandwidth by the bytes moved: where small calls end and the ceiling begins."""
    figure, axes = _figure(8, 4.5)
    for way, marker in (("forward", "o"), ("backward", "^")):
        points = [
            (row.work[way][0] / 1e6, row.rate("ours", way))
            for row in results.rows if row.unit == "GB/s" and way in row.ways()
        ]  # fmt: skip
        if points:
            axes.scatter(*zip(*points), marker=marker, s=26, color=WHO["ours"], alpha=0.75, label=way)
    if "copy" in results.ceilings:
        axes.axhline(results.ceilings["copy"], color="black", linestyle="--", linewidth=0.9, label="copy, by PyTorch")
    axes.set(xscale="log", xlabel="least megabytes moved", ylabel="GB/s", ylim=(0, None))
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    axes.set_title("Bandwidth by size", loc="left")
    return figure


def _roofline(results: Results, points: list[tuple[Row, str]]) -> Any:
    """Flops by arithmetic intensity, under the two roofs that were measured."""
    figure, axes = _figure(8, 4.5)
    xs = [row.work[way][1] / row.work[way][0] for row, way in points]
    ys = [row.work[way][1] / row.figures["ours"][way].us / 1e6 for row, way in points]
    axes.scatter(xs, ys, s=26, color=WHO["ours"], zorder=3)
    span = [min(xs) / 4, max(xs) * 4]
    if (copy := results.ceilings.get("copy")) is not None:
        for dtype in ("bfloat16", "float32"):
            if (top := results.ceilings.get(f"matmul {dtype}")) is not None:
                knee = top / copy * 1e3
                line = sorted({span[0], knee, max(span[1], knee * 4)})
                axes.plot(line, [min(top, x * copy / 1e3) for x in line], linewidth=1, label=f"roof, {dtype}")
    axes.set(xscale="log", yscale="log", xlabel="flops per byte", ylabel="TFLOP/s")
    axes.grid(alpha=0.25, which="both")
    axes.legend(frameon=False)
    axes.set_title("Roofline", loc="left")
    return figure


def _memory(results: Results, most: int | None) -> Any:
    """Peak memory of forward and backward beside PyTorch's, of every row or of those that take the most beside it."""
    rows = [row for row in results.rows if row.memory.get("ours") and row.memory.get("eager")]
    rows = sorted(rows, key=lambda row: row.memory["ours"] / row.memory["eager"])
    title = (
        "Memory"
        if most is None or len(rows) <= most
        else f"Memory of the {most} rows that take the most beside PyTorch"
    )
    rows = rows if most is None else rows[-most:]
    figure, axes = _figure(8.5, 0.18 * len(rows) + 1.4)
    ratios = [row.memory["ours"] / row.memory["eager"] for row in rows]
    axes.barh([row.name for row in rows], ratios, color=[WHO["ours"] if r <= 1.01 else "#c8553d" for r in ratios])
    axes.axvline(1, color="black", linewidth=0.8)
    axes.tick_params(axis="y", labelsize=7)
    axes.margins(y=0.005)
    axes.set(xlabel="peak memory of forward and backward, of that of PyTorch in eager mode")
    axes.set_title(title, loc="left")
    return figure
