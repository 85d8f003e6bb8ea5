import pytest
import torch
from contract import Make, OperatorContract, Sample

import cupyops


class TestGelu(OperatorContract):
    function = staticmethod(cupyops.gelu)
    torch_function = staticmethod(torch.nn.functional.gelu)
    kernels = {"gelu_fwd", "gelu_bwd"}

    def samples(self, make: Make):
        for shape in [(3, 7), (5,), (2059,), (2, 3, 4, 5), (), (0, 3)]:
            yield Sample(make(*shape))
            yield Sample(make(*shape), approximate="tanh")
        yield Sample(make(37, low=-9.0, high=9.0), approximate="none")
        yield Sample(make(37, low=-9.0, high=9.0), approximate="tanh")

    def small_samples(self, make: Make):
        return (sample for sample in self.samples(make) if sample.args[0].numel() < 100)


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_special_values(device, dtype, approximate):
    """NaN and zeros as PyTorch; infinities too, but that PyTorch's own gelu(inf) is inf on CUDA and can be NaN on a CPU."""
    odd = [float("nan"), -float("inf"), -0.0, 0.0, 1e-42, -1e-42, -20.0, 20.0, -1e15, 1e15, -1e30, 1e30]
    x = torch.tensor(odd, device=device).to(dtype).requires_grad_()
    y, expected = (f(x, approximate=approximate) for f in (cupyops.gelu, torch.nn.functional.gelu))
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": torch.finfo(dtype).eps ** 2, "equal_nan": True}
    torch.testing.assert_close(y, expected, **tolerance)
    assert torch.equal(y[2:4].signbit(), expected[2:4].signbit())
    ours, theirs = (torch.autograd.grad(value.sum(), x)[0] for value in (y, expected))
    torch.testing.assert_close(ours, theirs, **tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_infinity(approximate):
    x = torch.tensor([float("inf")], device="cuda", requires_grad=True)
    y, expected = (f(x, approximate=approximate) for f in (cupyops.gelu, torch.nn.functional.gelu))
    assert torch.equal(y, expected)
    ours, theirs = (torch.autograd.grad(value, x)[0] for value in (y, expected))
    torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_bad_input():
    for bad in (torch.arange(3), torch.ones(2, dtype=torch.complex64), 1.5, None):
        with pytest.raises(cupyops.InputError, match="input"):
            cupyops.gelu(bad)
    for bad in ("erf", None, True):
        with pytest.raises(cupyops.InputError, match="approximate"):
            cupyops.gelu(torch.ones(2), approximate=bad)
