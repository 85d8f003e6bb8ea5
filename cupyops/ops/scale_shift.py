"""scale_shift: input * weight + bias, an affine map per channel, per feature or of one number."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .. import check
from ..common.broadcast import BLOCK, arrange, broadcast_shape, empty_output
from ..common.column_sums import block_of, slabs_of
from ..kernel import FLOATING, Kernel, ceil_div
from ..layout import is_dry, restride
from ..operator import operator

scale_shift_fwd = Kernel("scale_shift.cu", "scale_shift_fwd<T, BIAS>", T=FLOATING, BIAS=(False, True))
scale_shift_bwd_columns = Kernel("scale_shift.cu", "scale_shift_bwd_columns<T, VEC>", T=FLOATING, VEC=(False, True))
scale_shift_bwd_spans = Kernel("scale_shift.cu", "scale_shift_bwd_spans<T, VEC>", T=FLOATING, VEC=(False, True))
scale_shift_bwd_finish = Kernel("scale_shift.cu", "scale_shift_bwd_finish<T>", T=FLOATING)

SHORT = 32  # spans of fewer elements are read as columns
WARPS = 16384  # into which a backward is cut, whatever the GPU: the same bits on all
Pattern = tuple[int, int, int]  # (outer, channels, inner), as scale_shift.cu draws it


@operator("cupyops::scale_shift")
def _scale_shift(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x * weight
    return y if bias is None else y + bias


@_scale_shift.forward
def _(x, weight, bias):
    factors = [factor.expand(x.shape) for factor in (weight, bias) if factor is not None]
    y = empty_output(x, *factors)
    grid, layout, (x, weight, *rest) = arrange(y, x, *factors)
    bias = rest[0] if rest else None
    scale_shift_fwd[grid, BLOCK](x, weight, bias, y, layout, y.numel(), T=y.dtype, BIAS=bias is not None)
    return y, ()


@_scale_shift.backward
def _(saved, grad_y, x, weight, bias, needs_grad):
    grad_x = torch.empty_like(grad_y) if needs_grad.x else None
    grad_weight = _contiguous(weight, grad_y) if needs_grad.weight else None
    grad_bias = _contiguous(bias, grad_y) if needs_grad.bias else None
    if is_dry(grad_y) or grad_y.numel() == 0:
        return grad_x, grad_weight, grad_bias
    x = restride(x, grad_y.stride()) if needs_grad.weight else None
    of_weight = _pattern(grad_y.shape, grad_y.stride(), weight.shape)
    of_bias = _pattern(grad_y.shape, grad_y.stride(), bias.shape) if bias is not None else None
    together = of_weight if needs_grad.weight else of_bias
    fused = together is not None and together[1] < grad_y.numel() and (needs_grad.weight or needs_grad.bias)
    # one pass for all that have this pattern; what is left has a launch of its own
    in_pass = {
        "grad_x": grad_x if fused and of_weight == together else None,
        "grad_weight": grad_weight if fused else None,
        "grad_bias": grad_bias if fused and of_bias == together else None,
    }
    if fused:
        _reduce(grad_y, x, weight, together, **in_pass)
    if grad_x is not None and in_pass["grad_x"] is None:
        _multiply(grad_y, weight.expand(grad_y.shape), grad_x)
    if grad_weight is not None and in_pass["grad_weight"] is None:
        grad_weight = _sum_of_products(grad_y, x, weight, of_weight)
    if grad_bias is not None and in_pass["grad_bias"] is None:
        if of_bias is not None and of_bias[1] < grad_y.numel():
            _reduce(grad_y, None, None, of_bias, None, None, grad_bias)
        else:
            grad_bias = grad_y.sum_to_size(bias.shape).contiguous()
    return grad_x, grad_weight, grad_bias


@_scale_shift.unsupported
def _(x, weight, bias):
    if weight.dtype != x.dtype or (bias is not None and bias.dtype != x.dtype):
        return "mixed dtypes"
    return None


@_scale_shift.interface
def scale_shift(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Elementwise input * weight + bias with broadcasting, in one pass and with one rounding.

    The gradients of `weight` and `bias` are sums by kernels of fixed order, fused with the gradient of `input`, where the
    dimensions that `weight` (`bias`) varies along are neighbours in memory: one number, the last dimensions, the first,
    (C, 1, 1) in NCHW and NHWC. For other shapes, such as (N, 1, W), the products are written out and PyTorch sums them.

    Args:
        input: any shape, any dtype; kernels serve fp16, bf16, fp32 and fp64.
        weight: a tensor that broadcasts with `input`.
        bias: likewise, or None. Where the dtypes differ, PyTorch computes the result, by its rules of type promotion.

    Returns:
        Tensor of the broadcast shape.

    Raises:
        InputError: an argument is neither a tensor nor an array; the shapes do not broadcast; the devices differ.

    Example:
        >>> cupyops.scale_shift(torch.ones(2, 3), torch.tensor([1.0, 2.0, 3.0]), torch.tensor(0.5))
        tensor([[1.5000, 2.5000, 3.5000],
                [1.5000, 2.5000, 3.5000]])
    """
    check.tensor("input", input)
    check.tensor("weight", weight)
    check.optional_tensor("bias", bias)
    check.same_device(input=input, weight=weight, bias=bias)
    shape = broadcast_shape(input=input, weight=weight, bias=bias)
    if (
        (input.dim() < len(shape) or input.shape != shape)
        and input.dtype == weight.dtype
        and (bias is None or input.dtype == bias.dtype)
    ):
        input = input.expand(shape)  # of other dtypes a number would count as an array in type promotion
    return _scale_shift(input, weight, bias)


def _contiguous(factor: Tensor, grad_y: Tensor) -> Tensor:
    """A contiguous gradient for `factor`, zero where there is nothing to sum."""
    make = torch.zeros if grad_y.numel() == 0 else torch.empty
    return make(factor.shape, dtype=factor.dtype, device=factor.device)


@functools.lru_cache(maxsize=4096)
def _pattern(shape: tuple[int, ...], strides: tuple[int, ...], factor: tuple[int, ...]) -> Pattern | None:
    """How a factor of that shape varies over a dense tensor, in memory order; None if over dimensions that are apart."""
    padded = (1,) * (len(shape) - len(factor)) + tuple(factor)
    order = sorted((d for d, size in enumerate(shape) if size != 1), key=lambda d: -strides[d])
    varying = [d for d in order if padded[d] != 1]
    outer = channels = inner = 1
    for dim in order:
        if dim in varying:
            channels *= shape[dim]
        elif channels == 1 and varying:
            outer *= shape[dim]
        else:
            inner *= shape[dim]
    start = order.index(varying[0]) if varying else 0
    # the channels are counted as a contiguous factor counts them, and without a gap
    if order[start : start + len(varying)] != sorted(varying):
        return None
    return outer, channels, inner


def _multiply(x: Tensor, factor: Tensor, y: Tensor) -> None:
    """y = x * factor, by the forward kernel."""
    grid, layout, (x, factor) = arrange(y, x, factor)
    scale_shift_fwd[grid, BLOCK](x, factor, None, y, layout, y.numel(), T=y.dtype, BIAS=False)


def _sum_of_products(grad_y: Tensor, x: Tensor, weight: Tensor, pattern: Pattern | None) -> Tensor:
    """grad_weight where there is nothing to sum, or where no kernel sums."""
    if pattern is not None:
        product = torch.empty_like(grad_y)
        _multiply(grad_y, x, product)
        return product.contiguous().view(weight.shape)
    wide = torch.promote_types(grad_y.dtype, torch.float32)
    return (grad_y.to(wide) * x).sum_to_size(weight.shape).to(grad_y.dtype).contiguous()


def _reduce(
    grad_y: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    pattern: Pattern,
    grad_x: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> None:
    """Fill those of the three gradients that are given. Two launches: partial sums, and their sums."""
    outer, channels, inner = pattern
    dtype, vector = grad_y.dtype, 16 // grad_y.element_size()
    x = x if grad_weight is not None else None
    weight = weight.contiguous() if weight is not None and grad_x is not None else None
    grads = [grad for grad in (grad_weight, grad_bias) if grad is not None]
    space = functools.partial(grad_y.new_empty, dtype=torch.promote_types(dtype, torch.float32))
    if inner < SHORT:
        columns = channels * inner
        width = vector if columns % vector == 0 else 1
        grid, block, slabs, slab_rows = slabs_of(outer, columns, width)
        partial = space((len(grads), slabs, columns))
        given = (grad_y, x, weight, grad_x, partial, grad_bias is not None)
        sizes = (outer, columns, inner, slab_rows)
        scale_shift_bwd_columns[grid, block](*given, *sizes, T=dtype, VEC=width > 1)
    else:
        width = vector if inner % vector == 0 else 1
        units = outer * (inner // width)
        slab_units = ceil_div(units, max(1, min(WARPS // channels, units // (8 * 32))))
        slabs = ceil_div(units, slab_units)
        partial = space((len(grads), slabs, channels))
        given = (grad_y, x, weight, grad_x, partial, grad_bias is not None)
        sizes = (outer, channels, inner, slabs, slab_units)
        scale_shift_bwd_spans[ceil_div(slabs * channels * 32, BLOCK), BLOCK](*given, *sizes, T=dtype, VEC=width > 1)
    block, left = block_of(channels, slabs), inner if inner < SHORT else 1
    grid = (ceil_div(channels, block[0]), len(grads))
    scale_shift_bwd_finish[grid, block](partial, grads[0], grads[-1], slabs, channels, left, T=dtype)
