"""Where the operators run, and which of the database's samples there is time for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

import cupyops

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
DTYPES = (*FLOATING, torch.int64, torch.complex64)


@dataclass(frozen=True)
class Backend:
    """One way to run an operator.

    Attributes:
        name: for tests and tables.
        device: of the tensors.
        most: how many samples of one operator and kind are tried at most, by dtype; a dtype that is not named: all.
        most_derivatives: the same for the suites that differentiate, where one sample is many calls.
        has_kernels: whether floating-point calls launch some.
        kernels_only: whether samples for which there can be no kernel are left to the other backends.
    """

    name: str
    device: torch.device
    most: dict[torch.dtype, int] = field(default_factory=dict)
    most_derivatives: int = 64
    has_kernels: bool = True
    kernels_only: bool = False

    def running(self) -> AbstractContextManager[Any]:
        """What calls are made in."""
        return cupyops.simulate() if self.name == "simulator" else nullcontext()

    def describe(self) -> str:
        """What a reader of the figures must know."""
        name = lambda dtype: str(dtype).removeprefix("torch.")
        dtypes = ", ".join(map(name, FLOATING if self.kernels_only else DTYPES))
        limits = ", ".join(f"{most} in {name(dtype)}" for dtype, most in self.most.items())
        limits = f" Of an operator's samples of one kind at most {limits}, drawn at random." if limits else ""
        derivatives = f"The suites from gradcheck on: at most {self.most_derivatives} samples, in float64."
        return f"Dtypes: {dtypes}.{limits} {derivatives}"


BACKENDS = (
    Backend("reference", torch.device("cpu"), most_derivatives=24, has_kernels=False),
    Backend(
        "simulator",
        torch.device("cpu"),
        {torch.float16: 12, torch.bfloat16: 12, torch.float32: 60, torch.float64: 12},
        most_derivatives=3,
        kernels_only=True,
    ),
    Backend("gpu", torch.device("cuda"), dict.fromkeys(DTYPES, 240)),
)


NOT_DRAWN = "not drawn, to save time"


def drawn(samples: Sequence[Any], most: int | None) -> tuple[list[Any], list[Any]]:
    """(at most so many of them, the same ones each time; the others).

    At random, since they come as a product of lists: every sixth of max_pool2d's has one and the same last argument.
    """
    if most is None or len(samples) <= most:
        return list(samples), []
    chosen = set(random.Random(0).sample(range(len(samples)), most))
    parts: tuple[list[Any], list[Any]] = [], []
    for index, sample in enumerate(samples):
        parts[index not in chosen].append(sample)
    return parts
