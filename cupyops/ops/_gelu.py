"""gelu: x * Phi(x), with Phi the normal distribution function or its tanh approximation."""

from __future__ import annotations

import torch
from torch import Tensor

from .._dispatch.elementwise.activations import gelu_bwd, gelu_fwd
from .._dispatch.elementwise.elementwise import by_vectors
from .._operator.floating import operator
from .._util import arguments
from .._util.strides import alike


@operator("cupyops::gelu", sharding="... -> ...")
def _gelu(x: Tensor, approximate: str) -> Tensor:
    return torch.nn.functional.gelu(x, approximate=approximate)


@_gelu.forward
def forward(x, approximate):
    y, x = alike(x)
    gelu_fwd[by_vectors(y)](x, y, y.numel(), approximate == "tanh", T=y.dtype)
    return y, ()


@_gelu.backward
def backward(saved, grad_y, x, approximate):
    grad_x, grad_y, x = alike(grad_y, x)
    gelu_bwd[by_vectors(grad_x)](grad_y, x, grad_x, grad_x.numel(), approximate == "tanh", T=grad_x.dtype)
    return grad_x


@_gelu.interface(twin=torch.nn.functional.gelu)
def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    """Gaussian error linear unit, x * Phi(x) elementwise; as `torch.nn.functional.gelu`.

    From "Gaussian Error Linear Units (GELUs)", Hendrycks and Gimpel, 2016.

    Args:
        input: any shape, any floating-point dtype; kernels serve fp16, bf16, fp32 and fp64.
        approximate: `"none"` for Phi by the error function, `"tanh"` for its approximation
            (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2.

    Returns:
        Tensor of the shape, dtype and strides of `input`. NaN stays NaN, and -inf gives NaN, as in PyTorch.

    Raises:
        InputError: `input` is neither a tensor nor an array, or not of a floating-point dtype; `approximate` is neither
            of the two.

    Example:
        >>> cupyops.gelu(torch.tensor([-1.0, 0.0, 2.0]))
        tensor([-0.1587,  0.0000,  1.9545])
    """
    arguments.floating("input", input)
    arguments.choice("approximate", approximate, ("none", "tanh"))
    return _gelu(input, approximate)
