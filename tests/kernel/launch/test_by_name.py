"""Arguments by the names that the kernel gives its parameters; test_fastpath.py has those of the fast path."""

import pytest
import torch

import cupyops
from cupyops import LaunchError

CODE = """
template <typename T>
__global__ void scale(const T* bias, const T* x, T* y, float by, int n) {
  int i = threadIdx.x;
  if (i < n) y[i] = x[i] * by + (bias ? bias[i] : T(0));
}
"""
scale = cupyops.Kernel(CODE, "scale<T>")


def test_in_any_order_and_beside_others():
    x, y = torch.tensor([1.0, 2.0]), torch.empty(2)
    launch = scale[1, 32]
    with cupyops.simulate():
        launch(n=2, by=3.0, y=y, x=x, bias=torch.ones(2), T=torch.float32)
        assert y.tolist() == [4.0, 7.0]
        launch(None, x, T=torch.float32, n=2, y=y, by=2.0)
        assert y.tolist() == [2.0, 4.0]


def test_a_first_pointer_that_is_null():
    """The launch goes to the device of the next tensor."""
    x, y = torch.tensor([1.0, 2.0]), torch.empty(2)
    with cupyops.simulate():
        scale[1, 32](None, x, y, 2.0, 2, T=torch.float32)
    assert y.tolist() == [2.0, 4.0]


@pytest.mark.parametrize(
    ("args", "named", "message"),
    [
        (1, {"z": 1}, r"no parameter and no template parameter z, expected one of \(const T\* bias, const T\* x"),
        (2, {"x": 1, "y": 2, "by": 1.0, "n": 2}, "x is given twice"),
        (3, {"n": 2}, "by is not given"),
        (6, {"n": 2}, "n is given twice"),
    ],
)
def test_refusals(args, named, message):
    x = torch.ones(2)
    with cupyops.simulate(), pytest.raises(LaunchError, match=message):
        scale[1, 32](*[x, x, x, 1.0, 2, 3][:args], **named, T=torch.float32)


def test_names_that_only_the_compiler_knows():
    code = "#define TAKES float* x, int n\n__global__ void f(TAKES) { if (threadIdx.x < n) x[threadIdx.x] = 1; }"
    x = torch.zeros(2)
    with cupyops.simulate(), pytest.raises(LaunchError, match="does not tell their names"):
        cupyops.Kernel(code, "f")[1, 32](x=x, n=2)


def test_a_recorded_forward():
    @cupyops.operator("cupyops_tests::scaled_by_name")
    def scaled(x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    @scaled.forward
    def forward(x):
        y = torch.empty_like(x)
        scale[1, 32](x=x, y=y, n=x.numel(), by=2.0, bias=None, T=x.dtype)
        return y, ()

    with cupyops.simulate():
        for value in range(6):
            assert scaled(torch.full((3,), float(value))).tolist() == [2.0 * value] * 3
    assert scaled._plans.plans, scaled._plans.reason
    compiled = torch.compile(lambda x: scaled(x), fullgraph=True, backend="aot_eager")
    with cupyops.simulate():
        assert compiled(torch.ones(3)).tolist() == [2.0] * 3
