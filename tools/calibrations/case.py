"""A case: a kernel, its arguments, and what is compared. A section: the CUDA C of many cases, compiled together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

ARCH = "sm_90a"
CTYPES = {"h": "unsigned short", "r": "unsigned", "l": "unsigned long long"}
DTYPES = {"h": np.uint16, "r": np.uint32, "l": np.uint64}
BLOCK = 128


@dataclass(frozen=True)
class Array:
    """A pointer argument. What it holds before the launch is `data`; afterwards it is compared if it is an output.

    `format` says what an element is ("f32", "f16", "bf16", "f64"), or "" for bits alone; packed halves are "f16", "bf16".
    """

    data: np.ndarray
    output: bool = False
    format: str = ""


@dataclass(frozen=True)
class Map:
    """A tensor map of the array that is argument number `array`; the other fields are those of the simulator's."""

    array: int
    element: str
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: int = 0
    fill: str = "zero"


Argument = Array | Map | int


@dataclass(frozen=True)
class Case:
    """One launch. `how`: "bits" must agree to the bit, "ulp" is an approximation, "sum" a sum in another order."""

    name: str
    kernel: str
    arguments: tuple[Argument, ...]
    grid: int = 1
    block: int = BLOCK
    shared: int = 0
    how: str = "bits"


@dataclass
class Section:
    """Cases whose kernels are one translation unit."""

    name: str
    cases: list[Case] = field(default_factory=list)
    prelude: str = ""
    _kernels: dict[tuple[str, str, str], str] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """The CUDA C of every kernel."""
        made = [
            f'extern "C" {head} void {name}({parameters}) {{\n{body}\n}}'
            for (parameters, body, head), name in self._kernels.items()
        ]
        return "\n\n".join([self.prelude, *made]) + "\n"

    def kernel(self, parameters: str, body: str, head: str = "__global__") -> str:
        """The name of a kernel of this text."""
        return self._kernels.setdefault((parameters, body, head), f"kernel_{len(self._kernels)}")

    def add(self, name: str, kernel: str, arguments: Sequence[Argument], **options: object) -> None:
        """One more case."""
        self.cases.append(Case(name, kernel, tuple(arguments), **options))  # type: ignore[arg-type]

    def elementwise(
        self,
        name: str,
        gives: str,
        inputs: Sequence[np.ndarray],
        *,
        asm: str = "",
        formats: Sequence[str] = (),
        how: str = "bits",
    ) -> None:
        """Every thread executes `asm` (by default the instruction `name`) on its own elements.

        `gives`: the registers written, one letter each: h, r and l for 16, 32 and 64 bits, p for a predicate, which
        becomes 0 or 1. The inputs' dtypes tell the registers read.
        """
        takes = "".join(next(letter for letter, dtype in DTYPES.items() if dtype == x.dtype) for x in inputs)
        size = len(inputs[0])
        outputs = [
            Array(np.zeros(size, DTYPES[letter.replace("p", "r")]), True, format_)
            for letter, format_ in zip(gives, [*formats, *[""] * (len(gives) - len(formats))])
        ]
        kernel = self.kernel(*_elementwise(asm or _plain(name, gives, takes), gives.replace("p", "r"), takes))
        self.add(name, kernel, [*map(Array, inputs), *outputs], grid=size // BLOCK, how=how)


def _plain(instruction: str, gives: str, takes: str) -> str:
    """The instruction on operands in order; a predicate through a register of its own."""
    sources = [f"%{number + len(gives)}" for number in range(len(takes))]
    if gives == "p":
        operands = ", ".join(["p", *sources])
        return f"{{.reg .pred p; {instruction} {operands}; selp.u32 %0, 1, 0, p;}}"
    return f"{instruction} {', '.join(['%0', *sources])};"


def _elementwise(asm: str, gives: str, takes: str) -> tuple[str, str]:
    """(parameters, body) of a kernel that executes `asm` once in each thread."""
    read = [f"const {CTYPES[letter]}* x{number}" for number, letter in enumerate(takes)]
    written = [f"{CTYPES[letter]}* y{number}" for number, letter in enumerate(gives)]
    lines = ["  unsigned i = blockIdx.x * blockDim.x + threadIdx.x;"]
    lines += [f"  {CTYPES[letter]} a{number} = x{number}[i];" for number, letter in enumerate(takes)]
    lines += [f"  {CTYPES[letter]} b{number};" for number, letter in enumerate(gives)]
    outputs = ", ".join(f'"={letter}"(b{number})' for number, letter in enumerate(gives))
    inputs = ", ".join(f'"{letter}"(a{number})' for number, letter in enumerate(takes))
    lines.append(f'  asm volatile("{asm}" : {outputs} : {inputs});')
    lines += [f"  y{number}[i] = b{number};" for number in range(len(gives))]
    return ", ".join([*read, *written]), "\n".join(lines)
