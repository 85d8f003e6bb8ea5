"""Compile a piece of CUDA C, or take PTX as it is, and launch it in the simulator on NumPy arrays."""

import inspect
from functools import cache

import numpy as np
import pytest

from cupyops._kernel.compile import compiler, source
from cupyops._kernel.compile.binary import Binary
from cupyops._kernel.compile.declarations import function
from cupyops.simulator import Pointer, Program, Report, SimulatorError

FILE = "<text>.cu"  # what messages call the piece of CUDA C


class Empty:
    """An argument: global memory that holds nothing yet."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array


def program(code: str, name: str, arch: str = "sm_80", options: tuple[str, ...] = ()) -> tuple[Program, str]:
    """A program with fresh memory, and what its PTX calls the kernel."""
    binary = _compiled(inspect.cleandoc(code), name, arch, options)
    return Program(binary.ptx, sources={FILE: inspect.cleandoc(code)}), binary.symbol


def ptx(code: str, name: str, arch: str = "sm_80") -> str:
    """What NVRTC makes of it."""
    return _compiled(inspect.cleandoc(code), name, arch, ()).ptx


def parameter_names(code: str, name: str) -> list[str]:
    """As the C text has them."""
    return [parameter for _, parameter in function(source.load(code), name.split("<")[0]).parameters]


def launch(loaded: tuple[Program, str], names: list[str], grid, block, *args, label: str = "", **options) -> Report:
    """Launch with arrays as allocations named after the parameters; None is a null pointer. They are gone afterwards."""
    kernels, symbol = loaded
    made = []

    def argument(value, name):
        if value is None:
            return 0
        if not isinstance(value, (np.ndarray, Empty)):
            return value
        array = value.array if isinstance(value, Empty) else value
        made.append(kernels.memory.allocate(array, name, initialized=not isinstance(value, Empty)))
        return Pointer(made[-1])

    names = [*names, *["surplus"] * (len(args) - len(names))]
    extents = [(extent,) if isinstance(extent, int) else extent for extent in (grid, block)]
    try:
        taken = [argument(value, name) for value, name in zip(args, names)]
        return kernels.launch(symbol, *extents, taken, label=label, **options)
    finally:
        for allocation in made:
            kernels.memory.free(allocation)


def run(code: str, name: str, grid, block, *args, arch="sm_80", nvrtc=(), **options) -> Report:
    """Compile and launch; `options` are those of `Program.launch`. What the kernel wrote is in the arrays."""
    loaded = program(code, name, arch, tuple(nvrtc))
    return launch(loaded, parameter_names(code, name), grid, block, *args, label=name, **options)


def fails(kind: type[SimulatorError], code: str, name: str, grid, block, *args, says=(), **options) -> str:
    """The launch ends with an error of exactly this kind. Its message names the kernel, a PTX line, the line of the text
    that is marked `// here`, the other party's line where one is marked `// other`, and every word of `says`.
    """
    with pytest.raises(SimulatorError) as caught:
        run(code, name, grid, block, *args, **options)
    message = str(caught.value)
    assert type(caught.value) is kind, message
    text = inspect.cleandoc(code)
    here, _, other = message.partition("the other access:")
    expected = [f"{name}: ", *says, *(["PTX line", place(text, "// here")] if "// here" in text else [])]
    missing = [word for word in expected if word not in here]
    assert not missing, f"{missing} not in:\n{message}"
    if "// other" in text:
        assert place(text, "// other") in other and "PTX line" in other, message
    return message


def place(code: str, marker: str) -> str:
    """`<text>.cu:7`, with the excerpt that messages show, for the line that bears the marker."""
    lines = inspect.cleandoc(code).splitlines()
    (number,) = [number for number, line in enumerate(lines, 1) if marker in line]
    return f"{FILE}:{number} |  {lines[number - 1].strip()}"


@cache
def _compiled(code: str, name: str, arch: str, options: tuple[str, ...]) -> Binary:
    return compiler.compile(source.load(code + "\n"), name, arch, options)[0]
