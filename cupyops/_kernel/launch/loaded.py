"""A compiled kernel in the memory of a CUDA device, and its launch by the driver."""

from __future__ import annotations

import ctypes
import itertools
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..._util import torch_private, tracing
from ...errors import LaunchError
from ..compile import backend
from ..compile.binary import Binary
from . import driver, fastpath, faults, signature, versions
from .configuration import Configuration, waits
from .shared import Shared

_DEFAULT_SHARED = 48 * 1024  # static and dynamic together; more is to be asked for, by function and device
_ATTRIBUTES = (
    "max_threads_per_block", "shared_size_bytes", "const_size_bytes", "local_size_bytes", "num_regs", "ptx_version",
    "binary_version", "cache_mode_ca", "max_dynamic_shared_size_bytes", "preferred_shared_memory_carveout",
)  # fmt: skip
_DEVICE_TO_DEVICE = 3  # of cudaMemcpyKind

# Loaded for good: a captured graph may launch from a module long after its Kernel is gone.
_modules: dict[Any, Any] = {}
_own = itertools.count()
_reserved: dict[int, int] = {}  # function -> bytes of dynamic shared memory that were asked for
_reserving = threading.Lock()


def _module(binary: Binary, device: int, shared: bool) -> Any:
    """The module of a cubin; the same one for all who ask if it is `shared`, as it may be where it holds no variables."""
    key = (str(binary.path), device) if shared else next(_own)
    if key not in _modules:
        module = backend.cupy().cuda.function.Module()
        module.load_file(str(binary.path))
        _modules.setdefault(key, module)
    return _modules[key]


class Loaded:
    """A kernel on one CUDA device, ready to launch."""

    def __init__(
        self,
        name: str,
        binary: Binary,
        arguments: tuple[signature.Argument, ...],
        device: int,
        alone: bool,
        shared: Shared | None = None,
    ):
        cupy = backend.cupy()
        self.name, self.binary, self.device, self.arguments = name, binary, device, arguments
        self.anchor = next(
            (index for index, one in enumerate(arguments) if one.kind == "pointer" or one.accessor is not None), None
        )
        with faults.told(f"{name} cannot be loaded on cuda:{device}"), cupy.cuda.Device(device):
            self.module: Any = shared.module(device, binary) if alone and shared is not None else None
            if self.module is None:
                self.module = _module(binary, device, shared=not alone)
                if alone and shared is not None:
                    shared.add(device, binary, self.module)
            self.function = self.module.get_function(binary.symbol).ptr
            of = cupy.cuda.driver.funcGetAttribute
            self._threads = of(cupy.cuda.driver.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, self.function)
            self._static = of(cupy.cuda.driver.CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, self.function)
        self._slots: list[tuple[Any, Any, int]] = []  # spare parameter buffers, one in use per launch under way
        self.entry = fastpath.entry(arguments, device, self.function, self._slots, self._new_slot)

    def launch(self, configuration: Configuration, args: Sequence[Any], record: tracing.Record | None = None) -> None:
        """Check everything, make the device current, and launch on its current stream."""
        given, args = (
            args,
            signature.resolved(self.name, self.arguments, args),
        )  # copies live until it has been launched
        buffer, pointers, address = self._new_slot()
        where = f"{self.name} with {configuration} on cuda:{self.device}"
        with faults.told(where), self._current():
            values = signature.checked(self.name, self.arguments, args, self.device)  # which may encode tensor maps
            struct.pack_into(signature.layout(self.arguments)[0], buffer, 0, *values)
            self._check(configuration, where)
            self._reserve(configuration.shared)
            self._check_residency(configuration, where)
            stream = torch_private.current_stream(self.device)
            shape = *configuration.grid, *configuration.block, configuration.shared
            with faults.awaited(where, self.device), tracing.timed(record):
                driver.launcher(configuration)(self.function, *shape, stream, address, 0)
        versions.raise_written(self.arguments, given)

    def attributes(self) -> dict[str, int]:
        """Attributes of the function as CUDA tells them, by CuPy's names."""
        driver_ = backend.cupy().cuda.driver
        names = {name: f"CU_FUNC_ATTRIBUTE_{name.upper()}" for name in _ATTRIBUTES}
        with self._current():
            return {one: driver_.funcGetAttribute(getattr(driver_, name), self.function) for one, name in names.items()}

    def read(self, symbol: str, size: int) -> Tensor:
        """The bytes of a variable of the module, copied on the current stream."""
        copy = torch.empty(size, dtype=torch.uint8, device=f"cuda:{self.device}")
        with self._variable(symbol) as address:
            self._copy(copy.data_ptr(), address, size)
        return copy

    def write(self, symbol: str, content: Tensor) -> None:
        """Set the bytes of a variable of the module, on the current stream."""
        there = content.to(f"cuda:{self.device}").contiguous()
        with self._variable(symbol) as address:
            self._copy(address, there.data_ptr(), there.numel())

    @contextmanager
    def _current(self) -> Iterator[None]:
        """The device is the current one inside."""
        with torch.cuda.device(self.device):
            # a thread that has made no CUDA call yet has no context; CuPy's runtime gives it one
            backend.cupy().cuda.Device(self.device).use()
            yield

    @contextmanager
    def _variable(self, symbol: str) -> Iterator[int]:
        with faults.told(f"{symbol} of {self.name} on cuda:{self.device}"), self._current():
            yield backend.cupy().cuda.driver.moduleGetGlobal(self.module.ptr, symbol)

    def _copy(self, to: int, source: int, size: int) -> None:
        stream = torch_private.current_stream(self.device)
        backend.cupy().cuda.runtime.memcpyAsync(to, source, size, _DEVICE_TO_DEVICE, stream)

    def _check(self, configuration: Configuration, where: str) -> None:
        """Refuse a configuration that this device has no room for."""
        properties = torch.cuda.get_device_properties(self.device)
        limit = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
        if self._static + configuration.shared > limit:
            static = f" and {self._static} of its own" if self._static else ""
            raise LaunchError(f"{where}: {configuration.shared} bytes of shared memory{static}, the device has {limit}")
        if configuration.threads > self._threads:
            raise LaunchError(
                f"{where}: a block of {configuration.threads} threads, the kernel can have {self._threads}: that many its "
                "registers or __launch_bounds__ allow"
            )
        if configuration.overlap and properties.major >= 9 and not waits(self.binary.ptx):
            raise LaunchError(
                f"{where}: the kernel does not wait for the grid before it; write griddepcontrol.wait into it"
            )
        if configuration.cluster is not None and properties.major < 9:
            raise LaunchError(
                f"{where}: clusters need compute capability 9.0, the device has {properties.major}.{properties.minor}"
            )

    def _check_residency(self, configuration: Configuration, where: str) -> None:
        """Refuse a grid or cluster whose blocks must run at the same time and cannot."""
        if configuration.cluster is not None:
            x, y, z = configuration.cluster
            held = driver.most_clusters(self.function, configuration) * x * y * z
            if not held:
                raise LaunchError(f"{where}: the device has no room for one such cluster; take a smaller one, or block")
        elif configuration.cooperative:
            per = backend.cupy().cuda.driver.occupancyMaxActiveBlocksPerMultiprocessor
            held = per(self.function, configuration.threads, configuration.shared)
            held *= torch.cuda.get_device_properties(self.device).multi_processor_count
        if configuration.cooperative and configuration.blocks > held:
            raise LaunchError(
                f"{where}: {configuration.blocks} blocks, of which the device runs {held} at the same time; a cooperative "
                "launch needs all of them at once: take fewer, each doing more"
            )

    def _reserve(self, shared: int) -> None:
        """Dynamic shared memory that with the static is more than 48 KB is to be asked for."""
        with _reserving:
            if shared > _reserved.get(self.function, _DEFAULT_SHARED - self._static):
                calls = backend.cupy().cuda.driver
                calls.funcSetAttribute(self.function, calls.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, shared)
                _reserved[self.function] = shared

    def _new_slot(self) -> tuple[Any, Any, int]:
        """A buffer for the parameters, and the array of pointers into it that cuLaunchKernel reads."""
        letters, offsets = signature.layout(self.arguments)
        buffer = ctypes.create_string_buffer(struct.calcsize(letters))
        pointers = (ctypes.c_void_p * len(offsets))(*(ctypes.addressof(buffer) + offset for offset in offsets))
        return buffer, pointers, ctypes.addressof(pointers)
