"""scale_shift: input * weight + bias, an affine map per channel, per feature or of one number."""

from __future__ import annotations

import torch
from torch import Tensor

from .._dispatch.core.forms import Forms
from .._dispatch.core.gpu import gpu
from .._dispatch.elementwise.broadcast import Strided, broadcast_shape, empty_output, fill
from .._dispatch.elementwise.broadcast_params import FORM, PerChannel, PerChannelUnaligned, PerColumn
from .._dispatch.elementwise.elementwise import UP_TO_FLOAT32
from .._dispatch.reduce.column import DEFINE, Channels, ChannelsUnaligned, Columns, Sums, pattern, sum_gradients
from .._kernel.kernel import FLOATING, Kernel
from .._operator.floating import operator
from .._util import arguments
from .._util.strides import is_dry, restride

VECTORS = 3  # of a thread whose columns have parameters of their own
DEFINES = {**DEFINE, "SCALE_SHIFT_VECTORS": VECTORS}
scale_shift_fwd_params = Kernel(
    "scale_shift.cu", "scale_shift_fwd_params<T, FORM>", define=DEFINES, T=UP_TO_FLOAT32, FORM=FORM
)
scale_shift_fwd_strided = Kernel("scale_shift.cu", "scale_shift_fwd_strided<T>", define=DEFINES, T=FLOATING)
scale_shift_bwd_columns = Kernel("scale_shift.cu", "scale_shift_bwd_columns<T>", define=DEFINES, T=UP_TO_FLOAT32)
scale_shift_bwd_channels = Kernel(
    "scale_shift.cu", "scale_shift_bwd_channels<T, UNALIGNED>", define=DEFINES, T=FLOATING, UNALIGNED=(False, True),
    where=lambda T, UNALIGNED: UNALIGNED or T is not torch.float64,
)  # fmt: skip

FORWARD = Forms(
    "scale_shift",
    "forward",
    [
        PerColumn(scale_shift_fwd_params, VECTORS),
        PerChannel(scale_shift_fwd_params),
        PerChannelUnaligned(scale_shift_fwd_params),
        Strided(scale_shift_fwd_strided, inputs=3),
    ],
)
BACKWARD = Forms(
    "scale_shift",
    "backward",
    [
        Columns(scale_shift_bwd_columns, sums=2),
        Channels(scale_shift_bwd_channels, sums=2),
        ChannelsUnaligned(scale_shift_bwd_channels, sums=2),
    ],
)


@operator("cupyops::scale_shift", sharding="..., ..., ... -> ...")
def _scale_shift(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    y = x * weight
    return y if bias is None else y + bias


@_scale_shift.forward
def forward(x, weight, bias):
    factors = [factor.expand(x.shape) for factor in (weight, bias) if factor is not None]
    y = empty_output(x, *factors)
    _apply(y, x, *factors)
    return y, ()


@_scale_shift.backward(reads={"x": ("weight",), "weight": ("x",), "bias": ()})
def backward(saved, grad_y, x, weight, bias, needs_grad):
    grad_x = torch.empty_like(grad_y) if needs_grad.x else None
    grad_weight = _contiguous(weight, grad_y) if needs_grad.weight else None
    grad_bias = _contiguous(bias, grad_y) if needs_grad.bias else None
    if is_dry(grad_y) or grad_y.numel() == 0:
        return grad_x, grad_weight, grad_bias
    x = restride(x, grad_y.stride()) if needs_grad.weight else None
    of_weight = pattern(grad_y.shape, grad_y.stride(), weight.shape)
    of_bias = pattern(grad_y.shape, grad_y.stride(), bias.shape) if bias is not None else None
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
def unsupported(x, weight, bias):
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
    """Check all arguments and return the shape of the result."""
    arguments.tensor("input", input)
    arguments.tensor("weight", weight)
    arguments.optional_tensor("bias", bias)
    arguments.same_device(input=input, weight=weight, bias=bias)
    return broadcast_shape(input=input, weight=weight, bias=bias)


def _contiguous(factor: Tensor, grad_y: Tensor) -> Tensor:
    """A contiguous gradient for `factor`, zero where there is nothing to sum."""
    make = torch.zeros if grad_y.numel() == 0 else torch.empty
    return make(factor.shape, dtype=factor.dtype, device=factor.device)


def _apply(y: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """y = x * weight + bias, all of the shape of y."""
    fill(FORWARD, y, (x, weight, bias))


def _sum_of_products(grad_y: Tensor, x: Tensor, weight: Tensor, of_weight: tuple[int, int, int] | None) -> Tensor:
    """grad_weight where there is nothing to sum, or where no kernel sums."""
    if of_weight is not None:
        product = torch.empty_like(grad_y)
        _apply(product, grad_y, x)
        return product.contiguous().view(weight.shape)
    wide = torch.promote_types(grad_y.dtype, torch.float32)
    return (grad_y.to(wide) * x).sum_to_size(weight.shape).to(grad_y.dtype).contiguous()


def _reduce(
    grad_y: Tensor,
    x: Tensor | None,
    weight: Tensor | None,
    summed: tuple[int, int, int],
    grad_x: Tensor | None,
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> None:
    """Fill those of the three gradients that are given, in one pass over what is `summed`."""
    launch = BACKWARD.launch(Sums(*summed, grad_y.element_size()), gpu(grad_y.device))
    x = x if grad_weight is not None else None
    weight = weight.contiguous() if weight is not None and grad_x is not None else None
    sum_gradients(launch, (grad_y, x, weight), grad_x, (grad_weight, grad_bias))
