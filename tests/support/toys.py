"""Toy operators and a stand-in for the GPU, by which the core's tests see routes and launches where there is no GPU."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

import cupyops
from cupyops._kernel import kernel
from cupyops._kernel.launch import signature
from cupyops._kernel.launch.configuration import Configuration

_names = itertools.count()


@contextmanager
def executor(device: str = "cpu", execute: Callable[..., None] | None = None):
    """Kernels are said to run on `device`: operators take the kernel route, launches go to `execute`."""
    before = kernel.executors.get(device)
    had = device in kernel.executors
    kernel.executors[device] = execute or Recorder()
    try:
        yield kernel.executors[device]
    finally:
        if had:
            kernel.executors[device] = before
        else:
            del kernel.executors[device]


class Recorder:
    """Checks a launch as on a GPU and records it: (name, grid, block, shared, checked arguments)."""

    arch = "sm_80"

    def __init__(self) -> None:
        self.launches: list[tuple[Any, ...]] = []

    def __call__(self, specialised: Any, device: int, configuration: Configuration, args: Any) -> None:
        arguments = specialised.arguments(specialised.binary(self.arch))
        values = signature.checked(specialised.name, arguments, args, device)
        self.launches.append((specialised.name, configuration.grid, configuration.block, configuration.shared, values))

    @property
    def last(self) -> tuple[Any, ...]:
        return self.launches[-1]


def fresh(stem: str = "toy") -> str:
    """A qualified name that no other test has."""
    return f"cupyops_tests::{stem}_{next(_names)}"


def forget(*ops: cupyops.Operator) -> None:
    """Take operators out of the registry again."""
    for op in ops:
        sys.modules["cupyops._operator.operator"]._registry.pop(op.name, None)  # cupyops.operator is the decorator


@pytest.fixture(autouse=True)
def clean_registry() -> Iterator[None]:
    """Operators that a test defines are gone after it; for the tests of a file that imports this."""
    before = set(cupyops.operators())
    yield
    forget(*(op for name, op in cupyops.operators().items() if name not in before))


class Module(torch.nn.Module):
    """A module that does what a function does."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any) -> Any:
        """The function."""
        return self.function(*args)


class Calls(list):
    """Which roles of a toy operator ran, in order."""

    def reference(self, x: Tensor) -> None:
        """The reference runs; where it is only asked for shapes, there is no run to speak of."""
        if not x.is_meta:
            self.append("reference")

    def count_of(self, role: str) -> int:
        return sum(1 for one in self if one == role)


def product(**options: Any) -> tuple[cupyops.Operator, Calls]:
    """y = x * weight + shift * bias: the reference, and forward and backward in plain PyTorch that say when they run.

    `bias` is optional; `shift` is a number. Without `reference_backward`: the reference is differentiated.
    """
    calls = Calls()

    @cupyops.operator(fresh("product"), **options)
    def op(x: Tensor, weight: Tensor, bias: Tensor | None = None, shift: float = 1.0) -> Tensor:
        """y = x * weight + shift * bias."""
        calls.reference(x)
        y = x * weight
        return y if bias is None else y + shift * bias

    @op.forward
    def _(x, weight, bias, shift):
        calls.append("forward")
        y = torch.empty_like(x)
        with torch.no_grad():
            y.copy_(x * weight if bias is None else x * weight + shift * bias)
        return y, ()

    @op.backward
    def _(saved, grad_y, x, weight, bias, shift, needs_grad):
        calls.append("backward")
        return (
            (grad_y * weight).sum_to_size(x.shape) if needs_grad.x else None,
            (grad_y * x).sum_to_size(weight.shape) if needs_grad.weight else None,
            (shift * grad_y).sum_to_size(bias.shape) if needs_grad.bias else None,
        )

    return op, calls


def exponential() -> tuple[cupyops.Operator, Calls]:
    """y = exp(x), whose backward names the output alone: the input need not be kept."""
    calls = Calls()

    @cupyops.operator(fresh("exponential"))
    def op(x: Tensor) -> Tensor:
        calls.reference(x)
        return x.exp()

    @op.forward
    def _(x):
        calls.append("forward")
        return torch.exp(x.detach()), ()

    @op.backward
    def _(saved, grad_y, y):
        calls.append("backward")
        return grad_y * y

    @op.reference_backward
    def _(saved, grad_y, y):
        calls.append("reference_backward")
        return grad_y * y

    return op, calls


def extremum() -> tuple[cupyops.Operator, Calls]:
    """(largest, its index, smallest) along the last dimension: an integer output between two others; indices saved."""
    calls = Calls()

    @cupyops.operator(fresh("extremum"))
    def op(x: Tensor, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
        calls.reference(x)
        largest, index = x.max(-1)
        return scale * largest, index, scale * x.min(-1).values

    @op.forward
    def _(x, scale):
        calls.append("forward")
        largest, index = x.detach().max(-1)
        smallest, lowest = x.detach().min(-1)
        return (scale * largest, index, scale * smallest), (lowest,)

    @op.backward
    def _(saved, grad_largest, grad_index, grad_smallest, x, index, scale):
        calls.append("backward")
        (lowest,) = saved
        grad_x = torch.zeros_like(x)
        for grad, at in ((grad_largest, index), (grad_smallest, lowest)):
            if grad is not None:
                grad_x.scatter_add_(-1, at.unsqueeze(-1), scale * grad.unsqueeze(-1))
        return grad_x

    return op, calls


class Nothing(TorchDispatchMode):
    """A dispatch mode that lists what passes and changes nothing: it sends calls through the dispatcher."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class Plain(torch.Tensor):
    """A subclass by `__torch_function__` alone."""


class Wrapper(torch.Tensor):
    """A subclass with `__torch_dispatch__` that wraps a tensor and counts the ops."""

    seen: list = []

    @staticmethod
    def __new__(cls, elem):
        return torch.Tensor._make_wrapper_subclass(
            cls,
            elem.shape,
            strides=elem.stride(),
            dtype=elem.dtype,
            device=elem.device,
            requires_grad=elem.requires_grad,
        )

    def __init__(self, elem):
        self.elem = elem

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.seen.append(func)
        args, kwargs = tree_map(lambda t: t.elem if isinstance(t, cls) else t, (args, kwargs or {}))
        return tree_map(lambda t: cls(t) if isinstance(t, Tensor) else t, func(*args, **kwargs))
