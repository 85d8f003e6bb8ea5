"""`check`: every hazard tried on one call of an operator."""

from __future__ import annotations

import difflib
import gc
import inspect
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .._util.garbage import collected_later, count_as_old
from .._util.progress import Bar
from ..errors import InputError
from . import state
from .call import Call, Function, tensors_of
from .case import MEMORY, Case
from .hazard import KERNELS, Failure, Hazard, NotApplicable, hazards
from .ran import launched, why_none, without_kernel
from .repeats import remembered
from .report import CALL_FAILS, FAIL, NOT_APPLICABLE, PASS, Report, Row
from .reproduce import reproduction
from .shrink import smallest
from .target import BACKENDS, Target, available, placed, running, target
from .tolerance import Tolerance

_FEW = 6  # names that a message lists
_YOUNG = 1  # the generations of objects that are looked at between two hazards: what they have made


def check(
    op: Function,
    args: Sequence[Any],
    kwargs: dict[str, Any] | None = None,
    *,
    reference: Function | None = None,
    tolerance: Tolerance | None = None,
    only: str | Iterable[str] | None = None,
    skip: str | Iterable[str] | None = None,
    backends: str | Iterable[str] | None = None,
    seed: int = 0,
    shrink: bool = True,
    progress: bool | None = None,
    keep: str | int | Iterable[str | int] | None = None,
    memory: int = MEMORY,
) -> Report:
    """Try on an operator, by one sample call, what has broken other kernel libraries.

    Every hazard of `cupyops.testing.hazards()` makes its own variants of the call: strided, misaligned, empty, with NaN,
    under `torch.compile`, on a side stream and so on, and compares with the reference, forward and backward. One fault
    shows in one row: `accuracy` judges the call itself, every other row what it varies.

    Args:
        op: a `cupyops.operator`, the function around one, or any function of tensors, for which `reference` is needed.
        args, kwargs: the sample call. Tensors that require a gradient get one. Small ones are tried fastest.
        reference: the same function in plain PyTorch. By default the operator's own reference; a function that was
            written by others, as torch.nn.functional's, tests more.
        tolerance: how exact results must be; by default twice PyTorch's own error, plus a unit in the last place.
        only, skip: names of hazards.
        backends: of "reference" (tensors on the CPU, no kernel), "simulator" (the kernels, on the CPU) and "gpu"; by
            default all that are here, or the GPU alone if the tensors are there.
        seed: of all that is drawn at random.
        shrink: look for the smallest call that fails.
        progress: show a progress bar; by default if the standard error is a terminal.
        keep: names of parameters, or their places, whose tensors keep their values in every variant: floating-point tensors
            in which others have no meaning, as boxes and regions that hold coordinates and indices.
        memory: bytes that a variant may take on the CPU; what would take more is not tried.

    Returns:
        Report: print it; `.passed`, `.failures`, `.raise_if_failed()`, `.to_json()`, `.to_junit()`. It has passed where
            nothing failed, something passed, and a kernel was seen at work (unless `backends` is the reference alone).

    Raises:
        InputError: a name that there is not, no reference, one that refuses the call, or no GPU where one is asked for.
        Interrupted: a KeyboardInterrupt, whose `report` has the rows until then.

    Example:
        >>> report = cupyops.testing.check(cupyops.silu, [torch.randn(3, 5, requires_grad=True)], only="accuracy")
        >>> report.passed
        True
    """
    of = target(op, reference)
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise InputError(f"args is {type(args).__name__}, expected a list of the arguments")
    call = Call(*args, **(kwargs or {}))
    call.kept = _tensors_kept(of, call, keep)
    tried = _chosen(only, skip)
    where = _backends(backends, of, call)
    report = Report(of.name, repr(call), seed)
    cases: list[Case] = []
    try:
        with _frugally(), remembered(), Bar(f"checking {of.name}", len(tried) * len(where), progress, after=0.0) as bar:
            bar.update(0)
            for backend in where:
                case = _case(Case(of, placed(call, backend), backend, tolerance or Tolerance(), seed, memory))
                cases.append(case)
                for one in tried:
                    bar.update(len(report.rows), title=f"{of.name}: {one.name} ({backend})")
                    known = len(sys.modules)
                    report.rows.append(_row(one, case, shrink))
                    if len(sys.modules) > known:
                        count_as_old()
                    else:
                        gc.collect(_YOUNG)
        report.unseen = _unseen(of, cases, backends)
    except KeyboardInterrupt:
        report.interrupted = True
        raise Interrupted(report) from None
    return report


class Interrupted(KeyboardInterrupt):
    """`check` was interrupted, as by Ctrl-C; its message is the `report` of what had been tried until then."""

    def __init__(self, report: Report) -> None:
        super().__init__(str(report))
        self.report = report


@contextmanager
def _frugally() -> Iterator[None]:
    """PyTorch works in one thread, since the others would only wait for their part of small tensors; and Python collects
    garbage between hazards, not while PyTorch's compilers are imported and at work, whose objects stay. Random numbers
    go on afterwards as if nothing had been drawn."""
    before, drawn = torch.get_num_threads(), state.generators()
    torch.set_num_threads(1)
    try:
        with collected_later():
            yield
    finally:
        torch.set_num_threads(before)
        state.set_back(drawn)


def _unseen(of: Target, cases: Sequence[Case], asked: str | Iterable[str] | None) -> str:
    """Return why no case shows kernels at work, though some are expected of the function; "" where one does."""
    with_kernels = [case for case in cases if case.backend in KERNELS]
    if with_kernels:
        reasons = [why_none(case) for case in with_kernels]
        return reasons[0] if all(reasons) else ""
    if asked is not None or of.operator is None:
        return ""  # nobody has asked for any
    return "CuPy is not installed" if of.has_kernels else "the operator has none"


def _case(case: Case) -> Case:
    """The case. Raises `InputError` where there is nothing to compare with."""
    try:
        case.theirs(case.call)
    except NotApplicable as why:
        raise InputError(f"{why}; the sample call must be one that it takes") from why.__cause__
    return case


def _row(one: Hazard, case: Case, shrink: bool) -> Row:
    """One hazard tried on one case."""
    start = time.perf_counter()
    verdict, reason, kind = attempt(one, case)
    seconds = time.perf_counter() - start
    small = again = ""
    if verdict == FAIL:
        fails = lambda other: attempt(one, other)[::2] == (FAIL, kind)  # noqa: E731
        call = smallest(case, fails) if shrink else case.call
        if call is not case.call:
            reason = attempt(one, case.with_call(call))[1] or reason  # what comes and goes may be gone by now
        small, again = repr(call), reproduction(case.with_call(call), one.name, fails)
    return Row(one.name, case.backend, verdict, reason, one.expectation, small, again, seconds)


def attempt(one: Hazard, case: Case) -> tuple[str, str, type[BaseException] | None]:
    """(verdict, reason, the kind of error) of one hazard on one case."""
    if case.backend not in one.backends:
        return NOT_APPLICABLE, f"concerns {' and '.join(one.backends)}", None
    before, settings = launched(), state.settings()
    verdict, reason, kind = _attempt(one, case)
    case.changes += [(one.name, change) for change in state.restored(settings)]
    if verdict == PASS and (why := without_kernel(one, case, before)):
        return NOT_APPLICABLE, why, None
    # after a Failure, which may be of what the call does to memory, no plain call is made to find that out
    failing = vars(case).get("failing") if kind in (None, Failure) else case.failing
    if verdict == FAIL and failing and one.name != "accuracy":
        return NOT_APPLICABLE, f"{CALL_FAILS}: {failing}", None
    case.note(one.attempt, verdict != FAIL)
    return verdict, reason, kind


def _attempt(one: Hazard, case: Case) -> tuple[str, str, type[BaseException] | None]:
    try:
        with running(case.backend):
            remark = one.attempt(case)
    except NotApplicable as why:
        return NOT_APPLICABLE, str(why), None
    except Failure as failure:
        return FAIL, str(failure), type(failure)
    except Exception as error:  # whatever an operator raises is a finding
        notes = "\n".join(getattr(error, "__notes__", []))
        return FAIL, f"{type(error).__name__}: {error}\n{notes}".strip(), type(error)
    return PASS, remark or "", None


# --- what is asked for ---


def _chosen(only: str | Iterable[str] | None, skip: str | Iterable[str] | None) -> list[Hazard]:
    known = hazards()
    wanted, left_out = _names("only", only, known), _names("skip", skip, known)
    return [one for name, one in known.items() if (only is None or name in wanted) and name not in left_out]


def _backends(asked: str | Iterable[str] | None, of: Target, call: Call) -> Sequence[str]:
    if asked is None:
        return available(of, call)
    names = _names("backends", asked, BACKENDS)
    if "gpu" in names and not torch.cuda.is_available():
        raise InputError("backends is 'gpu', but there is no CUDA GPU here; leave it out")
    return names


def _tensors_kept(of: Target, call: Call, keep: str | int | Iterable[str | int] | None) -> frozenset[int]:
    """The numbers of the tensors, among all of the call, that stand in the parameters to be kept."""
    asked = [] if keep is None else [keep] if isinstance(keep, (str, int)) else list(keep)
    if not asked:
        return frozenset()
    try:
        names: list[str | int] = list(inspect.signature(of.function).parameters)
    except (TypeError, ValueError):
        names = []
    given = dict(enumerate(call.args)) | dict(zip(names, call.args)) | call.kwargs
    if unknown := [one for one in asked if one not in given]:
        raise InputError(f"keep is {unknown[0]!r}, expected one of {', '.join(map(str, given))}")
    chosen = [leaf for one in asked for leaf in tensors_of(given[one])]
    return frozenset(i for i, tensor in enumerate(call.all_tensors()) if any(tensor is one for one in chosen))


def _names(what: str, given: str | Iterable[str] | None, known: Iterable[str]) -> list[str]:
    names = [] if given is None else [given] if isinstance(given, str) else list(given)
    every = list(known)
    if unknown := [name for name in names if name not in every]:
        near = every if len(every) <= _FEW else difflib.get_close_matches(unknown[0], every, 3)
        expected = ", ".join(near) or "the names that cupyops.testing.hazards() lists"
        raise InputError(f"{what} is {unknown[0]!r}, expected one of {expected}")
    return names
