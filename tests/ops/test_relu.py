import numpy as np
import pytest
import torch
from contract import Make, OperatorContract, Sample
from torch.nn import functional as F

import cupyops


class TestRelu(OperatorContract):
    function = staticmethod(cupyops.relu)
    torch_function = staticmethod(torch.nn.functional.relu)
    kernels = {"relu_fwd_mask", "relu_bwd_mask"}

    def samples(self, make: Make):
        for shape in [(3, 7), (2, 3, 4, 5), (5,), (1031,), (1,), ()]:
            yield Sample(make(*shape))


class TestReluInPlace(OperatorContract):
    """Of something that is no leaf."""

    function = staticmethod(lambda x: cupyops.relu(x * 1, inplace=True))
    torch_function = staticmethod(lambda x: F.relu(x * 1, inplace=True))
    kernels = {"relu_fwd", "relu_bwd"}

    def samples(self, make: Make):
        for shape in [(3, 7), (2, 3, 4, 5), (1031,), ()]:
            yield Sample(make(*shape))


def test_special_values(device):
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-42], device=device, requires_grad=True)
    y = cupyops.relu(x)
    torch.testing.assert_close(y, torch.relu(x), rtol=0, atol=0, equal_nan=True)
    (ours,) = torch.autograd.grad(y.sum(), x)
    (theirs,) = torch.autograd.grad(torch.relu(x).sum(), x)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)


def test_special_values_in_the_simulator():
    with cupyops.simulate():
        test_special_values("cpu")


def test_nothing_is_kept_of_what_wants_no_gradient():
    x = torch.randn(100)
    with cupyops.simulate(), cupyops.trace() as trace:
        cupyops.relu(x)
        cupyops.relu(x.requires_grad_())
    assert [record.kernel for record in trace.launches()] == ["relu_fwd<float>", "relu_fwd_mask<float>"]


def test_compiled(device):
    """There no mask is kept: backward reads the output."""
    x = torch.randn(100, device=device, requires_grad=True)
    y = torch.compile(cupyops.relu, fullgraph=True, backend="aot_eager")(x)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], (x > 0).float())


def test_what_is_kept_may_not_be_changed(device):
    """As in PyTorch: the output is kept for a second derivative."""
    y = cupyops.relu(torch.randn(5, device=device, requires_grad=True))
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_an_array_in_place():
    x = np.array([-1.0, 2.0], dtype=np.float32)
    assert cupyops.relu(x, inplace=True) is x and x.tolist() == [0.0, 2.0]
