"""Products of a convolution of one tap that leave moments for a normalisation, and that add the gradient of the image's
other reader."""

import contextlib

import pytest
import torch
from torch.nn import functional as F

import cupyops
from cupyops._dispatch.conv.pointwise_fused import ADDED, MOMENTS, conv2d_add, conv2d_moments, problem_of
from cupyops._dispatch.core import cards
from cupyops.testing import assume_gpu

HALF = [torch.bfloat16, torch.float16]
LAST = torch.channels_last
# images, channels, filters, height, width: several tiles of a block, tails of 16 pixels and of 8 filters, and none
SHAPES = [(5, 64, 128, 8, 8), (1, 72, 200, 4, 4), (7, 136, 264, 4, 4), (1, 8, 8, 4, 4), (2, 64, 64, 8, 10)]


@pytest.fixture(params=["simulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def run(request):
    """A context in which the kernels run, and the device of the tensors."""
    if request.param == "gpu":
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("the kernels are of Hopper")
        return lambda: cupyops.never_slower(False), "cuda"

    def simulated():
        stack = contextlib.ExitStack()
        stack.enter_context(assume_gpu(multiprocessors=4, shared=232448))
        stack.enter_context(cupyops.simulate("sm_90"))
        return stack

    return simulated, "cpu"


def drawn(shape, dtype, device):
    """An image, filters of one tap, and the gradients of the result and of the image's other reader."""
    images, channels, filters, *size = shape
    torch.manual_seed(0)
    weight = (torch.rand(filters, channels, 1, 1, device=device) * 2 - 1).to(dtype) / channels**0.5
    found = [torch.randn(images, c, *size, device=device).to(dtype) for c in (channels, filters, channels)]
    x, grad_y, more = (one.contiguous(memory_format=LAST) for one in found)
    return x, weight, grad_y, more


def error(found, expected):
    return ((found.double() - expected).norm() / expected.norm()).item()


def variances(moments, counts):
    """Mean and biased variance of all parts together, in float64."""
    moments, counts = moments.double(), counts.double()
    mean = (moments[..., 0] * counts[:, None]).sum(0) / counts.sum()
    square = (moments[..., 1] + counts[:, None] * (moments[..., 0] - mean) ** 2).sum(0)
    return mean, square / counts.sum()


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_moments(run, shape, dtype):
    """Compare results with float64, where at most 1.05 times the error of PyTorch's convolution is allowed."""
    context, device = run
    x, weight, *_ = drawn(shape, dtype, device)
    expected, theirs = F.conv2d(x.double(), weight.double()), F.conv2d(x, weight)
    with context(), cupyops.trace() as trace:
        y, moments, counts = conv2d_moments(x, weight)
    assert [launch.kernel.partition("<")[0] for launch in trace.launches()] == ["conv2d_moments_wgmma"]
    assert error(y, expected) <= 1.05 * error(theirs, expected) and y.is_contiguous(memory_format=LAST)
    exact = y.double()
    assert counts.double().sum() == y.numel() // y.shape[1]
    (mean, var), wanted = variances(moments, counts), exact.var((0, 2, 3), unbiased=False)
    assert ((mean - exact.mean((0, 2, 3))).abs() <= 1e-6 * wanted.sqrt()).all()
    torch.testing.assert_close(var, wanted, rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_gradient_with_another_added(run, shape, dtype):
    """Compare the sum with float64, beside PyTorch's, which rounds both parts before it adds them."""
    context, device = run
    x, weight, grad_y, more = drawn(shape, dtype, device)
    expected = F.conv_transpose2d(grad_y.double(), weight.double()) + more.double()
    theirs = F.conv_transpose2d(grad_y, weight) + more
    with context(), cupyops.trace() as trace:
        (grad_x,) = conv2d_add(grad_y, weight, more)
    assert [launch.kernel.partition("<")[0] for launch in trace.launches()] == ["conv2d_add_wgmma"]
    assert error(grad_x, expected) <= 1.05 * error(theirs, expected) and grad_x.is_contiguous(memory_format=LAST)


def test_moments_of_a_large_mean(run):
    """Nothing cancels where the mean is hundreds of deviations."""
    context, device = run
    x, weight, *_ = drawn((4, 64, 64, 8, 8), torch.float16, device)
    x[:, 0], weight[:, 0] = 1, 300
    with context():
        y, *of = conv2d_moments(x, weight)
    exact = y.double()
    assert exact.mean() > 100 * exact.var((0, 2, 3)).sqrt().mean()
    torch.testing.assert_close(variances(*of)[1], exact.var((0, 2, 3), unbiased=False), rtol=1e-4, atol=0)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite(run, value):
    """It spoils its own channels alone."""
    context, device = run
    x, weight, *_ = drawn((4, 64, 64, 8, 8), torch.bfloat16, device)
    weight[3] = value
    with context():
        _, moments, counts = conv2d_moments(x, weight)
    spoilt = ~torch.stack(variances(moments, counts)).isfinite().all(0)
    assert spoilt.nonzero().flatten().tolist() == [3]


def test_bits_are_the_same_every_time(run):
    context, device = run
    x, weight, grad_y, more = drawn(SHAPES[0], torch.bfloat16, device)
    found = []
    for _ in range(2):
        with context():
            found.append((*conv2d_moments(x, weight), *conv2d_add(grad_y, weight, more)))
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_where_it_is_faster():
    """ResNet-50's at 128 images, and neither few pixels nor another GPU."""
    card = next(card.gpu for card in cards.CARDS if card.name == "H100")
    other = next(card.gpu for card in cards.CARDS if card.name == "A100")

    def chosen(forms, channels, filters, size, images=128, turned=False, gpu=card):
        image = torch.empty(images, channels, size, size, dtype=torch.bfloat16, device="meta")
        return forms.choose(problem_of(image, filters, turned), gpu).name

    wide = [(64, 256, 56), (128, 512, 28), (256, 1024, 14), (512, 2048, 7)]
    for narrow, expanded, size in wide:
        assert chosen(MOMENTS, narrow, expanded, size) == "wgmma_128x128"
        assert chosen(ADDED, expanded, narrow, size, turned=True) == "wgmma_128x128"
    assert [chosen(MOMENTS, c, f, size) for f, c, size in wide] == ["wgmma_128x128"] * 3 + ["apart"]
    for forms in (MOMENTS, ADDED):
        turned = forms is ADDED
        assert chosen(forms, 256, 64, 14, images=2, turned=turned) == "apart"
        assert chosen(forms, 256, 64, 56, turned=turned, gpu=other) == "apart"
