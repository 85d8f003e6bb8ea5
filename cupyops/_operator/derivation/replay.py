"""A recording as straight-line code: addresses, allocations, one packing of all parameters, launches, calls between them.

What only launches see needs no tensor: views are sums of addresses, temporaries share one allocation, and so does what is
saved for backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..._kernel.launch import faults
from ...errors import CupyopsError, LaunchError
from .codegen import Writer
from .constants import Ref
from .parameters import Addresses, Buffers, Machine
from .steps import Alloc, Bump, Call, Launch, Step, View, numbers_in

APART = 512  # bytes: what shares an allocation begins at multiples of this


class Unfit(Exception):
    """A recording that the generated code has no form for."""


class Retry(Exception):
    """Raised in a forward before anything is launched: the call is to be made the plain way, which says what is wrong."""


def needed(steps: Sequence[Step], asked: Iterable[int]) -> set[int]:
    """Numbers of the tensors that a replay needs as such: `asked`, and the arguments of calls."""
    found = set(asked)
    for step in reversed(steps):
        if isinstance(step, Bump):
            found.add(step.number)
        elif isinstance(step, View):
            if step.results[0] in found:
                found |= set(step.reads)
        elif isinstance(step, Call):
            found |= set(step.reads)
    return found


def leave_on_error(writer: Writer, leave: str) -> None:
    """End the `try:` before whose end nothing has been launched."""
    writer.end()
    writer.block("except Exception as _error:")
    writer.line(leave)
    writer.end()


class Body:
    """The lines for some steps of a recording.

    They begin inside a `try:`, which ends after the first launch: whatever fails until then leaves the plan by `leave`.

    Attributes:
        launched: whether the steps launch anything, and the `try:` has been ended.
    """

    def __init__(
        self, writer: Writer, machine: Machine, addresses: Addresses, names: dict[int, str], leave: str
    ) -> None:
        self.writer, self.machine, self.addresses, self.names, self.leave = writer, machine, addresses, names, leave
        self.launched = False

    def write(self, steps: Sequence[Step], tensors: set[int], pooled: dict[int, str], roots: set[int]) -> None:
        """Lines for `steps`; `tensors` are needed as such; of what is allocated, `pooled` lies in the pool of that name;
        of `roots` the addresses are used."""
        self._tensors, self._roots = tensors, roots
        self._launches = [step for step in steps if isinstance(step, Launch)]
        self._allocate([step for step in steps if isinstance(step, Alloc)], pooled)
        groups = _groups([step for step in steps if not isinstance(step, Alloc) and not self._vanishes(step)])
        together = [group for group in groups if isinstance(group, list)]
        buffers = Buffers(self.writer, self.machine, self.addresses, together)
        if self._launches:
            self.writer.line(f"_stream = {self.writer.name(self.machine.stream)}({self.machine.index})")
            self.writer.line(f"try: _slot = {buffers.slots}.pop()")
            self.writer.line(f"except IndexError: _slot = {buffers.new}()  # none, or another thread took the last")
        for group in groups:
            if isinstance(group, list):
                buffers.fill(group)
                for launch in group:
                    self._launch(launch, buffers.parameters(launch))
            else:
                self._step(group)
        if self._launches:
            self.writer.line(f"{buffers.slots}.append(_slot)")
            self._end_of_launches()
        else:
            leave_on_error(self.writer, self.leave)

    def _launch(self, launch: Launch, parameters: str) -> None:
        writer, configuration = self.writer, launch.configuration
        function, handle = self.machine.launcher(launch)
        dims = (*configuration.grid, *configuration.block, configuration.shared)
        sizes = ", ".join(str(size) if size < 2 else writer.name(size) for size in dims)
        writer.line(f"{writer.name(function)}({writer.name(handle)}, {sizes}, _stream, {parameters}, 0)")
        if not self.launched:
            self.launched = True
            leave_on_error(self.writer, self.leave)
            self.writer.block("try:")

    def _end_of_launches(self) -> None:
        self.writer.end()
        self.writer.block("except Exception as _error:")
        names = self.writer.name(explained), self.writer.name(self._launches)
        self.writer.line(f"raise {names[0]}(_error, {names[1]}) from None")
        self.writer.end()

    def _allocate(self, allocs: Sequence[Alloc], pooled: dict[int, str]) -> None:
        empty = self.writer.name(self.machine.empty)
        ends: dict[str, int] = {}
        dtypes: dict[str, torch.dtype] = {}
        for alloc in allocs:
            if alloc.number in self._tensors:
                args = ", ".join(self.writer.name(one) for one in (alloc.size, alloc.stride, alloc.dtype))
                self.writer.line(f"_t{alloc.number} = {empty}({args})")
                if alloc.number in self._roots:
                    self.writer.line(f"_p{alloc.number} = _t{alloc.number}.data_ptr()")
            elif not alloc.nbytes and alloc.number not in pooled:
                self.addresses.shared[alloc.number] = "0", 0  # as PyTorch says of what has no elements
            elif alloc.number in self._roots or alloc.number in pooled:
                pool = pooled.get(alloc.number, "_w")
                start = ends.get(pool, 0)
                self.addresses.shared[alloc.number] = f"{pool}p", start
                ends[pool] = -(-(start + alloc.nbytes) // APART) * APART
                dtypes[pool] = alloc.dtype if pool != "_w" else torch.uint8
        for pool, size in ends.items():
            given = (max(size // dtypes[pool].itemsize, 1),), _ONE, dtypes[pool]
            self.writer.line(f"{pool} = {empty}({', '.join(map(self.writer.name, given))})")
            self.writer.line(f"{pool}p = {pool}.data_ptr()")

    def _step(self, step: Step) -> None:
        if isinstance(step, Bump):
            self.writer.line(f"{self.writer.name(torch.autograd.graph.increment_version)}({self.name(step.number)})")
        elif isinstance(step, Call):
            self._call(step)

    def _vanishes(self, step: Step) -> bool:
        """Return True if a step is a view that only launches see, so that it becomes a sum of addresses."""
        return isinstance(step, View) and step.results[0] not in self._tensors

    def _call(self, step: Call) -> None:
        args = [self.expression(one) for one in step.args]
        args += [f"{name}={self.expression(one)}" for name, one in step.kwargs.items()]
        called = f"{self.writer.name(step.function)}({', '.join(args)})"
        fresh = [number for number in step.results if number is not None and number not in self.names]
        if step.single:
            self.writer.line(f"_t{fresh[0]} = {called}" if fresh else called)
        else:
            self.writer.line("".join(f"_t{one}, " if one in fresh else "_, " for one in step.results) + f"= {called}")
        for number in fresh:
            if number in self._roots:
                self.writer.line(f"_p{number} = _t{number}.data_ptr()")

    def name(self, number: int) -> str:
        """The variable that a tensor is in."""
        return self.names.get(number, f"_t{number}")

    def expression(self, value: Any) -> str:
        """A value with its tensors, as an expression."""
        if isinstance(value, Ref):
            return self.name(value.number)
        if value is None:
            return "None"
        if not any(True for _ in numbers_in(value)):
            # a list is made anew, as a call may keep it
            return f"[*{self.writer.name(value)}]" if type(value) is list else self.writer.name(value)
        if type(value) is dict:
            return "{" + ", ".join(f"{name!r}: {self.expression(one)}" for name, one in value.items()) + "}"
        inside = ", ".join(self.expression(one) for one in value)
        return f"[{inside}]" if type(value) is list else f"({inside},)"


_ONE = (1,)


def _groups(steps: Sequence[Step]) -> list[Any]:
    """The steps, launches that follow each other as a list."""
    found: list[Any] = []
    for step in steps:
        if not isinstance(step, Launch):
            found.append(step)
        elif found and isinstance(found[-1], list):
            found[-1].append(step)
        else:
            found.append([step])
    return found


def explained(error: Exception, launches: Sequence[Launch]) -> Exception:
    """Return the error of a launch, which may be asynchronous, with the names of the kernels that may have caused it."""
    if isinstance(error, CupyopsError) or type(error).__name__ not in ("CUDADriverError", "DriverError"):
        return error
    names = ", ".join(dict.fromkeys(f"{one.specialised.name} with {one.configuration}" for one in launches))
    return LaunchError(f"{names}: {error}{faults.hint(error)}")
