"""Tests in processes of their own: forks of one that has imported PyTorch and cupyops, which takes two seconds each time."""

from __future__ import annotations

import atexit
import faulthandler
import importlib
import io
import json
import multiprocessing
import os
import queue
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

PRELOADED = ("cupyops._kernel.compile.compiler", "cupyops.cli.app", "pytest", "torch.distributed.tensor")
TESTS = Path(__file__).resolve().parents[1]


def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    return context


def together(
    checks: Callable[[int, int, Path], None], sizes: Sequence[int], folder: Path, preloaded: Sequence[str] = ()
) -> None:
    """Run `checks(rank, size, store)` in each of `size` processes, for one size after another; what fails is raised.

    They are forks of a process that imports `preloaded` once for all of them.
    """
    context = _context()
    results = context.Queue()
    leader = context.Process(target=_lead, args=(checks, sizes, folder, preloaded, results))
    leader.start()
    try:
        found = results.get(timeout=240)
    finally:
        _end(leader)
    assert not found, found


def _lead(
    checks: Callable[[int, int, Path], None], sizes: Sequence[int], folder: Path, preloaded: Sequence[str], results: Any
) -> None:
    context = multiprocessing.get_context("fork")
    found = ""
    try:
        for name in preloaded:
            importlib.import_module(name)
        for size in sizes:
            said = context.Queue()
            store = folder / f"store{size}"
            workers = [context.Process(target=_work, args=(checks, rank, size, store, said)) for rank in range(size)]
            for worker in workers:
                worker.start()
            try:
                found += "\n".join(filter(None, [said.get(timeout=200) for _ in workers]))
            finally:
                for worker in workers:
                    _end(worker)
    except queue.Empty:
        found += f"a process of {size} did not answer; its stacks are in the output"
    except BaseException as error:
        found += "".join(traceback.format_exception(error))
    results.put(found)


def _end(process: Any) -> None:
    """Wait for a process that has done its work; one that does not end by itself is killed."""
    process.join(20)
    process.kill()
    process.join()


def _work(checks: Callable[[int, int, Path], None], rank: int, size: int, store: Path, results: Any) -> None:
    faulthandler.dump_traceback_later(150, file=sys.__stderr__, exit=True)
    try:
        checks(rank, size, store)
        results.put("")
    except BaseException as error:
        results.put("".join(traceback.format_exception(error)))


def run_python(
    *words: object,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: int = 120,
    bare: bool = False,
) -> subprocess.CompletedProcess[str]:
    """`python -m NAME ...`, `python -c CODE ...` or `python FILE ...`, and what it wrote, as `subprocess.run` gives it.

    PyTorch and cupyops are imported before it begins, in the environment of the first such call. With `bare` PyTorch alone
    is: for programs that are about the import of cupyops, or have settings that it reads.
    """
    given, folder = [str(word) for word in words], os.fspath(cwd or os.getcwd())
    environ = dict(os.environ if env is None else env)
    with tempfile.TemporaryDirectory() as kept:
        paths = [str(Path(kept, name)) for name in ("stdout", "stderr")]
        if bare:
            server = _server()
            print(json.dumps([given, folder, environ, paths, timeout]), file=server.stdin, flush=True)
            status = int(server.stdout.readline())
            if status == -signal.SIGALRM:
                raise subprocess.TimeoutExpired(given, timeout)
        else:
            process = _context().Process(target=_run, args=(given, folder, environ, paths))
            process.start()
            process.join(timeout)
            if process.is_alive():
                process.kill()
                raise subprocess.TimeoutExpired(given, timeout)
            status = process.exitcode
        out, err = (Path(path).read_text(encoding="utf-8") for path in paths)
        return subprocess.CompletedProcess(given, status, out, err)


@cache
def _server() -> subprocess.Popen[str]:
    """A process that has imported PyTorch alone, and forks for each line that it reads; it ends with this process."""
    words = [sys.executable, "-c", "import processes; processes.serve()"]
    environ = {**os.environ, "PYTHONPATH": str(TESTS / "support")}
    server = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environ)
    atexit.register(server.communicate)
    return server


def serve() -> None:
    """For each request of `run_python` that comes in a fork that runs it, and then its exit code."""
    import torch  # noqa: F401

    for line in sys.stdin:
        *request, timeout = json.loads(line)
        child = os.fork()
        if not child:
            signal.alarm(timeout)  # which ends it
            os._exit(_status(request))
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


def _status(request: list) -> int:
    """The exit code of a program, which has then run."""
    try:
        _run(*request)
    except SystemExit as end:
        if isinstance(end.code, str):
            print(end.code, file=sys.stderr)
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def torchrun(size: int, *words: object, env: Mapping[str, str], timeout: float = 240) -> list[str]:
    """What each of `size` processes wrote that run a program as `torchrun --standalone` has them; they all must end well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**env, "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_PORT": str(port)}
    each = [
        shared | {"MASTER_ADDR": "127.0.0.1", "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        for rank in range(size)
    ]
    with ThreadPoolExecutor(size) as pool:
        done = list(pool.map(lambda environ: run_python(*words, env=environ, timeout=timeout), each))
    for one in done:
        assert one.returncode == 0, one.stderr
    return [one.stdout for one in done]


def _run(words: list[str], folder: str, environ: dict[str, str], paths: list[str]) -> None:
    for number, path in enumerate(paths, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    encoding, _, errors = environ.get("PYTHONIOENCODING", "utf-8").partition(":")
    sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding, errors or "strict", write_through=True)
    sys.stderr = io.TextIOWrapper(
        io.FileIO(2, "w", closefd=False), encoding, errors or "backslashreplace", write_through=True
    )
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    added = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [*added, *(path for path in sys.path if path and not Path(path).is_relative_to(TESTS))]
    kind, what = words[0], words[1] if len(words) > 1 else ""
    if kind == "-m":
        sys.argv = words[1:]
        sys.path.insert(0, folder)
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *words[2:]]
        sys.path.insert(0, "")
        exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.argv = words
        sys.path.insert(0, str(Path(folder, kind).parent))
        runpy.run_path(kind, run_name="__main__")
