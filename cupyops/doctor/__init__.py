"""The doctor: examines this machine for what cupyops needs, and says of each fault what mends it.

`look()` gathers what is to be known, in child processes what may crash or hang; `examine()` judges it. Neither needs a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from . import cuda, mend, software, surroundings
from .finding import FAULT, Finding, fault
from .machine import Machine, look

__all__ = ["EXAMINATIONS", "FAULT", "Finding", "Machine", "examine", "look", "mend"]

# In the order of the report: each needs what those before it have found.
EXAMINATIONS: tuple[Callable[[Machine], Iterator[Finding]], ...] = (
    software.python,
    software.pytorch,
    software.cupy,
    software.nvidia,
    cuda.imports,
    cuda.nvrtc,
    cuda.headers,
    cuda.compiling,
    cuda.driver,
    cuda.gpus,
    cuda.visible,
    cuda.trials,
    software.compile_backend,
    surroundings.cache,
    surroundings.settings,
    surroundings.precompiled,
    software.extras,
)


def examine(machine: Machine) -> list[Finding]:
    """Every examination's findings. One that fails itself is a fault, and the others go on."""
    findings: list[Finding] = []
    for examination in EXAMINATIONS:
        try:
            findings += examination(machine)
        except Exception as error:  # of whatever kind: a doctor that dies tells nothing
            found = f"the examination itself failed: {type(error).__name__}: {error}"
            findings.append(fault(examination.__name__, found, software.reinstall_this(machine)))
    return findings
