"""Convolutions with what is beside them: found in the graphs of a model, right, and left alone elsewhere."""

import copy
import dataclasses

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from compiled import assert_as_eager, compiled

import cupyops
from cupyops._compile import calls
from cupyops._compile.backend import programs
from cupyops._dispatch.conv import pointwise_fused
from cupyops._dispatch.core import gpu
from cupyops._operator.derivation import plans
from cupyops.nn import blocks

HALF = torch.bfloat16
LAST = torch.channels_last


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """The simulator's GPU with the shared memory of Hopper, and few multiprocessors."""
    monkeypatch.setattr(gpu, "_SIMULATED", dataclasses.replace(gpu._SIMULATED, multiprocessors=4, shared=232448))


def relative(found, true):
    return ((found.double() - true.double()).norm() / true.double().norm().clamp_min(1e-30)).item()


def called():
    """Functions of this library in the programs that were made last: forward, and backward."""
    found = []
    for program in programs:
        texts = [name.removeprefix("cupyops.") for name, _ in program.left if name.startswith("cupyops.")]
        found.append(
            [text.removesuffix(".default") for text in texts if text.startswith(("conv2d_", "batch_norm_act"))]
        )
    return found


class Bottleneck(nn.Module):
    """Convolutions of one tap around one of nine, each with its normalisation, and a residual connection."""

    def __init__(self, channels=32, inside=16, stride=1, shortcut=None):
        super().__init__()
        self.one = nn.Conv2d(channels, inside, 1, bias=False)
        self.two = nn.Conv2d(inside, inside, 3, stride, padding=1, bias=False)
        self.three = nn.Conv2d(inside, 32, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(n) for n in (inside, inside, 32))
        self.shortcut = None if shortcut is None else nn.Conv2d(channels, 32, 1, stride, bias=False)

    def forward(self, x):
        y = F.relu(self.norms[0](self.one(x)))
        y = F.relu(self.norms[1](self.two(y)))
        y = self.norms[2](self.three(y))
        return F.relu(y + (x if self.shortcut is None else self.shortcut(x)))


def trained(module, x, grad, run, steps=1):
    for _ in range(steps):
        module.zero_grad()
        given = x.clone().requires_grad_()
        y = run(given)
        y.backward(grad.to(y.dtype))
    return [y.detach(), given.grad, *(p.grad for p in module.parameters()), *module.buffers()]


def halved(module):
    """Filters of a half type in channels_last; normalisations of float32."""
    for one in module.modules():
        if isinstance(one, nn.Conv2d):
            one.to(HALF)
    return module.to(memory_format=LAST)


def compare(module, x, steps=1):
    """Compare with float64, beside PyTorch's own error; return the functions that were called."""
    eager, exact = copy.deepcopy(module), copy.deepcopy(module).double()
    grad = torch.randn_like(exact(x.double())) if steps else None
    exact = copy.deepcopy(module).double()
    want, true = trained(eager, x, grad, eager, steps), trained(exact, x.double(), grad, exact, steps)
    programs.clear()
    with cupyops.simulate("sm_90"):
        found = trained(module, x, grad, compiled(module), steps)
    for a, b, c in zip(want, found, true, strict=True):
        assert relative(b, c) <= 4 * relative(a, c) + 1e-6
    return called()


def images(*shape, dtype=HALF):
    return torch.randn(shape).to(dtype).contiguous(memory_format=LAST)


def test_moments_and_the_sum_of_gradients_of_a_residual_block():
    torch.manual_seed(0)
    forward, backward = compare(halved(Bottleneck()), images(4, 32, 8, 8))
    assert forward == ["conv2d_moments", "batch_norm_act", "batch_norm_act", "conv2d_moments", "batch_norm_act"]
    assert backward == [*["batch_norm_act_backward"] * 3, "conv2d_add"]


def test_steps_by_recorded_plans():
    torch.manual_seed(0)
    calls._planned.cache_clear()
    compare(halved(Bottleneck()), images(4, 32, 8, 8), steps=5)
    assert {"cupyops.conv2d_moments", "cupyops.conv2d_add"} <= {one.name for one in plans._all if one.plans}


@pytest.mark.parametrize("stride", [1, 2])
def test_a_shortcut_of_its_own(stride):
    """Both gradients are convolutions' then: the one without a step adds the other."""
    torch.manual_seed(0)
    forward, backward = compare(halved(Bottleneck(stride=stride, shortcut=True)), images(4, 32, 8, 8))
    assert forward.count("conv2d_moments") == 2 and backward.count("conv2d_add") == 1


def test_under_autocast_with_filters_of_float32():
    torch.manual_seed(0)
    module = Bottleneck().to(memory_format=LAST)
    exact = copy.deepcopy(module).double()
    x, grad = images(4, 32, 8, 8), torch.randn(4, 32, 8, 8)

    def under(run):
        def call(x):
            with torch.autocast("cpu", HALF):
                return run(x)

        return call

    eager = copy.deepcopy(module)
    want, true = trained(eager, x, grad, under(eager)), trained(exact, x.double(), grad, exact)
    programs.clear()
    with cupyops.simulate("sm_90"):
        found = trained(module, x, grad, under(compiled(module)))
    assert called()[0].count("conv2d_moments") == 2 and called()[1].count("conv2d_add") == 1
    for a, b, c in zip(want, found, true, strict=True):
        assert relative(b, c) <= 4 * relative(a, c) + 1e-6


@pytest.mark.parametrize(
    "why",
    [
        "contiguous",
        "float32",
        "pixels that are no multiple of 16",
        "a bias",
        "nine taps",
        "a step",
        "sizes that change",
    ],
)
def test_convolutions_that_leave_no_moments(why):
    torch.manual_seed(0)
    taps = 3 if why == "nine taps" else 1
    conv = nn.Conv2d(16, 16, taps, 2 if why == "a step" else 1, padding=taps // 2, bias=why == "a bias")
    module = nn.Sequential(conv, nn.BatchNorm2d(16), nn.ReLU())
    x = images(4, 16, 3 if why.startswith("pixels") else 4, 4 + (why == "a step") * 4)
    if why.startswith("pixels"):
        x = images(3, 16, 3, 5)
    if why == "float32":
        x = x.float()
    else:
        halved(module)
    if why == "contiguous":
        x = x.contiguous()
        module.to(memory_format=torch.contiguous_format)
    run = compiled(module, dynamic=why == "sizes that change")
    programs.clear()
    with cupyops.simulate("sm_90"):
        run(x.requires_grad_()).float().square().sum().backward()
    assert "conv2d_moments" not in [name for of in called() for name in of]


def test_a_gradient_that_is_broadcast_is_not_added():
    def function(x, w):
        return F.conv2d(x, w), x.sum((2, 3))

    made = assert_as_eager(function, [images(2, 16, 4, 8).requires_grad_(), images(16, 16, 1, 1).requires_grad_()])
    assert len(made) == 2 and "conv2d_add" not in called()[1]


def test_a_sum_that_is_computed_with_something_else_stays():
    def function(x, w):
        return F.conv2d(x, w).float().square().sum() + (x.float() * 2).sin().sum()

    x, w = images(2, 16, 4, 8).requires_grad_(), torch.randn(16, 16, 1, 1).to(HALF).requires_grad_()
    programs.clear()
    assert_as_eager(function, [x, w], dynamo=False)
    assert "conv2d_add" not in [name for of in called() for name in of]


class Stem(nn.Module):
    """The beginning of a ResNet, and something behind it."""

    def __init__(self, padding=3, taps=7, channels=3, **options):
        super().__init__()
        self.conv = nn.Conv2d(channels, 8, taps, 2, padding, bias=False, **options)
        self.norm = nn.BatchNorm2d(8)

    def forward(self, x):
        return F.relu(self.norm(self.conv(x)))


def begun(module, x, grad, run, steps=1):
    """A result and the gradients of parameters: none of the image is wanted."""
    for _ in range(steps):
        module.zero_grad()
        y = run(x)
        y.backward(grad.to(y.dtype))
    return [y.detach(), *(p.grad for p in module.parameters()), *module.buffers()]


@pytest.mark.parametrize("padding, channels", [(3, 3), (2, 1), (0, 3)])
def test_the_beginning_of_a_resnet_in_blocks_of_pixels(monkeypatch, padding, channels):
    monkeypatch.setattr(blocks, "LEAST", 1)
    torch.manual_seed(0)
    module = halved(Stem(padding, channels=channels))
    eager, exact = copy.deepcopy(module), copy.deepcopy(module).double()
    x = images(2, channels, 12, 16)
    grad = torch.randn_like(copy.deepcopy(exact)(x.double()))
    want, true = begun(eager, x, grad, eager, 5), begun(exact, x.double(), grad, exact, 5)
    programs.clear()
    calls._planned.cache_clear()
    with cupyops.simulate("sm_90"):
        found = begun(module, x, grad, compiled(module), 5)
    for a, b, c in zip(want, found, true, strict=True):
        assert relative(b, c) <= 4 * relative(a, c) + 1e-6
    assert "conv2d_blocks" in called()[0] and "conv2d_blocks_weight" in called()[1]
    assert {"cupyops.conv2d_blocks", "cupyops.conv2d_blocks_weight"} <= {one.name for one in plans._all if one.plans}


def test_a_gradient_of_the_image_is_pytorchs(monkeypatch):
    monkeypatch.setattr(blocks, "LEAST", 1)
    torch.manual_seed(0)
    forward, backward = compare(halved(Stem()), images(2, 3, 12, 16))
    assert "conv2d_blocks" in forward and "conv2d_blocks_weight" not in backward


NOT_IN_BLOCKS = {
    "a small result": (Stem(), (2, 3, 12, 16)),
    "five taps": (Stem(2, taps=5), (2, 3, 12, 16)),
    "four channels": (Stem(channels=4), (2, 4, 12, 16)),
    "an odd height": (Stem(), (2, 3, 13, 16)),
    "taps that lie apart": (Stem(dilation=2), (2, 3, 16, 16)),
}


@pytest.mark.parametrize("why", NOT_IN_BLOCKS)
def test_convolutions_that_are_not_in_blocks(monkeypatch, why):
    monkeypatch.setattr(blocks, "LEAST", 1 << 20 if why == "a small result" else 1)
    module, shape = NOT_IN_BLOCKS[why]
    module = halved(copy.deepcopy(module))
    programs.clear()
    with cupyops.simulate("sm_90"):
        compiled(module)(images(*shape)).float().sum().backward()
    assert not {"conv2d_blocks", "conv2d_blocks_weight"} & {name for of in called() for name in of}


def test_a_pixel_that_is_not_finite_spoils_what_sees_it_alone(monkeypatch):
    monkeypatch.setattr(blocks, "LEAST", 1)
    torch.manual_seed(0)
    conv, x = halved(nn.Conv2d(3, 8, 7, 2, 3, bias=False)), images(1, 3, 16, 16)
    x[0, 1, 5, 6] = float("nan")
    with cupyops.simulate("sm_90"), torch.no_grad():
        found = compiled(conv)(x)
    assert torch.equal(found.isnan(), conv(x).isnan()) and found.isnan().any() and not found.isnan().all()


def left(made):
    return [name.removeprefix("aten.") for program in made for name, _ in program.left]


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_patches_of_images_are_a_product(last, bias):
    def cut(x, weight, bias=None):
        return F.conv2d(x, weight, bias, (4, 2)).flatten(2).transpose(1, 2)

    torch.manual_seed(0)
    given = [torch.randn(2, 3, 8, 6).to(HALF), torch.randn(16, 3, 4, 2).to(HALF), torch.randn(16).to(HALF)][: 2 + bias]
    if last:
        given[0] = given[0].contiguous(memory_format=LAST)
    made = assert_as_eager(cut, [one.requires_grad_() for one in given])
    assert left(made) == ["addmm.default" if bias else "mm.default", *["mm.default"] * 2]


@pytest.mark.parametrize("module", [nn.Conv2d(3, 8, 4, 4), nn.Conv2d(3, 8, 4, 4, padding="valid", bias=False)])
def test_patches_under_autocast(module):
    module, exact, x = copy.deepcopy(module), copy.deepcopy(module).double(), torch.randn(2, 3, 8, 8)
    programs.clear()
    want, found = copy.deepcopy(module), compiled(module)
    results = []
    for run, of in ((want, want), (found, module)):
        with cupyops.simulate("sm_90"), torch.autocast("cpu", HALF):
            y = run(x)
            y.float().square().sum().backward()
        results.append([y.detach(), *(p.grad for p in of.parameters())])
    exact(x.double()).square().sum().backward()
    for a, b, c in zip(*results, [exact(x.double()).detach(), *(p.grad for p in exact.parameters())], strict=True):
        assert a.dtype is b.dtype and relative(b, c) <= 4 * relative(a, c) + 1e-6
    assert not any("convolution" in name for name in left(programs))


NO_PATCHES = {
    "float32": (nn.Conv2d(3, 8, 4, 4), (2, 3, 8, 8)),
    "eight channels": (nn.Conv2d(8, 8, 4, 4).to(HALF), (2, 8, 8, 8)),
    "padding": (nn.Conv2d(3, 8, 4, 4, padding=2).to(HALF), (2, 3, 8, 8)),
    "taps that lie apart": (nn.Conv2d(3, 8, 2, 2, dilation=2).to(HALF), (2, 3, 8, 8)),
    "groups": (nn.Conv2d(3, 6, 4, 4, groups=3).to(HALF), (2, 3, 8, 8)),
    "steps of another size": (nn.Conv2d(3, 8, 4, 2).to(HALF), (2, 3, 8, 8)),
    "a part of a patch": (nn.Conv2d(3, 8, 4, 4).to(HALF), (2, 3, 9, 8)),
    "one image": (nn.Conv2d(3, 8, 4, 4).to(HALF), (3, 8, 8)),
    "sizes that change": (nn.Conv2d(3, 8, 4, 4).to(HALF), (2, 3, 8, 8)),
}


@pytest.mark.parametrize("why", NO_PATCHES)
def test_what_is_not_cut_into_patches(why):
    module, shape = NO_PATCHES[why]
    x = torch.randn(shape).to(module.weight.dtype)
    programs.clear()
    with cupyops.simulate("sm_90"), torch.no_grad():
        found = compiled(module, dynamic=why == "sizes that change")(x)
    assert any("convolution" in name for name in left(programs))
    torch.testing.assert_close(found, module(x))


def test_functions_in_a_graph_where_no_kernel_is_chosen():
    """A graph that was made for Hopper gives the same elsewhere."""
    torch.manual_seed(0)
    x, grad_y, more, weight = (images(*shape) for shape in ((2, 8, 4, 4), (2, 16, 4, 4), (2, 8, 4, 4), (16, 8, 1, 1)))
    y, moments, counts = pointwise_fused.conv2d_moments(x, weight)
    exact = y.double()
    torch.testing.assert_close(y, F.conv2d(x, weight))
    torch.testing.assert_close(moments[0, :, 0].double(), exact.mean((0, 2, 3)), rtol=1e-5, atol=1e-6)
    var = moments[0, :, 1].double() / counts.double()
    torch.testing.assert_close(var, exact.var((0, 2, 3), correction=0), rtol=1e-5, atol=0)
    (grad_x,) = pointwise_fused.conv2d_add(grad_y, weight, more)
    torch.testing.assert_close(
        grad_x.double(), F.conv_transpose2d(grad_y.double(), weight.double()) + more, rtol=0.02, atol=0.05
    )
    x, weight = images(2, 3, 12, 16), images(8, 3, 7, 7).requires_grad_()
    (y,) = blocks.conv2d_blocks(x, weight, [3, 3])
    want = F.conv2d(x, weight, None, 2, 3)
    grad_y = images(*want.shape)
    (grad,) = blocks.conv2d_blocks_weight(grad_y, x, weight, [3, 3])
    assert torch.equal(y, want) and torch.equal(grad, torch.autograd.grad(want, weight, grad_y)[0])
    assert y.is_contiguous(memory_format=LAST)


@pytest.mark.parametrize("function", ["conv2d_moments", "conv2d_add"])
def test_operands_off_16_byte_boundaries_are_copied(function):
    torch.manual_seed(0)
    shifted = [torch.randn(n + 1).to(HALF)[1:] for n in (2 * 16 * 4 * 4, 8 * 16, 2 * 8 * 4 * 4)]
    y, weight, x = (
        shifted[0].view(2, 4, 4, 16).permute(0, 3, 1, 2),
        shifted[1],
        shifted[2].view(2, 4, 4, 8).permute(0, 3, 1, 2),
    )
    weight = weight.view(16, 8, 1, 1)
    assert not any(cupyops.aligned(one) for one in (x, y, weight))
    with cupyops.simulate("sm_90"):
        if function == "conv2d_moments":
            found, want = pointwise_fused.conv2d_moments(x, weight)[0], F.conv2d(x.double(), weight.double())
        else:
            found = pointwise_fused.conv2d_add(y, weight, x)[0]
            want = F.conv_transpose2d(y.double(), weight.double()) + x.double()
    assert relative(found, want) < 4e-3
