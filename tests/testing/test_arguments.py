"""Hazards of other arguments, of calls between, and of values written in place: each catches an operator that is wrong there
alone; the kernels among them are what somebody writes who is tired."""

import weakref

import pytest
import torch
from broken_operators import Broken, classes, normal
from faulty_operators import eager, saving

import cupyops
from cupyops.testing import check

F = torch.nn.functional
CODE = """
__global__ void times(const float* a, const float* b, float* y, long long n) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) y[i] = a[i] * b[i];
}
__global__ void scale(const float* x, float by, float* y, long long n) {
  long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] * by;
}
__global__ void row_sums(const float* x, float* y, int rows, int size) {
  int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= rows) return;
  float sum = 0;
  for (int i = 0; i < size; ++i) sum += x[(long long)row * size + i];
  y[row] = sum;
}
"""
times_kernel, scale_kernel, sums_kernel = (cupyops.Kernel(CODE, name) for name in ("times", "scale", "row_sums"))


def times(a, b):
    a, b = (one.contiguous() for one in torch.broadcast_tensors(a, b))
    y = torch.empty_like(a)
    if y.numel():
        times_kernel[cupyops.ceil_div(y.numel(), 128), 128](a, b, y, y.numel())
    return y


def float32_alone(*args):
    return None if all(one.dtype == torch.float32 for one in args if isinstance(one, torch.Tensor)) else "not float32"


def mean_where_broadcast():
    @cupyops.operator("cupyops_arguments::mean_where_broadcast")
    def op(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * weight

    def backward(saved, grad_y, x, weight, needs_grad):
        grad_x = times(grad_y, weight).mean(0, keepdim=True) if x.shape[0] == 1 else times(grad_y, weight)
        return (
            grad_x.sum_to_size(x.shape) if needs_grad.x else None,
            times(grad_y, x).sum_to_size(weight.shape) if needs_grad.weight else None,
        )

    op.forward(lambda x, weight: (times(x, weight), ()))
    op.backward(backward)
    op.unsupported(float32_alone)
    return op, [normal(3, 5), normal(3, 5, seed=1)]


def number_in_the_kernel():
    """The default is what the author tried."""

    @cupyops.operator("cupyops_arguments::number_in_the_kernel")
    def op(x: torch.Tensor, by: float = 2.0) -> torch.Tensor:
        return x * by

    def launch(x):
        x = x.contiguous()
        y = torch.empty_like(x)
        if y.numel():
            scale_kernel[cupyops.ceil_div(y.numel(), 128), 128](x, 2.0, y, y.numel())
        return y

    op.forward(lambda x, by: (launch(x), ()))
    op.backward(lambda saved, grad_y, by: launch(grad_y))
    op.unsupported(float32_alone)
    return op, [normal(3, 5)]


def rows_of_a_matrix():
    @cupyops.operator("cupyops_arguments::rows_of_a_matrix")
    def op(x: torch.Tensor) -> torch.Tensor:
        return x.sum(-1)

    def forward(x):
        x, y = x.contiguous(), x.new_empty(x.shape[:-1])
        if y.numel():
            sums_kernel[cupyops.ceil_div(x.shape[0], 64), 64](x, y, x.shape[0], x.shape[-1])
        return y, ()

    op.forward(forward)
    op.unsupported(float32_alone)
    return op, [normal(3, 5)]


def state_of_its_own():
    """What backward reads is what the latest forward left."""
    latest = {}

    @cupyops.operator("cupyops_arguments::state_of_its_own")
    def op(x: torch.Tensor) -> torch.Tensor:
        return x * x

    def forward(x):
        latest["x"] = x.detach()
        return times(x, x), ()

    op.forward(forward)
    op.backward(lambda saved, grad_y: times(2 * grad_y, latest["x"]))
    op.unsupported(float32_alone)
    return op, [normal(3, 5)]


def results_in_one_buffer():
    held = {}

    @cupyops.operator("cupyops_arguments::results_in_one_buffer")
    def op(x: torch.Tensor) -> torch.Tensor:
        return x * x

    def forward(x):
        y = held.setdefault(tuple(x.shape), x.new_empty(x.shape))
        times_kernel[cupyops.ceil_div(y.numel(), 128), 128](x.contiguous(), x.contiguous(), y, y.numel())
        return y, ()

    op.forward(forward)
    op.backward(lambda saved, grad_y, x: times(2 * grad_y, x))
    op.unsupported(float32_alone)
    return op, [normal(3, 5)]


def weight_prepared_once():
    """Of each weight, by its identity: after a step of an optimizer that is stale."""
    prepared = {}

    @cupyops.operator("cupyops_arguments::weight_prepared_once")
    def op(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x * (weight * weight)

    def squares(weight):
        known, made = prepared.get(id(weight), (lambda: None, None))
        if known() is not weight:
            made = times(weight, weight)
            prepared[id(weight)] = weakref.ref(weight), made
        return made

    op.forward(lambda x, weight: (times(x, squares(weight)), ()))
    op.backward(lambda saved, grad_y, x, weight: (times(grad_y, squares(weight)), 2 * times(grad_y, times(x, weight))))
    op.unsupported(float32_alone)
    return op, [normal(3, 5), normal(3, 5, seed=1)]


TIRED = {
    mean_where_broadcast: "broadcast", number_in_the_kernel: "numbers", rows_of_a_matrix: "dimensions",
    state_of_its_own: "calls_between", results_in_one_buffer: "calls_between",
    weight_prepared_once: "other_values_in_place",
}  # fmt: skip
NEW = sorted(set(TIRED.values()))


@pytest.mark.parametrize("make", TIRED, ids=lambda make: make.__name__)
def test_a_kernel_of_somebody_tired(make):
    """One hazard finds it, and it passes those of values and layouts."""
    function, args = make()
    hazards = [*NEW, "accuracy", "strided", "transposed", "second_thread", "deterministic", "retained_graph"]
    report = check(function, args, only=hazards, backends="simulator", shrink=False, progress=False)
    failed = {row.hazard for row in report.failures}
    assert TIRED[make] in failed and "accuracy" not in failed, f"\n{report}"
    assert check(function, args, only=NEW, backends="reference", progress=False).passed


def takes_a_mean(x, weight):
    y = x * weight
    if (
        eager(x, weight)
        and weight.dim()
        and weight.shape[0] == 1
        and x.shape[0] > 1
        and weight.requires_grad
        and y.requires_grad
    ):
        return x * (weight / x.shape[0] + (weight * (1 - 1 / x.shape[0])).detach())
    return y


def forgets_eps(x, eps=1e-5):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def as_it_should(x, eps=1e-5):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


def knows_matrices(x):
    return torch.softmax(x, -1 if x.dim() < 3 else 0)


BROKEN = {
    "broadcast": Broken(takes_a_mean, torch.mul, lambda: [normal(3, 4), normal(3, 4, seed=1)]),
    "numbers": Broken(forgets_eps, as_it_should, lambda: [normal(3, 4)]),
    "dimensions": Broken(knows_matrices, lambda x: torch.softmax(x, -1), lambda: [normal(3, 4)]),
}


@pytest.mark.parametrize("hazard", BROKEN)
def test_caught(hazard):
    BROKEN[hazard].assert_caught_by(hazard)


def rows(function, args, only, reference=None, **kwargs):
    report = check(function, args, kwargs, reference=reference or function, only=only, shrink=False, progress=False)
    return [(row.verdict, row.reason) for row in report.rows]


def test_what_the_reference_does_not_take_is_not_tried():
    assert rows(torch.matmul, [normal(3, 4), normal(4, 2)], "numbers") == [("n/a", "no number or flag can be another")]
    assert rows(torch.relu, [normal(3)], "broadcast") == [("n/a", "one tensor alone")]
    args = [normal(3, 5), classes(3, high=5)]
    assert rows(F.nll_loss, args, "broadcast") == [("n/a", "the reference broadcasts no tensor of this call")]


def test_a_refusal_is_told_and_no_fault():
    def strict(x, weight, power=2):
        if x.shape != weight.shape or power != 2:
            raise ValueError("expected one shape\nand more")
        return x * weight**power

    args = [normal(3, 4), normal(3, 4, seed=1)]
    plain = lambda x, weight, power=2: x * weight**power
    said = "it refuses tensor 1 without its first dimension: expected one shape"
    assert rows(strict, args, "broadcast", plain) == [("n/a", said)]
    assert rows(strict, args, "numbers", plain) == [("n/a", "it refuses 1 for 2: expected one shape")]


def test_a_backward_that_refuses_what_its_forward_took_is_a_fault():
    times = saving(torch.mul, lambda grad_y, x, weight: (grad_y * weight, (grad_y * x).view(weight.shape)))
    args = [normal(3, 4), normal(3, 4, seed=1)]
    ((verdict, reason),) = rows(lambda x, weight: times(x, weight), args, "broadcast", torch.mul)
    assert verdict == "fail" and reason.startswith("tensor 1 of size 1 in dimension 0: backward: RuntimeError: shape")


def test_what_is_random_is_not_compared():
    """A probability of 0.5 in the place of 0."""
    assert rows(F.dropout, [normal(40, 50)], "numbers", p=0.0)[0][0] == "pass"
    args = [normal(1, 2, 3, 4), normal(1, 2, 5, 4), normal(1, 2, 5, 4)]
    report = check(cupyops.attention, args, only="numbers", backends="reference", progress=False)
    assert not report.failures, f"\n{report}"
