"""NVRTC's PTX on the CPU: kernels run, and are checked, where there is no GPU.

PTX text, NumPy buffers and a launch go in; the buffers as the kernel left them, or an error that names the line, come out.
Nothing here knows of PyTorch, CuPy or the rest of the package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import (
    BarrierFault,
    Deadlock,
    DeviceAssert,
    InvalidPtx,
    LaunchRefused,
    Misaligned,
    OutOfBounds,
    Race,
    SimulatorError,
    StepLimit,
    Trap,
    Uninitialized,
    UnsupportedInstruction,
    WarpFault,
)
from .memory import Allocation, Memory
from .tensormap import TensorMap

if TYPE_CHECKING:
    from .program import MAX_STEPS, Pointer, Program, Report

__all__ = [
    "MAX_STEPS",
    "Allocation",
    "BarrierFault",
    "Deadlock",
    "DeviceAssert",
    "InvalidPtx",
    "LaunchRefused",
    "Memory",
    "Misaligned",
    "OutOfBounds",
    "Pointer",
    "Program",
    "Race",
    "Report",
    "SimulatorError",
    "StepLimit",
    "TensorMap",
    "Trap",
    "Uninitialized",
    "UnsupportedInstruction",
    "WarpFault",
]


def __getattr__(name: str) -> Any:
    """Import what runs kernels at first use: on a GPU only the limits of tensor maps are needed."""
    if name in ("MAX_STEPS", "Pointer", "Program", "Report"):
        from . import program

        found = globals()[name] = getattr(program, name)  # so that this is asked once
        return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
