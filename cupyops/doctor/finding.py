"""Findings of an examination."""

from __future__ import annotations

from dataclasses import dataclass

OK = "ok"
WARNING = "warning"  # it works, but not as it could
FAULT = "fault"
ABSENT = "not here"  # and nothing is wrong with that


@dataclass(frozen=True)
class Finding:
    """One row: what was examined, the verdict, what was found, and for a warning or a fault the command that mends it."""

    name: str
    verdict: str
    found: str
    remedy: str = ""
