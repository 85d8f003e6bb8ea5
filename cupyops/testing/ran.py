"""Detection of launches: what passes on a backend for kernels, and launches none, says nothing of them."""

from __future__ import annotations

from functools import partial

from .. import _simulate
from .._util import tracing
from .case import Case
from .hazard import KERNELS, Hazard
from .report import NO_KERNEL
from .target import running

launched = _simulate.launched  # how many launches the simulator has run so far


def without_kernel(one: Hazard, case: Case, before: int) -> str:
    """Return why a hazard that passed says nothing of kernels, or "". `before`: `launched()` before it."""
    if case.backend not in KERNELS:
        return ""
    if why := why_none(case):
        return f"{NO_KERNEL} {why}"
    # accuracy judges the plain call, which may have been made before
    silent = case.backend == "simulator" and one.launches and one.name != "accuracy" and launched() == before
    return "no kernel ran here: these calls take the reference" if silent else ""


def why_none(case: Case) -> str:
    """Return why the plain call launches no kernel; "" where it launches one, ends in an error or has nothing to do.

    Of a function that is no operator of cupyops nobody can tell on a GPU, where it may launch by other means.
    """
    return case.once(why_none, partial(_find_reason, case))


def _find_reason(case: Case) -> str:
    if case.backend == "gpu" and case.target.operator is None or case.failing:
        return ""
    with running(case.backend), tracing.trace() as trace:
        outcome = case.both_ways(case.call)
    if trace.launches() or outcome.is_empty():
        return ""
    notes = [record.note for record in trace.records if record.route == "reference" and record.note]
    return notes[0] if notes else "the call launches nothing"
