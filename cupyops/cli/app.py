"""The commands and their arguments; each command's work is in a module of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


@app.callback()
def cupyops() -> None:
    """cupyops: a .cu file becomes a differentiable PyTorch operator, with pip alone."""


@app.command()
def compile(
    modules: Annotated[
        list[str] | None, typer.Argument(metavar="[MODULE]...", help="Python modules whose kernels to compile as well.")
    ] = None,
    arch: Annotated[
        str | None,
        typer.Option(help="Architectures: sm_75,sm_90. By default this machine's GPUs'; with none, all."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for CUPYOPS_CUBIN_PATH. By default the kernel cache."),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes. By default one per core.")] = None,
) -> None:
    """Compile every instance of every kernel ahead of time. Needs no GPU."""
    from .compile import run

    raise typer.Exit(run(modules or [], arch.split(",") if arch else None, out, jobs))
