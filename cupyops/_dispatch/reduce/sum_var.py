"""Dimensions and launches of sum, mean, var and amax; and all of sum and mean, which are one kernel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._kernel.kernel import FLOATING, Kernel, ceil_div
from ..._util import arguments
from ..._util.strides import is_dry
from ..core.forms import Forms
from ..core.images import accumulator as accumulator
from ..elementwise.elementwise import UP_TO_FLOAT32
from .backward import over_input
from .reduction import DEFINE, FORM, Reduction, Registers, ThreadPerRow, finalizing_block, fold_forms, launched

STATE_LOADS = 16  # of a thread, where more than a number is combined with its neighbours'


def served(T: torch.dtype, FORM: str) -> bool:
    """Return True if fold() has such an instance: double precision has the most general form alone."""
    return T is not torch.float64 or FORM == "kStrided"


sum_fwd_thread_per_row = Kernel("sum.cu", "sum_fwd_thread_per_row<T>", define=DEFINE, T=UP_TO_FLOAT32)
sum_fwd_registers = Kernel("sum.cu", "sum_fwd_registers<T>", define=DEFINE, T=UP_TO_FLOAT32)
sum_fwd_fold = Kernel("sum.cu", "sum_fwd_fold<T, FORM>", define=DEFINE, T=FLOATING, FORM=FORM, where=served)
sum_fwd_finalize = Kernel("sum.cu", "sum_fwd_finalize<T>", define=DEFINE, T=FLOATING)

SUM = Forms(
    "sum",
    "forward",
    [ThreadPerRow(sum_fwd_thread_per_row), Registers(sum_fwd_registers), *fold_forms(sum_fwd_fold)],
)
_HALVES = (torch.float16, torch.bfloat16)


def give_roles(op: Any, *, mean: bool) -> None:
    """Define all roles but the reference of the operator of a sum, or of a mean."""

    @op.unsupported
    def unsupported(x: Tensor, dim: list[int], keepdim: bool, dtype: torch.dtype | None, size: list[int]) -> str | None:
        if dtype is None or dtype is x.dtype or (dtype is torch.float32 and x.dtype in _HALVES):
            return why_not(x, dim)
        return f"no kernel for {x.dtype} to {dtype}"

    @op.forward
    def forward(x: Tensor, dim: list[int], keepdim: bool, dtype: torch.dtype | None, size: list[int]) -> Any:
        y = total(x, dim, dtype or x.dtype, keepdim, count(x.shape, dim) if mean else 1)
        return y, (x.new_empty(0),) if y.dtype is not x.dtype else ()  # the dtype of the gradient

    def backward(saved: Any, grad_y: Tensor, dim: list[int], keepdim: bool, size: list[int]) -> Any:
        grad_y = grad_y / count(size, dim) if mean else grad_y
        return over_input(grad_y.to(saved[0].dtype) if saved else grad_y, dim, keepdim, size)

    op.backward(backward)
    op.reference_backward(backward)


def total(x: Tensor, dims: Sequence[int], dtype: torch.dtype, keepdim: bool = True, divisor: int = 1) -> Tensor:
    """Compute the sum over `dims`, divided and rounded once; `dtype` is that of `x` or of the accumulator."""
    y, strides = empty_results(x, dims, keepdim, dtype)
    reduce(SUM, sum_fwd_finalize, x, dims, strides, (y,), (y.dtype is not x.dtype, divisor))
    return y


def sum_into(y: Tensor, x: Tensor, dim: int) -> None:
    """The sums of x over one dimension into y, of its dtype."""
    if why_not(x, [dim]):
        y.zero_()
    else:
        reduce(SUM, sum_fwd_finalize, x, (dim,), y.stride(), (y,), (False, 1))


def count(shape: Sequence[int], dims: Sequence[int]) -> int:
    """Number of elements that are reduced to one."""
    return math.prod(shape[dim] for dim in dims) if len(shape) else 1


def empty_results(x: Tensor, dims: Sequence[int], keepdim: bool, dtype: torch.dtype) -> tuple[Tensor, tuple[int, ...]]:
    """An empty output for the results over `dims`, and its strides in the dimensions that are kept."""
    shape = x.shape
    kept = [dim for dim in range(len(shape)) if dim not in dims]
    result = [1 if dim in dims else shape[dim] for dim in range(len(shape))] if keepdim else [shape[d] for d in kept]
    y = torch.empty(result, dtype=dtype, device=x.device)
    return y, tuple(y.stride(dim) for dim in kept) if keepdim else y.stride()


def reduce(
    forms: Forms[Reduction],
    finalize: Kernel,
    x: Tensor,
    dims: Sequence[int],
    strides: tuple[int, ...],
    outputs: Sequence[Tensor],
    options: Sequence[Any],
    state: int = 1,
) -> None:
    """Launch a form, and `finalize` for what is combined of several slabs, of `state` numbers each.

    Kernels for rows take (x, *outputs, *options, rows, size), those of fold() (x, *outputs, partial, *options, structs, the
    results of a slab), and `finalize` (partial, *outputs, *options, slabs, results). `strides` are of the outputs.
    """
    results = outputs[0].numel()
    if is_dry(outputs[0]) or results == 0:
        return
    launch, (x,) = launched(forms, (x,), dims, strides, x.element_size())
    slabs: int | None = launch.extra
    if slabs is None:  # a form for rows
        launch(x, *outputs, *options, T=x.dtype)
        return
    partial = torch.empty((slabs, results, state), dtype=accumulator(x.dtype), device=x.device) if slabs else None
    launch(x, *outputs, partial, *options, T=x.dtype)
    if partial is not None:
        block = finalizing_block(results, slabs)
        finish = finalize.configure(ceil_div(results, block[0]), block, overlap=True)
        finish(partial, *outputs, *options, slabs, results, T=x.dtype)


def why_not(x: Tensor, dims: Sequence[int]) -> str | None:
    """Return why no kernel serves a call, or None."""
    return None if all(x.shape[dim] for dim in dims if x.dim()) else "nothing to reduce"


def given_dims(input: Tensor, dim: Any, keepdim: Any, dtype: Any) -> list[int]:
    """The dimensions to reduce, from the front and in order; all arguments checked."""
    arguments.tensor("input", input)
    if not isinstance(keepdim, bool):
        arguments.fail("keepdim", keepdim, "a bool")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        arguments.fail("dtype", dtype, "a torch.dtype or None")
    listed = list(dim) if isinstance(dim, (tuple, list)) else [] if dim is None else [dim]
    ndim = input.dim()
    chosen = [arguments.dim("dim", one, ndim) for one in listed]
    dims = [one for one in range(ndim) if not chosen or any(one == other for other in chosen)]
    if len(dims) < len(chosen) and (ndim or len(chosen) > 1):
        arguments.fail("dim", dim, "each dimension once")
    return dims


def check_inexact(input: Tensor, dtype: torch.dtype | None = None) -> None:
    """Check that the dtype, by default that of `input`, is not one of integers."""
    found = input.dtype if dtype is None else dtype
    if not (found.is_floating_point or found.is_complex):
        name, given = ("input", input) if dtype is None else ("dtype", dtype)
        arguments.fail(name, given, "a floating or complex dtype")
