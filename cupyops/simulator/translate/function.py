"""Compiled kernel: functions to call, one for each basic block."""

from __future__ import annotations

import marshal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from .layout import Layout
from .ptx import Function, Instruction


@dataclass(frozen=True)
class Reduction:
    """Reduction by bar.red, and the register that gets its result."""

    operation: str
    register: int


@dataclass(frozen=True)
class Members:
    """The lanes that come together before a block runs: those that a mask names, or all of a warp or warpgroup."""

    lanes: int = 32
    mask: int | None = None
    register: int | None = None  # that holds the mask


class Load(NamedTuple):
    """Elements that an instruction loads from each thread's address."""

    dtype: Any
    size: int  # bytes of an element
    elements: int
    pc: int
    strong: bool = False  # volatile, relaxed, acquire
    constant: bool = False  # ld.global.nc


class Made(NamedTuple):
    """A thing that generated text names, by what makes it: a function, unlike its results, can be written to a file."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]


@dataclass(frozen=True)
class Names:
    """Things that the text of a kernel's blocks names."""

    given: dict[str, Any]

    def __reduce__(self) -> tuple[type[Names], tuple[dict[str, Any]]]:
        """Pickle what makes the things, as some of these cannot be pickled."""
        return Names, (self.given,)

    @cached_property
    def found(self) -> dict[str, Any]:
        """The things themselves."""
        made = {
            name: one.function(*one.arguments) if isinstance(one, Made) else one for name, one in self.given.items()
        }
        return {"np": np, **made}


@dataclass(frozen=True)
class CompiledBlock:
    """A basic block, ready to run."""

    index: int
    text: str  # of its function; "" where the code is kept
    names: Names = field(repr=False, compare=False)
    ends: str
    targets: tuple[int, ...]
    first: int  # number of its first instruction
    size: int  # instructions
    members: Members | None
    reduction: Reduction | None
    code: bytes = field(default=b"", repr=False, compare=False)  # what Python makes of the text, as `marshal` has it

    @cached_property
    def function(self) -> Callable[..., Any]:
        """Function of the machine and a group. Loaded when the block is first run: many never are."""
        exec(marshal.loads(self.compiled), self.names.found)
        function: Callable[..., Any] = self.names.found[self._name]
        return function

    @cached_property
    def compiled(self) -> bytes:
        """The code of the text, or what was kept of it."""
        return self.code or marshal.dumps(compile(self.text, f"<{self._name}>", "exec"))

    def kept(self) -> CompiledBlock:
        """Copy of the block for another process: the code in the place of the text, once the block has run."""
        code = vars(self).get("compiled", self.code)
        return replace(self, code=code, text="" if code else self.text)

    @property
    def _name(self) -> str:
        return f"block_{self.index}"


@dataclass(frozen=True)
class Compiled:
    """A kernel, ready to be launched."""

    function: Function
    layout: Layout
    blocks: list[CompiledBlock]
    instructions: list[Instruction]
    registers: list[Any]  # the dtype of each register that must exist before it is written; None for the others
    written_parameters: set[int] | None  # through which the kernel writes global memory; None: any memory at all
    beside: bool = False  # whether anything goes on beside the threads: bulk copies, mbarriers, products of matrices
    reads_beside: bool = False  # whether some of it reads shared memory
    fences: bool = False  # whether there are fences between threads
    meets: bool = False  # whether some warps of a block may meet without the others
    undefined: dict[int, bool] = field(default_factory=dict)  # registers that may be so, and whether they are at first
