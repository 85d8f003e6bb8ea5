"""compute-sanitizer over every kernel: bad accesses, races, unwritten memory and broken barriers, on a GPU.

    python tools/sanitize.py
    python tools/sanitize.py softmax --tool racecheck --dtype float16 --json build/sanitize.json

Each operator runs its samples (tools/operator_samples.py), forward and backward, under each of the four tools, in a
process of its own. Every tensor is an allocation of its own, made by the driver, so that its bounds are the tensor's.
Only what our kernels do counts: three tools look at them alone. initcheck looks at all, since what PyTorch's kernels
write is written too, and its reports of theirs are set aside; it also sees results that were not written whole. What TMA
writes it does not see: under it our kernels are those of a GPU without it, and PyTorch's products are written again.

Two tools report kernels that are right, as they do not follow what orders their accesses: `NOT_FOLLOWED` says which reports
are set aside, and why. The table counts them.

Before all that, each tool is shown a kernel with a fault of its kind. One that does not notice proves nothing.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest.mock
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import gpu
import torch
import typer
from operator_samples import Call, Make, run, samples
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor
from torch.utils._pytree import tree_map_only

import cupyops
from cupyops._kernel.kernel import FLOATING, Kernel

ERRORS = 9  # exit status of compute-sanitizer where it has found some
PLANTED = "planted"  # the name of a job that runs no operator, but a kernel with a fault in it
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATING}

_COMMON = (
    *("--error-exitcode", str(ERRORS), "--print-limit", "100000", "--show-backtrace", "device"),
    *("--destroy-on-device-error", "kernel", "--target-processes", "application-only"),
    *("--launch-timeout", "0"),  # PyTorch takes long to import; what takes too long altogether is ended from here
)
TOOLS: dict[str, tuple[str, ...]] = {
    "racecheck": (),
    "memcheck": ("--padding", "4096", "--report-api-errors", "no"),  # PyTorch asks for what may fail, and copes
    "initcheck": (),
    "synccheck": (),
}
_WITHOUT_TMA = {"capability": 8}
_BY_CUBLAS = "mm", "addmm"  # of `torch`, that operators call
# parts of the names of cuBLAS's kernels. Beside others that it looks at, racecheck ends at one that it does not, of whatever
# program ("The Sanitizer failed to handle a hardware exception", 2025.3), so it looks at them.
_CUBLAS_KERNELS = "nvjet", "xmma", "cutlass"
# Reports that are set aside, by what they name: what orders these accesses or threads the tools do not follow (2025.3), and
# report it of twenty lines of CUDA that do nothing else as well. The simulator follows it, and has nothing to report.
# Nor does racecheck follow a warp that arrives at a named barrier and does not wait (bar.arrive); where both wait, it does.
NOT_FOLLOWED: dict[str, tuple[str, ...]] = {
    "racecheck": (
        r"\badd_shares\(",  # blocks of a cluster that wait for one another at an mbarrier
        r"\battention::consume<[^\0]*\battention::produce<",  # a lane that arrives at one for its warp, after __syncwarp()
        r"\bload_line\([^\0]*::of_columns\(",  # so too
    ),
    # all warps of a block at one named barrier, from two places of the program
    "synccheck": (r"\bin (one_result_wgmma|once_mma)\.cuh:",),
}
_PORTS = 16  # that a compute-sanitizer may take, so that those that run at once do not meet

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console()


@dataclass(frozen=True)
class Report:
    """What came of one operator under one tool.

    `outcome` is "clean", "no sample" (there is none for this GPU and these dtypes), "errors", "failed" (the samples did not
    end well, launched nothing, or there is no summary), "timed out", "refused" (the sanitizer does not run here) or
    "not run".
    """

    operator: str
    tool: str
    outcome: str
    seconds: float = 0.0
    errors: list[str] = field(default_factory=list)  # each as compute-sanitizer has it
    others: int = 0  # reports of kernels that are not ours, or set aside
    kernels: list[str] = field(default_factory=list)  # launched

    @property
    def good(self) -> bool:
        """Nothing was found; or, of a planted fault, that very fault."""
        if self.operator != PLANTED:
            return self.outcome in ("clean", "no sample")
        return self.outcome == "errors" and any(_planted_name(self.tool) in error for error in self.errors)


# --- what compute-sanitizer says ------------------------------------------------------------------------------------

_PREFIX = re.compile(r"^={8,} ?")
_SUMMARY = re.compile(r"(?:ERROR|RACECHECK) SUMMARY: ([\d,]+) (?:error|hazard)s?\b(?! were not)")
_NO_REPORT = re.compile(r"COMPUTE-SANITIZER|\w+ SUMMARY: |Target application returned|.*didn't terminate successfully")
_REFUSED = re.compile(
    r".*(device not supported|unable to find injection|insufficient (permission|driver)|failed to initialize|"
    r"unrecogni[sz]ed option|argument .* for option .* is invalid).*",
    re.IGNORECASE,
)
_IN_A_KERNEL = re.compile(r"\bat .+\+0x[0-9a-f]+|\bat 0x[0-9a-f]+ in ", re.IGNORECASE)


@dataclass(frozen=True)
class Findings:
    """What an output says: reports of ours, how many are of others or set aside, how many the summary counts, a refusal."""

    ours: list[str]
    others: int
    counted: int | None
    refusal: str = ""


def findings(output: str, tool: str, names: Iterable[str]) -> Findings:
    """Read an output. initcheck looks at the kernels of others too; of its reports, ours are those that name a kernel of
    ours, or none at all: a result read unwritten, an error of the tool itself. racecheck looks at cuBLAS's."""
    lines = [_PREFIX.sub("", line, count=1).rstrip() for line in output.splitlines() if _PREFIX.match(line)]
    found = _reports(lines)
    known = re.compile(rf"\b({'|'.join(map(re.escape, names))})\b")
    aside = [re.compile(pattern) for pattern in NOT_FOLLOWED.get(tool, ())]

    def is_ours(report: str) -> bool:
        if _REFUSED.match(report) or any(pattern.search(report) for pattern in aside):
            return False
        of_another = {
            "racecheck": any(name in report for name in _CUBLAS_KERNELS),
            "initcheck": _IN_A_KERNEL.search(report) is not None,
        }
        return known.search(report) is not None or not of_another.get(tool, False)

    ours = [report for report in found if is_ours(report)]
    others = len(found) - len(ours)
    counts = [int(number.replace(",", "")) for number in _SUMMARY.findall("\n".join(lines))]
    counted = max(counts, default=None)
    if counted is not None and counted > len(found):
        ours.append(f"{counted - len(found)} more that were not printed")
    refusal = next((line for line in [*lines, *output.splitlines()] if _REFUSED.match(line)), "")
    return Findings(ours, others, counted, refusal.strip())


def _reports(lines: list[str]) -> list[str]:
    """A report begins at the margin and goes on indented, up to an empty line."""
    found: list[list[str]] = []
    under_way = False
    for line in lines:
        if not line.strip() or _NO_REPORT.match(line):
            under_way = False
        elif line[0].isspace() and under_way:
            found[-1].append(line)
        elif not line[0].isspace():
            found.append([line])
            under_way = True
    return ["\n".join(report) for report in found]


# --- in the process that is looked at -------------------------------------------------------------------------------


def run_samples(operator: str, tool: str, dtypes: Iterable[torch.dtype], device: str) -> tuple[int, list[str]]:
    """Run the samples of an operator; on "cpu" in the simulator. (How many there are here; the kernels launched.)

    In one thread: that of autograd may still let go of tensors when the process ends, which aborts where the interpreter
    has ended before.
    """
    count = 0
    with (
        _kernels_on(device),
        _nothing_by_tma() if tool == "initcheck" else contextlib.nullcontext(),
        torch.autograd.set_multithreading_enabled(False),
        cupyops.never_slower(False),
        cupyops.trace() as trace,
    ):
        for name, call in samples():
            for dtype in dtypes if name == operator else ():
                results = run(_there(call, device), Make(dtype, device))
                count += bool(results)
                for result in results:
                    _read(result)
    return count, sorted({record.kernel for record in trace.launches()})


@contextlib.contextmanager
def _kernels_on(device: str) -> Iterator[None]:
    """Kernels run on the GPU, and are waited for; or in the simulator."""
    with cupyops.simulate() if device == "cpu" else contextlib.nullcontext():
        yield
    if device != "cpu":
        torch.cuda.synchronize()


@contextlib.contextmanager
def _nothing_by_tma() -> Iterator[None]:
    """Kernels of ours as for a GPU without TMA; what cuBLAS has written by TMA is written again where it lies."""

    def written_again(product: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def multiply(*args: Any, **options: Any) -> Tensor:
            result = product(*args, **options)
            return result.mul_(1)

        return multiply

    with contextlib.ExitStack() as stack:
        stack.enter_context(cupyops.testing.assume_gpu(**_WITHOUT_TMA))
        for name in _BY_CUBLAS:
            stack.enter_context(unittest.mock.patch.object(torch, name, written_again(getattr(torch, name))))
        yield


def _there(call: Call, device: str) -> Call:
    """The same sample, made on the CPU and copied: no kernel of PyTorch's lays its tensors out."""
    return lambda make: tree_map_only(Tensor, lambda t: gpu.placed(t, device), call(Make(make.dtype, runs_on=device)))


def _read(result: Tensor) -> None:
    """Copy a result to the CPU, byte by byte, where its memory is its alone: each is to have been written."""
    if result.untyped_storage().nbytes() == result.numel() * result.element_size():
        gpu.placed(result, "cpu")


_FAULTY = {
    "memcheck": "{ x[n + threadIdx.x] = 1.0f; }",
    "racecheck": "{ __shared__ float s[64]; s[threadIdx.x] = x[threadIdx.x]; x[threadIdx.x] = s[63 - threadIdx.x]; }",
    "initcheck": "{ x[threadIdx.x] = x[threadIdx.x] + 1.0f; }",
    "synccheck": """{
  __shared__ float s[64];
  for (int first = 0; first < n; first += 64) {
    if (first + threadIdx.x < n) {  // not so for part of the second warp, at the end
      s[threadIdx.x] = x[first + threadIdx.x];
      __syncthreads();
    }
    if (threadIdx.x == 0) x[first] = s[0] + s[40];
    __syncthreads();
  }
}""",
}


def run_planted(tool: str, device: str) -> None:
    """Launch the kernel with a fault that this tool is to notice."""
    name, size = _planted_name(tool), 64 * 3 + 48
    kernel = Kernel(f"__global__ void {name}(float* x, int n) {_FAULTY[tool]}\n", name)
    with _kernels_on(device):
        x = torch.empty(size, device=device) if tool == "initcheck" else gpu.placed(torch.zeros(size), device)
        kernel[1, 64](x, size)


def _planted_name(tool: str) -> str:
    return f"planted_for_{tool}"


# --- the process that looks -----------------------------------------------------------------------------------------


class Sanitizer:
    """Runs operators under compute-sanitizer, each in a process of its own.

    Args:
        path: of compute-sanitizer.
        dtypes: names, such as "float32".
        limit: seconds for one process.
        device: "cuda"; or "cpu", where the samples run in the simulator, to try this tool itself.
    """

    def __init__(self, path: str, dtypes: list[str], limit: float, device: str = "cuda") -> None:
        self.path, self.dtypes, self.limit, self.device = path, dtypes, limit, device
        self._names = sorted({kernel.base for kernel in gpu.built_in()})

    def examine(self, operator: str, tool: str, number: int = 0) -> Report:
        """One operator, or `PLANTED`, under one tool. `number` is another for each that runs at the same time."""
        start = time.monotonic()
        names = [_planted_name(tool)] if operator == PLANTED else self._names
        with tempfile.TemporaryDirectory() as folder:
            log = Path(folder) / "log"
            command = self._command(operator, tool, number, names, log)
            status, output = _in_group(command, self.limit)
            output += "\n" + (log.read_text(errors="replace") if log.exists() else "")
        report = _judged(Report(operator, tool, ""), status, output, findings(output, tool, names))
        return replace(report, seconds=round(time.monotonic() - start, 1))

    def _command(self, operator: str, tool: str, number: int, names: list[str], log: Path) -> list[str]:
        # the mangled name of a kernel has its length before it
        looked_at = [f"{len(name)}{name}" for name in names] + [*(_CUBLAS_KERNELS if tool == "racecheck" else ())]
        filters = [part for name in looked_at for part in ("--kernel-name", f"kns={name}")]
        only = [] if tool == "initcheck" else filters
        ports = ["--port", str(49152 + _PORTS * number), "--max-connections", str(_PORTS)]
        child = [sys.executable, __file__, operator, "--child", "--tool", tool, "--device", self.device]
        dtypes = [part for dtype in self.dtypes for part in ("--dtype", dtype)]
        options = [*_COMMON, *TOOLS[tool], *ports, *only, "--log-file", str(log)]
        return [self.path, "--tool", tool, *options, *child, *dtypes]


_NO_CACHING = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}


def _in_group(command: list[str], limit: float) -> tuple[int | None, str]:
    """(exit status, None where the time ran out; what was printed). What the command started ends with it."""
    with tempfile.TemporaryFile("w+", errors="replace") as printed:
        process = subprocess.Popen(
            command, stdout=printed, stderr=subprocess.STDOUT, env=os.environ | _NO_CACHING, start_new_session=True
        )
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            ended = process.poll()
            if ended is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        printed.seek(0)
        return ended, printed.read()


def _judged(report: Report, status: int | None, output: str, found: Findings) -> Report:
    ended = _last_word(output)
    count, kernels = ended or (0, [])
    report = replace(report, others=found.others, kernels=kernels)
    if status is None:
        return replace(report, outcome="timed out", errors=found.ours)
    if found.refusal and ended is None:
        return replace(report, outcome="refused", errors=[found.refusal])
    if found.ours and found.counted != 0:
        return replace(report, outcome="errors", errors=found.ours)
    if ended is None or found.counted is None or status not in (0, ERRORS) or found.ours:
        why = f"exit status {status}, {'no summary' if found.counted is None else f'{found.counted} errors counted'}"
        return replace(report, outcome="failed", errors=[why, *found.ours, "\n".join(output.splitlines()[-60:])])
    if count and not kernels:
        return replace(report, outcome="failed", errors=[f"{count} samples launched no kernel"])
    return replace(report, outcome="clean" if count else "no sample")


def _last_word(output: str) -> tuple[int, list[str]] | None:
    """How many samples ran, and the kernels launched, as the process says where it ends well."""
    said = [line for line in output.splitlines() if line.startswith('{"samples": ')]
    return tuple(json.loads(said[-1]).values()) if said else None


def examine_all(
    sanitizer: Sanitizer, chosen: list[tuple[str, str]], jobs: int, seconds: float, done: Callable[[Report], Any]
) -> None:
    """Each operator under each tool; hand each report to `done`. What has not begun after so long is not run."""
    end = time.monotonic() + seconds

    def examine(number: int, operator: str, tool: str) -> Report:
        if time.monotonic() > end:
            return Report(operator, tool, "not run", errors=["the time was up"])
        return sanitizer.examine(operator, tool, number)

    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(examine, number, *pair) for number, pair in enumerate(chosen)]
        for future in concurrent.futures.as_completed(futures):
            done(future.result())


# --- the command line -----------------------------------------------------------------------------------------------


def find_sanitizer() -> str | None:
    """compute-sanitizer on the PATH, or where toolkits have it."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [f"{home}/{below}" for home in homes if home for below in ("bin", "compute-sanitizer")]
    return shutil.which("compute-sanitizer") or shutil.which("compute-sanitizer", path=os.pathsep.join(folders))


@app.command()
def main(
    operators: Annotated[list[str] | None, typer.Argument(metavar="[OPERATOR]...", help="By default all.")] = None,
    tool: Annotated[list[str] | None, typer.Option(help=f"Some of {', '.join(TOOLS)}.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help=f"Some of {', '.join(DTYPES)}.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Processes at once.")] = max((os.cpu_count() or 2) // 2, 1),
    minutes: Annotated[float, typer.Option(help="After which no further one is begun.")] = 8.0,
    limit: Annotated[float, typer.Option(help="Seconds for one.")] = 240.0,
    json_: Annotated[Path | None, typer.Option("--json", help="Where the reports go, as they come.")] = None,
    child: Annotated[bool, typer.Option("--child", hidden=True)] = False,
    device: Annotated[str, typer.Option(hidden=True)] = "cuda",
) -> None:
    """Run the samples of the operators under compute-sanitizer. Ends with 1 where that finds anything, 2 where it cannot."""
    every = list(dict.fromkeys(name for name, _ in samples()))
    names = _chosen(operators, [*every, PLANTED] if child else every)
    tools, dtypes = _chosen(tool, TOOLS), _chosen(dtype, DTYPES)
    if child:
        return _child(names[0], tools[0], dtypes, device)
    path = find_sanitizer()
    if path is None:
        _give_up("compute-sanitizer is not on the PATH; it comes with the CUDA toolkit, and CUDA_HOME may say where")
    if device == "cuda":
        if not torch.cuda.is_available():
            _give_up("no CUDA GPU on this machine")
        gpu.compile_ahead(console, names)
    sanitizer = Sanitizer(path, dtypes, limit, device)
    reports = _all(sanitizer, names, tools, jobs, 60 * minutes, json_)
    _show(reports, dtypes)
    if not all(report.good for report in reports):
        raise typer.Exit(1)


def _chosen(given: Iterable[str] | None, possible: Iterable[str]) -> list[str]:
    chosen = list(given or possible)
    if unknown := [name for name in chosen if name not in possible]:
        raise typer.BadParameter(f"{', '.join(unknown)}: expected one of {', '.join(possible)}")
    return chosen


def _give_up(message: str) -> NoReturn:
    console.print(message, markup=False, highlight=False)
    raise typer.Exit(2)


def _child(operator: str, tool: str, dtypes: list[str], device: str) -> None:
    count, launched = 0, list[str]()
    if operator == PLANTED:
        run_planted(tool, device)
    else:
        count, launched = run_samples(operator, tool, [DTYPES[name] for name in dtypes], device)
    print(json.dumps({"samples": count, "kernels": launched}), flush=True)


def _all(
    sanitizer: Sanitizer, names: list[str], tools: list[str], jobs: int, seconds: float, path: Path | None
) -> list[Report]:
    """The planted faults first: where the sanitizer does not run at all, that is said at once."""
    reports: list[Report] = []
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=len(tools) * (1 + len(names)))

        def done(report: Report) -> None:
            reports.append(report)
            progress.update(task, advance=1, description=f"{report.operator}, {report.tool}: {report.outcome}")
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps([asdict(each) for each in reports], indent=1), encoding="utf-8")

        begun = time.monotonic()
        examine_all(sanitizer, [(PLANTED, tool) for tool in tools], jobs, seconds, done)
        if all(report.outcome == "refused" for report in reports):
            progress.stop()
            _give_up(f"compute-sanitizer does not run here: {reports[0].errors[0]}")
        work = {name: sum(name == operator for operator, _ in samples()) for name in names}
        pairs = [(name, tool) for tool in tools for name in sorted(names, key=lambda name: -work[name])]
        examine_all(sanitizer, pairs, jobs, seconds - (time.monotonic() - begun), done)
    return reports


def _show(reports: list[Report], dtypes: list[str]) -> None:
    """A table, then what was found, what the tools are worth, and which kernels ran."""
    tools = list(dict.fromkeys(report.tool for report in reports))
    cells = {(report.operator, report.tool): report for report in reports}
    table = Table("operator", *tools, title=f"compute-sanitizer, {', '.join(dtypes)}")
    for name in dict.fromkeys(report.operator for report in reports if report.operator != PLANTED):
        table.add_row(name, *(_cell(cells[name, tool]) for tool in tools))
    console.print(table)
    for report in reports:
        if report.operator == PLANTED:
            noticed = "noticed" if report.good else f"not noticed ({report.outcome}): its other results prove nothing"
            console.print(f"{report.tool}, a planted fault: {noticed}", markup=False, highlight=False)
        if not report.good:
            for error in report.errors[:3]:
                console.print(f"\n{report.operator}, {report.tool}:\n{_brief(error)}", markup=False, highlight=False)
    _show_kernels(reports, {DTYPES[name] for name in dtypes})


def _cell(report: Report) -> str:
    what = report.outcome if report.outcome != "errors" else f"{len(report.errors)} errors"
    colour = "green" if report.good else "red"
    others = f", {report.others} set aside" if report.others else ""
    return f"[{colour}]{what}[/] {report.seconds:.0f} s{others}"


def _brief(error: str) -> str:
    return "\n".join(f"  {line}" for line in error.splitlines()[:15])


def _show_kernels(reports: list[Report], dtypes: set[torch.dtype]) -> None:
    operators = [report.operator for report in reports]
    own = gpu.built_in(operators)
    declared = {
        kernel.expression(values)
        for kernel in own
        for values in kernel.combinations()
        if dtypes.issuperset(value for value in values if isinstance(value, torch.dtype))
    }
    launched = {name for report in reports for name in report.kernels}
    console.print(f"\n{len(declared & launched)} of the {len(declared)} kernels of these operators were launched")
    if missing := sorted(declared - launched):
        console.print("not launched: " + ", ".join(missing), markup=False, highlight=False)


if __name__ == "__main__":
    app()
