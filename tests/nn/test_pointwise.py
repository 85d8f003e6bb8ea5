"""Convolutions of one tap that leave moments for a normalisation, and add the gradient of their image's other reader."""

import contextlib
import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cupyops
from cupyops._dispatch.conv.pointwise_fused import ADDED, MOMENTS, problem_of
from cupyops._dispatch.core import cards
from cupyops.nn.pointwise import moments_of, pointwise
from cupyops.testing import assume_gpu

HALF = [torch.bfloat16, torch.float16]
LAST = torch.channels_last
# images, channels, filters, height, width: several tiles of a block, tails of 16 pixels and of 8 filters, and none
SHAPES = [(5, 64, 128, 8, 8), (1, 72, 200, 4, 4), (7, 136, 264, 4, 4), (1, 8, 8, 4, 4), (2, 64, 64, 8, 10)]


@pytest.fixture(autouse=True)
def in_a_graph(monkeypatch):
    """All of this is for CUDA graphs."""
    monkeypatch.setattr("cupyops.nn.pointwise.graphed", lambda: True)


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


def layer(shape, dtype, device, weight=None):
    """A convolution, an image, and the gradients of its result and of the image's other reader."""
    images, channels, filters, *size = shape
    torch.manual_seed(0)
    conv = cupyops.nn.Conv2d(channels, filters, 1, bias=False, device=device).to(weight or dtype)
    drawn = [torch.randn(images, c, *size, device=device).to(dtype) for c in (channels, filters, channels)]
    return conv, *(one.contiguous(memory_format=LAST) for one in drawn)


def results(y, again, x, weight, grad_y, more):
    return y, *torch.autograd.grad((y, again), (x, weight), (grad_y, more))


def norms(tensors, expected):
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(tensors, expected)]


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_moments_and_gradients(run, shape, dtype):
    """As near to float64 as PyTorch, each of which rounds the gradient's two parts before it adds them."""
    context, device = run
    conv, x, grad_y, more = layer(shape, dtype, device)
    x.requires_grad_()
    truth = x.detach().double().requires_grad_(), conv.weight.detach().double().requires_grad_()
    expected = results(F.conv2d(*truth), truth[0], *truth, grad_y.double(), more.double())
    theirs = results(F.conv2d(x, conv.weight), x, x, conv.weight, grad_y, more)
    with context(), cupyops.trace() as trace:
        y, again = pointwise(conv, x, True, True)
        moments, counts = (one.double() for one in moments_of(y))
        ours = results(y, again, x, conv.weight, grad_y, more)
    launched = [launch.kernel.partition("<")[0] for launch in trace.launches()]
    assert launched[0] == "conv2d_moments_wgmma" and "conv2d_add_wgmma" in launched
    for a, b in zip(norms(ours, expected), norms(theirs, expected)):
        assert a <= 1.05 * b
    assert y.is_contiguous(memory_format=LAST) and ours[1].is_contiguous(memory_format=LAST)
    exact, count = y.detach().double(), counts.sum()
    assert count == y.numel() // y.shape[1]
    mean = (moments[..., 0] * counts[:, None]).sum(0) / count
    square = (moments[..., 1] + counts[:, None] * (moments[..., 0] - mean) ** 2).sum(0)
    var = exact.var((0, 2, 3), unbiased=False)
    assert ((mean - exact.mean((0, 2, 3))).abs() <= 1e-6 * var.sqrt()).all()
    torch.testing.assert_close(square / count, var, rtol=1e-5, atol=0)


def test_moments_of_a_large_mean(run):
    """Nothing cancels where the mean is hundreds of deviations."""
    context, device = run
    conv, x, *_ = layer((4, 64, 64, 8, 8), torch.float16, device)
    with torch.no_grad():
        x[:, 0], conv.weight[:, 0] = 1, 300
    with context():
        of, _ = pointwise(conv, x, True, False)
        assert of.double().mean() > 100 * of.double().var((0, 2, 3)).sqrt().mean()
        y = cupyops.nn.BatchNorm2d(64, device=device)(of)
    expected = F.batch_norm(of.double(), None, None, training=True)
    torch.testing.assert_close(y.double(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_what_is_not_finite(run, value):
    """It spoils its own channels alone."""
    context, device = run
    conv, x, *_ = layer((4, 64, 64, 8, 8), torch.bfloat16, device)
    with torch.no_grad():
        conv.weight[3] = value
    with context():
        y, _ = pointwise(conv, x, True, False)
        y = cupyops.nn.BatchNorm2d(64, device=device)(y)
    spoilt = ~y.isfinite().flatten(2).all(2).all(0)
    assert spoilt.nonzero().flatten().tolist() == [3]


def test_bits_are_the_same_every_time(run):
    context, device = run
    conv, x, grad_y, more = layer(SHAPES[0], torch.bfloat16, device)
    x.requires_grad_()
    found = []
    for _ in range(2):
        with context():
            y, again = pointwise(conv, x, True, True)
            found.append((*moments_of(y), *results(y, again, x, conv.weight, grad_y, more)))
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_float32_weights_under_autocast(run):
    """Their gradient is of float32, and is not rounded to the half type on the way."""
    context, device = run
    conv, x, grad_y, more = layer(SHAPES[0], torch.bfloat16, device, torch.float32)
    x.requires_grad_()
    with context(), torch.autocast(device, torch.bfloat16):
        y, again = pointwise(conv, x, True, True)
    with context():
        _, grad_x, grad_weight = results(y, again, x, conv.weight, grad_y, more)
    exact = torch.einsum("nohw,nchw->oc", grad_y.double(), x.detach().double())
    assert grad_weight.dtype is torch.float32 and grad_weight.stride() == conv.weight.stride()
    torch.testing.assert_close(grad_weight.double().flatten(1), exact, rtol=1e-4, atol=1e-4)


def test_what_is_not_wanted(run):
    """Gradients of one of the two, and readers that give none."""
    context, device = run
    conv, x, grad_y, more = layer(SHAPES[3], torch.bfloat16, device)

    def call():
        with context():
            return pointwise(conv, x, True, True)

    y, again = call()
    assert again is x and not again.requires_grad
    torch.testing.assert_close(
        torch.autograd.grad(y, conv.weight, grad_y)[0],
        torch.autograd.grad(F.conv2d(x, conv.weight), conv.weight, grad_y)[0], rtol=2e-2, atol=2e-2,
    )  # fmt: skip
    x.requires_grad_()
    y, again = call()
    assert torch.equal(torch.autograd.grad(again, x, more)[0], more)
    y, again = call()
    expected = torch.autograd.grad(F.conv2d(x, conv.weight), x, grad_y)[0]
    torch.testing.assert_close(torch.autograd.grad(y, x, grad_y)[0], expected, rtol=2e-2, atol=2e-2)
    conv.requires_grad_(False)
    y, again = call()
    with context():
        found = torch.autograd.grad((y, again), x, (grad_y.contiguous(), more.contiguous()))[0]
    torch.testing.assert_close(found, expected + more, rtol=2e-2, atol=2e-2)


def test_second_derivatives(run):
    context, device = run
    conv, x, grad_y, more = layer(SHAPES[3], torch.bfloat16, device)
    x.requires_grad_(), grad_y.requires_grad_()
    found = []
    for call in (lambda: pointwise(conv, x, True, True), lambda: (F.conv2d(x, conv.weight), x)):
        with context():
            y, again = call()
            first = torch.autograd.grad((y, again), (x, conv.weight), (grad_y, more), create_graph=True)
            found.append(torch.autograd.grad(sum((one**2).sum() for one in first), (x, conv.weight, grad_y)))
    torch.testing.assert_close(*found, rtol=5e-2, atol=5e-2)


def test_moments_are_those_of_the_result_as_it_was(run):
    """Where it has been changed since, or is another tensor, a pass finds its moments."""
    context, device = run
    conv, x, *_ = layer(SHAPES[0], torch.bfloat16, device)
    with context():
        y, _ = pointwise(conv, x, True, False)
        assert moments_of(y) is not None and moments_of(y.view_as(y)) is None
        with torch.no_grad():
            y.mul_(3)
        assert moments_of(y) is None
        assert moments_of(copy.deepcopy(y.detach())) is None
        left = pickle.loads(pickle.dumps(y._cupyops_moments))
        assert left is None


def test_what_is_left_alone(run, monkeypatch):
    context, device = run
    conv, x, *_ = layer(SHAPES[0], torch.bfloat16, device)

    def none(conv=conv, x=x):
        with context():
            return pointwise(conv, x, True, True) is None

    assert not none()
    monkeypatch.setattr("cupyops.nn.pointwise.graphed", lambda: False)
    assert none()
    monkeypatch.setattr("cupyops.nn.pointwise.graphed", lambda: True)
    assert none(x=x.contiguous()) and none(x=x.float()) and none(x=x[:, :32]) and none(x=x[0])
    assert none(conv=copy.deepcopy(conv).half())
    for other in (dict(bias=True), dict(stride=2), dict(padding=1), dict(groups=2), dict(kernel_size=3, padding=1)):
        of = cupyops.nn.Conv2d(64, 128, **{"kernel_size": 1, "bias": False, **other}, device=device).to(x.dtype)
        assert none(conv=of), other
    with torch.no_grad():
        assert none()
    with torch.inference_mode():
        assert none()
    seventh = torch.randn(1, 64, 7, 7, device=device).to(x.dtype).contiguous(memory_format=LAST)
    with context():  # 49 pixels are no multiple of what a warp measures
        assert pointwise(conv, seventh, True, False) is None


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


# --- in a model ---


class Bottleneck(nn.Module):
    """As timm's ResNets have them."""

    def __init__(self, channels, width, out, down=False):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out)
        self.act1, self.act2, self.act3 = (nn.ReLU(inplace=True) for _ in range(3))
        conv = nn.Conv2d(channels, out, 1, bias=False)
        self.downsample = nn.Sequential(conv, nn.BatchNorm2d(out)) if down else None

    def forward(self, x):
        shortcut = x
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.act2(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        if self.downsample is not None:
            shortcut = self.downsample(shortcut)
        x += shortcut
        return self.act3(x)


class Normalised(Bottleneck):
    """The image's other reader is a normalisation, which could change it in place."""

    def forward(self, x):
        y = self.act1(self.bn1(self.conv1(x)))
        return y, self.bn3(x)


def net(device, dtype=torch.bfloat16):
    torch.manual_seed(0)
    model = nn.Sequential(Bottleneck(64, 32, 128, down=True), Bottleneck(128, 64, 128))
    for one in model.modules():
        if isinstance(one, nn.BatchNorm2d):
            nn.init.uniform_(one.weight, 0.5, 1.5), nn.init.normal_(one.bias)
    return model.to(device, dtype).to(memory_format=LAST)


def image(device, dtype=torch.bfloat16):
    torch.manual_seed(1)
    return torch.randn(2, 64, 8, 8, device=device).to(dtype).contiguous(memory_format=LAST)


def trained(model, x, context):
    """Result, gradients and statistics of a step, and how often each kernel was launched."""
    leaf = x.clone().requires_grad_()
    with context(), cupyops.trace() as trace:
        y = model(leaf)
        torch.manual_seed(2)
        y.backward(torch.randn(y.shape).to(y))
    launched = [launch.kernel.partition("<")[0] for launch in trace.launches()]
    buffers = [b.clone() for b in model.buffers() if b.is_floating_point()]
    found = y.detach(), leaf.grad, *(p.grad for p in model.parameters()), *buffers
    return found, {name: launched.count(name) for name in ("conv2d_moments_wgmma", "conv2d_add_wgmma")}


def test_swapped_blocks(run):
    """Each convolution of one tap that a normalisation reads, and each image with two readers."""
    context, device = run
    model, x = net(device), image(device)
    truth, _ = trained(copy.deepcopy(model).double(), x.double(), contextlib.nullcontext)
    theirs, _ = trained(copy.deepcopy(model), x, contextlib.nullcontext)
    cupyops.swap(model)
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        ours, counted = trained(one, x, context)
        assert counted == {"conv2d_moments_wgmma": 5, "conv2d_add_wgmma": 2}
        for a, b in zip(norms(ours, truth), norms(theirs, truth)):
            assert a <= 1.5 * b + 1e-6


def test_swapped_blocks_where_moments_are_not_wanted(run):
    context, device = run
    model, x = net(device), image(device)
    cupyops.swap(model)
    model[0].bn3.eval()
    assert trained(model, x, context)[1] == {"conv2d_moments_wgmma": 4, "conv2d_add_wgmma": 2}
    model.eval()
    assert trained(model, x, context)[1] == {"conv2d_moments_wgmma": 0, "conv2d_add_wgmma": 2}
    model.train()
    with context(), torch.no_grad(), cupyops.trace() as trace:
        model(x)
    assert not any("moments" in launch.kernel for launch in trace.launches())


def test_swapped_blocks_with_listeners(run):
    """Hooks on a convolution are called, and a result that one changes is normalised as it is."""
    context, device = run
    model, x = net(device), image(device)
    plain = copy.deepcopy(model)
    cupyops.swap(model)
    for one in (model, plain):
        one[1].conv1.register_forward_hook(lambda module, args, y: 2 * y)
        one[1].conv3.register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    theirs, _ = trained(plain, x, contextlib.nullcontext)
    ours, counted = trained(model, x, context)
    assert counted == {"conv2d_moments_wgmma": 3, "conv2d_add_wgmma": 1}
    assert (ours[0] - theirs[0]).norm() <= 2e-2 * theirs[0].norm()


def test_swapped_blocks_that_are_given_other_convolutions(run):
    context, device = run
    model, x = net(device), image(device)
    cupyops.swap(model)
    model[1].conv1 = nn.Conv2d(128, 64, 1, bias=False, device=device, dtype=x.dtype)
    assert trained(model, x, context)[1] == {"conv2d_moments_wgmma": 4, "conv2d_add_wgmma": 1}


def test_readers_that_are_not_known(run):
    context, device = run
    model = Normalised(64, 32, 64).to(device, torch.bfloat16).to(memory_format=LAST)
    cupyops.swap(model)
    with context(), cupyops.trace() as trace:
        sum(y.float().sum() for y in model(image(device).requires_grad_())).backward()
    assert not any("conv2d_add" in launch.kernel for launch in trace.launches())
