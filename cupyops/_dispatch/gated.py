"""Gated activations, f(gate) * up: what swiglu and geglu share. See cuda_src/gated.cu."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from .._kernel.kernel import FLOATING, Kernel, ceil_div
from .._util import arguments
from .._util.strides import is_dry, restride
from .core.forms import Form, Forms, Launch
from .core.gpu import Gpu, gpu
from .core.rows import SMALL_ROWS
from .elementwise.activations import FUNCTIONS
from .elementwise.broadcast import empty_output
from .elementwise.elementwise import UP_TO_FLOAT32, why_not_size
from .elementwise.strided_rows import BLOCK, row_stride, spans

AT_ONCE = 8  # rows of a thread whose loads are under way, by way of shared memory
EACH = {2: 16, 4: 8}  # rows of a thread there, by the size of an element: whole vectors, and whole AT_ONCE
MOST_COLS = 128  # of packed rows of which a block takes several
DEFINE = {"GATED_ROWS_AT_ONCE": AT_ONCE}


class Gated(NamedTuple):
    """A result, or its gradient, of [rows x cols], with elements."""

    rows: int
    cols: int
    itemsize: int
    gate_stride: int  # from one row to the next
    up_stride: int
    packed: bool  # whether gate and up are the halves of one tensor's rows


class SharedMemory(Form[Gated]):
    """Packed rows of a few columns, which begin within vectors."""

    name = "shared_memory"
    summary = "a block copies its rows to shared memory; a thread owns a column of every few of them"

    def why_not(self, problem: Gated, gpu: Gpu) -> str | None:
        if not problem.packed:
            return "gate and up are no halves of one contiguous tensor"
        if problem.cols > SMALL_ROWS:
            return f"a row has more than {SMALL_ROWS} columns"
        return why_not_size(self.kernel, problem.itemsize)

    def why_slower(self, problem: Gated, gpu: Gpu) -> str | None:
        if problem.cols > MOST_COLS:
            return f"a row has more than {MOST_COLS} columns"
        return None if problem.cols * problem.itemsize % 16 else "halves are whole vectors"

    def launch(self, problem: Gated, gpu: Gpu) -> Launch:
        at_once = SMALL_ROWS // problem.cols
        each = EACH[problem.itemsize] * at_once
        packed = np.frombuffer(struct.pack("=q4i", problem.rows, problem.cols, each, at_once, 0), np.uint8)
        shared = 3 * each * problem.cols * problem.itemsize
        return Launch(self.kernel, ceil_div(problem.rows, each), SMALL_ROWS, shared, named={"rows": packed})


class StridedRows(Form[Gated]):
    """Rows that are apart by strides; tensors that are laid out alike are one row."""

    name = "strided_rows"
    summary = "a thread owns a vector of the output, and reads what straddles two vectors of an input from both"

    def __init__(self, kernel: Kernel, overlaps: bool = False) -> None:
        self.kernel, self.overlaps = kernel, overlaps

    def launch(self, problem: Gated, gpu: Gpu) -> Launch:
        rows, cols, itemsize, gate_stride, up_stride, packed = problem
        overlap = self.overlaps and packed and cols * itemsize % 16 != 0
        grid, shape = spans(rows, cols, itemsize, overlap)
        named = {"shape": shape, "gate_stride": gate_stride, "up_stride": up_stride}
        return Launch(self.kernel, grid, BLOCK, named=named)


def _kernel(name: str, dtypes: tuple[torch.dtype, ...]) -> Kernel:
    return Kernel("gated.cu", f"gated_{name}<T>", define=DEFINE, T=dtypes)


_FORWARD = SharedMemory(_kernel("fwd_shared_memory", UP_TO_FLOAT32)), StridedRows(_kernel("fwd_strided_rows", FLOATING))
_BACKWARD = (
    SharedMemory(_kernel("bwd_shared_memory", UP_TO_FLOAT32)),
    StridedRows(_kernel("bwd_strided_rows", FLOATING), overlaps=True),
)


def forms(family: str) -> tuple[Forms[Gated], Forms[Gated]]:
    """The forms as the lists of an operator, forward and backward."""
    return Forms(family, "forward", _FORWARD), Forms(family, "backward", _BACKWARD)


SWIGLU, GEGLU = forms("swiglu"), forms("geglu")


def halves(f: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor | None) -> Tensor:
    """The reference: f(gate) * up; without `up`, of the two halves of the last dimension, the gate first."""
    if up is None:
        gate, up = gate.chunk(2, -1)
    return f(gate) * up


def forward(forms: Forms[Gated], gate: Tensor, up: Tensor | None, f: str) -> Tensor:
    """f(gate) * up; `f` is one of FUNCTIONS."""
    if up is None:
        if not gate.is_contiguous():
            gate, up = gate.chunk(2, -1)
            return forward(forms, gate, up, f)
        y = torch.empty((*gate.shape[:-1], gate.shape[-1] // 2), dtype=gate.dtype, device=gate.device)
    else:
        y = empty_output(gate, up)
    if not is_dry(y) and y.numel():
        launch, inputs = _launched(forms, y, gate, up)
        launch(*inputs, y, function=FUNCTIONS.index(f), T=y.dtype)
    return y


def backward(
    forms: Forms[Gated], grad_y: Tensor, gate: Tensor, up: Tensor | None, needs_grad: Any, f: str
) -> tuple[Tensor | None, Tensor | None]:
    """Both gradients, or the one that is wanted; a packed one is one tensor. grad_y is laid out as y."""
    if up is None:
        gate, grad_y = gate.contiguous(), grad_y.contiguous()
        wanted: tuple[Tensor | None, Tensor | None] = gate, None
    else:
        wanted = grad_y if needs_grad.gate else None, grad_y if needs_grad.up else None
        up = up if needs_grad.gate else gate  # for nothing, where it has not been kept
    grad_gate, grad_up = (None if like is None else torch.empty_like(like) for like in wanted)
    if not is_dry(grad_y) and grad_y.numel():
        launch, inputs = _launched(forms, grad_y, gate, up)
        grads = (grad_gate, grad_up)[: len(inputs)]
        launch(grad_y, *inputs, *grads, function=FUNCTIONS.index(f), T=grad_y.dtype)
    return grad_gate, grad_up


def _launched(
    forms: Forms[Gated], like: Tensor, gate: Tensor, up: Tensor | None
) -> tuple[Launch, Sequence[Tensor | None]]:
    """The launch, and the inputs that its kernel takes: of packed rows in shared memory the one tensor, else gate and up."""
    if up is None:
        stride, cols = gate.shape[-1], gate.shape[-1] // 2
        problem = Gated(math.prod(gate.shape[:-1]), cols, like.element_size(), stride, stride, True)
        launch = forms.launch(problem, gpu(like.device))
        return launch, (gate,) if launch.shared else (gate, None)
    found = _rows(like, gate, up)
    if found is None:
        gate, up = restride(gate, like.stride()), restride(up, like.stride())
        found = 1, like.numel(), like.numel(), like.numel()
    rows, cols, gate_stride, up_stride = found
    problem = Gated(rows, cols, like.element_size(), gate_stride, up_stride, False)
    return forms.launch(problem, gpu(like.device)), (gate, up)


def _rows(like: Tensor, gate: Tensor, up: Tensor) -> tuple[int, int, int, int] | None:
    """(rows, columns, strides of the inputs' rows); None where the inputs have no such rows, and are to be copied."""
    n, shape = like.numel(), tuple(like.shape)
    if like.stride() == gate.stride() == up.stride():
        return 1, n, n, n
    cols = shape[-1] if shape else 1
    own, of_gate, of_up = (row_stride(shape, tensor.stride()) for tensor in (like, gate, up))
    return None if own != cols or of_gate is None or of_up is None else (n // cols, cols, of_gate, of_up)


def check_gated(gate: Any, up: Any) -> None:
    """Raise `InputError` unless `gate` and `up` are of one shape, dtype and device, or `gate` alone has two halves."""
    arguments.floating("gate", gate)
    if up is None:
        if gate.dim() == 0 or gate.shape[-1] % 2 != 0:
            arguments.fail("gate", gate, "an even last dimension, the gate and what it is multiplied by, or up as well")
        return
    arguments.floating("up", up)
    if up.shape != gate.shape:
        arguments.fail("up", up, f"the shape of gate, {tuple(gate.shape)}")
    arguments.same_device(gate=gate, up=up)
    arguments.same_dtype(gate=gate, up=up)
