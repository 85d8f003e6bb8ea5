"""A run: ceilings, every case, the host's time; with a progress bar."""

from __future__ import annotations

import contextlib
import datetime
import gc
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from .._util.progress import Bar
from ..errors import InputError
from ..testing import Failure
from . import host, measure, timing
from .case import Case
from .results import Results, Row

Keep = Callable[[Results], None]
KEPT_EVERY = 10.0  # seconds between two writings of what has been measured


def run(cases: Sequence[Case], against: Sequence[str], with_host: bool = False, keep: Keep | None = None) -> Results:
    """Measure; an interrupt (Ctrl-C, or SIGTERM) keeps what has been measured until then, and `keep` is given
    it every few seconds, whatever ends the process.

    Raises:
        InputError: there is no GPU.
        KeyboardInterrupt: nothing has been measured yet.
    """
    if not torch.cuda.is_available():
        raise InputError("this machine has no CUDA GPU to measure on; --dry-run compares small cases on the CPU")
    with _without_tf32(), _terminated_as_interrupted(), Bar("measuring", total=len(cases)) as bar:
        clock = timing.GpuClock()
        results = Results(machine(), timing.ceilings(clock), [])
        if with_host:
            results.host = host.times()
        written = time.monotonic()
        try:
            for done, case in enumerate(cases):
                bar.update(done, title=str(case))
                if not sys.stderr.isatty():
                    print(f"{done + 1}/{len(cases)} {case}", file=sys.stderr, flush=True)
                results.rows.append(_row(case, against, clock))
                if keep is not None and time.monotonic() - written > KEPT_EVERY:
                    keep(results)
                    written = time.monotonic()
                gc.collect()
                torch.cuda.empty_cache()
        except KeyboardInterrupt:
            if not results.rows:
                raise
            results.interrupted = True
            print(f"interrupted: {len(results.rows)} of {len(cases)} cases are measured", file=sys.stderr)
    return results


def _row(case: Case, against: Sequence[str], clock: timing.Clock) -> Row:
    try:
        return measure.measure(case, against, clock)
    except Exception as error:  # one case that cannot be made leaves the others
        row = Row.of(case)
        row.wrong["ours"] = measure.told(error)
        return row


@contextlib.contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM is as Ctrl-C, which is heard even where a script has begun us in the background."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(one, signal.default_int_handler) for one in signals]
    try:
        yield
    finally:
        for one, handler in zip(signals, before):
            signal.signal(one, handler)


@contextlib.contextmanager
def _without_tf32() -> Iterator[None]:
    """fp32 is fp32 on all sides."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32 = before


def compile_first(cases: Sequence[Case], part: int, parts: int, against: Sequence[str]) -> list[str]:
    """Compile every `parts`-th case from `part` on, by NVRTC and torch.compile, into the caches; return the failures."""
    failures = []
    with _without_tf32():  # it is part of what inductor's cache looks up
        for case in cases[part::parts]:
            for one in (case, case.beside):
                if one is not None:
                    failures += _tried(one, "kernels", measure.call_once)
            if case.compiled and "compile" in against:
                failures += _tried(case, "torch.compile", measure.compile_only)
    return failures


def _tried(case: Case, what: str, compile: Callable[[Case], None]) -> list[str]:
    try:
        compile(case)
    except Exception as error:
        return [f"{case}: {what}: {measure.told(error)}"]
    finally:
        torch.cuda.empty_cache()
    return []


def in_processes(command: Sequence[str], jobs: int) -> list[str]:
    """Run a command in `jobs` processes, each with its part, such as "2/8", as last argument; return their failures."""
    with contextlib.ExitStack() as stack:
        running = []
        for index in range(jobs):
            out, err = (stack.enter_context(tempfile.TemporaryFile("w+", encoding="utf-8")) for _ in range(2))
            running.append((subprocess.Popen([*command, f"{index}/{jobs}"], stdout=out, stderr=err), out, err))
        failures = []
        for index, (process, out, err) in enumerate(running):
            code = process.wait()
            out.seek(0)
            err.seek(0)
            failures += out.read().splitlines()
            if code:
                last = (err.read().strip().splitlines() or ["no message"])[-1]
                failures.append(f"process {index + 1} of {jobs} ended with {code}: {last[:300]}")
    return failures


def dry_run(cases: Sequence[Case]) -> tuple[list[str], list[str], bool]:
    """Compare the small cases of cases on the CPU: (names of those compared, what is wrong, whether an interrupt ended it).

    Raises:
        KeyboardInterrupt: nothing has been compared yet.
        InputError: nothing was there to be compared.
    """
    twins = {str(twin): twin for case in cases if (twin := case.twin()) is not None}
    compared, wrong, interrupted = [], [], False
    with Bar("comparing", total=len(twins)) as bar:
        for done, (name, twin) in enumerate(twins.items()):
            bar.update(done, title=name)
            try:
                if measure.compare(twin, "cpu"):
                    compared.append(name)
            except Failure as failure:
                wrong.append(str(failure))
            except KeyboardInterrupt:
                if not compared and not wrong:
                    raise
                print(f"interrupted: {done} of {len(twins)} cases are compared", file=sys.stderr)
                interrupted = True
                break
    if not compared and not wrong:
        raise InputError(f"none of {len(cases)} cases has a small twin that can be compared: see Case.small")
    return compared, wrong, interrupted


def machine() -> dict[str, str]:
    """Describe the machine and the versions of the measurement."""
    from .._kernel.compile import backend

    properties = torch.cuda.get_device_properties(0)
    found = {
        "gpu": properties.name,
        "multiprocessors": str(properties.multi_processor_count),
        "driver": _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "clocks now, SM and memory": _output_of(
            "nvidia-smi", "--query-gpu=clocks.sm,clocks.mem", "--format=csv,noheader"
        ),
        "python": sys.version.split()[0],
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "cupy": str(backend.cupy().__version__),
        "nvrtc": ".".join(map(str, backend.nvrtc_version())),
        "liger": _version("liger-kernel"),
        "cupyops": _version("cupyops") or "from source",
        "commit": _output_of("git", "rev-parse", "--short", "HEAD"),
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
    }
    return {name: value for name, value in found.items() if value}


def _output_of(*command: str) -> str:
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
