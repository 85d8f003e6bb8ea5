"""`cupyops.simulate()`: kernels launched on CPU tensors run in the simulator.

This is the side of the simulator that knows PyTorch: which storage is which allocation, and which memory holds nothing yet.
"""

from __future__ import annotations

import math
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ._kernel.compile import architecture, cache
from ._kernel.compile.binary import Binary
from ._kernel.launch import signature, versions
from ._kernel.launch.configuration import Configuration, waits
from ._kernel.launch.executors import Turn, executors
from ._kernel.launch.pointers import Pointers, held
from ._kernel.launch.specialised import Specialised
from ._kernel.launch.tensor_map import TensorMap
from ._util import settings, torch_private
from ._util.allocations import EMPTY, Allocations
from ._util.progress import Bar
from .errors import InputError, LaunchError, SimulatorError

# Below, the simulator itself is imported at first use: programs that never simulate should not pay for it.
# KB of shared memory that a block can have (CUDA Programming Guide, technical specifications per compute capability)
_SHARED = {"75": 64, "80": 163, "86": 99, "87": 163, "89": 99, "90": 227, "100": 227, "103": 227, "120": 99, "121": 99}
_one_at_a_time = threading.RLock()  # launches of several threads: they share the memory, and what each may touch of it


def _after_fork_in_child() -> None:
    """Nobody will release the lock if another thread held it, nor widen again what that thread's launch could touch."""
    global _one_at_a_time
    _one_at_a_time = threading.RLock()
    for allocation in list(_the_memory.allocations.values()) if _the_memory is not None else ():
        allocation.restrict(0, len(allocation.buffer))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


_launched = 0


def launched() -> int:
    """Number of launches that this process has begun to simulate."""
    return _launched


class Simulation:
    """Simulator returned by `simulate()`: a context manager, and while it is open the executor of launches on the CPU."""

    _is_used = True  # until all that it is made of has been checked
    launching: Callable[..., Any] | None = None  # called in place of launch, with the program and its arguments

    def __init__(
        self,
        arch: str,
        check: bool,
        seed: int | None,
        max_steps: int | None,
        exited_lanes: bool = False,
        approximate: str = "nearest",
        profile: bool = False,
    ) -> None:
        device = architecture.read(arch)
        if device is None:
            meant = next((one for one in (f"{arch}0", f"sm_{arch}") if architecture.read(one)), None)
            hint = f"; did you mean {meant}?" if meant is not None else ""
            raise InputError(f'arch is {arch!r}, expected one such as "sm_80"{hint}')
        self.arch, self.check, self.seed, self.max_steps = arch, check, seed, max_steps
        if approximate not in ("nearest", "worst"):
            raise InputError(f'approximate is {approximate!r}, expected "nearest" or "worst"')
        self.exited_lanes, self.approximate, self.profile = exited_lanes, approximate, profile
        self._device = device
        self._threads = threading.local()
        self._is_used = False

    @property
    def capability(self) -> int:
        """The major compute capability of the device that is simulated."""
        return self._device.major

    def __del__(self) -> None:
        if not self._is_used:
            warnings.warn(
                "simulate() by itself does nothing: write `with cupyops.simulate():` around calls", stacklevel=2
            )

    def __enter__(self) -> Simulation:
        self._is_used = True
        mode = _Blanks()
        mode.__enter__()
        self._entered().append((mode, Turn("cpu", self)))
        return self

    def __exit__(self, *exception: Any) -> None:
        mode, turn = self._entered().pop()
        turn.end()
        mode.__exit__(*exception)

    def _entered(self) -> list[tuple[_Blanks, Turn]]:
        """Entries of this thread that it has not left."""
        found: list[tuple[_Blanks, Turn]] = self._threads.__dict__.setdefault("entered", [])
        return found

    def __call__(self, specialised: Specialised, device: int, configuration: Configuration, args: Sequence[Any]) -> Any:
        """Run one launch; returns the simulator's `Report`."""
        # our own mode would look at each question about a tensor
        with _one_at_a_time, torch_private.without_function_modes():
            return self._launch(specialised, device, configuration, args)

    def _launch(self, specialised: Specialised, device: int, configuration: Configuration, args: Sequence[Any]) -> Any:
        from .simulator import MAX_STEPS

        global _launched
        _launched += 1
        program, binary, arguments = _program(specialised, self.arch)
        _bring(specialised, self.arch, program, binary)
        original, args = args, signature.resolved(specialised.name, arguments, args)
        checked = signature.checked(specialised.name, arguments, args, device)
        self._check(specialised.name, configuration, binary, program.static_shared(binary.symbol))
        values = [_value(*each) for each in zip(arguments, args, checked)]
        pointed_to = _pointed_to(arguments, original)
        touched = _restrict([one for one in (*_tensors(args), *pointed_to) if one.numel()])
        _memory().closed = _not_given(touched)
        if not specialised.strided:
            _leave_out_gaps([*(value for value in args if isinstance(value, Tensor)), *pointed_to])
        with Bar(f"simulating {specialised.name}") as bar:
            try:
                return (partial(self.launching, program) if self.launching else program.launch)(
                    binary.symbol,
                    configuration.grid,
                    configuration.block,
                    values,
                    shared=configuration.shared,
                    cluster=configuration.cluster,
                    check=self.check,
                    seed=self.seed,
                    max_steps=self.max_steps or MAX_STEPS,
                    exited_lanes=self.exited_lanes,
                    approximate=self.approximate,
                    cooperative=configuration.cooperative,
                    profile=self.profile,
                    label=specialised.name,
                    progress=bar.update if bar.wanted else None,
                )
            except SimulatorError as error:
                _note_expanded(error, arguments, original)
                raise
            finally:
                _memory().closed = frozenset()
                for allocation in touched:
                    allocation.restrict(0, len(allocation.buffer))
                _raise_written(arguments, original)  # after a fault too, which may be one in the middle

    def _check(self, name: str, configuration: Configuration, binary: Binary, static: int) -> None:
        """Refuse a launch that this architecture has no room for. `static`: bytes of the kernel's own shared memory."""
        limit = _SHARED.get(self._device.plain.removeprefix("sm_"))
        if limit is not None and static + configuration.shared > limit * 1024:
            own = f", and the kernel's __shared__ variables take {static} of them" if static else ""
            raise LaunchError(
                f"{name} with {configuration}: {self.arch} has {limit * 1024} bytes of shared memory a block{own}; "
                "take less, or simulate another architecture"
            )
        if configuration.overlap and self._device.major >= 9 and not waits(binary.ptx):
            raise LaunchError(
                f"{name} with {configuration}: the kernel does not wait for the grid before it; write griddepcontrol.wait "
                "into it"
            )
        if configuration.cluster is not None and self._device.major < 9:
            raise LaunchError(
                f"{name} with {configuration}: clusters need compute capability 9.0, here is {self.arch}; simulate with "
                'simulate("sm_90")'
            )

    def variables(self, specialised: Specialised) -> tuple[Binary, _Variables]:
        """The variables of an instance, for `kernel.globals()`."""
        with _one_at_a_time:
            program, binary, _ = _program(specialised, self.arch)
            _bring(specialised, self.arch, program, binary)
        return binary, _Variables(program)

    def address(self, tensor: Tensor) -> int:
        """Return the pointer to `tensor` for a struct that is passed by value."""
        with _one_at_a_time:
            low, high = _extent(tensor)
            storage = tensor.untyped_storage()
            before = _addressed.get(storage, (low, high))
            _addressed[storage] = min(low, before[0]), max(high, before[1])
            return _address(tensor, "memory")

    def place(self, tensor: Tensor) -> int:
        """Return the pointer to `tensor` for a launch that is given pointers to tensors."""
        with _one_at_a_time:
            return _address(tensor, "memory")

    def tensor_map(self, map_: TensorMap) -> bytes:
        """The 128 bytes by which the simulator's kernels know a tensor map."""
        from .simulator import TensorMap as Simulated

        assert map_.description is not None
        numbers = map_.description[:-2]  # how much the L2 cache fetches makes no difference
        with _one_at_a_time:
            return Simulated(_pointer(map_.tensor, "memory").address - map_.description.before, *numbers).encode()


def simulate(
    arch: str = "sm_80",
    *,
    check: bool = True,
    seed: int | None = None,
    max_steps: int | None = None,
    exited_lanes: bool = False,
    approximate: str = "nearest",
    profile: bool = False,
) -> Simulation:
    """Run kernels on CPU tensors in the simulator: operators and `Kernel` launches inside the `with` block.

    Needs NVRTC, no GPU and no driver. `CUPYOPS_SIMULATE=1` (or `=sm_90`) does the same for a whole program.

    Args:
        arch: whose PTX is run: paths under `__CUDA_ARCH__` differ.
        check: look for races and for reads of memory that nothing has written. Bounds, alignment, barriers and
            warp-wide instructions are always checked.
        seed: run blocks, diverged threads and atomic updates in an order drawn with this seed; None: the same order always.
        max_steps: after how many steps a launch that does not end is given up; None: the simulator's default.
        exited_lanes: let shuffles, votes and their kin name lanes that have exited, or that the block does not have; they
            take no part, and what is read of one is a pattern. PTX calls it undefined: by default it is a `WarpFault`.
        approximate: results of approximate instructions (`ex2.approx`, `tanh.approx` and their kind): "nearest", which
            rounds the exact ones, or "worst": each as wrong as the PTX manual allows, drawn with `seed`.
        profile: count memory transactions, bank conflicts and diverged threads by line. `cupyops.trace()` has them, as
            `trace.launches()[0].profile`, which prints as a table.

    Raises:
        SimulatorError: when a kernel does what it must not. A subclass for each kind of fault; the message names thread,
            block, address and the .cu line.

    Example:
        >>> with cupyops.simulate(), cupyops.trace() as trace:
        ...     y = cupyops.relu(torch.randn(1000))
        >>> trace.routes()
        {'simulator'}
    """
    return Simulation(arch, check, seed, max_steps, exited_lanes, approximate, profile)


def simulating() -> bool:
    """Return True if kernels on CPU tensors run in the simulator now."""
    return isinstance(executors.get("cpu"), Simulation)


def simulate_if_asked() -> None:
    """Start simulating for good where the environment says so."""
    if asked := settings.SIMULATE.read(default=False):
        simulate("sm_80" if asked is True else asked).__enter__()


# --- programs ------------------------------------------------------------------------------------------------------

_programs: weakref.WeakKeyDictionary[Specialised, dict[str, Any]] = weakref.WeakKeyDictionary()


def _program(specialised: Specialised, arch: str) -> tuple[Any, Binary, tuple[signature.Argument, ...]]:
    """(program, what it was read from, the kernel's arguments), read and translated at the first launch."""
    from .simulator import Program

    by_arch = _programs.setdefault(specialised, {})
    if arch not in by_arch:
        binary = specialised.binary(arch)
        source = specialised.source
        shared = specialised.shared if specialised.symbols(binary) else None
        program = None if shared is None else shared.module(arch, binary)
        if program is None:
            texts = {source.name: source.text, **source.includes}
            program = Program(binary.ptx, memory=_memory(), sources=texts, place=cache.beside(binary))
            if shared is not None:
                shared.add(arch, binary, program)
        by_arch[arch] = program, binary, specialised.arguments(binary)
    return by_arch[arch]


def _bring(specialised: Specialised, arch: str, program: Any, binary: Binary) -> None:
    """Variables that kernels of one text share are where this one sees them."""
    if (copied := specialised.copied(binary)) and specialised.shared is not None:
        specialised.shared.bring(arch, program, _Variables(program), copied)


class _Variables:
    """The `__device__` and `__constant__` variables of a program, as bytes."""

    def __init__(self, program: Any) -> None:
        self._program = program

    def read(self, symbol: str, size: int) -> Tensor:
        """A copy."""
        with _one_at_a_time:
            return torch.from_numpy(self._program.variables[symbol].buffer[:size].copy())

    def write(self, symbol: str, content: Tensor) -> None:
        """Set all bytes."""
        with _one_at_a_time:
            self._program.variables[symbol].buffer[: content.numel()] = content.cpu().numpy()


# --- memory --------------------------------------------------------------------------------------------------------

_the_memory: Any = None
_allocations: weakref.WeakKeyDictionary[torch.UntypedStorage, Any] = weakref.WeakKeyDictionary()
# of storages that came from torch.empty, the version that their tensor had then
_blank: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()


# of storages whose addresses lie in structs, the bytes that the tensors hold of which the addresses were asked for
_addressed: weakref.WeakKeyDictionary[torch.UntypedStorage, tuple[int, int]] = weakref.WeakKeyDictionary()


def _memory() -> Any:
    """The one memory, in which every storage that a kernel was given is an allocation."""
    global _the_memory
    if _the_memory is None:
        from .simulator import Memory

        _the_memory = Memory()
    return _the_memory


class _Bytes:
    """The bytes of a storage, for `np.asarray`: with no copy, no hold on the storage, and no loss of its `resize_`."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        shape, data = (storage.nbytes(),), (storage.data_ptr(), False)
        self.__array_interface__ = {"version": 3, "typestr": "|u1", "shape": shape, "data": data}


def _bytes(storage: torch.UntypedStorage) -> np.ndarray:
    """The storage itself, which must outlive the array; not a copy."""
    return np.asarray(_Bytes(storage)) if storage.nbytes() else np.zeros(0, np.uint8)


def _is_at(allocation: Any, storage: torch.UntypedStorage) -> bool:
    """Return True if the storage is where it was, and of the size that it had."""
    size, data = storage.nbytes(), allocation.buffer.__array_interface__["data"][0]
    return len(allocation.buffer) == size and (not size or data == storage.data_ptr())


def _pointer(tensor: Tensor, name: str) -> Any:
    from .simulator import Pointer

    storage = tensor.untyped_storage()
    allocation = _allocations.get(storage)
    if allocation is not None and not _is_at(allocation, storage):
        _memory().free(allocation)
        allocation = None
    if allocation is None:
        memory = _memory()
        allocation = memory.allocate(_bytes(storage), name, initialized=storage not in _blank, fill=False)
        _allocations[storage] = allocation
        weakref.finalize(storage, memory.free, allocation)
    if storage in _blank and torch_private.version(tensor) != _blank[storage]:
        del _blank[storage]  # PyTorch has written there
        allocation.written = None
    allocation.name = name
    return Pointer(allocation, int(tensor.storage_offset()) * tensor.element_size())


def _address(tensor: Tensor, name: str) -> int:
    """Return the address like `data_ptr()`; 0 for a tensor without elements."""
    return int(_pointer(tensor, name).address) if tensor.numel() else 0


def _note_expanded(error: SimulatorError, arguments: Sequence[signature.Argument], args: Sequence[Any]) -> None:
    """Say of a tensor in an error that it is expanded: a kernel finds less memory there than it has elements."""
    for argument, value in zip(arguments, args):
        if isinstance(value, Tensor) and _is_expanded(value) and f"`{argument.name}`" in str(error):
            error.add_note(
                f"`{argument.name}` is expanded, of shape {tuple(value.shape)} with strides {value.stride()}: its elements "
                "share memory; allocate an output as torch.empty(shape), copy an input by .contiguous()"
            )


def _is_expanded(tensor: Tensor) -> bool:
    return any(step == 0 and extent > 1 for extent, step in zip(tensor.shape, tensor.stride()))


def _restrict(tensors: list[Tensor]) -> list[Any]:
    """Restrict each storage to the bytes between the first and the last that the given tensors hold, and to those
    that a struct may point to.
    """
    hulls: dict[Any, tuple[int, int]] = {}
    for tensor in tensors:
        allocation = _pointer(tensor, _allocations[tensor.untyped_storage()].name).allocation
        low, high = _extent(tensor)
        before = hulls.get(allocation.number) or _addressed.get(tensor.untyped_storage(), (low, high))
        hulls[allocation.number] = min(low, before[0]), max(high, before[1])
        allocation.restrict(*hulls[allocation.number])
    return [_memory().allocations[number] for number in hulls]


def _not_given(touched: list[Any]) -> set[int]:
    """The numbers of allocations of tensors that live, but that neither this launch nor a struct was given."""
    given = {allocation.number for allocation in touched}
    given.update(_allocations[storage].number for storage in _addressed if storage in _allocations)
    return {allocation.number for allocation in _allocations.values()} - given


def _leave_out_gaps(tensors: list[Tensor]) -> None:
    """Forbid accesses between the elements of a view, except to what another of the tensors holds."""
    views = [tensor for tensor in tensors if _has_gaps(tensor)]
    for storage in {one.untyped_storage()._cdata: one.untyped_storage() for one in views}.values():
        allocation, gaps = _allocations[storage], np.zeros(storage.nbytes(), np.bool_)
        inside = [one for one in views if one.untyped_storage()._cdata == storage._cdata]
        for view in inside:
            low, high = _extent(view)
            gaps[low:high] = True
        for tensor in tensors:
            if tensor.untyped_storage()._cdata == storage._cdata:
                _elements(gaps, tensor)[...] = False
        if (addressed := _addressed.get(storage)) is not None:
            gaps[slice(*addressed)] = False
        if gaps.any():
            shape, stride = tuple(inside[0].shape), inside[0].stride()
            allocation.except_for(
                gaps,
                f"it is a view of shape {shape} and strides {stride}, and a kernel goes by addresses alone: give its "
                ".contiguous(), for an output a contiguous tensor, or pass the strides; Kernel(..., strided=True) allows it",
            )


def _has_gaps(tensor: Tensor) -> bool:
    """Return True if a tensor is no dense piece of memory, in whichever order."""
    if tensor.is_contiguous() or not tensor.numel():
        return False
    low, high = _extent(tensor)
    distinct = math.prod(int(size) for size, stride in zip(tensor.shape, tensor.stride()) if stride)
    return high - low != distinct * tensor.element_size()


def _elements(flags: np.ndarray, tensor: Tensor) -> np.ndarray:
    """Select from the flags of a storage's bytes those that the tensor holds."""
    size = tensor.element_size()
    strides = (*(int(stride) * size for stride in tensor.stride()), 1)
    first = flags[int(tensor.storage_offset()) * size :]
    return np.lib.stride_tricks.as_strided(first, (*map(int, tensor.shape), size), strides)


def _extent(tensor: Tensor) -> tuple[int, int]:
    """The bytes of its storage from the tensor's first element to its last."""
    size = tensor.element_size()
    first = int(tensor.storage_offset()) * size
    if tensor.numel() == 0:
        return first, first
    span = sum((int(extent) - 1) * int(stride) for extent, stride in zip(tensor.shape, tensor.stride()))
    return first, first + (span + 1) * size


def _value(argument: signature.Argument, given: Any, checked: Any) -> Any:
    """An argument as the simulator takes it."""
    if argument.kind == "pointer":
        return 0 if given is None or not given.numel() else _pointer(given, argument.name)
    if argument.kind == "float":
        return np.float32(checked) if argument.size == 4 else np.float64(checked)
    if isinstance(given, TensorMap):
        _pointer(given.tensor, argument.name)
    if argument.accessor is not None and isinstance(given, Tensor):
        return argument.accessor.packed(given, _address(given, argument.name))
    return checked if argument.kind == "struct" else int(checked)


def _tensors(args: Sequence[Any]) -> list[Tensor]:
    """Tensors that a kernel is given, be it as tensor maps or by pointers."""
    return [one for value in args for one in held(value)]


def _pointed_to(arguments: Sequence[signature.Argument], args: Sequence[Any]) -> list[Tensor]:
    """The tensors that a kernel is given pointers to in structs and tables; from now on faults name them by their places."""
    found = []
    for argument, value in zip(arguments, args):
        for number, one in enumerate(value.entries if isinstance(value, Pointers) else ()):
            if one is not None:
                _pointer(one, f"{argument.name}[{number}]")
                found.append(one)
    return found


def _raise_written(arguments: Sequence[signature.Argument], args: Sequence[Any]) -> None:
    """Raise the versions of what was written. A blank storage stays one: which of its bytes were written is known."""
    blank = [one for one in _tensors(args) if one.untyped_storage() in _blank]
    versions.raise_written(arguments, args)
    for tensor in blank:
        _blank[tensor.untyped_storage()] = torch_private.version(tensor)


class _Blanks(Allocations):
    """Remembers which tensors came from `torch.empty`, and fills them so that what is left unwritten shows."""

    wanted = EMPTY
    transparent = True  # recorded plans are replayed under it

    def changed(self, fresh: Tensor, by: Any) -> Tensor:
        """Note the tensor's memory as uninitialised and return it."""
        if fresh.device.type == "cpu":
            _note_blank(fresh)
        return fresh


def _note_blank(tensor: Tensor) -> None:
    from .simulator.memory import POISON

    storage = tensor.untyped_storage()
    _bytes(storage)[...] = POISON
    _blank[storage] = torch_private.version(tensor)
