"""Convolutions with steps of two, of images of few channels: as convolutions of blocks, and where that is faster."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cupyops
from cupyops.nn import blocks
from cupyops.testing import assume_gpu

HOPPER = {"capability": 9, "multiprocessors": 132, "shared": 232448, "library": True}
LAST = torch.channels_last


@pytest.fixture(params=["simulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def run(request):
    """A context in which the kernels run, and the device of the tensors."""
    if request.param == "gpu":
        return contextlib.nullcontext, "cuda"
    return lambda: cupyops.simulate("sm_90"), "cpu"


def made(channels=3, filters=8, taps=7, pad=3, size=(16, 20), dtype=torch.bfloat16, device="cpu", last=True):
    torch.manual_seed(0)
    conv = cupyops.nn.Conv2d(channels, filters, taps, stride=2, padding=pad, bias=False)
    x = torch.randn(2, channels, *size, device=device).to(dtype)
    conv = conv.to(device, dtype, memory_format=LAST)
    return conv, x.contiguous(memory_format=LAST if last else torch.contiguous_format)


def norm(found, exact):
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("taps, pad", [(7, 3), (7, 2), (7, 1), (7, 0), (5, 3), (5, 2), (5, 1), (5, 0)])
def test_as_a_convolution(run, taps, pad, channels):
    """As near to float64 as PyTorch's, with its gradient."""
    context, device = run
    dtype = (torch.bfloat16, torch.float16)[pad % 2]
    conv, x = made(channels, taps=taps, pad=pad, dtype=dtype, device=device, last=pad < 2)
    exact = conv.weight.detach().double().requires_grad_()
    expected, theirs = F.conv2d(x.double(), exact, None, 2, pad), F.conv2d(x, conv.weight, None, 2, pad)
    with context():
        ours = blocks.of_blocks(conv, x, conv.weight)
    assert ours.is_contiguous(memory_format=LAST)
    grad_y = torch.randn_like(theirs)
    truth = expected, *torch.autograd.grad(expected, exact, grad_y.double())
    found = [(y, *torch.autograd.grad(y, conv.weight, grad_y)) for y in (ours, theirs)]
    for a, b, c in zip(*found, truth):
        assert a.dtype is dtype and norm(a, c) <= 1.1 * norm(b, c)


def test_images_that_are_not_finite(run):
    """A pixel spoils the results that see it, and no others of its block."""
    context, device = run
    conv, x = made(device=device)
    x[0, 1, 5, 6], x[1, 0, 0, 0] = float("nan"), float("-inf")
    expected = F.conv2d(x, conv.weight, None, 2, 3)
    with context():
        found = blocks.of_blocks(conv, x, conv.weight)
    assert found.isnan().any() and found.isinf().any()
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2, equal_nan=True)
    grads = [torch.autograd.grad(y.nan_to_num(0, 0, 0).sum(), conv.weight)[0] for y in (found, expected)]
    assert torch.equal(grads[0].isfinite(), grads[1].isfinite())


def test_gradients_of_gradients(run):
    context, device = run
    conv, x = made(device=device)
    found = []
    for call in (blocks.of_blocks, lambda conv, x, weight: F.conv2d(x, weight, None, 2, 3)):
        with context():
            y = call(conv, x, conv.weight)
        (grad,) = torch.autograd.grad(y.float().square().sum(), conv.weight, create_graph=True)
        found.append(torch.autograd.grad(grad.float().square().sum(), conv.weight)[0])
    assert norm(found[0], found[1].double()) < 3e-2


def test_images_of_float32_under_autocast(run):
    context, device = run
    conv, x = made(dtype=torch.float32, device=device)
    with context(), torch.autocast(device, torch.bfloat16):
        y = blocks.of_blocks(conv, x, conv.weight)
    with torch.autocast(device, torch.bfloat16):
        expected = F.conv2d(x, conv.weight, None, 2, 3)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    y.sum().backward()
    assert conv.weight.grad.dtype is torch.float32


def test_where_it_is_faster(monkeypatch):
    """Large images in channels_last on Hopper whose gradient is not wanted, and the measured steps, taps and zeros."""
    monkeypatch.setattr(blocks, "LEAST", 1)

    def serves(conv, x, **gpu):
        with assume_gpu(**{**HOPPER, **gpu}):
            return blocks.is_of_blocks(conv, x, conv.weight)

    conv, x = made()
    assert serves(conv, x)
    assert not serves(conv, x, capability=8)
    assert not serves(conv, x.requires_grad_())
    x.requires_grad_(False)
    monkeypatch.setattr(blocks, "LEAST", 2**24)
    assert not serves(conv, x)
    monkeypatch.setattr(blocks, "LEAST", 1)
    for other in (
        made(channels=4), made(taps=3, pad=1), made(size=(15, 20)), made(size=(16, 21)), made(taps=5, pad=2),
        made(taps=7, pad=4), made(size=(6, 20)), made(dtype=torch.float32), made(dtype=torch.float64),
    ):  # fmt: skip
        assert not serves(*other)
    for name, value in (("dilation", 2), ("padding_mode", "reflect"), ("bias", True), ("stride", 4)):
        options = {"kernel_size": 7, "stride": 2, "padding": 3, "bias": False, name: value}
        layer = cupyops.nn.Conv2d(3, 8, **options).bfloat16().to(memory_format=LAST)
        assert not serves(layer, x), name
    assert not serves(conv.to(memory_format=torch.contiguous_format), x)


@pytest.mark.gpu
def test_by_a_module(monkeypatch):
    """Under autocast, as near to float64 as cuDNN."""
    monkeypatch.setattr(blocks, "LEAST", 1)
    conv, x = made(filters=64, size=(64, 48), dtype=torch.float32, device="cuda")
    plain = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False).to("cuda", memory_format=LAST)
    plain.load_state_dict(conv.state_dict())
    found = []
    for layer in (conv, plain):
        with torch.autocast("cuda", torch.bfloat16):
            y = layer(x)
        torch.manual_seed(1)
        y.backward(torch.randn_like(y))
        found.append((y, layer.weight.grad))
    truth = x.double(), conv.weight.detach().double().requires_grad_()
    expected = F.conv2d(*truth, None, 2, 3)
    torch.manual_seed(1)
    expected.backward(torch.randn_like(found[0][0]).double())
    for ours, theirs, exact in zip(*found, (expected, truth[1].grad)):
        assert (ours - exact).norm() <= 1.1 * (theirs - exact).norm()
