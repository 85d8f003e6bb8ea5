"""log_softmax: x - log sum exp(x) over one dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import check
from ..common.rows import PACKS, SoftmaxKernels, implicit_dim, launch_softmax
from ..kernel import FLOATING, Kernel
from ..operator import operator

BOTH = (False, True)

log_softmax_fwd = Kernel("log_softmax.cu", "log_softmax_fwd<T, WIDEN, K>", T=FLOATING, WIDEN=BOTH, K=PACKS)
log_softmax_fwd_wide = Kernel("log_softmax.cu", "log_softmax_fwd_wide<T, WIDEN>", T=FLOATING, WIDEN=BOTH)
log_softmax_fwd_columns = Kernel(
    "log_softmax.cu", "log_softmax_fwd_columns<T, WIDEN, VECTORS>", T=FLOATING, WIDEN=BOTH, VECTORS=BOTH
)
log_softmax_bwd = Kernel("log_softmax.cu", "log_softmax_bwd<T, WIDEN, K>", T=FLOATING, WIDEN=BOTH, K=PACKS)
log_softmax_bwd_wide = Kernel("log_softmax.cu", "log_softmax_bwd_wide<T, WIDEN>", T=FLOATING, WIDEN=BOTH)
log_softmax_bwd_columns = Kernel(
    "log_softmax.cu", "log_softmax_bwd_columns<T, WIDEN, VECTORS>", T=FLOATING, WIDEN=BOTH, VECTORS=BOTH
)

FORWARD = SoftmaxKernels(log_softmax_fwd, log_softmax_fwd_wide, log_softmax_fwd_columns)
BACKWARD = SoftmaxKernels(log_softmax_bwd, log_softmax_bwd_wide, log_softmax_bwd_columns)


@operator("cupyops::log_softmax", autocast="fp32")
def _log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None) -> Tensor:
    return torch.log_softmax(x, dim, dtype=dtype)


@_log_softmax.unsupported
def _(x, dim, dtype):
    if dtype in (None, x.dtype) or _widens(x.dtype, dtype):
        return None
    return f"no kernel from {x.dtype} to {dtype}"


@_log_softmax.forward
def _(x, dim, dtype):
    x = x.contiguous()
    y = torch.empty_like(x, dtype=dtype)
    widen = _widens(x.dtype, y.dtype)
    launch_softmax(FORWARD, dim, x, y, T=x.dtype, WIDEN=widen)
    return y, (x.new_empty(0),) if widen else ()  # the dtype of the gradient, since x itself is not kept


@_log_softmax.backward
def _(saved, grad_y, y, dim):
    grad_x = torch.empty_like(y, dtype=saved[0].dtype if saved else None)
    launch_softmax(BACKWARD, dim, grad_y, y, grad_x, T=grad_x.dtype, WIDEN=bool(saved))
    return grad_x


@_log_softmax.reference_backward
def _(saved, grad_y, y, dim):
    grad_x = torch.ops.aten._log_softmax_backward_data(grad_y, y, dim, y.dtype)
    return grad_x.to(saved[0].dtype) if saved else grad_x


@_log_softmax.interface
def log_softmax(input: Tensor, dim: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Logarithm of the softmax, x - log(sum(exp(x))) over one dimension; as `torch.nn.functional.log_softmax`.

    Args:
        input: any shape; fp16, bf16, fp32 or fp64, or any real dtype if `dtype` is given.
        dim: the dimension that is summed over. Left out, it is 0 for 0, 1 and 3 dimensions, else 1, with PyTorch's warning.
        dtype: a floating-point dtype that `input` is cast to first. From a half type to fp32, the kernel casts.

    Returns:
        Contiguous tensor of the shape of `input`, of `dtype` or the dtype of `input`. A row with NaN or +inf in it, or of
        -inf alone, is NaN.

    Raises:
        InputError: `input` is not a tensor of a floating-point dtype (nor is `dtype` given), `dim` is not a dimension of
            it, or `dtype` is not a floating-point dtype.

    Example:
        >>> cupyops.log_softmax(torch.tensor([1.0, 2.0, 3.0]), dim=0)
        tensor([-2.4076, -1.4076, -0.4076])
    """
    check.tensor("input", input)
    check.choice("dtype", dtype, (None, *FLOATING))
    if dtype is None and input.dtype not in FLOATING:
        check.fail("input", input, "a tensor of dtype float16, bfloat16, float32 or float64, or a dtype to cast it to")
    if dtype is not None and input.is_complex():
        check.fail("input", input, "a tensor of a real dtype")
    dim = check.dim("dim", implicit_dim("log_softmax", input.dim(), stacklevel=3) if dim is None else dim, input.dim())
    if dtype is not None and not _widens(input.dtype, dtype):
        input = input.to(dtype)
    return _log_softmax(input, dim, dtype)


def _widens(dtype: torch.dtype, to: torch.dtype | None) -> bool:
    """Whether the kernels cast: from a half type to float32."""
    return to is torch.float32 and dtype in (torch.float16, torch.bfloat16)
