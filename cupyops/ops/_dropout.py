"""dropout: elements become 0 at random, and the rest grow by as much. The mask is never stored: a seed makes it again."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._dispatch.broadcast import packed_layout
from .._kernel.kernel import FLOATING, Kernel, ceil_div
from .._operator.arrays import overwrite
from .._operator.operator import operator
from .._util import arguments
from .._util.strides import is_dry

dropout_kernel = Kernel("dropout.cu", "dropout<T>", T=FLOATING)
dropout_strided = Kernel("dropout.cu", "dropout_strided<T>", T=FLOATING)

BLOCK, STRIDED = 128, 4  # kBlock, kStrided
RUNS = {dtype: 2 if dtype.itemsize == 2 else 1 for dtype in FLOATING}  # kRuns
ELEMENTS = {dtype: BLOCK * runs * max(4, 16 // dtype.itemsize) for dtype, runs in RUNS.items()}  # of one block
ROUNDS = 7  # kPhiloxRounds


@operator("cupyops::dropout")
def _dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    threshold, scale = _factors(p)
    keep = _philox(seed, x.numel()).view(x.shape) >= threshold
    return (x.to(wide) * (keep.to(wide) * scale)).to(x.dtype)


@_dropout.forward
def _(x, seed, p):
    y = torch.empty_like(x)
    _launch(x, seed, y, p)
    return y, ()


@_dropout.backward
def _(saved, grad_y, seed, p):
    grad_x = torch.empty_like(grad_y)
    _launch(grad_y, seed, grad_x, p)
    return grad_x


@_dropout.reference_backward
def _(saved, grad_y, seed, p):
    return _dropout(grad_y, seed, p)


@_dropout.interface
def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Each element becomes 0 with probability p, or is divided by 1 - p; as `torch.nn.functional.dropout`.

    From "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", Srivastava and others, 2014. Each call draws
    one number from PyTorch's generator of the device, and it alone makes the mask, in forward and again in backward. So
    `torch.manual_seed` repeats a mask, whatever the layout of `input`, a CUDA graph has another at each replay, and
    checkpoints, `torch.compile` and `torch.func` treat it as they treat PyTorch's random numbers. It is not the mask that
    PyTorch's own dropout makes of the same seed.

    Args:
        input: any shape, any floating-point dtype; kernels serve fp16, bf16, fp32 and fp64.
        p: the probability, in [0, 1], exact to 32 bits.
        training: False to return `input`.
        inplace: write the result into `input` and return it.

    Returns:
        Tensor of the shape and dtype of `input`; `input` itself where p is 0. What is dropped is multiplied by 0: NaN and
        infinities become NaN, as in PyTorch.

    Raises:
        InputError: `input` is neither a tensor nor an array, or not of a floating-point dtype; `p` is not in [0, 1].

    Example:
        >>> y = cupyops.dropout(torch.ones(1000), 0.25)
        >>> y.unique()
        tensor([0.0000, 1.3333])
    """
    arguments.floating("input", input)
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p <= 1:
        arguments.fail("p", p, "a probability in [0, 1]")
    if not training or p == 0:
        return input
    seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=input.device)
    y = _dropout(input, seed, float(p))
    return overwrite(input, y) if inplace else y


def _factors(p: float) -> tuple[int, float]:
    """(bits from which on an element is kept, what it is then multiplied by)."""
    return min(round(p * 2**32), 2**32 - 1), 0.0 if p == 1 else 1 / (1 - p)


def _launch(x: Tensor, seed: Tensor, y: Tensor, p: float) -> None:
    n, dtype = y.numel(), y.dtype
    if x.is_contiguous() and y.is_contiguous():
        dropout_kernel[ceil_div(n, ELEMENTS[dtype]), BLOCK](x, seed, y, n, *_factors(p), T=dtype)
        return
    if is_dry(y) or n == 0:
        return
    numbers = tuple(math.prod(y.shape[dim + 1 :]) for dim in range(y.dim()))
    found: Any = packed_layout(y.shape, y.stride(), 1, x.stride(), numbers)
    if found is None:  # too many dimensions to walk
        y.copy_(_dropped(x, seed, p))
        return
    dropout_strided[ceil_div(n, BLOCK * STRIDED), BLOCK](x, seed, y, found[0], n, *_factors(p), T=dtype)


def _dropped(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """The same of a contiguous copy."""
    x = x.contiguous()
    y = torch.empty_like(x)
    _launch(x, seed, y, p)
    return y


def _philox(seed: Tensor, n: int) -> Tensor:
    """`n` numbers of 32 random bits, in int64: word i % 4 of Philox4x32-7 with key `seed` and counter i // 4."""
    low = 0xFFFFFFFF
    index = torch.arange((n + 3) // 4, device=seed.device)
    zero = torch.zeros_like(index)
    a, b, c, d = index & low, index >> 32, zero, zero
    key0, key1 = seed & low, (seed >> 32) & low
    for _ in range(ROUNDS):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (right >> 32 & low) ^ b ^ key0, right & low, (left >> 32 & low) ^ d ^ key1, left & low
        key0, key1 = (key0 + 0x9E3779B9) & low, (key1 + 0xBB67AE85) & low
    return torch.stack((a, b, c, d), -1).flatten()[:n]
