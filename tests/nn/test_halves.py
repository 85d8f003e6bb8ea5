"""Parameters of float32 that are copied to a half type at once, as a model's forward begins under autocast."""

import contextlib
import copy
import pickle

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import cupyops
from cupyops.nn import halves, linear
from cupyops.testing import assume_gpu

HALF = torch.bfloat16
HOPPER = {"capability": 9, "multiprocessors": 132, "shared": 232448, "library": True}


class Block(nn.Module):
    def __init__(self, bias=True, size=24):
        super().__init__()
        self.up, self.down = nn.Linear(size, 2 * size, bias), nn.Linear(2 * size, size)
        self.again = False

    def forward(self, x):
        call = (lambda y: checkpoint(self.inside, y, use_reentrant=False)) if self.again else self.inside
        return x + call(x)

    def inside(self, x):
        return self.down(torch.relu(self.up(x)))


def model():
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(bias=False), nn.Linear(24, 7))


@pytest.fixture(params=["cpu", "library", pytest.param("gpu", marks=pytest.mark.gpu)])
def where(request, monkeypatch):
    """A device on which layers take copies, the context to run in, and how often one of a parameter was made by itself."""
    if request.param == "gpu":
        return "cuda", contextlib.nullcontext

    def is_lowered(x, weight, bias):
        return x.dtype is HALF and x.requires_grad and type(weight) is nn.Parameter and weight.requires_grad

    monkeypatch.setattr(linear, "_is_lowered", is_lowered)

    def by_library():
        stack = contextlib.ExitStack()
        stack.enter_context(cupyops.simulate("sm_90"))
        stack.enter_context(assume_gpu(**HOPPER))
        return stack

    return "cpu", by_library if request.param == "library" else contextlib.nullcontext


class Given:
    """What layers were given, in the place of the operator."""

    def __init__(self, monkeypatch):
        self.calls = []
        before = linear.linear_lowered

        def given(*args):
            self.calls.append(args)
            return before(*args)

        monkeypatch.setattr(linear, "linear_lowered", given)

    def taken(self):
        """How many layers were called since, and how many of them had copies."""
        calls, self.calls = self.calls, []
        return len(calls), sum(len(args) > 3 for args in calls)


def step(module, x, context=contextlib.nullcontext):
    with context(), torch.autocast(x.device.type, HALF):
        y = module(2 * x)
        grads = torch.autograd.grad(y.float().square().sum(), [x, *module.parameters()])
    return y.detach(), grads


def data(device):
    return torch.randn(5, 24, generator=torch.Generator().manual_seed(1)).to(device, HALF).requires_grad_()


def test_values_are_those_without(where, monkeypatch):
    """Bit by bit; from the second forward on every layer has copies, and after it there are none."""
    device, context = where
    module, x = model().to(device), data(device)
    expected = step(module, x)
    cupyops.swap(module, only=nn.Linear)
    given = Given(monkeypatch)
    found = [step(module, x, context) for _ in range(5)]
    assert given.taken() == (25, 20)
    for y, grads in found:
        torch.testing.assert_close(y, expected[0], rtol=2e-2, atol=2e-2)
        for a, b, one in zip(grads, expected[1], [x, *module.parameters()]):
            assert a.dtype is one.dtype and (a - b).norm() <= 2e-2 * b.norm()
    assert all(torch.equal(a, b) for a, b in zip(found[1][1], found[-1][1]))
    assert not any(hasattr(one, "_cupyops_half") for one in module.parameters())


def test_what_changes_is_copied_anew(where, monkeypatch):
    device, context = where
    module, x = model().to(device), data(device)
    cupyops.swap(module, only=nn.Linear)
    twin = copy.deepcopy(module)
    cupyops.swap(twin)
    for _ in range(2):
        step(module, x, context)
    for change in (
        lambda one: one.mul_(0.5),
        lambda one: one.data.mul_(-0.5),  # of which no version tells
        lambda one: setattr(one, "data", one.data.flip(0).contiguous()),
    ):
        with torch.no_grad():
            for one in module.parameters():
                change(one)
        twin.load_state_dict(module.state_dict())
        found = step(module, x, context)
        expected = step(copy.deepcopy(twin), x, context)
        assert torch.equal(found[0], expected[0]) and all(map(torch.equal, found[1], expected[1]))


@pytest.mark.parametrize("change", ["in place", "data"])
def test_what_changes_in_between_is_not_taken(where, monkeypatch, change):
    """By a hook of a layer, by one of another module, by a subclass."""
    device, context = where
    module, x = model().to(device), data(device)
    cupyops.swap(module, only=nn.Linear)
    for _ in range(2):
        step(module, x, context)
    given = Given(monkeypatch)

    def halve(layer, args):
        with torch.no_grad():
            if change == "data":
                layer.weight.data = 0.5 * layer.weight.data
            else:
                layer.weight.mul_(0.5)

    hook = module[1].register_forward_pre_hook(lambda block, args: halve(block.down, args))
    weight = module[1].down.weight.detach().clone()
    step(module, x, context)
    assert given.calls[3][1] is module[1].down.weight and len(given.calls[3]) == 3
    assert torch.equal(module[1].down.weight, 0.5 * weight) and given.taken() == (5, 4)
    hook.remove()
    module[0].up.register_forward_pre_hook(halve)
    step(module, x, context)
    assert len(given.calls[0]) == 3


def test_forwards_that_change_data_have_none(where, monkeypatch):
    device, context = where

    class Clamped(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Linear(24, 24), nn.Linear(24, 3)

        def forward(self, x):
            self.last.weight.data.clamp_(-0.1, 0.1)
            return self.last(self.first(x))

    module, x = Clamped().to(device), data(device)
    cupyops.swap(module, only=nn.Linear)
    given = Given(monkeypatch)
    for _ in range(3):
        step(module, x, context)
    assert given.taken() == (6, 0) and not module._forward_pre_hooks


def test_checkpoints(where, monkeypatch):
    """What is computed again in backward is what was computed: without copies, both times."""
    device, context = where
    module, x = model().to(device), data(device)
    cupyops.swap(module, only=nn.Linear)
    expected = [step(module, x, context) for _ in range(3)][-1]
    module[0].again = module[1].again = True
    given = Given(monkeypatch)
    for _ in range(3):
        found = step(module, x, context)
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert given.taken() == (3 * (5 + 4), 3)


def test_after_an_error_without_gradients_and_undone(where, monkeypatch):
    device, context = where
    module, x = model().to(device), data(device)
    swapped = cupyops.swap(module, only=nn.Linear)
    for _ in range(2):
        step(module, x, context)
    with pytest.raises((RuntimeError, cupyops.errors.InputError)), torch.autocast(device, HALF):
        module(torch.zeros(5, 23, device=device, dtype=HALF, requires_grad=True) * 1)
    assert halves._thread.model is None
    assert not any(hasattr(one, "_cupyops_half") for one in module.parameters())
    given = Given(monkeypatch)
    with torch.no_grad(), torch.autocast(device, HALF):
        module(x)
    step(module, x, context)
    step(module, x, context)
    assert given.taken()[1] >= 5
    swapped.undo()
    assert not module._forward_pre_hooks and not module._forward_hooks and not module._forward_hooks_always_called


def test_copies_of_a_model_have_copies_of_their_own(where):
    device, context = where
    module, x = model().to(device), data(device)
    cupyops.swap(module, only=nn.Linear)
    for _ in range(2):
        step(module, x, context)
    for made in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        expected = step(module, x, context)
        found = [step(made, x, context) for _ in range(3)][-1]
        assert torch.equal(found[0], expected[0]) and all(map(torch.equal, found[1], expected[1]))
        (hook,) = made._forward_pre_hooks.values()
        (theirs,) = module._forward_pre_hooks.values()
        assert hook.__self__ is not theirs.__self__ and len(hook.__self__.asked) == 9
        assert {*map(id, hook.__self__.asked)} <= {*map(id, made.parameters())}


def test_a_model_inside_another(where, monkeypatch):
    """The outer one's copies serve; by itself the inner one has its own."""
    device, context = where
    module, x = model().to(device), data(device)
    cupyops.swap(module[0], only=nn.Linear)
    cupyops.swap(module, only=nn.Linear)
    given = Given(monkeypatch)
    for _ in range(3):
        step(module, x, context)
    assert given.taken() == (15, 10)
    for _ in range(3):
        with context(), torch.autocast(device, HALF):
            module[0](x * 1)
    assert given.taken() == (6, 4)


@pytest.mark.gpu
def test_kernels_of_a_step():
    """Two parameters or two hundred: a launch or two, and no copy of one by itself."""
    module = nn.Sequential(*[Block(size=256) for _ in range(12)]).cuda()
    x = torch.randn(512, 256, device="cuda", dtype=HALF, requires_grad=True)
    cupyops.swap(module)

    def copied():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            with torch.autocast("cuda", HALF):
                module(x * 1).float().sum().backward()
            torch.cuda.synchronize()
        return sum("copy" in one.name.lower() for one in profile.events())

    for _ in range(4):
        with torch.autocast("cuda", HALF):
            module(x * 1).float().sum().backward()
    with_copies = copied()
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        hooks.clear()
    assert with_copies <= copied() - 40
