"""What a call may raise that a function does not take."""

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
    """What a call refuses inside, or the reference does, ends the block; what a hazard has found is raised."""
    try:
        yield
    except Failure:
        raise
    except (NotApplicable, *REFUSALS):
        pass


def is_clear(error: BaseException) -> bool:
    """Whether an error is a refusal: not what the simulator finds in a kernel, nor what a GPU reports of one."""
    if isinstance(error, SimulatorError):
        return type(error).__name__ in ("Trap", "DeviceAssert")
    return not isinstance(error, (torch.cuda.OutOfMemoryError, getattr(torch, "AcceleratorError", ())))
