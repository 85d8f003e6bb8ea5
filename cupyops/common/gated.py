"""Gated activations, f(gate) * up: what swiglu and geglu share on the host. See cuda_src/common/gated.cuh."""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .. import check
from ..kernel import Kernel, ceil_div
from ..layout import is_dry, restride
from .broadcast import empty_output
from .spans import spans, walk

SMALL = 256  # kSmallRows: threads
SMALL_EACH = {2: 16, 4: 8, 8: 8}  # rows of a thread, by the size of an element: whole vectors, and kGatedAtOnce
SMALL_COLS = 128  # of packed rows of which a block takes several, at most


def halves(f: Callable[[Tensor], Tensor], gate: Tensor, up: Tensor | None) -> Tensor:
    """The reference: f(gate) * up; without `up`, of the two halves of the last dimension, the gate first."""
    if up is None:
        gate, up = gate.chunk(2, -1)
    return f(gate) * up


def forward(kernel: Kernel, small: Kernel, gate: Tensor, up: Tensor | None, **template: Any) -> Tensor:
    """Launch the forward kernel, or for a packed tensor of small rows `small`."""
    if up is None:
        if not gate.is_contiguous():
            return forward(kernel, small, *gate.chunk(2, -1), **template)
        shape = (*gate.shape[:-1], gate.shape[-1] // 2)
        y = torch.empty(shape, dtype=gate.dtype, device=gate.device)
        if not is_dry(y):
            stride = gate.shape[-1]
            if (packed := _small(_rows(gate), stride // 2, y.itemsize)) is not None:
                small[packed[0]](gate, y, packed[1], T=y.dtype, **template)
                return y
            config, rows = walk(_rows(gate), stride // 2, y.itemsize)
            kernel[config](gate, None, y, rows, stride, stride, T=y.dtype, **template)
        return y
    y = empty_output(gate, up)
    if not is_dry(y):
        launch = spans(y.shape, y.stride(), y.itemsize, gate.stride(), up.stride())
        if launch is None:
            gate, up = restride(gate, y.stride()), restride(up, y.stride())
            launch = spans(y.shape, y.stride(), y.itemsize, y.stride(), y.stride())
        config, rows, strides = launch  # type: ignore[misc]
        kernel[config](gate, up, y, rows, *strides, T=y.dtype, **template)
    return y


def backward(
    kernel: Kernel, small: Kernel, grad_y: Tensor, gate: Tensor, up: Tensor | None, needs_grad: Any, **template: Any
) -> tuple[Tensor | None, Tensor | None]:
    """Launch the backward kernel, for both gradients or one; a packed one is one tensor. grad_y is laid out as y.

    `small` as in forward.
    """
    if up is None:
        gate, grad_y = gate.contiguous(), grad_y.contiguous()
        grad = torch.empty_like(gate)
        if not is_dry(grad):
            stride = gate.shape[-1]
            cols = stride // 2
            if (packed := _small(_rows(gate), cols, grad.itemsize)) is not None:
                small[packed[0]](grad_y, gate, grad, packed[1], T=grad.dtype, **template)
                return grad, None
            config, rows = walk(_rows(gate), cols, grad.itemsize, overlap=cols * grad.itemsize % 16 != 0)
            kernel[config](grad_y, gate, None, grad, None, rows, stride, stride, T=grad.dtype, **template)
        return grad, None
    grad_gate = torch.empty_like(grad_y) if needs_grad.gate else None
    grad_up = torch.empty_like(grad_y) if needs_grad.up else None
    if not is_dry(grad_y):
        launch = spans(grad_y.shape, grad_y.stride(), grad_y.itemsize, gate.stride(), up.stride())
        if launch is None:
            gate, up = restride(gate, grad_y.stride()), restride(up, grad_y.stride())
            launch = spans(grad_y.shape, grad_y.stride(), grad_y.itemsize, grad_y.stride(), grad_y.stride())
        config, rows, strides = launch  # type: ignore[misc]
        kernel[config](grad_y, gate, up, grad_gate, grad_up, rows, *strides, T=grad_y.dtype, **template)
    return grad_gate, grad_up


def _rows(x: Tensor) -> int:
    return math.prod(x.shape[:-1])


@functools.lru_cache(maxsize=4096)
def _small(rows: int, cols: int, itemsize: int) -> tuple[tuple[int, int, int], np.ndarray] | None:
    """The launch, and the `struct SmallRows`, where packed rows are small and off 16-byte boundaries."""
    if rows * cols == 0 or cols > SMALL_COLS or cols * itemsize % 16 == 0:
        return None
    sharers = SMALL // cols
    each = SMALL_EACH[itemsize] * sharers
    sizes = np.frombuffer(struct.pack("=q4i", rows, cols, each, sharers, 0), np.uint8)
    return (ceil_div(rows, each), SMALL, 3 * each * cols * itemsize), sizes


def check_gated(gate: Any, up: Any) -> None:
    """Raise `InputError` unless `gate` and `up` are of one shape, dtype and device, or `gate` alone has two halves."""
    check.floating("gate", gate)
    if up is None:
        if gate.dim() == 0 or gate.shape[-1] % 2 != 0:
            check.fail("gate", gate, "an even last dimension, the gate and what it is multiplied by, or up as well")
        return
    check.floating("up", up)
    if up.shape != gate.shape:
        check.fail("up", up, f"the shape of gate, {tuple(gate.shape)}")
    check.same_device(gate=gate, up=up)
    check.same_dtype(gate=gate, up=up)
