"""Steps of a recording: the allocations, views, calls and launches of one call, in order, with numbers for tensors.

Tensors that come in have the numbers from 0 on; each step that makes tensors numbers them on. No step holds a tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from ..._kernel.launch.configuration import Configuration
from ..._kernel.launch.loaded import Loaded
from ..._kernel.launch.pointers import Pointers
from ..._kernel.launch.specialised import Specialised
from ..._kernel.launch.tensor_map import TensorMap
from .constants import AccessorRef, MapRef, PointersRef, Ref
from .kept import Kept

Size = tuple[int, ...]


@dataclass(frozen=True)
class Alloc:
    """Memory that holds nothing yet, for tensor `number`."""

    number: int
    size: Size
    stride: Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes from the first element to the last."""
        if 0 in self.size:
            return 0
        return (1 + sum((size - 1) * step for size, step in zip(self.size, self.stride))) * self.dtype.itemsize


@dataclass(frozen=True)
class Call:
    """A function of PyTorch that is called again at each replay; `results` are its tensors, new ones or arguments of it."""

    function: Any = field(compare=False)
    args: tuple[Any, ...] = field(compare=False)
    kwargs: dict[str, Any] = field(compare=False)
    results: tuple[int | None, ...]
    single: bool  # whether it returns its tensor, or None, and not a tuple of them
    key: Any = None  # function and arguments, frozen

    @property
    def reads(self) -> list[int]:
        """The numbers of the tensors among the arguments."""
        return list(numbers_in((self.args, self.kwargs)))


@dataclass(frozen=True)
class View(Call):
    """A call whose one result lies in the memory of tensor `source`, `offset` bytes further on."""

    source: int = -1
    offset: int = 0


@dataclass(frozen=True)
class Launch:
    """A kernel launched; `args` with a `Ref` for each tensor, and others of constants.py for what holds some."""

    specialised: Specialised
    loaded: Loaded | None  # on a GPU
    configuration: Configuration
    args: tuple[Any, ...] = field(compare=False)
    key: Any = None  # the arguments, frozen

    @property
    def reads(self) -> list[int]:
        """The numbers of the tensors."""
        return list(numbers_in(self.args))


@dataclass(frozen=True)
class Bump:
    """The version counter of a tensor, raised."""

    number: int


Step = Alloc | Call | Launch | Bump


@dataclass(frozen=True)
class Inner:
    """The one operator of a recording, called where a gradient is wanted: its forward is the steps from `start` to `end`."""

    operator: Any  # its Definition
    start: int
    end: int
    args: tuple[Any, ...] = field(compare=False)  # of the operator, with Refs
    key: Any = None  # these, frozen
    outputs: tuple[int, ...] = ()
    strides: tuple[Size, ...] = ()  # of the outputs
    floating: tuple[bool, ...] = ()  # whether each output is of a floating-point dtype
    saved: tuple[int, ...] = ()
    kept: Kept = field(kw_only=True, compare=False)
    values: list[Any] = field(kw_only=True, compare=False)  # what `kept` knows of the arguments that are not kept


@dataclass(frozen=True)
class Recording:
    """One call, recorded."""

    inputs: int  # tensors that come in
    steps: tuple[Step, ...]
    result: Any = field(compare=False)  # with Refs
    result_key: Any
    alignments: tuple[tuple[int, int, int], ...]  # (tensor, n, its address modulo n) that Python has asked for
    asks_default_dtype: bool
    operators: tuple[Any, ...] = ()  # the definitions whose roles ran
    inner: Inner | None = None

    @property
    def launches(self) -> list[Launch]:
        """The launches among the steps."""
        return [step for step in self.steps if isinstance(step, Launch)]


def numbers_in(value: Any) -> Any:
    """The numbers of the Refs in a value, in order."""
    if isinstance(value, Ref):
        yield value.number
    elif isinstance(value, (MapRef, AccessorRef)):
        yield value.tensor.number
    elif isinstance(value, PointersRef):
        yield from (one.number for one in value.entries if one is not None)
    elif isinstance(value, dict):
        yield from numbers_in(tuple(value.values()))
    elif isinstance(value, (tuple, list)):
        for one in value:
            yield from numbers_in(one)


def filled(value: Any, tensors: Any) -> Any:
    """A value with `tensors[number]` in the place of each Ref, also in those of tensor maps and pointers."""
    if isinstance(value, Ref):
        return tensors[value.number]
    if isinstance(value, AccessorRef):
        return tensors[value.tensor.number]
    if isinstance(value, MapRef):
        return TensorMap(tensors[value.tensor.number], value.description, value.written)
    if isinstance(value, PointersRef):
        entries = (None if one is None else tensors[one.number] for one in value.entries)
        return Pointers(tuple(entries), value.written)
    if isinstance(value, dict):
        return {name: filled(one, tensors) for name, one in value.items()}
    if type(value) in (tuple, list):
        return type(value)(filled(one, tensors) for one in value)
    return value
