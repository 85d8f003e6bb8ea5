"""The samples of each operator: those of its contract in tests/ops, for whatever tries all operators alike.

Who needs calls of every operator takes them from here: the tracers of tests/edges, drawn calls (fuzzing.py), what is kept
for backward (twins.py), the simulator (tests/simulator/cases.py) and compute-sanitizer (tools/operator_samples.py). A table
of theirs has a line for an operator only where its contract does not say enough.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from contract import Make, OperatorContract, Sample
from torch import Tensor

import cupyops

TESTS = Path(__file__).parent.parent
PUBLIC = sorted(name for name, value in vars(cupyops.ops).items() if inspect.isfunction(value) and name[0] != "_")
DIFFERENTIABLE = [name for name in PUBLIC if name not in ("scaled_mm", "quantized_linear")]


def refuses_alike(name: str) -> bool:
    """True where what the contract's function of PyTorch refuses is to be refused: that of the operator's own name does, and
    of what makes up the others some takes more."""
    own = any(hasattr(module, name) for module in (torch.nn.functional, torch)) and name != "grouped_mm"
    return own or name == "attention"


@functools.cache
def of_file(name: str) -> tuple[type[OperatorContract], ...]:
    """The contracts of `tests/ops/test_<name>.py`."""
    module = importlib.import_module(f"ops.test_{name}")
    own = [value for value in vars(module).values() if isinstance(value, type) and value.__module__ == module.__name__]
    return tuple(value for value in own if issubclass(value, OperatorContract))


def contract(name: str) -> type[OperatorContract]:
    """The first contract of an operator."""
    return of_file(name)[0]


@dataclass
class Edge:
    """A call of a public operator.

    Attributes:
        function: the operator, of the call's arguments.
        theirs: the same in PyTorch.
        sample: the call.
    """

    function: Callable[..., Any]
    theirs: Callable[..., Any]
    sample: Sample

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors of the call."""
        return self.sample.all_tensors()

    @property
    def leaves(self) -> list[Tensor]:
        """Fresh ones, which want gradients where those of the sample do."""
        return [tensor.detach().clone().requires_grad_(tensor.requires_grad) for tensor in self.inputs]

    def of(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` of the tensors alone."""
        known = self.inputs

        def call(*values: Any) -> Any:
            return self.sample.with_tensors(known, values).of(function)

        return call

    @property
    def ours(self) -> Callable[..., Any]:
        """The operator, of the tensors alone."""
        return self.of(self.function)

    @property
    def torch(self) -> Callable[..., Any]:
        """PyTorch's function, of the tensors alone."""
        return self.of(self.theirs)


def every_edge(name: str) -> list[Edge]:
    """All small calls of an operator's contract, in float32."""
    own = contract(name)
    samples = own().small_samples(Make("cpu", torch.float32))
    return [Edge(own.function, own.torch_function, sample) for sample in samples]


def edge(name: str, dtype: torch.dtype = torch.float32) -> Edge:
    """The call of an operator: the first small one of its contract."""
    own, make = contract(name), Make("cpu", dtype)
    if name == "dropout":  # whose contract gives a seed, which PyTorch's has none of
        return Edge(cupyops.dropout, torch.nn.functional.dropout, Sample(make(3, 4), 1.0, True))
    samples = list(own().small_samples(make))
    sample = next((one for one in samples if all(min(t.shape, default=0) > 1 for t in one.all_tensors())), samples[0])
    return Edge(own.function, own.torch_function, sample)
