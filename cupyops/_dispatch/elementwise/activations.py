"""The kernels of activations, and the launches of those that follow a product."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

from ..._kernel.kernel import FLOATING, Kernel
from .elementwise import by_vectors

relu_fwd = Kernel("relu.cu", "relu_fwd<T>", T=FLOATING)
relu_bwd = Kernel("relu.cu", "relu_bwd<T>", T=FLOATING)
gelu_fwd = Kernel("gelu.cu", "gelu_fwd<T>", T=FLOATING)
gelu_bwd = Kernel("gelu.cu", "gelu_bwd<T>", T=FLOATING)
silu_fwd = Kernel("silu.cu", "silu_fwd<T>", T=FLOATING)
silu_bwd = Kernel("silu.cu", "silu_bwd<T>", T=FLOATING)

# Functions of common/elementwise/activations.cuh, in the order in which kernels with several number them.
FUNCTIONS = ("Identity", "Relu", "GeluExact", "GeluTanh", "Silu")

REFERENCES: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda z: z,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}
IN_PLACE = ("none", "relu", "silu")  # whose result may be what they are given


def activate(z: Tensor, y: Tensor, activation: str) -> None:
    """y = f(z), of contiguous tensors; of "none" y is z."""
    launch, n, dtype = by_vectors(y), y.numel(), y.dtype
    if activation == "relu":
        relu_fwd[launch](z, y, None, n, T=dtype)
    elif activation == "silu":
        silu_fwd[launch](z, y, n, T=dtype)
    elif activation != "none":
        gelu_fwd[launch](z, y, n, activation == "gelu_tanh", T=dtype)


def gradient(grad_y: Tensor, z: Tensor, activation: str) -> Tensor:
    """grad_y f'(z), of contiguous tensors; of relu z may be f(z)."""
    if activation == "none":
        return grad_y
    grad_z = torch.empty_like(grad_y)
    launch, n, dtype = by_vectors(grad_z), grad_z.numel(), grad_z.dtype
    if activation == "relu":
        relu_bwd[launch](grad_y, z, None, grad_z, n, T=dtype)
    elif activation == "silu":
        silu_bwd[launch](grad_y, z, grad_z, n, T=dtype)
    else:
        gelu_bwd[launch](grad_y, z, grad_z, n, activation == "gelu_tanh", T=dtype)
    return grad_z
