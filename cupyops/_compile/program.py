"""The program of a graph: a flat Python function that allocates, launches and calls."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.fx import GraphModule

from .._kernel.kernel import Kernel
from .kernel_group import Call, Group
from .lowering import Lowering, Name
from .schedule import Schedule
from .sizes import Sizes
from .values import Buffer, Value, viewed

log = logging.getLogger("cupyops.compile")

INCLUDE = '#include "compiled/elements.cuh"\n\n'
COMPILERS = 8  # threads that NVRTC runs in


@functools.lru_cache(maxsize=4096)
def kernel_of(text: str, exact: bool) -> Kernel:
    """The kernel of a text: equal texts are one kernel, so equal layers of a model share theirs."""
    options = ("--fmad=false",) if exact else ()
    return Kernel(INCLUDE + text, "kernel", strided=True, options=options)


class Program:
    """What is called in the place of a graph.

    Attributes:
        source: the Python text of the function.
        kernels: the kernel of each launch, in order.
        lowering, schedule: how it came to be.
    """

    def __init__(self, graph: GraphModule, sizes: Sizes | None = None, *, exact: bool = False) -> None:
        self.lowering = Lowering(graph, sizes, exact=exact)
        self.schedule = Schedule(self.lowering)
        self.kernels: list[Kernel] = []
        self.scope: dict[str, Any] = {
            "torch": torch,
            "restrided": restrided,
            "aligned": aligned,
            "empty": torch.empty_strided,
            **self.lowering.constants,
        }
        self.source = _Writer(self).text()
        log.debug("program:\n%s", self.source)
        exec(compile(self.source, "<cupyops program>", "exec"), self.scope)
        self.run: Callable[[list[Any]], Sequence[Any]] = self.scope["run"]

    def compile(self, arch: str) -> None:
        """Compile all kernels for an architecture, several at a time.

        Raises:
            CompileError: NVRTC refuses one.
        """
        distinct = list({id(k): k for k in self.kernels}.values())
        with ThreadPoolExecutor(COMPILERS) as pool:
            list(pool.map(lambda kernel: kernel.instance().binary(arch), distinct))


class _Writer:
    """Writes the function of a program: (line, names that it reads, names that it makes), then when each name is dead."""

    def __init__(self, program: Program) -> None:
        self.program, self.lowering = program, program.lowering
        self.scope = program.scope
        self.body: list[tuple[str, list[str], list[str]]] = []
        self.constants: dict[str, Any] = {}
        self.views: dict[Any, str] = {}
        self.number = 0

    def text(self) -> str:
        units = self.program.schedule.units
        groups = [u for u in units if isinstance(u, Group)]
        self.in_kernels = {b.name for g in groups if g.kernel for b in g.kernel.arguments}
        self.targets = {s.target.name for s in self.lowering.stores if s.target is not None}
        for unit in units:
            self.number += 1
            if isinstance(unit, Group):
                self._launch(unit)
            elif isinstance(unit, Call):
                self._call(unit)
        reads: list[str] = []
        result = [self._argument(one, reads) for one in self.lowering.outputs]
        lines = ["def run(args):", *("    " + line for line in self._inputs())]
        returned = set(reads) | {f"{b.name}_given" for b in self.lowering.inputs if isinstance(b, Buffer)}
        dead = self._dead(returned)
        for n, (line, _, _) in enumerate(self.body):
            lines.append("    " + line)
            if dead.get(n):
                lines.append(f"    del {', '.join(dead[n])}")
        lines += ["    " + line for line in self._written_back()]
        lines.append(f"    return ({', '.join(result)}{',' if result else ''})")
        return "\n".join(lines) + "\n"

    def _dead(self, returned: set[str]) -> dict[int, list[str]]:
        last: dict[str, int] = {}
        for n, (_, read, made) in enumerate(self.body):
            for name in (*read, *made):
                last[name] = n
        dead: dict[int, list[str]] = {}
        for name, n in last.items():
            if name not in returned and name not in self.targets and not name.startswith("self_"):
                dead.setdefault(n, []).append(name)
        return dead

    def _inputs(self) -> list[str]:
        """Unpack the arguments; give kernels the strides and the alignment that they were written for."""
        inputs = self.lowering.inputs
        names = [b.name if isinstance(b, Buffer) else str(b) for b in inputs]
        lines = [f"{', '.join(names)}, = args"] if names else []
        lines.append("args.clear()")
        called = {u.args[0].name for u in self.lowering.calls if u.target is not None or self._by_storage(u)}
        for b in inputs:
            if not isinstance(b, Buffer) or b.name not in self.in_kernels:
                continue
            if b.name in self.targets | called:
                lines.append(f"{b.name}_given = {b.name}")
            if b.shape:
                lines.append(f"if {b.name}.stride() != {b.strides}: {b.name} = restrided({b.name}, {b.strides})")
            lines.append(f"if {b.name}.data_ptr() & 15: {b.name} = aligned({b.name})")
        return lines

    def _written_back(self) -> list[str]:
        """What was computed in a copy of an input goes back into the input."""
        return [
            f"if {b.name} is not {b.name}_given: {b.name}_given.copy_({b.name})"
            for b in self.lowering.inputs
            if isinstance(b, Buffer) and b.name in self.targets
        ]

    def _launch(self, unit: Group) -> None:
        kernel = unit.kernel
        assert kernel is not None
        made = [s.buffer for s in kernel.outputs if s.target is None]
        for b in made:
            device = self._constant(b.device)
            line = f"{b.name} = empty({tuple(b.shape)}, {tuple(b.strides)}, dtype={b.dtype}, device={device})"
            self.body.append((line, [], [b.name]))
        if not any(s.buffer.numel for s in kernel.outputs):
            return
        compiled = kernel_of(kernel.text, self.lowering.exact)
        self.program.kernels.append(compiled)
        grid = kernel.grid if kernel.grid[1] > 1 else kernel.grid[0]
        name = f"k{self.number}"
        self.scope[name] = compiled[grid, kernel.block]
        arguments = [b.name for b in kernel.arguments]
        self.body.append((f"{name}({', '.join(arguments)})", arguments, []))

    def _call(self, unit: Call) -> None:
        reads: list[str] = []
        arguments = [self._argument(a, reads) for a in unit.args]
        if unit.target is not None or self._by_storage(unit):
            name = unit.args[0].name
            arguments[0] = f"{name}_given" if name in self.in_kernels else name  # where kernels read a copy of it
        arguments += [f"{key}={self._argument(a, reads)}" for key, a in unit.kwargs.items()]
        function = f"f{self.number}"
        self.scope[function] = unit.node.target
        call = f"{function}({', '.join(arguments)})"
        if () in unit.outputs:
            self._receive(unit.outputs[()], call, reads)
            return
        self.body.append((f"r = {call}", reads, []))
        for path, made in unit.outputs.items():
            self._receive(made, f"r{''.join(f'[{p}]' for p in path)}", [])

    def _by_storage(self, unit: Call) -> bool:
        """Whether a call counts its offset from the start of an input's storage."""
        x = unit.args[0] if unit.args else None
        return unit.node.target is torch.ops.aten.as_strided.default and isinstance(x, Buffer) and x.unit is None

    def _receive(self, made: Buffer | str, expression: str, reads: list[str]) -> None:
        name = made.name if isinstance(made, Buffer) else str(made)
        self.body.append((f"{name} = {expression}", reads, [name]))
        if isinstance(made, Buffer) and made.shape:
            strides = f"{name}.stride() != {made.strides}"
            self.body.append(
                (f"if {name} is not None and {strides}: {name} = restrided({name}, {made.strides})", [name], [])
            )
        if isinstance(made, Buffer) and made.aliases and name in self.in_kernels:
            self.body.append((f"if {name}.data_ptr() & 15: {name} = aligned({name})", [name], []))

    # -- arguments -----------------------------------------------------------------------------------------------------

    def _constant(self, value: Any) -> str:
        for name, one in self.constants.items():
            if type(one) is type(value) and one is value or (isinstance(value, torch.device) and one == value):
                return name
        name = f"c{len(self.constants)}"
        self.constants[name] = self.scope[name] = value
        return name

    def _argument(self, value: Any, reads: list[str]) -> str:
        if isinstance(value, Value):
            return self._tensor(value, reads)
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._argument(one, reads) for one in value)}]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self._argument(v, reads)}" for k, v in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({', '.join(self._argument(v, reads) for v in (value.start, value.stop, value.step))})"
        if isinstance(value, Name):
            reads.append(str(value))
            return str(value)
        if value is None or isinstance(value, (bool, int, str)):
            return repr(value)
        return self._constant(value)

    def _tensor(self, value: Value, reads: list[str]) -> str:
        """Name of a tensor; of a view that no kernel stores, as strided from what lies in memory."""
        base = viewed(value)
        buffer = base if isinstance(base, Buffer) else base.store.buffer if base.store is not None else None
        assert buffer is not None
        if base is value:
            reads.append(buffer.name)
            return buffer.name
        number = self.lowering.sizes.number
        offset = number(value.meta.storage_offset())
        offset -= number(base.meta.storage_offset()) if base.meta is not None else 0
        key = (buffer.name, value.shape, value.strides, offset)
        if key not in self.views:
            name = self.views[key] = f"v{len(self.views)}"
            start = f"{buffer.name}.storage_offset() + {offset}" if isinstance(base, Buffer) else str(offset)
            line = f"{name} = {buffer.name}.as_strided({tuple(value.shape)}, {tuple(value.strides)}, {start})"
            self.body.append((line, [buffer.name], [name]))
        reads.append(self.views[key])
        return self.views[key]


def restrided(x: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    """x with the strides that the graph has for it: the same memory where only dimensions of size 1 differ, else a copy."""
    if not x.numel() or all(a == b or size == 1 for a, b, size in zip(x.stride(), strides, x.shape)):
        return x.as_strided(x.shape, strides)
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """A copy at an address that 16-byte accesses take."""
    if not x.numel():
        return x
    if 0 not in x.stride() and torch._debug_has_internal_overlap(x) == 0:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride()))
    return x.as_strided((extent,), (1,)).clone().as_strided(x.shape, x.stride(), 0)
