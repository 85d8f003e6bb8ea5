"""NVRTC's PTX on the CPU: kernels run, and are checked, where there is no GPU.

PTX text, NumPy buffers and a launch go in; the buffers as the kernel left them, or an error that names the line, come out.
Nothing here knows of PyTorch, CuPy or the rest of the package.
"""

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
from .program import MAX_STEPS, Pointer, Program, Report
from .tensormap import TensorMap

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
