"""`python -m cupyops doctor`: what is here, what is missing, and the command that mends it."""

from __future__ import annotations

import json
from dataclasses import asdict

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import doctor
from ..doctor.finding import ABSENT, FAULT, OK, WARNING, Finding
from . import narrow

_STYLES = {OK: "green", WARNING: "yellow", FAULT: "bold red", ABSENT: "dim"}
_NARROW = 70  # columns under which a table would have no room for what was found


def run(as_json: bool) -> int:
    """The command; returns its exit code: 0, or 1 where there is a fault."""
    with Console(stderr=True).status("examining"):
        findings = doctor.examine(doctor.look())
    failed = any(finding.verdict == FAULT for finding in findings)
    if as_json:
        print(json.dumps({"passed": not failed, "findings": [asdict(one) for one in findings]}, indent=1))
    else:
        show(Console(), findings)
    return int(failed)


def show(console: Console, findings: list[Finding]) -> None:
    """A table with a row for each finding; below it, what mends those that are not well."""
    narrow.show(console, _table(findings), _NARROW)
    for verdict in (FAULT, WARNING, ABSENT):
        for finding in findings:
            if finding.verdict == verdict and finding.remedy:
                console.print(Text(f"\n{finding.name}: {finding.found}", _STYLES[verdict]), soft_wrap=True)
                console.print(Text(f"  {finding.remedy}"), soft_wrap=True)
    console.print(_summary(findings))


def _table(findings: list[Finding]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("examined", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("found", overflow="fold")
    for finding in findings:
        style = _STYLES[finding.verdict]
        table.add_row(Text(finding.name), Text(finding.verdict, style), Text(finding.found.partition("\n")[0]))
    return table


def _summary(findings: list[Finding]) -> Text:
    counts = {verdict: sum(finding.verdict == verdict for finding in findings) for verdict in _STYLES}
    worst = next((verdict for verdict in (FAULT, WARNING) if counts[verdict]), OK)
    numbers = ", ".join(f"{count} {verdict}" for verdict, count in counts.items() if count)
    return Text(f"\n{numbers}", _STYLES[worst])
