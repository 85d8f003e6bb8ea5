"""`cupyops.extension`: every kernel of a C++ extension's .cu file, by its name."""

from __future__ import annotations

import difflib
import functools
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ..errors import InputError
from .compile import declarations
from .extension import text
from .kernel import Kernel, folder_of
from .launch.shared import Shared

_NUMBER = re.compile(r"bool|auto|unsigned|signed|char|short|int|long|(std::)?(u?int\d*|s?size|ptrdiff)_t|uint")


class Extension:
    """Kernels of a file, as returned by `cupyops.extension`.

    `ext.name` is the `Kernel` of that name, with the template parameters that have no default; `ext["name<T, 4>"]` one with
    template parameters as they are written there, as of `Kernel`. Of two kernels of one name in different namespaces each is
    `ext["ns::name"]`. Iterated over, it gives the names.
    """

    def __init__(
        self, code: str | Path, options: tuple[str, ...], define: Mapping[str, int], beside: Path | None
    ) -> None:
        self._code, self._beside = code, beside
        self._options, self._define = options, define
        self._kernels: dict[str, Kernel] = {}
        self._shared = Shared()

    @functools.cached_property
    def _read(self) -> text.Extension:
        return text.load(self._code, self._beside, self._options)

    def __iter__(self) -> Iterator[str]:
        return iter(self._read.kernels)

    def __len__(self) -> int:
        return len(self._read.kernels)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *(name.rpartition("::")[2] for name in self)]

    def __getattr__(self, name: str) -> Kernel:
        if name.startswith("_"):
            raise AttributeError(name)
        self._read  # noqa: B018 - a file that cannot be read says so itself
        try:
            return self[name]
        except InputError as error:
            raise AttributeError(str(error)) from error

    def __getitem__(self, name: str) -> Kernel:
        if name not in self._kernels:
            base, bracket, rest = name.partition("<")
            full = self._named(base)
            written = full + (bracket + rest or self._template(full))
            self._kernels[name] = Kernel(
                self._path(), written, options=self._options, define=self._define, extension=True
            )
            self._kernels[name].shared = self._shared
            self._kernels[name].enumerations = self._enumerations(full)
        return self._kernels[name]

    def _path(self) -> str | Path:
        return self._read.source.path or self._code

    def _named(self, name: str) -> str:
        """The name with its namespaces. Raises `InputError` where there is none, or more than one."""
        found = [one for one in self if name in (one, one.rpartition("::")[2])]
        if len(found) == 1:
            return found[0]
        if found:
            raise InputError(
                f"{self}: several kernels are called {name}: {', '.join(found)}; name one in full, ext[{found[0]!r}]"
            )
        near = difflib.get_close_matches(name, [one.rpartition("::")[2] for one in self], 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise InputError(
            f"{self} has no kernel {name}, expected one of: {', '.join(self) or 'none, it has none'}{hint}"
        )

    def _template(self, name: str) -> str:
        """`<scalar_t, N>`: the template parameters that are to be given."""
        function = declarations.told(self._read.source, name)
        template = declared = () if function is None else function.template  # none: a macro defines it
        while template and template[-1].has_default:
            template = template[:-1]
        for parameter in template:
            if not parameter.name.isidentifier() or parameter.name in ("typename", "class", "int", "bool"):
                raise InputError(
                    f'{self}: a template parameter of {name} has no name; give its values, ext["{name}<...>"]'
                )
        return f"<{', '.join(one.name for one in template)}>" if declared else ""

    def _enumerations(self, name: str) -> dict[str, str]:
        """The types of template parameters that are no numbers: of those a launch is given the number."""
        function = declarations.told(self._read.source, name)
        template = () if function is None else function.template
        types = {one.name for one in template if one.is_type}
        space = name.rpartition("::")[0] + "::" if "::" in name else ""
        return {
            one.name: one.ctype if "::" in one.ctype else space + one.ctype
            for one in template
            if re.fullmatch(r"[\w:]+", one.ctype) and not _NUMBER.fullmatch(one.ctype) and one.ctype not in types
        }

    def __repr__(self) -> str:
        path = self._read.source.path
        return f"extension({'<text>' if path is None else path.name!r})"


def extension(code: str | Path, *, options: Iterable[str] = (), define: Mapping[str, int] | None = None) -> Extension:
    """The kernels of a .cu file that was written as a C++ extension of PyTorch, which is taken as it is.

    Host functions, the bindings and host headers are left out; line numbers stay those of the file. What such files expect
    of PyTorch's headers is there: `at::Half` and `c10::BFloat16` with arithmetic and atomics, packed tensor accessors,
    `CUDA_KERNEL_LOOP`, `gpuAtomicAdd`, `std::numeric_limits`, `std::is_same`, `M_PI`. Nothing is compiled until a kernel is
    launched.

    A launch is that of a `Kernel`: tensors stand for pointers and for packed accessors alike, dtypes for template
    parameters, where torch.float16 is `c10::Half`. A kernel that is written for CUDA's own type is given its name instead,
    `T="__half"`.

    Args:
        code: name of the .cu file, looked for beside the calling module and in the working folder; or CUDA C++ itself.
        options: NVRTC options, such as `("-Iinclude",)` for headers of the extension that are not beside it, nor in
            `include` there or one folder up; `("--use_fast_math",)`, as its setup.py may have it.
        define: constants that its setup.py defines, by name.

    Returns:
        Extension: `ext.name[grid, block](*args, scalar_t=torch.float16)` launches; iterate over it for the names.

    Raises:
        SourceError: the file, or a header of its own, is not found; the message has the line of the `#include`.
        InputError: there is no kernel of that name.
        CompileError: at the first launch: what a kernel cannot have, as thrust and cuBLAS, with its line.

    Example:
        >>> code = '''
        ... #include <torch/extension.h>
        ... template <typename scalar_t>
        ... __global__ void twice_kernel(torch::PackedTensorAccessor32<scalar_t, 2> x) {
        ...   CUDA_KERNEL_LOOP(i, x.size(1)) x[blockIdx.y][i] *= 2;
        ... }
        ... void twice(at::Tensor x) { TORCH_CHECK(x.is_cuda()); }
        ... PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("twice", &twice); }
        ... '''
        >>> ext, x = cupyops.extension(code), torch.ones(2, 3)
        >>> with cupyops.simulate():
        ...     ext.twice_kernel[(1, 2), 32](x, scalar_t=x.dtype)
        >>> x
        tensor([[2., 2., 2.],
                [2., 2., 2.]])
    """
    frame = sys._getframe(1)
    return Extension(code, tuple(options), dict(define or {}), folder_of(frame.f_code.co_filename))
