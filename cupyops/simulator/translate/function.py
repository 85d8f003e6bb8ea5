"""Compiled kernel: functions to call, one for each basic block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

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


@dataclass(frozen=True)
class CompiledBlock:
    """A basic block, ready to run."""

    index: int
    text: str  # of its function
    namespace: dict[str, Any] = field(repr=False, compare=False)  # what the text names
    ends: str
    targets: tuple[int, ...]
    first: int  # number of its first instruction
    size: int  # instructions
    members: Members | None
    reduction: Reduction | None

    @cached_property
    def function(self) -> Callable[..., Any]:
        """Function of the machine and a group. Compiled when the block is first run: many never are."""
        name = f"block_{self.index}"
        exec(compile(self.text, f"<{name}>", "exec"), self.namespace)
        function: Callable[..., Any] = self.namespace[name]
        return function


@dataclass(frozen=True)
class Compiled:
    """A kernel, ready to be launched."""

    function: Function
    layout: Layout
    blocks: list[CompiledBlock]
    instructions: list[Instruction]
    registers: list[Any]  # the dtype of each register that must exist before it is written; None for the others
    written_parameters: set[int] | None  # through which the kernel writes global memory; None: any memory at all
    text: str  # of the generated functions
    beside: bool = False  # whether anything goes on beside the threads: bulk copies, mbarriers, products of matrices
    reads_beside: bool = False  # whether some of it reads shared memory
    undefined: dict[int, bool] = field(
        default_factory=dict
    )  # registers that may be undefined, and whether they are at first
