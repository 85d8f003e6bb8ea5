"""Linear layers whose weight torchao has quantised in place: `quantized_linear` reads what its tensors hold, as it lies."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

from ..._dispatch.gemm.quantized import E4M3
from ...ops._quantized_linear import quantized_linear
from ..twin import parameter
from .classes import Class, Recipe, kind
from .tracing import State

_STORED = {"Int8Tensor": torch.int8, "Float8Tensor": E4M3}  # by the name of torchao's class
_OF_ACTIVATIONS = ("act_quant_kwargs", "act_quant_scale", "act_quant_zero_point", "act_pre_scale")


def recognised(module: Module) -> Recipe | None:
    """The recipe of a linear layer of torch.nn with a weight of torchao's; None of any other module."""
    if type(module) is not torch.nn.Linear or "forward" in vars(module):
        return None
    weight = module._parameters.get("weight")
    if weight is None or held(weight) is None:
        return None
    zero_point = getattr(weight, "zero_point", None)  # which torchao's own product leaves out
    if zero_point is not None and bool(zero_point.any()):
        return None
    return Recipe("quantized", (), "quantized_linear", exact=False)


def held(weight: Any) -> tuple[Tensor, Tensor] | None:
    """The numbers and the scales of a tensor of torchao; None of any other, and of one that changes the input first."""
    cls = type(weight)
    dtype = _STORED.get(cls.__name__)
    if dtype is None or not cls.__module__.startswith("torchao."):
        return None
    if any(getattr(weight, name, None) is not None for name in _OF_ACTIVATIONS):
        return None
    stored, scale = weight.qdata, weight.scale
    if stored.dtype is not dtype or stored.dim() != 2 or scale.dim() != 2:
        return None
    n, k = stored.shape
    of_rows = scale.shape[0] == n and scale.shape[1] > 0 and k % scale.shape[1] == 0
    return (stored, scale) if of_rows or scale.numel() == 1 else None


@kind
def quantized(cls: Class, values: tuple[Any, ...], state: State) -> tuple[tuple[type, ...], dict[str, Any]]:
    """A class that multiplies by what the weight holds, and by its own forward where that is of another kind by then."""
    before: Any = cls.forward

    @functools.wraps(before)
    def forward(self: Any, input: Tensor) -> Tensor:
        parts = held(parameter(self, "weight"))
        if parts is None or not isinstance(input, Tensor):
            return before(self, input)  # type: ignore[no-any-return]
        return quantized_linear(input, *parts, None, parameter(self, "bias"))

    return (cls,), {"forward": forward}
