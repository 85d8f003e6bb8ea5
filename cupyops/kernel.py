"""A CUDA kernel as a Python object: specialise, check, launch.

    scale = Kernel("scale.cu", "scale<T>")
    scale[ceil_div(n, 256), 256](x, y, 0.5, n, T=x.dtype)

The first call with given template values compiles (or finds) the kernel and loads it on the tensors' device; later calls
cost a few dictionary lookups and the launch. The C signature says which parameters are pointers and to what, the PTX says
of which type and size each number is: both are checked before anything is launched.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import backend, compiler, source, trace
from .errors import CompileError, InputError, LaunchError

# The one dtype table: what a torch dtype is called in CUDA C, and (below) what a C type is called in torch.
C_NAMES: dict[torch.dtype, str] = {
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.float32: "float",
    torch.float64: "double",
    torch.int8: "signed char",
    torch.uint8: "unsigned char",
    torch.int16: "short",
    torch.int32: "int",
    torch.int64: "long long",
    torch.bool: "bool",
}
_C_ALIASES = {
    "half": torch.float16,
    "int8_t": torch.int8,
    "uint8_t": torch.uint8,
    "int16_t": torch.int16,
    "int32_t": torch.int32,
    "int64_t": torch.int64,
    "long": torch.int64,
}
_DTYPES: dict[str, torch.dtype] = {name: dtype for dtype, name in C_NAMES.items()} | _C_ALIASES

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

_PLAIN = (Tensor, torch.nn.Parameter)
_INTEGER_RANGE = {8: (-(2**7), 2**8 - 1), 16: (-(2**15), 2**16 - 1), 32: (-(2**31), 2**32 - 1), 64: (-(2**63), 2**64 - 1)}
_MAX_GRID = (2**31 - 1, 65535, 65535)
_DEFAULT_SHARED = 48 * 1024


def ceil_div(a: int, b: int) -> int:
    """The number of blocks of `b` that cover `a`."""
    return (a + b - 1) // b


@dataclass(frozen=True)
class Argument:
    """One parameter of a kernel, as its C signature and its PTX declare it."""

    name: str
    ctype: str
    kind: str  # "pointer", "integer", "float32", "float64" or "struct"
    size: int
    dtype: torch.dtype | None  # what a pointer points to; None where any tensor will do


class Kernel:
    """A `__global__` function of a .cu file or of a piece of CUDA C.

    Args:
        code: name of a .cu file, looked for beside the calling module, in the working folder and among the built-in
            kernels; or CUDA C itself.
        name: the function, with its template parameters if it has any: `"layer_norm_fwd<T, VEC>"`.
        options: further NVRTC options, such as `("--use_fast_math",)`.
        **domain: for each template parameter the values that it takes, as a tuple: what ahead-of-time compilation
            builds, and what a launch may ask for. A parameter not named here takes any dtype, bool or int.

    `kernel[grid, block](*args, T=torch.float32)` launches on PyTorch's current stream of the tensors' device. `grid` and
    `block` are ints or tuples; `kernel[grid, block, shared]` adds bytes of dynamic shared memory. A grid with a zero in
    it launches nothing. Tensors go to pointers, None to a null pointer, Python numbers to exactly the C type declared.

    Raises:
        LaunchError: wrong count, dtype, device or range of an argument, or a launch that CUDA refuses.
        CompileError: the kernel does not compile.
        SourceError: the file is not found.
    """

    def __init__(self, code: str | Path, name: str, *, options: Iterable[str] = (), **domain: tuple[Any, ...]) -> None:
        self._code = code
        self._beside = _caller_folder()
        self.base, self.template = _parse_name(name)
        self.options = tuple(options)
        unknown = set(domain) - set(self.template)
        if unknown:
            raise InputError(f"kernel {name} has no template parameter {', '.join(sorted(unknown))}")
        self.domain = {key: tuple(values) for key, values in domain.items()}
        self._specialised: dict[tuple[Any, ...], Specialised] = {}
        self._lock = threading.Lock()

    @functools.cached_property
    def source(self) -> source.Source:
        """The text, read at first use."""
        return source.load(self._code, self._beside)

    @functools.cached_property
    def signature(self) -> list[tuple[str, str]]:
        """(C type, name) of each parameter, from the text."""
        return _c_signature(self.source, self.base)

    def __getitem__(self, launch: tuple[Any, ...]) -> Callable[..., None]:
        return functools.partial(self._launch, launch)

    def _launch(self, launch: tuple[Any, ...], *args: Any, **template: Any) -> None:
        try:
            specialised = self._specialised[tuple(template.values())]
        except (KeyError, TypeError):
            specialised = self._specialise(template)
        first = args[specialised.anchor]
        if type(first) not in _PLAIN and _is_fake(first):
            return
        grid, block, shared = _dimensions(*launch)
        if not (grid[0] and grid[1] and grid[2]):
            return
        device = first.device
        execute = executors.get(device.type)
        if execute is None:
            raise LaunchError(f"{specialised.name}: no way to run a kernel on {device}; the tensors must be on a CUDA GPU")
        if trace.active is None:
            execute(specialised, first.get_device(), grid, block, shared, args)
        else:
            with trace.launch(specialised.name, grid, block, str(first.dtype).removeprefix("torch."), device):
                execute(specialised, first.get_device(), grid, block, shared, args)

    def _specialise(self, template: dict[str, Any]) -> Specialised:
        ordered = tuple(self._template_value(name, template) for name in self.template)
        if extra := set(template) - set(self.template):
            raise LaunchError(f"{self}: no template parameter {', '.join(sorted(extra))}")
        with self._lock:
            specialised = next((s for s in self._specialised.values() if s.values == ordered), None)
            specialised = specialised or Specialised(self, ordered)
            self._specialised[tuple(template.values())] = specialised
        return specialised

    def _template_value(self, name: str, template: dict[str, Any]) -> Any:
        if name not in template:
            raise LaunchError(f"{self}: template parameter {name} is not given; launch with {name}=...")
        value = template[name]
        if name in self.domain and value not in self.domain[name]:
            allowed = ", ".join(str(choice) for choice in self.domain[name])
            raise LaunchError(f"{self}: {name}={value} is not one of {allowed}")
        return value

    def instances(self) -> list[str]:
        """Every name expression that the declared domain spans, for ahead-of-time compilation."""
        missing = [name for name in self.template if name not in self.domain]
        if missing:
            raise InputError(f"{self}: no values declared for {', '.join(missing)}; give {missing[0]}=(...) to Kernel")
        choices: list[tuple[Any, ...]] = [()]
        for name in self.template:
            choices = [(*chosen, value) for chosen in choices for value in self.domain[name]]
        return [self.expression(values) for values in choices]

    def expression(self, values: tuple[Any, ...]) -> str:
        """The C++ name of one instance, such as `relu_fwd<float>`."""
        return f"{self.base}<{', '.join(c_token(value) for value in values)}>" if values else self.base

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
        pointers = [index for index, (ctype, _) in enumerate(kernel.signature) if ctype.endswith("*")]
        if not pointers:
            raise CompileError(f"{self.name}: a kernel without a pointer parameter has nothing to work on")
        self.anchor = pointers[0]

    def binary(self, arch: str) -> compiler.Binary:
        """Compile, or find, this kernel for `arch`."""
        return compiler.build(self.kernel.source, self.name, arch, self.kernel.options)

    def arguments(self, binary: compiler.Binary) -> tuple[Argument, ...]:
        """The C signature and the PTX parameters, joined."""
        signature = self.kernel.signature
        if len(signature) != len(binary.parameters):
            raise CompileError(f"{self.name}: the text declares {len(signature)} parameters, the PTX {len(binary.parameters)}")
        types = {name: c_token(value) for name, value in zip(self.kernel.template, self.values)}
        return tuple(_argument(ctype, name, p, types) for (ctype, name), p in zip(signature, binary.parameters))

    def on(self, device: int) -> Loaded:
        """This kernel, loaded on CUDA device `device`."""
        with self._lock:
            if device not in self.loaded:
                self.loaded[device] = Loaded(self, device)
            return self.loaded[device]


class Loaded:
    """A kernel in the memory of one CUDA device."""

    def __init__(self, specialised: Specialised, device: int) -> None:
        cupy = backend.cupy()
        self.device = device
        major, minor = torch.cuda.get_device_capability(device)
        binary = specialised.binary(f"sm_{major}{minor}")
        self.arguments = specialised.arguments(binary)
        with cupy.cuda.Device(device):
            self._raw = cupy.RawModule(path=str(binary.path)).get_function(binary.symbol)
            self.function = self._raw.kernel
        self.shared = _DEFAULT_SHARED

    def allow_shared(self, size: int) -> None:
        """Opt in to more than 48 KB of dynamic shared memory on this device."""
        with backend.cupy().cuda.Device(self.device):
            self._raw.max_dynamic_shared_size_bytes = size
        self.shared = size


class _Stream:
    """CuPy asks a stream for `.ptr` only."""

    __slots__ = ("ptr",)

    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


def _execute_cuda(
    specialised: Specialised,
    device: int,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    shared: int,
    args: tuple[Any, ...],
) -> None:
    loaded = specialised.loaded.get(device) or specialised.on(device)
    values = convert(specialised, loaded.arguments, args, device)
    current = torch._C._cuda_getDevice()
    if current != device:
        torch.cuda._exchange_device(device)
    try:
        if shared > loaded.shared:
            loaded.allow_shared(shared)
        loaded.function(grid, block, values, shared, _Stream(torch._C._cuda_getCurrentRawStream(device)))
    except Exception as error:  # CuPy's CUDADriverError, which cannot be named before CuPy is imported
        raise _refused(specialised, grid, block, shared, error) from error
    finally:
        if current != device:
            torch.cuda._exchange_device(current)


# What runs a launch on tensors of a device type. A simulator puts itself here for "cpu".
executors: dict[str, Callable[..., None]] = {"cuda": _execute_cuda}


# --- arguments ---------------------------------------------------------------------------------------------------


def convert(specialised: Specialised, arguments: tuple[Argument, ...], args: tuple[Any, ...], device: int) -> list[Any]:
    """The values to launch with: pointers as ints, numbers as the exact type declared. Raises `LaunchError`."""
    if len(args) != len(arguments):
        expected = ", ".join(f"{a.ctype} {a.name}" for a in arguments)
        raise LaunchError(f"{specialised.name}: {len(args)} arguments given, {len(arguments)} declared ({expected})")
    values: list[Any] = []
    for value, argument in zip(args, arguments):
        kind = argument.kind
        if kind == "pointer":
            if value is None:
                values.append(0)
                continue
            if not isinstance(value, Tensor):
                raise _mismatch(specialised, argument, value, "a tensor or None")
            if argument.dtype is not value.dtype and argument.dtype is not None:
                raise _mismatch(specialised, argument, value, f"a tensor of {argument.dtype}")
            if value.get_device() != device:
                raise _mismatch(specialised, argument, value, "a tensor on the device of the others")
            pointer = value.data_ptr()
            if not pointer and value.numel():
                raise _mismatch(specialised, argument, value, "a tensor with storage of its own")
            values.append(pointer)
        elif kind == "integer":
            low, high = _INTEGER_RANGE[argument.size * 8]
            if not isinstance(value, (int, np.integer)):
                raise _mismatch(specialised, argument, value, "an integer")
            if not low <= value <= high:
                raise _mismatch(specialised, argument, value, f"an integer that fits {argument.ctype}")
            values.append(value if value < 2**63 else np.uint64(value))
        elif kind == "struct":
            if not isinstance(value, np.ndarray) or value.nbytes != argument.size:
                raise _mismatch(specialised, argument, value, f"a NumPy array of {argument.size} bytes")
            values.append(np.ascontiguousarray(value))
        else:
            if not isinstance(value, (int, float, np.number)):
                raise _mismatch(specialised, argument, value, "a number")
            values.append(np.float32(value) if kind == "float32" else float(value))
    return values


def _argument(ctype: str, name: str, parameter: compiler.Parameter, types: dict[str, str]) -> Argument:
    if ctype.endswith("*"):
        pointee = re.sub(r"\b(const|volatile|__restrict__)\b", "", ctype[:-1]).strip()
        return Argument(name, ctype, "pointer", parameter.size, _DTYPES.get(types.get(pointee, pointee)))
    kinds = {"f32": "float32", "f64": "float64"}
    kind = kinds.get(parameter.kind) or ("struct" if parameter.kind.startswith("b") else "integer")
    return Argument(name, ctype, kind, parameter.size, None)


def _mismatch(specialised: Specialised, argument: Argument, value: Any, expected: str) -> LaunchError:
    if isinstance(value, Tensor):
        found = f"a tensor of {value.dtype} on {value.device}"
    else:
        found = f"{value!r} ({type(value).__name__})"
    return LaunchError(f"{specialised.name}: parameter `{argument.ctype} {argument.name}` got {found}, expected {expected}")


def _refused(specialised: Specialised, grid: Any, block: Any, shared: int, error: Exception) -> LaunchError:
    return LaunchError(f"{specialised.name} with grid {grid}, block {block}, {shared} bytes of shared memory: {error}")


@functools.lru_cache(maxsize=8192)
def _dimensions(grid: Any, block: Any, shared: int = 0) -> tuple[tuple[int, int, int], tuple[int, int, int], int]:
    """Grid and block as triples, checked against what every CUDA GPU allows."""
    grid3, block3 = _triple(grid), _triple(block)
    if any(g < 0 or g > limit for g, limit in zip(grid3, _MAX_GRID)):
        raise LaunchError(f"grid {grid3} is outside CUDA's limits {_MAX_GRID}")
    threads = block3[0] * block3[1] * block3[2]
    if min(block3) < 1 or threads > 1024 or block3[2] > 64:
        raise LaunchError(f"block {block3} has {threads} threads; CUDA allows 1 to 1024, at most 64 in z")
    return grid3, block3, int(shared)


def _triple(dims: Any) -> tuple[int, int, int]:
    x, y, z = (*((dims,) if not isinstance(dims, tuple) else dims), 1, 1)[:3]
    return int(x), int(y), int(z)


def _is_fake(value: Any) -> bool:
    """A tensor with a shape and no storage: the dry run that gives shapes to torch.compile and torch.export."""
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(value, FakeTensor) or (isinstance(value, Tensor) and value.is_meta)


# --- names and text ----------------------------------------------------------------------------------------------


def c_token(value: Any) -> str:
    """A template value in C++: only dtypes of the table, bools and ints reach the compiler."""
    if isinstance(value, torch.dtype) and value in C_NAMES:
        return C_NAMES[value]
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(value)
    raise LaunchError(f"a template value is a dtype ({', '.join(map(str, C_NAMES))}), a bool or an int; got {value!r}")


def _parse_name(name: str) -> tuple[str, tuple[str, ...]]:
    match = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*(?:<([\w\s,]*)>)?\s*", name)
    if match is None:
        raise InputError(f'kernel name {name!r} is not of the form "name" or "name<T, N>"')
    template = tuple(part.strip() for part in (match.group(2) or "").split(",") if part.strip())
    return match.group(1), template


def _c_signature(text: source.Source, name: str) -> list[tuple[str, str]]:
    """(type, name) of each parameter of `__global__ ... name(...)`, from the file or one of its includes."""
    for piece in (text.text, *text.includes.values()):
        clean = source.strip_comments(piece)
        match = re.search(rf"__global__[^;{{}}]*?\b{name}\s*\(", clean)
        if match is not None:
            inside = clean[match.end() : _closing(clean, match.end())]
            return [_split_declaration(part) for part in _split_commas(inside)]
    names = sorted({n for piece in (text.text, *text.includes.values()) for n in _kernel_names(piece)})
    raise InputError(f"{text.name} has no __global__ function {name}; it has {', '.join(names) or 'none'}")


def _kernel_names(piece: str) -> list[str]:
    return re.findall(r"__global__[^;{}]*?\bvoid\s+(?:__launch_bounds__\s*\([^)]*\)\s*)?(\w+)\s*\(", source.strip_comments(piece))


def _closing(text: str, start: int) -> int:
    depth = 1
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return index
    return len(text)


def _split_commas(text: str) -> list[str]:
    parts, depth, current = [], 0, ""
    for char in text:
        depth += {"<": 1, "(": 1, "[": 1, ">": -1, ")": -1, "]": -1}.get(char, 0)
        if char == "," and depth == 0:
            parts.append(current)
            current = ""
        else:
            current += char
    return [part for part in (*parts, current) if part.strip()]


def _split_declaration(declaration: str) -> tuple[str, str]:
    """`const T* __restrict__ x` -> (`const T*`, `x`)."""
    words = re.sub(r"\b__(restrict|grid_constant)__\b", " ", declaration)
    match = re.fullmatch(r"\s*(.*?)\s*(\w+)\s*(\[\s*\w*\s*\])?\s*", words, re.DOTALL)
    if match is None:
        raise InputError(f"cannot read the kernel parameter {declaration.strip()!r}")
    ctype = re.sub(r"\s*\*\s*", "*", re.sub(r"\s+", " ", match.group(1)))
    return ctype + ("*" if match.group(3) else ""), match.group(2)


def _caller_folder() -> Path | None:
    """The folder of the module that calls `Kernel(...)`; None in a notebook or at a prompt."""
    frame = sys._getframe(2)
    file = inspect.getfile(frame)
    return Path(file).resolve().parent if Path(file).is_file() else None
