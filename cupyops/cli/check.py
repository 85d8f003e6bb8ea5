"""`python -m cupyops check`: the contract of an operator, from the shell."""

from __future__ import annotations

import gc
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .._kernel.kernel import kernels
from .._util.garbage import collected_later
from ..errors import CupyopsError, InputError
from ..testing import Interrupted, Report, check, hazards
from ..testing.hazard import family_of
from ..testing.report import FAIL, NOT_APPLICABLE, PASS
from ..testing.target import operator_of, target
from . import narrow, outputs, sample, words
from .group import INTERRUPTED

_LEAST = 24  # columns that a reason gets, however narrow the table
_NARROW = 72  # columns under which its rows are a list
_STYLES = {FAIL: "bold red", PASS: "green", NOT_APPLICABLE: "dim"}


@dataclass(frozen=True)
class Request:
    """The command line."""

    operator: str
    args: Sequence[str] = ()
    reference: str | None = None
    only: Sequence[str] = ()
    skip: Sequence[str] = ()
    backends: Sequence[str] = ()
    keep: Sequence[str] = ()
    memory: float = 2.0  # GiB
    seed: int = 0
    shrink: bool = True
    verbose: bool = False
    json: Path | None = None
    junit: Path | None = None


@collected_later()
def run(request: Request) -> int:
    """The command; returns its exit code, of those that docs/testing.md lists."""
    gc.unfreeze()  # what the command line has frozen: `check` counts as old what it imports, where nothing is frozen
    try:
        outputs.files({"--json": request.json, "--junit": request.junit}, _read(request))
        try:
            report = _report(request)
        except Interrupted as interrupted:
            report = interrupted.report
        try:  # before anything is printed: a pipe may close early, as that of `| head`
            if request.json is not None:
                report.to_json(request.json)
            if request.junit is not None:
                report.to_junit(request.junit)
        finally:
            show(Console(), report, every=request.verbose or bool(request.only))
    except (CupyopsError, OSError) as error:
        words.complain(error)
        return 2
    return INTERRUPTED if report.interrupted else 0 if report.passed else 1


def _read(request: Request) -> Iterator[Path]:
    """The files of the modules that are imported for the check, and of their kernels."""
    for named in (request.operator, request.reference):
        if named is not None:
            sample.load(named)
    for module in list(sys.modules.values()):
        if isinstance(file := getattr(module, "__file__", None), str):
            yield Path(file)
    for one in kernels():
        if not one.is_text:
            with suppress(CupyopsError):  # of a file that is not there
                yield from one.source.stamps


def _report(request: Request) -> Report:
    function = sample.load(request.operator)
    reference = None if request.reference is None else sample.load(request.reference)
    if reference is None and operator_of(function) is None:
        raise InputError(
            f"{request.operator!r} is no operator of cupyops: give --reference MODULE:NAME, the same in plain PyTorch"
        )
    call = sample.call(target(function, reference), request.args, request.seed)
    return check(
        function,
        call.args,
        call.kwargs,
        reference=reference,
        only=request.only or None,
        skip=request.skip or None,
        backends=request.backends or None,
        seed=request.seed,
        shrink=request.shrink,
        keep=[int(one) if one.isdecimal() else one for one in request.keep],
        memory=int(request.memory * 2**30),
    )


def show(console: Console, report: Report, every: bool) -> None:
    """The report as a table, of every row or counted by family, and below it whatever failed."""
    console.print(Text(f"{report.name}({report.call})  seed {report.seed}", "bold"), soft_wrap=True)
    if every:
        narrow.show(console, _rows(report), _NARROW)
    else:
        narrow.show(console, _families(report), _NARROW)
        console.print("--verbose lists each hazard, and why it is n/a", style="dim")
    for row in report.failures:
        console.rule(f"{row.hazard} ({row.backend})", style="red", align="left")
        found = {
            "expected": row.expectation,
            "found": row.reason,
            "smallest": row.smallest,
            "reproduce": row.reproduction,
        }
        for head, text in found.items():
            if text:
                console.print(Text(f"{head + ':':<11}{text}"), soft_wrap=True)
    console.print(report.summary(), style="green" if report.passed else "red")


def _rows(report: Report) -> Table:
    table = Table(box=None)
    for head in ("hazard", "backend", "verdict", "s"):
        table.add_column(head, justify="right" if head == "s" else "left", no_wrap=True)
    table.add_column("reason", min_width=_LEAST)
    for row in report.folded():
        style = _STYLES[row.verdict]
        reason = Text(row.reason.partition("\n")[0], style)
        table.add_row(row.hazard, row.backend, Text(row.verdict, style), f"{row.seconds:.2f}", reason)
    return table


def _families(report: Report) -> Table:
    """Table of verdicts: hazards of each family, on each backend."""
    known = hazards()
    counts: defaultdict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    for row in report.rows:
        counts[family_of(known[row.hazard]), row.backend][row.verdict] += 1
    table = Table(box=None, pad_edge=False)
    backends = dict.fromkeys(row.backend for row in report.rows)
    for head in ("hazards", *backends):
        table.add_column(head, no_wrap=True)
    for family in dict.fromkeys(family for family, _ in counts):
        table.add_row(family, *(_verdict_counts(counts[family, backend]) for backend in backends))
    return table


def _verdict_counts(verdicts: Counter[str]) -> Text:
    parts = [Text(f"{verdicts[verdict]} {verdict}", style) for verdict, style in _STYLES.items() if verdicts[verdict]]
    return Text(", ").join(parts)
