"""One small call of every public operator, with PyTorch's function beside it, for what happens to all of them alike."""

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
WITHOUT_GRADIENT = frozenset(("scaled_mm",))  # tests/ops/test_scaled_mm.py has its edges
PUBLIC = sorted(
    name
    for name, value in vars(cupyops.ops).items()
    if inspect.isfunction(value) and name[0] != "_" and name not in WITHOUT_GRADIENT
)
WITHOUT_TWIN = frozenset(
    (
        "add_rms_norm",
        "batch_norm_act",
        "bias_gelu",
        "conv2d_relu_max_pool2d",
        "decode_attention",
        "fused_linear_cross_entropy",
        "gated_linear",
        "geglu",
        "grouped_mm",
        "linear_act",
        "rope",
        "scale_shift",
    )
    + ("swiglu",)
)


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


@functools.cache
def _contracts() -> dict[str, type[OperatorContract]]:
    """The first contract of each public operator."""
    found: dict[str, type[OperatorContract]] = {}
    for path in sorted((TESTS / "ops").glob("test_*.py")):
        module = importlib.import_module(f"ops.{path.stem}")
        for value in vars(module).values():
            if isinstance(value, type) and issubclass(value, OperatorContract) and value.__module__ == module.__name__:
                found.setdefault(path.stem.removeprefix("test_"), value)
    return found


def every_edge(name: str) -> list[Edge]:
    """All small calls of an operator's contract, in float32."""
    contract = _contracts()[name]
    samples = contract().small_samples(Make("cpu", torch.float32))
    return [Edge(contract.function, contract.torch_function, sample) for sample in samples]


def edge(name: str, dtype: torch.dtype = torch.float32) -> Edge:
    """The call of an operator: the first small one of its contract."""
    contract = _contracts()[name]
    make = Make("cpu", dtype)
    if name == "dropout":  # whose contract gives a seed, which PyTorch's has none of
        return Edge(cupyops.dropout, torch.nn.functional.dropout, Sample(make(3, 4), 1.0, True))
    samples = list(contract().small_samples(make))
    sample = next((one for one in samples if all(min(t.shape, default=0) > 1 for t in one.all_tensors())), samples[0])
    return Edge(contract.function, contract.torch_function, sample)
