"""relu: max(x, 0)."""

from __future__ import annotations

import torch
from torch import Tensor

from .._dispatch.core import library
from .._dispatch.elementwise.activations import relu_bwd, relu_fwd
from .._dispatch.elementwise.elementwise import by_vectors, change_in_place
from .._kernel.kernel import FLOATING, ceil_div
from .._operator.arrays import overwrite
from .._operator.derivation.distributed import is_spread
from .._operator.floating import operator
from .._util.strides import alike, restride

VECTOR = {dtype: 16 // dtype.itemsize for dtype in FLOATING}  # elements of a thread, whose bits are a byte of the mask
MASKED = 1 << 18  # elements from which on a mask is worth its memory: with fewer, the GPU is done before the host is


@operator("cupyops::relu", sharding="... -> ...")
def _relu(input: Tensor) -> Tensor:
    return torch.relu(input)


@_relu.forward
def forward(input, needs_grad=None):
    y = torch.empty_like(input)
    x = input if input.is_contiguous() else restride(input, y.stride())
    n, mask = y.numel(), None
    # a bit for each element, which backward reads in place of y: a third less to move. y is kept all the same, for a second
    # derivative; the next operator mostly keeps it too
    if needs_grad is not None and n >= MASKED:
        mask = torch.empty(ceil_div(n, VECTOR[y.dtype]), dtype=torch.uint8, device=y.device)
    relu_fwd[by_vectors(y)](x, y, mask, n, T=y.dtype)
    return y, () if mask is None else (mask,)


@_relu.backward
def backward(saved, grad_y, y):
    grad_x = torch.empty_like(grad_y)
    y, mask = (None, saved[0]) if saved else (y, None)
    relu_bwd[by_vectors(grad_x)](grad_y, y, mask, grad_x, grad_x.numel(), T=grad_x.dtype)
    return grad_x


def _where_positive(saved, grad_y, y):
    return torch.ops.aten.threshold_backward(grad_y, y, 0)  # which, as PyTorch's, is a function of y too


_relu.reference_backward(_where_positive)


# --- in place ---


@operator("cupyops::relu_", mutates=("input",), sharding="... -> ...")
def _relu_(input: Tensor) -> Tensor:
    return torch.relu_(input)


@_relu_.forward
def forward_in_place(input):
    change_in_place(input, lambda x, y: relu_fwd[by_vectors(y)](x, y, None, y.numel(), T=y.dtype))
    return input, ()


@_relu_.backward
def backward_in_place(saved, grad_y, y):
    grad_x, grad_y, y = alike(grad_y, y)
    relu_bwd[by_vectors(grad_x)](grad_y, y, None, grad_x, y.numel(), T=y.dtype)
    return grad_x


_relu_.reference_backward(_where_positive)


@_relu.interface(twin=torch.nn.functional.relu, hands_on=True)
def relu(input: Tensor, inplace: bool = False) -> Tensor:
    """Rectified linear unit, max(x, 0) elementwise; as `torch.nn.functional.relu`.

    Args:
        input: any shape, any real dtype; kernels serve fp16, bf16, fp32 and fp64.
        inplace: write the result into `input` and return it. A leaf that requires a gradient is refused, as in PyTorch.

    Returns:
        Tensor of the shape, dtype and strides of `input`. NaN stays NaN; the gradient at 0 is 0.

    Raises:
        InputError: `input` is neither a tensor nor an array.

    Example:
        >>> cupyops.relu(torch.tensor([-1.0, 0.0, 2.0]))
        tensor([0., 0., 2.])
    """
    if not inplace:
        return _relu(input)
    if isinstance(input, Tensor) and not is_spread(input):
        if input.requires_grad and torch.is_grad_enabled():
            if input.is_leaf:
                return torch.relu_(input)  # which refuses it, in the words of PyTorch
            if library.is_wanted(input):  # as many bytes, and less of the host: no plan changes an argument
                library.call("torch.relu_", input, lambda: torch.relu_(input))
                return input
        return _relu_(input)
    return overwrite(input, _relu(input))
