"""geglu: gelu(gate) * up, the gated activation of transformers."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .._dispatch import gated
from .._dispatch.core import shardings
from .._operator.floating import operator
from .._util import arguments

ACTIVATIONS = {"none": "GeluExact", "tanh": "GeluTanh"}
FORWARD, BACKWARD = gated.GEGLU


@operator("cupyops::geglu", sharding=shardings.gated)
def _geglu(gate: Tensor, up: Tensor | None, approximate: str) -> Tensor:
    return gated.halves(functools.partial(torch.nn.functional.gelu, approximate=approximate), gate, up)


@_geglu.forward
def forward(gate, up, approximate):
    return gated.forward(FORWARD, gate, up, ACTIVATIONS[approximate]), ()


@_geglu.backward(reads={"up": ("gate",)})
def backward(saved, grad_y, gate, up, approximate, needs_grad):
    return gated.backward(BACKWARD, grad_y, gate, up, needs_grad, ACTIVATIONS[approximate])


@_geglu.interface
def geglu(gate: Tensor, up: Tensor | None = None, approximate: str = "none") -> Tensor:
    """Gated linear unit with gelu for its gate, gelu(gate) * up, in one pass; backward gives both gradients in one.

    From "GLU Variants Improve Transformer", Shazeer, 2020.

    Args:
        gate: any shape, any floating-point dtype; kernels serve fp16, bf16, fp32 and fp64. Without `up` its last dimension
            holds both: the gate in the first half, what it is multiplied by in the second.
        up: a tensor of the shape and dtype of `gate`. Halves of a packed tensor, as `x.chunk(2, -1)` gives them, are read
            where they are.
        approximate: `"none"` or `"tanh"`, as in `cupyops.gelu`.

    Returns:
        Tensor of the shape of `gate`, or, packed, with half its last dimension.

    Raises:
        InputError: an argument is neither a tensor nor an array, or not of a floating-point dtype; `up` differs from `gate`
            in shape, dtype or device; without it, the last dimension is odd; `approximate` is neither of the two.

    Example:
        >>> cupyops.geglu(torch.tensor([-1.0, 2.0]), torch.tensor([1.0, 3.0]))
        tensor([-0.1587,  5.8635])
    """
    gated.check_gated(gate, up)
    arguments.choice("approximate", approximate, tuple(ACTIVATIONS))
    return _geglu(gate, up, approximate)
