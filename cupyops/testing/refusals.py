"""Errors by which a function may refuse a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..errors import SimulatorError
from .hazard import Failure, NotApplicable

# what the simulator finds is never meant, but for a kernel's own assert
REFUSALS = (ValueError, TypeError, IndexError, RuntimeError, AssertionError)


@contextmanager
def unless_refused() -> Iterator[None]:
    """Context that a refusal of a call, or of the reference, ends without an error; findings of a hazard are raised."""
    try:
        yield
    except Failure:
        raise
    except (NotApplicable, *REFUSALS):
        pass


def is_clear(error: BaseException) -> bool:
    """True if an error is a refusal: not what the simulator finds in a kernel, nor what a GPU reports of one."""
    if isinstance(error, SimulatorError):
        return type(error).__name__ in ("Trap", "DeviceAssert")
    return not isinstance(error, (torch.cuda.OutOfMemoryError, getattr(torch, "AcceleratorError", ())))
