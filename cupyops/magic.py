"""`%%cuda`: a notebook cell of CUDA C becomes kernels in the notebook's namespace."""

from __future__ import annotations

import re
from typing import Any

import torch

from .ctype import DTYPES
from .errors import CompileError, CupyopsError, InputError
from .kernel import Kernel, executors
from .source import Source, strip_comments

_HINT = "write the kernel below the line %%cuda, as __global__ void name(...) { ... }"
# the name of a __global__ function that is defined, and not only declared, in the text
_DEFINED = re.compile(
    r"__global__(?:(?!__global__)[^;{}])*?\b(\w+)\s*\((?:[^(){};]|\([^(){};]*\))*\)\s*\{",
)
_INSTANCE = re.compile(r"(\w+)(?:<(.+)>)?")


def load_ipython_extension(shell: Any) -> None:
    """What `%load_ext cupyops` runs: makes the cell magic `%%cuda` known to IPython and Jupyter.

    Args:
        shell: the `InteractiveShell`.

    A cell that begins with `%%cuda` is CUDA C. Each `__global__` function in it becomes a `cupyops.Kernel` of its name,
    compiled at once; running the cell again replaces them. Where it does not compile, the compiler's message stands below
    the cell, and what the names meant before, they still mean.

        %%cuda
        template <typename T> __global__ void twice(const T* x, T* y, int n) {
          int i = blockIdx.x * blockDim.x + threadIdx.x;
          if (i < n) y[i] = 2 * x[i];
        }

    Then `twice[4, 256](x, y, n, T=x.dtype)` launches it. The compiler looks into a template only where it has values: of
    this one float32 is compiled at once; for others the line names them (`%%cuda twice<float16> norm<float32,4>`), and a
    template that takes numbers and is not named is compiled when it is launched. `%%cuda --option=--use_fast_math` passes
    an option to NVRTC, and may be repeated. Files of `#include "..."` are looked for in the working folder. The
    architecture is that of the current GPU, else that of `cupyops.simulate()`.
    """

    def cuda(line: str, cell: str) -> None:
        try:
            shell.push(_kernels(line, cell))
        except CupyopsError as error:
            text = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
            error._render_traceback_ = lambda: text  # type: ignore[attr-defined]  # what IPython shows in its place
            raise

    cuda.__doc__ = load_ipython_extension.__doc__
    shell.register_magic_function(cuda, "cell", "cuda")


def unload_ipython_extension(shell: Any) -> None:
    """What `%unload_ext cupyops` runs: `%%cuda` is gone, the kernels stay."""
    shell.magics_manager.magics["cell"].pop("cuda", None)


def _kernels(line: str, cell: str) -> dict[str, Kernel]:
    """The kernels of a cell, by name, compiled."""
    from IPython.core.magic_arguments import MagicArgumentParser

    from .cli.instance import template_parameters

    parser = MagicArgumentParser(prog="%%cuda")
    parser.add_argument("instance", nargs="*", help="an instance of a template to compile now: name<float32,4>")
    parser.add_argument("--option", action="append", default=[], help="for NVRTC, such as --option=--use_fast_math")
    asked = parser.parse_argstring(line)

    text = f"\n{cell}"  # line 1 is that of %%cuda, as the notebook counts
    source = Source("", text)
    clean = strip_comments(text)
    found = {}
    for name in dict.fromkeys(_DEFINED.findall(clean)):
        parameters = [parameter for parameter, _ in template_parameters(source, name)]
        found[name] = Kernel(text, f"{name}<{', '.join(parameters)}>", options=asked.option)
        found[name]._beside = None  # like a Kernel made in the notebook: includes are looked for in the working folder
    if not found:
        raise InputError(f"the cell has no __global__ function; {_HINT}")
    instances = _asked(asked.instance, found)
    for kernel, values in instances:
        kernel._specialise(values).binary(_arch())
    for kernel in found.values():
        if all(kernel is not named for named, _ in instances):
            _check(kernel, clean)
    return found


def _asked(names: list[str], found: dict[str, Kernel]) -> list[tuple[Kernel, dict[str, Any]]]:
    """The instances that the line names."""
    chosen = []
    for text in names:
        match = _INSTANCE.fullmatch(text)
        if match is None or match[1] not in found:
            raise InputError(f"%%cuda names {text!r}; the cell has {', '.join(map(_shown, found.values()))}")
        kernel = found[match[1]]
        values = [_value(token.strip()) for token in match[2].split(",")] if match[2] else []
        if len(values) != len(kernel.template):
            raise InputError(f"%%cuda names {text!r}; it is {_shown(kernel)}")
        chosen.append((kernel, dict(zip(kernel.template, values))))
    return chosen


def _check(kernel: Kernel, text: str) -> None:
    """Compile a kernel that the line does not name, unless it is a template that takes more than types."""
    if not all(re.search(rf"\b(typename|class)\s+{name}\b", text) for name in kernel.template):
        return
    try:
        kernel._specialise(dict.fromkeys(kernel.template, torch.float32)).binary(_arch())
    except CompileError as error:
        if kernel.template:
            error.add_note(f"If it is not for float32, name what it is for: %%cuda {kernel.base}<float16>")
        raise


def _arch() -> str:
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return f"sm_{major}{minor}"
    return getattr(executors.get("cpu"), "arch", "sm_80")


def _value(token: str) -> Any:
    """A template value as it is written: `float32`, `float`, `true`, `4`, or a name in the text."""
    dtype = getattr(torch, token.removeprefix("torch."), None)
    if isinstance(dtype, torch.dtype) or token in DTYPES:
        return DTYPES.get(token, dtype)
    if token.lower() in ("true", "false"):
        return token.lower() == "true"
    return int(token) if re.fullmatch(r"-?\d+", token) else token


def _shown(kernel: Kernel) -> str:
    return f"{kernel.base}<{', '.join(kernel.template)}>" if kernel.template else kernel.base
