"""Kernels under the names by which other programs ask for them: all of a text at once, as CuPy has it, as PyTorch has it.

kernels = cupyops.module("kernels.cu")
kernels.scale[grid, block](x, y, 2.0, n, T=x.dtype)
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._util import libraries
from ..errors import InputError, LaunchError
from .addresses import tensor_at
from .compile import source
from .compile.declarations import Function, functions
from .extension import text as extension_text
from .kernel import Kernel, caller
from .launch.pointers import Pointers
from .launch.shared import Shared
from .launch.tensor_map import TensorMap
from .launch.variables import Variable


class Module:
    """The kernels of one text, by name: `cupyops.module` gives it.

    `module.scale` is the kernel `scale` with the template parameters that its text gives it, `module["ns::f<float, 4>"]` the
    instance that an expression of C++ names. Each is a `Kernel`, made when it is first asked for.

    Attributes:
        name: for messages.
    """

    def __init__(self, name: str, code: str | Path, options: dict[str, Any], place: tuple[Path | None, str]) -> None:
        self.name = name
        self._code, self._options, self._place = code, options, place
        self._kernels: dict[str, Kernel] = {}
        self._shared = Shared()
        self._host: frozenset[str] = frozenset()  # functions of the host that somebody may look for here

    @functools.cached_property
    def _functions(self) -> dict[str, Function]:
        found: dict[str, Function] = {}
        text = source.load(self._code, self._place[0]) if not self._options.get("extension") else None
        if text is None:
            text = extension_text.load(self._code, self._place[0], self._options.get("options", ())).source
        for one in functions(text):
            if one.name not in found or (one.is_defined and not found[one.name].template):
                found[one.name] = one
        return found

    def __getitem__(self, name: str) -> Kernel:
        """The kernel of a name, as `Kernel(code, name)` takes it."""
        if name not in self._kernels:
            kernel = Kernel(self._code, name, **self._options)
            kernel.defined_at(*self._place, strided=self._options.get("strided", False))
            kernel.shared = self._shared
            self._kernels[name] = kernel
        return self._kernels[name]

    def __getattr__(self, name: str) -> Kernel:
        if name.startswith("_"):
            raise AttributeError(name)
        try:
            one = self._functions[name]
        except KeyError:
            if name in self._host:
                raise AttributeError(
                    f"{self.name}: {name} is a function of the host, for which there is no compiler here: write what it "
                    "does in Python, kernels.f[grid, block](...); `python -m cupyops port` translates a .cu file"
                ) from None
            raise AttributeError(f"{self.name} has no kernel {name!r}; it has {', '.join(self) or 'none'}") from None
        parameters = ", ".join(parameter.name for parameter in one.template)
        return self[f"{name}<{parameters}>" if parameters else name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._functions)

    def __contains__(self, name: object) -> bool:
        return name in self._functions

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self]

    def __repr__(self) -> str:
        return f"Module({self.name}: {', '.join(self)})"


def module(
    code: str | Path,
    *,
    options: Iterable[str] = (),
    define: Mapping[str, int] | None = None,
    arch: str | None = None,
    strided: bool = False,
) -> Module:
    """All kernels of a .cu file, or of a piece of CUDA C, as attributes of one object.

    Args:
        code: name of a .cu file, or CUDA C itself, as `Kernel` takes it.
        options, define, arch, strided: as `Kernel` takes them.

    Returns:
        Module: `module.scale` is the kernel of that name, with its template parameters to be given at the launch;
        `module["ns::f<float, 4>"]` the one that the expression names. All have the `__device__` variables together.

    Raises:
        SourceError: the file is not found.
        AttributeError: when asked for a kernel that the text has not.

    Example:
        >>> code = '''
        ... template <typename T> __global__ void twice(T* x) { x[threadIdx.x] *= 2; }
        ... __global__ void negate(float* x) { x[threadIdx.x] = -x[threadIdx.x]; }
        ... '''
        >>> kernels, x = cupyops.module(code), torch.tensor([1.0, 2.0])
        >>> with cupyops.simulate():
        ...     kernels.twice[1, 2](x, T=torch.float32)
        ...     kernels.negate[1, 2](x)
        ...     kernels["twice<float>"][1, 2](x)
        >>> list(kernels), x.tolist()
        (['twice', 'negate'], [-4.0, -8.0])
    """
    chosen = {"options": tuple(options), "define": define, "arch": arch, "strided": strided}
    found = Module(_name(code), code, chosen, caller())
    _ = found._functions  # what is not found is told now
    return found


def load_inline(
    name: str = "",
    cpp_sources: str | Sequence[str] = (),
    cuda_sources: str | Sequence[str] = (),
    functions: str | Sequence[str] | Mapping[str, str] | None = None,
    *,
    extra_cuda_cflags: Iterable[str] = (),
    extra_include_paths: Iterable[str] = (),
    **ignored: Any,
) -> Module:
    """The kernels of some CUDA C, by a call such as that of `torch.utils.cpp_extension.load_inline`.

    There is no host compiler here: `__global__` functions are launched from Python, and what a C++ function did around them
    (allocate, compute the grid, launch) is a few lines of Python. The text may have host code, as for
    `cupyops.extension`: it is left out.

    Args:
        name: for messages.
        cpp_sources: host code, which is left out.
        cuda_sources: CUDA C, or several pieces of it, which are put together.
        functions: the kernels, or functions of the host, that there must be; None: whichever there are.
        extra_cuda_cflags: options for NVRTC, such as `"--use_fast_math"`. `-O2`, `-O3` and `-std` are left out.
        extra_include_paths: folders of headers.
        **ignored: what concerns a host compiler (`verbose`, `build_directory`, `with_cuda`, `extra_cflags` ...).

    Returns:
        Module: each kernel is an attribute; a function of the host is none, and the error says what to do.

    Raises:
        InputError: a name in `functions` that no function of the text has.

    Example:
        >>> code = "__global__ void twice(float* x) { x[threadIdx.x] *= 2; }"
        >>> kernels = cupyops.load_inline("mine", cuda_sources=code, functions=["twice"])
        >>> x = torch.ones(2)
        >>> with cupyops.simulate():
        ...     kernels.twice[1, 2](x)
        >>> x
        tensor([2., 2.])
    """
    pieces = [cuda_sources] if isinstance(cuda_sources, str) else list(cuda_sources)
    host = [cpp_sources] if isinstance(cpp_sources, str) else list(cpp_sources)
    options = [one for one in extra_cuda_cflags if not one.lstrip("-").startswith(("O", "std", "Xcompiler"))]
    options += [f"-I{folder}" for folder in extra_include_paths]
    chosen = {"options": tuple(options), "extension": True}
    found = Module(name or "<text>.cu", "\n".join(["", *pieces]), chosen, caller())
    asked = [functions] if isinstance(functions, str) else list(functions or ())
    text = source.strip_comments("\n".join([*host, *pieces]))
    found._host = frozenset(one for one in asked if one not in found and re.search(rf"\b{re.escape(one)}\s*\(", text))
    if missing := [one for one in asked if one not in found and one not in found._host]:
        raise InputError(
            f"{found.name}: functions names {missing[0]}, of which there is no function in the text, expected one of: "
            f"{', '.join(found) or 'none, it has no kernels'}"
        )
    return found


class RawKernel:
    """A kernel by the calls of `cupy.RawKernel`, so that a program moves by its import: `f(grid, block, args)`.

    Beside tensors it takes CuPy's arrays and other DLPack arrays, and NumPy's where kernels run on CPU tensors; it runs on
    CuPy's current stream, if the arrays are CuPy's. An integer for a pointer is an address, as of `x.data_ptr()`: that the
    tensor is alive, and of the right dtype, is the caller's to see to. Everything else is checked as by a `Kernel`, which
    is its `.kernel`.

    Args:
        code: CUDA C.
        name: of the function, or an expression such as `"f<float, 4>"`.
        options: for NVRTC; `-std=...` is left out.
        **ignored: what CuPy takes besides (`backend`, `jitify`, `translate_cucomplex`).

    Example:
        >>> code = 'extern "C" __global__ void twice(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] *= 2; }'
        >>> twice, x = cupyops.RawKernel(code, "twice"), np.ones(3, np.float32)
        >>> with cupyops.simulate():
        ...     twice((1,), (32,), (x, 3))
        >>> x
        array([2., 2., 2.], dtype=float32)
    """

    def __init__(self, code: str, name: str, options: Iterable[str] = (), **ignored: Any) -> None:
        self.kernel = RawModule(code=code, options=options)._module[name]

    def __call__(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0, **ignored: Any
    ) -> None:
        """Launch, on the current stream.

        Raises:
            LaunchError: as a launch of the `Kernel`.
        """
        declared = self.kernel.declared
        pointers = [ctype.endswith("*") for ctype, _ in declared]
        arrays = [
            index for index, value in enumerate(args) if _is_memory(value, index < len(pointers) and pointers[index])
        ]
        kind = libraries.kind_of(args[arrays[0]]) if arrays else None
        with nullcontext() if kind is None else kind.place(args[arrays[0]]):
            values = list(args)
            for index, (ctype, _) in enumerate(declared[: len(args)]):
                if ctype.endswith("*") and type(args[index]) is int:  # an address, as of x.data_ptr()
                    values[index] = tensor_at(args[index], ctype) if args[index] else None
            for index in arrays:
                found = libraries.kind_of(args[index])
                assert found is not None
                values[index] = found.to_tensor(args[index])
            self.kernel[tuple(grid), tuple(block), shared_mem](*values)

    @property
    def attributes(self) -> dict[str, int]:
        """Attributes of the kernel on the current GPU: `num_regs`, `shared_size_bytes`, `max_threads_per_block` ...

        Raises:
            LaunchError: there is no GPU.
        """
        instance = self.kernel.instance()
        if not torch.cuda.is_available():
            raise LaunchError(f"{instance.name}: attributes are those of a kernel on a GPU, expected one, found none")
        return instance.on(torch.cuda.current_device()).attributes()

    @property
    def max_dynamic_shared_size_bytes(self) -> int:
        """Largest dynamic shared memory of a launch. Setting it does nothing: a launch asks for what it needs."""
        return self.attributes["max_dynamic_shared_size_bytes"]

    @max_dynamic_shared_size_bytes.setter
    def max_dynamic_shared_size_bytes(self, value: int) -> None:
        del value

    def compile(self) -> None:
        """Do nothing: a kernel is compiled, or found in the cache, at its first launch."""

    def __repr__(self) -> str:
        return f"RawKernel({self.kernel})"


class RawModule:
    """The kernels of a text by the calls of `cupy.RawModule`, so that a program moves by its import.

    Args:
        code: CUDA C.
        path: the name of a .cu file instead.
        options: for NVRTC; `-std=...` is left out.
        name_expressions: the instances of templates that will be asked for; any may be, and none need be named.
        **ignored: what CuPy takes besides (`backend`, `jitify`, `translate_cucomplex`).

    Example:
        >>> code = "template <typename T, int N> __global__ void fill(T* x) { x[threadIdx.x] = N; }"
        >>> module = cupyops.RawModule(code=code, name_expressions=["fill<float, 4>"])
        >>> x = torch.empty(2)
        >>> with cupyops.simulate():
        ...     module.get_function("fill<float, 4>")((1,), (2,), (x,))
        >>> x
        tensor([4., 4.])
    """

    def __init__(
        self,
        *,
        code: str | None = None,
        path: str | Path | None = None,
        options: Iterable[str] = (),
        name_expressions: Sequence[str] | None = None,
        **ignored: Any,
    ) -> None:
        if (code is None) == (path is None):
            raise InputError("RawModule: give code or path, and exactly one of them")
        text = path if code is None else code if source.is_text(code) else f"\n{code}"
        assert text is not None
        chosen = tuple(one for one in options if not one.lstrip("-").startswith("std"))
        self._module = Module(_name(text), text, {"options": chosen}, caller())
        self.name_expressions = tuple(name_expressions or ())

    def get_function(self, name: str) -> RawKernel:
        """The kernel of a name, or of an expression such as `"f<float, 4>"`."""
        found = RawKernel.__new__(RawKernel)
        found.kernel = self._module[name]
        return found

    def get_global(self, name: str) -> Variable:
        """A `__device__` or `__constant__` variable of the text, which its kernels have together: `get()` and `set(value)`.

        Raises:
            InputError: there is none of that name, or every kernel is a template and `name_expressions` names none.
        """
        plain = [one.name for one in self._module._functions.values() if not one.template]
        kernels = plain or list(self.name_expressions)
        if not kernels:
            raise InputError(f"{self}: name an instance of a kernel in name_expressions, so that there are variables")
        return self._module[kernels[0]].globals()[name]

    def compile(self) -> None:
        """Do nothing: a kernel is compiled, or found in the cache, at its first launch."""

    def __repr__(self) -> str:
        return f"RawModule({self._module.name})"


def _name(code: str | Path) -> str:
    return "<text>.cu" if isinstance(code, str) and source.is_text(code) else Path(code).name


def _is_memory(value: Any, for_pointer: bool) -> bool:
    """Return True for an array whose memory a kernel is to see; NumPy's are structs by value elsewhere."""
    if isinstance(value, (Tensor, Pointers, TensorMap)) or not libraries.is_array(value):
        return False
    kind = libraries.kind_of(value)
    return for_pointer or (kind is not None and kind.name != "numpy")
