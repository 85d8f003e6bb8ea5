"""Report of a simulated launch: the facts that the terminal, the page and the JSON file show."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from .._kernel.compile.cubin import Resources
from ..simulator import Allocation, Report, SimulatorError
from ..simulator.profile import Counts
from .arguments import Array
from .occupancy import SOURCE as LIMITS
from .occupancy import Occupancy

FIRST = 6  # elements of an array that are shown


@dataclass(frozen=True)
class Remark:
    """A weakness of a line, its meaning and its remedy."""

    kind: str  # "divergence", "coalescing" or "bank conflicts"
    severe: bool
    what: str
    advice: str


@dataclass(frozen=True)
class LineFacts:
    """One line of the source that ran."""

    file: str
    number: int
    text: str
    share: float  # of the launch's warp instructions
    total_share: float  # with those of the functions that were inlined on this line
    counts: Counts
    ptx: tuple[tuple[int, str, int], ...]  # (line of the PTX, text, times that a warp ran it)

    @property
    def threads_per_warp(self) -> float:
        """Threads that are active when a warp runs this line."""
        return self.counts.threads / self.counts.warps if self.counts.warps else 0.0

    @property
    def sectors(self) -> tuple[float, float] | None:
        """Sectors per request to global memory, and how many would do."""
        counts = self.counts
        return _per(counts.sectors, counts.least_sectors, counts.requests)

    @property
    def wavefronts(self) -> tuple[float, float] | None:
        """Passes over shared memory per request, and how many would do."""
        counts = self.counts
        return _per(counts.wavefronts, counts.least_wavefronts, counts.shared_requests)

    def remarks(self) -> list[Remark]:
        """The worst first."""
        found = [_divergence(self), _coalescing(self.sectors), _conflicts(self.wavefronts)]
        return sorted((one for one in found if one is not None), key=lambda one: not one.severe)


@dataclass(frozen=True)
class ArrayFacts:
    """An array after the launch."""

    name: str
    ctype: str
    element: str
    shape: tuple[int, ...]
    changed: int  # elements
    unwritten: int  # elements that nothing has written: not given, and not written by the kernel
    first: tuple[Any, ...]  # None where unwritten
    minimum: Any
    maximum: Any
    nans: int


@dataclass(frozen=True)
class Fault:
    """The error that ended the launch."""

    kind: str
    message: str
    file: str | None
    line: int | None


@dataclass
class Launch:
    """Everything about one launch."""

    file: str
    kernel: str
    arch: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int  # dynamic, in bytes
    check: bool
    seed: int | None
    arguments: list[tuple[str, str, str]]  # (C type, name, what was given)
    sources: dict[str, str]  # file -> text
    resources: Resources | None
    occupancy: Occupancy | None
    output: str = ""
    report: Report | None = None
    fault: Fault | None = None
    arrays: list[ArrayFacts] = field(default_factory=list)
    lines: list[LineFacts] = field(default_factory=list)
    issued: int = 0  # warp instructions

    def hottest(self, most: int) -> list[LineFacts]:
        """The lines where most instructions are issued."""
        ordered = sorted(self.lines, key=lambda line: (-line.share, line.file, line.number))
        return [line for line in ordered[:most] if line.share > 0]

    def as_json(self) -> dict[str, Any]:
        """Plain lists, dicts, strings and finite numbers."""
        facts = {
            name: getattr(self, name)
            for name in ("file", "kernel", "arch", "grid", "block", "shared", "check", "seed", "output")
        }
        report = self.report
        facts["arguments"] = [dict(zip(("type", "name", "given"), argument)) for argument in self.arguments]
        facts["resources"] = asdict(self.resources) if self.resources is not None else None
        facts["occupancy"] = asdict(self.occupancy) | {"limits": LIMITS} if self.occupancy is not None else None
        facts["fault"] = asdict(self.fault) if self.fault is not None else None
        facts["seconds"] = report.seconds if report is not None else None
        facts["thread_instructions"] = report.thread_instructions if report is not None else None
        facts["warp_instructions"] = self.issued if report is not None else None
        facts["arrays"] = [asdict(array) for array in self.arrays]
        facts["lines"] = [_line_as_json(line) for line in self.lines]
        return {name: _plain(value) for name, value in facts.items()}


def _line_as_json(line: LineFacts) -> dict[str, Any]:
    derived = {"threads_per_warp": line.threads_per_warp, "remarks": [asdict(one) for one in line.remarks()]}
    ptx = [dict(zip(("line", "text", "warps"), one)) for one in line.ptx]
    return asdict(line) | derived | {"ptx": ptx}


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become strings."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


# --- gathering ---------------------------------------------------------------------------------------------------


def line_facts(report: Report, sources: Mapping[str, str]) -> tuple[list[LineFacts], int]:
    """The lines that ran, by file and number, and the warp instructions of the launch."""
    profile = report.profile
    assert profile is not None
    issued = profile.issued
    texts = {file: text.splitlines() for file, text in sources.items()}
    facts = []
    for (file, number), line in sorted(profile.by_line().items()):
        lines = texts.get(file, [])
        text = lines[number - 1] if 0 < number <= len(lines) else ""
        instructions = [(profile.listing.instructions[pc], profile.instructions[pc].warps) for pc in line.instructions]
        ptx = tuple((instruction.line, instruction.text, warps) for instruction, warps in instructions)
        shares = line.own.warps / issued, line.total / issued
        facts.append(LineFacts(file, number, text, *shares, line.own, ptx))
    return facts, issued


def array_facts(array: Array, before: np.ndarray, allocation: Allocation) -> ArrayFacts:
    """The array's elements now, compared with the bytes `before`."""
    size = array.storage.itemsize
    now = array.storage.reshape(-1).view(np.uint8).reshape(-1, size) if array.storage.size else np.zeros((0, size))
    changed = int((now != before.reshape(-1, size)).any(axis=1).sum())
    written = np.ones(len(now), np.bool_)
    if allocation.written is not None:
        written = np.asarray(allocation.written.buffer[: now.size].reshape(-1, size).all(axis=1))
    values = array.values().reshape(-1)
    nan = np.asarray(np.not_equal(values, values) & written)  # nothing but NaN differs from itself
    known = values[written & ~nan]
    return ArrayFacts(
        array.name,
        array.ctype,
        array.element,
        array.storage.shape,
        changed,
        int(np.count_nonzero(~written)),
        tuple(value.item() if known_ else None for value, known_ in zip(values[:FIRST], written)),
        known.min().item() if len(known) else None,
        known.max().item() if len(known) else None,
        int(nan.sum()),
    )


def fault_of(error: SimulatorError, sources: Mapping[str, str]) -> Fault:
    """The error, and the innermost line of a known file that its message names."""
    message = str(error)
    for line in message.splitlines()[1:]:
        match = re.fullmatch(r"  (?:inlined at )?(\S+):(\d+)(?: \|  .*)?", line)
        if match is not None and match.group(1) in sources:
            return Fault(type(error).__name__, message, match.group(1), int(match.group(2)))
    return Fault(type(error).__name__, message, None, None)


# --- remarks -----------------------------------------------------------------------------------------------------


def _per(count: int, least: int, requests: int) -> tuple[float, float] | None:
    return (count / requests, least / requests) if requests else None


def _divergence(line: LineFacts) -> Remark | None:
    active = line.threads_per_warp
    if not line.counts.warps or active >= 24:
        return None
    return Remark(
        "divergence",
        active < 8,
        f"{number(active)} of 32 threads active",
        "The other threads of the warp took another path, or have no work. Let whole warps decide alike, "
        "or share the work among all threads.",
    )


def _coalescing(sectors: tuple[float, float] | None) -> Remark | None:
    if sectors is None or sectors[0] < 1.5 * sectors[1]:
        return None
    return Remark(
        "coalescing",
        sectors[0] >= 4 * sectors[1],
        f"{number(sectors[0])} sectors per request, where {number(sectors[1])} would do",
        "Memory comes in sectors of 32 bytes, and of these few bytes are used. Let neighbouring threads touch neighbouring "
        "elements, or bring a tile through shared memory.",
    )


def _conflicts(wavefronts: tuple[float, float] | None) -> Remark | None:
    if wavefronts is None or wavefronts[0] < 1.5 * wavefronts[1]:
        return None
    return Remark(
        "bank conflicts",
        wavefronts[0] >= 4 * wavefronts[1],
        f"{number(wavefronts[0])} wavefronts per request, where {number(wavefronts[1])} would do",
        "Threads of a warp want different words of one bank of shared memory, and wait for one another. Pad each row of "
        "the array by one element, or permute its columns.",
    )


def number(value: float) -> str:
    """Write a number with at most one decimal: 4, 4.5."""
    return f"{value:.1f}".removesuffix(".0")
