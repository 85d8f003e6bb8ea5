"""bias_gelu: gelu(input + bias), what follows a linear layer whose bias was left out."""

from __future__ import annotations

import torch
from torch import Tensor

from .._dispatch.core.forms import Forms
from .._dispatch.core.gpu import gpu
from .._dispatch.elementwise.broadcast import Strided, empty_output, fill
from .._dispatch.elementwise.broadcast_params import FORM, PerColumn
from .._dispatch.elementwise.elementwise import UP_TO_FLOAT32
from .._dispatch.reduce.column import DEFINE, Columns, Sums, sum_gradients
from .._kernel.kernel import FLOATING, Kernel
from .._operator.floating import operator
from .._util import arguments
from .._util.strides import is_dry

bias_gelu_fwd_params = Kernel(
    "bias_gelu.cu", "bias_gelu_fwd_params<T, FORM>", define=DEFINE, T=UP_TO_FLOAT32, FORM=FORM[:1]
)
bias_gelu_fwd_strided = Kernel("bias_gelu.cu", "bias_gelu_fwd_strided<T>", define=DEFINE, T=FLOATING)
bias_gelu_bwd_columns = Kernel("bias_gelu.cu", "bias_gelu_bwd_columns<T>", define=DEFINE, T=FLOATING)

FORWARD = Forms("bias_gelu", "forward", [PerColumn(bias_gelu_fwd_params, 4), Strided(bias_gelu_fwd_strided)])
BACKWARD = Forms("bias_gelu", "backward", [Columns(bias_gelu_bwd_columns, sums=1)])


@operator("cupyops::bias_gelu", sharding="..., ... -> ...")
def _bias_gelu(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    return torch.nn.functional.gelu(x + bias, approximate=approximate)


@_bias_gelu.forward
def forward(x, bias, approximate):
    bias = bias.expand(x.shape)
    y = empty_output(x, bias)
    fill(FORWARD, y, (x, bias), approximate == "tanh")
    return y, ()


@_bias_gelu.backward
def backward(saved, grad_y, x, bias, approximate, needs_grad):
    grad_y, x = grad_y.contiguous(), x.contiguous()
    grad_x = torch.empty_like(grad_y) if needs_grad.x else None
    if is_dry(grad_y) or grad_y.numel() == 0:
        return grad_x, torch.zeros_like(bias) if needs_grad.bias else None
    columns = grad_y.shape[-1]
    launch = BACKWARD.launch(Sums(grad_y.numel() // columns, columns, 1, grad_y.itemsize), gpu(grad_y.device))
    grad_bias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device) if needs_grad.bias else None
    inputs = grad_y, x, bias.contiguous()
    sum_gradients(launch, inputs, grad_x, (grad_bias,), approximate == "tanh")
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
    arguments.floating("input", input)
    arguments.floating("bias", bias)
    arguments.choice("approximate", approximate, ("none", "tanh"))
    if input.dim() == 0:
        arguments.fail("input", input, "(..., features)")
    if bias.shape != input.shape[-1:]:
        arguments.fail("bias", bias, f"shape ({input.shape[-1]},), the last dimension of input")
    arguments.same_device(input=input, bias=bias)
    arguments.same_dtype(input=input, bias=bias)
