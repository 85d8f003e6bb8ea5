"""A PTX text ready to be launched, and launching it."""

from __future__ import annotations

import gc
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from .errors import InvalidPtx, LaunchRefused, UnsupportedInstruction
from .machine.faults import Listing
from .machine.machine import Machine
from .machine.state import State
from .memory import Allocation, Memory
from .profile import Profile
from .translate import Compiled, compile_kernel, kept
from .translate.calls import flatten
from .translate.layout import function_addresses, in_source, lay_out
from .translate.parser import parse
from .translate.ptx import SIZES, Function, Module, Variable

MAX_STEPS = 200_000  # of the scheduler, for each batch of blocks
_MAX_THREADS = 1024


@dataclass(frozen=True)
class Pointer:
    """An argument that points into an allocation."""

    allocation: Allocation
    offset: int = 0  # in bytes

    @property
    def address(self) -> int:
        """Address that the kernel sees."""
        return self.allocation.base + self.offset


@dataclass(frozen=True)
class Report:
    """Report of a launch."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    thread_instructions: int
    issued: int  # instructions, each counted once for all threads that ran it together
    steps: int  # of the scheduler
    seconds: float
    profile: Profile | None = None


class Place(Protocol):
    """Place in which the translation of one PTX text is kept."""

    def read(self) -> bytes | None:
        """Return the content written last, or None."""

    def write(self, content: bytes) -> None:
        """Keep it."""


class Program:
    """The kernels of one PTX text.

    Args:
        ptx: what NVRTC wrote.
        memory: where the module's variables live, and the arguments of launches; a new one if left out.
        sources: file name -> text of the .cu files, for excerpts in messages and reports.
        place: where its translation is kept for the next process; nowhere if left out. Nobody else may write there.

    Raises:
        InvalidPtx: the text cannot be read.

    Example:
        >>> program = Program(ptx)
        >>> x = program.memory.allocate(np.zeros(8, np.float32), "x")
        >>> program.launch("fill", (1,), (8,), [Pointer(x), np.float32(2)])
    """

    def __init__(
        self,
        ptx: str,
        *,
        memory: Memory | None = None,
        sources: Mapping[str, str] | None = None,
        place: Place | None = None,
    ) -> None:
        self._ptx, self._place = ptx, place
        with _no_collection():
            found = kept.load(ptx, place.read() or b"") if place is not None else None
            self._translation = found or kept.Translation(parse(ptx))
        self.memory = memory if memory is not None else Memory()
        self.sources = dict(sources or {})
        self.variables = self._variables()
        self._static_shared: dict[str, int] = {}
        self._is_kept = True  # whether `place` has what can be kept of the translation

    @property
    def module(self) -> Module:
        """Declarations of the text; without the bodies of functions, if the translation was kept."""
        return self._translation.module

    def kernels(self) -> list[str]:
        """The names of the kernels."""
        return [name for name, function in self.module.functions.items() if function.entry and function.defined]

    def kernel(self, name: str, clusters: bool = False, worst: bool = False, label: str = "") -> Compiled:
        """A kernel, translated at first use: for launches in `clusters`, or without. Raises `UnsupportedInstruction`.

        `worst`: its approximate instructions have the error that the PTX manual allows. `label`: what messages call it.
        """
        key = name, clusters, worst
        kernels = self._translation.kernels
        if key not in kernels:
            function = self._function(name, whole=True)
            at = {variable: allocation.base for variable, allocation in self.variables.items()}
            try:
                with _no_collection(), self._refusals(label or name):
                    kernels[key] = compile_kernel(self.module, function, at, clusters, worst)
            except (AssertionError, IndexError, KeyError, TypeError, ValueError) as error:
                raise InvalidPtx(f"{name}: the PTX cannot be read ({error!r})") from error
            self._is_kept &= not kept.is_movable(kernels[key], at.keys())
        return kernels[key]

    def static_shared(self, name: str) -> int:
        """Bytes of the `__shared__` variables that a kernel uses, as a GPU lays them out."""
        if name not in self._static_shared:
            layouts = [one.layout for (kernel, *_), one in self._translation.kernels.items() if kernel == name]
            if not layouts:
                function = self._function(name, whole=True)
                with self._refusals(in_source(name)):
                    layouts = [lay_out(self.module, flatten(self.module, function), {})]
            self._static_shared[name] = layouts[0].static_shared
        return self._static_shared[name]

    @contextmanager
    def _refusals(self, kernel: str) -> Iterator[None]:
        """Name kernel, line and PTX line in the error of what is not covered."""
        try:
            yield
        except UnsupportedInstruction as error:
            place = Listing(kernel, [error.at], self.module.files, self.sources).describe(0) if error.at else []
            raise UnsupportedInstruction("\n".join([f"{kernel}: {error}", *place]), error.at) from None

    def launch(
        self,
        name: str,
        grid: Sequence[int],
        block: Sequence[int],
        arguments: Sequence[Any],
        *,
        shared: int = 0,
        cluster: Sequence[int] | None = None,
        check: bool = True,
        seed: int | None = None,
        max_steps: int = MAX_STEPS,
        exited_lanes: bool = False,
        approximate: str = "nearest",
        cooperative: bool = False,
        profile: bool = False,
        label: str = "",
        progress: Callable[[int, int], Any] | None = None,
        output: Callable[[str], Any] | None = None,
    ) -> Report:
        """Run a kernel to its end.

        Args:
            name: of the kernel, as the PTX has it.
            grid, block: one to three extents.
            arguments: a `Pointer`, a NumPy scalar, a Python number or bytes (a struct by value) for each parameter.
            shared: bytes of dynamic shared memory.
            cluster: extents of a cluster of blocks; by default what the kernel declares.
            check: look for races and for reads of what was never written. Bounds, alignment, barriers and warps are
                always checked.
            seed: run blocks, diverged threads and atomic updates in an order drawn with this seed.
            max_steps: of the scheduler for each batch of blocks, a step being one basic block run by one group.
            exited_lanes: let warp-wide instructions name lanes that have exited or do not exist, which take no part then.
            approximate: results of approximate instructions: "nearest" to the exact ones, or the "worst" that the PTX
                manual allows, drawn with `seed`.
            cooperative: all blocks run side by side, so that they may wait for each other (grid-wide barriers).
            profile: count memory traffic, bank conflicts and divergence by instruction.
            label: what messages call the kernel, by default its name.
            progress: called with (blocks done, blocks in all) after each batch.
            output: takes what the kernel prints; by default it goes to standard output.

        Raises:
            SimulatorError: one of its subclasses for each kind of fault.
        """
        extents = _triple(grid), _triple(block)
        clusters = self._function(name).cluster if cluster is None else _triple(cluster)
        code = self.kernel(name, clusters != (1, 1, 1), approximate == "worst", label)
        listing = Listing(label or name, code.instructions, self.module.files, self.sources)
        _check_launch(code.function, *extents, clusters, listing.kernel)
        collected = Profile(listing) if profile else None
        state = State(
            code,
            self.memory,
            listing,
            *extents,
            clusters,
            shared,
            _packed(code, arguments, listing.kernel),
            self._watched(code, arguments) if check else set(),
            check,
            collected,
            exited_lanes,
            cooperative,
        )
        machine = Machine(state, seed=seed, max_steps=max_steps, output=output or sys.stdout.write)
        start = time.perf_counter()
        with _no_collection():
            try:
                machine.run(progress)
            finally:  # the blocks that have run are compiled by now
                seconds = time.perf_counter() - start
                if self._place is not None and not self._is_kept:
                    self._place.write(kept.dump(self._ptx, self._translation, self.variables.keys()))
                    self._is_kept = True
        counts = (state.thread_instructions, state.clock, machine.steps)
        return Report(listing.kernel, *extents, *counts, seconds, collected)

    def _function(self, name: str, whole: bool = False) -> Function:
        """A kernel, with the bodies of all functions there if it is to be `whole`."""
        if whole and not self._translation.is_whole:
            self._translation = kept.Translation(parse(self._ptx), self._translation.kernels)
        function = self.module.functions.get(name)
        if function is None or not function.entry:
            raise LaunchRefused(f"the PTX has no kernel {name}; it has {', '.join(self.kernels()) or 'none'}")
        return function

    def _watched(self, code: Compiled, arguments: Sequence[Any]) -> set[int]:
        """The allocations that the kernel may write."""
        if code.written_parameters is None:
            return set(self.memory.allocations)
        # the module's variables too: an instruction may name them without a register
        watched = {one.number for name, one in self.variables.items() if self.module.variables[name].space == "global"}
        for argument in (arguments[number] for number in code.written_parameters):
            if isinstance(argument, (bytes, bytearray)):  # a struct, which may hold any pointer
                return set(self.memory.allocations)
            if isinstance(argument, Pointer):
                watched.add(argument.allocation.number)
            elif (allocation := self.memory.at(int(argument))) is not None:
                watched.add(allocation.number)
        return watched

    def _variables(self) -> dict[str, Allocation]:
        """The module's global and constant variables, each an allocation with its initial value."""
        declared = [v for v in self.module.variables.values() if v.space in ("global", "const") and v.size]
        made = {v.name: self.memory.allocate(np.zeros(v.size, np.uint8), v.name) for v in declared}
        self.memory.variables.update(allocation.number for allocation in made.values())
        functions = function_addresses(self.module)
        for variable in declared:
            size = SIZES[variable.type]
            for number, text in enumerate(variable.initial):
                value = _initial(text, variable, made, functions)
                made[variable.name].buffer[number * size : (number + 1) * size] = np.frombuffer(value, np.uint8)
        return made


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage collection: of the many objects that are made few are in cycles, and looking for those takes long."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _initial(text: str, variable: Variable, made: dict[str, Allocation], functions: dict[str, int]) -> bytes:
    """One element of an initialiser: a number, the bits of a float, or the address of another variable or a function."""
    if text in functions:
        return functions[text].to_bytes(SIZES[variable.type], "little")
    size = SIZES[variable.type]
    if bits := re.fullmatch(r"0[fFdD]([0-9a-fA-F]+)", text):
        return int(bits.group(1), 16).to_bytes(size, "little")
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
        number = text.rstrip("U")
        value = int(number, 16 if "x" in number.lower() else 10)
        return (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    symbol = re.fullmatch(r"(?:generic\(\s*)?([A-Za-z_$][\w$]*)\s*\)?(?:\s*\+\s*(\d+))?", text)
    if symbol is not None and symbol.group(1) in made:
        return (made[symbol.group(1)].base + int(symbol.group(2) or 0)).to_bytes(size, "little")
    raise InvalidPtx(f"the initial value {text!r} of {variable.name} is not covered")


def _triple(extents: Sequence[int]) -> tuple[int, int, int]:
    x, y, z = (*map(int, extents), 1, 1)[:3]
    return x, y, z


def _check_launch(
    function: Function,
    grid: tuple[int, int, int],
    block: tuple[int, int, int],
    cluster: tuple[int, int, int],
    kernel: str,
) -> None:
    threads = block[0] * block[1] * block[2]
    if min(grid) < 1 or min(block) < 1 or threads > _MAX_THREADS:
        raise LaunchRefused(
            f"{kernel}: grid {grid} and block {block}: extents from 1, at most {_MAX_THREADS} threads a block"
        )
    if function.required_block not in (None, block):
        raise LaunchRefused(f"{kernel}: block {block}; the kernel requires {function.required_block}: launch with that")
    if function.max_threads is not None and threads > function.max_threads:
        limit = function.max_threads
        raise LaunchRefused(
            f"{kernel}: a block of {threads} threads; expected at most {limit}, as __launch_bounds__ says"
        )
    if function.cluster not in ((1, 1, 1), cluster):
        raise LaunchRefused(f"{kernel}: cluster {cluster}; the kernel requires {function.cluster}: launch with that")
    if any(extent % size for extent, size in zip(grid, cluster)):
        raise LaunchRefused(f"{kernel}: grid {grid} is no multiple of the cluster {cluster}; make it one")


def _packed(code: Compiled, arguments: Sequence[Any], kernel: str) -> np.ndarray:
    """The arguments as the bytes of the parameter memory."""
    parameters = code.function.parameters
    if len(arguments) != len(parameters):
        raise LaunchRefused(
            f"{kernel}: {len(arguments)} arguments given, {len(parameters)} declared; give one for each"
        )
    packed = np.zeros(max(code.layout.parameter_bytes, 1), np.uint8)
    for number, (parameter, argument) in enumerate(zip(parameters, arguments)):
        value = _bytes_of(argument, parameter)
        if len(value) != parameter.size:
            found = f"{len(value)} bytes ({argument!r})"
            raise LaunchRefused(f"{kernel}: argument {number} is {found}, expected {parameter.size} bytes")
        offset = code.layout.parameters[parameter.name]
        packed[offset : offset + parameter.size] = np.frombuffer(value, np.uint8)
    return packed


def _bytes_of(argument: Any, parameter: Variable) -> bytes:
    if isinstance(argument, Pointer):
        return argument.address.to_bytes(8, "little")
    if isinstance(argument, (bytes, bytearray)):
        return bytes(argument)
    if isinstance(argument, np.generic):
        return argument.tobytes()
    if isinstance(argument, float):
        return np.array(argument, f"f{parameter.size}").tobytes()
    return (int(argument) & ((1 << 8 * parameter.size) - 1)).to_bytes(parameter.size, "little")
