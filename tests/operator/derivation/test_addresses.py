"""Pointers and accessors as arguments in recorded plans: a replay is given the tensors of its own call."""

import plan_driver as driver
import pytest
import torch
from plan_samples import counted, plainly, same, warm
from torch import Tensor

import cupyops

CODE = """
struct In { const float* at[3]; };
struct Out { float* at[2]; };
// y[0] = x[0] + 10 x[1], y[1] = 100 x[2], where a null pointer is nothing.
__global__ void mix(In xs, Out ys, long long n) {
  const long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
  if (i >= n) return;
  ys.at[0][i] = xs.at[0][i] + 10 * (xs.at[1] ? xs.at[1][i] : 0);
  if (ys.at[1]) ys.at[1][i] = 100 * (xs.at[2] ? xs.at[2][i] : 0);
}
"""
ACCESSORS = """
#include <torch/extension.h>
template <typename scalar_t>
__global__ void outer(const torch::PackedTensorAccessor32<scalar_t, 1, torch::RestrictPtrTraits> x,
                      const torch::PackedTensorAccessor64<scalar_t, 1> w, torch::PackedTensorAccessor32<scalar_t, 2> y) {
  for (int i = threadIdx.x; i < y.size(0) * y.size(1); i += blockDim.x)
    y[i / y.size(1)][i % y.size(1)] = x[i / y.size(1)] * w[i % y.size(1)];
}
"""
mix = cupyops.Kernel(CODE, "mix")


@cupyops.operator("cupyops_addresses::mixed", dtypes=torch.float32)
def mixed(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Of a temporary, of a view that begins within its tensor, and of an argument as it is."""
    return (a + 1) + 10 * b[1:], 100 * c


@mixed.forward
def _(a, b, c):
    shifted, ys = a + 1, [torch.empty_like(c), torch.empty_like(c)]
    mix[1, 32](cupyops.pointers([shifted, b[1:], c]), cupyops.pointers(ys, written=True), c.numel())
    return tuple(ys), (shifted,)


@mixed.backward
def _(saved, grad_y0, grad_y1, needs_grad):
    grad_y0, grad_y1 = cupyops.contiguous(grad_y0, grad_y1)
    n, grad_b = grad_y0.numel(), grad_y0.new_zeros(grad_y0.numel() + 1)
    zero, grad_c = torch.zeros_like(grad_y0), torch.empty_like(grad_y0)
    ins = cupyops.pointers([zero, grad_y0, grad_y1])
    mix[1, 32](ins, cupyops.pointers([grad_b[1:], grad_c], written=True), n)
    return grad_y0 if needs_grad.a else None, grad_b, grad_c


@pytest.fixture(params=["generated", "interpreted"])
def where(request):
    """As on a GPU, by a stand-in for its driver; and step by step in the simulator."""
    if request.param == "generated":
        with driver.driver():
            yield request.param
    else:
        with cupyops.simulate():
            yield request.param


def leaves(n, offset):
    """Three arguments that lie `offset` elements within memory of their own."""
    return [torch.randn(size + offset)[offset:].requires_grad_() for size in (n, n + 1, n)]


def judge(args):
    """Results and gradients against those of the reference in float64, and of a call without a plan."""
    grads = [torch.randn_like(args[0]) for _ in range(2)]
    ys = mixed(*args)
    found = [*ys, *torch.autograd.grad(ys, args, grads)]
    exact = [one.detach().double().requires_grad_() for one in args]
    truth = mixed.reference(*exact)
    truth = [*truth, *torch.autograd.grad(truth, exact, [one.double() for one in grads])]
    for a, b in zip(found, truth, strict=True):
        torch.testing.assert_close(a, b.float())
    ys = plainly(mixed, *args)
    assert same(found, [*ys, *plainly(torch.autograd.grad, ys, args, grads)])
    return ys


def test_pointers_are_those_of_the_call(where):
    n = 7
    warm(mixed, *leaves(n, 0))
    kept = []
    for offset in (0, 1, 3, 0, 2):
        with counted() as count:
            args = leaves(n, offset)
            kept.append((args, judge(args)))  # so that no address comes again
        assert (count.misses, count.backward_misses) == (0, 0), mixed._plans.reason
    for args, ys in kept:  # nothing was written to the tensors of an earlier call
        assert same(ys, plainly(mixed, *args))


def test_one_tensor_at_two_places(where):
    """Of calls alike in all but that: the pointers are two, or one."""
    apart = [torch.randn(8), torch.randn(9), torch.randn(8)]
    one = torch.randn(9)
    together = [one[:8], one, one[1:]]
    for args in (apart, together, apart, together) * 3:
        for found, truth in zip(mixed(*args), mixed.reference(*args), strict=True):
            torch.testing.assert_close(found, truth)


def test_a_null_pointer_is_of_the_signature(where):
    @cupyops.operator("cupyops_addresses::perhaps", dtypes=torch.float32)
    def perhaps(a: Tensor, b: Tensor | None = None) -> Tensor:
        return a if b is None else a + 10 * b

    @perhaps.forward
    def _(a, b):
        y = torch.empty_like(a)
        mix[1, 32](cupyops.pointers([a, b]), cupyops.pointers([y, None], written=True), a.numel())
        return y, ()

    for _ in range(6):
        a, b = torch.randn(5), torch.randn(5)
        assert torch.equal(perhaps(a), a)
        torch.testing.assert_close(perhaps(a, b), a + 10 * b)
    with counted() as count:
        assert torch.equal(perhaps(a), a)
        torch.testing.assert_close(perhaps(a, b), a + 10 * b)
    assert count.misses == 0, perhaps._plans.reason


def test_pointers_that_were_made_elsewhere_are_not_recorded(where):
    """They hold tensors that are none of the call's; what the kernel reads is as it is now."""
    held = torch.ones(5)
    fixed = cupyops.pointers([held])

    @cupyops.operator("cupyops_addresses::held", dtypes=torch.float32)
    def plus(a: Tensor) -> Tensor:
        return held + 0 * a

    @plus.forward
    def _(a):
        y = torch.empty_like(a)
        mix[1, 32](fixed, cupyops.pointers([y], written=True), a.numel())
        return y, ()

    for value in range(7):
        held.fill_(value)
        assert plus(torch.randn(5)).tolist() == [value] * 5
    assert "none of its arguments" in plus._plans.reason


def outer_product(name):
    """An operator whose kernel takes accessors."""
    kernel = cupyops.extension(ACCESSORS).outer

    @cupyops.operator(f"cupyops_addresses::{name}", dtypes=torch.float32)
    def outer(x: Tensor, w: Tensor) -> Tensor:
        return x[:, None] * w

    @outer.forward
    def _(x, w):
        y = torch.empty(len(x), len(w), device=x.device)
        kernel[1, 32](x, w, y, scalar_t=x.dtype)
        return y, ()

    @outer.backward
    def _(saved, grad_y, x, w):
        return (grad_y * w).sum(1), (grad_y * x[:, None]).sum(0)

    return outer


def test_an_accessor_is_packed_of_the_tensor_of_the_call(where):
    outer = outer_product("outer")
    kept = []
    for count, (offset, step) in enumerate([(0, 1)] * 4 + [(1, 1), (3, 1)] + [(0, 2)] * 5 + [(1, 2), (3, 2), (0, 1)]):
        x, w = (torch.randn(step * size + offset)[offset::step].requires_grad_() for size in (4, 6))
        with counted() as seen:
            y = outer(x, w)
        assert (seen.misses == 0) == (count not in (0, 1, 2, 6, 7, 8)), (count, outer._plans.reason)  # strides count
        assert torch.equal(y, torch.outer(x, w))
        grad_y = torch.randn_like(y)
        found, truth = (torch.autograd.grad(one, (x, w), grad_y) for one in (y, torch.outer(x, w)))
        torch.testing.assert_close(found, truth)
        kept.append((x, w, y))
    for x, w, y in kept:  # nothing was written to the tensors of an earlier call
        assert torch.equal(y, torch.outer(x, w))


def test_accessors_of_views_and_of_what_is_changed(where):
    """A column of an argument, by the strides that it has there; and the version of what is written is raised."""
    kernel = cupyops.extension(ACCESSORS).outer

    @cupyops.operator("cupyops_addresses::filled", mutates=("y",), dtypes=torch.float32)
    def filled(y: Tensor, table: Tensor) -> Tensor:
        return y.copy_(table[:, 1, None] * table[0])

    @filled.forward
    def _(y, table):
        kernel[1, 32](table[:, 1], table[0], y, scalar_t=y.dtype)
        return y, ()

    for offset in (0, 0, 0, 0, 2, 5):
        y, table = torch.empty(offset + 15)[offset:].view(5, 3), torch.randn(offset + 15)[offset:].view(5, 3)
        with counted() as seen:
            filled(y, table)
        assert torch.equal(y, table[:, 1, None] * table[0]) and y._version == 1
    assert seen.misses == 0, filled._plans.reason


@pytest.mark.gpu
def test_on_a_gpu():
    outer = outer_product("outer_on_a_gpu")
    kept = []
    for offset in (0, 0, 0, 0, 1, 3, 0):
        x, w = (torch.randn(2 * size + offset, device="cuda")[offset::2][:size] for size in (4, 6))
        with counted() as seen:
            y = outer(x, w)
        a, b, c = (torch.randn(size + offset, device="cuda")[offset:] for size in (7, 8, 7))
        kept.append((y, x[:, None] * w, *mixed(a, b, c), a + 1 + 10 * b[1:], 100 * c))
    assert seen.misses == 0, outer._plans.reason
    for y, outer_truth, first, second, first_truth, second_truth in kept:
        assert torch.equal(y, outer_truth)
        torch.testing.assert_close([first, second], [first_truth, second_truth])
