"""`python -m cupyops bench`: operators beside PyTorch, torch.compile and Liger, on this machine's GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from ..errors import InputError
from .words import complain

PEERS = ("eager", "compile", "liger")


@dataclass(frozen=True)
class Request:
    """What was asked for."""

    names: Sequence[str] = ()
    against: Sequence[str] = PEERS
    only: str = ""
    folder: Path = Path("benchmarks")
    html: Path | None = None
    json: Path | None = None
    png: Path | None = None
    source: Path | None = None  # figures to draw, and none to measure
    compare: Path | None = None
    host: bool = False
    dry_run: bool = False
    jobs: int = 0
    compile_part: str = ""


def run(request: Request) -> int:
    """The exit code: 1 where a result is wrong, something has got slower, or the arguments are wrong."""
    try:
        return _run(request, Console())
    except InputError as error:
        complain(error)
        return 1


def _run(request: Request, console: Console) -> int:
    from ..bench import report
    from ..bench.case import declared, files
    from ..bench.charts import write
    from ..bench.host import too_slow
    from ..bench.results import Results
    from ..bench.run import compile_first, dry_run, in_processes
    from ..bench.run import run as measure

    if unknown := set(request.against) - set(PEERS):
        raise InputError(f"--against names {', '.join(sorted(unknown))}; it can name {', '.join(PEERS)}")
    if request.source is not None:
        results = Results.read(request.source)
    else:
        cases = declared(files(request.names, request.folder), request.only)
        if not cases and not request.host:
            raise InputError(f"no case has {request.only!r} in its name")
        if request.compile_part:
            part, _, parts = request.compile_part.partition("/")
            compile_first(cases, int(part), int(parts))
            return 0
        if request.dry_run:
            return int(dry_run(cases, console) > 0)
        if request.jobs and "compile" in request.against:
            with console.status(f"torch.compile, in {request.jobs} processes"):
                in_processes([*request.names, "--folder", str(request.folder), "--only", request.only], request.jobs)
        results = measure(cases, request.against, console, request.host)
    report.show(results, console)
    if request.json is not None:
        results.write(request.json)
    if request.html is not None:
        report.page(results, request.html)
    if request.png is not None:
        write(results, request.png)
    problems = [f"{row.name}: {row.wrong['ours']}" for row in results.rows if "ours" in row.wrong]
    problems += too_slow(results.host) if results.host else []
    if request.compare is not None:
        slower = results.slower_than(Results.read(request.compare))
        problems += [
            f"{name} {way} takes {ratio:.2f} times as long as in {request.compare}" for name, way, ratio in slower
        ]
    for problem in problems:
        console.print(problem, style="red", markup=False, soft_wrap=True)
    return int(bool(problems))
