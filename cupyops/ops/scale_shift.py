"""scale_shift: input * weight + bias, an affine map per channel, per feature or of one number."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import check
from ..common import column_sums, spread
from ..common.broadcast import BLOCK, arrange, broadcast_shape, empty_output
from ..kernel import FLOATING, Kernel
from ..layout import is_dry, restride
from ..operator import operator

BOTH = (False, True)
scale_shift_fwd = Kernel("scale_shift.cu", "scale_shift_fwd<T, BIAS, FORM>", T=FLOATING, BIAS=BOTH, FORM=spread.FORMS)
scale_shift_fwd_broadcast = Kernel("scale_shift.cu", "scale_shift_fwd_broadcast<T, BIAS>", T=FLOATING, BIAS=BOTH)
scale_shift_bwd_columns = Kernel("scale_shift.cu", "scale_shift_bwd_columns<T, WEIGHT>", T=FLOATING, WEIGHT=BOTH)
scale_shift_bwd_spans = Kernel(
    "scale_shift.cu", "scale_shift_bwd_spans<T, WEIGHT, CUT>", T=FLOATING, WEIGHT=BOTH, CUT=BOTH
)
scale_shift_bwd_finish = Kernel("scale_shift.cu", "scale_shift_bwd_finish<T>", T=FLOATING)


@operator("cupyops::scale_shift")
def _scale_shift(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x * weight
    return y if bias is None else y + bias


@_scale_shift.forward
def _(x, weight, bias):
    factors = [factor.expand(x.shape) for factor in (weight, bias) if factor is not None]
    y = empty_output(x, *factors)
    _apply(y, x, *factors)
    return y, ()


@_scale_shift.backward
def _(saved, grad_y, x, weight, bias, needs_grad):
    grad_x = torch.empty_like(grad_y) if needs_grad.x else None
    grad_weight = _contiguous(weight, grad_y) if needs_grad.weight else None
    grad_bias = _contiguous(bias, grad_y) if needs_grad.bias else None
    if is_dry(grad_y) or grad_y.numel() == 0:
        return grad_x, grad_weight, grad_bias
    x = restride(x, grad_y.stride()) if needs_grad.weight else None
    of_weight = column_sums.pattern(grad_y.shape, grad_y.stride(), weight.shape)
    of_bias = column_sums.pattern(grad_y.shape, grad_y.stride(), bias.shape) if bias is not None else None
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
        _apply(grad_x, grad_y, weight.expand(grad_y.shape))
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
    shape = _shape(input, weight, bias)
    if (
        (input.dim() < len(shape) or input.shape != shape)
        and input.dtype == weight.dtype
        and (bias is None or input.dtype == bias.dtype)
    ):
        input = input.expand(shape)  # of other dtypes a number would count as an array in type promotion
    return _scale_shift(input, weight, bias)


def _shape(input: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[int, ...]:
    """That of the result, when all arguments have been checked."""
    check.tensor("input", input)
    check.tensor("weight", weight)
    check.optional_tensor("bias", bias)
    check.same_device(input=input, weight=weight, bias=bias)
    return broadcast_shape(input=input, weight=weight, bias=bias)


def _contiguous(factor: Tensor, grad_y: Tensor) -> Tensor:
    """A contiguous gradient for `factor`, zero where there is nothing to sum."""
    make = torch.zeros if grad_y.numel() == 0 else torch.empty
    return make(factor.shape, dtype=factor.dtype, device=factor.device)


def _apply(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """y = x * weight + bias, all of the shape of y."""
    template = {"T": y.dtype, "BIAS": bias is not None}
    factors = (weight,) if bias is None else (weight, bias)
    if (found := spread.plan(y, x, *factors, kept=3)) is not None:
        scale_shift_fwd[found.grid, BLOCK](x, weight, bias, y, found.spread, y.numel(), FORM=found.form, **template)
        return
    grid, layout, (x, weight, *rest) = arrange(y, x, *factors)
    bias = rest[0] if rest else None
    scale_shift_fwd_broadcast[grid, BLOCK](x, weight, bias, y, layout, y.numel(), **template)


def _sum_of_products(grad_y: Tensor, x: Tensor, weight: Tensor, pattern: column_sums.Pattern | None) -> Tensor:
    """grad_weight where there is nothing to sum, or where no kernel sums."""
    if pattern is not None:
        product = torch.empty_like(grad_y)
        _apply(product, grad_y, x)
        return product.contiguous().view(weight.shape)
    wide = torch.promote_types(grad_y.dtype, torch.float32)
    return (grad_y.to(wide) * x).sum_to_size(weight.shape).to(grad_y.dtype).contiguous()


def _reduce(
    grad_y: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    pattern: column_sums.Pattern,
    grad_x: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> None:
    """Fill those of the three gradients that are given. Two launches: partial sums, and their sums."""
    dtype = grad_y.dtype
    found = column_sums.plan(*pattern, 16 // grad_y.element_size())
    x = x if grad_weight is not None else None
    weight = weight.contiguous() if weight is not None and grad_x is not None else None
    grads = [grad for grad in (grad_weight, grad_bias) if grad is not None]
    template = {"T": dtype, "WEIGHT": x is not None}
    partial = None
    if found.columns or found.partial[0] > 1:
        wide = torch.promote_types(dtype, torch.float32)
        partial = grad_y.new_empty((1 + (x is not None), *found.partial), dtype=wide)
    given = (grad_y, x, weight, grad_x, partial)
    if found.columns:
        scale_shift_bwd_columns[found.grid, found.block](*given, found.size, **template)
    else:
        second = grads[1] if len(grads) > 1 else None
        scale_shift_bwd_spans[found.grid, found.block](*given, grads[0], second, found.size, CUT=found.cut, **template)
    if partial is not None:
        blocks, block = found.finish
        scale_shift_bwd_finish[(blocks, len(grads)), block](partial, grads[0], grads[-1], *found.left, T=dtype)
