"""Operators and helpers for the tests of recorded plans."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

import cupyops
from cupyops._kernel.kernel import FLOATING
from cupyops._operator.derivation.plans import PlannedCall, Plans
from cupyops._operator.derivation.recorder import Recorder
from cupyops._util.strides import alike

CODE = """
#include "common/core/types.cuh"
template <typename T> __global__ void scale(const T* x, T* y, float by, long long n) {
  long long i = global_thread();
  if (i < n) y[i] = from_acc<T>(to_acc(x[i]) * by);
}
template <typename T> __global__ void pair(const T* x, T* y, T* z, long long n) {
  long long i = global_thread();
  if (i < n) { y[i] = from_acc<T>(to_acc(x[i]) * 2); z[i] = from_acc<T>(to_acc(x[i]) * 3); }
}
"""
scale = cupyops.Kernel(CODE, "scale<T>", T=FLOATING)
pair = cupyops.Kernel(CODE, "pair<T>", T=FLOATING)
_names = itertools.count()


def launch(x, y, by):
    """y = x * by; as many elements as both have."""
    scale[cupyops.ceil_div(y.numel(), 64), 64](x, y, by, y.numel(), T=y.dtype)


def scaled(forward=None, backward=None, **options):
    """y = x * by, an operator whose forward and backward may be others."""

    @cupyops.operator(f"cupyops_plans::scaled_{next(_names)}", **options, dtypes=FLOATING)
    def op(x: Tensor, by: float = 2.0) -> Tensor:
        return x * by

    def usual(x, by):
        y, x = alike(x)
        launch(x, y, by)
        return y, ()

    def usual_backward(saved, grad_y, by):
        grad_x, grad_y = alike(grad_y)
        launch(grad_y, grad_x, by)
        return grad_x

    op.forward(forward or usual)
    op.backward(backward or usual_backward)
    op.reference_backward(lambda saved, grad_y, by: grad_y * by)
    return op


class Count:
    """How many calls found no plan, and how many were recorded."""

    def __init__(self):
        self.misses = self.backward_misses = self.recorded = 0


@contextmanager
def counted():
    """Counts while it is open."""
    count = Count()
    call, backward, run = Plans.call, PlannedCall.backward, Recorder.run

    def counting(name, function):
        def counts(self, *args):
            setattr(count, name, getattr(count, name) + 1)
            return function(self, *args)

        return counts

    with (
        mock.patch.object(Plans, "call", counting("misses", call)),
        mock.patch.object(PlannedCall, "backward", counting("backward_misses", backward)),
        mock.patch.object(Recorder, "run", counting("recorded", run)),
    ):
        yield count


def warm(function, *args, times=6, **kwargs):
    """Calls until forward and backward, if a gradient is wanted, are replayed."""
    for _ in range(times):
        y = function(*args, **kwargs)
        ys = [one for one in (y if isinstance(y, tuple) else (y,)) if isinstance(one, Tensor) and one.requires_grad]
        leaves = [one for one in args if isinstance(one, Tensor) and one.requires_grad]
        if ys and leaves:
            torch.autograd.grad(ys, leaves, [torch.ones_like(one) for one in ys], allow_unused=True)


def plainly(function, *args, **kwargs):
    """The call with no plan."""
    with cupyops.plans(enabled=False):
        return function(*args, **kwargs)


def same(one, other):
    """Whether two results are the same bits, laid out alike."""
    if isinstance(one, (tuple, list)):
        return len(one) == len(other) and all(map(same, one, other))
    if not isinstance(one, Tensor):
        return one is other
    alike_ = (one.shape, one.stride(), one.dtype, one.requires_grad) == (
        other.shape, other.stride(), other.dtype, other.requires_grad,
    )  # fmt: skip
    flat = [t.detach().resolve_neg().flatten().view(torch.uint8) for t in (one, other)]
    return alike_ and torch.equal(*flat)
