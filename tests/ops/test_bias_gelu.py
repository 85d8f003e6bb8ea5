import pytest
import torch
from contract import Make, OperatorContract, Sample

import cupyops


def by_torch(input, bias, approximate="none"):
    if input.dim() == 0 or bias.shape != input.shape[-1:]:
        raise ValueError("no features, or a bias of another size")
    return torch.nn.functional.gelu(input + bias, approximate=approximate)


class TestBiasGelu(OperatorContract):
    function = staticmethod(cupyops.bias_gelu)
    torch_function = staticmethod(by_torch)
    kernels = {"bias_gelu_fwd_params", "bias_gelu_fwd_strided", "bias_gelu_bwd_columns", "column_finalize"}

    def samples(self, make: Make):
        for approximate in ("none", "tanh"):
            yield Sample(make(5, 7), make(7), approximate)
            yield Sample(make(2, 3, 16), make(16), approximate)
            for rows in (8, 17):  # columns that are whole vectors, and not
                yield Sample(make(24, rows).t(), make(24), approximate)
            # columns apart, and shorter than a vector where a copy brings them together
            yield Sample(make(14, 3).t()[:, ::2], make(7), approximate)
        yield Sample(make(9), make(9))
        yield Sample(make(70, 3), make(3))
        yield Sample(make(0, 3), make(3))

    def small_samples(self, make: Make):
        yield Sample(make(3, 5), make(5))
        yield Sample(make(2, 8), make(8), "tanh")


def test_long_sums(device):
    """Of many slabs, in fp32: the gradient of the bias is within the rounding of its store."""
    x, bias, grad_y = (torch.randn(s, device=device) for s in ((3001, 24), (24,), (3001, 24)))
    leaves = [t.requires_grad_() for t in (x, bias)]
    wide = [t.detach().double().requires_grad_() for t in (x, bias)]
    ours = torch.autograd.grad(cupyops.bias_gelu(*leaves), leaves, grad_y)
    exact = torch.autograd.grad(by_torch(*wide), wide, grad_y.double())
    for a, b in zip(ours, exact):
        torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=2e-4)


def test_special_values(device):
    odd = torch.tensor([float("nan"), -float("inf"), -0.0, 0.0, -20.0, 20.0], device=device)
    x, bias = odd.repeat(6, 1), odd.clone()
    torch.testing.assert_close(cupyops.bias_gelu(x.t(), bias), by_torch(x.t(), bias), equal_nan=True)


def test_bad_input():
    x, bias = torch.ones(2, 4), torch.ones(4)
    for arguments, culprit in [
        ((torch.arange(4), bias), "input"),
        ((torch.tensor(1.0), bias), "input"),
        ((x, None), "bias"),
        ((x, torch.ones(3)), "bias .*last dimension"),
        ((x, bias.double()), "bias"),
        ((x, bias, "erf"), "approximate"),
    ]:
        with pytest.raises(cupyops.InputError, match=culprit):
            cupyops.bias_gelu(*arguments)
