"""silu: x * sigmoid(x)."""

from __future__ import annotations

import torch
from torch import Tensor

from .._dispatch.core import library
from .._dispatch.elementwise.activations import silu_bwd, silu_fwd
from .._dispatch.elementwise.elementwise import by_vectors, change_in_place
from .._operator.derivation.distributed import is_spread
from .._operator.floating import operator
from .._util import arguments
from .._util.strides import alike


@operator("cupyops::silu", sharding="... -> ...")
def _silu(x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x)


@_silu.forward
def forward(x):
    y, x = alike(x)
    silu_fwd[by_vectors(y)](x, y, y.numel(), T=y.dtype)
    return y, ()


@_silu.unsupported
def unsupported(x):
    # of float32 both reach what memory gives, and PyTorch's takes less of the host
    return library.FASTER if x.dtype is torch.float32 and library.is_wanted(x) else None


@_silu.backward
def backward(saved, grad_y, x):
    grad_x, grad_y, x = alike(grad_y, x)
    silu_bwd[by_vectors(grad_x)](grad_y, x, grad_x, grad_x.numel(), T=grad_x.dtype)
    return grad_x


@operator("cupyops::silu_", mutates=("x",), sharding="... -> ...")
def _silu_(x: Tensor) -> Tensor:
    return torch.nn.functional.silu(x, inplace=True)


@_silu_.forward
def forward_in_place(x):
    change_in_place(x, lambda x, y: silu_fwd[by_vectors(y)](x, y, y.numel(), T=y.dtype))
    return x, ()


@_silu.interface(twin=torch.nn.functional.silu)
def silu(input: Tensor, inplace: bool = False) -> Tensor:
    """Sigmoid linear unit (swish), x * sigmoid(x) elementwise; as `torch.nn.functional.silu`.

    Args:
        input: any shape, any floating-point or complex dtype; kernels serve fp16, bf16, fp32 and fp64.
        inplace: write the result into `input` and return it. Where a gradient is wanted, a copy of `input` is kept.

    Returns:
        Tensor of the shape, dtype and strides of `input`. NaN stays NaN, and -inf gives NaN, as in PyTorch.

    Raises:
        InputError: `input` is neither a tensor nor an array, or of an integer dtype.

    Example:
        >>> cupyops.silu(torch.tensor([-1.0, 0.0, 2.0]))
        tensor([-0.2689,  0.0000,  1.7616])
    """
    arguments.tensor("input", input)
    if not (input.is_floating_point() or input.is_complex()):
        arguments.fail("input", input, "a tensor of a floating-point or complex dtype")
    if not inplace:
        return _silu(input)
    if torch.is_grad_enabled() and input.requires_grad:
        return input.copy_(_silu(input.clone()))  # backward reads the input as it was: the copy is what autograd keeps
    return input.copy_(_silu(input)) if is_spread(input) else _silu_(input)
