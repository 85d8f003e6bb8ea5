"""`python -m cupyops check`: the contract of an operator, from the shell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import CupyopsError
from ..testing import Report, check
from ..testing.report import FAIL, NOT_APPLICABLE, PASS
from ..testing.subject import subject
from . import sample

_LEAST = 24  # columns that a reason gets, however narrow the terminal
_STYLES = {PASS: "green", FAIL: "bold red", NOT_APPLICABLE: "dim"}


@dataclass(frozen=True)
class Request:
    """The command line."""

    operator: str
    args: Sequence[str] = ()
    reference: str | None = None
    only: Sequence[str] = ()
    skip: Sequence[str] = ()
    backends: Sequence[str] = ()
    seed: int = 0
    shrink: bool = True
    json: Path | None = None
    junit: Path | None = None


def run(request: Request) -> int:
    """The command; returns its exit code: 0, 1 where a hazard fails or none could be tried, 2 for bad arguments."""
    try:
        report = _report(request)
        show(Console(), report)
        if request.json is not None:
            report.to_json(request.json)
        if request.junit is not None:
            report.to_junit(request.junit)
    except (CupyopsError, OSError) as error:
        Console(stderr=True).print(str(error), markup=False, highlight=False, soft_wrap=True, style="red")
        return 2
    return 0 if report.passed else 1


def _report(request: Request) -> Report:
    function = sample.load(request.operator)
    reference = None if request.reference is None else sample.load(request.reference)
    call = sample.call(subject(function, reference), request.args, request.seed)
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
    )


def show(console: Console, report: Report) -> None:
    """The report as a table, and below it whatever failed."""
    console.print(Text(f"{report.name}({report.call})  seed {report.seed}", "bold"), soft_wrap=True)
    table = Table(box=None)
    for head in ("hazard", "backend", "verdict", "s"):
        table.add_column(head, justify="right" if head == "s" else "left", no_wrap=True)
    table.add_column("reason", min_width=_LEAST)
    for row in report.rows:
        style = _STYLES[row.verdict]
        reason = row.reason if row.verdict == NOT_APPLICABLE else row.reason.partition("\n")[0]
        table.add_row(row.hazard, row.backend, Text(row.verdict, style), f"{row.seconds:.2f}", Text(reason, style))
    console.print(table)
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
