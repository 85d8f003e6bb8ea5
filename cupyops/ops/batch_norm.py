"""batch_norm: normalise each channel over a batch."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .. import check
from ..common import clusters, segments
from ..common.segments import FINISHERS, accumulator, gradient_room, is_aligned, is_there, spatial
from ..errors import InputError
from ..kernel import FLOATING, Kernel, ceil_div
from ..layout import suggested_format
from ..operator import operator

FILE, COLUMNS_FILE = "batch_norm.cu", "batch_norm_columns.cu"
WHOLE = (False, True)

batch_norm_moments = Kernel(FILE, "batch_norm_moments<T, WHOLE>", T=FLOATING, WHOLE=WHOLE)
batch_norm_fwd = Kernel(FILE, "batch_norm_fwd<T, WHOLE>", T=FLOATING, WHOLE=WHOLE)
batch_norm_fwd_cluster = Kernel(FILE, "batch_norm_fwd_cluster<T, WHOLE>", T=FLOATING, WHOLE=WHOLE)
batch_norm_bwd_sums = Kernel(FILE, "batch_norm_bwd_sums<T, WHOLE>", T=FLOATING, WHOLE=WHOLE)
batch_norm_bwd = Kernel(FILE, "batch_norm_bwd<T, WHOLE>", T=FLOATING, WHOLE=WHOLE)
batch_norm_bwd_cluster = Kernel(FILE, "batch_norm_bwd_cluster<T, WHOLE>", T=FLOATING, WHOLE=WHOLE)
batch_norm_bwd_finish = Kernel(FILE, "batch_norm_bwd_finish<T>", T=FLOATING)
batch_norm_columns_moments = Kernel(COLUMNS_FILE, "batch_norm_columns_moments<T, WHOLE>", T=FLOATING, WHOLE=WHOLE)
batch_norm_columns_finish = Kernel(COLUMNS_FILE, "batch_norm_columns_finish<T>", T=FLOATING)
batch_norm_columns_fwd = Kernel(COLUMNS_FILE, "batch_norm_columns_fwd<T, WHOLE>", T=FLOATING, WHOLE=WHOLE)
batch_norm_columns_fwd_cluster = Kernel(
    COLUMNS_FILE, "batch_norm_columns_fwd_cluster<T, WHOLE>", T=FLOATING, WHOLE=WHOLE
)
batch_norm_columns_bwd_sums = Kernel(
    COLUMNS_FILE,
    "batch_norm_columns_bwd_sums<T, WHOLE, TRAINING>",
    T=FLOATING,
    WHOLE=WHOLE,
    TRAINING=(False, True),
)
batch_norm_columns_bwd = Kernel(COLUMNS_FILE, "batch_norm_columns_bwd<T, WHOLE>", T=FLOATING, WHOLE=WHOLE)
batch_norm_columns_bwd_few = Kernel(COLUMNS_FILE, "batch_norm_columns_bwd_few<T, WHOLE>", T=FLOATING, WHOLE=WHOLE)
batch_norm_columns_bwd_cluster = Kernel(
    COLUMNS_FILE, "batch_norm_columns_bwd_cluster<T, WHOLE>", T=FLOATING, WHOLE=WHOLE
)

INFERENCE_BLOCKS = {2: 1 << 12, 4: 1 << 14, 8: 1 << 14}  # by the size of an element: shorter than those that reduce
SMALL_PLANE = 256  # elements
FOLDED_ROWS = 128  # that are left at least, of several rows each: sums of fewer cost as much to combine as to make
FOLDED_SIZE = 64  # elements of such a row, at least: threads of fewer would sum a channel each for itself
FEW_PIXELS = 32  # of a plane, at least, whose sums the blocks of the second pass combine themselves: kWarp
FEW_PARTS = 2  # of the rows, at most: others would be read by too many blocks
PARAMETERS = ("weight", "bias", "running_mean", "running_var")


@operator("cupyops::batch_norm", updates=("running_mean", "running_var"), mixed=PARAMETERS)
def _batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> Tensor:
    return torch.nn.functional.batch_norm(x, running_mean, running_var, weight, bias, True, momentum, eps)


@_batch_norm.forward
def _(x, weight, bias, running_mean, running_var, momentum, eps):
    x = _dense(x)
    y = torch.empty_like(x)
    mean, rstd = (x.new_empty(x.shape[1], dtype=accumulator(x.dtype)) for _ in range(2))
    if not is_there(x):
        return y, (mean, rstd)
    weight, bias, changed_mean, changed_var = _contiguous(weight, bias, running_mean, running_var)
    kept = (mean, rstd, changed_mean, changed_var)
    options = (_is_wide(x, weight, bias, changed_mean, changed_var), momentum, eps)
    if matrix := _matrix(x):
        _forward_columns(x, weight, bias, y, kept, matrix, options)
    elif plan := _cluster(1, x, y):
        shared = plan.room * 16
        launch = batch_norm_fwd_cluster.configure(plan.grid, plan.block, shared=shared, cluster=_cluster_of(plan.parts))
        launch(x, weight, bias, y, *kept, plan.packed, plan.room, *options, T=x.dtype, WHOLE=plan.whole)
    else:
        plan = _runs(x, y)
        parts = x.new_empty(plan.grid * 3, dtype=mean.dtype)
        batch_norm_moments[plan.grid, plan.block](x, parts, plan.packed, T=x.dtype, WHOLE=plan.whole)
        launch = batch_norm_fwd[plan.grid, plan.block]
        launch(x, weight, bias, y, parts, *kept, plan.packed, *options, T=x.dtype, WHOLE=plan.whole)
    for given, changed in ((running_mean, changed_mean), (running_var, changed_var)):
        if changed is not given:
            given.copy_(changed)
    return y, (mean, rstd)


def _forward_columns(x, weight, bias, y, kept, matrix, options):
    (mean, rstd, *_), (wide, _, eps) = kept, options
    if plan := _column_cluster(matrix, x, y):
        launch = batch_norm_columns_fwd_cluster.configure(plan.grid, plan.block, cluster=_cluster_of(1, plan.parts))
        return launch(x, weight, bias, y, *kept, *matrix[:2], *options, T=x.dtype, WHOLE=plan.whole)
    matrix, plan = _columns(matrix, x, y)
    rows, size, channels, pixels = matrix
    parts = x.new_empty(plan.parts * size * 2, dtype=mean.dtype)
    batch_norm_columns_moments[plan.grid, plan.block](x, parts, rows, size, T=x.dtype, WHOLE=plan.whole)
    finish = batch_norm_columns_finish[ceil_div(channels, FINISHERS[0]), FINISHERS]
    finish(parts, *kept, rows, channels, pixels, matrix.folds, plan.parts, *options, T=x.dtype)
    _normalise_columns(x, weight, bias, y, (mean, rstd, None, None), matrix, wide, eps)


def _normalise_columns(x, weight, bias, y, statistics, matrix, wide, eps):
    matrix, plan = _columns(matrix, x, y)
    launch = batch_norm_columns_fwd[plan.grid, plan.block]
    launch(x, weight, bias, y, *statistics, *matrix, wide, eps, T=x.dtype, WHOLE=plan.whole)


@_batch_norm.backward
def _(saved, grad_y, x, weight, bias, eps, needs_grad):
    x = _dense(x)
    grad_x = torch.empty_like(x) if needs_grad.x else None
    grads = _like(needs_grad, weight, bias, x)
    if is_there(x):
        statistics = (*saved, None, None)
        wide = _is_wide(x, weight, bias)
        _backward(grad_y, x, *_contiguous(weight), statistics, grad_x, *grads, wide, eps, training=True)
    return grad_x, *grads


@_batch_norm.unsupported
def _(x, weight, bias, running_mean, running_var, momentum, eps):
    return _refusal(x)


@operator("cupyops::batch_norm_inference", mixed=PARAMETERS)
def _batch_norm_inference(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, running_mean: Tensor, running_var: Tensor, eps: float
) -> Tensor:
    running_mean, running_var = running_mean.detach(), running_var.detach()
    return torch.nn.functional.batch_norm(x, running_mean, running_var, weight, bias, False, 0.0, eps)


@_batch_norm_inference.forward
def _(x, weight, bias, running_mean, running_var, eps):
    x = _dense(x)
    y = torch.empty_like(x)
    if not is_there(x):
        return y, ()
    weight, bias, running_mean, running_var = _contiguous(weight, bias, running_mean, running_var)
    wide = _is_wide(x, running_mean)
    if matrix := _matrix(x):
        _normalise_columns(x, weight, bias, y, (None, None, running_mean, running_var), matrix, wide, eps)
    else:
        most = INFERENCE_BLOCKS[x.element_size()]
        plan = _runs(x, y, blocks=most, parts=most)
        args = (x, weight, bias, y, None, None, None, running_mean, running_var, plan.packed, wide, 0.0, eps)
        batch_norm_fwd[plan.grid, plan.block](*args, T=x.dtype, WHOLE=plan.whole)
    return y, ()


@_batch_norm_inference.backward
def _(saved, grad_y, x, weight, bias, running_mean, running_var, eps, needs_grad):
    x = _dense(x)
    grad_x = torch.empty_like(x) if needs_grad.x else None
    grads = _like(needs_grad, weight, bias, x)
    if is_there(x):
        weight, *running = _contiguous(weight, running_mean, running_var)
        statistics = (None, None, *running)
        _backward(grad_y, x, weight, statistics, grad_x, *grads, _is_wide(x, running_mean), eps, training=False)
    return grad_x, *grads


@_batch_norm_inference.unsupported
def _(x, weight, bias, running_mean, running_var, eps):
    return _refusal(x)


def _backward(grad_y, x, weight, statistics, grad_x, grad_weight, grad_bias, wide, eps, training):
    """Sums over each channel, then what follows from them; grad_x at once where they do not enter it."""
    if matrix := _matrix(x):
        return _backward_columns(
            grad_y, x, weight, statistics, grad_x, grad_weight, grad_bias, matrix, wide, eps, training
        )
    tensors = (x, grad_y) if grad_x is None else (x, grad_y, grad_x)
    results = (grad_x, grad_weight, grad_bias)
    if training and (plan := _cluster(2, *tensors)):
        shared = plan.room * 32
        launch = batch_norm_bwd_cluster.configure(plan.grid, plan.block, shared=shared, cluster=_cluster_of(plan.parts))
        return launch(
            grad_y, x, weight, *statistics[:2], *results, plan.packed, plan.room, wide, T=x.dtype, WHOLE=plan.whole
        )
    plan = _runs(*tensors)
    at_once, parts = _first_results(x, grad_x, grad_weight, grad_bias, training, plan.grid * 2)
    launch = batch_norm_bwd_sums[plan.grid, plan.block]
    launch(grad_y, x, weight, *statistics, at_once, parts, plan.packed, wide, eps, T=x.dtype, WHOLE=plan.whole)
    if training and grad_x is not None:
        launch = batch_norm_bwd[plan.grid, plan.block]
        launch(grad_y, x, weight, *statistics[:2], parts, *results, plan.packed, wide, T=x.dtype, WHOLE=plan.whole)
    elif parts is not None:
        steps = 2, 2 * plan.parts
        _finish(x, parts, (None, None, None, None), grad_weight, grad_bias, 1, plan.parts, steps, wide)


def _backward_columns(grad_y, x, weight, statistics, grad_x, grad_weight, grad_bias, matrix, wide, eps, training):
    tensors = (x, grad_y) if grad_x is None else (x, grad_y, grad_x)
    if training and (plan := _column_cluster(matrix, *tensors)):
        launch = batch_norm_columns_bwd_cluster.configure(plan.grid, plan.block, cluster=_cluster_of(1, plan.parts))
        given = (grad_y, x, weight, *statistics[:2], grad_x, grad_weight, grad_bias, *matrix[:2], wide)
        return launch(*given, T=x.dtype, WHOLE=plan.whole)
    matrix, plan = _columns(matrix, *tensors)
    at_once, parts = _first_results(x, grad_x, grad_weight, grad_bias, training, plan.parts * matrix.size * 2)
    launch = batch_norm_columns_bwd_sums[plan.grid, plan.block]
    given = (grad_y, x, weight, *statistics, at_once, parts, *matrix, wide, eps)
    launch(*given, T=x.dtype, WHOLE=plan.whole, TRAINING=training)
    if parts is None:
        return
    last = training and grad_x is not None
    _, _, channels, pixels = matrix
    count, steps = plan.parts * matrix.folds, (2 * channels * pixels, 2)
    if last and pixels >= FEW_PIXELS and count <= FEW_PARTS:
        launch = batch_norm_columns_bwd_few[plan.grid, plan.block]
        given = (grad_y, x, weight, *statistics[:2], parts, grad_x, grad_weight, grad_bias, *matrix, count, wide)
        return launch(*given, T=x.dtype, WHOLE=plan.whole)
    of = parts.new_empty(x.shape[1], 4) if last else None
    _finish(x, parts, (weight, *statistics[:2], of), grad_weight, grad_bias, pixels, count, steps, wide)
    if last:
        launch = batch_norm_columns_bwd[plan.grid, plan.block]
        launch(grad_y, x, of, grad_x, *matrix, T=x.dtype, WHOLE=plan.whole)


def _first_results(x, grad_x, grad_weight, grad_bias, training, parts):
    """What the first pass writes: grad_x where no sums enter it, and the parts of the sums where they are wanted."""
    summed = training or grad_weight is not None or grad_bias is not None
    return None if training else grad_x, x.new_empty(parts, dtype=accumulator(x.dtype)) if summed else None


def _finish(x, parts, given, grad_weight, grad_bias, pixels, count, steps, wide):
    channels = x.shape[1]
    sizes = (channels, x.numel() // channels, pixels, count)
    launch = batch_norm_bwd_finish[ceil_div(channels, FINISHERS[0]), FINISHERS]
    launch(parts, *given, grad_weight, grad_bias, *sizes, *steps, wide, T=x.dtype)


@_batch_norm.interface
def batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    """Batch normalisation of each channel; as `torch.nn.functional.batch_norm` (arXiv:1502.03167).

    Args:
        input: shape (n, channels, *); fp16, bf16, fp32 or fp64. Contiguous and channels_last are read as they are.
        running_mean, running_var: shape (channels,). In training they are updated in place, or None; else they are what is
            normalised by.
        weight: factors of shape (channels,), or None for 1.
        bias: summands of shape (channels,), or None for 0. These four are of the dtype of `input`, or all float32 beside a
            half type.
        training: normalise by the mean and (biased) variance of the batch.
        momentum: how far the running statistics move to the batch's mean and (unbiased) variance.
        eps: added to the variance.

    Returns:
        Tensor of the shape, dtype and memory format of `input`.

    Raises:
        InputError: an argument is no tensor, or of a wrong shape, dtype or device; not training and without running
            statistics; training on a single value per channel.

    Example:
        >>> x = torch.tensor([[1.0, 5.0], [3.0, 9.0]])
        >>> cupyops.batch_norm(x, None, None, training=True)
        tensor([[-1.0000, -1.0000],
                [ 1.0000,  1.0000]])
    """
    check.floating("input", input)
    if input.dim() == 1 and input.numel() == 0:  # no channels: PyTorch takes that too
        return torch.nn.functional.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    _check(input, weight, bias, running_mean, running_var, bool(training), momentum, eps)
    for name, value in (("running_mean", running_mean), ("running_var", running_var)):
        if value is not None and value.requires_grad:
            check.fail(name, value, "a tensor that requires no gradient")
    if training:
        return _batch_norm(input, weight, bias, running_mean, running_var, float(momentum), float(eps))
    return _batch_norm_inference(input, weight, bias, running_mean, running_var, float(eps))


def _check(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> None:
    if input.dim() < 2:
        check.fail("input", input, "shape (n, channels, *)")
    given = zip(PARAMETERS, (weight, bias, running_mean, running_var))
    _check_parameters(input, {name: value for name, value in given if value is not None})
    for name, number in (("momentum", momentum), ("eps", eps)):
        if isinstance(number, bool) or not isinstance(number, (int, float)):
            check.fail(name, number, "a number")
    if eps < 0 or (training and eps == 0):
        check.fail("eps", eps, "a number above 0" if training else "a number of at least 0")
    if training and input.numel() == input.shape[1]:
        check.fail("input", input, "more than 1 value per channel when training")
    for name, value in (("running_mean", running_mean), ("running_var", running_var)):
        if value is None and not training:
            check.fail(name, value, "a tensor, when not training")


def _check_parameters(input: Tensor, given: dict[str, Tensor]) -> None:
    wide = input.dtype.itemsize == 2 and all(value.dtype == torch.float32 for value in given.values())
    for name, value in given.items():
        check.floating(name, value)
        if value.dim() != 1 or value.shape[0] != input.shape[1]:
            check.fail(name, value, f"shape ({input.shape[1]},), the channels of input")
        check.same_device(input=input, **{name: value})
        if not wide and value.dtype != input.dtype:
            raise InputError(
                f"{name} is {value.dtype}, but input is {input.dtype}; beside a half type all of weight, bias, "
                "running_mean and running_var may be float32"
            )


# --- layouts -----------------------------------------------------------------------------------------------------


def _dense(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous(memory_format=suggested_format(x))


class _Matrix(NamedTuple):
    """A tensor as `rows` by `size` columns, of which column i is of channel i // pixels % channels."""

    rows: int
    size: int
    channels: int
    pixels: int

    @property
    def folds(self) -> int:
        """Rows of channels in a row."""
        return self.size // (self.channels * self.pixels)


def _matrix(x: Tensor) -> _Matrix | None:
    """Where the statistics are of columns: channels that lie side by side, and planes so small that a run of one is no
    whole line of the cache."""
    images, channels, pixels = x.shape[0], x.shape[1], spatial(x)
    if pixels == 1 or not x.is_contiguous():
        return _Matrix(images * pixels, channels, channels, 1)
    if pixels <= SMALL_PLANE and pixels * x.element_size() % 16 and images >= 16 and channels * pixels < 1 << 31:
        return _Matrix(images, channels * pixels, channels, pixels)
    return None


def _columns(matrix: _Matrix, x: Tensor, *others: Tensor) -> tuple[_Matrix, segments.Columns]:
    """With so many rows in one as are whole packs together, where there are rows enough."""
    rows, size, *columns = matrix
    aligned = _aligned(x, *others)
    folds = 16 // math.gcd(16, size * x.element_size())
    enough = rows >= folds * FOLDED_ROWS and size >= FOLDED_SIZE
    if aligned and enough and rows % folds == 0 and size * folds < 1 << 31:
        matrix = _Matrix(rows // folds, size * folds, *columns)
    return matrix, segments.columns(*matrix[:2], x.element_size(), aligned)


def _column_cluster(matrix: _Matrix, x: Tensor, *others: Tensor) -> segments.Columns | None:
    if matrix.pixels > 1:
        return None
    return segments.cluster_columns(*matrix[:2], x.element_size(), _aligned(x, *others), _most_blocks(x))


def _runs(x: Tensor, *others: Tensor, **most: int) -> segments.Runs:
    return segments.runs(x.shape[1], x.shape[0], spatial(x), x.element_size(), _aligned(x, *others), **most)


def _cluster(read: int, x: Tensor, *others: Tensor) -> segments.Runs | None:
    """Where the blocks of a cluster share a channel, of so many tensors that are read."""
    size = x.shape[1], x.shape[0], spatial(x), x.element_size()
    return segments.cluster(*size, _aligned(x, *others), read, _most_blocks(x))


def _aligned(*tensors: Tensor) -> bool:
    return all(map(is_aligned, tensors))


def _cluster_of(*blocks: int) -> tuple[int, ...] | None:
    return blocks if blocks[-1] > 1 else None


def _most_blocks(x: Tensor) -> int:
    """Of a cluster."""
    return segments.CLUSTER if clusters.exist(x.device) else 1


def _refusal(x: Tensor) -> str | None:
    pixels = spatial(x)
    if pixels > 1 and x.shape[0] * segments.packs_of(pixels, x.element_size(), False) >= segments.MOST_PACKS:
        return "2^31 packs of a channel"
    return None


def _is_wide(x: Tensor, *parameters: Tensor | None) -> bool:
    """Whether the parameters are float32 beside a half type."""
    return x.dtype.itemsize == 2 and any(p is not None and p.dtype == torch.float32 for p in parameters)


def _contiguous(*tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def _like(needs_grad, weight, bias, x):
    """Room for grad_weight and grad_bias, None where not wanted; 0 where there is nothing to sum."""
    pairs = (needs_grad.weight, weight), (needs_grad.bias, bias)
    return tuple(gradient_room(p, x) if need else None for need, p in pairs)
