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
from cupyops._dispatch import gpu
from cupyops._operator.derivation import plans

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
        texts = [getattr(node.target, "__name__", "") for node, _ in program.lowering.left]
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
    """As near to float64 as PyTorch; the functions that were called."""
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
