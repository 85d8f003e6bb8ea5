"""A test in several processes, as `torch.distributed` has them."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

PRELOADED = ("cupyops._kernel.compile.compiler", "torch.distributed.tensor")


def together(checks: Callable[[int, int, Path], None], size: int, store: Path, preloaded: Sequence[str] = ()) -> None:
    """Run `checks(rank, size, store)` in each of `size` processes; what fails in any of them is raised."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *preloaded])
    results = context.Queue()
    workers = [context.Process(target=_work, args=(checks, rank, size, store, results)) for rank in range(size)]
    for worker in workers:
        worker.start()
    found = [results.get(timeout=240) for _ in workers]
    for worker in workers:
        worker.join()
    assert not any(found), "\n".join(found)


def _work(checks: Callable[[int, int, Path], None], rank: int, size: int, store: Path, results: object) -> None:
    try:
        checks(rank, size, store)
        results.put("")  # type: ignore[attr-defined]
    except BaseException as error:
        results.put("".join(traceback.format_exception(error)))  # type: ignore[attr-defined]
