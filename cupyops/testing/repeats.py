"""Launches that repeat an earlier one of a check, to the byte: simulated once, and then their results written again."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from hashlib import blake2b
from typing import Any

import numpy as np

from .._simulate import Simulation, simulate

_LARGEST = 2**20  # bytes of memory of a launch, and
_MOST = 2**26  # of all results that are remembered

Content = tuple[bytes, bytes | None]  # of an allocation: the bytes, and which of them hold a value

_repeats: Repeats | None = None  # while a check runs


@contextmanager
def remembered() -> Iterator[None]:
    """Simulate launches that are alike once."""
    global _repeats
    before, _repeats = _repeats, Repeats()
    try:
        yield
    finally:
        _repeats = before


def simulation() -> Simulation:
    """The simulator for the calls of a hazard: without a seed a launch depends on its arguments and memory alone."""
    found = simulate()
    found.launching = _repeats
    return found


class Repeats:
    """Report of each launch, and what it has left in memory."""

    def __init__(self) -> None:
        self._known: dict[Hashable, tuple[Any, list[Content | None]]] = {}
        self._left = _MOST

    def __call__(self, program: Any, *launch: Any, progress: Any, **options: Any) -> Any:
        """Launch, or write the results of a launch like it."""
        memory, (*extents, values) = program.memory, launch
        others = memory.variables - {one.number for one in program.variables.values()}  # of other programs
        reached = sorted(memory.allocations.keys() - memory.closed - others)  # tensors, variables, what malloc gave
        allocations = [memory.allocations[number] for number in reached]
        if sum(len(one.buffer) for one in allocations) > min(_LARGEST, self._left):
            return program.launch(*launch, progress=progress, **options)
        before = [_content(one) for one in allocations]
        given = tuple(_by_place(value, reached) for value in values)
        numbers = [number for _, number in given if isinstance(number, bytes)]  # of which one may be an address
        if _has_address((*numbers, *(content for content, _ in before)), others):
            return program.launch(*launch, progress=progress, **options)  # which may see what no key has
        limits = tuple((one.low, one.high, None if one.gaps is None else one.gaps.tobytes()) for one in allocations)
        state = limits, tuple((written, len(content)) for content, written in before)
        digest = blake2b(b"".join(content for content, _ in before)).digest()
        key = program, *extents, given, *options.items(), state, digest
        if key in self._known:
            report, after = self._known[key]
            for allocation, left in zip(allocations, after):
                _restore(allocation, left)
            return report
        report = program.launch(*launch, progress=progress, **options)
        changed = [new if new != old else None for new, old in zip(map(_content, allocations), before)]
        contents = [one[0] for one in changed if one is not None]
        if not _has_address(contents, set(reached)):
            self._known[key] = report, changed
            self._left -= 2 * sum(map(len, contents))
        return report


def _by_place(value: Any, reached: Sequence[int]) -> tuple[Any, Any]:
    """An argument; a pointer by the place of its allocation, since that is another one in each call."""
    if (allocation := getattr(value, "allocation", None)) is not None:
        return reached.index(allocation.number), value.offset
    return type(value), value.to_bytes(16, "little", signed=True) if isinstance(value, int) else bytes(value)


def _content(allocation: Any) -> Content:
    return allocation.buffer.tobytes(), None if allocation.written is None else allocation.written.buffer.tobytes()


def _restore(allocation: Any, content: Content | None) -> None:
    for region, left in zip((allocation, allocation.written), content or ()):
        if left is not None:
            region.buffer[:] = np.frombuffer(left, np.uint8)


def _has_address(contents: Iterable[bytes], numbers: Set[int]) -> bool:
    """Return True if there are 8 bytes that may be an address in one of the allocations, up to its end."""
    from ..simulator.memory import WINDOW, number_of

    words = np.frombuffer(b"".join(one[: len(one) // 8 * 8] for one in contents), np.uint64)
    found = number_of(words[words % WINDOW <= _LARGEST])
    return not numbers.isdisjoint(found[found > 0].tolist())
