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
from .words import complain

_STYLES = {OK: "green", WARNING: "yellow", FAULT: "bold red", ABSENT: "dim"}
_NARROW = 70  # columns under which a table would have no room for what was found


def run(as_json: bool, fix: bool = False, yes: bool = False) -> int:
    """The command; returns its exit code: 0, or 1 where there is a fault, or 2 for bad arguments."""
    if as_json and fix or yes and not fix:
        complain(
            "--yes goes with --fix"
            if yes and not fix
            else "--json prints findings and --fix asks: expected one of them"
        )
        return 2
    findings = _examined()
    if as_json:
        print(json.dumps({"passed": not _faults(findings), "findings": [asdict(one) for one in findings]}, indent=1))
        return _faults(findings)
    console = Console()
    show(console, findings)
    if fix and _mended(console, findings, yes):
        findings = _examined()
        show(console, findings)
    return _faults(findings)


def _examined() -> list[Finding]:
    with Console(stderr=True).status("examining"):
        return doctor.examine(doctor.look())


def _faults(findings: list[Finding]) -> int:
    return int(any(finding.verdict == FAULT for finding in findings))


def _mended(console: Console, findings: list[Finding], yes: bool) -> bool:
    """Show what mends them, ask, and run it; returns whether anything was run."""
    here, left = doctor.mend.remedies(findings)
    for title, commands in (("for you to run, since this program cannot", left), ("to run now", here)):
        if commands:
            console.print(f"\n{title}:")
            for command in commands:
                console.print(Text(f"  {command}"), soft_wrap=True)
    if not here:
        console.print("\nthere is nothing that --fix can run")
        return False
    if not yes and not _agreed():
        console.print("nothing was run")
        return False
    for command in here:
        console.print(Text(f"\n$ {command}", "bold"), soft_wrap=True)
        if status := doctor.mend.run(command):
            console.print(Text(f"it failed, with exit status {status}; what comes after it is not run", "red"))
            break
    return True


def _agreed() -> bool:
    """True if the answer is yes; where nobody can be asked, it is no."""
    try:
        return input("\nrun them? [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:
        print()
        return False


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
