"""docs/conformance.md: how many of PyTorch's own samples pass, by operator, module or optimizer, suite and backend.

    make conformance                on any machine: writes tests/conformance.csv and, from it, the page
    make test-gpu                   on a machine with a GPU: writes tests/conformance_gpu.csv
    python tools/conformance.py     the page again, from what is written

The figures are of a run of tests/opdb. The page is made of the two files alone, so it changes only when they do.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "tests" / "conformance.csv"
GPU_FIGURES = ROOT / "tests" / "conformance_gpu.csv"
PAGE = ROOT / "docs" / "conformance.md"

BACKENDS = ("reference", "simulator", "gpu")
SUITES = {
    "sample inputs": "the samples that PyTorch runs its own tests on: results and strides",
    "reference inputs": "further ones, for elementwise functions: many shapes and layouts, up to a million elements",
    "gradients": "of both, the gradient of every input",
    "non-contiguous": "of both, with every tensor non-contiguous: results, strides and gradients",
    "other dtypes": "both in a dtype that PyTorch does not claim to support: an error, or what PyTorch gives",
    "error inputs": "what PyTorch refuses is refused",
    "gradcheck": "gradients against finite differences",
    "gradgradcheck": "gradients of gradients against finite differences",
    "forward AD": "forward mode, and forward mode over backward, against finite differences",
    "batched gradients": "`is_grads_batched=True`: a vmap over backward and over backward of backward",
    "vmap": "`torch.vmap` over all tensors of a sample, against PyTorch on each slice",
}
MODULE_SUITES = {
    "modules": "the samples, in training and in evaluation: results, strides, every gradient, and the buffers afterwards",
    "module layouts": "the same with every tensor non-contiguous",
    "module states": "state dicts go both ways; what is copied or pickled gives the same bits",
    "module errors": "what PyTorch refuses, when made or called, is refused",
    "module gradcheck": "gradients of arguments and parameters against finite differences",
    "module gradgradcheck": "gradients of those gradients against finite differences",
}
OPTIMIZER_SUITES = {
    "steps": "four steps with two groups, by each implementation that PyTorch lets ask for: parameters and state",
    "optimizer states": "PyTorch's state dict goes on here, and ours in PyTorch",
    "optimizer errors": "what PyTorch refuses, when made or in a step, is refused",
}
DATABASES = {  # the beginning of the names of its rows, what its rows are of, its suites
    "op_db": ("", "operator", SUITES),
    "module_db": ("nn.", "module", MODULE_SUITES),
    "optim_db": ("optim.", "optimizer", OPTIMIZER_SUITES),
}

_HEAD = """\
# Conformance

PyTorch tests its functions, modules and optimizers on databases of its own, `op_db`, `module_db` and `optim_db`: for each,
calls that must work and calls that must fail. `tests/opdb` runs our operators, `cupyops.nn` and `cupyops.optim` on them, and
compares with PyTorch's in the same dtype, within the tolerances of `torch.testing.assert_close`, or, where sums cancel, with
at most twice the error against float64 that PyTorch's have.

This page is written by `make conformance`. A cell says how many samples passed, of how many there are; in brackets, how many
did not count, with a letter for the reason."""

_BACKENDS = {
    "reference": "The operators on CPU tensors: PyTorch's own functions behind our checks and our autograd. No kernel runs.",
    "simulator": "The kernels on CPU tensors, with all checks on: bounds, races, uninitialised memory, barriers.",
    "gpu": "The kernels on a GPU.",
}


COLUMNS = ("backend", "function", "suite", "outcome", "count", "why")
_EVERY = ("failures", "without_entry", "backends")  # what of a run is not a word on its first lines


def keep(path: Path, run: dict[str, Any]) -> None:
    """A run as CSV: on what it was, in lines that begin with `#`; then a line for each count."""
    about = {name: value for name, value in run.items() if name not in _EVERY}
    about |= {f"about {name}": backend["about"] for name, backend in run["backends"].items()}
    about |= {f"without entry {name}": why for name, why in run["without_entry"].items()}
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.writelines(f"# {name}: {'none' if value is None else value}\n" for name, value in about.items())
        file.writelines(f"# failed: {name}\n" for name in run["failures"])
        table = csv.writer(file, lineterminator="\n")
        table.writerow(COLUMNS)
        for name, backend in run["backends"].items():
            for function, row in backend["rows"].items():
                table.writerows((name, function, *line) for line in _lines(row))


def _lines(row: dict[str, Any]) -> Iterator[tuple[Any, ...]]:
    """(suite, outcome, count, why) of one function."""
    yield "", "calls", row["calls"], ""
    yield "", "launching", row["launching"], ""
    yield from (("", "operator", 1, name) for name in row["operators"])
    for suite, counts in row["suites"].items():
        yield suite, "passed", counts["passed"], ""
        if counts["failed"]:
            yield suite, "failed", counts["failed"], ""
        for outcome in ("differs", "left_out"):
            yield from ((suite, outcome, count, why) for why, count in counts[outcome].items())


def read(path: Path) -> dict[str, Any] | None:
    """The figures of a run, None where there are none."""
    if not path.exists():
        return None
    run: dict[str, Any] = {"failures": [], "without_entry": {}, "backends": {}}
    lines = path.read_text(encoding="utf-8").splitlines()
    for name, _, value in (line[2:].partition(": ") for line in lines if line.startswith("# ")):
        if name == "failed":
            run["failures"].append(value)
        elif name.startswith("about "):
            run["backends"][name.removeprefix("about ")] = {"about": value, "rows": {}}
        elif name.startswith("without entry "):
            run["without_entry"][name.removeprefix("without entry ")] = value
        else:
            run[name] = None if value == "none" else value
    for line in csv.DictReader(line for line in lines if not line.startswith("# ")):
        rows = run["backends"][line["backend"]]["rows"]
        _count(rows.setdefault(line["function"], {"operators": [], "suites": {}}), line)
    return run


def _count(row: dict[str, Any], line: dict[str, str]) -> None:
    """Put one line of a file into the row of its function."""
    outcome, count = line["outcome"], int(line["count"])
    if not line["suite"]:
        if outcome == "operator":
            row["operators"].append(line["why"])
        else:
            row[outcome] = count
        return
    suite = row["suites"].setdefault(line["suite"], {"passed": 0, "failed": 0, "differs": {}, "left_out": {}})
    if outcome in ("passed", "failed"):
        suite[outcome] = count
    else:
        suite[outcome][line["why"]] = count


def page(figures: dict[str, Any], gpu: dict[str, Any] | None) -> str:
    """The page."""
    parts = [_HEAD, *_suites()]
    for name in BACKENDS:
        run = gpu if name == "gpu" else figures
        parts += [f"## {'GPU' if name == 'gpu' else name.capitalize()}", _BACKENDS[name]]
        if run is None or name not in run["backends"]:
            parts.append("No figures yet: `make test-gpu` on a machine with a GPU writes them.")
            continue
        backend = run["backends"][name]
        parts.append(f"{backend['about']} {_of(run, figures)}")
        for database, (_, kind, suites) in DATABASES.items():
            if rows := rows_of(backend["rows"], database):
                parts += [f"### {database}", *_table(rows, kind, suites)]
    parts += ["## What differs", "\n".join(f"- {line}" for line in _differences(figures, gpu))]
    return "\n\n".join(parts) + "\n"


def rows_of(rows: dict[str, Any], database: str) -> dict[str, Any]:
    """Those of one database."""
    begins = {name: begin for name, (begin, *_) in DATABASES.items() if begin}
    found = {row: next((name for name, begin in begins.items() if row.startswith(begin)), "op_db") for row in rows}
    return {name: row for name, row in rows.items() if found[name] == database}


def _suites() -> list[str]:
    lines = ["| database | suite | what is tried |", "|---|---|---|"]
    for name, (*_, suites) in DATABASES.items():
        lines += [f"| {name} | {suite} | {what} |" for suite, what in suites.items()]
    return ["\n".join(lines)]


def _of(run: dict[str, Any], figures: dict[str, Any]) -> str:
    """When, where and of what code."""
    where = f", {run['gpu']}" if run["gpu"] else ""
    said = f"Run on {run['date'][:10]}: PyTorch {run['torch']}, NVRTC {run['nvrtc']}{where}."
    if run["sha256"] != figures["sha256"]:
        said += " The code was another then than that of the tables above."
    if run["failures"]:
        said += f" **Failed tests: {len(run['failures'])}.**"
    return said


def _table(rows: dict[str, Any], kind: str, known: dict[str, str]) -> list[str]:
    suites = [name for name in known if any(name in row["suites"] for row in rows.values())]
    launching = any(row["launching"] for row in rows.values())
    letters = {reason: chr(ord("a") + i) for i, reason in enumerate(sorted({r for r, _ in _reasons(rows)}))}
    head = [kind, *suites, *(["by kernels"] if launching else [])]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for name, row in rows.items():
        cells = [_cell(row["suites"].get(suite), letters) for suite in suites]
        cells += [f"{row['launching']} / {row['calls']}"] if launching else []
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    notes = [f"- {letter}: {reason}" for reason, letter in letters.items()]
    if launching:
        notes.append(
            "- by kernels: how many of the samples compared launched one; the others have no elements or are of mixed dtypes"
        )
    return ["\n".join(lines), *(["\n".join(notes)] if notes else [])]


def _cell(suite: dict[str, Any] | None, letters: dict[str, str]) -> str:
    """`passed / of`, what did not count with the letters of the reasons, and what failed."""
    if suite is None:
        return ""
    others = suite["differs"] | suite["left_out"]
    text = f"{suite['passed']} / {suite['passed'] + suite['failed'] + sum(others.values())}"
    if others:
        text += f" ({', '.join(f'{others[r]} {letters[r]}' for r in sorted(others, key=letters.__getitem__))})"
    return f"{text} **{suite['failed']} failed**" if suite["failed"] else text


def _reasons(rows: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """(reason, "differs" or "left_out") of all that did not count."""
    for row in rows.values():
        for suite in row["suites"].values():
            for kind in ("differs", "left_out"):
                yield from ((reason, kind) for reason in suite[kind])


def _differences(figures: dict[str, Any], gpu: dict[str, Any] | None) -> list[str]:
    """What PyTorch does and we do not, and what the database does not know."""
    found: dict[str, set[str]] = {}
    for run in (figures, gpu):
        for backend, of in (run["backends"] if run else {}).items():
            for name, row in of["rows"].items():
                for reason, kind in _reasons({name: row}):
                    if kind == "differs":
                        found.setdefault(reason, set()).add(f"`{name}` ({backend})")
    lines = [f"{reason}: {', '.join(sorted(names))}." for reason, names in sorted(found.items())]
    lines.append("`out=`: no function here has it. The database's samples do not use it.")
    lines += [f"`{name}` has no entry in a database: {why}." for name, why in figures["without_entry"].items()]
    return lines


def main() -> int:
    """Write the page."""
    figures = read(FIGURES)
    if figures is None:
        print(f"there is no {FIGURES.relative_to(ROOT)}; run `make conformance`")
        return 1
    PAGE.write_text(page(figures, read(GPU_FIGURES)), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
