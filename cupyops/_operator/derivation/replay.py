"""A recording as straight-line code: addresses, allocations, one packing of all parameters, launches, calls between them.

What only launches see needs no tensor: views are sums of addresses, temporaries share one allocation, and so does what is
saved for backward.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..._kernel.launch import driver, faults, signature, tensor_map
from ..._kernel.launch.signature import Argument
from ..._kernel.launch.tensor_map import Description
from ..._util import torch_private
from ...errors import CupyopsError, LaunchError
from .codegen import Writer
from .constants import MapRef, Ref
from .steps import Alloc, Bump, Call, Launch, Recording, Step, View, numbers_in

APART = 512  # bytes: what shares an allocation begins at multiples of this


class Unfit(Exception):
    """A recording that the generated code has no form for."""


class Retry(Exception):
    """Raised in a forward before anything is launched: the call is to be made the plain way, which says what is wrong."""


class Machine:
    """How generated code allocates, writes tensor maps and launches on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.index = device.index
        self.empty = torch_private.empty_strided(device)
        self.encode_tensor_map: Callable[[int, Description, int], None] = tensor_map.encode_at
        self.replace_address: Callable[[int, int], None] = driver.replace_address
        self.stream: Callable[[int], int] = torch_private.current_stream

    def launcher(self, launch: Launch) -> tuple[Callable[..., None], Any]:
        """The driver's function for a launch, and the handle of the kernel."""
        assert launch.loaded is not None
        return driver.launcher(launch.configuration), launch.loaded.function

    def arguments(self, launch: Launch) -> Sequence[Argument]:
        """What the kernel takes."""
        assert launch.loaded is not None
        return launch.loaded.arguments


class Addresses:
    """Where each tensor of a recording lies: a root, of whose address a variable has the value, and bytes from there."""

    def __init__(self, recording: Recording) -> None:
        self._views = {
            step.results[0]: (step.source, step.offset) for step in recording.steps if isinstance(step, View)
        }
        self.shared: dict[int, tuple[str, int]] = {}  # of what is part of a larger allocation

    def of(self, number: int) -> tuple[int, int]:
        """(root, bytes)."""
        offset = 0
        while number in self._views:
            source, more = self._views[number]
            number, offset = source, offset + more
        return number, offset

    def text(self, writer: Writer, number: int) -> str:
        """An expression for the address."""
        root, offset = self.of(number)
        name, start = self.shared.get(root, (f"_p{root}", 0))
        offset += start
        return f"{name} + {writer.name(offset)}" if offset else name

    def roots(self, steps: Iterable[Step]) -> set[int]:
        """The roots of what the launches among the steps are given."""
        return {self.of(number)[0] for step in steps if isinstance(step, Launch) for number in step.reads}


def needed(steps: Sequence[Step], asked: Iterable[int]) -> set[int]:
    """The numbers of which a replay needs tensors: `asked`, and what calls are given."""
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
        buffers = _Buffers(self, [group for group in groups if isinstance(group, list)])
        if self._launches:
            self.writer.line(f"_stream = {self.writer.name(self.machine.stream)}({self.machine.index})")
            self.writer.line(f"_slot = {buffers.slots}.pop() if {buffers.slots} else {buffers.new}()")
        for group in groups:
            if isinstance(group, list):
                buffers.write(group)
            else:
                self._step(group)
        if self._launches:
            self.writer.line(f"{buffers.slots}.append(_slot)")
            self._end_of_launches()
        else:
            leave_on_error(self.writer, self.leave)

    def launch(self, line: str) -> None:
        """The line of a launch."""
        self.writer.line(line)
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
        """Whether it is a view that launches alone see: a sum of addresses."""
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
_ALIGNMENT = tensor_map.PLACE_ALIGNMENT  # of a buffer of parameters, for the tensor maps in it


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


class Maps:
    """The tensor maps of a group of launches, inside one buffer of parameters.

    They are made whole once; afterwards only their addresses change, where a call's tensors lie elsewhere.

    Attributes:
        addresses: of the tensors for which the buffer holds maps.
    """

    def __init__(self, machine: Machine, places: Sequence[int], descriptions: Sequence[Description]) -> None:
        self._machine, self._places, self._descriptions = machine, places, descriptions
        self.addresses: tuple[int, ...] = ()

    def move(self, addresses: tuple[int, ...]) -> None:
        """From now on they are those of tensors at `addresses`."""
        before, self.addresses = self.addresses, ()  # should one of them fail, all are made anew
        if before:
            for place, old, new in zip(self._places, before, addresses):
                if old != new:
                    self._machine.replace_address(place, new)
        else:
            for place, description, new in zip(self._places, self._descriptions, addresses):
                self._machine.encode_tensor_map(place, description, new)
        self.addresses = addresses


class _Buffers:
    """The parameters of all launches in one buffer: addresses, packed at each replay, constants, which stay, and tensor maps."""

    def __init__(self, body: Body, groups: Sequence[list[Launch]]) -> None:
        self.body = body
        writer = body.writer
        self._pack: dict[int, str] = {}
        self._order: dict[int, int] = {}
        self._maps: dict[int, list[tuple[str, Description, int]]] = {}  # of each group: address, what it is, where
        image = bytearray()
        arrays: list[list[int]] = []
        for group in groups:
            texts: dict[str, int] = {}
            start = len(image)
            for launch in group:
                for value in launch.args:
                    if isinstance(value, Ref):
                        texts.setdefault(body.addresses.text(writer, value.number), start + 8 * len(texts))
            image += bytes(8 * len(texts))
            packer = struct.Struct(f"<{len(texts)}Q").pack_into
            self._pack[id(group)] = f"{writer.name(packer)}(_slot[0], {start}, {', '.join(texts)})"
            maps = self._maps[id(group)] = []
            for launch in group:
                self._order[id(launch)] = len(arrays)
                arrays.append(self._offsets(launch, texts, maps, image))
        content, machine = bytes(image), body.machine
        maps_of = [maps for maps in self._maps.values() if maps]
        self._first_map = 1 + len(arrays)

        def new() -> tuple[Any, ...]:
            memory = ctypes.create_string_buffer(len(content) + _ALIGNMENT)
            shift = -ctypes.addressof(memory) % _ALIGNMENT
            buffer = (ctypes.c_char * (len(content) or 1)).from_buffer(memory, shift)
            buffer.raw = content
            start = ctypes.addressof(buffer)
            kept = [(ctypes.c_void_p * len(offsets))(*(start + offset for offset in offsets)) for offsets in arrays]
            maps = [Maps(machine, [start + one[2] for one in maps], [one[1] for one in maps]) for maps in maps_of]
            return buffer, *(ctypes.addressof(one) for one in kept), *maps, kept

        self.slots, self.new = writer.name([]), writer.name(new)

    def _offsets(
        self, launch: Launch, texts: dict[str, int], maps: list[tuple[str, Description, int]], image: bytearray
    ) -> list[int]:
        """Where each argument of a launch lies; constants are added to the image, and room for tensor maps."""
        arguments, name = self.body.machine.arguments(launch), launch.specialised.name
        offsets = []
        for index, (argument, value) in enumerate(zip(arguments, launch.args)):
            if isinstance(value, Ref):
                offsets.append(texts[self.body.addresses.text(self.body.writer, value.number)])
                continue
            if isinstance(value, MapRef):
                offsets.append(self._place(value, maps, image))
                continue
            image += bytes(-len(image) % max(argument.align, 8))
            offsets.append(len(image))
            image += signature.constant(name, arguments, index, value)
        image += bytes(-len(image) % 8)
        return offsets

    def _place(self, value: MapRef, maps: list[tuple[str, Description, int]], image: bytearray) -> int:
        """Where a tensor map lies: equal ones of a group are one."""
        address = self.body.addresses.text(self.body.writer, value.tensor.number)
        for text, description, place in maps:
            if (text, description) == (address, value.description):
                return place
        image += bytes(-len(image) % _ALIGNMENT)
        maps.append((address, value.description, len(image)))
        image += bytes(tensor_map.BYTES)
        return maps[-1][2]

    def write(self, group: list[Launch]) -> None:
        """Pack the addresses, have tensor maps follow their tensors, and launch."""
        writer = self.body.writer
        writer.line(self._pack[id(group)])
        if maps := self._maps[id(group)]:
            before = [one for one in self._maps.values() if one]
            place = f"_slot[{self._first_map + next(i for i, one in enumerate(before) if one is maps)}]"
            writer.line(f"_m = ({', '.join(text for text, *_ in maps)},)")
            writer.line(f"if {place}.addresses != _m: {place}.move(_m)")
        for launch in group:
            function, handle = self.body.machine.launcher(launch)
            configuration = launch.configuration
            dims = (*configuration.grid, *configuration.block, configuration.shared)
            sizes = ", ".join(str(size) if size < 2 else writer.name(size) for size in dims)
            slot = f"_slot[{1 + self._order[id(launch)]}]"
            self.body.launch(f"{writer.name(function)}({writer.name(handle)}, {sizes}, _stream, {slot}, 0)")


def explained(error: Exception, launches: Sequence[Launch]) -> Exception:
    """What a launch after the first raises, with the kernels that it may have come from."""
    if isinstance(error, CupyopsError) or type(error).__name__ not in ("CUDADriverError", "DriverError"):
        return error
    names = ", ".join(dict.fromkeys(f"{one.specialised.name} with {one.configuration}" for one in launches))
    return LaunchError(f"{names}: {error}{faults.hint(error)}")
