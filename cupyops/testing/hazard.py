"""A hazard: one way in which operators have gone wrong, and the function that tries it."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

Attempt = Callable[[Any], str | None]  # of a `Case`, which is made of what is defined here; may say what was tried


class Failure(AssertionError):
    """Finding of a hazard: the message says where, what was found and what was expected."""


class InferenceFails(Failure):
    """A call ends in an error where no gradient is wanted, and in none where one is."""


@contextmanager
def told(where: str) -> Iterator[None]:
    """A `Failure` inside begins with `where`."""
    try:
        yield
    except Failure as failure:
        raise type(failure)(f"{where}: {failure}") from failure


class NotApplicable(Exception):
    """Reason why a hazard cannot be tried on a call."""


@dataclass(frozen=True)
class Hazard:
    """One row of a report.

    Attributes:
        name: as it is asked for and reported.
        expectation: what must happen.
        attempt: tries it on a case; raises `Failure` where the operator fails, `NotApplicable` where it cannot be tried.
            What it returns, if anything, says what was tried.
        backends: where there is something to try: "reference", "simulator", "gpu".
        launches: whether what passes must have launched a kernel, unless an error or nothing at all may be what is right.
    """

    name: str
    expectation: str
    attempt: Attempt
    backends: tuple[str, ...]
    launches: bool = True


# in the order of a report
FAMILIES = (
    "values",
    "layouts",
    "sizes",
    "arguments",
    "gradients",
    "derivatives",
    "compilers",
    "modes",
    "memory",
    "launches",
    "devices",
)

_hazards: dict[str, Hazard] = {}

EVERYWHERE = ("reference", "simulator", "gpu")
KERNELS = ("simulator", "gpu")
GPU = ("gpu",)


def hazard(expectation: str, backends: tuple[str, ...] = EVERYWHERE, launches: bool = True) -> Callable[..., Attempt]:
    """Make a hazard of a function, under the function's name."""

    def register(attempt: Attempt) -> Attempt:
        name = attempt.__name__
        assert name not in _hazards, name
        _hazards[name] = Hazard(name, expectation, attempt, backends, launches)
        return attempt

    return register


def hazards() -> dict[str, Hazard]:
    """Every hazard, by name, in the order of a report."""
    for family in FAMILIES:
        importlib.import_module(f".families.{family}", __package__)  # they register themselves, when first imported
    return dict(sorted(_hazards.items(), key=lambda item: FAMILIES.index(family_of(item[1]))))


def family_of(one: Hazard) -> str:
    """The module of `families` that has it."""
    return one.attempt.__module__.rpartition(".")[2]
