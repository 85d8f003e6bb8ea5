"""Gated products of plain layers: both products, the activation and what is multiplied by it, in one operator."""

import copy
import pickle

import pytest
import torch
from nn.test_swap_patterns import ran
from torch import nn

import cupyops
from cupyops._dispatch.gemm import epilogues
from cupyops.testing import assume_gpu

FUNCTIONS = {"silu": nn.SiLU, "gelu": nn.GELU, "gelu_tanh": lambda: nn.GELU("tanh")}
HOPPER = {"capability": 9, "multiprocessors": 132, "shared": 232448, "library": True}


class MLP(nn.Module):
    def __init__(self, act="silu", size=6, features=8, **options):
        super().__init__()
        options = {"bias": False, **options}
        self.gate, self.up = nn.Linear(size, features, **options), nn.Linear(size, features, **options)
        self.down, self.act = nn.Linear(features, size, **options), FUNCTIONS[act]()

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class Packed(nn.Module):
    def __init__(self, act="silu"):
        super().__init__()
        self.both, self.down = nn.Linear(6, 16, bias=False), nn.Linear(8, 6, bias=False)
        self.act = FUNCTIONS[act]()

    def forward(self, x):
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.down(up * self.act(gate))


class UpFirst(Packed):
    def forward(self, x):
        up, gate = self.both(x).chunk(2, dim=-1)
        return self.down(up * self.act(gate))


def results(module, x):
    x = x.clone().requires_grad_()
    y = module(x)
    return y, *torch.autograd.grad(y, [x, *module.parameters()], torch.linspace(-1, 1, y.numel()).view_as(y).to(y))


@pytest.mark.parametrize("act", FUNCTIONS)
@pytest.mark.parametrize("make", [MLP, Packed])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_one_operator(make, act, dtype):
    torch.manual_seed(5)
    module, x = make(act), torch.randn(2, 5, 6)
    exact = results(module.double(), x.to(dtype).double())
    module.to(dtype)
    expected, names = results(module, x.to(dtype)), [*module.state_dict()]
    parameters = [*map(id, module.parameters())]
    with cupyops.swap(module):
        assert ran(module, x.to(dtype)) == ["gated_linear", "linear"]
        found = results(module, x.to(dtype))
        assert [*module.state_dict()] == names and [*map(id, module.parameters())] == parameters
    assert ran(module, x.to(dtype)) == []
    for one, other, true in zip(found, expected, exact, strict=True):
        bound = 1e-12 if dtype is torch.float64 else 2 * (other.double() - true).abs().max().item() + 1e-2
        torch.testing.assert_close(one.double(), true, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype):
    torch.manual_seed(6)
    module, x = MLP(size=16, features=24), torch.randn(7, 16)
    with torch.autocast("cpu", dtype):
        expected = results(module, x)
        cupyops.swap(module)
        assert "gated_linear" in ran(module, x)
        found = results(module, x)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype is other.dtype
        torch.testing.assert_close(one.float(), other.float(), rtol=0, atol=3e-2 * other.abs().max().item())


def test_in_the_simulator():
    torch.manual_seed(7)
    for make in (MLP, Packed):
        module, x = make(), torch.randn(3, 6)
        expected = results(module, x)
        cupyops.swap(module)
        with cupyops.simulate(), cupyops.trace() as trace:
            found = results(module, x)
        assert any(record.kernel.startswith("gated_") for record in trace.launches())
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def hooked(name, register):
    module = MLP()
    getattr(getattr(module, name), register)(lambda *_: None)
    return module


def with_own_forward():
    module = MLP()
    module.up.forward = lambda x: torch.zeros(*x.shape[:-1], 8)
    return module


def with_another_class():
    class Adapted(nn.Linear):
        def forward(self, x):
            return super().forward(x) + 1

    module = MLP()
    module.gate = Adapted(6, 8, bias=False)
    return module


def parametrized():
    module = MLP()
    nn.utils.parametrizations.weight_norm(module.gate)
    return module


def with_a_tensor_for_a_weight():
    module = MLP()
    weight = module.gate.weight.detach() * 2
    del module.gate.weight
    module.gate.weight = weight
    return module


APART = {
    "biases": lambda: MLP(bias=True),
    "up first": UpFirst,
    "forward hook": lambda: hooked("gate", "register_forward_hook"),
    "forward pre-hook": lambda: hooked("up", "register_forward_pre_hook"),
    "backward hook": lambda: hooked("up", "register_full_backward_hook"),
    "hook of the activation": lambda: hooked("act", "register_forward_hook"),
    "own forward": with_own_forward,
    "another class": with_another_class,
    "parametrized": parametrized,
    "no parameter": with_a_tensor_for_a_weight,
}


@pytest.mark.parametrize("name", APART)
def test_layers_that_are_called(name):
    torch.manual_seed(8)
    module, x = APART[name](), torch.randn(4, 6)
    expected = module(x)
    cupyops.swap(module)
    assert "gated_linear" not in ran(module, x)
    torch.testing.assert_close(module(x), expected)


def test_layers_that_were_skipped():
    module, x = MLP(), torch.randn(4, 6)
    cupyops.swap(module, skip=nn.Linear)
    assert ran(module, x) == ["swiglu"]


def test_layers_that_are_others_later():
    """What has been put in the place of a layer after the swap is called."""
    torch.manual_seed(9)
    module, x = MLP(), torch.randn(4, 6)
    cupyops.swap(module)
    assert "gated_linear" in ran(module, x)
    module.up = nn.Linear(6, 8, bias=False)
    assert "gated_linear" not in ran(module, x)
    torch.testing.assert_close(module(x), module.down(nn.functional.silu(module.gate(x)) * module.up(x)))


def test_one_layer_for_both():
    torch.manual_seed(10)
    module, x = MLP(), torch.randn(4, 6)
    module.up.weight = module.gate.weight
    expected = results(module, x)
    cupyops.swap(module)
    torch.testing.assert_close(results(module, x), expected)


def test_frozen_layers():
    torch.manual_seed(11)
    module, x = MLP(), torch.randn(4, 6)
    module.gate.requires_grad_(False)
    wanted = [p for p in module.parameters() if p.requires_grad]
    expected = torch.autograd.grad(module(x).square().sum(), wanted)
    cupyops.swap(module)
    torch.testing.assert_close(torch.autograd.grad(module(x).square().sum(), wanted), expected)
    with torch.no_grad():
        assert "gated_linear" in ran(module, x)


def test_copies():
    torch.manual_seed(12)
    module, x = MLP(), torch.randn(4, 6)
    cupyops.swap(module)
    expected = module(x)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert "gated_linear" in ran(other, x)
        torch.testing.assert_close(other(x), expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("rows", "features", "size", "dtype", "act", "worth"),
    [
        (8192, 8192, 2048, torch.bfloat16, "silu", True),
        (8192, 8192, 2048, torch.float16, "silu", True),
        (8192, 8192, 2048, torch.float32, "silu", False),
        (8192, 8192, 2048, torch.bfloat16, "gelu", False),
        (8192, 8196, 2048, torch.bfloat16, "silu", False),
        (4096, 8192, 2048, torch.bfloat16, "silu", False),
        (8192, 4096, 2048, torch.bfloat16, "silu", False),
        (8192, 8192, 1024, torch.bfloat16, "silu", False),
    ],
)
def test_where_it_is_measured_to_be_faster(monkeypatch, rows, features, size, dtype, act, worth):
    """Beside PyTorch's products: on Hopper, of half types, from some sizes on; elsewhere the layers are products apart."""
    monkeypatch.setattr(epilogues.library, "is_wanted", lambda x: True)
    x = torch.empty(4, rows // 4, size, dtype=dtype, device="meta")
    with assume_gpu(**HOPPER):
        assert epilogues.is_gate_worth_it(x, features, act) is worth
    with assume_gpu(**{**HOPPER, "capability": 8}):
        assert not epilogues.is_gate_worth_it(x, features, act)


# --- hooks on all modules -----------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, x):
        return self.relu(self.norm(self.conv(x)))


EVERY = {
    "forward hook": (nn.modules.module.register_module_forward_hook, lambda module, given, y: 2 * y),
    "forward pre-hook": (nn.modules.module.register_module_forward_pre_hook, lambda module, given: (2 * given[0],)),
    "backward hook": (
        nn.modules.module.register_module_full_backward_hook,
        lambda module, inner, outer: (2 * inner[0],),
    ),
}
MODELS = {
    "gate": lambda: (MLP(), torch.randn(4, 6)),
    "packed gate": lambda: (Packed(), torch.randn(4, 6)),
    "batch norms": lambda: (nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), torch.randn(2, 3, 6, 6)),
    "batch norms in a forward": lambda: (Block(), torch.randn(2, 3, 6, 6)),
}


@pytest.mark.parametrize("hook", EVERY)
@pytest.mark.parametrize("model", MODELS)
def test_hooks_on_all_modules(model, hook):
    """They see each module that they saw, and what they make of a value counts."""
    torch.manual_seed(13)
    module, x = MODELS[model]()
    register, change = EVERY[hook]
    outcomes = []
    for swapped in (False, True):
        if swapped:
            cupyops.swap(module)
        seen, leaf = [], x.clone().requires_grad_()
        handle = register(lambda one, *given: (seen.append(type(one).__name__), change(one, *given))[1])
        try:
            y = module(leaf)
            (gradient,) = torch.autograd.grad(y.square().sum(), leaf)
        finally:
            handle.remove()
        outcomes.append((seen, y, gradient))
    (names, *expected), (others, *found) = outcomes
    assert sorted(names) == sorted(others)  # up may be called before the activation
    torch.testing.assert_close(found, expected)
