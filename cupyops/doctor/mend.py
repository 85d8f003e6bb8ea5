"""The remedies that can be run from here: which they are, and to run them."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterable

from .finding import FAULT, WARNING, Finding

# What a first word stands for. `export` and `unset` are a shell's own, drivers and containers the administrator's, and to
# compile every kernel ahead takes so long that a person should choose to.
_PROGRAMS = {"pip": [sys.executable, "-m", "pip"], "chmod": ["chmod"]}


def remedies(findings: Iterable[Finding]) -> tuple[list[str], list[str]]:
    """(what `run` can run, what is left to do by hand): the remedies of faults, then of warnings, each once."""
    findings = list(findings)
    wanted = [found.remedy for verdict in (FAULT, WARNING) for found in findings if found.verdict == verdict]
    wanted = list(dict.fromkeys(remedy for remedy in wanted if remedy))
    here = [remedy for remedy in wanted if commands(remedy)]
    return here, [remedy for remedy in wanted if remedy not in here]


def commands(remedy: str) -> list[list[str]]:
    """The programs that a remedy runs, one after another; none where a part of it is not to be run from here."""
    if "$" in remedy or "FOLDER" in remedy:  # a shell is to put something in, or a person
        return []
    parts = remedy.split("&&")
    if not all(part.partition(" ")[0] in _PROGRAMS for part in map(str.strip, parts)):
        return []
    return [[*_PROGRAMS[program], *words] for program, *words in map(shlex.split, parts)]


def run(remedy: str) -> int:
    """Run it, its output where ours goes; returns the exit status of the first part that fails, or 0."""
    for command in commands(remedy):
        try:
            status = subprocess.run(command, check=False).returncode
        except OSError as error:
            print(f"{command[0]}: {error.strerror}", file=sys.stderr)
            return 127
        if status:
            return status
    return 0
