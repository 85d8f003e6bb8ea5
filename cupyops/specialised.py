"""A kernel with its template values chosen, and where it runs: on a CUDA device, or by another executor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import compiler, signature, source, tracing
from .binary import Binary
from .configuration import Configuration
from .ctype import c_token
from .errors import CompileError, LaunchError
from .loaded import Loaded
from .symbols import Symbol, symbols

# What runs a launch on tensors of a device type; CUDA tensors have `Loaded`. A simulator puts itself here for "cpu", as
# execute(specialised, device, configuration, args); what it returns tells the launch's cost, or is None.
executors: dict[str, Callable[..., Any] | None] = {"cuda": None}


def addressing(device: torch.device) -> Callable[[Tensor], int]:
    """How a kernel on `device` knows a tensor whose pointer lies inside a struct that is passed by value."""
    return getattr(executors.get(device.type), "address", Tensor.data_ptr)


class Specialised:
    """One instance of a kernel, as its text was then; loaded on each device at the first launch there.

    Raises:
        CompileError: it takes no pointer.
    """

    def __init__(
        self,
        text: source.Source,
        name: str,
        declared: Sequence[tuple[str, str]],
        types: dict[str, Any],
        options: tuple[str, ...],
    ) -> None:
        self.source, self.name, self.declared, self.options = text, name, declared, options
        self.values = tuple(types.values())
        self._tokens = {parameter: c_token(value) for parameter, value in types.items()}
        self.loaded: dict[int, Loaded] = {}
        self._lock = threading.Lock()
        pointers = [index for index, (ctype, _) in enumerate(declared) if ctype.endswith("*")]
        if not pointers:
            raise CompileError(f"{self.name}: a kernel without a pointer parameter has nothing to work on")
        self.anchor = pointers[0]  # the argument whose device and stream the launch goes to

    def binary(self, arch: str) -> Binary:
        """Compile, or find, this kernel for `arch`."""
        return compiler.build(self.source, self.name, arch, self.options)

    def arguments(self, binary: Binary) -> tuple[signature.Argument, ...]:
        """What the kernel takes."""
        return signature.join(self.name, self.declared, binary.parameters, self._tokens)

    def symbols(self, binary: Binary) -> dict[str, Symbol]:
        """The `__device__` and `__constant__` variables of the file, by name."""
        return symbols(binary.ptx, self.source)

    def launch(
        self, anchor: Any, configuration: Configuration, args: tuple[Any, ...], record: tracing.Record | None = None
    ) -> Loaded | None:
        """Launch where the tensor `anchor` is; on a GPU, give the kernel as it is loaded there."""
        if not isinstance(anchor, Tensor):
            signature.check_count(self.name, self.declared, args)
            name = self.declared[self.anchor][1]
            raise LaunchError(f"{self.name}: {name} is {anchor!r}; the first pointer of a kernel must be a tensor")
        if anchor.is_cuda:
            loaded = self.on(anchor.get_device())
            loaded.launch(configuration, args, record)
            return loaded
        if (execute := executors.get(anchor.device.type)) is not None:
            report = execute(self, anchor.get_device(), configuration, args)
            if record is not None and report is not None:
                record.simulated(report.thread_instructions, report.seconds)
        elif not anchor.is_meta:
            raise self.nowhere(anchor.device)
        return None

    def nowhere(self, device: torch.device) -> LaunchError:
        """The error of a device on which no kernel runs."""
        return LaunchError(
            f"{self.name}: no way to run a kernel on {device}; the tensors must be on a CUDA GPU, or on the CPU "
            "inside cupyops.simulate()"
        )

    def on(self, device: int) -> Loaded:
        """This kernel, loaded on CUDA device `device`."""
        if torch.cuda._is_in_bad_fork():
            raise LaunchError(
                f"{self.name}: this process was forked from one that had used CUDA, which does not survive that; start "
                'it with the method "spawn" or "forkserver" of multiprocessing'
            )
        with self._lock:
            if device not in self.loaded:
                major, minor = torch.cuda.get_device_capability(device)
                binary = self.binary(f"sm_{major}{minor}")
                alone = bool(self.symbols(binary))
                self.loaded[device] = Loaded(self.name, binary, self.arguments(binary), device, alone)
            return self.loaded[device]
