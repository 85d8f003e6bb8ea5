"""`python -m cupyops simulate`: run one kernel in the simulator, say what is wrong with it and where its work is."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .._kernel.compile import compiler, cubin, declarations, source
from .._kernel.compile.binary import Binary
from .._kernel.kernel import kernels
from .._kernel.launch import signature
from .._kernel.launch.configuration import Configuration
from ..errors import CompileError, CupyopsError, InputError, MissingDependencyError
from ..simulator import MAX_STEPS, Allocation, Pointer, Program, SimulatorError
from . import arguments, instance, outputs, page, terminal, words
from .arguments import Array
from .group import INTERRUPTED
from .occupancy import occupancy
from .report import Launch, array_facts, fault_of, line_facts


@dataclass(frozen=True)
class Request:
    """The command line."""

    file: str
    kernel: str | None = None
    grid: str | None = None
    block: str | None = None
    args: Sequence[str] = ()
    template: Sequence[str] = ()
    arch: str = "sm_80"
    shared: int = 0
    options: Sequence[str] = ()
    seed: int | None = None
    check: bool = True
    max_steps: int | None = None
    html: Path | None = None
    json: Path | None = None


@dataclass
class Prepared:
    """A launch about to be made."""

    launch: Launch
    program: Program
    symbol: str
    values: list[Any]


def run(request: Request) -> int:
    """The command; returns its exit code: 0, 1 where the kernel does wrong or does not compile, 2 for bad arguments."""
    try:
        prepared = _prepare(request)
    except (CupyopsError, OSError, UnicodeDecodeError) as error:
        words.complain(error)
        return 1 if isinstance(error, (CompileError, SimulatorError)) else 2
    console = Console()
    _execute(console, request, prepared)
    launch, unwritten = prepared.launch, None
    try:
        _write(request, launch)  # before anything is printed: a pipe may close early, as that of `| head`
    except OSError as error:
        unwritten = error
    if launch.output:
        console.out(launch.output, end="" if launch.output.endswith("\n") else "\n", highlight=False)
    if launch.fault is not None:
        console.rule(launch.fault.kind, style="red")
        console.print(launch.fault.message, markup=False, highlight=False, soft_wrap=True, style="red")
    else:
        terminal.show(console, launch)
    if unwritten is not None:
        words.complain(f"cannot write: {unwritten}; give another path")
        return 2
    for what, path in (("report", request.html), ("data", request.json)):
        if path is not None:
            console.print(f"{what}: {path}", highlight=False, soft_wrap=True, markup=False)
    return 0 if launch.fault is None else 1


# --- from the command line to a launch -----------------------------------------------------------------------------


def _prepare(request: Request) -> Prepared:
    """Compile the kernel and make its arguments. Raises `CupyopsError`."""
    text = source.load(Path(request.file))
    outputs.files({"--html": request.html, "--json": request.json}, [*text.stamps, *arguments.files(request.args)])
    chosen = instance.choose(text, request.file, request.kernel, request.template)
    grid, block = _extents("--grid", request.grid), _extents("--block", request.block)
    if grid is not None and block is not None:
        Configuration.of(grid, block, request.shared)
    _check_arch(request.arch)
    binary = _built(text, chosen, request)
    declared = declarations.parameters(text, chosen.base, binary)
    takes = signature.join(chosen.expression, declared, binary.parameters, chosen.types, binary.types)
    values = _values(request, chosen, takes)
    assert grid is not None and block is not None
    sources = {text.name: text.text, **text.includes}
    used = _resources(binary)
    threads = block[0] * block[1] * block[2]
    fits = occupancy(binary.arch, threads, used.registers, used.shared + request.shared) if used is not None else None
    launch = Launch(
        file=text.name,
        kernel=chosen.expression,
        arch=binary.arch,
        grid=grid,
        block=block,
        shared=request.shared,
        check=request.check,
        seed=request.seed,
        arguments=[(one.ctype, one.name, given) for one, given in zip(takes, request.args)],
        sources=sources,
        resources=used,
        occupancy=fits,
    )
    return Prepared(launch, Program(binary.ptx, sources=sources), binary.symbol, values)


def _built(text: source.Source, chosen: instance.Instance, request: Request) -> Binary:
    """The kernel compiled. Raises `CompileError`, which names the types that there are where the one asked for is none."""
    options = (*_defined(text, request.options), *request.options)
    try:
        return compiler.build(text, chosen.expression, request.arch, options)
    except CompileError as error:
        raise CompileError(f"{error}{instance.types_known(chosen, str(error))}") from error


def _defined(text: source.Source, given: Sequence[str]) -> tuple[str, ...]:
    """The constants that the Kernels of this file define; one that the command line gives itself is left to it."""
    named = {option.partition("=")[0] for option in given}
    path = text.path
    alike = [one for one in kernels() if path is not None and one.file == path.name and one.source.path == path]
    options = dict.fromkeys(option for one in alike for option in one.options if option.startswith("-D"))
    return tuple(option for option in options if option.partition("=")[0] not in named)


def _values(request: Request, chosen: instance.Instance, takes: Sequence[signature.Argument]) -> list[Any]:
    """The kernel's arguments. Where they, the grid or the block are wanting, an `InputError` shows what would do."""
    try:
        given = {"--grid": request.grid, "--block": request.block}
        if absent := [option for option, extents in given.items() if extents is None]:
            raise InputError(f"{' and '.join(absent)} not given; give both, as below")
        return arguments.values(chosen.expression, takes, request.args, chosen.types)
    except InputError as error:
        usage = arguments.usage(request.file, chosen.expression, takes, chosen.types)
        raise InputError(f"{error}\n\n{usage}") from error


def _extents(option: str, text: str | None) -> tuple[int, int, int] | None:
    """`4`, `4,2` or `4x2x1`."""
    if text is None:
        return None
    parts = re.split(r"[,x]", text)
    if not 1 <= len(parts) <= 3 or not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"{option} is {text!r}, expected one to three extents from 1, such as 4 or 4,2")
    x, y, z = (*map(int, parts), 1, 1)[:3]
    return x, y, z


def _check_arch(arch: str) -> None:
    known = compiler.supported_archs()
    match = re.fullmatch(r"(sm_\d+)[af]?", arch)
    if match is None or match.group(1) not in known:
        raise InputError(f"--arch is {arch!r}; this NVRTC compiles for {', '.join(known)}")


def _resources(binary: Binary) -> cubin.Resources | None:
    """Resources of the kernel on the GPU; None, and a word, where pyelftools is not installed."""
    assert binary.path is not None
    try:
        return cubin.resources(binary.path.read_bytes(), binary.symbol)
    except MissingDependencyError as error:
        Console(stderr=True).print(f"no registers and no occupancy: {error}", markup=False, style="yellow")
        return None


# --- the launch, and what is written about it ---------------------------------------------------------------------


def _execute(console: Console, request: Request, prepared: Prepared) -> None:
    """Run the kernel; what it printed, found and left behind goes into `prepared.launch`."""
    launch, program = prepared.launch, prepared.program
    allocations: list[tuple[Array, Allocation, np.ndarray]] = []
    values = [_placed(program, value, allocations) for value in prepared.values]
    printed: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("blocks", total=None)
        try:
            launch.report = program.launch(
                prepared.symbol,
                launch.grid,
                launch.block,
                values,
                shared=launch.shared,
                check=launch.check,
                seed=launch.seed,
                max_steps=request.max_steps or MAX_STEPS,
                profile=True,
                label=launch.kernel,
                progress=lambda done, total: progress.update(task, completed=done, total=total),
                output=printed.append,
            )
        except SimulatorError as error:
            launch.fault = fault_of(error, launch.sources)
        except KeyboardInterrupt:
            bar = progress.tasks[task]
            words.complain(f"interrupted: {int(bar.completed)} of {math.prod(launch.grid)} blocks have run")
            raise typer.Exit(INTERRUPTED) from None
    launch.output = "".join(printed)
    if launch.report is not None:
        launch.lines, launch.issued = line_facts(launch.report, launch.sources)
        launch.arrays = [array_facts(array, before, allocation) for array, allocation, before in allocations]


def _placed(program: Program, value: Any, allocations: list[tuple[Array, Allocation, np.ndarray]]) -> Any:
    """A value as the simulator takes it: an array becomes a pointer to an allocation."""
    if value is None:
        return 0
    if not isinstance(value, Array):
        return value
    allocation = program.memory.allocate(value.storage, value.name, initialized=value.initialized)
    allocations.append((value, allocation, allocation.buffer.copy()))
    return Pointer(allocation)


def _write(request: Request, launch: Launch) -> None:
    if request.html is not None:
        request.html.write_text(page.render(launch), encoding="utf-8")
    if request.json is not None:
        text = json.dumps(launch.as_json(), indent=1, allow_nan=False)
        request.json.write_text(text + "\n", encoding="utf-8")
