"""swiglu: silu(gate) * up, the gated activation of transformers."""

from __future__ import annotations

import torch
from torch import Tensor

from .._dispatch import gated
from .._dispatch.core import shardings
from .._operator.floating import operator

FORWARD, BACKWARD = gated.SWIGLU


@operator("cupyops::swiglu", sharding=shardings.gated)
def _swiglu(gate: Tensor, up: Tensor | None) -> Tensor:
    return gated.halves(torch.nn.functional.silu, gate, up)


@_swiglu.forward
def forward(gate, up):
    return gated.forward(FORWARD, gate, up, "Silu"), ()


@_swiglu.backward(reads={"up": ("gate",)})
def backward(saved, grad_y, gate, up, needs_grad):
    return gated.backward(BACKWARD, grad_y, gate, up, needs_grad, "Silu")


@_swiglu.interface
def swiglu(gate: Tensor, up: Tensor | None = None) -> Tensor:
    """Gated linear unit with silu for its gate, silu(gate) * up, in one pass; backward gives both gradients in one.

    From "GLU Variants Improve Transformer", Shazeer, 2020.

    Args:
        gate: any shape, any floating-point dtype; kernels serve fp16, bf16, fp32 and fp64. Without `up` its last dimension
            holds both: the gate in the first half, what it is multiplied by in the second.
        up: a tensor of the shape and dtype of `gate`. Halves of a packed tensor, as `x.chunk(2, -1)` gives them, are read
            where they are.

    Returns:
        Tensor of the shape of `gate`, or, packed, with half its last dimension.

    Raises:
        InputError: an argument is neither a tensor nor an array, or not of a floating-point dtype; `up` differs from `gate`
            in shape, dtype or device; without it, the last dimension is odd.

    Example:
        >>> cupyops.swiglu(torch.tensor([-1.0, 2.0]), torch.tensor([1.0, 3.0]))
        tensor([-0.2689,  5.2848])
    """
    gated.check_gated(gate, up)
    return _swiglu(gate, up)
