"""Layout of a kernel's variables and parameters, and the parameters through which it writes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import UnsupportedInstruction
from .flow import registers
from .ptx import SIZES, Address, Function, Instruction, Module, Symbol, Variable, registers_of

_GAP = 128  # bytes between variables that belong to none
_MEMORY = 1  # where a register's value may come from, as bits


def _parameter(number: int) -> int:
    return 2 << number


class Extent(NamedTuple):
    """Extent of a variable."""

    name: str
    low: int
    high: int  # behind its last byte


@dataclass
class Layout:
    """Addresses, sizes and offsets."""

    symbols: dict[str, int]  # addresses within their spaces
    parameters: dict[str, int]  # offsets within the parameter memory
    parameter_bytes: int
    parameter_names: list[str]
    shared_bytes: int = 0  # static, with the gaps between variables; dynamic shared memory follows
    static_shared: int = 0  # of that, what a GPU gives it
    shared_places: tuple[Extent, ...] = ()  # of the variables, by address; that of dynamic memory last, with no end
    local_bytes: int = 0
    local_places: tuple[Extent, ...] = ()
    granule: int = 16  # bytes: the smallest access to shared memory
    global_granule: int = 16
    shared_symbols: frozenset[str] = frozenset()  # variables in shared memory

    def address(self, name: str) -> int:
        """The address of a variable, or the offset of a parameter."""
        if name in self.symbols:
            return self.symbols[name]
        if name in self.parameters:
            return self.parameters[name]
        raise UnsupportedInstruction(f"the address of {name}")

    def written_parameters(self, instructions: list[Instruction]) -> set[int] | None:
        """The numbers of the parameters that a store or atomic to global memory may be addressed by; None: anything.

        Which parameters a register may come from is followed through every instruction, without regard to order.
        """
        sources = self._origins(instructions)
        written = 0
        for instruction in instructions:
            if not _writes_global(instruction):
                continue
            for name in registers_of(operand for operand in instruction.operands if isinstance(operand, Address)):
                found = sources.get(name, 0)
                if found & _MEMORY or not found:
                    return None
                written |= found
        return {number for number in range(len(self.parameter_names)) if written & _parameter(number)}

    def _origins(self, instructions: list[Instruction]) -> dict[str, int]:
        """Possible origins of each register's value: `_MEMORY` and `_parameter` bits."""
        sources: dict[str, int] = {}
        passed_on = []  # (the registers written, the registers read) of what is no load
        for instruction in instructions:
            written, read = registers(instruction)
            if instruction.opcode != "ld":
                passed_on.append((written, read))
            elif found := self._loaded(instruction):
                for name in written:
                    sources[name] = sources.get(name, 0) | found
        changed = True
        while changed:
            changed = False
            for written, read in passed_on:
                found = 0
                for name in read:
                    found |= sources.get(name, 0)
                for name in written if found else ():
                    old = sources.get(name, 0)
                    if found | old != old:
                        sources[name] = found | old
                        changed = True
        return sources

    def _loaded(self, instruction: Instruction) -> int:
        if "param" not in instruction.modifiers:
            # floats are no addresses; 32-bit and smaller values are offsets
            return _MEMORY if instruction.modifiers[-1] in ("u64", "b64", "s64") else 0
        address = instruction.operands[1]
        assert isinstance(address, Address)
        if isinstance(address.base, Symbol) and address.base.name in self.parameters:
            return _parameter(self.parameter_names.index(address.base.name))
        return _MEMORY


def function_addresses(module: Module) -> dict[str, int]:
    """Numbers by which pointers name the functions of a module."""
    names = [name for name, function in module.functions.items() if function.defined and not function.entry]
    return {name: 16 * number for number, name in enumerate(names, 1)}


def lay_out(module: Module, function: Function, globals_at: dict[str, int]) -> Layout:
    """Give every variable that the function may name its place."""
    used = _symbols_named(function)
    symbols = {name: place for name, place in globals_at.items() if name in used} | function_addresses(module)
    shared, local, dynamic = _Room(), _Room(), []
    for variable in [*module.variables.values(), *function.variables.values()]:
        if variable.name not in used:
            continue
        if variable.space == "shared" and variable.size == 0:
            dynamic.append(variable)
        elif variable.space in ("shared", "local"):
            room = shared if variable.space == "shared" else local
            symbols[variable.name] = room.place(variable.name, variable.size, variable.align)
    if dynamic:
        start = shared.place("", 0, max(16, *(variable.align for variable in dynamic)))
        symbols |= {variable.name: start for variable in dynamic}
    offsets, size = _parameters(function.parameters)
    granule, global_granule = _granules(function)
    names = [parameter.name for parameter in function.parameters]
    declared = [*module.variables.values(), *function.variables.values()]
    in_shared = frozenset(variable.name for variable in declared if variable.space == "shared")
    return Layout(
        symbols,
        offsets,
        size,
        names,
        shared.end,
        shared.own,
        tuple(shared.places),
        _aligned(local.end + _GAP, 16) if local.end else 0,
        tuple(local.places),
        granule,
        global_granule,
        in_shared,
    )


class _Room:
    """Places for variables one after the other, as on a GPU but for gaps between them, so that overflows show.

    A gap is a multiple of 128 bytes: each variable stays in the banks in which it is.
    """

    def __init__(self) -> None:
        self.own = self.end = 0  # bytes without the gaps, and with them
        self.places: list[Extent] = []

    def place(self, name: str, size: int, align: int) -> int:
        """The address of the next variable."""
        gaps = self.end - self.own
        self.own = _aligned(self.own, align)
        if self.places:
            gaps = _aligned(gaps + _GAP, max(_GAP, align))
        start = self.own + gaps
        self.own += size
        self.end = start + size
        self.places.append(Extent(in_source(name), start, self.end))
        return start


def in_source(symbol: str) -> str:
    """A name in the source, of a mangled one such as `_Z3sumPf` or `_ZZ4sumsPfE4tile`; "" for a thread's stack."""
    if symbol.startswith("__local_depot"):
        return ""
    local = re.fullmatch(r"_Z(?:Z.*E)?(\d+)(\w+)", symbol)
    return local.group(2)[: int(local.group(1))] if local else symbol


def _parameters(parameters: list[Variable]) -> tuple[dict[str, int], int]:
    offsets, end = {}, 0
    for parameter in parameters:
        offsets[parameter.name] = end = _aligned(end, parameter.align)
        end += parameter.size
    return offsets, end


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment


def _symbols_named(function: Function) -> set[str]:
    """Every symbol that an instruction names."""
    names = set()
    for item in function.body:
        if isinstance(item, Instruction):
            for operand in item.operands:
                base = operand.base if isinstance(operand, Address) else operand
                if isinstance(base, Symbol):
                    names.add(base.name)
    return names


_TOUCH_MEMORY = frozenset(["ld", "st", "atom", "red", "cp", "mbarrier", "stmatrix", "ldmatrix", "wmma"])
_FRAGMENT_BYTES = {"f16": 2, "bf16": 2, "s8": 1, "u8": 1, "f64": 8}  # in which wmma loads and stores


def _granules(function: Function) -> tuple[int, int]:
    """The smallest element that shared, and that global memory is accessed by."""
    shared, global_ = 16, 16
    for item in function.body:
        if not isinstance(item, Instruction) or item.opcode not in _TOUCH_MEMORY:
            continue
        size = 4
        if item.opcode == "wmma":
            size = min(_FRAGMENT_BYTES.get(modifier, 4) for modifier in item.modifiers)
        elif item.opcode in ("ld", "st", "atom", "red"):
            size = SIZES.get(item.modifiers[-1], 4)
        spaces = {modifier.split("::")[0] for modifier in item.modifiers}
        if "shared" in spaces or not spaces & {"global", "local", "param", "const"}:
            shared = min(shared, size)
        if not spaces & {"shared", "local", "param", "const"}:
            global_ = min(global_, size)
    return shared, global_


def _writes_global(instruction: Instruction) -> bool:
    if instruction.opcode not in ("st", "atom", "red", "cp", "wmma") or "load" in instruction.modifiers:
        return False
    spaces = {modifier.split("::")[0] for modifier in instruction.modifiers}
    if instruction.opcode == "cp":
        return "bulk" in spaces and instruction.modifiers[-1] != "commit_group" and "global" in spaces
    if instruction.opcode == "wmma" and "store" not in instruction.modifiers:
        return False
    return not spaces & {"shared", "local", "param"}
