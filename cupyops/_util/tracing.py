"""Traces of what PyTorch's dispatcher hides: which kernel ran for which operator, by which route, how long.

    >>> with cupyops.trace() as trace:
    ...     y = cupyops.relu(x)
    >>> print(trace)

While no trace is open, `active` is None and the fast path pays one look at it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from . import observed

active: Trace | None = None
_current = threading.local()  # .frame: what this thread is running


@dataclass
class Frame:
    """An operator call under way."""

    operator: str
    route: str
    recorded: bool = False  # whether anything inside it has left a record
    note: str = ""


@dataclass
class Record:
    """One kernel launch, or one operator call that launched none."""

    operator: str
    route: str  # "kernel", "reference", "torch.library", "simulator"
    kernel: str = ""
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    dtype: str = ""
    note: str = ""  # why the reference ran, or why the call is not replayed from a plan
    instructions: int | None = None  # that all threads together have run, in the simulator
    profile: Any = field(default=None, repr=False)  # the counts by line, in `simulate(profile=True)`
    _events: tuple[Any, Any] | None = field(default=None, repr=False)
    _wall: float | None = field(default=None, repr=False)  # seconds that the simulator took

    @property
    def microseconds(self) -> float | None:
        """Device time of the launch, for which this waits; in the simulator its wall time; None where no kernel ran."""
        if self._wall is not None:
            return 1e6 * self._wall
        if self._events is None:
            return None
        start, end = self._events
        end.synchronize()
        return 1000.0 * start.elapsed_time(end)

    def simulated(self, report: Any) -> None:
        """The launch was run by the simulator, which reports on it."""
        self.route, self._wall = "simulator", report.seconds
        self.instructions, self.profile = report.thread_instructions, report.profile


class Trace:
    """The records of one `cupyops.trace()` block; `print` it for a table."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._previous: Trace | None = None

    def __enter__(self) -> Trace:
        global active
        observed.watch()
        self._previous, active = active, self
        return self

    def __exit__(self, *exception: object) -> None:
        global active
        active = self._previous
        observed.watch(-1)

    def launches(self) -> list[Record]:
        """Only the records of kernels."""
        return [record for record in self.records if record.kernel]

    def routes(self) -> set[str]:
        """The routes taken."""
        return {record.route for record in self.records}

    def __str__(self) -> str:
        head = ("operator", "route", "kernel", "grid", "block", "dtype", "instructions", "time (us)", "note")
        rows = [head]
        for r in self.records:
            time = "" if r.microseconds is None else f"{r.microseconds:.1f}"
            count = "" if r.instructions is None else f"{r.instructions:,}"
            rows.append((r.operator, r.route, r.kernel, _dims(r.grid), _dims(r.block), r.dtype, count, time, r.note))
        used = [column for column in range(len(head)) if any(row[column] for row in rows[1:])] or [0, 1]
        widths = {column: max(len(row[column]) for row in rows) for column in used}
        lines = ["  ".join(row[column].ljust(widths[column]) for column in used).rstrip() for row in rows]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def trace() -> Trace:
    """Record every operator call and kernel launch of the process inside a `with` block.

    Returns:
        Trace: prints as a table; `.records` holds a `Record` per launch. On a GPU each has its device time, measured
        with a pair of CUDA events around the launch.
    """
    return Trace()


def _dims(dims: tuple[int, ...]) -> str:
    dims = tuple(dims)
    while len(dims) > 1 and dims[-1] == 1:
        dims = dims[:-1]
    return "x".join(str(dim) for dim in dims)


@contextmanager
def operator(name: str, route: str, dtype: str = "", note: str = "") -> Iterator[None]:
    """Name what this thread runs; a call that launches nothing leaves a record of its own."""
    opened = active
    outer = getattr(_current, "frame", None)
    frame = _current.frame = Frame(name, route, note=note)
    before = len(opened.records) if opened is not None else 0
    try:
        yield
    finally:
        _current.frame = outer
        if opened is not None and (route == "reference" or not frame.recorded):
            opened.records.insert(before, Record(name, route, dtype=dtype, note=note))
        if outer is not None:
            outer.recorded = True


@contextmanager
def launch(kernel: str, grid: tuple[int, ...], block: tuple[int, ...], anchor: Any) -> Iterator[Record]:
    """Record one kernel launch around its body, which may have it `timed`."""
    opened = active
    frame = getattr(_current, "frame", None) or Frame("", "kernel")
    dtype = str(getattr(anchor, "dtype", "")).removeprefix("torch.")
    record = Record(frame.operator, frame.route, kernel, grid, block, dtype, frame.note)
    yield record
    if opened is not None:
        opened.records.append(record)
        frame.recorded = True


@contextmanager
def timed(record: Record | None) -> Iterator[None]:
    """CUDA events on the current stream around the body, for the record's time; none while a graph is being captured."""
    if record is None or torch.cuda.is_current_stream_capturing():
        yield
        return
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    yield
    end.record()
    record._events = (start, end)
