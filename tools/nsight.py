"""Why a kernel is as fast as it is: Nsight Compute over the cases of benchmarks/, one line for each kernel of ours.

    python tools/nsight.py layer_norm --only bfloat16 --json layer_norm.json

Needs a GPU, and `ncu` on the PATH. The clocks stay as they are; the L2 cache is flushed before each kernel.
"""

from __future__ import annotations

import contextlib
import csv
import itertools
import json
import math
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

STALL = "smsp__average_warps_issue_stalled_"
# column of the table -> metric of Nsight Compute
METRICS = {
    "us": "gpu__time_duration.sum",
    "DRAM %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "read MB": "dram__bytes_read.sum",
    "written MB": "dram__bytes_write.sum",
    "L2 %": "lts__t_sectors.avg.pct_of_peak_sustained_elapsed",
    "L1 %": "l1tex__throughput.avg.pct_of_peak_sustained_active",
    "issue %": "sm__inst_issued.avg.pct_of_peak_sustained_active",
    "warps %": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "registers": "launch__registers_per_thread",
    "blocks": "launch__grid_size",
    "threads": "launch__block_size",
    "waves": "launch__waves_per_multiprocessor",
}
SCALE = {"us": 1e-3, "read MB": 1e-6, "written MB": 1e-6}
# warps that wait, for each instruction that is issued
STALLS = [
    *("long_scoreboard", "short_scoreboard", "wait", "barrier", "membar", "math_pipe_throttle", "mio_throttle"),
    *("lg_throttle", "tex_throttle", "not_selected", "no_instruction", "dispatch_stall", "drain", "imc_miss"),
    *("branch_resolving", "sleeping"),
]
REPEATS = 2  # warm-up calls of a case: compile, load, plan


def main(
    names: Annotated[list[str] | None, typer.Argument(help="operators; all of the folder if none")] = None,
    only: Annotated[str, typer.Option(help="a regular expression that the case's name must hold")] = "",
    folder: Annotated[Path, typer.Option(help="the declarations")] = Path("benchmarks"),
    write: Annotated[Path | None, typer.Option("--json", help="where every figure goes")] = None,
    inside: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Profile each case's forward and backward once."""
    if inside:
        return _launch(names or [], only, folder)
    ncu = shutil.which("ncu")
    if ncu is None:
        raise typer.BadParameter("ncu, Nsight Compute's command line, is not on the PATH")
    metrics = [*METRICS.values(), *(f"{STALL}{name}_per_issue_active.ratio" for name in STALLS)]
    command = [ncu, "--clock-control", "none", "--profile-from-start", "off", "--nvtx"]
    command += ["--csv", "--page", "raw", "--print-units", "base", "--metrics", ",".join(metrics)]
    command += [sys.executable, __file__, *(names or []), "--only", only, "--folder", str(folder), "--inside"]
    with Console(stderr=True).status("profiling: each kernel runs several times, under different counters"):
        done = subprocess.run(command, capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode or not lines:
        sys.exit(f"ncu ended with {done.returncode}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    found = list(_rows(list(csv.DictReader(lines))[1:]))  # the first has the units
    _show(found)
    if write is not None:
        write.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _rows(rows: list[dict[str, str]]) -> Iterator[dict[str, str | float]]:
    case = ""
    for row in rows:
        # backward runs in a thread of autograd's, which the range does not reach: it belongs to the last forward
        named = (re.search(r"domain>:(.+?):none", value) for name, value in row.items() if "Range" in name and value)
        case = next((match[1] for match in named if match), case)
        figures = {name: _number(row[metric]) * SCALE.get(name, 1) for name, metric in METRICS.items()}
        every = {name: _number(row[f"{STALL}{name}_per_issue_active.ratio"]) for name in STALLS}
        stalls = {name: waits for name, waits in every.items() if not math.isnan(waits)}
        most = sorted(stalls, key=lambda name: -stalls[name])[:3]
        yield {
            "case": case,
            "kernel": re.sub(r"^void |\(.*", "", row["Kernel Name"]),
            **{name: round(value, 1) for name, value in figures.items()},
            "stalls": ", ".join(f"{name} {stalls[name]:.1f}" for name in most),
        }


def _number(text: str) -> float:
    """NaN where this GPU has no such counter."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return math.nan


def _show(found: list[dict[str, str | float]]) -> None:
    """A table for each case."""
    console = Console(width=None if sys.stdout.isatty() else 240)
    for case, rows in itertools.groupby(found, key=lambda row: row["case"]):
        table = Table(title=str(case), title_justify="left", box=None)
        for name in list(found[0])[1:]:
            table.add_column(name, justify="left" if name in ("kernel", "stalls") else "right")
        for row in rows:
            table.add_row(*(str(value) for value in list(row.values())[1:]))
        console.print(table)


def _launch(names: list[str], only: str, folder: Path) -> None:
    """Under ncu: each case warmed up, then once with the profiler on."""
    import torch

    from cupyops.bench.case import declared, files
    from cupyops.bench.measure import outputs
    from cupyops.bench.timing import leaves

    for case in declared(files(names, folder), only):
        torch.manual_seed(0)
        arguments = case.make(torch.device("cuda"), case.dtype)
        wanted = leaves(arguments)
        for repeat in range(REPEATS + 1):
            watched = _watched(str(case)) if repeat == REPEATS else contextlib.nullcontext
            with watched():
                found = case.ours(*arguments)
            with_grad = outputs(found) if wanted else []
            grads = [torch.ones_like(y) for y in with_grad]
            if grads:
                with watched():
                    torch.autograd.grad(with_grad, wanted, grads, allow_unused=True)
        del arguments, wanted, found, with_grad, grads
        torch.cuda.empty_cache()


def _watched(name: str) -> Callable[[], contextlib.AbstractContextManager[None]]:
    import torch

    @contextlib.contextmanager
    def watch() -> Iterator[None]:
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        with torch.cuda.nvtx.range(name):
            yield
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()

    return watch


if __name__ == "__main__":
    typer.run(main)
