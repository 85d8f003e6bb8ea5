"""A swap is sound: nothing of a model runs or changes by it, and what replaces a forward holds for one state."""

import copy
import functools
import io
import pickle
import sys

import pytest
import torch
from nn.test_swap_patterns import MLP
from torch import nn
from torch.nn import functional as F

import cupyops


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(6) + 0.5), 1e-5

    def forward(self, x):
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


def x():
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(0))


def operators(module, given):
    with cupyops.trace() as trace:
        module(given)
    return {record.operator.removeprefix("cupyops::") for record in trace.records}


def same(module, twin, given=None, seed=0):
    """Results, gradients and attributes of a swapped module are those of its twin, which is not swapped."""
    found = []
    for one in (module, twin):
        torch.manual_seed(seed)
        one.zero_grad()
        of = (x() if given is None else given).requires_grad_()
        y = one(of)
        found.append([y, *torch.autograd.grad(y.sum(), [of, *one.parameters()], allow_unused=True)])
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


# --- nothing of the user's runs ---------------------------------------------------------------------------------------


class Rescales(nn.Module):
    """As RWKV divides its weights when it is first called in evaluation."""

    def __init__(self):
        super().__init__()
        self.layer, self.is_rescaled = nn.Linear(6, 6), False

    def forward(self, x):
        if not self.training and not self.is_rescaled:
            with torch.no_grad():
                self.layer.weight.div_(2)
            self.is_rescaled = True
        return self.layer(x)


class Remembers(MLP):
    """It makes a table at its first call."""

    table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.ones_like(x[:1])
        return super().forward(x * self.table)


class Counts(MLP):
    """It notes what it has seen, in an attribute, a list, a dict, a buffer, and those of a module inside."""

    def __init__(self, how):
        super().__init__()
        self.how, self.calls, self.seen, self.named = how, 0, [], {}
        self.register_buffer("count", torch.zeros(()))
        self.up.calls = 0

    def forward(self, x):
        if self.how == "attribute":
            self.calls += 1
        elif self.how == "list":
            self.seen.append(1)
        elif self.how == "dict":
            self.named["seen"] = 1
        elif self.how == "buffer":
            self.count.add_(1)
        elif self.how == "inside":
            self.up.calls += 1
        else:
            CALLS.append(1)
        return super().forward(x)


CALLS = []
HOW = ["attribute", "list", "dict", "buffer", "inside", "global"]


def state(module):
    """All attributes and tensors of a module and of those inside, as text that is equal if they are."""
    own = {name: {k: v for k, v in vars(one).items() if k[0] != "_"} for name, one in module.named_modules()}
    return repr((own, {name: tensor.tolist() for name, tensor in module.state_dict().items()}))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("how", ["rescales", "remembers", *HOW])
def test_nothing_changes_by_the_swap(how, training):
    module = {"rescales": Rescales, "remembers": Remembers}.get(how, functools.partial(Counts, how))().train(training)
    twin, before, pickled, calls = copy.deepcopy(module), state(module), pickle.dumps(module), len(CALLS)
    cupyops.swap(module).undo()
    assert pickle.dumps(module) == pickled
    cupyops.swap(module)
    assert (state(module), len(CALLS)) == (before, calls)
    for _ in range(2):
        same(module, twin)
    assert state(module) == state(twin)
    assert len(CALLS) == calls + (4 if how == "global" else 0)


def test_no_tensors_are_left_on_a_module():
    class Shifted(nn.Module):
        def forward(self, x):
            return F.relu(x + torch.tensor(1.0))

    module = Shifted()
    before = dict(vars(module))
    cupyops.swap(module).undo()
    assert vars(module) == before


# --- the state in which a forward was read ----------------------------------------------------------------------------


class Dropping(MLP):
    def __init__(self):
        super().__init__()
        self.p = 0.5

    def forward(self, x):
        h = self.act(self.gate(x)) * self.up(x)
        if self.training:
            h = F.dropout(h, self.p)
        return self.down(h)


@pytest.mark.parametrize("training", [True, False])
def test_a_gate_that_drops_in_training(training):
    module = Dropping().train(training)
    twin = copy.deepcopy(module)
    cupyops.swap(module)
    for mode in (training, not training, training):
        same(module.train(mode), twin.train(mode))
    assert "swiglu" in operators(module.eval(), x())


class Swish(nn.Module):
    beta = 1.0

    def __init__(self):
        super().__init__()
        self.limit, self.enabled, self.config = None, True, Config()

    def forward(self, x):
        if not self.enabled:
            return x
        if self.limit is not None:
            x = x.clamp(max=self.limit)
        return x * torch.sigmoid(self.beta * x) * self.config.scale


class Config:
    scale, eps = 1.0, 1e-6

    def __init__(self):
        self.scale, self.eps = 1.0, 1e-6


@pytest.mark.parametrize("name, value", [("beta", 1.7), ("limit", 0.1), ("enabled", False), ("config.scale", 3.0)])
def test_attributes_that_are_others_later(name, value):
    module = Swish()
    twin = copy.deepcopy(module)
    swap = cupyops.swap(module)
    assert [one.what for one in swap.replaced] == ["silu"]
    assert operators(module, x()) == {"silu"}
    for one in (module, twin):
        *owner, last = name.split(".")
        setattr(functools.reduce(getattr, owner, one), last, value)
    same(module, twin)
    assert not operators(module, x())


class ByFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.function = F.gelu

    def forward(self, x):
        return self.function(x)


SCALE = 1.0


def scaled(x):
    return SCALE * x


class ByGlobals(nn.Module):
    def forward(self, x):
        return scaled(F.silu(x))

    def helper(self, x):
        return x


class ByMethod(ByGlobals):
    def forward(self, x):
        return self.helper(F.silu(x))


def twice(x):
    return 2 * x


def test_functions_and_globals_that_are_others_later(monkeypatch):
    module = ByFunction()
    assert cupyops.swap(module).replaced
    module.function = torch.tanh
    torch.testing.assert_close(module(x()), torch.tanh(x()))

    module = ByGlobals()
    assert cupyops.swap(module).replaced and operators(module, x()) == {"silu"}
    for name, value in (("SCALE", 3.0), ("scaled", twice)):
        with monkeypatch.context() as patch:
            patch.setattr(f"{__name__}.{name}", value)
            torch.testing.assert_close(module(x()), (3 if name == "SCALE" else 2) * F.silu(x()))

    module = ByMethod()
    assert cupyops.swap(module).replaced and operators(module, x()) == {"silu"}
    with monkeypatch.context() as patch:
        patch.setattr(ByGlobals, "helper", lambda self, x: 5 * x)
        torch.testing.assert_close(module(x()), 5 * F.silu(x()))
    module.helper = twice
    torch.testing.assert_close(module(x()), 2 * F.silu(x()))


@pytest.mark.parametrize("make", [Norm, MLP, ByFunction, Swish])
def test_a_class_that_has_another_forward_later(make, monkeypatch):
    class Own(make):
        forward = make.forward

    module = Own()
    cupyops.swap(module)
    monkeypatch.setattr(Own, "forward", lambda self, x: 3 * x)
    torch.testing.assert_close(module(x()), 3 * x())


class Attends(nn.Module):
    def forward(self, x):
        return F.softmax(twice(x), -1)


def test_a_class_whose_calls_are_ours_has_another_forward_later(monkeypatch):
    module = Attends()
    assert cupyops.swap(module).replaced and operators(module, x()) == {"softmax"}
    monkeypatch.setattr(Attends, "forward", lambda self, x: 3 * x)
    torch.testing.assert_close(module(x()), 3 * x())


def test_a_function_of_its_file_is_another_later(monkeypatch):
    class Calls(nn.Module):
        def forward(self, x):
            return normal(x)

    module = Calls()
    assert cupyops.swap(module).replaced and operators(module, x()) == {"softmax"}
    monkeypatch.setattr(f"{__name__}.normal", twice)
    torch.testing.assert_close(module(x()), 2 * x())


def normal(x):
    return F.softmax(x, -1)


class ByNames(nn.Module):
    def forward(self, x):
        return nn.functional.softmax(F.tanhshrink(F.silu(x)), -1)


class Silu(nn.Module):
    def forward(self, x):
        return F.silu(x)


class Sine:
    silu = tanhshrink = staticmethod(torch.sin)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    "make, place, name, other",
    [
        (ByNames, F, "silu", twice),
        (ByNames, F, "softmax", lambda x, dim: 3 * x),
        (ByNames, F, "tanhshrink", twice),  # of which there is none of ours
        (ByNames, None, "F", Sine),
        (Silu, F, "silu", twice),
        (Silu, None, "F", Sine),
    ],
)
def test_a_function_of_pytorch_that_somebody_has_replaced(make, place, name, other, when, monkeypatch):
    module, twin, given = make(), make(), x()
    place = sys.modules[__name__] if place is None else place
    expected = twin(given)
    if when == "after":
        cupyops.swap(module)
    with monkeypatch.context() as patch:
        patch.setattr(place, name, other)
        if when == "before":
            cupyops.swap(module)
        assert not torch.allclose(twin(given), expected)
        torch.testing.assert_close(module(given), twin(given))
    torch.testing.assert_close(module(given), expected)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(module, backend="eager", fullgraph=True)(given), expected)


# --- numbers are known by where they are read -------------------------------------------------------------------------


class TwoNumbers(Norm):
    def __init__(self):
        super().__init__()
        self.momentum = 1e-5  # as eps


class OfConfiguration(Norm):
    def __init__(self):
        super().__init__()
        self.config = Config()

    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config.eps)
        return self.weight * y


class Computed(Norm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2 * self.eps))


class AsksForEps(Norm):
    def forward(self, x):
        eps = self.eps
        if eps > 0.1:
            return x
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


@pytest.mark.parametrize("make, name", [(TwoNumbers, "eps"), (TwoNumbers, "momentum"), (OfConfiguration, "config.eps")])
def test_eps_is_the_attribute_that_is_added(make, name):
    module = make()
    twin = copy.deepcopy(module)
    assert cupyops.swap(module).replaced
    for one in (module, twin):
        *owner, last = name.split(".")
        setattr(functools.reduce(getattr, owner, one), last, 0.7)
    same(module, twin)
    assert operators(module, x()) == {"rms_norm"}


@pytest.mark.parametrize("make", [Computed, AsksForEps])
def test_eps_of_which_something_is_computed(make):
    module = make()
    twin = copy.deepcopy(module)
    assert cupyops.swap(module).replaced
    for one in (module, twin):
        one.eps = 0.7
    same(module, twin)


class AsksByIdentity(Norm):
    def forward(self, x):
        five = 5
        if x.ndim is five:
            return x
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


def test_a_condition_on_the_input_by_identity():
    module, given = AsksByIdentity(), torch.randn(1, 1, 2, 3, 6)
    cupyops.swap(module)
    assert torch.equal(module(given), given)


class OverTheThird(Norm):
    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(2, keepdim=True) + self.eps))


def test_a_dimension_that_is_the_last_of_three_alone():
    module, given = OverTheThird(), torch.randn(2, 5, 6, 6)
    expected = module(given)
    cupyops.swap(module)
    torch.testing.assert_close(module(given), expected)


def test_an_eps_that_is_no_number_any_more():
    module, given = Norm(), x()
    cupyops.swap(module)
    module.eps = torch.tensor(0.7, requires_grad=True)
    module(given).sum().backward()
    assert module.eps.grad is not None


class AsksItsParameter(MLP):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, 1))

    def forward(self, x):
        h = self.act(self.gate(x)) * self.up(x)
        return self.down(h) if self.scale.shape[0] == 2 else 2 * self.down(h)


class AsksWhereItIs(Norm):
    def forward(self, x):
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y if not self.weight.is_cuda else y


def test_what_is_asked_of_parameters():
    module = AsksItsParameter()
    twin = copy.deepcopy(module)
    cupyops.swap(module)
    same(module, twin)
    for one in (module, twin):
        one.scale = nn.Parameter(torch.ones(3, 1))
    same(module, twin)
    assert not cupyops.swap(AsksWhereItIs()).replaced, "it may move"


class Finds(Norm):
    """Its attributes are where nobody looks."""

    def __getattr__(self, name):
        return ELSEWHERE if name == "mean" else super().__getattr__(name)

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)) * self.mean


ELSEWHERE = 1.0


def test_attributes_that_a_class_finds_itself():
    assert not cupyops.swap(Finds()).replaced


def test_an_activation_inside_a_gate_that_is_another_later():
    module = MLP(Swish())
    twin = copy.deepcopy(module)
    cupyops.swap(module)
    assert "swiglu" in operators(module, x())
    for one in (module, twin):
        one.act.beta = 1.7
    same(module, twin)


# --- dtypes for which it is proven ------------------------------------------------------------------------------------


class Plain(Norm):
    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 30.0])
def test_a_norm_without_an_upcast(dtype, scale):
    module = Plain().to(dtype)
    twin, given = copy.deepcopy(module), (scale * torch.randn(5, 6)).to(dtype)
    assert [one.what for one in cupyops.swap(module).replaced] == ["rms_norm"]
    assert operators(module, given) == (set() if dtype is torch.float16 else {"rms_norm"})
    found, expected = module(given).detach(), twin(given).detach()
    atol = {torch.float32: 1e-5, torch.bfloat16: 0.03, torch.float16: 0.0}[dtype]
    torch.testing.assert_close(found, expected, rtol=0, atol=atol * float(expected.abs().max()))


def test_reasons_are_told_by_a_field():
    class Squared(Norm):
        def forward(self, x):
            y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
            return self.weight * self.weight * y

    class Sums(nn.Module):
        """Whose name has the words of a reason: it normalises, exact, none of cupyops."""

        def forward(self, x):
            return x.cumsum(-1)

    swap = cupyops.swap(nn.Sequential(Squared(), Sums()))
    assert [one.reason for one in swap.kept] == [
        "it normalises, and computes none of rms_norm and layer_norm",
        "no module of torch.nn",
    ]
    assert [one.near for one in swap.kept] == [True, False]


# --- tracers of others ------------------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(6, 2, batch_first=True)
        self.layer, self.norm, self.relu = nn.Linear(6, 6), nn.LayerNorm(6), nn.ReLU()

    def forward(self, x):
        y, _ = self.attention(x, x, x, need_weights=False)
        return self.relu(self.norm(self.relu(self.layer(x + y))))


def convolutions():
    return nn.Sequential(nn.Conv2d(3, 3, 1, bias=False), nn.BatchNorm2d(3), nn.ReLU())


@pytest.mark.parametrize("make, shape", [(Block, (2, 3, 6)), (convolutions, (2, 3, 4, 4))])
def test_torch_fx_sees_the_same_graph(make, shape):
    block, given = make(), torch.randn(shape)
    expected = block(given)
    before = torch.fx.symbolic_trace(block).graph
    cupyops.swap(block)
    after = torch.fx.symbolic_trace(block)
    assert [(node.op, node.target, node.name) for node in after.graph.nodes] == [
        (node.op, node.target, node.name) for node in before.nodes
    ]
    torch.testing.assert_close(after(given), expected)


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("make", [lambda: nn.Linear(6, 6), lambda: Doubled(6, 6)])
def test_torch_fx_of_one_module(make):
    """Which is looked into, as PyTorch's is where it is what is traced, and as a subclass is anywhere."""
    module = make().eval()
    for model in (module, nn.Sequential(module)):
        expected = model(x())
        cupyops.swap(model)
        torch.testing.assert_close(torch.fx.symbolic_trace(model)(x()), expected)


def test_torch_jit():
    model, given = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), Norm()), x()
    expected = model(given)
    swap = cupyops.swap(model)
    with pytest.raises(cupyops.InputError, match=r"call undo\(\)"):
        torch.jit.script(model)
    with pytest.raises(cupyops.InputError, match="torch.jit.trace"):
        torch.jit.script(cupyops.nn.Linear(2, 2))
    torch.testing.assert_close(torch.jit.trace(model, given)(given), expected)
    swap.undo()
    torch.testing.assert_close(torch.jit.script(model)(given), expected)


class Sliced(MLP):
    """As Moshi halves a layer's results."""

    def __init__(self):
        super().__init__()
        self.both = nn.Linear(6, 16)

    def forward(self, x):
        h = self.both(x)
        return self.down(self.act(h[..., :8]) * h[..., 8:])


def test_halves_by_slices():
    module = Sliced()
    twin = copy.deepcopy(module)
    cupyops.swap(module)
    same(module, twin)


# --- undone -----------------------------------------------------------------------------------------------------------


def test_undo_gives_back_the_very_classes():
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), Norm(), MLP())
    torch.nn.utils.parametrizations.weight_norm(model[0])
    before, pickled = [type(one) for one in model.modules()], pickle.dumps(model[2:])
    cupyops.swap(model).undo()
    assert all(type(one) is cls for one, cls in zip(model.modules(), before, strict=True))
    assert pickle.dumps(model[2:]) == pickled


def test_saved_and_copied():
    model = nn.Sequential(Norm(), Dropping(), Swish(), ByFunction()).eval()
    expected = model(x())
    swap = cupyops.swap(model)
    for _ in range(2):  # as it is swapped, then undone
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
            torch.testing.assert_close(other(x()), expected)
            assert [type(one) for one in other.modules()] == [type(one) for one in model.modules()]
            assert operators(other, x()) == operators(model, x())
        swap.undo()
