"""`python -m cupyops compile`: what to compile, a progress bar, a summary, the errors in full."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from .._dispatch.core import rare
from .._kernel import kernel
from .._kernel.compile import architecture, cache, compiler, trust
from ..errors import CupyopsError, InputError
from . import jobs as ahead
from . import narrow, outputs, words
from .group import INTERRUPTED
from .modules import load

_LIBRARY = ("cupyops.ops", "cupyops.nn", "cupyops.optim")  # importing these makes every built-in kernel


def run(
    modules: list[str],
    archs: list[str] | None,
    out: Path | None,
    processes: int | None,
    fp64: bool = False,
    everything: bool = False,
) -> int:
    """The command; returns its exit code: 0, or 1 where a kernel does not compile, or 2 for bad arguments."""
    console = Console()
    try:
        if out is not None:
            outputs.folder("--out", out)
        chosen = _archs(archs)
        kernels = _kernels(modules)
        every = ahead.plan(kernels, chosen)
        reasons = [rare.why(job.source, job.name, job.arch) for job in every]
        kept = {None, *(reasons if everything else [rare.FP64] if fp64 else [])}
        planned = [job for job, reason in zip(every, reasons) if reason in kept]
        folder = _folder(out)
    except (CupyopsError, OSError) as error:
        words.complain(error)
        return 2
    console.print(
        f"cubins to make: {len(planned)}, for {', '.join(chosen)}, into {folder}", highlight=False, soft_wrap=True
    )
    for one in kernels:
        if not any(architecture.target(one.arch, arch) for arch in chosen):
            console.print(f"left out: {one.base}, which is for {one.arch} alone", highlight=False, soft_wrap=True)
    for reason, count in Counter(reason for reason in reasons if reason not in kept).items():
        option = "--fp64" if reason == rare.FP64 else "--all"
        said = f"left out: {count} {reason}; a first call compiles them, and {option} makes them now"
        console.print(said, highlight=False, soft_wrap=True)
    try:
        outcomes = _with_progress(console, planned, folder, processes)
    except CupyopsError as error:
        words.complain(error)
        return 1
    narrow.show(console, _summary(outcomes), 64)
    failures = [outcome for outcome in outcomes if outcome.error]
    for outcome in failures:
        console.rule(f"{outcome.job.source.name}: {outcome.job.name} for {outcome.job.arch}", style="red")
        console.print(outcome.error, markup=False, highlight=False, soft_wrap=True)
    if failures:
        console.print(f"{len(failures)} of {len(outcomes)} did not compile", style="red")
    if len(outcomes) < len(planned):
        left = len(planned) - len(outcomes)
        words.complain(f"interrupted: {left} of {len(planned)} are not made; the same command goes on from there")
        return INTERRUPTED
    if failures:
        return 1
    if out is not None:
        beside = all(job.source.path is not None and job.source.path.parent / "cubins" == folder for job in planned)
        named = f"To use them: CUPYOPS_CUBIN_PATH={shlex.quote(str(folder))}"
        use = "Launches find this folder without a setting, since it is beside the .cu file" if beside else named
        owner = planned[0].source.path if planned and beside else None
        if why := trust.objection(folder, trust.owners(owner)):
            use = f"Launches will not use them, since others can write there: {why.found}\n{why.remedy}"
        console.print(use, markup=False, highlight=False, soft_wrap=True)
    return 0


def _archs(archs: list[str] | None) -> list[str]:
    """The architectures asked for, each one known to this NVRTC."""
    known = compiler.supported_archs()
    if archs is None:
        here = {torch.cuda.get_device_capability(device) for device in range(torch.cuda.device_count())}
        archs = [f"sm_{major}{minor}" for major, minor in sorted(here)] or [a for a in ahead.ARCHS if a in known]
    for arch in archs:
        found = architecture.read(arch)
        if found is None or found.plain not in known:
            raise InputError(
                f"--arch has {arch!r}; this NVRTC compiles for {', '.join(known)}, from sm_90 on also with a behind it, "
                "from sm_100 on also with f"
            )
    return list(dict.fromkeys(archs))


def _kernels(modules: list[str]) -> list[kernel.Kernel]:
    """Kernels that importing the modules makes; the built-in ones where no module is named, or one of this package."""
    for name in _LIBRARY:
        load(name)
    built_in = kernel.kernels()
    for name in modules:
        load(name)
    if not modules or any(name.partition(".")[0] == "cupyops" for name in modules):
        return kernel.kernels()
    known = {id(one) for one in built_in}
    made = [one for one in kernel.kernels() if id(one) not in known]
    if not made:
        raise InputError(
            f"MODULE {', '.join(map(repr, modules))}: importing makes no cupyops.Kernel; name the module that does"
        )
    return made


def _folder(out: Path | None) -> Path:
    if out is not None:
        out.mkdir(mode=0o755, parents=True, exist_ok=True)  # where others can write, launches do not look
        return out.resolve()
    folder = cache.folder()
    if folder is None:
        raise InputError("no kernel cache can be written here; set CUPYOPS_CACHE_DIR, or give --out")
    return folder


def _with_progress(
    console: Console, planned: list[ahead.Job], folder: Path, processes: int | None
) -> list[ahead.Outcome]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    outcomes = []
    with (
        Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress,
        suppress(KeyboardInterrupt),
    ):
        task = progress.add_task("compiling", total=len(planned))
        for outcome in ahead.run(planned, folder, processes):
            outcomes.append(outcome)
            progress.advance(task)
    return outcomes


def _summary(outcomes: list[ahead.Outcome]) -> Table:
    """One line for each .cu file. Seconds are NVRTC's, summed over processes."""
    failed = any(outcome.error for outcome in outcomes)
    columns = ("kernels", "instances", "cubins", "reused", *(["errors"] if failed else []), "seconds", "bytes")
    table = Table(box=box.SIMPLE, pad_edge=False, collapse_padding=True)
    table.add_column("file", no_wrap=True)
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    files: defaultdict[str, list[ahead.Outcome]] = defaultdict(list)
    for outcome in outcomes:
        files[outcome.job.source.name].append(outcome)
    for file, group in sorted(files.items()):
        table.add_row(file, *(_figures(group)[name] for name in columns))
    if len(files) > 1:
        table.add_section()
        table.add_row("all", *(_figures(outcomes)[name] for name in columns), style="bold")
    return table


def _figures(group: list[ahead.Outcome]) -> dict[str, str]:
    instances = {(outcome.job.source.name, outcome.job.name) for outcome in group}
    kernels = {(file, name.partition("<")[0]) for file, name in instances}
    failed = sum(bool(outcome.error) for outcome in group)
    return {
        "kernels": str(len(kernels)),
        "instances": str(len(instances)),
        "cubins": str(len(group) - failed),
        "reused": str(sum(outcome.found for outcome in group)),
        "errors": str(failed),
        "seconds": f"{sum(outcome.seconds for outcome in group):.1f}",
        "bytes": f"{sum(outcome.size for outcome in group):,}",
    }
