"""Convolutions whose stride is their kernel's size, as products: what a convolution gives, and as it lies in memory."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cupyops
from cupyops.nn import conv

CASES = {  # channels, filters, kernel, images
    "patches": (3, 8, (4, 4), (2, 3, 12, 8)),
    "not square": (5, 7, (2, 3), (3, 5, 4, 9)),
    "one patch": (1, 4, (5, 5), (2, 1, 5, 5)),
    "a row": (3, 2, (1, 4), (1, 3, 2, 8)),
}


def made(case, last, dtype, device):
    torch.manual_seed(0)
    channels, filters, kernel, shape = CASES[case]
    memory = torch.channels_last if last else torch.contiguous_format
    layer = nn.Conv2d(channels, filters, kernel, stride=kernel).to(device, dtype, memory_format=memory)
    return layer, torch.randn(shape, device=device, dtype=dtype).contiguous(memory_format=memory)


def laid_out(y):
    return [stride for size, stride in zip(y.shape, y.stride()) if size > 1]


def gradients(function, layer, x, grad_y):
    x = x.clone().requires_grad_()
    y = function(x, layer.weight, layer.bias)
    return y, *torch.autograd.grad(y, (x, layer.weight, layer.bias), grad_y)


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("case", CASES)
def test_as_a_convolution(case, last, device):
    layer, x = made(case, last, torch.float64, device)
    theirs = lambda x, weight, bias: F.conv2d(x, weight, bias, stride=layer.stride)
    grad_y = torch.randn_like(theirs(x, layer.weight, layer.bias))
    expected = gradients(theirs, layer, x, grad_y)
    found = gradients(conv.of_patches, layer, x, grad_y)
    torch.testing.assert_close(found, expected)
    assert laid_out(found[0]) == laid_out(expected[0])
    torch.testing.assert_close(conv.of_patches(x, layer.weight, None), theirs(x, layer.weight, None))


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_by_kernels_under_autocast(last):
    layer, x = made("patches", last, torch.float32, "cpu")
    truth = F.conv2d(x.double(), layer.weight.double(), layer.bias.double(), stride=layer.stride)
    with cupyops.simulate("sm_90"), torch.autocast("cpu", torch.bfloat16), cupyops.trace() as trace:
        y = conv.of_patches(x, layer.weight, layer.bias)
    assert y.dtype is torch.bfloat16 and trace.routes() == {"simulator"}
    torch.testing.assert_close(y.double(), truth, rtol=2e-2, atol=2e-2)


def test_gradients_of_gradients():
    layer, x = made("not square", False, torch.float64, "cpu")
    arguments = x.requires_grad_(), layer.weight, layer.bias
    assert torch.autograd.gradgradcheck(conv.of_patches, arguments)


def test_which_are_taken(monkeypatch):
    """A product is taken of many images that are whole patches, with fewer channels than cuDNN's vectors have."""
    images = torch.randn(2, 3, 8, 8)
    layer = cupyops.nn.Conv2d(3, 4, 4, stride=4)
    assert not conv._is_of_patches(layer, images, layer.weight)
    monkeypatch.setattr(conv, "FEW", 1)
    assert conv._is_of_patches(layer, images, layer.weight)
    valid = cupyops.nn.Conv2d(3, 4, 4, stride=4, padding="valid")
    assert conv._is_of_patches(valid, images, valid.weight)
    of_others = cupyops.nn.Conv2d(3, 4, 4, stride=4)
    of_others.weight = nn.Parameter(torch.randn(4, 3, 8, 8))
    others = [
        (layer, torch.randn(2, 4, 8, 8)),  # other channels than the filters have
        (of_others, images),
        (cupyops.nn.Conv2d(8, 4, 4, stride=4), torch.randn(2, 8, 8, 8)),
        (layer, torch.randn(2, 3, 8, 9)),
        (layer, torch.randn(2, 3, 7, 8)),
        (layer, torch.randn(3, 8, 8)),
        (layer, torch.randn(0, 3, 8, 8)),
        (cupyops.nn.Conv2d(3, 3, 4, stride=4, groups=3), images),
        (cupyops.nn.Conv2d(3, 4, 4, stride=4, padding=2), images),
        (cupyops.nn.Conv2d(3, 4, 2, stride=2, dilation=2), images),
        (cupyops.nn.Conv2d(3, 4, 2, stride=2, padding=0, padding_mode="reflect", dilation=(1, 2)), images),
        (cupyops.nn.Conv2d(3, 4, 1), images),
    ]
    for other, x in others:
        assert not conv._is_of_patches(other, x, other.weight), other


@pytest.mark.gpu
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
def test_on_a_gpu(last, monkeypatch):
    """The module takes the product under autocast, with PyTorch's strides, and is as near to float64 as cuDNN is."""
    monkeypatch.setattr(conv, "FEW", 1)
    layer, x = made("patches", last, torch.float32, "cuda")
    truth = F.conv2d(x.double(), layer.weight.double(), layer.bias.double(), stride=layer.stride)
    grad_y = torch.randn_like(truth, dtype=torch.bfloat16)
    (weight,) = torch.autograd.grad(truth, layer.weight, grad_y.double())
    errors = []
    for swapped in (False, True):
        if swapped:
            cupyops.swap(layer)
        with cupyops.never_slower(), torch.autocast("cuda", torch.bfloat16):
            for _ in range(4):  # recorded, and replayed
                y = layer(x)
        (found,) = torch.autograd.grad(y, layer.weight, grad_y)
        assert y.dtype is torch.bfloat16 and ("Conv" in y.grad_fn.name()) is not swapped
        errors.append([(y - truth).norm() / truth.norm(), (found - weight).norm() / weight.norm(), y.stride()])
    assert errors[0][2] == errors[1][2]
    assert all(ours <= 1.5 * theirs for theirs, ours in zip(errors[0][:2], errors[1][:2]))
