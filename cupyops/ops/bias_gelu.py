"""bias_gelu: gelu(input + bias), what follows a linear layer whose bias was left out."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import check
from ..common import column_sums, spread
from ..common.broadcast import BLOCK, arrange, empty_output
from ..kernel import FLOATING, Kernel
from ..layout import is_dry
from ..operator import operator

BOTH = (False, True)
bias_gelu_fwd = Kernel("bias_gelu.cu", "bias_gelu_fwd<T, TANH, FORM>", T=FLOATING, TANH=BOTH, FORM=spread.FORMS)
bias_gelu_fwd_broadcast = Kernel("bias_gelu.cu", "bias_gelu_fwd_broadcast<T, TANH>", T=FLOATING, TANH=BOTH)
bias_gelu_bwd = Kernel("bias_gelu.cu", "bias_gelu_bwd<T, TANH>", T=FLOATING, TANH=BOTH)
bias_gelu_bwd_finish = Kernel("bias_gelu.cu", "bias_gelu_bwd_finish<T>", T=FLOATING)


@operator("cupyops::bias_gelu")
def _bias_gelu(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    return torch.nn.functional.gelu(x + bias, approximate=approximate)


@_bias_gelu.forward
def _(x, bias, approximate):
    bias = bias.expand(x.shape)
    y = empty_output(x, bias)
    template = {"T": y.dtype, "TANH": approximate == "tanh"}
    if (found := spread.plan(y, x, bias, kept=4)) is not None:
        bias_gelu_fwd[found.grid, BLOCK](x, bias, y, found.spread, y.numel(), FORM=found.form, **template)
    else:
        grid, layout, (x, bias) = arrange(y, x, bias)
        bias_gelu_fwd_broadcast[grid, BLOCK](x, bias, y, layout, y.numel(), **template)
    return y, ()


@_bias_gelu.backward
def _(saved, grad_y, x, bias, approximate, needs_grad):
    grad_y, x = grad_y.contiguous(), x.contiguous()
    grad_x = torch.empty_like(grad_y) if needs_grad.x else None
    if is_dry(grad_y) or grad_y.numel() == 0:
        return grad_x, torch.zeros_like(bias) if needs_grad.bias else None
    dtype, bias, columns = grad_y.dtype, bias.contiguous(), grad_y.shape[-1]
    found = column_sums.plan(grad_y.numel() // columns, columns, 1, 16 // grad_y.itemsize)
    partial = grad_bias = None
    if needs_grad.bias:
        partial = grad_y.new_empty(found.partial, dtype=torch.promote_types(dtype, torch.float32))
        grad_bias = torch.empty_like(bias)
    template = {"T": dtype, "TANH": approximate == "tanh"}
    bias_gelu_bwd[found.grid, found.block](grad_y, x, bias, grad_x, partial, found.size, **template)
    if grad_bias is not None:
        bias_gelu_bwd_finish[found.finish](partial, grad_bias, *found.left[:2], T=dtype)
    return grad_x, grad_bias


@_bias_gelu.interface
def bias_gelu(input: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """gelu(input + bias) in one pass and with one rounding; backward gives both gradients in one pass over the input.

    Args:
        input: (..., features), any floating-point dtype; kernels serve fp16, bf16, fp32 and fp64.
        bias: (features,), of the dtype of `input`. Its gradient is summed in a fixed order.
        approximate: `"none"` or `"tanh"`, as in `cupyops.gelu`.

    Returns:
        Tensor of the shape and dtype of `input`.

    Raises:
        InputError: an argument is neither a tensor nor an array, or not of a floating-point dtype; `bias` is not of the
            last dimension of `input`, or of another dtype or device; `approximate` is neither of the two.

    Example:
        >>> cupyops.bias_gelu(torch.tensor([[-2.0, 1.0]]), torch.tensor([1.0, 1.0]))
        tensor([[-0.1587,  1.9545]])
    """
    _check(input, bias, approximate)
    return _bias_gelu(input, bias, approximate)


def _check(input: Tensor, bias: Tensor, approximate: str) -> None:
    check.floating("input", input)
    check.floating("bias", bias)
    check.choice("approximate", approximate, ("none", "tanh"))
    if input.dim() == 0:
        check.fail("input", input, "(..., features)")
    if bias.shape != input.shape[-1:]:
        check.fail("bias", bias, f"shape ({input.shape[-1]},), the last dimension of input")
    check.same_device(input=input, bias=bias)
    check.same_dtype(input=input, bias=bias)
