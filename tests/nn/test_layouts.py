"""Casts of autocast that lay an image out at once as the next kernel reads it: nothing else changes."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cupyops
from cupyops.nn import conv
from cupyops.ops._group_norm import group_norm_alike

LAST = torch.channels_last


def test_which_images_are_laid_out_anew(monkeypatch):
    """Those of float32 that do not lie as the filters do, under autocast."""
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda kind: torch.bfloat16)
    weight, x = torch.randn(4, 3, 3, 3).to(memory_format=LAST), torch.randn(2, 3, 5, 6)
    found = conv._as_filters_lie(x, weight)
    assert found.dtype is torch.bfloat16 and found.is_contiguous(memory_format=LAST)
    assert torch.equal(found.float(), x.bfloat16().float())
    for one, filters in (
        (x, weight.contiguous()),
        (x.to(memory_format=LAST), weight),
        (x.bfloat16(), weight),
        (x[0], weight),
    ):
        assert conv._as_filters_lie(one, filters) is one


def gradients(function, x, parameters, grad_y):
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    with cupyops.never_slower(), torch.autocast("cuda", torch.bfloat16):
        y = function(x)
    return y, *torch.autograd.grad(y, (x, *parameters), grad_y.to(y.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_group_norm_on_a_gpu(half, last):
    """To the bit what the operator gives, whose cast is apart, and dtypes of PyTorch's; the input's layout."""
    torch.manual_seed(0)
    layer = cupyops.nn.GroupNorm(4, 32).cuda()
    x = torch.randn(3, 32, 9, 16, device="cuda").to(torch.bfloat16 if half else torch.float32)
    x = x.contiguous(memory_format=LAST) if last else x
    grad_y = torch.randn(3, 32, 9, 16, device="cuda")
    parameters = layer.weight, layer.bias
    for _ in range(4):  # recorded, and replayed
        ours = gradients(layer, x, parameters, grad_y)
        plain = gradients(lambda x: group_norm_alike(x, 4, *parameters, layer.eps), x, parameters, grad_y)
        theirs = gradients(lambda x: F.group_norm(x, 4, *parameters), x, parameters, grad_y)
        for a, b, c in zip(ours, plain, theirs):
            assert torch.equal(a, b) and a.dtype is c.dtype
            torch.testing.assert_close(a, c, rtol=2e-2, atol=2e-2)
        assert ours[0].stride() == ours[1].stride() == x.stride()


@pytest.mark.gpu
@pytest.mark.parametrize("last", [False, True])
def test_convolution_on_a_gpu(last):
    torch.manual_seed(0)
    layer = nn.Conv2d(16, 24, 3, padding=1).cuda()
    layer = layer.to(memory_format=LAST) if last else layer
    x, grad_y = torch.randn(3, 16, 9, 8, device="cuda"), torch.randn(3, 24, 9, 8, device="cuda")
    parameters = layer.weight, layer.bias
    theirs = gradients(layer, x, parameters, grad_y)
    cupyops.swap(layer)
    ours = gradients(layer, x, parameters, grad_y)
    for a, b in zip(ours, theirs):
        assert a.dtype is b.dtype
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())
    assert ours[0].stride() == theirs[0].stride()
