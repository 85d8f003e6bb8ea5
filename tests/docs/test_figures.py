"""The figures in the text of pages are those measured."""

import math
import re
from pathlib import Path

from cupyops.bench.table import read

ROOT = Path(__file__).resolve().parents[2]


KINDS = ("softcap", "alibi", "documents", "dropout", "packed")


def page(name):
    return " ".join((ROOT / "docs" / name).read_text(encoding="utf-8").split())


def ratios(rows, who, way):
    return [row.figures[who][way].us / row.figures["ours"][way].us for row in rows]


def mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


def test_attention():
    text, rows = page("attention.md"), read(ROOT / "benchmarks" / "results" / "h100_attention.csv").rows
    variants = {name: [row for row in rows if name in row.name] for name in KINDS}
    plain = [row for row in rows if row.op == "attention" and not any(row in of for of in variants.values())]
    found = [f"{mean(ratios(plain, who, way)):.2f}" for who in ("cuDNN", "flash") for way in ("forward", "backward")]
    said = re.search(
        r"over (\d+) sizes of .*? forward takes ([\d.]+) times .*? and backward ([\d.]+); "
        r"beside .*? have ([\d.]+) and ([\d.]+)\.",
        text,
    )
    assert list(said.groups()) == [str(len(plain)), *found]
    pairs = re.search(
        r"slopes run ([\d.]+) and ([\d.]+) .*? soft cap ([\d.]+) and ([\d.]+) times.*? "
        r"documents runs ([\d.]+) and ([\d.]+)",
        text,
    )
    names, ways = ("alibi", "softcap", "documents"), ("forward", "backward")
    assert list(pairs.groups()) == [
        f"{ratios(variants[name], 'FlexAttention', way)[0]:.2f}" for name in names for way in ways
    ]


def test_decode_attention():
    text, rows = page("attention.md"), read(ROOT / "benchmarks" / "results" / "h100_attention.csv").rows
    one, four = (
        next(row for row in rows if row.name == f"decode_attention 4x{queries}x32/8x128 of 32768 bfloat16")
        for queries in (1, 4)
    )
    rate = {
        (queries, who): row.work["forward"][0] / row.figures[who]["forward"].us * 1e-6
        for queries, row in ((1, one), (4, four))
        for who in ("ours", "eager")
    }
    said = re.search(
        r"at ([\d.]+) TB/s, of the ([\d.]+) .*? cache at ([\d.]+) for one query, and at ([\d.]+) for four", text
    )
    assert list(said.groups()) == [
        f"{rate[1, 'ours']:.2f}", "3.01", f"{rate[1, 'eager']:.2f}", f"{rate[4, 'eager']:.2f}",
    ]  # fmt: skip
