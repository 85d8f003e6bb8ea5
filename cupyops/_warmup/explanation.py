"""Plan of a call's launches, without a GPU and without running it: the forms, why not others, and each launch.

The operator runs as it always does, on CPU tensors of which nobody has touched the memory, and planned for the GPU that is
asked for; what it launches is written down in the place of being run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._dispatch.core import forms
from .._dispatch.core.cards import Card
from .._dispatch.core.gpu import assume_gpu
from .._kernel.launch.configuration import Configuration
from .._kernel.launch.executors import Turn
from .._kernel.launch.specialised import Specialised
from .._kernel.launch.tensor_map import TensorMap
from ..errors import InputError


@dataclass
class Planned:
    """One launch.

    Attributes:
        instance: the kernel with its template values.
        bytes: of the tensors that it is given, each counted once: what it has to move at least, where it uses all of them.
    """

    instance: Specialised
    configuration: Configuration
    bytes: int


@dataclass
class Direction:
    """Choices and launches of forward or backward, in order; references: operators whose gradients PyTorch finds so."""

    name: str
    choices: list[forms.Choice[Any]] = field(default_factory=list)
    launches: list[Planned] = field(default_factory=list)
    references: list[str] = field(default_factory=list)


class _Recorder:
    """An executor that writes launches down."""

    def __init__(self, card: Card) -> None:
        self.arch, self.capability = card.arch, card.gpu.capability
        self.into: Direction | None = None

    def __call__(self, instance: Specialised, device: int, configuration: Configuration, args: Sequence[Any]) -> None:
        assert self.into is not None
        given = (value.tensor if isinstance(value, TensorMap) else value for value in args)
        tensors = {value.data_ptr(): value for value in given if isinstance(value, Tensor)}
        moved = sum(value.numel() * value.element_size() for value in tensors.values())
        self.into.launches.append(Planned(instance, configuration, moved))

    def address(self, tensor: Tensor) -> int:
        """Return the pointer to a tensor in a struct passed by value."""
        return tensor.data_ptr()

    def library(self, name: str) -> None:
        """PyTorch's own function is not run either."""

    def reference(self, name: str) -> None:
        """The gradients through an operator's reference would be computed by PyTorch."""
        assert self.into is not None
        self.into.references.append(name)

    def tensor_map(self, of: TensorMap) -> bytes:
        """Return the bytes in place of a tensor map, empty since no kernel runs."""
        return bytes(of.nbytes)


def explain(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], card: Card) -> list[Direction]:
    """Plan what `function(*args, **kwargs)` and its backward would choose and launch on `card`.

    Args:
        function: an operator, or a function of operators.
        args, kwargs: its arguments. Tensors are on the CPU; their values are not looked at by kernels, which do not run.

    Returns:
        The forward, and the backward if an argument requires a gradient.

    Raises:
        InputError: arguments are missing; or nothing is chosen, since only the reference takes what is given.
    """
    recorder, directions = _Recorder(card), [Direction("forward")]
    turn = Turn("cpu", recorder)
    try:
        with assume_gpu(**asdict(card.gpu)), _listening(recorder):
            recorder.into = directions[0]
            found = _called(function, args, kwargs)
            outputs = [y for y in (found if isinstance(found, (tuple, list)) else (found,)) if _differentiable(y)]
            if outputs:
                recorder.into = Direction("backward")
                directions.append(recorder.into)
                torch.autograd.backward(outputs, [torch.empty_like(y) for y in outputs])
    finally:
        turn.end()
    if not any(direction.launches or direction.choices for direction in directions):
        raise InputError(
            f"{getattr(function, '__name__', function)} launches no kernel for this call: it takes the reference; try "
            "other sizes or another dtype"
        )
    return directions


def _called(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    try:
        return function(*args, **kwargs)
    except TypeError as error:
        raise InputError(f"{_name(function)}: {error}") from error


def _name(function: Any) -> str:
    return str(getattr(function, "__name__", function))


def _differentiable(y: Any) -> bool:
    return isinstance(y, Tensor) and y.requires_grad


@contextmanager
def _listening(recorder: _Recorder) -> Iterator[None]:
    def listen(choice: forms.Choice[Any]) -> None:
        assert recorder.into is not None
        recorder.into.choices.append(choice)

    forms.listeners.append(listen)
    try:
        yield
    finally:
        forms.listeners.remove(listen)
