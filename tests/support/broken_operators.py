"""What the tests of the hazards share: broken operators, of which each is caught by one hazard, and sound ones.

BROKEN = {"misaligned": Broken(wide_loads_always, torch.relu, lambda: [normal(3, 33)])}

@pytest.mark.parametrize("hazard", BROKEN)
def test_caught(hazard):
    BROKEN[hazard].assert_caught_by(hazard)

test_sound.py has the sound ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import cupyops
from cupyops.testing import check, hazards


@dataclass(frozen=True)
class Broken:
    """An operator with one fault.

    Attributes:
        function: the operator.
        reference: the same without the fault; None for a cupyops operator, which has one.
        args: makes the arguments of the sample call.
        kwargs: its keyword arguments.
        backends: where it is tried; None for wherever it can be.
        also: the other hazards that the same fault fails.
    """

    function: Callable[..., Any]
    reference: Callable[..., Any] | None
    args: Callable[[], Sequence[Any]]
    kwargs: dict[str, Any] = field(default_factory=dict)
    backends: str | None = None
    also: tuple[str, ...] = ()

    def assert_caught_by(self, hazard: str) -> None:
        """Of all hazards there are, this one fails, those in `also`, and no other."""
        report = check(
            self.function,
            self.args(),
            self.kwargs,
            reference=self.reference,
            backends=self.backends,
            shrink=False,
            progress=False,
        )
        assert {row.hazard for row in report.failures} == {hazard, *self.also}, f"\n{report}"


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0, requires_grad: bool = True) -> Tensor:
    """Normal values, the same for the same seed."""
    source = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=source, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)


def classes(*shape: int, high: int, seed: int = 0) -> Tensor:
    """int64 values in [0, high)."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(seed))


def _plain(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x * weight)


def _plain_reference(x: Tensor, weight: Tensor) -> Tensor:
    return torch.mul(weight, x).tanh()


# name -> (function, reference, args); small, with tails, and none of the seven whose contracts try every hazard
SOUND: dict[str, tuple[Callable[..., Any], Callable[..., Any] | None, Callable[[], Sequence[Any]]]] = {
    "relu": (cupyops.relu, None, lambda: [normal(3, 37)]),
    "softmax": (cupyops.softmax, None, lambda: [normal(3, 37), -1]),
    "scale_shift": (cupyops.scale_shift, None, lambda: [normal(3, 5, 7), normal(5, 1, seed=1), normal(5, 1, seed=2)]),
    "plain": (_plain, _plain_reference, lambda: [normal(3, 37), normal(37, seed=1)]),
}

SOUND_CALLS = [
    (name, backend)
    for name in SOUND
    for backend in ("reference", "simulator")
    if not (name == "plain" and backend == "simulator")
]


def assert_sound(name: str, backend: str, family: str) -> None:
    """A sound operator fails no hazard of a family, and something was tried."""
    function, reference, args = SOUND[name]
    report = check(
        function,
        args(),
        reference=reference,
        only=hazards_of(family),
        backends=backend,
        shrink=False,
        progress=False,
    )
    assert report.passed, f"\n{report}"


def hazards_of(family: str) -> list[str]:
    """The names of the hazards in one module of `cupyops.testing.families`."""
    return [name for name, one in hazards().items() if one.attempt.__module__.rpartition(".")[2] == family]
