"""Kernels that take a struct of pointers and numbers by value, and nothing that tells the device."""

import numpy as np
import pytest
import torch

import cupyops
from cupyops import LaunchError
from cupyops.simulator import OutOfBounds

CODE = """
struct Base { int n; const float* x; };
struct Params : public Base { float by; float* y; };
__global__ void scale(Params p) {
  int i = global_thread();
  if (i < p.n) p.y[i] = p.by * p.x[i];
}
__global__ void scale_by(Params p, float by) {
  int i = global_thread();
  if (i < p.n) p.y[i] = by * p.x[i];
}
"""
CODE = '#include "cupyops.cuh"' + CODE
BASE = np.dtype([("n", np.int32), ("x", np.uint64)], align=True)
PARAMS = np.dtype([("base", BASE), ("by", np.float32), ("y", np.uint64)], align=True)
scale, scale_by = cupyops.Kernel(CODE, "scale"), cupyops.Kernel(CODE, "scale_by")


def params(x, y, by):
    found = np.zeros((), PARAMS)
    found["base"]["n"], found["base"]["x"], found["by"], found["y"] = (
        x.numel(), cupyops.address(x), by, cupyops.address(y),
    )  # fmt: skip
    return found


@cupyops.operator("cupyops_structs::scaled", dtypes=torch.float32)
def scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x * by


@scaled.forward
def _(x, by):
    y, x = cupyops.alike(x)
    scale[cupyops.ceil_div(x.numel(), 32), 32](params(x, y, by))
    return y, ()


@scaled.backward
def _(saved, grad_y, x, by):
    grad_x, grad_y = cupyops.alike(grad_y)
    scale[cupyops.ceil_div(x.numel(), 32), 32](params(grad_y, grad_x, by))
    return grad_x


@pytest.mark.parametrize("struct", [lambda p: p, lambda p: p[()], lambda p: p.reshape(1)], ids=["0-d", "scalar", "1-d"])
def test_it_runs_in_the_simulator(struct):
    x, y = torch.arange(37.0), torch.empty(37)
    with cupyops.simulate(), cupyops.trace() as trace:
        scale[2, 32](struct(params(x, y, 3.0)))
        assert torch.equal(y, 3 * x)
        scale_by[2, 32](by=0.5, p=struct(params(x, y, 3.0)))
        assert torch.equal(y, x / 2)
    assert trace.routes() == {"simulator"}


def test_accesses_are_checked():
    x, y = torch.ones(37), torch.empty(36)
    with cupyops.simulate(), pytest.raises(OutOfBounds, match="write of 4 bytes outside `memory`"):
        scale[2, 32](params(x, y, 3.0))


def test_an_address_that_is_not_the_simulators():
    x, y = torch.ones(3), torch.empty(3)
    outside = params(x, y, 3.0)
    outside["base"]["x"] = (1 << 46) + (1 << 39)
    with (
        cupyops.simulate(),
        pytest.raises(OutOfBounds, match=r"a wild pointer[\s\S]*cupyops.address\(x\), asked for inside"),
    ):
        scale[1, 32](outside)


def test_where_nothing_runs():
    if torch.cuda.is_available():
        pytest.skip("it would run on the GPU")
    with pytest.raises(LaunchError, match=r"no way to run a kernel on cuda.*cupyops.simulate\(\)"):
        scale[1, 32](params(torch.ones(3), torch.empty(3), 3.0))


@pytest.mark.parametrize("wrong", [7, None, "x"])
def test_what_is_no_struct(wrong):
    with (
        cupyops.simulate(),
        pytest.raises(LaunchError, match=r"give a tensor map, cupyops.pointers\(\[...\]\), or a NumPy"),
    ):
        scale[1, 32](wrong)


def test_a_struct_of_another_size():
    with cupyops.simulate(), pytest.raises(LaunchError, match=r"`Params p` got .*expected a NumPy array of 32 bytes"):
        scale[1, 32](np.zeros(5, np.uint64))


def test_tensors_without_memory_are_refused_outside_an_operator():
    with cupyops.simulate(), pytest.raises(LaunchError, match=r"has no memory .*make it an operator"):
        scale[1, 32](params(torch.empty(3, device="meta"), torch.empty(3, device="meta"), 3.0))


def test_an_operator_whose_kernel_knows_structs_alone():
    """Values and gradients; what has no memory asks for shapes and launches nothing, in the modes in which PyTorch does."""
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: scaled(x, 2.5).square(), fullgraph=True, backend="aot_eager")
    assert scaled(torch.empty(3, 4, device="meta"), 2.0).shape == (3, 4)
    with cupyops.simulate():
        for seed in range(3):
            torch.manual_seed(seed)
            x = torch.randn(5, 7, requires_grad=True)
            torch.testing.assert_close(scaled(x, 2.5), 2.5 * x)
            (grad,) = torch.autograd.grad(compiled(x).sum(), x)
            torch.testing.assert_close(grad, 2 * 2.5 * 2.5 * x.detach())
        assert scaled(torch.empty(3, 4, device="meta"), 2.0).shape == (3, 4)
        torch.testing.assert_close(scaled(x, 2.5), 2.5 * x)


@pytest.mark.gpu
def test_on_a_gpu():
    """On the current device and stream, each time by the whole path; inside simulate() in the simulator."""
    x, y = torch.arange(37.0, device="cuda"), torch.empty(37, device="cuda")
    for by in (3.0, 4.0):
        scale[2, 32](params(x, y, by))
        assert torch.equal(y, by * x)
        scale_by[2, 32](params(x, y, 1.0), 2 * by)
        assert torch.equal(y, 2 * by * x)
    for by in (2.0, 3.0):
        leaf = x.clone().requires_grad_()
        torch.testing.assert_close(scaled(leaf, by), by * x)
        assert torch.equal(torch.autograd.grad(scaled(leaf, by).sum(), leaf)[0], torch.full_like(x, by))
    a, b = torch.arange(37.0), torch.empty(37)
    with cupyops.simulate():
        scale[2, 32](params(a, b, 3.0))
    assert torch.equal(b, 3 * a)
