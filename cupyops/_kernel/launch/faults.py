"""Faults of kernels, which CUDA tells late: the call that is refused is not the one at fault.

With `CUPYOPS_DEBUG=1`, read at the import, each launch is waited for, and a fault is an error of the launch that it happened
in. That takes time, and no launch takes the fast path.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..._util import settings
from ...errors import CupyopsError, LaunchError


def asked_for() -> bool:
    """Return True if the environment asks for debugging."""
    return bool(settings.DEBUG.read(default=False))


debug = asked_for()

# Errors that end a CUDA context, in the words of the driver and of PyTorch: faults of a kernel that has run.
_LASTING = (
    "illegal memory access",
    "illegal instruction",
    "misaligned address",
    "address space",
    "invalid program counter",
    "hardware stack error",
    "device-side assert",
    "launch timed out",
    "unspecified launch failure",
)
_HINT = (
    "a kernel has faulted, most likely an earlier one: CUDA tells late. Run with CUPYOPS_DEBUG=1 to have it told by the "
    "launch in which it happens, or run the kernels on the CPU inside cupyops.simulate(), which names thread, address and "
    "line. This process can use CUDA no more: start another"
)


def lasting(error: BaseException) -> bool:
    """Return True if CUDA reports a fault of a kernel that has already run."""
    return any(word in str(error) for word in _LASTING)


def hint(error: BaseException) -> str:
    """Advise on a fault of an earlier kernel, for the end of a message; empty where the error is this call's own."""
    return f"\n  {_HINT}" if lasting(error) else ""


@contextmanager
def told(where: str) -> Iterator[None]:
    """Turn CUDA's errors inside into a `LaunchError` of the launch `where`; faults of earlier kernels get a hint."""
    try:
        yield
    except CupyopsError:
        raise
    except Exception as error:  # CuPy's CUDADriverError, which cannot be named before CuPy is imported
        raise LaunchError(f"{where}: {error}{hint(error)}") from error


@contextmanager
def awaited(where: str, device: int) -> Iterator[None]:
    """Wait for the launch made inside, and for what came before it, if `CUPYOPS_DEBUG=1`."""
    if not debug or torch.cuda.is_current_stream_capturing():
        yield
        return
    with told(f"before {where}"):
        torch.cuda.synchronize(device)
    yield
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise LaunchError(
            f"{where}: the kernel ran and faulted: {str(error).splitlines()[0]}\n  Inside cupyops.simulate(), on CPU "
            "tensors, the same launch names thread, address and line. This process can use CUDA no more: start another"
        ) from error
