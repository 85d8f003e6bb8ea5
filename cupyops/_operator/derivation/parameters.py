"""Places of data in generated code: the addresses of tensors, and the parameters of all launches in one buffer.

Addresses are packed into it at each replay; constants stay; tensor maps follow their tensors.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..._kernel.launch import driver, signature, tensor_map
from ..._kernel.launch.signature import Argument
from ..._kernel.launch.tensor_map import Description
from ..._util import torch_private
from .codegen import Writer
from .constants import AccessorRef, MapRef, PointersRef, Ref
from .steps import Launch, Recording, Step, View

_ALIGNMENT = tensor_map.PLACE_ALIGNMENT  # of a buffer, for the tensor maps in it


class Machine:
    """Functions by which generated code allocates, writes tensor maps and launches on a GPU."""

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
        """Arguments that the kernel takes."""
        assert launch.loaded is not None
        return launch.loaded.arguments


class Addresses:
    """Addresses of a recording's tensors: a root, whose address a variable holds, and an offset in bytes."""

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
        """Roots of the tensors that launches among the steps take."""
        return {self.of(number)[0] for step in steps if isinstance(step, Launch) for number in step.reads}


class Maps:
    """The tensor maps of a group of launches, inside one buffer of parameters.

    They are made whole once; afterwards only their addresses change, where a call's tensors lie elsewhere.

    Attributes:
        addresses: of the tensors for which the buffer holds maps.
    """

    def __init__(self, machine: Machine, start: int, maps: Sequence[_Map]) -> None:
        self._machine, self._start, self._maps = machine, start, maps
        self.addresses: tuple[int, ...] = ()

    def move(self, addresses: tuple[int, ...]) -> None:
        """Point the maps at tensors at `addresses`."""
        before, self.addresses = self.addresses, ()  # should one of them fail, all are made anew
        if before:
            for one, old, new in zip(self._maps, before, addresses):
                if old != new:
                    self._machine.replace_address(self._start + one.offset, new - one.description.before)
        else:
            for one, new in zip(self._maps, addresses):
                self._machine.encode_tensor_map(self._start + one.offset, one.description, new)
        self.addresses = addresses


class _Map(NamedTuple):
    """A tensor map in the buffer."""

    address: str  # the expression
    description: Description
    offset: int


@dataclass(eq=False)
class _Group:
    """Consecutive launches, and the data that is written for them."""

    start: int  # of their addresses in the buffer
    addresses: dict[str, int] = field(default_factory=dict)  # offsets, by expressions
    maps: list[_Map] = field(default_factory=list)
    structs: list[tuple[int, list[str]]] = field(default_factory=list)  # of pointers: where, and the expressions


class Buffers:
    """The buffer of a plan, one for each call under way: it is laid out here, and filled by generated code.

    Attributes:
        slots: the name of the list of spare ones.
        new: the name of the function that makes one: (buffer, the arrays of pointers that launches are given, `Maps`, ...).
    """

    def __init__(self, writer: Writer, machine: Machine, addresses: Addresses, groups: Sequence[list[Launch]]) -> None:
        self._writer, self._machine, self._addresses = writer, machine, addresses
        self._image = bytearray()
        self._groups = {id(group): self._laid_out(group) for group in groups}
        launches = [launch for group in groups for launch in group]
        arrays = [self._offsets(launch, self._groups[id(group)]) for group in groups for launch in group]
        with_maps = [group for group in self._groups.values() if group.maps]
        places = enumerate((*launches, *with_maps), start=1)  # in a slot
        self._places: dict[int, int] = {id(one): place for place, one in places}
        content = bytes(self._image)

        def new() -> tuple[Any, ...]:
            memory = ctypes.create_string_buffer(len(content) + _ALIGNMENT)
            buffer = (ctypes.c_char * (len(content) or 1)).from_buffer(memory, -ctypes.addressof(memory) % _ALIGNMENT)
            buffer.raw = content
            start = ctypes.addressof(buffer)
            kept = [(ctypes.c_void_p * len(offsets))(*(start + offset for offset in offsets)) for offsets in arrays]
            maps = [Maps(machine, start, group.maps) for group in with_maps]
            return buffer, *(ctypes.addressof(one) for one in kept), *maps, kept

        self.slots, self.new = writer.name([]), writer.name(new)

    def parameters(self, launch: Launch) -> str:
        """The expression for the address of the array of pointers that a launch is given."""
        return f"_slot[{self._places[id(launch)]}]"

    def fill(self, launches: list[Launch]) -> None:
        """The lines that bring the parameters of a group of launches up to date."""
        group, writer = self._groups[id(launches)], self._writer
        if group.addresses:
            packer = writer.name(struct.Struct(f"<{len(group.addresses)}Q").pack_into)
            writer.line(f"{packer}(_slot[0], {group.start}, {', '.join(group.addresses)})")
        for start, pointers in group.structs:
            packer = writer.name(struct.Struct(f"<{len(pointers)}Q").pack_into)
            writer.line(f"{packer}(_slot[0], {start}, {', '.join(pointers)})")
        if group.maps:
            maps = f"_slot[{self._places[id(group)]}]"
            writer.line(f"_m = ({', '.join(one.address for one in group.maps)},)")
            writer.line(f"if {maps}.addresses != _m: {maps}.move(_m)")

    def _laid_out(self, launches: Sequence[Launch]) -> _Group:
        """Room for the addresses that some launches are given, each once."""
        group = _Group(len(self._image))
        for value in (value for launch in launches for value in launch.args if isinstance(value, Ref)):
            group.addresses.setdefault(self._address(value), group.start + 8 * len(group.addresses))
        self._image += bytes(8 * len(group.addresses))
        return group

    def _offsets(self, launch: Launch, group: _Group) -> list[int]:
        """Offsets of a launch's arguments; constants are added to the image, and room for tensor maps."""
        arguments, name = self._machine.arguments(launch), launch.specialised.name
        offsets = []
        for index, (argument, value) in enumerate(zip(arguments, launch.args)):
            if isinstance(value, Ref):
                offsets.append(group.addresses[self._address(value)])
            elif isinstance(value, MapRef):
                offsets.append(self._map(value, group))
            elif isinstance(value, PointersRef):
                self._align(max(argument.align, 8))
                offsets.append(len(self._image))
                pointers = ["0" if one is None else self._address(one) for one in value.entries]
                group.structs.append((len(self._image), pointers))
                self._image += bytes(argument.size)
            elif isinstance(value, AccessorRef):  # whose address comes first
                self._align(8)
                offsets.append(len(self._image))
                group.structs.append((len(self._image), [self._address(value.tensor)]))
                self._image += value.content
            else:
                self._align(max(argument.align, 8))
                offsets.append(len(self._image))
                self._image += signature.constant(name, arguments, index, value)
        self._align(8)
        return offsets

    def _map(self, value: MapRef, group: _Group) -> int:
        """Offset of a tensor map; equal ones of a group share one."""
        address = self._address(value.tensor)
        for one in group.maps:
            if (one.address, one.description) == (address, value.description):
                return one.offset
        self._align(_ALIGNMENT)
        group.maps.append(_Map(address, value.description, len(self._image)))
        self._image += bytes(tensor_map.BYTES)
        return group.maps[-1].offset

    def _address(self, tensor: Ref) -> str:
        return self._addresses.text(self._writer, tensor.number)

    def _align(self, boundary: int) -> None:
        self._image += bytes(-len(self._image) % boundary)
