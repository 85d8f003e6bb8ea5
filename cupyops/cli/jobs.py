"""Ahead-of-time compilation: every instance that the kernels declare, for each architecture, in several processes.

A compiled kernel is an entry of the kernel cache (`cache.write_entry`), wherever it is written: any folder of
entries can be named in `CUPYOPS_CUBIN_PATH`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path

from .._kernel.compile import architecture, cache, compiler
from .._kernel.compile.source import Source
from .._kernel.kernel import Kernel
from ..errors import CompileError, CupyopsError

# One of each major architecture from Turing on, and the minors that add instructions or shared memory.
ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")


@dataclass(frozen=True)
class Job:
    """One instance of a kernel, for one architecture."""

    source: Source
    name: str  # "relu_fwd<float>"
    arch: str
    options: tuple[str, ...]

    @property
    def stem(self) -> str:
        """The entry's file name, without its suffix."""
        return compiler.entry_name(self.source, self.name, self.arch, self.options)


@dataclass(frozen=True)
class Outcome:
    """Result of a job: `size` bytes of cubin, or an error."""

    job: Job
    seconds: float
    size: int = 0
    error: str = ""
    found: bool = False  # an entry was there already


def plan(kernels: Iterable[Kernel], archs: Iterable[str]) -> list[Job]:
    """The jobs of all declared instances, without doubles, in the order of files and names.

    A kernel that has a specific target is compiled for that alone, where one of `archs` can run it.

    Raises:
        InputError: a kernel has a template parameter whose values are not declared.
        SourceError: a kernel's file is not found.
    """
    archs = list(archs)
    jobs = {
        job.stem: job
        for kernel in kernels
        for name in kernel.instances()
        for arch in archs
        if (target := architecture.target(kernel.arch, arch)) is not None
        for job in (Job(kernel.source, name, target, kernel.options),)
    }
    return sorted(jobs.values(), key=lambda job: (job.source.name, job.name))


def compile_one(job: Job, folder: Path) -> Outcome:
    """Compile one job into `folder`, unless its entry is there."""
    start = time.perf_counter()
    try:
        present = cache.read_entry(folder, job.stem)
        if present is None:
            binary, cubin = compiler.compile(job.source, job.name, job.arch, job.options)
            cache.write_entry(folder, job.stem, binary, cubin)
            size = len(cubin)
        else:
            assert present.path is not None
            size = present.path.stat().st_size
    except (CupyopsError, OSError) as error:
        return Outcome(job, time.perf_counter() - start, error=str(error))
    return Outcome(job, time.perf_counter() - start, size, found=present is not None)


def _leave_interrupts_to_the_parent() -> None:
    """Ctrl-C reaches all processes of a terminal: each is to finish the job that it has, and say nothing of its own."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def run(jobs: list[Job], folder: Path, processes: int | None = None) -> Iterator[Outcome]:
    """Compile `jobs` into `folder`; outcomes in the order in which they come.

    Raises:
        CompileError: one of the processes was killed; what was compiled before is there.
    """
    processes = max(1, min(processes or os.cpu_count() or 1, len(jobs)))
    # not fork: PyTorch has threads. A fork server imports PyTorch once, not once per process.
    method = "forkserver" if "forkserver" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload([__name__])
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_leave_interrupts_to_the_parent)
    try:
        for future in as_completed([pool.submit(compile_one, job, folder) for job in jobs]):
            yield future.result()
    except BrokenProcessPool as error:
        raise CompileError(
            f"one of {processes} compiling processes was killed, for want of memory perhaps: "
            f"take --jobs {processes // 2 or 1}"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)
