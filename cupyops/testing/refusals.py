"""What a call may raise that a function does not take."""

from __future__ import annotations

import torch

from ..errors import SimulatorError

# what the simulator finds is never meant, but for a kernel's own assert
REFUSALS = (ValueError, TypeError, IndexError, RuntimeError, AssertionError)


def is_clear(error: BaseException) -> bool:
    """Whether an error is a refusal: not what the simulator finds in a kernel, nor what a GPU reports of one."""
    if isinstance(error, SimulatorError):
        return type(error).__name__ in ("Trap", "DeviceAssert")
    return not isinstance(error, (torch.cuda.OutOfMemoryError, getattr(torch, "AcceleratorError", ())))
