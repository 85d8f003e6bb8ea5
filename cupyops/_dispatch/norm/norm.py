"""layer_norm, rms_norm and add_rms_norm: their launches, by the forms of forward.py and backward.py."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from ..._kernel.kernel import ceil_div
from ..._util.strides import aligned, is_dry
from ..core.forms import Launch
from ..core.gpu import gpu
from ..core.images import accumulator
from ..core.rows import is_symbolic
from .backward import BACKWARD, PARTIALS, bwd_finalize, bwd_two_pass, partials_of
from .forms import ADD_RMS_NORM as ADD_RMS_NORM
from .forms import LAYER_NORM as LAYER_NORM
from .forms import RMS_NORM as RMS_NORM
from .forms import SHIFT_THREADS, WARP, Operator, Problem, padded
from .forward import FORWARD, fwd_shift


class Rows(NamedTuple):
    """The tensors of forward in the kernels' order, all contiguous; None where there is none."""

    x: Tensor
    residual: Tensor | None = None
    weight: Tensor | None = None
    bias: Tensor | None = None
    summed: Tensor | None = None
    y: Tensor | None = None
    mean: Tensor | None = None
    rstd: Tensor | None = None


def forward(operator: Operator, tensors: Rows, rows: int, size: int, eps: float) -> None:
    """Compute y and the other outputs among `tensors`."""
    x = tensors.x
    if is_symbolic(rows, size) or is_dry(x) or not x.numel():
        return
    parameters = tensors.weight, tensors.bias
    problem = _problem(operator, rows, size, x, tensors, any(p is not None for p in parameters))
    launch = FORWARD.launch(problem, gpu(x.device))
    if launch.overlap:
        weight, bias = _shifted(*parameters)
        tensors = tensors._replace(weight=weight, bias=bias)
    launch(*tensors, rows, size, eps, T=x.dtype)


def _problem(operator: Operator, rows: int, size: int, x: Tensor, read: Any, parameters: bool) -> Problem:
    itemsize = x.element_size()
    fits = size * itemsize % 16 == 0 and all(tensor is None or aligned(tensor) for tensor in read)
    return Problem(operator, rows, size, itemsize, fits, parameters)


def _shifted(*parameters: Tensor | None) -> list[Tensor | None]:
    """The parameters laid out for unaligned rows: see shift_parameter()."""
    given = [parameter for parameter in parameters if parameter is not None]
    width, size = 16 // given[0].element_size(), given[0].numel()
    vectors = ceil_div(size, width)
    shifted = [parameter.new_empty(width * vectors * width) for parameter in given]
    none = [None] * (len(parameters) - len(given))
    launch = fwd_shift[(ceil_div(vectors, SHIFT_THREADS), width, len(given)), SHIFT_THREADS]
    launch(*given, *none, *shifted, *none, size, T=given[0].dtype)
    places = iter(shifted)
    return [None if parameter is None else next(places) for parameter in parameters]


class Gradients(NamedTuple):
    """The tensors of backward in the kernels' order, all contiguous; None where there is none."""

    grad_y: Tensor
    x: Tensor
    weight: Tensor | None
    grad_summed: Tensor | None = None
    mean: Tensor | None = None
    rstd: Tensor | None = None
    grad_x: Tensor | None = None
    grad_weight: Tensor | None = None
    grad_bias: Tensor | None = None


def backward(operator: Operator, tensors: Gradients, rows: int, size: int) -> None:
    """All gradients that are wanted."""
    x, wanted = tensors.x, _wanted(tensors)
    if is_symbolic(rows, size) or is_dry(x):
        return
    # without rows the parameters still have gradients, which are zeros
    if not size or not (wanted or (tensors.grad_x is not None and rows)):
        return
    problem, card = _problem(operator, rows, size, x, tensors[:4], wanted > 0), gpu(x.device)
    launch = BACKWARD.launch(problem, card)
    if launch.kernel is not bwd_two_pass:
        _in_one_pass(launch, tensors, rows, size)
        return
    if tensors.grad_x is not None:
        launch(*tensors[:7], rows, size, T=x.dtype)
    if wanted:
        launch = PARTIALS.launch(problem, card)
        partials, each = _partials(partials_of(launch), size, tensors)
        launch(tensors.grad_y, x, tensors.mean, tensors.rstd, *each, rows, size, T=x.dtype)
        if partials is not None:
            _finalize(partials, tensors)


def _in_one_pass(launch: Launch, tensors: Gradients, rows: int, size: int) -> None:
    """Compute all gradients by one launch, and from the partials that it leaves."""
    partials, each = _partials(partials_of(launch), size, tensors)
    launch(*tensors[:7], *each, rows, size, T=tensors.x.dtype)
    if partials is not None:
        _finalize(partials, tensors)


def _wanted(tensors: Gradients) -> int:
    """Number of parameters whose gradient is wanted."""
    return sum(grad is not None for grad in (tensors.grad_weight, tensors.grad_bias))


def _partials(count: int, size: int, tensors: Gradients) -> tuple[Tensor | None, list[Tensor | None]]:
    """An array for the partials, (parameters wanted, count, pitch_of(size)), then that of each parameter, None where no
    gradient is wanted. Of one row, laid out as a gradient is, they are the gradients, and there is no array."""
    dtype, grads = accumulator(tensors.x.dtype), [tensors.grad_weight, tensors.grad_bias]
    pitch = padded(size * dtype.itemsize) // dtype.itemsize
    of_one_row = count == 1 and pitch == size and all(grad is None or grad.dtype is dtype for grad in grads)
    if not _wanted(tensors) or of_one_row:
        return None, grads
    partials = tensors.x.new_empty((_wanted(tensors), count, pitch), dtype=dtype)
    places = iter(partials.unbind())
    return partials, [None if grad is None else next(places) for grad in grads]


def _finalize(partials: Tensor, tensors: Gradients) -> None:
    """The parameters' gradients from their partials."""
    grads = tensors.grad_weight, tensors.grad_bias
    wanted, count = partials.shape[:2]
    across = WARP * partials.element_size() // 16  # threads for WARP columns
    down = 1 << max(3, (count // 4).bit_length() - 1)  # four rows of partials or more for a thread
    one = next(grad for grad in grads if grad is not None)
    grid, block = (ceil_div(one.numel(), WARP), wanted), (across, min(down, 1024 // across))
    Launch(bwd_finalize, grid, block, overlap=True)(partials, *grads, count, one.numel(), T=one.dtype)
