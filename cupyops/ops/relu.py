"""relu: max(x, 0)."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arrays import overwrite
from ..kernel import FLOATING, Kernel, ceil_div
from ..layout import restride
from ..operator import operator

relu_fwd = Kernel("relu.cu", "relu_fwd<T>", T=FLOATING)
relu_bwd = Kernel("relu.cu", "relu_bwd<T>", T=FLOATING)

BLOCK = 256
ELEMENTS = {dtype: BLOCK * 16 // dtype.itemsize for dtype in FLOATING}  # of one block: 16 bytes a thread


@operator("cupyops::relu")
def _relu(input: Tensor) -> Tensor:
    return torch.relu(input)


@_relu.forward
def _(input):
    y = torch.empty_like(input)
    x = input if input.is_contiguous() else restride(input, y.stride())
    n, dtype = y.numel(), y.dtype
    relu_fwd[ceil_div(n, ELEMENTS[dtype]), BLOCK](x, y, n, T=dtype)
    return y, ()


@_relu.backward
def _(saved, grad_y, y):
    grad_x = torch.empty_like(y)
    n, dtype = y.numel(), y.dtype
    relu_bwd[ceil_div(n, ELEMENTS[dtype]), BLOCK](grad_y, y, grad_x, n, T=dtype)
    return grad_x


@_relu.reference_backward
def _(saved, grad_y, y):
    return torch.where(y <= 0, 0, grad_y)


@_relu.interface(hands_on=True)
def relu(input: Tensor, inplace: bool = False) -> Tensor:
    """Rectified linear unit, max(x, 0) elementwise; as `torch.nn.functional.relu`.

    Args:
        input: any shape, any real dtype; kernels serve fp16, bf16, fp32 and fp64.
        inplace: write the result into `input` and return it.

    Returns:
        Tensor of the shape, dtype and strides of `input`. NaN stays NaN; the gradient at 0 is 0.

    Raises:
        InputError: `input` is neither a tensor nor an array.

    Example:
        >>> cupyops.relu(torch.tensor([-1.0, 0.0, 2.0]))
        tensor([0., 0., 2.])
    """
    y = _relu(input)
    return overwrite(input, y) if inplace else y
