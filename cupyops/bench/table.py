"""Results as a CSV file: what was measured on in lines that begin with `#`, then a line for each figure.

A row of the benchmark is the lines of one `op`, `size` and `dtype`; what is said of the row as a whole stands on the first.
A line whose way is "left out" has the reason why `who` was not measured. Lines with `beside_of` are of the rounder size that
stands beside the row of that name.
"""

from __future__ import annotations

import csv
import io
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import InputError
from .results import Figure, Results, Row

HEAD = "# cupyops bench 2"
COLUMNS = (
    "op", "size", "dtype", "way", "who", "us", "low", "high", "samples",
    "memory", "unit", "bytes", "flops", "want", "compared", "beside_of", "note",
)  # fmt: skip


def write(results: Results, path: Path) -> None:
    """Keep results; the file is whole at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(text(results), encoding="utf-8")
    part.replace(path)


def read(path: Path) -> Results:
    """The results that a file keeps. Raises `InputError` where it keeps none."""
    try:
        return parse(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{path} holds no results of operators: {error}; expected what bench --csv writes (figures of models are "
            "read with --models)"
        ) from None


def text(results: Results) -> str:
    """The file's content."""
    out = io.StringIO()
    print(HEAD, *_about(results), sep="\n", file=out)
    table = csv.DictWriter(out, COLUMNS, restval="", lineterminator="\n")
    table.writeheader()
    for row in results.rows:
        table.writerows(_lines(row))
        if row.beside is not None:
            table.writerows(line | {"beside_of": row.name} for line in _lines(row.beside))
    return out.getvalue()


def _about(results: Results) -> Iterator[str]:
    yield from (f"# {name}: {' '.join(value.split())}" for name, value in results.machine.items())
    yield from (f"# ceiling {name}: {rate:.6g}" for name, rate in results.ceilings.items())
    for call, times in results.host.items():
        yield from (f"# host {call}, {who}: {us:g}" for who, us in times.items())


def _lines(row: Row) -> Iterator[dict[str, Any]]:
    """The lines of a row; ours come first, and the first one has what is said of the row."""
    key = {"op": row.op, "size": row.size, "dtype": row.dtype}
    whole: dict[str, Any] = {"unit": row.unit, "compared": "" if row.compared else "no", "note": row.lost}
    for who in sorted({"ours", *row.figures, *row.memory}, key=lambda who: who != "ours"):
        memory = {} if who not in row.memory else {"memory": row.memory[who]}
        ways = row.figures.get(who, {})
        if not ways and (memory or whole):
            yield {**key, "who": who, **memory, **whole}
            whole = {}
        for way, figure in ways.items():
            line = {**key, "way": way, "who": who, "us": _short(figure.us), "samples": figure.samples}
            line |= {"low": _short(figure.low), "high": _short(figure.high), **memory, **whole}
            if who == "ours":
                moved, flops = row.work[way]
                want = row.want.get(way)
                line |= {"bytes": _short(moved), "flops": _short(flops), "want": "" if want is None else _short(want)}
            yield line
            memory, whole = {}, {}
    yield from ({**key, "way": "left out", "who": who, "note": reason} for who, reason in row.wrong.items())


def _short(value: float) -> str:
    """A number with no `.0` behind it."""
    return str(int(value)) if math.isfinite(value) and value == int(value) else repr(value)


def parse(content: str) -> Results:
    """Parse a file of results. Raises ValueError or KeyError where it is no file of this kind."""
    lines = list(io.StringIO(content))
    if not lines or lines[0].rstrip("\n") != HEAD:
        raise ValueError(f"its first line is not {HEAD!r}")
    about = [
        line.removeprefix("# ").rstrip("\n")
        for line in itertools.takewhile(lambda line: line.startswith("# "), lines[1:])
    ]
    results = Results({}, {}, [])
    for name, _, value in (line.partition(": ") for line in about):
        if name.startswith("ceiling "):
            results.ceilings[name.removeprefix("ceiling ")] = float(value)
        elif name.startswith("host "):
            call, _, who = name.removeprefix("host ").rpartition(", ")
            results.host.setdefault(call, {})[who] = float(value)
        else:
            results.machine[name] = value
    table = csv.DictReader(lines[1 + len(about) :])
    if tuple(table.fieldnames or ()) != COLUMNS:
        raise ValueError(f"its columns are {table.fieldnames}")
    rows: dict[tuple[str, str], Row] = {}
    for line in table:
        row = _row_of(rows, line)
        _take(row, line)
    results.rows = [row for (beside_of, _), row in rows.items() if not beside_of]
    return results


def _row_of(rows: dict[tuple[str, str], Row], line: dict[str, str]) -> Row:
    """The row of a line, which is made at its first line; one beside another is attached to that."""
    fresh = Row(line["op"], line["size"], line["dtype"], line["unit"], {}, {})
    row = rows.setdefault((line["beside_of"], fresh.name), fresh)
    if row is fresh and line["beside_of"]:
        rows["", line["beside_of"]].beside = row
    return row


def _take(row: Row, line: dict[str, str]) -> None:
    """Put what a line says into its row."""
    who, way = line["who"], line["way"]
    if way == "left out":
        row.wrong[who] = line["note"]
        return
    if line["unit"]:
        row.unit, row.lost, row.compared = line["unit"], line["note"], line["compared"] != "no"
    if line["memory"]:
        row.memory[who] = int(line["memory"])
    if not way:
        return
    figure = Figure(float(line["us"]), float(line["low"]), float(line["high"]), int(line["samples"]))
    row.figures.setdefault(who, {})[way] = figure
    if who == "ours":
        row.work[way] = float(line["bytes"]), float(line["flops"])
        row.want[way] = float(line["want"]) if line["want"] else None
