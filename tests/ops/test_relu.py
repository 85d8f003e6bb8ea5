import pytest
import torch
from contract import Make, OperatorContract, Sample
from torch.nn import functional as F

import cupyops
from cupyops.ops._relu import MASKED


class TestRelu(OperatorContract):
    function = staticmethod(cupyops.relu)
    torch_function = staticmethod(torch.nn.functional.relu)
    kernels = {"relu_fwd", "relu_bwd"}

    def samples(self, make: Make):
        for shape in [(3, 7), (2, 3, 4, 5), (5,), (1031,), (1,), (), (521, 505)]:  # the last with a mask
            yield Sample(make(*shape))

    def small_samples(self, make: Make):
        yield Sample(make(3, 7))
        yield Sample(make(2, 3, 4, 5))


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


@pytest.mark.parametrize("n", [MASKED - 1, MASKED + 3])
def test_what_is_kept(n):
    """Of many elements a mask too: a bit for each, in the kernels' words; the rest of a byte is 0."""
    x = torch.randn(n, requires_grad=True)
    with cupyops.simulate():
        y = cupyops.relu(x)
    kept = [tensor for tensor in y.grad_fn.saved_tensors if tensor.dtype is torch.uint8]
    assert len(kept) == (n >= MASKED)
    for mask in kept:
        bits = ((mask[:, None] >> torch.arange(4)) & 1).flatten()
        assert torch.equal(bits[:n].bool(), x > 0) and int(bits[n:].sum()) == 0


def test_what_is_kept_may_not_be_changed(device):
    """As in PyTorch: the output is kept for a second derivative."""
    y = cupyops.relu(torch.randn(5, device=device, requires_grad=True))
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (2, 512, 17, 16)], ids=["output", "mask"])
def test_saved_in_another_layout(shape):
    """Hooks such as save_on_cpu give back a contiguous copy of what was channels_last."""
    x = torch.randn(shape).to(memory_format=torch.channels_last).requires_grad_()
    grad_y = torch.randn(shape).to(memory_format=torch.channels_last)
    assert (shape == (2, 3, 4, 5)) == (x.numel() < MASKED)
    with cupyops.simulate():
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.contiguous, lambda kept: kept):
            y = cupyops.relu(x)
        (grad_x,) = torch.autograd.grad(y, x, grad_y)
    assert torch.equal(grad_x, torch.where(x > 0, grad_y, 0))
