"""The commands and their arguments; each command's work is in a module of its own."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated, Any

import typer

from .group import Command, Commands

app = typer.Typer(cls=Commands, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


def _version(asked: bool) -> None:
    if asked:
        package = importlib.import_module("cupyops")  # which imports none of this: no module depends on the whole
        typer.echo(f"cupyops {package.__version__}")
        raise typer.Exit


def _given(options: dict[str, Any]) -> dict[str, Any]:
    """Options that have a value; of the others a request has defaults of its own."""
    return {name: value for name, value in options.items() if value is not None}


@app.callback()
def cupyops(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """cupyops: a .cu file becomes a differentiable PyTorch operator, with pip alone."""


@app.command(cls=Command)
def compile(
    modules: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODULE]...",
            help="mylib.kernels or src/mylib/kernels.py: modules whose kernels to compile. By default the built-in ones.",
        ),
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(help="Architectures: sm_75,sm_90a. By default this machine's GPUs'; with none, all."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for CUPYOPS_CUBIN_PATH, or cubins beside the .cu. By default the kernel cache."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes. By default one per core.")] = None,
    fp64: Annotated[bool, typer.Option("--fp64", help="Also the built-in kernels for float64.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Also the kernels that few programs launch.")] = False,
) -> None:
    """Compile kernels ahead of time: all instances of yours, or of the built-in ones all but the rarest. Needs no GPU."""
    from .compile import run

    archs = arch.replace(" ", "").split(",") if arch else None
    raise typer.Exit(run(modules or [], archs, out, jobs, fp64, everything))


@app.command(cls=Command)
def simulate(
    file: Annotated[str, typer.Argument(metavar="FILE.cu", help="Looked for here, then among the built-in kernels.")],
    kernel: Annotated[
        str | None,
        typer.Argument(
            metavar="KERNEL",
            help='The __global__ function: relu_fwd, or "relu_fwd<float>". Without it the file\'s kernels are listed.',
            show_default=False,
        ),
    ] = None,
    grid: Annotated[
        str | None, typer.Option(help="Blocks: 4 or 4,2. Without it the kernel's signature and an example are shown.")
    ] = None,
    block: Annotated[str | None, typer.Option(help="Threads of a block: 256 or 32,8.")] = None,
    args: Annotated[
        list[str] | None,
        typer.Option(
            "--arg",
            help="For each parameter, in order: 3, 0.5, true, randn(1000), rand(n), randint(low,high,n), zeros(32,32), "
            "ones(n), arange(n), full(n,value), empty(n) (uninitialised), @file.npy, null; with :float32 behind an array "
            "where the C type does not say what it holds. Random numbers are the same in every run.",
        ),
    ] = None,
    template: Annotated[
        list[str] | None, typer.Option(help="A template argument: T=float32 or N=4. Once for each.")
    ] = None,
    arch: Annotated[str, typer.Option(help="The architecture to compile for.")] = "sm_80",
    shared: Annotated[int, typer.Option(min=0, help="Bytes of dynamic shared memory.")] = 0,
    options: Annotated[
        list[str] | None, typer.Option("--option", help="A further NVRTC option, as --option=-DN=4.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Run threads and blocks in an order drawn with this seed.")] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Look for races and for reads of unwritten memory.")
    ] = True,
    max_steps: Annotated[int | None, typer.Option(min=1, help="Give up after so many steps.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write an annotated report of the source to this file.")] = None,
    json: Annotated[Path | None, typer.Option(help="Write the same data to this file.")] = None,
) -> None:
    """Run a kernel on the CPU: check it, and see where its instructions and memory accesses are. Needs no GPU."""
    given = _given(locals())
    from .simulate import Request, run

    raise typer.Exit(run(Request(**given)))


@app.command(cls=Command)
def check(
    operator: Annotated[
        str, typer.Argument(metavar="MODULE:NAME", help="The operator: cupyops:relu, mylib.ops:my_op, my_op.py:my_op.")
    ],
    args: Annotated[
        list[str] | None,
        typer.Option(
            "--arg",
            help="The sample call, in order: randn(3,5), randn(3,5):float16, randint(0,10,3), 1, true, none, (2,3), "
            "dim=1. Floating-point tensors want a gradient. By default something that the reference takes.",
        ),
    ] = None,
    reference: Annotated[
        str | None, typer.Option(metavar="MODULE:NAME", help="The same function in plain PyTorch.")
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="A hazard to try. Once for each; by default all.")] = None,
    skip: Annotated[list[str] | None, typer.Option(help="A hazard to leave out. Once for each.")] = None,
    backends: Annotated[
        list[str] | None,
        typer.Option("--backend", help="reference, simulator or gpu. Once for each; by default all that are here."),
    ] = None,
    keep: Annotated[
        list[str] | None,
        typer.Option(
            help="A parameter, by name or position, whose tensor no hazard may fill with other values. Once for each.",
        ),
    ] = None,
    memory: Annotated[float, typer.Option(min=0.0, help="GiB that a variant may take on the CPU.")] = 2.0,
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0,
    shrink: Annotated[bool, typer.Option("--shrink/--no-shrink", help="Look for the smallest call that fails.")] = True,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="List every hazard, as with --only, instead of counting them by family.")
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the report to this file.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write the report to this file, as CI systems read it.")] = None,
) -> None:
    """Test an operator with inputs and uses that have broken other kernel libraries.

    The exit code is 0 if it passed, 1 if it did not, 2 for bad arguments, and 130 where it was interrupted.
    """
    given = _given(locals())
    from .check import Request, run

    raise typer.Exit(run(Request(**given)))


@app.command(cls=Command)
def explain(
    operator: Annotated[
        str | None,
        typer.Argument(
            metavar="OP",
            help="layer_norm, or one of your own: mylib.ops:my_op, my_op.py:my_op.",
            show_default=False,
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="FILE:FUNCTION",
            help='Instead of OP: a function that returns (model, args); what torch.compile(backend="cupyops") makes of it.',
        ),
    ] = None,
    code: Annotated[bool, typer.Option("--code", help="With --model: print the kernels too.")] = False,
    shapes: Annotated[
        list[str] | None,
        typer.Option("--shape", help="A tensor: 32768x4095. Once for each; what else it takes is supplied."),
    ] = None,
    args: Annotated[
        list[str] | None,
        typer.Option(
            "--arg", help="The arguments behind those tensors, as of check: 1, none, (2,3), empty(8,64):float16, dim=1."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the tensors of --shape.")] = "float32",
    strides: Annotated[
        list[str] | None,
        typer.Option(help="Strides of a tensor: 1x4096. Once for each --shape, in order; by default contiguous."),
    ] = None,
    card: Annotated[
        str | None,
        typer.Option("--arch", "--card", help="sm_80, A100, H200 ...: by default this machine's GPU, else an H100."),
    ] = None,
    gradient: Annotated[bool, typer.Option("--backward/--no-backward", help="Explain the backward too.")] = True,
    compile: Annotated[
        bool, typer.Option("--compile/--no-compile", help="Compile the kernels, to show their registers and occupancy.")
    ] = True,
    json: Annotated[Path | None, typer.Option(help="Write the same data to this file.")] = None,
) -> None:
    """Show which kernels a call launches and why, their grids, and what they use. Launches none; needs no GPU."""
    given = _given(locals())
    from . import explain, explain_model

    if model is not None and operator is None:
        of_model = explain_model.Request(model=model, gradient=gradient, code=code, json=json)
        raise typer.Exit(explain_model.run(of_model))
    if operator is None or model is not None:
        raise typer.BadParameter("give an operator, or --model FILE:FUNCTION")
    del given["code"]
    raise typer.Exit(explain.run(explain.Request(**given)))


@app.command(cls=Command)
def cache(
    action: Annotated[str, typer.Argument(help="show, clean (remove all kernels), or limit (remove some).")] = "show",
    size: Annotated[
        str | None,
        typer.Argument(help="With limit: how much may stay, 500M or 2G. The kernels used least recently go first."),
    ] = None,
) -> None:
    """Show what the kernel cache holds, empty it, or make it smaller. CUPYOPS_CACHE_LIMIT sets its largest size."""
    from .cache import run

    raise typer.Exit(run(action, size))


@app.command(cls=Command)
def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check Python, PyTorch, CuPy, NVRTC, the driver and each GPU, and print the command that fixes each problem."""
    from .doctor import run

    raise typer.Exit(run(json))


@app.command(cls=Command)
def new(
    name: Annotated[str, typer.Argument(help="The operator's name, in Python and in CUDA C.")],
    kind: Annotated[
        str, typer.Option(help="elementwise, reduction (over the last dimension) or raw: what the kernels begin as.")
    ] = "raw",
    package: Annotated[bool, typer.Option("--package", help="A project that pip installs, not files alone.")] = False,
    hub: Annotated[
        bool, typer.Option("--hub", help="With --package: laid out as the loader of Hugging Face's kernels takes it.")
    ] = False,
    dir: Annotated[Path, typer.Option(help="The folder to write to.")] = Path(),
) -> None:
    """Write a new operator that works at once: its .cu file, its Python, a test and a benchmark."""
    from .new import run

    raise typer.Exit(run(name, kind, package, dir, hub))


@app.command(cls=Command)
def port(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="EXT.cu [EXT.cpp]...", help="The file with the kernels, then other host code."),
    ],
    out: Annotated[Path, typer.Option(help="The folder to write to.")] = Path(),
    option: Annotated[
        list[str] | None, typer.Option(help="An NVRTC option that the kernels need, as --option=-Iinclude.")
    ] = None,
) -> None:
    """Translate the host code of a C++ extension of PyTorch to Python: launches, allocations, checks, an operator.

    What is left to do is listed with its lines. The exit code is 1 where something has no translation, and 2 where nothing
    was written.
    """
    from .port import run

    raise typer.Exit(run(files, out, option or ()))


@app.command(cls=Command)
def bench(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[OP]...", help="Operators, or files of declarations. By default all.")
    ] = None,
    against: Annotated[str, typer.Option(help="Peers: eager, compile, liger, max-autotune.")] = "eager,compile,liger",
    only: Annotated[str, typer.Option(help="A regular expression that operator, size and dtype are to match.")] = "",
    folder: Annotated[
        Path | None,
        typer.Option(help="Where the files bench_OP.py are. By default benchmarks here, else those of cupyops itself."),
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write a report with plots to this file.")] = None,
    csv: Annotated[
        Path | None,
        typer.Option(
            help="Write the figures to this file. A figure that is there already changes if it moved by more than 3%."
        ),
    ] = None,
    png: Annotated[Path | None, typer.Option(help="Write the plots into this folder.")] = None,
    source: Annotated[
        Path | None, typer.Option("--from", help="Measure nothing: show the figures of this file.")
    ] = None,
    compare: Annotated[
        Path | None,
        typer.Option(help="Fail where something takes 5% longer than in this file; h200.csv is one of cupyops's own."),
    ] = None,
    host: Annotated[bool, typer.Option("--host", help="Measure the host's time for a small call too.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Compare the small cases on the CPU; no times.")] = False,
    jobs: Annotated[int, typer.Option(min=0, help="Processes that compile first.")] = 0,
    models: Annotated[
        bool, typer.Option("--models", help="Training steps of whole models: llama, gpt2, vit ...")
    ] = False,
    compile_part: Annotated[str, typer.Option(hidden=True)] = "",
) -> None:
    """Measure operators beside PyTorch, torch.compile and Liger, on this machine's GPU."""
    given = _given(locals()) | {"against": [one.strip() for one in against.split(",") if one.strip()]}
    del given["models"]
    if models:
        from . import models as whole

        known = whole.Request.__dataclass_fields__
        if unused := [name for name, value in given.items() if value and name not in known]:
            raise typer.BadParameter(f"--models does not go with {', '.join(f'--{name}' for name in unused)}")
        raise typer.Exit(whole.run(whole.Request(**{name: value for name, value in given.items() if name in known})))
    from ..bench.case import here
    from .bench import Request, run

    raise typer.Exit(run(Request(**{"folder": here(), **given})))
