"""conv2d_relu_max_pool2d: a layer of a small network, convolution to pooling, in one kernel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .._dispatch import convolution, shardings, small_conv
from .._dispatch.forms import Forms
from .._dispatch.gemm import HALF
from .._dispatch.gpu import gpu
from .._dispatch.small_conv import Fma, FmaWeight, Mma, MmaWeight
from .._kernel.kernel import FLOATING, Kernel
from .._operator.floating import operator
from .._util import arguments
from .._util.strides import is_dry


def _has(forward: bool) -> Any:
    """Return the test for instances by FMAs: 8 filters to a thread for 3 x 3 taps and, forward, for half types too."""

    def has(T: torch.dtype, K: int, NF: int) -> bool:
        return NF == 4 or (K == 3 and T is not torch.float64 and (forward or T is torch.float32))

    return has


FILE, MMA_FILE = "conv2d_relu_max_pool2d.cu", "conv2d_relu_max_pool2d_mma.cu"
FMA: dict[str, Any] = dict(define=small_conv.DEFINE, T=FLOATING, K=small_conv.TAPS)
MMA: dict[str, Any] = dict(define=small_conv.DEFINE, T=HALF, K=small_conv.TAPS)
NB: dict[str, Any] = dict(NB=(2, 4), where=lambda T, K, NB: NB == 2 or K == 3)
conv2d_relu_max_pool2d_fwd = Kernel(FILE, "conv2d_relu_max_pool2d_fwd<T, K, NF>", **FMA, NF=(4, 8), where=_has(True))
conv2d_relu_max_pool2d_bwd = Kernel(FILE, "conv2d_relu_max_pool2d_bwd<T, K, NF>", **FMA, NF=(4, 8), where=_has(False))
conv2d_relu_max_pool2d_bwd_weight = Kernel(FILE, "conv2d_relu_max_pool2d_bwd_weight<T, K>", **FMA)
conv2d_relu_max_pool2d_fwd_mma = Kernel(MMA_FILE, "conv2d_relu_max_pool2d_fwd_mma<T, K, NB>", **MMA, **NB)
conv2d_relu_max_pool2d_bwd_mma = Kernel(MMA_FILE, "conv2d_relu_max_pool2d_bwd_mma<T, K, NB>", **MMA, **NB)
conv2d_relu_max_pool2d_bwd_weight_mma = Kernel(MMA_FILE, "conv2d_relu_max_pool2d_bwd_weight_mma<T, K>", **MMA)

FORWARD, BACKWARD = (
    Forms("conv2d_relu_max_pool2d", direction, [Mma(mma, 4), Mma(mma, 2), Fma(fma, 8), Fma(fma, 4)])
    for direction, mma, fma in (
        ("forward", conv2d_relu_max_pool2d_fwd_mma, conv2d_relu_max_pool2d_fwd),
        ("backward", conv2d_relu_max_pool2d_bwd_mma, conv2d_relu_max_pool2d_bwd),
    )
)
BACKWARD_WEIGHT = Forms(
    "conv2d_relu_max_pool2d",
    "backward_weight",
    [MmaWeight(conv2d_relu_max_pool2d_bwd_weight_mma), FmaWeight(conv2d_relu_max_pool2d_bwd_weight, pooled=True)],
)


@operator("cupyops::conv2d_relu_max_pool2d", autocast="lower", sharding=shardings.conv2d_relu_max_pool2d)
def _conv2d_relu_max_pool2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    groups: int,
    pool: list[int],  # kernel size, then stride
) -> Tensor:
    return F.max_pool2d(F.relu(F.conv2d(x, weight, bias, stride, padding, dilation, groups)), pool[:2], pool[2:])


@_conv2d_relu_max_pool2d.forward
def forward(x, weight, bias, stride, padding, dilation, groups, pool):
    memory = convolution.memory_format(x, weight)
    x, weight = x.contiguous(), weight.contiguous()
    images, _, height, width = x.shape
    filters, _, taps, _ = weight.shape
    out = [(height + 2 * padding[0] - taps + 1) // 2, (width + 2 * padding[1] - taps + 1) // 2]
    y = x.new_empty((images, filters, *out))
    place = torch.empty_like(y, dtype=torch.uint8)
    if not is_dry(y) and y.numel():
        problem = small_conv.pooled(small_conv.Sizes(*x.shape, filters, *out, *padding), taps, x.dtype)
        bias = bias if bias is None else bias.contiguous()
        FORWARD.launch(problem, gpu(x.device))(x, weight, bias, y, place)
    return y.contiguous(memory_format=memory), (place,)


@_conv2d_relu_max_pool2d.backward
def backward(saved, grad_y, x, weight, bias, padding, needs_grad):
    memory = convolution.memory_format(x, weight)
    x, weight, grad_y = x.contiguous(), weight.contiguous(), grad_y.contiguous()
    grad_x = torch.empty_like(x) if needs_grad.x else None
    grad_weight = torch.empty_like(weight) if needs_grad.weight else None
    grad_bias = torch.empty_like(bias, memory_format=torch.contiguous_format) if needs_grad.bias else None
    if not is_dry(grad_y):
        sizes, taps = small_conv.Sizes(*x.shape, *grad_y.shape[1:], *padding), weight.shape[2]
        if grad_x is not None and grad_x.numel():
            problem = small_conv.pooled_input(sizes, taps, x.dtype)
            BACKWARD.launch(problem, gpu(x.device))(grad_y, saved[0], weight, grad_x)
        if grad_weight is not None or grad_bias is not None:
            launch = BACKWARD_WEIGHT.launch(small_conv.pooled(sizes, taps, x.dtype), gpu(x.device))
            small_conv.sum_partials(launch, (grad_y, saved[0], x), grad_weight, grad_bias)
    if memory is torch.channels_last:
        gradients = (grad_x, grad_weight)
        grad_x, grad_weight = (g if g is None else g.contiguous(memory_format=memory) for g in gradients)
    return grad_x, grad_weight, grad_bias


@_conv2d_relu_max_pool2d.unsupported
def unsupported(x, weight, bias, stride, padding, dilation, groups, pool):
    if pool != [2, 2, 2, 2]:
        return "not pooling by 2"
    return small_conv.unsupported(x, weight, stride, padding, dilation, groups)


@_conv2d_relu_max_pool2d.interface
def conv2d_relu_max_pool2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | tuple[int, int] = 1,
    padding: int | tuple[int, int] | str = 0,
    dilation: int | tuple[int, int] = 1,
    groups: int = 1,
    pool_kernel_size: int | tuple[int, int] = 2,
    pool_stride: int | tuple[int, int] | None = None,
) -> Tensor:
    """`max_pool2d(relu(conv2d(input, weight, bias)))` in one kernel, for layers that are small.

    The kernels serve 3 x 3 and 5 x 5 filters with stride 1, no dilation and one group, pooled by 2, of at most 64 channels
    in and out; all else is computed by PyTorch, operation by operation.

    Args:
        input: (n, channels, h, w) or (channels, h, w); fp16, bf16, fp32 and fp64 by kernels (summed in fp32, fp64 in fp64).
        weight: (out_channels, channels / groups, kernel_h, kernel_w), of the dtype of `input`.
        bias: (out_channels,), of the dtype of `input`.
        stride, padding, dilation, groups: of the convolution, as `conv2d`.
        pool_kernel_size: height and width of the window, int or a pair.
        pool_stride: from one window to the next; by default `pool_kernel_size`.

    Returns:
        Tensor (n, out_channels, h', w') or (out_channels, h', w'). A window with a NaN gives NaN; the gradient of equal
        maxima goes to the first.

    Raises:
        InputError: an argument is no tensor, or of a wrong shape, dtype, device or range; no window fits.

    Example:
        >>> x, weight = torch.arange(16.0).view(1, 1, 4, 4), torch.ones(1, 1, 3, 3)
        >>> cupyops.conv2d_relu_max_pool2d(x, weight, padding=1)
        tensor([[[[45., 54.],
                  [81., 90.]]]])
    """
    if isinstance(padding, str):  # which may pad the input by a row and a column
        convolution.check_tensors(input, weight, bias, groups)
        input, stride, padding, dilation = convolution.window(input, weight, stride, padding, dilation)
    geometry = _geometry(input, weight, bias, stride, padding, dilation, groups, pool_kernel_size, pool_stride)
    if input.dim() == 3:
        return _conv2d_relu_max_pool2d(input.unsqueeze(0), weight, bias, *geometry).squeeze(0)
    return _conv2d_relu_max_pool2d(input, weight, bias, *geometry)


def _geometry(input, weight, bias, stride, padding, dilation, groups, pool_kernel_size, pool_stride):
    """The operator's arguments after bias, checked."""
    stride, padding, dilation = convolution.geometry(input, weight, bias, stride, padding, dilation, groups)
    kernel = arguments.ints("pool_kernel_size", pool_kernel_size, 2, 1)
    pool = [*kernel, *(kernel if pool_stride is None else arguments.ints("pool_stride", pool_stride, 2, 1))]
    size = convolution.output_size(input.shape[-2:], weight.shape[2:], stride, padding, dilation)
    if any(extent < k for extent, k in zip(size, kernel)):
        arguments.fail("pool_kernel_size", pool_kernel_size, f"a window that fits the convolution's {tuple(size)}")
    return stride, padding, dilation, groups, pool
