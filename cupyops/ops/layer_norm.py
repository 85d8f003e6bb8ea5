"""layer_norm: normalise over the trailing dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import forward_ad

from .. import check
from ..common.rows import PACKS, grid, is_symbolic, share
from ..kernel import FLOATING, Kernel, ceil_div
from ..operator import operator

layer_norm_fwd = Kernel("layer_norm.cu", "layer_norm_fwd<T, K>", T=FLOATING, K=PACKS)
layer_norm_fwd_wide = Kernel("layer_norm.cu", "layer_norm_fwd_wide<T>", T=FLOATING)
layer_norm_bwd = Kernel(
    "layer_norm.cu", "layer_norm_bwd<T, K, PARAMETERS>", T=FLOATING, K=PACKS, PARAMETERS=(False, True)
)
layer_norm_bwd_wide = Kernel("layer_norm.cu", "layer_norm_bwd_wide<T>", T=FLOATING)
layer_norm_bwd_columns = Kernel("layer_norm.cu", "layer_norm_bwd_columns<T>", T=FLOATING)
layer_norm_bwd_sum = Kernel("layer_norm.cu", "layer_norm_bwd_sum<T>", T=FLOATING)

BACKWARD_THREADS = 512  # of a block, at most
WIDE_THREADS = 512  # of a block for a long row: two blocks run at once, one reads while the other reduces
WAVE = 132 * 512  # threads of backward that a large GPU runs at once: more would only make more parts to add
ROWS_EACH = 4  # that a block takes at least before there are parts for all of the wave


@operator("cupyops::layer_norm", autocast="fp32")
def _layer_norm(
    x: Tensor, normalized_shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    if weight is None and bias is not None:
        weight = torch.ones_like(bias)  # without it, PyTorch's double backward loses what depends on bias
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return _in_steps(x, normalized_shape, weight, bias, eps)
    return torch.nn.functional.layer_norm(x, normalized_shape, weight, bias, eps)


def _in_steps(x, normalized_shape, weight, bias, eps):
    """The same of elementary operations: PyTorch's forward mode over its backward of layer_norm is wrong in `weight`."""
    wide = x.double() if x.dtype is torch.float64 else x.float()
    dims = tuple(range(-len(normalized_shape), 0))
    centred = wide - wide.mean(dims, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return (y if bias is None else y + bias).to(x.dtype)


@_layer_norm.forward
def _(x, normalized_shape, weight, bias, eps):
    rows, size = _split(x, normalized_shape)
    x, weight, bias = _contiguous(x, weight, bias)
    y = torch.empty_like(x)
    mean, rstd = (x.new_empty(rows, dtype=_acc(x.dtype)) for _ in range(2))
    if is_symbolic(rows, size) or not y.numel():
        return y, (mean, rstd)
    division = share(size, x.element_size())
    args = (x, weight, bias, y, mean, rstd, rows, size, eps)
    if division.packs:
        layer_norm_fwd[grid(rows, division.rows), division.block](*args, T=x.dtype, K=division.packs)
    else:
        layer_norm_fwd_wide[grid(rows), WIDE_THREADS](*args, T=x.dtype)
    return y, (mean, rstd)


@_layer_norm.backward
def _(saved, grad_y, x, normalized_shape, weight, needs_grad):
    rows, size = _split(x, normalized_shape)
    x, weight = _contiguous(x, weight)
    grad_x = torch.empty_like(x) if needs_grad.x else None
    needed = (needs_grad.weight, needs_grad.bias)
    grad_weight, grad_bias = (x.new_empty(normalized_shape) if need else None for need in needed)
    if not is_symbolic(rows, size) and size:
        given = (grad_y, x, weight, *saved)
        division = share(size, x.element_size(), BACKWARD_THREADS, 256)
        launch = _launch_rows if division.packs else _launch_wide
        launch(division, given, grad_x, grad_weight, grad_bias, rows, size)
    return grad_x, grad_weight, grad_bias


def _launch_rows(division, given, grad_x, grad_weight, grad_bias, rows, size):
    """All gradients in one pass."""
    x = given[1]
    parameters = grad_weight is not None or grad_bias is not None
    blocks = grid(rows, division.rows)
    if parameters:
        blocks = _count(rows, division.rows * ROWS_EACH, WAVE // (division.threads * division.rows))
    parts, *each = _parts(blocks, size, grad_weight, grad_bias, x)
    launch = layer_norm_bwd[blocks, division.block]
    launch(*given, grad_x, *each, rows, size, T=x.dtype, K=division.packs, PARAMETERS=parameters)
    if parameters:
        _add(parts, grad_weight, grad_bias)


def _launch_wide(division, given, grad_x, grad_weight, grad_bias, rows, size):
    """grad_x and the gradients of the parameters apart."""
    grad_y, x, _, mean, rstd = given
    if grad_x is not None:
        layer_norm_bwd_wide[grid(rows), division.threads](*given, grad_x, rows, size, T=x.dtype)
    if grad_weight is not None or grad_bias is not None:
        tiles = ceil_div(size, BACKWARD_THREADS * 16 // x.element_size())
        count = _count(rows, ROWS_EACH, 2 * WAVE // (BACKWARD_THREADS * tiles))
        parts, *each = _parts(count, size, grad_weight, grad_bias, x)
        launch = layer_norm_bwd_columns[(tiles, count), BACKWARD_THREADS]
        launch(grad_y, x, mean, rstd, *each, rows, size, T=x.dtype)
        _add(parts, grad_weight, grad_bias)


def _count(rows: int, rows_each: int, most: int) -> int:
    """How many parts of grad_weight and grad_bias there are: one even for no rows, whose sum is 0."""
    return max(1, min(ceil_div(rows, rows_each), most))


def _parts(count, size, grad_weight, grad_bias, x):
    """Room for the parts, (1 or 2, count, size), then that for grad_weight and for grad_bias, None where not wanted."""
    wanted = [grad is not None for grad in (grad_weight, grad_bias)]
    parts = x.new_empty((sum(wanted), count, size), dtype=_acc(x.dtype))
    return parts, parts[0] if wanted[0] else None, parts[-1] if wanted[1] else None


def _add(parts, grad_weight, grad_bias):
    """grad_weight and grad_bias from their parts."""
    wanted, count, size = parts.shape
    block = (32, 32 if count > 32 else 8)
    launch = layer_norm_bwd_sum[(ceil_div(size, 32), wanted), block]
    launch(parts, grad_weight, grad_bias, count, size, T=(grad_bias if grad_weight is None else grad_weight).dtype)


@_layer_norm.interface
def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Layer normalisation over the trailing dimensions; as `torch.nn.functional.layer_norm` (arXiv:1607.06450).

    Args:
        input: shape `(*, *normalized_shape)`; fp16, bf16, fp32 or fp64.
        normalized_shape: the trailing dimensions that are normalised together, at least one.
        weight: factors of shape `normalized_shape`, or None for 1.
        bias: summands of shape `normalized_shape`, or None for 0.
        eps: added to the (biased) variance.

    Returns:
        Contiguous tensor of the shape and dtype of `input`.

    Raises:
        InputError: `input` is not a tensor of a floating-point dtype, its trailing dimensions are not `normalized_shape`,
            or `weight` or `bias` is not of that shape and of the dtype and device of `input`.

    Example:
        >>> cupyops.layer_norm(torch.tensor([[1.0, 2.0, 3.0]]), (3,))
        tensor([[-1.2247,  0.0000,  1.2247]])
    """
    _check_floating("input", input)
    shape = _check_shape(normalized_shape, input)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)):
        check.fail("eps", eps, "a number")
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None:
            _check_floating(name, parameter)
            if list(parameter.shape) != shape:
                check.fail(name, parameter, f"a tensor of shape {tuple(shape)}, normalized_shape")
            check.same_device(input=input, **{name: parameter})
    _check_dtypes(input, weight, bias)
    return _layer_norm(input, shape, weight, bias, float(eps))


def _check_floating(name: str, value: Tensor) -> None:
    check.tensor(name, value)
    if value.dtype not in FLOATING:
        check.fail(name, value, "a tensor of dtype float16, bfloat16, float32 or float64")


def _check_shape(normalized_shape: Sequence[int], input: Tensor) -> list[int]:
    if not isinstance(normalized_shape, (tuple, list)) or not normalized_shape:
        check.fail("normalized_shape", normalized_shape, "a sequence of at least one int")
    shape = check.ints("normalized_shape", normalized_shape, len(normalized_shape), 0)
    if list(input.shape[-len(shape) :]) != shape:
        check.fail("input", input, f"a tensor of shape (*, {', '.join(map(str, shape))}), as normalized_shape says")
    return shape


def _check_dtypes(input: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    """One dtype for all; or, as in PyTorch, what autocast will cast, and on a CPU float32 parameters for a half type."""
    if input.device.type != "cpu" and check.autocast(input.device):
        return
    given = {name: p for name, p in (("weight", weight), ("bias", bias)) if p is not None}
    if (
        input.device.type == "cpu"
        and input.dtype.itemsize == 2
        and all(p.dtype == torch.float32 for p in given.values())
    ):
        return
    check.same_dtype(input=input, **given)


def _split(x: Tensor, normalized_shape: Sequence[int]) -> tuple[int, int]:
    """(rows, elements of a row)."""
    return math.prod(x.shape[: x.dim() - len(normalized_shape)]), math.prod(normalized_shape)


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _acc(dtype: torch.dtype) -> torch.dtype:
    """What the kernels compute in: acc_t."""
    return torch.float64 if dtype == torch.float64 else torch.float32
