"""Findings of an examination."""

from __future__ import annotations

from dataclasses import dataclass

OK = "ok"
WARNING = "warning"  # it works, but not as it could
FAULT = "fault"
ABSENT = "not here"  # and nothing is wrong with that


@dataclass(frozen=True)
class Finding:
    """One row: what was examined, the verdict, what was found, and for all but good news the command that mends it."""

    name: str
    verdict: str
    found: str
    remedy: str = ""


def ok(name: str, found: str) -> Finding:
    """All is well."""
    return Finding(name, OK, found)


def absent(name: str, found: str, remedy: str = "") -> Finding:
    """There is nothing to examine; `remedy` says how to get it, where that may be wished."""
    return Finding(name, ABSENT, found, remedy)


def warning(name: str, found: str, remedy: str) -> Finding:
    """It works; `remedy` makes it better."""
    return Finding(name, WARNING, found, remedy)


def fault(name: str, found: str, remedy: str) -> Finding:
    """It does not work until `remedy`."""
    return Finding(name, FAULT, found, remedy)
