"""The doctor: examines this machine for what cupyops needs, and gives the command that mends each fault.

`look()` gathers the facts, in a child process where gathering them may crash or hang; `examine()` judges them.
"""

from __future__ import annotations

from .examinations import EXAMINATIONS
from .finding import FAULT, Finding
from .machine import Machine, look

__all__ = ["EXAMINATIONS", "FAULT", "Finding", "Machine", "examine", "look"]


def examine(machine: Machine) -> list[Finding]:
    """Findings of every examination. One that fails itself is a fault, and the others go on."""
    findings: list[Finding] = []
    for examination in EXAMINATIONS:
        try:
            findings += examination(machine)
        except Exception as error:  # of whatever kind: a doctor that dies tells nothing
            found = f"the examination itself failed: {type(error).__name__}: {error}"
            findings.append(
                Finding(examination.__name__, FAULT, found, "pip install --force-reinstall --no-deps cupyops")
            )
    return findings
