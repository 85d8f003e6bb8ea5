"""The Python text of a program: a flat function that checks its inputs, allocates, launches and calls.

It is written twice. The first form launches through `Kernel`, which checks all there is to check: it runs in the simulator,
under `cupyops.trace()` and `CUPYOPS_DEBUG`, and once on a GPU, where it loads the kernels. The second form has their handles
and gives addresses to the driver: a launch with its allocation takes Python a third of the time.

Either is a `Text`, which can be pickled; `Text.bound` makes the function.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from .._kernel.compile import backend
from .._kernel.kernel import Kernel
from .._kernel.launch import driver
from .._kernel.launch.configuration import Configuration
from .._util import torch_private
from . import calls
from .kernel_group import Call, Group
from .lowering import Lowering, Name
from .schedule import Schedule
from .size import Real, Size, named, text_of, value_of
from .values import Buffer, Value, viewed

SIZES = "# sizes"  # line in whose place they are computed
BOUNDARY = 16  # bytes: what vector accesses of kernels need

# Python's own binding of these takes 1.6 us less than the call of the overload; the arguments are the same.
BOUND: dict[Any, Any] = {
    torch.ops.aten.mm.default: torch.mm,
    torch.ops.aten.bmm.default: torch.bmm,
    torch.ops.aten.addmm.default: torch.addmm,
    torch.ops.aten.baddbmm.default: torch.baddbmm,
    torch.ops.aten.convolution.default: torch.convolution,
}


Run = Callable[[list[Any]], Sequence[Any]]


class Thread(threading.local):
    """State of a thread: True once it has a CUDA context."""

    ready = False


class Machine:
    """Functions by which the second form of a program allocates and launches, on a CUDA device with loaded kernels."""

    def __init__(self, device: torch.device) -> None:
        self.index = device.index or 0
        self.several = torch.cuda.device_count() > 1
        self.empty = torch_private.empty_strided(device)
        self.view = torch_private.reinterpreted()
        self.stream: Callable[[int], int] = torch_private.current_stream
        self.thread = Thread()

    def launcher(self, kernel: Kernel, configuration: Configuration) -> tuple[Callable[..., None], Any]:
        """The driver's function for a launch, and the handle of the kernel."""
        return driver.launcher(configuration), kernel.instance().on(self.index).function

    def begin(self) -> None:
        """Give this thread a CUDA context: the driver needs one, and a thread that has made no CUDA call has none."""
        backend.cupy().cuda.Device(self.index).use()
        self.thread.ready = True


def on_device(index: int, run: Run) -> Run:
    """`run`, with its device as the current one."""
    current = torch_private.current_device

    def on_its_device(args: list[Any]) -> Sequence[Any]:
        if current() == index:
            return run(args)
        with torch.cuda.device(index):
            return run(args)

    return on_its_device


def slots(arguments: int) -> tuple[list[Any], Callable[[], tuple[Any, int, Any]]]:
    """Spare parameter buffers, one for each run under way, and the function that makes another.

    Parameters are addresses and numbers of at most 8 bytes, and the driver copies them at the launch: so one buffer serves
    each launch of a run.
    """

    def new() -> tuple[Any, int, Any]:
        buffer = ctypes.create_string_buffer(8 * max(arguments, 1))
        start = ctypes.addressof(buffer)
        pointers = (ctypes.c_void_p * max(arguments, 1))(*(start + 8 * k for k in range(max(arguments, 1))))
        return buffer, ctypes.addressof(pointers), pointers

    return [], new


class Launch(NamedTuple):
    """A kernel that a text launches: its CUDA C and name, grid and block; no grid where that follows from sizes."""

    text: str
    name: str
    grid: tuple[int, ...] | None
    block: int


@dataclass
class Text:
    """A form of the function, and what it calls by name.

    Attributes:
        source: Python.
        constants: name -> tensor of the graph, or another object.
        launches: name -> kernel, in order.
        calls: name -> target of a call, and what `calls.planned_arguments` says of it.
    """

    source: str = ""
    constants: dict[str, Any] = field(default_factory=dict)
    launches: dict[str, Launch] = field(default_factory=dict)
    calls: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    def bound(self, kernel_of: Callable[[str, str], Kernel], machine: Machine | None = None) -> Run:
        """The function: the first form, or with a machine the second."""
        scope: dict[str, Any] = {one.__name__: one for one in (restrided, aligned, fitting, slots, struct, torch)}
        scope |= {"empty": torch.empty_strided, "keeps_graph": torch_private.keeps_graph}
        for name, constant in self.constants.items():
            strided = isinstance(constant, torch.Tensor) and constant.layout is torch.strided
            scope[name] = aligned(constant) if strided and constant.data_ptr() & (BOUNDARY - 1) else constant
        for name, launch in self.launches.items():
            kernel = kernel_of(launch.text, launch.name)
            if machine is not None:
                configuration = Configuration.of(launch.grid or 1, launch.block)
                scope[name], scope[f"h{name}"] = machine.launcher(kernel, configuration)
            else:
                scope[name] = kernel if launch.grid is None else kernel[launch.grid, launch.block]
        for name, (target, arguments) in self.calls.items():
            function = calls.function_of(target, arguments)
            scope[name] = function if machine is None else BOUND.get(function, function)
        if machine is not None:
            scope |= {
                "empty": machine.empty,
                "view": machine.view,
                "current_stream": machine.stream,
                "machine": machine,
            }
        exec(compile(self.source, "<cupyops program>", "exec"), scope)
        run: Run = scope["run"]
        return run if machine is None or not machine.several else on_device(machine.index, run)


class Writer:
    """Writes the function of a program: (line, names that it reads, names that it makes), then when each name is dead.

    Args:
        lowering, schedule: of the graph.
        driver: write the second form.

    Attributes:
        text: what is written.
    """

    def __init__(self, lowering: Lowering, schedule: Schedule, *, driver: bool = False) -> None:
        self.lowering, self.units, self.driver = lowering, schedule.units, driver
        self.index = lowering.device.index or 0
        self.text = Text(constants=dict(lowering.constants))
        self.head: list[str] = []  # before the function
        self.body: list[tuple[str, list[str], list[str]]] = []
        self.constants: dict[str, Any] = {}
        self.views: dict[Any, str] = {}
        self.number = 0
        self.groups = [u for u in self.units if isinstance(u, Group) and u.kernel]
        self.in_kernels = {b.name for g in self.groups for b in g.kernel.arguments}  # type: ignore[union-attr]
        self.targets = {s.target.name for s in self.lowering.stores if s.target is not None}
        # inputs that calls take as they were given: those that they overwrite, and those of whose storage they speak
        self.called = {u.args[0].name for u in self.lowering.calls if u.target is not None or _by_storage(u)}
        self.overwritten = {s.buffer.name for s in self.lowering.stores if s.overwrites}
        self.text.source = self._source()

    def _source(self) -> str:
        for unit in self.units:
            self.number += 1
            if isinstance(unit, Group):
                self._launch(unit)
            elif isinstance(unit, Call):
                self._call(unit)
        reads: list[str] = []
        result = [self._argument(one, reads, returned=True) for one in self.lowering.outputs]
        returned = set(reads) | {f"{name}_given" for name in self.targets | self.called}
        dead = self._dead(returned)
        lines = ["def run(args):", *("    " + line for line in (*self._inputs(), *self._driver_begins()))]
        for n, (line, _, _) in enumerate(self.body):
            lines.append("    " + line)
            if dead.get(n):
                lines.append(f"    del {', '.join(dead[n])}")
        lines += ["    " + line for line in self._ends()]
        lines.append(f"    return ({', '.join(result)}{',' if result else ''})")
        sizes: dict[Any, str] = {}
        lines = named(lines, lambda size: sizes.setdefault(size, f"z{len(sizes)}"))
        at = lines.index("    " + SIZES)
        lines[at : at + 1] = ["    " + line for line in self._sizes(sizes)]
        return "\n".join([*dict.fromkeys(self.head), *lines]) + "\n"

    def _sizes(self, names: dict[Any, str]) -> list[str]:
        """The symbols from the arguments, and the sizes that the text names."""
        if not names:
            return []
        inputs, places = self.lowering.inputs, self.lowering.sizes.places
        shapes = {s: _name(inputs[k]) + ("" if dim is None else f".shape[{dim}]") for s, (k, dim) in places.items()}
        return [
            f"{symbol} = {text}" for symbol, text in (*shapes.items(), *((n, text_of(s)) for s, n in names.items()))
        ]

    def _dead(self, returned: set[str]) -> dict[int, list[str]]:
        last: dict[str, int] = {}
        for n, (_, read, made) in enumerate(self.body):
            last |= dict.fromkeys((*read, *made), n)
        dead: dict[int, list[str]] = {}
        for name, n in last.items():
            if name not in returned and name not in self.targets and not name.startswith("self_"):
                dead.setdefault(n, []).append(name)
        return dead

    # -- begin and end -------------------------------------------------------------------------------------------------

    def _inputs(self) -> list[str]:
        """Unpack the arguments; give kernels the strides and the alignment that they were written for."""
        inputs, lines = self.lowering.inputs, []
        lines += [f"{', '.join(map(_name, inputs))}, = args"] if inputs else []
        lines += [SIZES, "args.clear()"]
        taken = [b for b in inputs if isinstance(b, Buffer) and b.name in self.in_kernels]
        lines += [f"{b.name}_given = {b.name}" for b in taken if b.name in self.targets | self.called]
        if not taken:
            return lines
        kept = [b.name for b in taken if b.name in self.overwritten]
        if kept:  # backward may run again, and needs them then
            copies = "; ".join(f"{name} = aligned({name})" for name in kept)
            lines.append(f"if keeps_graph(): {copies}")
        every = "".join(f"{b.name}, " for b in taken)
        strides = tuple(tuple(b.strides) for b in taken)
        mend = f"{every}= fitting(({every}), {strides})"
        wrong = [f"{b.name}.stride() != {tuple(b.strides)}" for b in taken if b.shape]
        if wrong:
            lines.append(f"if {' or '.join(wrong)}: {mend}")
        take = "; ".join(f"p_{b.name} = {b.name}.data_ptr()" for b in taken)
        lines += [take] if self.driver else []
        address, again = ("p_{}", f"; {take}") if self.driver else ("{}.data_ptr()", "")
        wide = [address.format(b.name) for b in taken if b.numel > 1]  # vectors are of several elements
        if wide:
            lines.append(f"if ({' | '.join(wide)}) & {BOUNDARY - 1}: {mend}{again}")
        return lines

    def _driver_begins(self) -> list[str]:
        if not self.driver or not self.text.launches:
            return []
        most = max(len(g.kernel.arguments) + len(g.kernel.numbers) for g in self.groups)  # type: ignore[union-attr]
        self.head.append(f"spare, new_slot = slots({most})")
        held = [name for name in self.lowering.constants if name in self.in_kernels]
        return [
            *(f"p_{name} = {name}.data_ptr()" for name in held),
            "if not machine.thread.ready: machine.begin()",
            "try: slot = spare.pop()",  # which another thread may have emptied
            "except IndexError: slot = new_slot()",
            "buffer, parameters, _ = slot",
            f"stream = current_stream({self.index})",
        ]

    def _ends(self) -> list[str]:
        """Copy back what was computed in copies of inputs. AOTAutograd raises the versions of inputs."""
        written = [b.name for b in self.lowering.inputs if isinstance(b, Buffer) and b.name in self.targets]
        lines = [f"if {name} is not {name}_given: {name}_given.copy_({name})" for name in written]
        if self.driver and self.text.launches:
            lines.append("spare.append(slot)")
        return lines

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _launch(self, unit: Group) -> None:
        kernel = unit.kernel
        assert kernel is not None
        for b in (s.buffer for s in kernel.outputs if s.target is None and not s.overwrites):
            self._allocate(b)
        if not any(s.buffer.numel for s in kernel.outputs):
            return
        grid = kernel.grid if kernel.grid[1] > 1 else kernel.grid[:1]
        sized = any(isinstance(size, Size) for size in grid)
        Configuration.of(tuple(map(value_of, grid)), kernel.block)  # which raises where no GPU can launch that
        name = f"k{self.number}"
        self.text.launches[name] = Launch(kernel.text, kernel.name, None if sized else grid, kernel.block)
        arguments, numbers = [b.name for b in kernel.arguments], [str(n) for n in kernel.numbers]
        if not self.driver:
            launch = f"{name}[{grid}, {kernel.block}]" if sized else name
            self.body.append((f"{launch}({', '.join([*arguments, *numbers])})", arguments, []))
            return
        kinds = "".join("d" if isinstance(n, Real) else "q" for n in kernel.numbers)
        pack = f"pack{len(arguments)}{kinds}"
        self.head.append(f'{pack} = struct.Struct("<{len(arguments)}Q{kinds}").pack_into')
        dims = ", ".join(map(str, (*grid, *(3 - len(grid)) * (1,), kernel.block, 1, 1, 0)))
        addresses = ", ".join([*(f"p_{one}" for one in arguments), *numbers])
        line = f"{pack}(buffer, 0, {addresses}); {name}(h{name}, {dims}, stream, parameters, 0)"
        self.body.append((line, arguments, []))

    def _allocate(self, b: Buffer) -> None:
        if not self.driver:
            device = self._constant(b.device)
            line = f"{b.name} = empty({tuple(b.shape)}, {tuple(b.strides)}, dtype={b.dtype}, device={device})"
        else:
            line = f"{b.name} = empty({tuple(b.shape)}, {tuple(b.strides)}, {self._constant(b.dtype)})"
            if b.name in self.in_kernels:
                line += f"; p_{b.name} = {b.name}.data_ptr()"
        self.body.append((line, [], [b.name]))

    def _call(self, unit: Call) -> None:
        reads: list[str] = []
        arguments = [self._argument(a, reads) for a in unit.args]
        if unit.target is not None or _by_storage(unit):
            name = unit.args[0].name
            arguments[0] = f"{name}_given" if name in self.in_kernels else name  # kernels may read a copy of it
        arguments += [f"{key}={self._argument(a, reads)}" for key, a in unit.kwargs.items()]
        function = f"f{self.number}"
        self.text.calls[function] = unit.node.target, calls.planned_arguments(unit)
        call = f"{function}({', '.join(arguments)})"
        if () in unit.outputs:
            self._receive(unit.outputs[()], call, reads)
            return
        results = f"r{self.number}"
        self.body.append((f"{results} = {call}", reads, [results]))
        for path, made in unit.outputs.items():
            self._receive(made, f"{results}{''.join(f'[{p}]' for p in path)}", [results])

    def _receive(self, made: Buffer | str, expression: str, reads: list[str]) -> None:
        name = _name(made)
        self.body.append((f"{name} = {expression}", reads, [name]))
        if not isinstance(made, Buffer):
            return
        if made.shape:
            strides = f"{name}.stride() != {made.strides}"
            line = f"if {name} is not None and {strides}: {name} = restrided({name}, {made.strides})"
            self.body.append((line, [name], [name]))
        if name in self.in_kernels:
            if not self.driver:
                line = f"if {name}.data_ptr() & {BOUNDARY - 1}: {name} = aligned({name})"
            else:
                self.body.append((f"p_{name} = {name}.data_ptr()", [name], []))
                line = f"if p_{name} & {BOUNDARY - 1}: {name} = aligned({name}); p_{name} = {name}.data_ptr()"
            self.body.append((line, [name], [name]))

    # -- arguments -----------------------------------------------------------------------------------------------------

    def _constant(self, value: Any) -> str:
        for name, one in self.constants.items():
            if type(one) is type(value) and (one is value or (isinstance(value, torch.device) and one == value)):
                return name
        name = f"c{len(self.constants)}"
        self.constants[name] = self.text.constants[name] = value
        return name

    def _argument(self, value: Any, reads: list[str], returned: bool = False) -> str:
        if isinstance(value, Value):
            return self._tensor(value, reads, returned)
        if isinstance(value, Name):
            reads.append(str(value))
            return str(value)
        if isinstance(value, (list, tuple)):
            return f"[{', '.join(self._argument(one, reads) for one in value)}]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k!r}: {self._argument(v, reads)}" for k, v in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({', '.join(self._argument(v, reads) for v in (value.start, value.stop, value.step))})"
        if value is None or isinstance(value, (bool, int, str, Size, Real)):
            return repr(value)
        return self._constant(value)

    def _tensor(self, value: Value, reads: list[str], returned: bool) -> str:
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
        # what is returned shares the version counter of its base, as a view of autograd does; what a call reads need not
        cheap = self.driver and not returned
        key = (buffer.name, value.shape, value.strides, offset, cheap)
        if key not in self.views:
            name = self.views[key] = f"v{len(self.views)}"
            if cheap:
                line = f"{name} = view({buffer.name}, {tuple(value.shape)}, {tuple(value.strides)}, {offset})"
            else:
                start = f"{buffer.name}.storage_offset() + {offset}" if isinstance(base, Buffer) else str(offset)
                line = f"{name} = {buffer.name}.as_strided({tuple(value.shape)}, {tuple(value.strides)}, {start})"
            self.body.append((line, [buffer.name], [name]))
        reads.append(self.views[key])
        return self.views[key]


def _name(one: Buffer | str) -> str:
    return one.name if isinstance(one, Buffer) else str(one)


def _by_storage(unit: Call) -> bool:
    """Return True if a call counts its offset from the start of an input's storage."""
    x = unit.args[0] if unit.args else None
    return unit.node.target is torch.ops.aten.as_strided.default and isinstance(x, Buffer) and x.unit is None


def fitting(tensors: Sequence[torch.Tensor], strides: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Inputs with the strides and the alignment that kernels were written for: themselves, or copies."""
    found = []
    for x, wanted in zip(tensors, strides):
        one = x if x.stride() == wanted else restrided(x, wanted)
        found.append(aligned(one) if one.data_ptr() & (BOUNDARY - 1) else one)
    return found


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
