"""Convolutions as products of pixels that do more, and in blocks of pixels, beside PyTorch's: one call for each kernel."""

from functools import partial

import torch
from torch.nn import functional as F

import cupyops.nn
from cupyops._dispatch.conv import pointwise_fused
from cupyops._dispatch.core.gpu import gpu
from cupyops.nn import blocks

LAST = torch.channels_last


def calls(dtype):
    """Nothing but of half types; the products are Hopper's."""
    if dtype.itemsize == 2:
        yield partial(_on_hopper, measured, dtype)
        yield partial(_on_hopper, added, dtype)
        yield from (partial(in_blocks, dtype, of_image) for of_image in (dtype, torch.float32))


def _on_hopper(call, dtype):
    with cupyops.simulate("sm_90"):
        call(dtype)


def _drawn(dtype, *shape):
    return torch.randn(shape).to(dtype).contiguous(memory_format=LAST)


def measured(dtype):
    """A product that leaves the moments of its columns, with tails of pixels, channels and filters."""
    torch.manual_seed(0)
    x, weight, y = _drawn(dtype, 7, 136, 4, 4), torch.randn(264, 136).to(dtype), _drawn(dtype, 7, 264, 4, 4)
    launch = pointwise_fused.MOMENTS.list[0].launch(pointwise_fused.problem_of(x, 264, False), gpu(x.device))
    moments, counts = (one.double() for one in pointwise_fused.measure(launch, x, weight, y))
    _compare(y, F.conv2d(x.double(), weight[..., None, None].double()), F.conv2d(x, weight[..., None, None]))
    mean = (moments[..., 0] * counts[:, None]).sum(0) / counts.sum()
    square = (moments[..., 1] + counts[:, None] * (moments[..., 0] - mean) ** 2).sum(0)
    assert counts.sum() == 112
    torch.testing.assert_close(square / 112, y.double().var((0, 2, 3), unbiased=False), rtol=1e-5, atol=0)


def added(dtype):
    """The gradient of an image, with what another reader of the image gives."""
    torch.manual_seed(0)
    grad_y, more, grad_x = (_drawn(dtype, 7, channels, 4, 4) for channels in (264, 136, 136))
    weight = torch.randn(264, 136).to(dtype)
    launch = pointwise_fused.ADDED.list[0].launch(pointwise_fused.problem_of(grad_x, 264, True), gpu(grad_x.device))
    pointwise_fused.add(launch, grad_y, weight, more, grad_x)
    exact, theirs = (
        F.conv_transpose2d(a, b[..., None, None]) + c
        for a, b, c in ((grad_y.double(), weight.double(), more.double()), (grad_y, weight, more))
    )
    _compare(grad_x, exact, theirs)


def in_blocks(dtype, of_image):
    """A convolution of blocks, of an image of which one pixel is not finite."""
    torch.manual_seed(0)
    conv = cupyops.nn.Conv2d(3, 8, 7, stride=2, padding=3, bias=False).to(dtype, memory_format=LAST)
    x = torch.randn(2, 3, 16, 20).to(of_image).contiguous(memory_format=LAST)
    x[0, 1, 5, 6] = float("inf")
    with torch.no_grad():
        with torch.autocast("cpu", dtype, enabled=of_image is torch.float32):
            ours = blocks.of_blocks(conv, x, conv.weight)
        exact, theirs = (F.conv2d(x.to(t), conv.weight.to(t), None, 2, 3) for t in (torch.float64, dtype))
    finite = exact.isfinite()
    assert torch.equal(ours.isfinite(), finite) and not finite.all()
    _compare(ours[finite], exact[finite], theirs[finite])


def _compare(ours, exact, theirs):
    errors = [((one.double() - exact).norm() / exact.norm()).item() for one in (ours, theirs)]
    assert errors[0] <= 1.1 * errors[1], errors
