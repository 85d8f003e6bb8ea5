"""gelu of a layer's results, which adds the layer's bias where autocast has the layer in a half type."""

import contextlib
import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cupyops
from cupyops.nn import halves, linear
from cupyops.nn._swap import activated
from cupyops.testing import assume_gpu

HALF = torch.bfloat16
HOPPER = {"capability": 9, "multiprocessors": 132, "shared": 232448, "library": True}


class Nested(nn.Module):
    def __init__(self, approximate="none", bias=True):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(24, 40, bias), nn.GELU(approximate), nn.Linear(40, 24)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


class Lines(Nested):
    def forward(self, x, twice: bool = False):
        y = self.up(x)
        y = self.act(y)
        if twice:
            y = self.down(y)
            y = self.up(y)
            y = self.act(y)
        y = self.down(y)
        return x + y


class Others(Nested):
    """What is none: something between, another name, a result that is read again."""

    def forward(self, x):
        y = self.up(x)
        y = 2 * y
        y = self.act(y)
        z = self.up(x)
        a = self.act(z)
        b = self.up(x)
        b, c = self.act(b), b
        return x + self.down(y + a + z + b + c)


class Mine(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1 + torch.erf(x / 2**0.5))


class Steps(Nested):
    def __init__(self):
        super().__init__()
        self.act = Mine()


MODELS = {
    "nested": (Nested, 1),
    "tanh": (lambda: Nested("tanh"), 1),
    "lines": (Lines, 1),
    "steps": (Steps, 1),
    "without bias": (lambda: Nested(bias=False), 0),
    "others": (Others, 0),
}


@pytest.fixture(params=["cpu", "library", "simulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def where(request, monkeypatch):
    """A device on which layers are of half types, and the context to run in."""
    monkeypatch.setattr(halves, "captured", lambda: True)
    if request.param == "gpu":
        return "cuda", contextlib.nullcontext

    def is_lowered(x, weight, bias):
        return x.dtype is HALF and x.requires_grad and type(weight) is nn.Parameter and torch.is_grad_enabled()

    monkeypatch.setattr(linear, "_is_lowered", is_lowered)

    def simulated():
        stack = contextlib.ExitStack()
        if request.param != "cpu":
            stack.enter_context(cupyops.simulate("sm_90"))
        if request.param == "library":
            stack.enter_context(assume_gpu(**HOPPER))
        return stack

    return "cpu", simulated


@pytest.fixture
def counted(monkeypatch):
    """How often a bias was added by gelu."""
    calls = []
    before = activated.bias_gelu
    monkeypatch.setattr(activated, "bias_gelu", lambda *args: calls.append(1) or before(*args))
    return calls


def data(device):
    return torch.randn(2, 9, 24, generator=torch.Generator().manual_seed(1)).to(device, HALF).requires_grad_()


def step(module, x, context=contextlib.nullcontext, **options):
    with context(), torch.autocast(x.device.type, HALF):
        y = module(1 * x, **options)
        grads = torch.autograd.grad(y.float().square().sum(), [x, *module.parameters()])
    return [y.detach(), *grads]


def made(name, device):
    torch.manual_seed(0)
    return MODELS[name][0]().to(device)


@pytest.mark.parametrize("name", MODELS)
def test_values_and_gradients(where, counted, name):
    """As near to float64 as PyTorch's, and of the types of PyTorch's."""
    device, context = where
    module, x = made(name, device), data(device)
    exact = copy.deepcopy(module).double()
    with contextlib.nullcontext():
        y = exact(inside := x.detach().double().requires_grad_())
        truth = [y, *torch.autograd.grad(y.square().sum(), [inside, *exact.parameters()])]
    theirs = step(module, x)
    swapped = cupyops.swap(module)
    assert any("gelu of a layer" in one.what for one in swapped.replaced) is bool(MODELS[name][1])
    for _ in range(4):
        ours = step(module, x, context)
        for a, b, c in zip(ours, theirs, truth):
            assert a.dtype is b.dtype and a.shape == c.shape
            assert (a - c).norm() <= 1.3 * (b - c).norm() + 1e-3 * c.norm()
    assert len(counted) == 4 * MODELS[name][1]
    swapped.undo()
    assert all(map(torch.equal, step(module, x), theirs)) and len(counted) == 4 * MODELS[name][1]


def test_arguments_and_hooks(where, counted):
    device, context = where
    module, x = made("lines", device), data(device)
    cupyops.swap(module)
    step(module, x, context, twice=True)
    assert len(counted) == 2
    seen = []
    for one in (module.up, module.act):
        hook = one.register_forward_hook(lambda layer, args, y: seen.append((args[0].shape[-1], y.shape[-1])))
        step(module, x, context)
        hook.remove()
    assert seen == [(24, 40), (40, 40)] and len(counted) == 2
    module.act.forward = lambda x: F.relu(x)
    expected = F.relu(F.linear(x.float(), module.up.weight, module.up.bias))
    found = step(module, x, context)[0] - x
    torch.testing.assert_close(
        found.float(), F.linear(expected, module.down.weight, module.down.bias), rtol=0.1, atol=0.1
    )
    assert len(counted) == 2


def test_where_nothing_is_lowered(where, counted):
    """Without autocast, without gradients, of other types."""
    device, context = where
    module = made("nested", device)
    x = data(device).float()
    expected = module(x)
    cupyops.swap(module)
    with context():
        torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-4)
        with torch.no_grad(), torch.autocast(device, HALF):
            torch.testing.assert_close(module(x.to(HALF)), expected, rtol=0.1, atol=0.1, check_dtype=False)
        torch.testing.assert_close(module.double()(x.double()), expected.double(), rtol=1e-4, atol=1e-4)
    assert not counted


def test_what_is_left_out(where, counted):
    device, context = where
    x = data(device)
    for options in (dict(exact=True), dict(skip=nn.GELU), dict(skip=nn.Linear)):
        module = made("nested", device)
        cupyops.swap(module, **options)
        step(module, x, context)
    assert not counted


def test_copied_and_pickled(where, counted):
    device, context = where
    module, x = made("nested", device), data(device)
    cupyops.swap(module)
    expected = step(module, x, context)
    for one in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert all(map(torch.equal, step(one, x, context), expected))
    assert len(counted) == 3
