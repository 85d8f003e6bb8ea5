"""What the reductions share: dimensions, launches, gradients; sum and mean, which are one kernel, and var."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import check
from ..kernel import FLOATING, Kernel, ceil_div
from ..layout import aligned, is_dry
from .broadcast import BLOCK, empty_output
from .broadcast import arrange as walk
from .reduction import (
    LOADS,
    THREADS,
    arrange,
    columns_block,
    finishing_block,
    longer_dims,
    rows_alone,
    rows_block,
    short_rows,
)

FORM = tuple(range(5))  # of fold()
WIDE = (torch.float32, torch.float64)
STATE_LOADS = 16  # of a thread, where more than a number is combined with its neighbours'
sum_small = Kernel("sum.cu", "sum_small<T>", T=FLOATING)
sum_rows = Kernel("sum.cu", "sum_rows<T>", T=FLOATING)
sum_fwd = Kernel("sum.cu", "sum_fwd<T, FORM>", T=FLOATING, FORM=FORM)
sum_finish = Kernel("sum.cu", "sum_finish<T>", T=FLOATING)
var_small = Kernel("var.cu", "var_small<T>", T=FLOATING)
var_rows = Kernel("var.cu", "var_rows<T>", T=WIDE)
var_fwd = Kernel("var.cu", "var_fwd<T, FORM>", T=FLOATING, FORM=FORM)
var_finish = Kernel("var.cu", "var_finish<T>", T=FLOATING)
var_bwd_short = Kernel("var.cu", "var_bwd_short<T>", T=FLOATING)
var_bwd_rows = Kernel("var.cu", "var_bwd_rows<T>", T=FLOATING)
var_bwd_columns = Kernel("var.cu", "var_bwd_columns<T>", T=FLOATING)
var_bwd = Kernel("var.cu", "var_bwd<T>", T=FLOATING)

MOMENTS = 3  # numbers of Moments

_HALVES = (torch.float16, torch.bfloat16)


def give_roles(op: Any, *, mean: bool) -> None:
    """What the operator of a sum, or of a mean, is beyond its reference."""

    @op.unsupported
    def _(x: Tensor, dim: list[int], keepdim: bool, dtype: torch.dtype | None, size: list[int]) -> str | None:
        if dtype is None or dtype is x.dtype or (dtype is torch.float32 and x.dtype in _HALVES):
            return why_not(x, dim)
        return f"no kernel for {x.dtype} to {dtype}"

    @op.forward
    def _(x: Tensor, dim: list[int], keepdim: bool, dtype: torch.dtype | None, size: list[int]) -> Any:
        y = total(x, dim, dtype or x.dtype, keepdim, count(x.shape, dim) if mean else 1)
        return y, (x.new_empty(0),)  # the dtype of the gradient

    def spread_evenly(saved: Any, grad_y: Tensor, dim: list[int], keepdim: bool, size: list[int]) -> Any:
        grad_y = grad_y / count(size, dim) if mean else grad_y
        return spread(grad_y.to(saved[0].dtype), dim, keepdim, size)

    op.backward(spread_evenly)
    op.reference_backward(spread_evenly)


def total(x: Tensor, dims: Sequence[int], dtype: torch.dtype, keepdim: bool = True, divisor: int = 1) -> Tensor:
    """The sum over `dims`, divided once and rounded once to `dtype`, that of `x` or what it is summed in."""
    y, strides = room(x, dims, keepdim, dtype)
    options = (y.dtype is not x.dtype, divisor)
    fold((sum_fwd, sum_finish, sum_small, sum_rows), x, dims, strides, (y,), options)
    return y


def give_var_roles(op: Any) -> None:
    """What the operator of a variance is beyond its reference."""

    @op.unsupported
    def _(x: Tensor, dim: list[int], correction: float, keepdim: bool) -> str | None:
        return why_not(x, dim) or (None if count(x.shape, dim) > correction else "no degrees of freedom")

    @op.forward
    def _(x: Tensor, dim: list[int], correction: float, keepdim: bool) -> Any:
        y, strides = room(x, dim, keepdim, x.dtype)
        mean = torch.empty(y.shape, dtype=accumulator(x), device=x.device)
        options = (count(x.shape, dim) - correction,)
        kernels = (var_fwd, var_finish, var_small, var_rows if x.dtype in WIDE else None)
        fold(kernels, x, dim, strides, (y, mean), options, MOMENTS)
        return y, (mean,)

    @op.backward
    def _(saved: Any, grad_y: Tensor, x: Tensor, dim: list[int], correction: float, keepdim: bool) -> Any:
        kernels = (var_bwd_short, var_bwd_rows, var_bwd_columns, var_bwd)
        slope = 2 / (count(x.shape, dim) - correction)
        return gradient(kernels, x, dim, keepdim, (grad_y, saved[0]), (slope,))


def count(shape: Sequence[int], dims: Sequence[int]) -> int:
    """How many elements are reduced to one."""
    return math.prod(shape[dim] for dim in dims) if len(shape) else 1


def room(x: Tensor, dims: Sequence[int], keepdim: bool, dtype: torch.dtype) -> tuple[Tensor, tuple[int, ...]]:
    """Room for the results over `dims`, and its strides in the dimensions that are kept."""
    shape = x.shape
    kept = [dim for dim in range(len(shape)) if dim not in dims]
    result = [1 if dim in dims else shape[dim] for dim in range(len(shape))] if keepdim else [shape[d] for d in kept]
    y = torch.empty(result, dtype=dtype, device=x.device)
    return y, tuple(y.stride(dim) for dim in kept) if keepdim else y.stride()


def accumulator(x: Tensor) -> torch.dtype:
    """What the kernels compute in: acc_t."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def fold(
    kernels: tuple[Kernel, Kernel, Kernel, Kernel | None],
    x: Tensor,
    dims: Sequence[int],
    strides: tuple[int, ...],
    outputs: Sequence[Tensor],
    options: Sequence[Any],
    state: int = 1,
    all_small: bool = False,
) -> None:
    """Launches of fold(), and of fold_slabs() for what is combined of several slabs, of `state` numbers each.

    They take (x, *outputs, partial, *options, ...) and (partial, *outputs, *options, ...). `strides` are of the outputs.
    Or a launch of the third kernel or the fourth, which take (x, *outputs, *options, ...), where rows_alone() has one.
    """
    first, last, small, whole = kernels
    results = outputs[0].numel()
    if is_dry(outputs[0]) or results == 0:
        return
    if x.is_contiguous():
        rows = rows_alone(tuple(x.shape), tuple(dims), x.element_size(), aligned(x), all_small)
        kernel = None if rows is None else small if rows.small else whole
        if rows is not None and kernel is not None:
            launch = kernel[rows.grid, rows.block, rows.shared]
            launch(x, *outputs, *options, rows.rows, rows.size, T=x.dtype)
            return
    plan, (x,) = arrange((x,), tuple(dims), strides, 16 // x.element_size(), LOADS if state == 1 else STATE_LOADS)
    room = (plan.slabs, results, state)
    partial = torch.empty(room, dtype=accumulator(x), device=x.device) if plan.slabs else None
    first[plan.grid, plan.block](
        x, *outputs, partial, *options, *plan.structs, plan.partials, T=x.dtype, FORM=plan.form
    )
    if partial is not None:
        block = finishing_block(results, plan.slabs)
        last.configure(ceil_div(results, block[0]), block, overlap=True)(
            partial, *outputs, *options, plan.slabs, results, T=x.dtype
        )


def in_small_rows(x: Tensor, dims: Sequence[int]) -> bool:
    """Whether fold() with `all_small` launches its third kernel."""
    if is_dry(x) or not x.is_contiguous() or x.numel() == 0:
        return False
    rows = rows_alone(tuple(x.shape), tuple(dims), x.element_size(), aligned(x), True)
    return rows is not None and rows.small


def gradient(
    kernels: tuple[Kernel, Kernel, Kernel, Kernel],
    x: Tensor,
    dims: Sequence[int],
    keepdim: bool,
    results: Sequence[Tensor],
    options: Sequence[Any] = (),
    places: Sequence[Tensor] = (),
) -> Tensor:
    """The gradient of x by spread_short(), spread_rows(), spread_columns(), or by pointwise() for any strides.

    They take (x, *results, *options, grad_x, ...); the first three, for which x is contiguous, `places` after the results.
    """
    grad_x = empty_output(x)
    if is_dry(x) or x.numel() == 0:
        return grad_x
    short, rows, columns, anyhow = kernels
    vector, size = 16 // x.element_size(), count(x.shape, dims)
    if x.is_contiguous() and size < 1 << 31:
        dense = [one.contiguous() for one in (*results, *places)]
        number, whole = x.numel() // size, aligned(x) and aligned(grad_x)
        kept, reduced = longer_dims(x.shape, dims)  # as arrange() has it, which what forward knows of places hangs on
        if not kept or (reduced and kept[-1] < reduced[0]):
            few = short_rows(number, size, vector, whole)
            if few is not None:
                short[few[0], THREADS](x, *dense, *options, grad_x, number, size, *few[1:], T=x.dtype)
                return grad_x
            grid, block, parts = rows_block(number, ceil_div(size, vector))
            rows[grid, block](x, *dense, *options, grad_x, number, size, parts, T=x.dtype)
            return grad_x
        if (not reduced or reduced[-1] < kept[0]) and whole:
            period = vector // math.gcd(number, vector)
            tiles, block = columns_block(number * period // vector, ceil_div(size, period))
            columns[tiles, block](x, *dense, *options, grad_x, size, number, period, T=x.dtype)
            return grad_x
    over = [spread(one, dims, keepdim, x.shape) for one in results]
    blocks, layout, inputs = walk(grad_x, x, *over)
    anyhow[blocks, BLOCK](*inputs, *options, grad_x, layout, x.numel(), T=x.dtype)
    return grad_x


def spread(grad_y: Tensor, dims: Sequence[int], keepdim: bool, size: Sequence[int]) -> Tensor:
    """The gradient of a result, over what was reduced to it: a view."""
    if not keepdim:
        for dim in dims:
            if len(size):
                grad_y = grad_y.unsqueeze(dim)
    return grad_y.expand(size)


def why_not(x: Tensor, dims: Sequence[int]) -> str | None:
    """Why no kernel serves a call, or None."""
    return None if all(x.shape[dim] for dim in dims if x.dim()) else "nothing to reduce"


def given_dims(input: Tensor, dim: Any, keepdim: Any, dtype: Any) -> list[int]:
    """The dimensions to reduce, from the front and in order; all arguments checked."""
    check.tensor("input", input)
    if not isinstance(keepdim, bool):
        check.fail("keepdim", keepdim, "a bool")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        check.fail("dtype", dtype, "a torch.dtype or None")
    listed = list(dim) if isinstance(dim, (tuple, list)) else [] if dim is None else [dim]
    ndim = input.dim()
    chosen = [check.dim("dim", one, ndim) for one in listed]
    dims = [one for one in range(ndim) if not chosen or any(one == other for other in chosen)]
    if len(dims) < len(chosen) and (ndim or len(chosen) > 1):
        check.fail("dim", dim, "each dimension once")
    return dims


def check_inexact(input: Tensor, dtype: torch.dtype | None = None) -> None:
    """The dtype, by default that of `input`, is not one of integers."""
    found = input.dtype if dtype is None else dtype
    if not (found.is_floating_point or found.is_complex):
        name, given = ("input", input) if dtype is None else ("dtype", dtype)
        check.fail(name, given, "a floating or complex dtype")


def var_arguments(
    input: Any, dim: Any, unbiased: Any, keepdim: Any, correction: Any
) -> tuple[Tensor, list[int], float, bool]:
    """What the operator takes; all checked. A bool in place of `dim` is `unbiased`, as in PyTorch."""
    if isinstance(dim, bool):
        if unbiased is not None:
            check.fail("unbiased", unbiased, "no second one")
        dim, unbiased = None, dim
    dims = given_dims(input, dim, keepdim, None)
    check_inexact(input)
    if unbiased is not None:
        if not isinstance(unbiased, bool):
            check.fail("unbiased", unbiased, "a bool or None")
        if correction is not None:
            check.fail("correction", correction, "None where `unbiased` is given")
        correction = int(unbiased)
    elif correction is None:
        correction = 1
    elif isinstance(correction, bool) or not isinstance(correction, (int, float, torch.SymInt, torch.SymFloat)):
        check.fail("correction", correction, "a number or None")
    return input, dims, float(correction), keepdim
