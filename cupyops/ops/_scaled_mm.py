"""scaled_mm: the product of matrices of 8-bit floating-point numbers, times their scales."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from .._dispatch.core import library
from .._dispatch.core.gpu import gpu
from .._dispatch.core.rows import is_symbolic
from .._dispatch.gemm import scaled
from .._dispatch.gemm.scaled import E5M2, FLOAT8
from .._kernel.kernel import HALF
from .._operator.define import operator
from .._util import arguments, torch_private
from .._util.strides import is_dry
from ..errors import InputError

RESULTS = (*HALF, torch.float32, *FLOAT8)


@operator(
    "cupyops::scaled_mm",
    mixed=("scale_a", "scale_b", "bias", "scale_result"),
    dtypes=(*FLOAT8, *HALF, torch.float32),
    sharding="mK, Kn, *, *, *, * -> mn",
)
def _scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None,
    scale_result: Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> Tensor:
    by_row = _by_row(scale_a, scale_b)
    plain = not torch_private.functorch_active()
    if plain and a.is_cuda and not scaled.why_not_pytorch(a, b, by_row, bias, scale_result, out_dtype):
        return torch_private.scaled_mm(a, b, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum)
    with torch.autocast(a.device.type, enabled=False) if arguments.autocast(a.device) else nullcontext():
        y = torch.matmul(a.float(), b.float())
    y = y * scale_a * scale_b if by_row else y * (scale_a.reshape(()) * scale_b.reshape(()))
    return _rounded(y if bias is None else y + bias.float(), scale_result, out_dtype)


@_scaled_mm.forward
def forward(a, b, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum):
    y = a.new_empty((a.shape[0], b.shape[1]), dtype=scaled.sums_in(a.dtype, b.dtype, out_dtype))
    if not is_dry(y):
        scaled.multiply(a, b, scale_a, scale_b, bias, y, use_fast_accum)
    return _rounded(y, scale_result, out_dtype), ()


@_scaled_mm.unsupported
def unsupported(a, b, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum):
    if is_symbolic(*a.shape, *b.shape):
        return None
    by_row, card = _by_row(scale_a, scale_b), gpu(a.device)
    by_pytorch = scaled.why_not_pytorch(a, b, by_row, bias, scale_result, out_dtype)
    problem = scaled.problem_of(a, b, by_row, out_dtype, use_fast_accum, by_pytorch)
    if reason := scaled.TILES[-1].why_not(problem, card):
        return reason
    return library.faster(scaled.PRODUCT, problem, a.device) if a.is_cuda else None


def _by_row(scale_a: Tensor, scale_b: Tensor) -> bool:
    return scale_a.numel() > 1 or scale_b.numel() > 1


def _rounded(y: Tensor, scale_result: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Round to the dtype of the result; 8-bit numbers are scaled first and clamped to the largest."""
    if out_dtype not in FLOAT8:
        return y.to(out_dtype)
    if scale_result is not None:
        y = y * scale_result.reshape(())
    most = torch.finfo(out_dtype).max
    return y.clamp(-most, most).to(out_dtype)


def _by_pytorch(
    a: Any,
    b: Any,
    scale_a: Any,
    scale_b: Any,
    bias: Any = None,
    scale_result: Any = None,
    out_dtype: Any = None,
    use_fast_accum: bool = False,
) -> Any:
    return torch_private.scaled_mm(a, b, scale_a, scale_b, bias, scale_result, out_dtype, use_fast_accum)


@_scaled_mm.interface(twin=_by_pytorch)
def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    bias: Tensor | None = None,
    scale_result: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> Tensor:
    """Product of matrices of 8-bit floating-point numbers, times their scales; as `torch._scaled_mm`.

        y = scale_a * scale_b * (a @ b) + bias

    On a Hopper GPU the tensor cores keep some 13 bits of their sums. So the sums of each 128 of k are added in fp32, unless
    `use_fast_accum` asks for the speed of leaving that out. There is no derivative, as PyTorch has none.

    Args:
        a: (m, k), of float8_e4m3fn or float8_e5m2.
        b: (k, n), of float8_e4m3fn or float8_e5m2; not both are float8_e5m2. It is best stored by columns, as the transpose
            of an (n, k) weight is; kernels copy another.
        scale_a: what a number of `a` is to be multiplied by, in float32: of one element, or (m, 1) for each row.
        scale_b: the same of `b`: of one element, or (1, n) for each column. Both have one element, or both as many as
            there are rows and columns.
        bias: (n,), of float16, bfloat16 or float32.
        scale_result: of one element, float32: what the result is multiplied by, if it is of 8 bits.
        out_dtype: float16, bfloat16, float32, float8_e4m3fn or float8_e5m2; by default that of `a`. What is too large for 8
            bits becomes the largest number that there is.
        use_fast_accum: whether the tensor cores may sum up all of k.

    Returns:
        Tensor (m, n), contiguous.

    Raises:
        InputError: an argument is no tensor; shapes, dtypes or devices do not fit; a gradient is wanted.

    Example:
        >>> x, weight = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([[1.0, -1.0], [0.5, 0.25]])
        >>> a, b = x.to(torch.float8_e4m3fn), weight.to(torch.float8_e4m3fn)
        >>> cupyops.scaled_mm(a, b.T, torch.tensor(2.0), torch.tensor(0.5), out_dtype=torch.float32)
        tensor([[-1.0000,  1.0000],
                [-1.0000,  2.5000]])
    """
    given = dict(a=a, b=b, scale_a=scale_a, scale_b=scale_b, bias=bias, scale_result=scale_result)
    for name, value in given.items():
        (arguments.optional_tensor if name in ("bias", "scale_result") else arguments.tensor)(name, value)
    arguments.same_device(**given)
    _check_operands(a, b)
    _check_scales(a, b, scale_a, scale_b, scale_result)
    if bias is not None and (tuple(bias.shape) != (b.shape[1],) or bias.dtype not in (*HALF, torch.float32)):
        arguments.fail("bias", bias, f"shape ({b.shape[1]},) and float16, bfloat16 or float32")
    arguments.choice("out_dtype", out_dtype, (None, *RESULTS))
    arguments.choice("use_fast_accum", use_fast_accum, (False, True))
    if torch.is_grad_enabled() and (
        wants := [name for name, one in given.items() if one is not None and one.requires_grad]
    ):
        raise InputError(
            f"{wants[0]} requires a gradient, but scaled_mm has no derivative, as torch._scaled_mm has none; detach it, or "
            "call it under torch.no_grad()"
        )
    return _scaled_mm(a, b, scale_a, scale_b, bias, scale_result, out_dtype or a.dtype, use_fast_accum)


def _check_operands(a: Tensor, b: Tensor) -> None:
    for name, value in (("a", a), ("b", b)):
        if value.dim() != 2 or value.dtype not in FLOAT8:
            arguments.fail(name, value, "2 dimensions and float8_e4m3fn or float8_e5m2")
    if a.shape[1] != b.shape[0]:
        raise InputError(f"b has shape {tuple(b.shape)}, expected ({a.shape[1]}, n) to fit a of shape {tuple(a.shape)}")
    if a.dtype is b.dtype is E5M2:
        raise InputError("a and b are both float8_e5m2, expected float8_e4m3fn of one, as in PyTorch")


def _check_scales(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, scale_result: Tensor | None) -> None:
    m, n = a.shape[0], b.shape[1]
    single = scale_a.numel() == scale_b.numel() == 1
    for name, value, shape in (("scale_a", scale_a, (m, 1)), ("scale_b", scale_b, (1, n))):
        if value.dtype is not torch.float32 or not (single or tuple(value.shape) == shape):
            arguments.fail(name, value, f"float32, of one element as the other scale, or of shape {shape}")
    if scale_result is not None and (scale_result.numel() != 1 or scale_result.dtype is not torch.float32):
        arguments.fail("scale_result", scale_result, "float32 of one element")
