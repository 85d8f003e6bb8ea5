"""Draw calls of the operators at random, for as long as asked; tell of the smallest that are wrong.

python tools/fuzz.py --minutes 10
python tools/fuzz.py softmax conv2d --backend simulator --seed 3
"""

from __future__ import annotations

import random
import sys
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Annotated

import torch
import typer
from hypothesis import HealthCheck, Phase, given, seed, settings
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from fuzzing import FUZZED  # type: ignore[import-not-found]

from cupyops.testing.fuzz import agree

BATCH = 50  # calls between two looks at the clock

_KINDS = ("agreed", "refused", "unsupported", "wrong")  # "refused": by both; "wrong": seeds with such calls

console = Console()


def main(
    names: Annotated[list[str] | None, typer.Argument(metavar="[OPERATOR]...", help="By default all.")] = None,
    minutes: Annotated[float, typer.Option(help="How long, all together.")] = 10.0,
    backend: Annotated[str, typer.Option(help="reference, simulator or gpu.")] = "reference",
    start: Annotated[int, typer.Option("--seed", help="Of the first batch; each further one has the next.")] = 0,
) -> None:
    """Compare calls drawn at random with PyTorch, forward and backward."""
    if unknown := set(names or ()) - set(FUZZED):
        raise typer.BadParameter(f"{', '.join(unknown)}: expected one of {', '.join(FUZZED)}")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen, outcomes = names or list(FUZZED), {name: Counter[str]() for name in names or FUZZED}
    number, end = start, time.monotonic() + 60 * minutes
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("fuzzing", total=60 * minutes)
        while (left := end - time.monotonic()) > 0:
            name = chosen[number % len(chosen)]
            progress.update(task, completed=60 * minutes - left, description=f"{name}, seed {number}")
            _batch(name, backend, number, outcomes[name])
            number += 1
    _show(outcomes, f"{backend}, seeds {start} to {number - 1}")
    if any(found["wrong"] for found in outcomes.values()):
        raise typer.Exit(1)


def _batch(name: str, backend: str, number: int, outcomes: Counter[str]) -> None:
    function, reference, strategy = FUZZED[name]

    @seed(number)
    @settings(
        max_examples=BATCH,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink),
    )
    @given(strategy)
    def agrees(call):  # type: ignore[no-untyped-def]
        placed = call.map(lambda t: t.detach().cuda().requires_grad_(t.requires_grad)) if backend == "gpu" else call
        outcomes[agree(function, reference, placed, backend)] += 1

    random.seed(number)
    try:
        agrees()
    except Exception as error:  # whatever an operator raises
        outcomes["wrong"] += 1
        console.print(f"[red]{name}:[/] python tools/fuzz.py {name} --backend {backend} --seed {number} --minutes 0.01")
        for each in error.exceptions if isinstance(error, ExceptionGroup) else (error,):
            told = "\n".join([f"{type(each).__name__}: {each}", *getattr(each, "__notes__", ())])
            console.print(told, markup=False, highlight=False)


def _show(outcomes: dict[str, Counter[str]], title: str) -> None:
    table = Table("operator", *_KINDS, title=title)
    for name, found in outcomes.items():
        table.add_row(name, *(str(found[kind]) for kind in _KINDS))
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
