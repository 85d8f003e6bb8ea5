"""Every error that cupyops raises on purpose. Imports nothing of the package."""


class CupyopsError(Exception):
    """Base of every error raised by cupyops."""


class InputError(CupyopsError, ValueError):
    """An argument is wrong: the message names it, what it was and what it should be. Nothing was launched."""


class SourceError(CupyopsError, FileNotFoundError):
    """A .cu file or one of its includes cannot be found."""


class CompileError(CupyopsError, RuntimeError):
    """NVRTC refused a kernel: the message shows the .cu line, the excerpt and the compiler's words."""


class LaunchError(CupyopsError, RuntimeError):
    """A kernel cannot be launched with these arguments, grid or block, or CUDA refused the launch."""


class SimulatorError(CupyopsError, RuntimeError):
    """A kernel that the simulator runs does what it must not; the message names thread, block, address and line."""


class MissingDependencyError(CupyopsError, ImportError):
    """An optional package is absent or broken: the message carries the command that installs it."""
