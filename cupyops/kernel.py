"""A CUDA kernel as a Python object: specialise, check, launch.

    scale = Kernel("scale.cu", "scale<T>")
    scale[ceil_div(n, 256), 256](x, y, 0.5, n, T=x.dtype)

The first call with given template values compiles (or finds) the kernel and loads it on the tensors' device; later calls
cost a few dictionary lookups and the launch. Every argument is checked before anything is launched.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import itertools
import os
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import backend, compiler, fastpath, signature, source, tracing
from .errors import CompileError, InputError, LaunchError
from .layout import is_dry
from .signature import FLOATING as FLOATING  # what kernels of this package declare for T

_PLAIN = frozenset((Tensor, torch.nn.Parameter))
_MAX_GRID = (2**31 - 1, 65535, 65535)
_DEFAULT_SHARED = 48 * 1024
_MAX_CONFIGURED = 4096  # grids remembered per kernel
_kernels: list[weakref.ref[Kernel]] = []


def ceil_div(a: int, b: int) -> int:
    """The number of blocks of `b` that cover `a`."""
    return (a + b - 1) // b


def kernels() -> list[Kernel]:
    """Every `Kernel` alive in this process, in order of creation."""
    return [kernel for reference in _kernels if (kernel := reference()) is not None]


def _after_fork() -> None:
    """In the child: nobody will release a lock that another thread held, and nothing is loaded on a device."""
    for kernel in kernels():
        kernel._lock = threading.Lock()
        kernel._table.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Kernel:
    """A `__global__` function of a .cu file or of a piece of CUDA C.

    Args:
        code: name of a .cu file, looked for beside the calling module, in the working folder and among the built-in
            kernels; or CUDA C itself.
        name: the function, with its template parameters if it has any: `"layer_norm_fwd<T, VEC>"`.
        options: further NVRTC options, such as `("--use_fast_math",)`. With one that names files, such as `"-I..."`, the
            kernel is kept in memory only: no cache knows what those files say.
        **domain: for each template parameter the values that it takes, as a tuple: what ahead-of-time compilation
            builds, and what a launch may ask for. A parameter not named here takes any dtype, bool or int.
        where: a function of the template parameters, by name, that says whether a combination of their values exists.

    `kernel[grid, block](*args, T=torch.float32)` launches on PyTorch's current stream of the tensors' device. `grid` and
    `block` are ints or tuples; `kernel[grid, block, shared]` adds bytes of dynamic shared memory. A grid with a zero in
    it launches nothing. Tensors go to pointers, None to a null pointer, Python numbers to exactly the C type declared, a
    NumPy array of the right size to a struct by value.

    Raises:
        LaunchError: wrong count, dtype, device or range of an argument, or a launch that CUDA refuses.
        CompileError: the kernel does not compile.
        SourceError: the file is not found.
    """

    def __init__(
        self,
        code: str | Path,
        name: str,
        *,
        options: Iterable[str] = (),
        where: Callable[..., bool] | None = None,
        **domain: tuple[Any, ...],
    ) -> None:
        self._code = code
        self._beside = _caller_folder()
        self.base, self.template = signature.parse_name(name)
        self.options = compiler.checked_options(options)
        unknown = set(domain) - set(self.template)
        if unknown:
            raise InputError(f"kernel {name} has no template parameter {', '.join(sorted(unknown))}")
        self.domain = {key: tuple(values) for key, values in domain.items()}
        self._where = where
        self._specialised: dict[tuple[Any, ...], Specialised] = {}
        self._configured: dict[tuple[Any, ...], Callable[..., None]] = {}
        self._fast: fastpath.Configure | None = None  # written at the first load, when the PTX has told the types
        self._table: dict[Any, tuple[Any, ...]] = {}  # for the fast path, of the device used last
        self._lock = threading.Lock()
        _kernels.append(weakref.ref(self))

    @functools.cached_property
    def source(self) -> source.Source:
        """The text, read at first use."""
        return source.load(self._code, self._beside)

    @functools.cached_property
    def declared(self) -> list[tuple[str, str]]:
        """(C type, name) of each parameter, from the text."""
        return signature.declared(self.source, self.base)

    def __getitem__(self, launch: tuple[Any, ...]) -> Callable[..., None]:
        try:
            return self._configured[launch]
        except KeyError:
            return self._configure(launch)
        except TypeError:  # no hash: symbolic sizes, as a dry run has them
            return lambda *args, **template: self._launch(launch, args, template)

    def _configure(self, launch: tuple[Any, ...]) -> Callable[..., None]:
        """What `kernel[grid, block, shared]` is: a function of the kernel's arguments."""
        if not isinstance(launch, tuple) or not 2 <= len(launch) <= 3:
            raise LaunchError(f"{self}: launch with kernel[grid, block] or kernel[grid, block, shared], got {launch!r}")
        grid, block, shared = dimensions(*launch)
        if self._fast is None or 0 in grid:
            return lambda *args, **template: self._launch(launch, args, template)
        if len(self._configured) >= _MAX_CONFIGURED:
            self._configured.clear()
        configured = self._configured[launch] = self._fast(grid, block, shared)
        return configured

    def _launch(self, launch: tuple[Any, ...], args: tuple[Any, ...], template: dict[str, Any]) -> None:
        """A launch in full: the first on a device, one being traced, one by another executor, or none on a dry run."""
        specialised = self._specialise(template)
        anchor: Any = args[specialised.anchor] if len(args) > specialised.anchor else None
        if type(anchor) not in _PLAIN and is_dry(anchor):
            return
        grid, block, shared = dimensions(*launch)
        if 0 in grid:
            return
        if tracing.active is None:
            specialised.launch(anchor, grid, block, shared, args)
        else:
            with tracing.launch(specialised.name, grid, block, anchor) as record:
                specialised.launch(anchor, grid, block, shared, args, record)

    def make_fast(self, specialised: Specialised, loaded: Loaded) -> None:
        """From now on these template values, on this device, take the fast path."""
        self._table[fastpath.key(specialised.values)] = loaded.entry
        if self._fast is None:
            self._fast = fastpath.configure(
                loaded.arguments, self.template, specialised.anchor, self._table, loaded.cu_launch, self._launch
            )

    def _specialise(self, template: dict[str, Any]) -> Specialised:
        ordered = tuple(self._template_value(name, template) for name in self.template)
        if extra := set(template) - set(self.template):
            raise LaunchError(f"{self}: no template parameter {', '.join(sorted(extra))}")
        if not self._exists(ordered):
            raise LaunchError(f"{self}: there is no {self.expression(ordered)}")
        with self._lock:
            if ordered not in self._specialised:
                self._specialised[ordered] = Specialised(self, ordered)
            return self._specialised[ordered]

    def _template_value(self, name: str, template: dict[str, Any]) -> Any:
        if name not in template:
            raise LaunchError(f"{self}: template parameter {name} is not given; launch with {name}=...")
        value = template[name]
        signature.c_token(value)  # refuses what the compiler must never see
        if name in self.domain and value not in self.domain[name]:
            allowed = ", ".join(str(choice) for choice in self.domain[name])
            raise LaunchError(f"{self}: {name}={value} is not one of {allowed}")
        return value

    def _exists(self, values: tuple[Any, ...]) -> bool:
        return self._where is None or self._where(**dict(zip(self.template, values)))

    def combinations(self) -> list[tuple[Any, ...]]:
        """The template values of every instance that is declared, for ahead-of-time compilation."""
        missing = [name for name in self.template if name not in self.domain]
        if missing:
            raise InputError(f"{self}: no values declared for {', '.join(missing)}; give {missing[0]}=(...) to Kernel")
        every = itertools.product(*(self.domain[name] for name in self.template))
        return [values for values in every if self._exists(values)]

    def instances(self) -> list[str]:
        """The name expressions of the combinations."""
        return [self.expression(values) for values in self.combinations()]

    def expression(self, values: tuple[Any, ...]) -> str:
        """The C++ name of one instance, such as `relu_fwd<float>`."""
        return f"{self.base}<{', '.join(signature.c_token(value) for value in values)}>" if values else self.base

    def __repr__(self) -> str:
        template = f"<{', '.join(self.template)}>" if self.template else ""
        code = "<text>" if isinstance(self._code, str) and source.is_text(self._code) else str(self._code)
        return f"Kernel({code}: {self.base}{template})"


class Specialised:
    """A kernel with its template values chosen; loaded on each device at the first launch there."""

    def __init__(self, kernel: Kernel, values: tuple[Any, ...]) -> None:
        self.kernel = kernel
        self.values = values
        self.name = kernel.expression(values)
        self.loaded: dict[int, Loaded] = {}
        self._lock = threading.Lock()
        pointers = [index for index, (ctype, _) in enumerate(kernel.declared) if ctype.endswith("*")]
        if not pointers:
            raise CompileError(f"{self.name}: a kernel without a pointer parameter has nothing to work on")
        self.anchor = pointers[0]  # the argument whose device and stream the launch goes to

    def binary(self, arch: str) -> compiler.Binary:
        """Compile, or find, this kernel for `arch`."""
        return compiler.build(self.kernel.source, self.name, arch, self.kernel.options)

    def arguments(self, binary: compiler.Binary) -> tuple[signature.Argument, ...]:
        """What the kernel takes."""
        types = {name: signature.c_token(value) for name, value in zip(self.kernel.template, self.values)}
        return signature.join(self.name, self.kernel.declared, binary.parameters, types)

    def launch(
        self,
        anchor: Any,
        grid: Any,
        block: Any,
        shared: int,
        args: tuple[Any, ...],
        record: tracing.Record | None = None,
    ) -> None:
        """Launch on a device where this kernel is not loaded yet, or by another executor."""
        if not isinstance(anchor, Tensor):
            signature.check_count(self.name, self.kernel.declared, args)
            name = self.kernel.declared[self.anchor][1]
            raise LaunchError(f"{self.name}: {name} is {anchor!r}; the first pointer of a kernel must be a tensor")
        if anchor.is_cuda:
            if torch.cuda._is_in_bad_fork():
                raise LaunchError(
                    f"{self.name}: this process was forked from one that had used CUDA, which does not survive that; start "
                    'it with the method "spawn" or "forkserver" of multiprocessing'
                )
            loaded = self.on(anchor.get_device())
            loaded.launch(grid, block, shared, args, record)
            self.kernel.make_fast(self, loaded)
        elif (execute := executors.get(anchor.device.type)) is not None:
            report = execute(self, anchor.get_device(), grid, block, shared, args)
            if record is not None and report is not None:
                record.simulated(report.thread_instructions, report.seconds)
        elif not anchor.is_meta:
            raise LaunchError(
                f"{self.name}: no way to run a kernel on {anchor.device}; the tensors must be on a CUDA GPU, or on the CPU "
                "inside cupyops.simulate()"
            )

    def on(self, device: int) -> Loaded:
        """This kernel, loaded on CUDA device `device`."""
        with self._lock:
            if device not in self.loaded:
                self.loaded[device] = Loaded(self, device)
            return self.loaded[device]


class Loaded:
    """A kernel in the memory of one CUDA device, ready to launch."""

    def __init__(self, specialised: Specialised, device: int) -> None:
        cupy = backend.cupy()
        self.name = specialised.name
        self.device = device
        major, minor = torch.cuda.get_device_capability(device)
        binary = specialised.binary(f"sm_{major}{minor}")
        self.arguments = specialised.arguments(binary)
        with cupy.cuda.Device(device):
            self._raw = cupy.RawModule(path=str(binary.path)).get_function(binary.symbol)
            self._function = self._raw.kernel.ptr
        self.cu_launch = cupy.cuda.driver.launchKernel
        self._slots: list[tuple[Any, Any, int]] = []  # spare parameter buffers, one in use per launch under way
        self._shared = _DEFAULT_SHARED
        self.entry = fastpath.entry(self.arguments, device, self._function, self._slots, self._new_slot)

    def launch(
        self, grid: Any, block: Any, shared: int, args: tuple[Any, ...], record: tracing.Record | None = None
    ) -> None:
        """Check everything, make the device current, and launch on its current stream."""
        values = signature.checked(self.name, self.arguments, args, self.device)
        buffer, pointers, address = self._new_slot()
        struct.pack_into(signature.layout(self.arguments)[0], buffer, 0, *values)
        with torch.cuda.device(self.device):
            try:
                # a thread that has made no CUDA call yet has no context; CuPy's runtime gives it one
                backend.cupy().cuda.Device(self.device).use()
                if shared > self._shared:
                    self._raw.max_dynamic_shared_size_bytes = shared  # more than 48 KB is to be asked for
                    self._shared = shared
                stream = torch._C._cuda_getCurrentRawStream(self.device)
                with tracing.timed(record):
                    self.cu_launch(self._function, *grid, *block, shared, stream, address, 0)
            except Exception as error:  # CuPy's CUDADriverError, which cannot be named before CuPy is imported
                where = f"{self.name} with grid {grid}, block {block}, {shared} bytes of dynamic shared memory"
                raise LaunchError(f"{where} on cuda:{self.device}: {error}") from error

    def _new_slot(self) -> tuple[Any, Any, int]:
        """A buffer for the parameters, and the array of pointers into it that cuLaunchKernel reads."""
        letters, offsets = signature.layout(self.arguments)
        buffer = ctypes.create_string_buffer(struct.calcsize(letters))
        pointers = (ctypes.c_void_p * len(offsets))(*(ctypes.addressof(buffer) + offset for offset in offsets))
        return buffer, pointers, ctypes.addressof(pointers)


# What runs a launch on tensors of a device type; CUDA tensors have `Loaded`. A simulator puts itself here for "cpu", as
# execute(specialised, device, grid, block, shared, args); what it returns tells the launch's cost, or is None.
executors: dict[str, Callable[..., Any] | None] = {"cuda": None}


def addressing(device: torch.device) -> Callable[[Tensor], int]:
    """How a kernel on `device` knows a tensor whose pointer lies inside a struct that is passed by value."""
    return getattr(executors.get(device.type), "address", Tensor.data_ptr)


def dimensions(grid: Any, block: Any, shared: int = 0) -> tuple[tuple[int, int, int], tuple[int, int, int], int]:
    """Grid and block as triples, checked against what every CUDA GPU allows."""
    grid3, block3 = _triple("grid", grid), _triple("block", block)
    if any(g < 0 or g > limit for g, limit in zip(grid3, _MAX_GRID)):
        raise LaunchError(f"grid {grid3} is outside CUDA's limits {_MAX_GRID}")
    threads = block3[0] * block3[1] * block3[2]
    if min(block3) < 1 or threads > 1024 or block3[2] > 64:
        raise LaunchError(f"block {block3} has {threads} threads; CUDA allows 1 to 1024, at most 64 in z")
    if not isinstance(shared, (int, np.integer)) or shared < 0:
        raise LaunchError(f"shared memory is {shared!r}, expected a number of bytes")
    return grid3, block3, int(shared)


def _triple(name: str, dims: Any) -> tuple[int, int, int]:
    given = dims if isinstance(dims, tuple) else (dims,)
    if not 1 <= len(given) <= 3 or any(not isinstance(dim, (int, np.integer)) for dim in given):
        raise LaunchError(f"{name} is {dims!r}, expected an int or a tuple of 1 to 3 ints")
    x, y, z = (*given, 1, 1)[:3]
    return int(x), int(y), int(z)


def _caller_folder() -> Path | None:
    """The folder of the module that calls `Kernel(...)`; None in a notebook or at a prompt."""
    frame = sys._getframe(2)
    file = inspect.getfile(frame)
    return Path(file).resolve().parent if os.path.isfile(file) else None
