import pytest
import torch
from contract import Make, OperatorContract, Sample

import cupyops


class TestSilu(OperatorContract):
    function = staticmethod(cupyops.silu)
    torch_function = staticmethod(torch.nn.functional.silu)
    kernels = {"silu_fwd", "silu_bwd"}

    def samples(self, make: Make):
        for shape in [(3, 7), (2, 3, 4, 5), (5,), (2059,), (0, 3)]:
            yield Sample(make(*shape))
        for shape in [(1,), ()]:
            # not where the derivative is 0, and its terms' rounding all that is left
            yield Sample(make(*shape, low=0.5))
        yield Sample(make(37, low=-30.0, high=30.0))

    def small_samples(self, make: Make):
        return (sample for sample in self.samples(make) if sample.args[0].numel() < 100)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_special_values(device, dtype):
    """NaN and infinities as PyTorch; below -87 its float exponential flushes to zero on some devices, hence the 1e-36."""
    odd = [float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-42, -1e-42, -30.0, -87.0, -89.0, -1e20, 1e20]
    x = torch.tensor(odd, device=device).to(dtype).requires_grad_()
    y, expected = cupyops.silu(x), torch.nn.functional.silu(x)
    tolerance = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 1e-36, "equal_nan": True}
    torch.testing.assert_close(y, expected, **tolerance)
    assert torch.equal(y[3:5].signbit(), expected[3:5].signbit())
    ours, theirs = (torch.autograd.grad(value.sum(), x)[0] for value in (y, expected))
    torch.testing.assert_close(ours, theirs, **tolerance)


def test_complex(device):
    x = torch.randn(5, dtype=torch.complex64, device=device)
    torch.testing.assert_close(cupyops.silu(x), torch.nn.functional.silu(x))


@pytest.mark.parametrize("bad", [torch.arange(3), torch.tensor([True]), 1.5, None, "x"])
def test_bad_input(bad):
    with pytest.raises(cupyops.InputError, match="input"):
        cupyops.silu(bad)
