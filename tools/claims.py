"""The figures in the prose of the README and of the pages, from benchmarks/results: one command after a new run.

    python tools/claims.py           write the figures into the text, and the plots that show them
    python tools/claims.py --check   say what differs; exit code 1 where anything does

A claim is a pattern that finds its sentence, and a function that says what stands in each group of it. A sentence that is
written anew needs its pattern here; tests/test_readme.py and tests/docs compare them all.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import attention_rows
import pictures
import typer

from cupyops.bench import model_table
from cupyops.bench.results import Row, mean
from cupyops.bench.table import read

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
N = r"([\d.,]*\d)"  # a number, without the full stop behind it


class Claim(NamedTuple):
    """A sentence of a page: `found` says what its groups are."""

    page: str
    pattern: str
    found: Callable[[], list[str]]


# --- the README ---


def kernels() -> list[str]:
    """How many cases there are, the mean of their speed-ups, how many are slower."""
    both = [x for x, name in read(RESULTS / "h200.csv").slowest_rows() if not name.startswith("lion")]
    return [str(len(both)), f"{mean(both):.2f}", str(sum(x < 1 / 1.05 for x in both))]


def host() -> list[str]:
    """Microseconds of the host for a small call."""
    times = read(RESULTS / "h200.csv").host
    return [f"{times[call][who]:.1f}" for call in ("no gradient", "gradient") for who in ("ours", "torch")]


def model(name: str, variant: str, card: str = "h100") -> model_table.Figures:
    """What was measured of a model."""
    return next(one for one in _models(card) if (one.model, one.variant) == (name, variant))


def _models(card: str = "h100") -> list[model_table.Figures]:
    return model_table.read(RESULTS / f"{card}_models.csv")[0]


def gain(name: str, variant: str = "swap", card: str = "h100") -> str:
    """How many times as fast as in eager mode."""
    return f"{model(name, 'eager', card).ms / model(name, variant, card).ms:.2f}"


def on_an_h200() -> list[str]:
    """How many models were measured there; the gains of each, by the swap and as a graph, the largest first."""
    names = dict.fromkeys(one.model for one in _models("h200"))

    def said(variant: str) -> str:
        gains = sorted(((gain(name, variant, "h200"), name) for name in names), key=lambda one: -float(one[0]))
        return ", ".join(f"{pictures.MODELS[name].split(',')[0]} {times}" for times, name in gains)

    return [str(len(names)), said("swap"), said("graph")]


def llama() -> list[str]:
    """Its gain and its gibibytes; then the gains of the others, the largest first."""
    swapped = {one.model for one in _models() if one.variant == "swap"} - {"llama"}
    others = sorted((name for name in pictures.MODELS if name in swapped), key=lambda name: -float(gain(name)))
    words = [f"{gain(name)} ({pictures.MODELS[name].split(',')[0]})" for name in others]
    peaks = [f"{model('llama', variant).peak_gib:.1f}" for variant in ("swap", "eager")]
    return [gain("llama"), *peaks, " and ".join([", ".join(words[:-1]), words[-1]]), gain("resnet50", "graph")]


def without_logits() -> list[str]:
    """Milliseconds and gibibytes of Llama, without logits and with them."""
    found = [model("llama", variant, "h200") for variant in ("lean", "graph", "eager", "liger")]
    return [text for one in found for text in (f"{one.ms:.1f}", f"{one.peak_gib:.3g}")]


def resnet() -> list[str]:
    """How much its step varies, and how long it takes as a graph."""
    swap = model("resnet50", "swap")
    return [f"{ms:.0f}" for ms in (swap.low, swap.high, model("resnet50", "graph").ms)]


# --- products ---


def layers(card: str = "h100") -> list[str]:
    """How many layers; beside cuBLAS the mean of those of whole vectors, of the others, and the least."""
    rows = read(RESULTS / f"{card}_linear_layers.csv").rows
    even: list[float] = []
    odd: list[float] = []
    for row in rows:
        sizes = [int(size) for size in row.size.split()[0].split("x")[-3:]]
        whole = all(size % 8 == 0 or size == 1 for size in sizes)
        (even if whole else odd).append(_ratio(row, "eager", "forward"))
    return [str(len(rows) // 3), f"{mean(even):.2f}", f"{mean(odd):.2f}", f"{min(even + odd):.2f}"]


def groups() -> list[str]:
    """How many mixtures; the mean beside PyTorch's forward, backward, and the least of both."""
    rows = read(RESULTS / "h100_grouped_mm.csv").rows
    forward, backward = ([_ratio(row, "eager", way) for row in rows] for way in ("forward", "backward"))
    return [str(len(rows)), *(f"{x:.2f}" for x in (mean(forward), mean(backward), min(forward + backward)))]


def convolutions() -> list[str]:
    """How many layers differ; their mean beside cuDNN's, forward and backward each, and the least."""
    rows = read(RESULTS / "h100_convolutions.csv").rows
    found = [_ratio(row, "eager", way) for row in rows for way in ("forward", "backward") if way in row.figures["ours"]]
    layers = {row.size.rsplit(" ", 1)[0] for row in rows}
    return [str(len(layers)), f"{mean(found):.2f}", f"{min(found):.2f}"]


def bytes_of_rows() -> list[str]:
    """Of products of float8 with scales of rows: the mean beside PyTorch's, how many, and the least."""
    rows = [row for row in read(RESULTS / "h100_scaled_mm.csv").rows if "rows" in row.size]
    found = [_ratio(row, "eager", "forward") for row in rows]
    return [f"{mean(found):.2f}", str(len(found)), f"{min(found):.2f}"]


# --- attention ---


def _attention() -> list[Row]:
    return read(RESULTS / "h100_attention.csv").rows


def _ratio(row: Row, who: str, way: str) -> float:
    return row.figures[who][way].us / row.figures["ours"][way].us


def attention() -> list[str]:
    """How many sizes, and the mean beside cuDNN and PyTorch's flash attention."""
    variants = ("softcap", "alibi", "documents", "dropout", "packed")
    rows = [row for row in _attention() if row.op == "attention" and {"cuDNN", "flash"} <= row.figures.keys()]
    plain = [row for row in rows if not any(one in row.name for one in variants)]
    means = [
        math.exp(sum(math.log(_ratio(row, who, way)) for row in plain) / len(plain))
        for who, way in itertools.product(("cuDNN", "flash"), ("forward", "backward"))
    ]
    return [str(len(plain)), *(f"{x:.2f}" for x in means)]


def widths() -> list[str]:
    """Of attention by width and kind, forward and backward: the means beside PyTorch's; then of those that cuDNN or flash
    attention serve, and the least from 1,024 rows on."""
    lines = attention_rows.read()
    kinds = ("full", "causal", "gqa", "window", "packed")
    each = itertools.product((64, 96, 128, 192, 256), kinds, attention_rows.WAYS)
    found = [attention_rows.mean(lines, width=width, kind=kind, way=way) for width, kind, way in each]
    long = [float(one["ratio"]) for one in lines if one["ratio"] and int(one["rows"]) >= 1024]
    served = [one for one in lines if one["cuDNN"] or one["flash"]]
    found += [attention_rows.mean(served, way=way) for way in attention_rows.WAYS]
    return [*(f"{x:.2f}" for x in found[:50]), str(len(served) // 2), *(f"{x:.2f}" for x in (*found[50:], min(long)))]


def scores() -> list[str]:
    """Of scores and masks of one's own, beside FlexAttention."""
    rows = [
        next(row for row in _attention() if name in row.name) for name in ("alibi", "softcap", "sinks", "documents")
    ]
    return [f"{_ratio(row, 'FlexAttention', way):.2f}" for row in rows for way in ("forward", "backward")]


def _read_at(row: Row, who: str) -> str:
    """Terabytes a second."""
    return f"{row.work['forward'][0] / row.figures[who]['forward'].us * 1e-6:.2f}"


def decode() -> list[str]:
    """Terabytes a second of `decode_attention`, of a copy, of PyTorch for one query and for four."""
    kept = read(RESULTS / "h100_attention.csv")
    one, four = (
        next(row for row in kept.rows if row.name == f"decode_attention 4x{queries}x32/8x128 of 32768 bfloat16")
        for queries in (1, 4)
    )
    copy = f"{kept.ceilings['copy'] * 1e-3:.2f}"
    return [_read_at(one, "ours"), copy, _read_at(one, "eager"), _read_at(four, "eager")]


def decode_in_fp32() -> list[str]:
    """The same of a cache of float32, and of a copy."""
    kept = read(RESULTS / "h200_decode_attention.csv")
    row = next(row for row in kept.rows if row.name == "decode_attention 4x1x32/8x128 of 16384 float32")
    return [_read_at(row, "ours"), f"{kept.ceilings['copy'] * 1e-3:.2f}"]


CLAIMS = (
    Claim(
        "README.md",
        rf"step of Llama runs {N} times as fast as PyTorch's, with {N} GiB where that takes {N}: .*? "
        r"The other models run at (.*?) times PyTorch's speed\. "
        rf"As a \[CUDA graph\]\(docs/graphs.md\), ResNet-50 runs at {N}\.",
        llama,
    ),
    Claim("README.md", rf"Over {N} cases, .*? is {N} times .*? {N} cases are more than 5% slower", kernels),
    Claim(
        "README.md",
        rf"takes the host {N} us where `torch.relu` takes {N}, or {N} instead of {N} with a gradient",
        host,
    ),
    Claim("docs/speed.md", rf"its step varied from {N} to {N} ms after the swap, and takes {N} as a graph", resnet),
    Claim("docs/speed.md", rf"and as a graph it runs at {N}\.", lambda: [gain("unet", "graph")]),
    Claim(
        "docs/speed.md",
        rf"of {N} linear layers .*? runs {N} times as fast as cuBLAS .*? and {N} times .*? slowest of them {N} times",
        layers,
    ),
    Claim(
        "docs/speed.md",
        rf"On an H200 these are {N} and {N} times, and the slowest {N} times",
        lambda: layers("h200")[1:],
    ),
    Claim(
        "docs/speed.md",
        rf"Llama's graph takes {N} ms and {N} GiB, .*? takes {N} and {N}, eager PyTorch {N} and {N}, .*? {N} and {N}\.",
        without_logits,
    ),
    Claim("docs/speed.md", r"On an H200, of (\d+) models, .*? swap: (.*?); as graphs: (.*?)\. ", on_an_h200),
    Claim(
        "docs/speed.md",
        rf"`grouped_mm` over {N} mixtures .*? runs {N} times as fast forward and {N} times backward .*? of them {N} times\.",
        groups,
    ),
    Claim(
        "docs/speed.md",
        rf"scales of rows runs {N} times as fast over {N} cases, the slowest of them {N} times\.",
        bytes_of_rows,
    ),
    Claim(
        "docs/speed.md",
        rf"of ResNet-50 \({N} that differ, .*? run {N} times as fast as cuDNN's .*? slowest of them {N} times\.",
        convolutions,
    ),
    Claim(
        "docs/attention.md",
        rf"over {N} sizes of .*? forward takes {N} times .*? and backward {N}; beside .*? have {N} and {N}\.",
        attention,
    ),
    Claim(
        "docs/attention.md",
        "".join(
            rf"\| {name} " + rf"\| {N}, {N} " * 5 + r"\| " for name in ("64", "96", "128", "192, of values 128", "256")
        )
        + rf".*? Over the {N} that cuDNN or flash attention serve, forward .*? {N} times .*? {N} times; .*? under {N}\.",
        widths,
    ),
    Claim(
        "docs/attention.md",
        rf"slopes run {N} and {N} .*? soft cap {N} and {N} .*? sinks {N} and {N} .*? documents runs {N} and {N}",
        scores,
    ),
    Claim(
        "docs/attention.md",
        rf"at {N} TB/s, of the {N} .*? cache at {N} for one query, and at {N} for four",
        decode,
    ),
    Claim("docs/attention.md", rf"float32 is read at {N} TB/s, of the {N} that a copy has there", decode_in_fp32),
)


def match(claim: Claim, text: str) -> re.Match[str]:
    """The claim's sentence in a page, whose lines may break anywhere. Raises ValueError where it is not there."""
    found = re.search(claim.pattern.replace(" ", r"\s+"), text, re.DOTALL)
    if found is None:
        raise ValueError(f"{claim.page} has no sentence such as: {claim.pattern}")
    return found


def said(claim: Claim, text: str) -> list[str]:
    """What the page says."""
    return [" ".join(group.split()) for group in match(claim, text).groups()]


def corrected(claim: Claim, text: str) -> str:
    """The page with the figures that were measured."""
    found = match(claim, text)
    for index, right in reversed(list(enumerate(claim.found(), 1))):
        if " ".join(found[index].split()) != right:
            text = text[: found.start(index)] + right + text[found.end(index) :]
    return text


def differences() -> Iterator[tuple[str, str, str]]:
    """(page, what it says, what was measured)."""
    for claim in CLAIMS:
        says, right = said(claim, (ROOT / claim.page).read_text(encoding="utf-8")), claim.found()
        yield from ((claim.page, old, new) for old, new in zip(says, right, strict=True) if old != new)
    for name, text in pictures.plots().items():
        if text != (pictures.ASSETS / name).read_text(encoding="utf-8"):
            yield f"docs/assets/{name}", "other figures", "those of its file"


def main(
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit code 1 where something differs.")] = False,
) -> None:
    """Write the figures of benchmarks/results into the README, the pages and the plots."""
    found = list(differences())
    for page, old, new in found:
        print(f"{page}: {old} -> {new}")
    print(f"{len(found)} figures differ" if found else "All figures are those measured.")
    if check:
        sys.exit(bool(found))
    for claim in CLAIMS:
        path = ROOT / claim.page
        path.write_text(corrected(claim, path.read_text(encoding="utf-8")), encoding="utf-8")
    pictures.write_plots()


if __name__ == "__main__":
    typer.run(main)
