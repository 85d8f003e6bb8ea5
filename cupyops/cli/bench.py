"""`python -m cupyops bench`: operators beside PyTorch, torch.compile and Liger, on this machine's GPU."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console

from ..bench import table
from ..bench.case import Case, declared, figures_file, files
from ..bench.host import too_slow
from ..bench.results import Results
from ..errors import InputError
from . import outputs
from .figures import show
from .group import INTERRUPTED
from .words import complain

PEERS = ("eager", "compile", "liger")
TUNED = "max-autotune"  # takes minutes, so it is measured where it is asked for


@dataclass(frozen=True)
class Request:
    """The command line."""

    names: Sequence[str] = ()
    against: Sequence[str] = PEERS
    only: str = ""
    folder: Path = Path("benchmarks")
    html: Path | None = None
    csv: Path | None = None
    png: Path | None = None
    source: Path | None = None  # figures to draw, and none to measure
    compare: Path | None = None
    host: bool = False
    dry_run: bool = False
    jobs: int = 0
    compile_part: str = ""


def run(request: Request) -> int:
    """The exit code: 1 where a result is wrong or something has got slower, 2 for bad arguments, 130 where interrupted."""
    try:
        return _run(request, Console())
    except InputError as error:
        complain(error)
        return 2


def _run(request: Request, console: Console) -> int:
    _check(request)
    old = None if request.compare is None else table.read(figures_file(request.compare))
    if request.source is not None:
        results = table.read(figures_file(request.source))
    else:
        cases = declared(files(request.names, request.folder), request.only)
        if not cases and not request.host:
            raise InputError(f"no case has {request.only!r} in its name" if request.only else "there are no cases")
        if request.compile_part:
            return _compile_part(request.compile_part, cases, request.against)
        if request.dry_run:
            return _dry_run(cases, console)
        results = _measure(request, cases, console)
    try:
        _write(results, request)  # before anything is printed: a pipe may close early
    finally:
        show(results, console)
    problems = [f"{name}: {reason}" for name, who, reason in results.left_out() if who == "ours"]
    problems += too_slow(results.host) if results.host else []
    if old is not None:
        problems += [
            f"{name} {way} takes {ratio:.2f} times as long as in {request.compare}"
            for name, way, ratio in results.slower_than(old)
        ]
        for name, way in results.vanished(old):
            console.print(f"{name} {way} is in {request.compare} alone", style="yellow", markup=False, soft_wrap=True)
    for problem in problems:
        console.print(problem, style="red", markup=False, soft_wrap=True)
    return INTERRUPTED if results.interrupted else int(bool(problems))


def _check(request: Request) -> None:
    """Refuse in advance what would otherwise be found when all is measured."""
    known = (*PEERS, TUNED)
    if unknown := set(request.against) - set(known):
        raise InputError(f"--against names {', '.join(sorted(unknown))}; it can name {', '.join(known)}")
    if (request.html or request.png) and importlib.util.find_spec("matplotlib") is None:
        raise InputError('--html and --png need matplotlib: pip install "cupyops[bench]"')
    if request.source is not None and (request.names or request.host or request.dry_run):
        raise InputError("--from measures nothing: it goes with no operators, no --host and no --dry-run")
    read = [] if request.source is not None else files(request.names, request.folder)
    outputs.files(
        {"--csv": request.csv, "--html": request.html},
        [request.compare, request.source, *read],
        folders_are_made=True,
    )
    if request.png is not None:
        outputs.folder("--png", request.png)


def _measure(request: Request, cases: list[Case], console: Console) -> Results:
    from ..bench.run import in_processes, machine
    from ..bench.run import run as measure

    path = request.csv
    old = table.read(path) if path is not None and path.exists() else None
    if old is not None and torch.cuda.is_available() and (gpu := old.machine.get("gpu")) != machine()["gpu"]:
        raise InputError(f"{path} has figures of {gpu}; give --csv another file, or remove this one")

    if request.jobs and torch.cuda.is_available():
        command = [sys.executable, "-m", "cupyops", "bench", *request.names, "--folder", str(request.folder)]
        command += ["--only", request.only, "--against", ",".join(request.against), "--compile-part"]
        with console.status(f"kernels and torch.compile, in {request.jobs} processes"):
            failures = in_processes(command, request.jobs)
        for failure in failures:
            console.print(failure, style="yellow", markup=False, soft_wrap=True)
    results = measure(cases, request.against, request.host, None if path is None else partial(_keep, path, old))
    if path is not None:
        _keep(path, old, results)
    return results


def _keep(path: Path, old: Results | None, results: Results) -> None:
    table.write(results if old is None else results.onto(old), path)


def _compile_part(part: str, cases: list[Case], against: Sequence[str]) -> int:
    """A worker of --jobs: its output is what failed."""
    from ..bench.run import compile_first

    index, _, parts = part.partition("/")
    failures = compile_first(cases, int(index), int(parts), against)
    print(*failures, sep="\n", end="\n" if failures else "")
    return 0


def _dry_run(cases: list[Case], console: Console) -> int:
    from ..bench.run import dry_run

    compared, wrong, interrupted = dry_run(cases)
    for failure in wrong:
        console.print(failure, style="red", markup=False, soft_wrap=True)
    console.print(
        f"{len(compared)} small cases compared for {len(cases)} cases, {len(wrong)} wrong. No times without a GPU.",
        markup=False,
        soft_wrap=True,
    )
    return INTERRUPTED if interrupted else int(bool(wrong))


def _write(results: Results, request: Request) -> None:
    from ..bench import charts, report

    if request.csv is not None and request.source is not None:
        table.write(results, request.csv)
    if request.html is not None:
        report.page(results, request.html)
    if request.png is not None:
        charts.write(results, request.png)
