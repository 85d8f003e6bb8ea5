"""`%%cuda`: a notebook cell of CUDA C becomes kernels in the notebook's namespace."""

from __future__ import annotations

import re
from types import TracebackType
from typing import Any

import torch

from ..errors import CompileError, CupyopsError, InputError
from .compile.declarations import Function, function, functions
from .compile.source import Source
from .kernel import Kernel, executors
from .launch.ctype import DTYPES

_HINT = "write the kernel below the line %%cuda, as __global__ void name(...) { ... }"
_OTHERS = frozenset(("cupyops", "torch", "IPython"))
_INSTANCE = re.compile(r"(\w+)(?:<(.+)>)?")


def load_ipython_extension(shell: Any) -> None:
    """Make the cell magic `%%cuda` known to IPython and Jupyter; `%load_ext cupyops` runs this.

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

    From then on the traceback of a `CupyopsError` shows the author's own frames alone, and the message.
    """

    def cuda(line: str, cell: str) -> None:
        try:
            shell.push(_kernels(line, cell))
        except CupyopsError as error:
            text = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
            error._render_traceback_ = lambda: text  # type: ignore[attr-defined]  # what IPython shows in its place
            raise

    def rendered(error: CupyopsError) -> list[str]:
        frames = _of_the_author(error.__traceback__)
        text: list[str] = shell.InteractiveTB.structured_traceback(type(error), error, frames, tb_offset=0)
        return text

    CupyopsError._render_traceback_ = rendered  # type: ignore[attr-defined]  # which IPython asks before its own
    cuda.__doc__ = load_ipython_extension.__doc__
    shell.register_magic_function(cuda, "cell", "cuda")


def unload_ipython_extension(shell: Any) -> None:
    """Remove the cell magic `%%cuda`; `%unload_ext cupyops` runs this. The kernels stay."""
    shell.magics_manager.magics["cell"].pop("cuda", None)
    if hasattr(CupyopsError, "_render_traceback_"):
        del CupyopsError._render_traceback_


def _of_the_author(traceback: TracebackType | None) -> TracebackType | None:
    """The frames that are neither ours nor of what calls us: IPython, PyTorch."""
    if traceback is None:
        return None
    rest = _of_the_author(traceback.tb_next)
    # what the simulator makes of a kernel is of no module
    if traceback.tb_frame.f_globals.get("__name__", "cupyops").partition(".")[0] in _OTHERS:
        return rest
    return TracebackType(rest, traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno)


def _kernels(line: str, cell: str) -> dict[str, Kernel]:
    """The kernels of a cell, by name, compiled."""
    from IPython.core.magic_arguments import MagicArgumentParser

    parser = MagicArgumentParser(prog="%%cuda")
    parser.add_argument("instance", nargs="*", help="an instance of a template to compile now: name<float32,4>")
    parser.add_argument("--option", action="append", default=[], help="for NVRTC, such as --option=--use_fast_math")
    asked = parser.parse_argstring(line)

    text = f"\n{cell}"  # line 1 is that of %%cuda, as the notebook counts
    source = Source("", text)
    declared = {one.name: function(source, one.name) for one in functions(source) if one.is_defined}
    found = {}
    for name, one in declared.items():
        parameters = ", ".join(parameter.name for parameter in one.template)
        found[name] = Kernel(text, f"{name}<{parameters}>" if parameters else name, options=asked.option)
        found[name]._beside = None  # like a Kernel made in the notebook: includes are looked for in the working folder
    if not found:
        raise InputError(f"the cell has no __global__ function; {_HINT}")
    instances = _instances_named(asked.instance, found)
    for kernel, values in instances:
        kernel.instance(**values).binary(_arch())
    for name, kernel in found.items():
        if all(kernel is not named for named, _ in instances):
            _check(kernel, declared[name])
    return found


def _instances_named(names: list[str], found: dict[str, Kernel]) -> list[tuple[Kernel, dict[str, Any]]]:
    """The instances that the line names."""
    chosen = []
    for text in names:
        match = _INSTANCE.fullmatch(text)
        if match is None or match[1] not in found:
            raise InputError(f"%%cuda names {text!r}; the cell has {', '.join(map(_shown, found.values()))}")
        kernel = found[match[1]]
        values = [_value(token.strip()) for token in match[2].split(",")] if match[2] else []
        if len(values) != len(kernel.template):
            raise InputError(f"%%cuda names {text!r}; it is {_shown(kernel)}: give each a value")
        chosen.append((kernel, dict(zip(kernel.template, values))))
    return chosen


def _check(kernel: Kernel, declared: Function) -> None:
    """Compile a kernel that the line does not name, unless it is a template that takes more than types."""
    if not all(parameter.is_type for parameter in declared.template):
        return
    try:
        kernel.instance(**dict.fromkeys(kernel.template, torch.float32)).binary(_arch())
    except CompileError as error:
        if kernel.template and _hangs_on_the_type(kernel, error):
            error.add_note(f"If it is not for float32, name what it is for: %%cuda {kernel.base}<float16>")
        raise


def _hangs_on_the_type(kernel: Kernel, error: CompileError) -> bool:
    """Return True if a template that does not compile for float32 may do so for another type."""
    if "static assertion failed" in str(error):
        return True
    try:
        kernel.instance(**dict.fromkeys(kernel.template, torch.float16)).binary(_arch())
    except CompileError:
        return False
    return True


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
