"""Calibration: the same machine code and inputs in the simulator and on a GPU, compared to the bit.

    python tools/calibration.py make build/calibration.npz                              # anywhere: runs the simulator
    python tools/calibration.py compare build/calibration.npz --json build/report.json  # on a Hopper GPU
    python tools/calibration.py table build/report.json                                 # as Markdown

`make` compiles each kernel with NVRTC, runs its PTX in the simulator and keeps cubin, inputs and results. `compare` runs
the very cubins. Each section has a process of its own, since a kernel that hangs or faults takes its context with it;
after such a kernel the section goes on with the next.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from calibrations import table as tables
from calibrations.compared import new_row, on_device, row
from calibrations.device import Device, DeviceError
from calibrations.store import Reader, Writer

_PATIENCE = 40.0  # seconds without a result, after which a section's process is ended
_RESTARTS = 60  # of a section's process

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__)
Stored = Annotated[Path, typer.Argument(help="what `make` wrote")]


@app.command()
def make(path: Path, only: Annotated[str, typer.Option(help="one section")] = "") -> None:
    """Run every case in the simulator and write code, inputs and results. Needs NVRTC, no GPU."""
    import numpy as np
    from calibrations import simulated
    from calibrations.catalogue import sections
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from cupyops._kernel.compile import backend

    writer = Writer()
    writer.contents["nvrtc"] = ".".join(map(str, backend.nvrtc_version()))
    chosen = [section for section in sections() if only in ("", section.name)]
    bar = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*bar) as progress, np.errstate(all="ignore"):
        task = progress.add_task("", total=sum(len(section.cases) for section in chosen))
        for section in chosen:
            simulated.record(section, writer, lambda text: progress.update(task, advance=1, description=text[:60]))
    path.parent.mkdir(parents=True, exist_ok=True)
    writer.write(path)
    errors = _simulator_errors(writer.contents)
    print(f"{path}: {path.stat().st_size / 1e6:.1f} MB, {_cases(writer.contents)} cases, {len(errors)} not simulated")
    print("".join(f"\n{error}" for error in errors), end="\n" if errors else "")


def _cases(contents: dict[str, Any]) -> int:
    return sum(len(section["cases"]) for section in contents["sections"].values())


def _simulator_errors(contents: dict[str, Any]) -> list[str]:
    return [
        f"{name}: {case['name']}: {case['error']}"
        for name, section in contents["sections"].items()
        for case in section["cases"]
        if case.get("error")
    ]


@app.command()
def compare(
    path: Stored,
    json_: Annotated[Path, typer.Option("--json", help="where the report goes")] = Path("build/calibration.json"),
    only: Annotated[str, typer.Option(help="one section")] = "",
) -> None:
    """Run every case on the GPU and write how its results differ from the simulator's."""
    contents = Reader(path).contents
    report: dict[str, Any] = {"nvrtc": contents["nvrtc"], "device": {}, "sections": {}}
    json_.parent.mkdir(parents=True, exist_ok=True)
    for name, section in contents["sections"].items():
        if only not in ("", name):
            continue
        start = time.perf_counter()
        rows, described = _in_processes(path, name, [case["name"] for case in section["cases"]])
        _both_refuse(rows, {case["name"] for case in section["cases"] if case["error"]})
        report["sections"][name] = rows
        report["device"] |= described
        json_.write_text(json.dumps(report), encoding="utf-8")
        wrong = sum(bool(line["mismatches"] and line["how"] == "bits") for line in rows)
        errors = [line for line in rows if line["error"]]
        print(
            f"{name}: {len(rows)} cases, {wrong} differ, {len(errors)} errors, {time.perf_counter() - start:.1f} s",
            flush=True,
        )
        for line in errors[:3]:
            print(f"  {line['name']}: {line['error'][:300]}", flush=True)
    print(tables.markdown(report))


def _both_refuse(rows: list[dict[str, Any]], refused: set[str]) -> None:
    """Where the simulator refuses a kernel and the GPU faults in it, they agree."""
    for line in rows:
        if line["name"] in refused and line["error"].startswith("exit status"):
            line |= {"name": f"{line['name']} (refused by both)", "error": ""}


def _in_processes(path: Path, section: str, names: list[str]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """(the section's lines, the GPU), by as many processes as it takes: each goes on where the last one died."""
    rows: list[dict[str, Any]] = []
    described: dict[str, str] = {}
    for _ in range(_RESTARTS):
        skip = {line["name"] for line in rows}
        if len(skip) == len(names):
            break
        lines, said = _one_process(path, section, skip)
        begun = ""
        for line in lines:
            if "gpu" in line:
                described = line
            elif "begins" in line:
                begun = line["begins"]
            else:
                rows.append(line)
                begun = ""
        if begun or not lines:
            rows.append(new_row(begun or next(name for name in names if name not in skip), "bits") | {"error": said})
    done = {line["name"] for line in rows}
    rows += [
        new_row(name, "bits") | {"error": "not run: too many processes died"} for name in names if name not in done
    ]
    return rows, described


def _one_process(path: Path, section: str, skip: set[str]) -> tuple[list[dict[str, Any]], str]:
    """(what a process printed, line by line, and why it ended)."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(sorted(skip), file)
        file.flush()
        command = [sys.executable, __file__, "section", str(path), section, file.name]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        assert process.stdout is not None
        watch = _Watch(process)
        lines, other = [], []
        for text in process.stdout:
            watch.alive()
            if text.startswith('{"'):
                lines.append(json.loads(text))
            else:
                other.append(text)
        process.wait()
        watch.end()
    why = f"no result for {_PATIENCE:.0f} s" if watch.expired else f"exit status {process.returncode}"
    return lines, f"{why}: {other[-1].strip() if other else ''}"


class _Watch:
    """Ends a process that has printed nothing for too long."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process, self._last, self._over, self.expired = process, time.monotonic(), threading.Event(), False
        threading.Thread(target=self._run, daemon=True).start()

    def alive(self) -> None:
        """It has printed something."""
        self._last = time.monotonic()

    def end(self) -> None:
        """It has ended."""
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(0.5):
            if time.monotonic() - self._last > _PATIENCE:
                self.expired = True
                self._process.kill()
                return


@app.command(hidden=True)
def section(path: Path, name: str, skip: Path) -> None:
    """Print the lines of one section as JSON; of those not in the list `skip`."""
    reader, done = Reader(path), set(json.loads(skip.read_text()))
    gpu = Device()
    print(json.dumps(gpu.describe()), flush=True)
    stored = reader.contents["sections"][name]
    cubin = reader.get(stored["cubin"]).tobytes()
    for case in stored["cases"]:
        if case["name"] in done:
            continue
        print(json.dumps({"begins": case["name"]}), flush=True)
        try:
            line = row(case, reader, on_device(case, cubin, reader, gpu))
        except DeviceError as error:
            if not str(error).startswith("cuTensorMapEncodeTiled"):  # that one leaves the context as it was
                raise
            line = new_row(case["name"], case["how"]) | {"error": str(error)}
        if case["error"]:
            line["error"] = f"simulator: {case['error']}"
        print(json.dumps(line), flush=True)


@app.command()
def table(path: Path) -> None:
    """Print a report as Markdown."""
    print(tables.markdown(json.loads(path.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    app()
