"""A page of the site for each operator: what it computes, its equations, forms, figures and conformance; none by hand."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import conformance
import pictures

import cupyops
from cupyops._dispatch.core.forms import families
from cupyops._warmup.reachable import kernels_of
from cupyops.bench.table import read

ROOT = Path(__file__).resolve().parent.parent
CUDA = ROOT / "cuda_src"
RESULTS = ROOT / "benchmarks" / "results" / "h200.csv"
SECOND = {
    "formula": "It has a formula of its own, so fewer tensors stay alive.",
    "reference": "PyTorch differentiates the reference twice.",
    "both": "A formula or the differentiated reference, depending on the arguments.",
}


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """A table of Markdown."""
    head = list(head)
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *rows))


def kernels(name: str) -> list[Any]:
    """The kernels of the operators that a function is made of."""
    own = [op for op in cupyops.operators().values() if op.reference.__module__ == f"cupyops.ops._{name}"]
    return sorted({kernel for op in own for kernel in kernels_of(op)}, key=lambda kernel: str(kernel.base))


def equations(name: str) -> Iterator[tuple[str, str]]:
    """(file, the equations in its head) of each `.cu` file that the kernels are of."""
    for file in sorted({str(kernel).partition("(")[2].partition(":")[0] for kernel in kernels(name)}):
        path = CUDA / file
        if file.endswith(".cu") and path.is_file():
            lines = itertools.takewhile(
                lambda line: line.startswith("//"), path.read_text(encoding="utf-8").splitlines()
            )
            head = "\n".join(line.removeprefix("//").removeprefix(" ").rstrip() for line in lines)
            paragraphs = head.split("\n\n")[:3]
            while paragraphs and not _is_equation(paragraphs[-1]):
                paragraphs.pop()
            if paragraphs:
                yield file, "\n\n".join(paragraphs)


def _is_equation(paragraph: str) -> bool:
    """True for a paragraph that has equations and no figures."""
    return " = " in paragraph and not re.match(r"Bytes|Reached|What is lost", paragraph)


def forms(name: str) -> Iterator[tuple[str, str]]:
    """(direction, the table of the forms that the operator's kernels have in it), forward first."""
    mine = {id(kernel) for kernel in kernels(name)}
    tables: dict[str, list[tuple[str, str, str]]] = {}
    for family in families():
        for form in family.list:
            used = [kernel for kernel in form.kernels() if kernel is not None and id(kernel) in mine]
            if used:
                names = ", ".join(breakable(kernel.base) for kernel in used)
                summary = form.summary.replace("|", "\\|")
                tables.setdefault(family.direction, []).append((breakable(form.name), summary, names))
    for direction, lines in sorted(tables.items(), key=lambda item: item[0] != "forward"):
        yield direction, table(("form", "who computes what", "kernels"), lines)


def breakable(name: str) -> str:
    """A name as code that a narrow column breaks behind an underscore, and nowhere else."""
    return f"<code>{name.replace('_', '_<wbr>')}</code>"


def plot(name: str) -> str:
    """Bars of the operator's cases beside PyTorch's and its compiler's; nothing where nothing is measured."""
    bars = []
    for row in read(RESULTS).rows:
        us = {who: sum(figure.us for figure in ways.values()) for who, ways in row.figures.items()}
        if row.op.split()[0] == name and us.get("ours") and us.get("eager"):
            label = f"{row.name.removeprefix(name).strip()}"
            peers = [("ours", "ours"), ("compile", "other")]
            found = [
                pictures.Bar(kind, us["eager"] / us[who], f"{us['eager'] / us[who]:.2f}")
                for who, kind in peers
                if us.get(who)
            ]
            bars.append((label, found))
    note = "NVIDIA H200, PyTorch 2.11; forward and backward; cold caches; h200.csv"
    legend = {"ours": "cupyops", "other": "torch.compile"}
    return pictures.plot(f"{name}: speed, forward and backward", note, bars, legend) if bars else ""


def tested(name: str) -> str:
    """A table of the samples of PyTorch that the function passes, by backend; nothing where there are none."""
    runs = [conformance.read(conformance.FIGURES), conformance.read(conformance.GPU_FIGURES)]
    backends = {backend: said["rows"] for run in runs if run for backend, said in run["backends"].items()}
    found = {backend: rows[name]["suites"] for backend, rows in backends.items() if name in rows}
    if not found:
        return ""
    suites = [suite for suite in conformance.SUITES if any(suite in of for of in found.values())]
    return table(("samples", *found), ((suite, *(_cell(of.get(suite)) for of in found.values())) for suite in suites))


def _cell(suite: dict[str, Any] | None) -> str:
    """`passed / of`; what is left out of a suite is told by the page on conformance."""
    if suite is None:
        return ""
    others = sum((suite["differs"] | suite["left_out"]).values())
    return f"{suite['passed']} / {suite['passed'] + suite['failed'] + others}"


def page(row: Any) -> Iterator[str]:
    """The parts of a page, from the row of the table of operators."""
    name = row.function.strip("`")
    yield f"# {name}"
    yield f"::: cupyops.{name}"
    yield "## At a glance"
    facts = [
        ("as in PyTorch", row.twin or "PyTorch has no function of this kind"),
        ("kernels for", row.dtypes + "; other dtypes use PyTorch's code" if row.dtypes else "none of its own"),
        ("second derivative", SECOND[row.second]),
        ("module", row.module or "none"),
    ]
    yield table(("", ""), facts)
    for k, (file, text) in enumerate(equations(name)):
        yield ("## Equations\n\n" if k == 0 else "") + f"From `cuda_src/{file}`:\n\n```{{ .equations }}\n{text}\n```"
    if tables := list(forms(name)):
        yield "## Forms\n\nThe first form that fits a call is used. " + (
            f"`python -m cupyops explain {name}` shows which one, and why not the others."
        )
        for direction, lines in tables:
            yield f"{direction.capitalize()}:"
            yield lines
    elif names := [f"`{kernel.base}`" for kernel in kernels(name)]:
        yield f"## Kernels\n\nOne form for every call: {', '.join(names)}."
    if plot(name):
        yield f"## Speed\n\n![Speed of {name}](../assets/op_{name}.svg)\n\n[How it is measured](../speed.md#compare)."
    if samples := tested(name):
        yield (
            "## Conformance\n\nPyTorch's own samples that pass, of those there are. A sample that is not counted has a "
            + ("reason, which the [page on conformance](../conformance.md) gives.")
        )
        yield samples
    yield f"Source: `cupyops/ops/_{name}.py`"


def write(rows: list[Any], folder: Path) -> None:
    """All pages and their plots."""
    (folder / "operators").mkdir(parents=True, exist_ok=True)
    for row in rows:
        name = row.function.strip("`")
        (folder / "operators" / f"{name}.md").write_text("\n\n".join(page(row)) + "\n", encoding="utf-8")
        if text := plot(name):
            (folder / "assets" / f"op_{name}.svg").write_text(text, encoding="utf-8")
