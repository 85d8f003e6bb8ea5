"""Calls whose sizes leave every remainder modulo 16: a kernel that takes several elements at a time has a tail for each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from .call import Call
from .case import Case
from .hazard import NotApplicable

MODULUS = 16  # elements of a byte in the widest load of a thread
_MOST = 200  # calls of which the reference is asked
_LARGE, _SMALL = 64, 7  # a size above the one becomes the other, where it is another size that is varied
_ELEMENTS, _LAST = "number of elements", "last size"
_UNITY = 2  # the least size that is tried: 1 is broadcast


class Remainders:
    """The remainders that some calls have left: of the largest tensor's number of elements, and of its last size."""

    def __init__(self) -> None:
        self.met: dict[str, set[int]] = {_ELEMENTS: set(), _LAST: set()}

    def add(self, call: Call) -> None:
        """The call has been made."""
        for what, number in _numbers(call).items():
            self.met[what].add(number)

    def lacks(self, call: Call) -> bool:
        """True if the call has a remainder that no call has had."""
        return any(number not in self.met[what] for what, number in _numbers(call).items())

    @property
    def are_all(self) -> bool:
        """True if every remainder was met."""
        return all(len(met) == MODULUS for met in self.met.values())

    def __str__(self) -> str:
        return f"remainders modulo {MODULUS} met: " + "; ".join(
            f"{what} {_enumerate(m)}" for what, m in self.met.items()
        )


def _numbers(call: Call) -> dict[str, int]:
    largest = max(call.all_tensors(), key=Tensor.numel, default=torch.empty(()))
    return {_ELEMENTS: largest.numel() % MODULUS, _LAST: (*largest.shape, 0)[largest.dim() - 1] % MODULUS}


def _enumerate(met: set[int]) -> str:
    return "all" if len(met) == MODULUS else ", ".join(map(str, sorted(met))) or "none"


def other_remainders(case: Case, remainders: Remainders) -> Iterator[Call]:
    """Calls, which the reference takes, of remainders that have not been met."""
    for call in itertools.islice(_candidates(case), _MOST):
        if remainders.are_all:
            return
        if remainders.lacks(call) and _is_taken(case, call):
            remainders.add(call)
            yield call


def _candidates(case: Case) -> Iterator[Call]:
    """The call with each size in turn that of 16 neighbours, wherever it occurs, then in one dimension alone.

    The other sizes are odd, where the reference takes them so: the product has every remainder then.
    """
    largest = max(case.call.all_tensors(), key=Tensor.numel, default=torch.empty(0))
    sizes = dict.fromkeys([*largest.shape[::-1], *(n for t in case.call.all_tensors() for n in t.shape)])
    for size in [size for size in sizes if size >= _UNITY]:
        base = case.call
        for other in [other for other in sizes if other != size and other % 2 == 0 and other]:
            base = _first_taken(case, base, [base.resized(other, odd) for odd in _odd(other, base)])
        yield from (base.resized(size, new, numbers) for numbers in (True, False) for new in _neighbours(size))
    for dim in range(1, largest.dim() + 1):
        base = case.call
        for other in [other for other in range(1, largest.dim() + 1) if other != dim]:
            size = largest.shape[-other]
            if size % 2 == 0:
                base = _first_taken(case, base, [base.resized_along(-other, size, odd) for odd in _odd(size, base)])
        yield from (base.resized_along(-dim, largest.shape[-dim], new) for new in _neighbours(largest.shape[-dim]))


def _neighbours(size: int) -> range:
    """16 sizes that follow each other, this one among them."""
    start = max(_UNITY, size - MODULUS // 2)
    return range(start, start + MODULUS) if size >= _UNITY else range(0)


def _odd(size: int, call: Call) -> list[int]:
    """Odd sizes near to an even one, or small for a large one, that the call does not have."""
    near = [_SMALL, _SMALL + 2] if size > _LARGE else [size - 1, size + 1, size + 3, size + 5]
    taken = {n for tensor in call.all_tensors() for n in tensor.shape}
    return [one for one in near if one > 1 and one not in taken][:2]


def _first_taken(case: Case, base: Call, calls: list[Call]) -> Call:
    """The first of the calls that the reference takes, else `base`."""
    return next((call for call in calls if _is_taken(case, call)), base)


def _is_taken(case: Case, call: Call) -> bool:
    try:
        case.expected(call)
    except NotApplicable:
        return False
    return True
