"""What the C signature of a kernel says of dtypes: calls with others take the reference, with nothing declared for that."""

import pytest
import torch
from torch import Tensor

import cupyops
from cupyops import LaunchError

CODE = """
__global__ void twice(const float* x, float* y, int n) { int i = threadIdx.x; if (i < n) y[i] = 2 * x[i]; }
template <typename T>
__global__ void twice_of(const T* x, T* y, int n) { int i = threadIdx.x; if (i < n) y[i] = x[i] + x[i]; }
typedef float real;
__global__ void twice_real(const real* x, real* y, int n) { int i = threadIdx.x; if (i < n) y[i] = 2 * x[i]; }
__global__ void pick(const float* x, const int* index, float* y, int n) {
  int i = threadIdx.x;
  if (i < n) y[i] = x[index[i]];
}
"""
KERNELS = {
    "float": (cupyops.Kernel(CODE, "twice"), {}),
    "typedef": (cupyops.Kernel(CODE, "twice_real"), {}),
    "template": (cupyops.Kernel(CODE, "twice_of<T>", T=(torch.float32, torch.float16)), {"T": None}),
}


def make(name):
    kernel, template = KERNELS[name]

    @cupyops.operator(f"cupyops_dtypes::twice_{name}")
    def twice(x: Tensor) -> Tensor:
        return 2 * x

    @twice.forward
    def forward(x):
        x = x.contiguous()
        y = torch.empty_like(x)
        kernel[cupyops.grid_1d(x.numel(), 64)](x, y, n=x.numel(), **dict.fromkeys(template, x.dtype))
        return y, (x.new_ones(1),)

    @twice.backward
    def backward(saved, grad_y):
        return grad_y * 2 * saved[0]

    return twice


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("gradient", [False, True])
def test_other_dtypes_take_the_reference(name, gradient):
    twice = make(name)
    x = torch.arange(5.0)
    for _ in range(6):
        for dtype in (torch.float64, torch.float32, torch.bfloat16):
            given = x.to(dtype).requires_grad_(gradient)
            with cupyops.simulate(), cupyops.trace() as trace:
                y = twice(given)
            with cupyops.simulate():
                assert torch.equal(twice(given), y) and torch.equal(y, 2 * given) and y.dtype is dtype
            (record,) = trace.records
            assert record.route == ("simulator" if dtype is torch.float32 else "reference")
            assert dtype is torch.float32 or f"no kernel for {dtype}" in record.note
            if gradient:
                assert torch.equal(torch.autograd.grad(y.sum(), given)[0], torch.full_like(x, 2, dtype=dtype))


@pytest.mark.parametrize("name", ["float", "template"])
def test_compiled(name):
    torch._dynamo.reset()
    twice = make(name)
    compiled = torch.compile(lambda x: twice(x).square(), fullgraph=True, backend="aot_eager")
    with cupyops.simulate():
        for dtype in (torch.float64, torch.float32, torch.float64):
            x = torch.arange(5.0, dtype=dtype, requires_grad=True)
            y = compiled(x)
            assert torch.equal(y, 4 * x * x) and y.dtype is dtype
            assert torch.equal(torch.autograd.grad(y.sum(), x)[0], 8 * x)


def test_gradcheck_by_the_reference():
    with cupyops.simulate():
        assert torch.autograd.gradcheck(make("float"), (torch.rand(3, dtype=torch.float64, requires_grad=True),))


def test_an_integer_of_another_width_is_an_error():
    """As a slip of the author's, who is to convert it: the reference would hide it."""
    kernel = cupyops.Kernel(CODE, "pick")

    @cupyops.operator("cupyops_dtypes::pick")
    def pick(x: Tensor, index: Tensor) -> Tensor:
        return x[index]

    @pick.forward
    def forward(x, index):
        y = torch.empty(index.shape, dtype=x.dtype, device=x.device)
        kernel[1, 32](x, index, y, index.numel())
        return y, ()

    with cupyops.simulate(), pytest.raises(LaunchError, match=r"const int\* index.*torch.int64"):
        pick(torch.ones(3), torch.tensor([0]))


def test_a_slip_inside_forward_is_an_error():
    """Of a dtype that no argument has."""
    kernel = cupyops.Kernel(CODE, "twice")

    @cupyops.operator("cupyops_dtypes::slip")
    def slip(x: Tensor) -> Tensor:
        return 2 * x

    @slip.forward
    def forward(x):
        y = torch.empty_like(x)
        kernel[1, 32](x.double(), y, x.numel())
        return y, ()

    with cupyops.simulate(), pytest.raises(LaunchError, match="torch.float64"):
        slip(torch.ones(3))


def test_helpers():
    assert (torch.float16, torch.bfloat16) == cupyops.HALF and torch.int64 in cupyops.INTEGRAL
    assert set(cupyops.HALF) < set(cupyops.FLOATING) and torch.bool not in cupyops.INTEGRAL
    assert cupyops.grid_1d(0) == (0, 256) and cupyops.grid_1d(257, 128) == (3, 128)
    assert cupyops.grid_1d(10**6, most=7) == (7, 256) and cupyops.grid_1d(9, 4, per_thread=2) == (2, 4)
    with pytest.raises(cupyops.InputError, match="block is 0"):
        cupyops.grid_1d(5, 0)
    x = torch.ones(2, 3)
    assert cupyops.contiguous(x) is x and cupyops.contiguous(x.t()).is_contiguous() and cupyops.contiguous(None) is None
