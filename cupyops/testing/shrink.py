"""Search from a call that fails for the smallest one that fails the same way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from .call import Call
from .case import Case
from .hazard import NotApplicable

_SECONDS = 20.0  # that the search may take

Fails = Callable[[Case], bool]


def smallest(case: Case, fails: Fails) -> Call:
    """The smallest call found: sizes are made smaller, one at a time, wherever they occur."""
    call, deadline = case.call, time.monotonic() + _SECONDS
    progressing = True
    while progressing:
        progressing = False
        for size in sorted({n for t in call.all_tensors() for n in t.shape if n > 1}, reverse=True):
            for smaller in _smaller_sizes(size):
                if time.monotonic() > deadline:
                    return call
                candidate = call.resized(size, smaller)
                if is_valid(case, candidate) and fails(case.with_call(candidate)):
                    call, progressing = candidate, True
                    break
    return call


def smaller_calls(case: Case, count: int) -> list[Call]:
    """Up to `count` calls with one size, the same in all, made smaller; none with a size of 1 that was not so before."""
    for size in sorted({n for t in case.call.all_tensors() for n in t.shape if n > count + 1}, reverse=True):
        candidates = [case.call.resized(size, size - k) for k in range(1, count + 1)]
        if all(is_valid(case, candidate) for candidate in candidates):
            return candidates
    return []


def reduced(case: Case, most: int) -> Call:
    """The call with every size above `most` made as small as that, where the reference takes it so."""
    call = case.call
    for size in sorted({n for t in call.all_tensors() for n in t.shape if n > most}, reverse=True):
        candidate = call.resized(size, most)
        if is_valid(case, candidate):
            call = candidate
    return call


def _smaller_sizes(size: int) -> Iterator[int]:
    """1, then ever nearer to `size`."""
    step = size - 1
    while step:
        yield size - step
        step //= 2


def is_valid(case: Case, call: Call) -> bool:
    """True if the reference takes the call."""
    try:
        case.theirs(call)
    except NotApplicable:
        return False
    return True
