"""The products of a linear layer and of its gradients: what `linear` and operators that fuse more with it share."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..._kernel.kernel import ceil_div
from ..._util import arguments, observed
from ..._util.strides import is_dry
from ...errors import InputError
from ..core import library
from ..core.forms import Forms, Launch, Library, asked
from ..core.gpu import gpu
from ..reduce import sum_var
from . import few_rows, gemm, tf32, wgmma
from .gemm import Layout, Problem

PRODUCT = Forms("linear", "product", [few_rows.FewRows(), tf32.InVectors(), *wgmma.forms(gemm.DENSE)])

_LARGE = 2**20  # elements of weight, from which on one more column costs more than reading grad_y once more


def rows_of(x: Tensor) -> Tensor:
    """x as a matrix of rows: a view where its strides allow one."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def gradients(grad_y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, needs: Any) -> list[Tensor | None]:
    """Compute the gradients of x, weight and bias; None for one that is not wanted."""
    rows, grad_rows = rows_of(x), rows_of(grad_y)
    grad_x = grad_weight = grad_bias = None
    dense = torch.contiguous_format
    if needs.x and needs.weight:
        grad_rows = _for_both(grad_rows, rows, weight)
    if needs.x:
        grad_x = torch.empty_like(x, memory_format=dense)
        multiply(grad_rows, weight, None, grad_x)
    if needs.weight:
        grad_weight = torch.empty_like(weight, memory_format=dense)
    if needs.bias and bias is not None:
        grad_bias = torch.empty_like(bias, memory_format=dense)
    if grad_weight is not None and grad_bias is not None and not is_dry(grad_y) and _apart(grad_rows, rows):
        multiply(grad_rows, rows, None, grad_weight, turn_a=True)
        multiply(grad_rows, rows[:, :0], None, None, grad_bias, turn_a=True)
    elif grad_weight is not None or grad_bias is not None:
        taps = rows if grad_weight is not None else rows[:, :0]
        multiply(grad_rows, taps, None, grad_weight, grad_bias, turn_a=True)
    return [grad_x, grad_weight, grad_bias]


def _for_both(grad_rows: Tensor, rows: Tensor, weight: Tensor) -> Tensor:
    """grad_rows; or the copy whose rows begin at whole vectors, where the products for x and weight would make one each."""
    if is_dry(grad_rows):
        return grad_rows
    shape, strides = grad_rows.shape, grad_rows.stride()
    for other, turn in ((weight, False), (rows, True)):
        found = problem(shape, strides, turn, other.shape, other.stride(), False, False, other.dtype)
        if not found.worth_padding[0] or isinstance(PRODUCT.plan(found, gpu(grad_rows.device)), Library):
            return grad_rows
    return gemm.padded(grad_rows)


def multiply(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None,
    y: Tensor | None,
    column: Tensor | None = None,
    *,
    turn_a: bool = False,
    turn_b: bool = False,
) -> None:
    """y = a b + bias, contiguous; column, if given, the sums of the rows of a. A matrix to turn is given as it lies."""
    if is_dry(a):
        return
    found = problem(a.shape, a.stride(), turn_a, b.shape, b.stride(), turn_b, column is not None, a.dtype)
    launch = PRODUCT.plan(tf32.asked(found), gpu(a.device))
    if isinstance(launch, Library):
        a = a.T if turn_a else a
        if y is not None:
            by = tf32 if launch.by == tf32.InVectors.name else library
            by.multiply(a, b.T if turn_b else b, bias, y)
        if column is not None:  # by kernels, which are measured faster than torch.sum
            sum_var.sum_into(column, a, 1)
        return None
    if copies := gemm.prepared(found, launch, a.T if turn_a else a, b.T if turn_b else b):
        return multiply(*copies, bias, y, column)
    if few_rows.serves(launch) and y is not None:
        return few_rows.run(launch, a, [b if turn_b else b.T], [bias], [y])
    return wgmma.run(launch, a, b, y, bias=bias, column=column)


def launch_together(
    forms: Forms[Any],
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    weights: Sequence[Tensor],
    norm: bool = False,
) -> Launch | None:
    """Return the launch of all layers of a matrix of few rows, described by its shape and strides, or None.

    Args:
        forms: `PRODUCT`, or those of a gate, of which `weights` has one.
        norm: an RMS norm comes first.
    """
    found = [problem(shape, stride, False, one.shape, one.stride(), True, False, dtype) for one in weights]
    card, wanted = gpu(device), asked().get((forms.family, forms.direction))
    if len(found) == 1:
        chosen = forms.choose(found[0], card)
        gated = isinstance(chosen, few_rows.FewRows) and chosen.gated
        fits = isinstance(chosen, few_rows.FewRows)
    else:
        gated, elements = False, sum(one.n * one.k for one in found)
        known = dtype in few_rows.DTYPES
        slower = few_rows.why_slower(shape[0], elements, dtype, card, len(found), norm=norm) if known else ""
        fits = slower is None if wanted is None else wanted == few_rows.FORM.name
    if not fits or not few_rows.are_served(found, card, gated, norm):
        return None
    return few_rows.launch_of(shape[0], tuple(one.n for one in found), shape[1], dtype, card, gated, norm)


@functools.lru_cache(maxsize=4096)
def problem(
    shape_a: tuple[int, ...],
    stride_a: tuple[int, ...],
    turn_a: bool,
    shape_b: tuple[int, ...],
    stride_b: tuple[int, ...],
    turn_b: bool,
    ones: bool,
    dtype: torch.dtype,
) -> Problem:
    """Problem of two matrices; one to be transposed is described as it is stored."""
    if turn_a:
        shape_a, stride_a = shape_a[::-1], stride_a[::-1]
    if turn_b:
        shape_b, stride_b = shape_b[::-1], stride_b[::-1]
    (m, k), n = shape_a, shape_b[1]
    return Problem(m, n, k, Layout(*stride_a), Layout(*stride_b[::-1]), Layout(n, 1), dtype, ones=ones)


def is_pytorch(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Return True if PyTorch's product is the fastest form for a layer whose tensors are contiguous, and of `dtype`."""
    key = x.shape, weight.shape, dtype
    found = _pytorch.get(key)
    if found is None:
        if len(_pytorch) >= _MOST:
            _pytorch.clear()
        found = _pytorch[key] = _is_pytorch(x, weight, dtype)
    return found


def _is_pytorch(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    if weight.dim() != 2 or x.shape[-1:] != weight.shape[1:] or not x.numel() or not weight.numel():
        return False
    (n, k), m = weight.shape, math.prod(x.shape[:-1])
    if too_large(m, n, k):
        return False
    product = problem((m, k), (k, 1), False, (n, k), (k, 1), True, False, dtype)
    return library.faster(PRODUCT, tf32.asked(product), x.device) is not None


_pytorch: dict[Any, bool] = {}  # by sizes and dtype
_MOST = 4096
observed.call_when_settings_change(_pytorch.clear)


def too_large(m: Any, n: Any, k: Any) -> str | None:
    """Return why the kernels cannot index a layer of m rows, or None."""
    return gemm.too_large(m, n, k, tiles=ceil_div(m, 32) * ceil_div(max(n, k + 1), 32))


def check(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raise `InputError` unless these are the arguments of a linear layer."""
    arguments.tensor("input", input)
    arguments.tensor("weight", weight)
    arguments.optional_tensor("bias", bias)
    arguments.same_device(input=input, weight=weight, bias=bias)
    gemm.check_dtypes(input=input, weight=weight, bias=bias)
    if input.dim() < 1:
        arguments.fail("input", input, "at least 1 dimension")
    if weight.dim() not in (1, 2):
        arguments.fail("weight", weight, "shape (out_features, in_features) or (in_features,)")
    if weight.shape[-1] != input.shape[-1]:
        wanted = f"in_features {input.shape[-1]}, the last dimension of input of shape {tuple(input.shape)}"
        raise InputError(f"weight has shape {tuple(weight.shape)}, expected {wanted}")
    if weight.dim() == 1 and bias is not None:
        arguments.fail("bias", bias, "None beside a weight of one dimension")
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise InputError(f"bias has shape {tuple(bias.shape)}, expected ({weight.shape[0]},), out_features of weight")


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Return True if autograd will ask for a tensor's gradient; `needs_grad` does not tell inside torch.compile."""
    return torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)


def _apart(grad_rows: Tensor, rows: Tensor) -> bool:
    """Return True if grad_bias is better summed by itself: beside wgmma, which has no column of ones, or many columns."""
    if grad_rows.shape[1] * rows.shape[1] >= _LARGE:
        return True
    found = problem(grad_rows.shape, grad_rows.stride(), True, rows.shape, rows.stride(), False, False, rows.dtype)
    return PRODUCT.choose(found, gpu(rows.device)).name.startswith("wgmma")
