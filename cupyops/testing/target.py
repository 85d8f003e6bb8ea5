"""Subject of a check: a function, what it is to be compared with, and where it can run."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import BuiltinFunctionType
from typing import Any
from unittest import mock

import torch

from .._kernel.kernel import executors
from .._operator.operator import Operator, operators
from .._util import tracing
from .._util.torch_private import tree_map_only
from ..errors import InputError
from . import repeats
from .call import Call, Function
from .hazard import NotApplicable

BACKENDS = ("reference", "simulator", "gpu")


@dataclass(frozen=True)
class Target:
    """A function under test.

    Attributes:
        function: what is called.
        reference: what it is compared with: an independent function of the same arguments, in PyTorch.
        operator: the `Operator` behind it, if it is one of cupyops.
        name: for reports.
        reference_given: whether the reference was given, not found.
    """

    function: Function
    reference: Function
    operator: Operator | None
    name: str
    reference_given: bool = False

    @property
    def has_kernels(self) -> bool:
        """True if there is anything to run but the reference."""
        return self.operator is None or self.operator.definition.launch_forward is not None


def target(function: Any, reference: Function | None = None) -> Target:
    """Find out about a function. Raises `InputError` where there is nothing to compare it with."""
    if not callable(function):
        raise InputError(f"op is {type(function).__name__}, expected an operator or a function")
    owner, given = operator_of(function), reference is not None
    if reference is None:
        if owner is None:
            raise InputError(
                f"{_name(function)} is no cupyops operator: give reference=, the same function in plain PyTorch"
            )
        own = owner.definition  # its casts, and outputs cut off from where they come from, are part of what it means
        alone = function is owner and not own.autocast and not own.constant
        reference = owner.reference if alone else by_reference(function)
    name = _name(function) if owner is None else owner.name
    if owner is not None and function is owner and owner.definition.mutated:
        if not given:
            reference = owner.reference
        function, reference = (on_copies(one, owner) for one in (function, reference))
    return Target(function, reference, owner, name, given)


def on_copies(function: Function, owner: Operator) -> Function:
    """Wrap a function to work on copies of what the operator changes, which it returns: calls can be repeated."""

    @functools.wraps(function)
    def of_copies(*args: Any, **kwargs: Any) -> Any:
        values = list(owner.definition.bind(args, kwargs))
        for index in owner.definition.mutated:
            values[index] = tree_map_only(torch.Tensor, torch.Tensor.clone, values[index])
        found = function(*values)
        return found if found is not None else owner.definition.changed(values)

    return of_copies


def by_reference(function: Function) -> Function:
    """Wrap a function to have its kernels out of reach: every operator in it takes its reference."""

    @functools.wraps(function)
    def without_kernels(*args: Any, **kwargs: Any) -> Any:
        with _no_kernels():
            return function(*args, **kwargs)

    return without_kernels


@contextmanager
def _no_kernels() -> Iterator[None]:
    held = dict(executors)
    executors.clear()
    try:
        with tracing.trace():  # an open trace takes calls off the fast path, to where executors are asked for
            yield
    finally:
        executors.update(held)


@contextmanager
def kernels_only() -> Iterator[None]:
    """Calls that would take the reference raise `NotApplicable`: what is tried is not PyTorch."""

    def refuse(operator: Operator, args: tuple[Any, ...]) -> None:
        why = operator.definition.why_not(args)
        raise NotApplicable(f"the kernels leave it to the reference{'' if why is None else f': {why}'}")

    with mock.patch.object(Operator, "_by_reference", refuse):
        yield


def available(of: Target, call: Call) -> tuple[str, ...]:
    """Backends on which the call can be made here: the GPU if its tensors are there, else all that can run it."""
    if any(tensor.is_cuda for tensor in call.all_tensors()):
        return ("gpu",)
    if of.operator is None:
        return ("reference",)
    found = ["reference"]
    if of.has_kernels and importlib.util.find_spec("cupy") is not None:
        found.append("simulator")
    return (*found, "gpu") if torch.cuda.is_available() else tuple(found)


def running(backend: str) -> AbstractContextManager[Any]:
    """Context in which the calls on a backend are made."""
    return repeats.simulation() if backend == "simulator" else nullcontext()


def placed(call: Call, backend: str) -> Call:
    """The call with its tensors where the backend takes them."""
    if backend != "gpu":
        return call
    move = lambda t: t if t.is_cuda else t.detach().cuda().requires_grad_(t.requires_grad)  # noqa: E731
    return call.map(move)


def operator_of(function: Any) -> Operator | None:
    """The operator that a function is, or is the public face of; None where it is neither."""
    if isinstance(function, Operator):
        return function
    return next((op for op in operators().values() if op.public is function), None)


def _name(function: Any) -> str:
    if isinstance(function, BuiltinFunctionType):
        return function.__name__  # torch.relu's qualified name is that of a class inside PyTorch
    return getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or repr(function)
