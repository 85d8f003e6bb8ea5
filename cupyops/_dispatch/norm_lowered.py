"""layer_norm and rms_norm of fp32 with a result of a half type, also of a sum: the form `block`, by kernels of their own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .._kernel.kernel import FLOATING, Kernel
from .._util.strides import aligned, is_dry
from .forms import Launch
from .gpu import gpu
from .norm import ADD_LAYER_NORM, ADD_RMS_NORM, LAYER_NORM, Gradients, Rows, in_one_pass, nothing_wanted
from .norm_backward import BLOCK as BACKWARD
from .norm_forms import BOTH, DEFINE, Operator, Problem
from .norm_forward import BLOCK as FORWARD
from .rows import is_symbolic

HALF = tuple(dtype for dtype in FLOATING if dtype.itemsize == 2)
LOWERED = (torch.float32,)  # what is normalised
_ITEMSIZE = 4
_WIDTH = 16 // _ITEMSIZE

lowered_fwd = Kernel("norm_lowered.cu", "norm_lowered_fwd<O, CENTRED>", define=DEFINE, O=HALF, CENTRED=BOTH)
lowered_bwd = Kernel("norm_lowered.cu", "norm_lowered_bwd<O, CENTRED>", define=DEFINE, O=HALF, CENTRED=BOTH)

add_fwd = Kernel("norm_lowered.cu", "norm_lowered_add_fwd<O, CENTRED>", define=DEFINE, O=HALF, CENTRED=BOTH)
add_bwd = Kernel("norm_lowered.cu", "norm_lowered_add_bwd<O, CENTRED>", define=DEFINE, O=HALF, CENTRED=BOTH)


def unserved(operator: Operator, rows: int, size: int, x: Tensor, dtype: torch.dtype) -> str | None:
    """Return why the kernels do not normalise such rows, or None: they take whole vectors, and hold a row in a block."""
    if dtype not in HALF:
        return f"the result is to be {dtype}, which is no half type"
    if is_symbolic(rows, size) or not rows * size:
        return None
    if size % _WIDTH:
        return f"rows of {size} elements are no whole vectors of {_WIDTH}"
    problem, card = _problem(operator, rows, size, True), gpu(x.device)
    return FORWARD.why_not(problem, card) or BACKWARD.why_not(problem, card)


def at_boundaries(*tensors: Tensor | None) -> list[Any]:
    """Each as a flat array from a 16-byte boundary on; None stays."""
    flat = [None if tensor is None else tensor.contiguous() for tensor in tensors]
    return [one if one is None or aligned(one) else one.clone() for one in flat]


def forward(operator: Operator, tensors: Rows, rows: int, size: int, eps: float) -> None:
    """y, mean and rstd of `tensors`, which begin at 16-byte boundaries."""
    x, y = tensors.x, tensors.y
    if is_symbolic(rows, size) or is_dry(x) or not x.numel():
        return
    assert y is not None
    problem = _problem(operator, rows, size, tensors.weight is not None or tensors.bias is not None)
    launch = _lowered(FORWARD.launch(problem, gpu(x.device)), lowered_fwd, operator)
    launch(*tensors, rows, size, eps, *launch.extra.values(), O=y.dtype)


def backward(operator: Operator, tensors: Gradients, rows: int, size: int) -> None:
    """All gradients that are wanted; grad_y is of a half type."""
    x, wanted = tensors.x, tensors.grad_weight is not None or tensors.grad_bias is not None
    if is_symbolic(rows, size) or is_dry(x) or nothing_wanted(tensors, rows, size):
        return
    problem = _problem(operator, rows, size, wanted)
    launch = _lowered(BACKWARD.launch(problem, gpu(x.device)), lowered_bwd, operator)
    in_one_pass(launch, tensors, rows, size, O=tensors.grad_y.dtype)


def add_unserved(centred: bool, rows: int, size: int, residual: Tensor, dtype: torch.dtype) -> str | None:
    """Return why the kernels do not normalise such sums, or None; `dtype` is that of the addend and of the result."""
    if residual.dtype is not torch.float32:
        return f"residual is {residual.dtype}, expected torch.float32"
    if reason := unserved(LAYER_NORM, rows, size, residual, dtype):
        return reason
    if is_symbolic(rows, size) or not rows * size:
        return None
    return BACKWARD.why_not(_problem(_sum(centred), rows, size, True), gpu(residual.device))


def add_forward(centred: bool, tensors: Rows, rows: int, size: int, eps: float) -> None:
    """Run forward for a sum; `x` of `tensors` is the addend of float32, `residual` that of a half type."""
    x, y = tensors.x, tensors.y
    if is_symbolic(rows, size) or is_dry(x) or not x.numel():
        return
    assert y is not None
    # rows are in registers, as those of layer_norm are
    launch = FORWARD.launch(_problem(LAYER_NORM, rows, size, True), gpu(x.device))
    launch = replace(launch, kernel=add_fwd, template={"CENTRED": centred})
    launch(*tensors, rows, size, eps, O=y.dtype)


def add_backward(centred: bool, tensors: Gradients, grad_x: Tensor | None, rows: int, size: int) -> None:
    """Run backward for a sum; `grad_x`: where the gradient of a half type goes beside that of float32."""
    x, wanted = tensors.x, tensors.grad_weight is not None or tensors.grad_bias is not None
    if is_symbolic(rows, size) or is_dry(x) or nothing_wanted(tensors, rows, size):
        return
    launch = BACKWARD.launch(_problem(_sum(centred), rows, size, wanted), gpu(x.device))
    launch = replace(launch, kernel=add_bwd, template={"CENTRED": centred})
    in_one_pass(launch, tensors, rows, size, (grad_x,), O=tensors.grad_y.dtype)


def _sum(centred: bool) -> Operator:
    return ADD_LAYER_NORM if centred else ADD_RMS_NORM


def _lowered(launch: Launch, kernel: Kernel, operator: Operator) -> Launch:
    return replace(launch, kernel=kernel, template={"CENTRED": operator.centred})


def _problem(operator: Operator, rows: int, size: int, parameters: bool) -> Problem:
    return Problem(operator, rows, size, _ITEMSIZE, True, parameters)


def of_autocast(x: Tensor) -> torch.dtype | None:
    """The half type to which autocast lowers the operands of products on the device of `x`; None while it is off."""
    kind = x.device.type
    if kind not in ("cuda", "cpu") or not torch.is_autocast_enabled(kind):
        return None
    dtype = torch.get_autocast_dtype(kind)
    return dtype if dtype in HALF else None
