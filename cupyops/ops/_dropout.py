"""dropout: elements become 0 at random, and the rest grow by as much. The mask is never stored: a seed makes it again."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from .._dispatch.core.forms import Form, Forms, Launch
from .._dispatch.core.gpu import Gpu, gpu
from .._dispatch.elementwise.broadcast import Broadcast, is_dense, packed_layout
from .._dispatch.elementwise.elementwise import UP_TO_FLOAT32, why_not_size
from .._kernel.kernel import FLOATING, Kernel, ceil_div
from .._operator.arrays import overwrite
from .._operator.derivation import distributed
from .._operator.floating import operator
from .._util import arguments
from .._util.philox import DEFINE as PHILOX
from .._util.philox import factors, of_counter
from .._util.strides import is_dry

BLOCK = 128
RUNS_OF_HALVES, ELEMENTS = 2, 4  # neighbours, of whole vectors, that a thread owns; elements of any layout
DEFINE = {
    "DROPOUT_BLOCK": BLOCK,
    "DROPOUT_RUNS_OF_HALVES": RUNS_OF_HALVES,
    "DROPOUT_ELEMENTS": ELEMENTS,
    **PHILOX,
}
dropout_contiguous = Kernel("dropout.cu", "dropout_contiguous<T>", define=DEFINE, T=UP_TO_FLOAT32)
dropout_strided = Kernel("dropout.cu", "dropout_strided<T>", define=DEFINE, T=FLOATING)


class Contiguous(Form[Broadcast]):
    """Form for contiguous tensors, where an element's address gives its number."""

    name = "contiguous"
    summary = "a thread owns one or two runs of neighbours, and makes four random numbers at once"
    uses = (dropout_contiguous,)

    def why_not(self, problem: Broadcast, gpu: Gpu) -> str | None:
        if reason := why_not_size(dropout_contiguous, problem.itemsize):
            return reason
        contiguous = all(is_dense(problem.shape, strides) for strides in (problem.output, *problem.inputs))
        return None if contiguous else "a tensor is not contiguous"

    def launch(self, problem: Broadcast, gpu: Gpu) -> Launch:
        elements = BLOCK * (RUNS_OF_HALVES if problem.itemsize == 2 else 1) * (16 // problem.itemsize)
        n = math.prod(problem.shape)
        return Launch(dropout_contiguous, ceil_div(n, elements), BLOCK, args=(n,))


class Strided(Form[Broadcast]):
    """An element's number is that of a contiguous tensor, whatever the layout."""

    name = "strided"
    summary = "a thread owns a few elements, and finds the place and the number of each by divisions"
    uses = (dropout_strided,)

    def why_not(self, problem: Broadcast, gpu: Gpu) -> str | None:
        return None if self._layout(problem) is not None else "the dimensions are too many to walk"

    def launch(self, problem: Broadcast, gpu: Gpu) -> Launch:
        layout, *_ = self._layout(problem)  # type: ignore[misc]
        n = math.prod(problem.shape)
        return Launch(dropout_strided, ceil_div(n, BLOCK * ELEMENTS), BLOCK, args=(layout, n))

    def _layout(self, problem: Broadcast) -> Any:
        numbers = tuple(math.prod(problem.shape[dim + 1 :]) for dim in range(len(problem.shape)))
        return packed_layout(problem.shape, problem.output, 1, *problem.inputs, numbers)


FORMS = Forms("dropout", "both", [Contiguous(), Strided()])  # forward and backward are the same


@operator("cupyops::dropout", sharding="..., # -> ...")
def _dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    threshold, scale = factors(p)
    keep = _philox(seed, x.numel()).view(x.shape) >= threshold
    return (x.to(wide) * (keep.to(wide) * scale)).to(x.dtype)


@_dropout.forward
def forward(x, seed, p):
    y = torch.empty_like(x)
    _launch(x, seed, y, p)
    return y, ()


@_dropout.backward
def backward(saved, grad_y, seed, p):
    grad_x = torch.empty_like(grad_y)
    _launch(grad_y, seed, grad_x, p)
    return grad_x


@_dropout.reference_backward
def reference_backward(saved, grad_y, seed, p):
    return _dropout(grad_y, seed, p)


@_dropout.interface(twin=torch.nn.functional.dropout)
def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
    """Each element becomes 0 with probability p, or is divided by 1 - p; as `torch.nn.functional.dropout`.

    From "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", Srivastava and others, 2014. Each call draws
    one number from PyTorch's generator of the device, and it alone makes the mask, in forward and again in backward. So
    `torch.manual_seed` repeats a mask, whatever the layout of `input`, a CUDA graph has another at each replay, and
    checkpoints, `torch.compile` and `torch.func` treat it as they treat PyTorch's random numbers. It is not the mask that
    PyTorch's own dropout makes of the same seed.

    Args:
        input: any shape; kernels serve fp16, bf16, fp32 and fp64. Complex numbers and integers can be returned as they are,
            or dropped all.
        p: the probability, in [0, 1], exact to 32 bits.
        training: False to return `input`.
        inplace: write the result into `input` and return it.

    Returns:
        Tensor of the shape and dtype of `input`; `input` itself where p is 0. What is dropped is multiplied by 0: NaN and
        infinities become NaN, as in PyTorch.

    Raises:
        InputError: `input` is neither a tensor nor an array; `p` is not in [0, 1]; or, as in PyTorch, some elements of an
            `input` that is not of a floating-point dtype are to be dropped.

    Example:
        >>> y = cupyops.dropout(torch.ones(1000), 0.25)
        >>> y.unique()
        tensor([0.0000, 1.3333])
    """
    arguments.tensor("input", input)
    if isinstance(p, bool) or not isinstance(p, (int, float)) or not 0 <= p <= 1:
        arguments.fail("p", p, "a probability in [0, 1]")
    if not training or p == 0:
        return input
    if p == 1 and not input.dtype.is_floating_point:
        return torch.nn.functional.dropout(input, p, inplace=inplace)
    arguments.floating("input", input)
    seed = torch.randint(-(2**63), 2**63 - 1, (), dtype=torch.int64, device=input.device)
    y = _dropout(input, distributed.alike(seed, input), float(p))
    return overwrite(input, y) if inplace else y


def _launch(x: Tensor, seed: Tensor, y: Tensor, p: float) -> None:
    if is_dry(y) or y.numel() == 0:
        return
    problem = Broadcast(tuple(y.shape), y.stride(), (x.stride(),), y.element_size())
    if FORMS.list[-1].why_not(problem, gpu(y.device)):
        dense = torch.empty(y.shape, dtype=y.dtype, device=y.device)
        _launch(x.contiguous(), seed, dense, p)
        y.copy_(dense)
        return
    launch = FORMS.launch(problem, gpu(y.device))
    launch(x, seed, y, *factors(p), T=y.dtype)


def _philox(seed: Tensor, n: int) -> Tensor:
    """`n` numbers of 32 random bits, in int64: word i % 4 of Philox4x32-7 with key `seed` and counter i // 4."""
    index = torch.arange((n + 3) // 4, device=seed.device)
    return of_counter(seed, index).flatten()[:n]
