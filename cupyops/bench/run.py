"""A run: ceilings, every case, the host's time; with a progress bar."""

from __future__ import annotations

import datetime
import gc
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import InputError
from ..testing import Failure
from . import host, measure, timing
from .case import Case
from .results import Results, Row


def run(cases: Sequence[Case], against: Sequence[str], console: Any, with_host: bool = False) -> Results:
    """Measure. Raises `InputError` where there is no GPU."""
    if not torch.cuda.is_available():
        raise InputError("this machine has no CUDA GPU to measure on; --dry-run compares the small cases on the CPU")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    clock = timing.GpuClock()
    results = Results(machine(), timing.ceilings(clock), [])
    if with_host:
        results.host = host.times()
    from rich.progress import track

    for case in track(cases, description="measuring", console=console):
        console.log(str(case), markup=False, highlight=False)
        results.rows.append(_row(case, against, clock))
        gc.collect()
        torch.cuda.empty_cache()
    return results


def _row(case: Case, against: Sequence[str], clock: timing.Clock) -> Row:
    try:
        return measure.measure(case, against, clock)
    except Exception as error:  # one case that cannot be made leaves the others
        row = Row.of(case)
        row.wrong["ours"] = f"{type(error).__name__}: {error}".splitlines()[0][:300]
        return row


def compile_first(cases: Sequence[Case], part: int, parts: int) -> None:
    """Let torch.compile compile every `parts`-th case, from `part` on, for a later process to find."""
    for case in cases[part::parts]:
        if case.compiled:
            try:
                measure.compile_only(case)
            except Exception as error:  # it is told where it is measured
                print(f"{case}: {error}", file=sys.stderr)
        torch.cuda.empty_cache()


def in_processes(arguments: Sequence[str], jobs: int) -> None:
    """`compile_first` in so many processes of this command."""
    command = [sys.executable, "-m", "cupyops", "bench", *arguments]
    running = [
        subprocess.Popen([*command, "--compile-part", f"{index}/{jobs}"], stderr=subprocess.DEVNULL)
        for index in range(jobs)
    ]
    for process in running:
        process.wait()


def dry_run(cases: Sequence[Case], console: Any, most: float = 4e6) -> int:
    """Compare, on the CPU, the cases that move no more than `most` bytes or flops; the number that is wrong."""
    small = [case for case in cases if 0 < max(*case.work("forward"), *case.work("backward")) <= most]
    wrong = 0
    for case in small:
        try:
            measure.compare(case, "cpu")
        except Failure as failure:
            wrong += 1
            console.print(str(failure), markup=False, style="red")
    console.print(
        f"{len(small)} of {len(cases)} cases are small enough for a CPU; {wrong} wrong. No times without a GPU."
    )
    return wrong


def machine() -> dict[str, str]:
    """What was measured on, and with what."""
    from .. import __name__ as package
    from ..compilation import backend

    properties = torch.cuda.get_device_properties(0)
    found = {
        "gpu": properties.name,
        "multiprocessors": str(properties.multi_processor_count),
        "driver": _asked("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "clocks now, SM and memory": _asked("nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader"),
        "python": sys.version.split()[0],
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "cupy": str(backend.cupy().__version__),
        "nvrtc": ".".join(map(str, backend.nvrtc_version())) if hasattr(backend, "nvrtc_version") else "",
        "liger": _version("liger-kernel"),
        package: _version("cupyops") or "from source",
        "commit": _asked("git", "rev-parse", "--short", "HEAD"),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }
    return {name: value for name, value in found.items() if value}


def _asked(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().splitlines()[0] if done.stdout.strip() else ""


def _version(distribution: str) -> str:
    import importlib.metadata

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def folder() -> Path:
    """Where the declarations are: `benchmarks` of the working folder."""
    return Path("benchmarks")
