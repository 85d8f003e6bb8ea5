"""`python -m cupyops bench --models`: training steps of whole models, beside PyTorch, torch.compile and Liger."""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from .._util.progress import Bar
from ..bench import model_table, training
from ..bench.case import figures_file
from ..bench.model_table import Figures
from ..bench.training import Model
from ..errors import InputError
from . import narrow, outputs
from .group import INTERRUPTED
from .words import complain

_NARROW = 80  # columns under which the table would cut its figures


@dataclass(frozen=True)
class Request:
    """The command line."""

    names: Sequence[str] = ()
    against: Sequence[str] = ("eager", "compile", "liger")
    csv: Path | None = None
    png: Path | None = None
    source: Path | None = None
    dry_run: bool = False


def run(request: Request) -> int:
    """The exit code: 1 where ours is slower than PyTorch or a result is wrong, 2 where the arguments are wrong."""
    try:
        return _run(request, Console())
    except InputError as error:
        complain(error)
        return 2


def _run(request: Request, console: Console) -> int:
    known = training.models()
    if unknown := [name for name in request.names if name not in known]:
        raise InputError(f"there is no model {unknown[0]!r}; there are {', '.join(known)}")
    if request.png is not None and importlib.util.find_spec("matplotlib") is None:
        raise InputError('--png needs matplotlib: pip install "cupyops[bench]"')
    outputs.files({"--csv": request.csv}, [request.source], folders_are_made=True)
    if request.png is not None:
        outputs.folder("--png", request.png)
    models = [known[name] for name in request.names or known]
    variants = [name for name in training.VARIANTS if name in (*request.against, "eager", *training.OURS)]
    if request.dry_run:
        return _dry_run(models, variants, console)
    if request.source is not None:
        (figures, machine), interrupted = model_table.read(figures_file(request.source)), False
    else:
        figures, machine, interrupted = _measure(models, variants, request, console)
    narrow.show(console, table(figures), _NARROW)
    if request.csv is not None:
        model_table.write(figures, machine, request.csv)
    if request.png is not None:
        request.png.mkdir(parents=True, exist_ok=True)
        for name, figure in (("models", model_table.picture(figures)), ("losses", model_table.curves(figures))):
            figure.savefig(request.png / f"{name}.png", dpi=120, facecolor="white")
    slower = [problem for one in figures if (problem := _problem(one, figures))]
    for problem in slower:
        console.print(problem, style="red", markup=False, soft_wrap=True)
    return INTERRUPTED if interrupted else int(bool(slower))


def _problem(one: Figures, figures: Sequence[Figures]) -> str | None:
    base = model_table.base_of(figures, one.model)
    if base is None or one.variant not in training.OURS:
        return None
    if not all(map(math.isfinite, one.losses)) and all(map(math.isfinite, base.losses)):
        return f"{one.model} {one.variant}: the loss is not finite, and PyTorch's is"
    return (
        f"{one.model} {one.variant} is slower than eager: {base.ms / one.ms:.2f}" if one.ms > 1.02 * base.ms else None
    )


def table(figures: Sequence[Figures]) -> Table:
    """The figures, a line for each variant."""
    found = Table(title="A training step", title_justify="left", box=None, padding=(0, 1, 0, 0))
    found.add_column("model")
    found.add_column("variant")
    for column in ("ms", "of\neager", "a second", "peak\nGiB", "first\nstep s", "last\nloss", "largest\ndifference"):
        found.add_column(column, justify="right")
    for one in figures:
        base = model_table.base_of(figures, one.model)
        speed = "" if base is None else f"{base.ms / one.ms:.2f}x"
        other = "" if base is None or base is one else f"{one.difference(base):.1e}"
        found.add_row(
            one.model, one.variant, f"{one.ms:.2f}", speed, f"{one.rate:,.0f} {one.unit}", f"{one.peak_gib:.2f}",
            f"{one.first_step_s:.1f}", f"{one.losses[-1]:.4f}", other,
        )  # fmt: skip
    return found


def _variants(
    model: Model, variants: Sequence[str], title: Callable[[int, str], None], console: Console
) -> list[Figures]:
    """All of one model at a time, so that their rounds can take turns; one that fails leaves the others.

    Liger comes after all others, with rounds of its own: it puts its functions into the module that all copies of a model
    are from.
    """
    found: list[Figures] = []
    with training.alone():
        state: dict[str, torch.Tensor] = {}
        batches: list[tuple[torch.Tensor, ...]] = []
        for apart in (False, True):
            timed: list[training.Timed] = []
            for at, variant in enumerate(variants):
                if (variant == "liger") is not apart:
                    continue
                title(at, variant)
                if (reason := training.why_not(model, variant, "cuda")) is not None:
                    console.print(f"{model.name} {variant}: left out, {reason}", markup=False, soft_wrap=True)
                    continue
                try:
                    if not batches:
                        state, batches = training.state_of(model, False), training.batches_of(model, "cuda", False)
                    timed.append(training.Timed(model, variant, state, batches))
                except Exception as error:  # for want of memory perhaps
                    first = str(error).splitlines()[0] if str(error) else ""
                    console.print(
                        f"{model.name} {variant}: {type(error).__name__}: {first[:300]}", style="red", markup=False
                    )
            title(len(variants), "in turn")
            found += training.measure(timed)
    return found


def _measure(
    models: Sequence[Model], variants: Sequence[str], request: Request, console: Console
) -> tuple[list[Figures], dict[str, str], bool]:
    """A model after another, and whether an interrupt ended it, which keeps what there is; the file has it at any time."""
    from ..bench.run import machine

    if not torch.cuda.is_available():
        raise InputError("this machine has no CUDA GPU to measure on; --dry-run compares tiny models on the CPU")
    figures: list[Figures] = []
    interrupted = False
    about = machine()
    with Bar("measuring", total=len(models) * (len(variants) + 1)) as bar:
        for done, model in enumerate(models):

            def title(at: int, what: str, before: int = done * (len(variants) + 1), name: str = model.name) -> None:
                bar.update(before + at, title=f"{name} {what}")

            try:
                figures += _variants(model, variants, title, console)
            except KeyboardInterrupt:
                if not figures:
                    raise
                console.print(f"interrupted: {done} of {len(models)} models are measured")
                interrupted = True
                break
            if request.csv is not None and figures:
                model_table.write(figures, about, request.csv)
    if not figures:
        raise InputError("nothing was measured; see above why each was left out")
    return figures, about, interrupted


def _dry_run(models: Sequence[Model], variants: Sequence[str], console: Console) -> int:
    """Tiny twins on the CPU: the losses of each variant beside those of the model as it is."""
    wrong, compared = [], 0
    with Bar("comparing", total=len(models)) as bar:
        for done, model in enumerate(models):
            bar.update(done, title=model.name)
            if (reason := training.why_not(model, "eager", "cpu")) is not None:
                console.print(f"{model.name}: left out, {reason}", markup=False, soft_wrap=True)
                continue
            try:
                state, batches = training.state_of(model, True), training.batches_of(model, "cpu", True)
            except (ImportError, RuntimeError) as error:  # of what the package needs itself
                console.print(f"{model.name}: left out, {error}", markup=False, soft_wrap=True)
                continue
            expected = training.compare(model, "eager", state, batches)
            for variant in variants:
                if variant == "eager" or training.why_not(model, variant, "cpu") is not None:
                    continue
                found = training.compare(model, variant, state, batches)
                compared += 1
                if not all(math.isclose(a, b, rel_tol=0.02, abs_tol=0.02) for a, b in zip(found, expected)):
                    wrong.append(f"{model.name} {variant}: losses {found}, expected {expected}")
    for problem in wrong:
        console.print(problem, style="red", markup=False, soft_wrap=True)
    console.print(
        f"{compared} variants of tiny models compared, {len(wrong)} wrong. No times without a GPU.", soft_wrap=True
    )
    return int(bool(wrong or not compared))
