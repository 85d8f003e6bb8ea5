"""`cupyops.warmup`: compile and load kernels before they are needed, for a process that captures graphs or may not wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .._kernel.kernel import Kernel, executors
from .._kernel.launch.specialised import Specialised
from .._util.progress import Bar
from ..errors import InputError, LaunchError
from .instances import Instance, Restriction
from .reachable import kernels_of


@dataclass(frozen=True)
class Warmup:
    """Result of `warmup`.

    Attributes:
        device: where; the CPU if there is no GPU.
        kernels: the instances that are ready there now, such as `"relu_fwd<float>"`.
        seconds: how long it took, calls included.
    """

    device: torch.device
    kernels: tuple[str, ...] = ()
    seconds: float = 0.0

    def __str__(self) -> str:
        if not self.seconds:
            return "nothing to load: there is no CUDA GPU, and the references need no kernel"
        return f"{len(self.kernels)} kernels are ready on {self.device}, after {self.seconds:.1f} s"


def warmup(
    *what: Kernel | Callable[..., Any] | torch.optim.Optimizer,
    device: str | int | torch.device | None = None,
    dtypes: torch.dtype | Iterable[torch.dtype] | None = None,
    calls: Sequence[Callable[[], Any]] = (),
    progress: bool | None = None,
    **values: Any,
) -> Warmup:
    """Compile kernels and load them on a device, so that no later call waits for that.

    Call it at the start of a process, above all before a CUDA graph is captured. A kernel in the cache, or compiled ahead,
    is loaded from there. In one process NVRTC compiles one kernel at a time, whatever the number of threads; for hundreds
    of kernels run `python -m cupyops compile` first, which has all cores at work.

    Args:
        what: kernels; operators, built-in or your own; functions, modules, models and optimizers that call them. Of an
            operator those kernels are loaded that its forward and backward mention, by way of the functions that these call.
        device: the GPU; by default the current one. Inside `simulate()` the CPU: kernels are compiled for the simulator.
        dtypes: of the instances for a floating-point type only those for these.
        calls: functions of no arguments that are called once each on the device when all is loaded, to have ready what
            else they need: cuBLAS, the memory of an optimizer, kernels of other libraries.
        progress: show a progress bar; by default if the standard error is a terminal.
        **values: for a template parameter the value, or a tuple of values, of the instances that are wanted, such as
            `T=torch.float16`. A parameter for which the kernel declares no values needs it.

    Returns:
        Warmup: what is ready, after how many seconds; print it. On a machine without a GPU nothing is loaded and nothing is
        called: that is no error, so that the same program runs there.

    Raises:
        InputError: what is given has no kernels, none has such a template parameter or value, or there is no such device.
        LaunchError: a graph is being captured, or a kernel is for another architecture than the device's.
        CompileError: a kernel does not compile.

    Example:
        >>> with cupyops.simulate():  # on a GPU: without this line
        ...     done = cupyops.warmup(cupyops.silu, dtypes=torch.float32)
        >>> sorted(done.kernels)
        ['silu_bwd<float>', 'silu_fwd<float>']
    """
    start = time.perf_counter()
    if not what and not calls:
        raise InputError("warmup() was given nothing, expected kernels, operators or calls")
    if callable(calls) or not all(callable(call) for call in calls):
        raise InputError(f"calls is {calls!r}, expected a list of functions of no arguments")
    wanted = Restriction(dtypes, values).instances(kernel for one in what for kernel in kernels_of(one))
    where = _device(device)
    load = _loader(where)
    if load is None:
        return Warmup(where)
    ready = _load(load, wanted, progress)
    _make(calls, where)
    return Warmup(where, ready, time.perf_counter() - start)


def _device(device: str | int | torch.device | None) -> torch.device:
    """A device with its index. Raises `InputError` where it is not here."""
    if device is None:
        device = torch.device("cpu") if "cpu" in executors or not torch.cuda.is_available() else torch.device("cuda")
    try:
        chosen = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise InputError(f"device is {device!r}, expected a CUDA device: {error}") from error
    if chosen.type == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if chosen.type != "cuda" or (chosen.index or 0) >= count:
        raise InputError(f"device is {str(chosen)!r}, expected the CPU or one of {count} CUDA GPUs")
    return torch.device("cuda", torch.cuda.current_device() if chosen.index is None else chosen.index)


def _loader(device: torch.device) -> Callable[[Specialised], object] | None:
    """Return the function that makes an instance ready on `device`; None where no kernel runs."""
    if device.type == "cpu":
        arch = getattr(executors.get("cpu"), "arch", None)
        return None if arch is None else lambda instance: instance.binary(arch)
    torch.cuda.init()
    with torch.cuda.device(device):
        if torch.cuda.is_current_stream_capturing():
            raise LaunchError("warmup() was called while a CUDA graph is captured; call it before the capture")
    return lambda instance: instance.on(device.index)


def _load(load: Callable[[Specialised], object], wanted: Sequence[Instance], progress: bool | None) -> tuple[str, ...]:
    """The names of the instances, which are ready then. One after the other: so NVRTC would have them anyway."""
    names = []
    with Bar("loading kernels", len(wanted), progress) as bar:
        for kernel, values in wanted:
            instance = kernel.instance(**values)
            load(instance)
            names.append(instance.name)
            bar.update(len(names))
    return tuple(names)


def _make(calls: Sequence[Callable[[], Any]], device: torch.device) -> None:
    """Each call once, waited for."""
    if device.type == "cpu":
        for call in calls:
            call()
        return
    with torch.cuda.device(device):
        for call in calls:
            call()
        torch.cuda.synchronize()
