"""Errors that the simulator finds, and those of its limits. Each kind of fault is a class of its own."""

from typing import Any

from ..errors import SimulatorError as SimulatorError


class UnsupportedInstruction(SimulatorError):
    """An instruction that the simulator does not know; nothing was run. `at` is that instruction, where it is one."""

    def __init__(self, what: str, at: Any = None) -> None:
        super().__init__(what)
        self.at = at


class InvalidPtx(SimulatorError):
    """Text that is not PTX as NVRTC writes it."""


class LaunchRefused(SimulatorError):
    """A launch that the hardware would refuse: block too large, wrong number or size of arguments."""


class OutOfBounds(SimulatorError):
    """A load, store or atomic outside its allocation."""


class Misaligned(SimulatorError):
    """An access whose address is not a multiple of its size."""


class Uninitialized(SimulatorError):
    """A read of memory that nothing has written."""


class Race(SimulatorError):
    """Two threads touch the same bytes, at least one writes, and nothing orders them."""


class BarrierFault(SimulatorError):
    """Threads of a block wait at different barriers, or for threads that never come."""


class Deadlock(BarrierFault):
    """Every thread that is left waits."""


class StepLimit(SimulatorError):
    """The launch did not end within its limit of steps: an endless loop, or a limit set too low."""


class WarpFault(SimulatorError):
    """A warp-wide instruction is not executed by the lanes that it names."""


class Trap(SimulatorError):
    """The kernel executed `trap`."""


class DeviceAssert(SimulatorError):
    """An `assert` in the kernel failed."""
