"""What cupyops.swap recognises in modules of whatever class: norms, activations and gated products, and what it leaves."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cupyops

HALF = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALF, torch.float64)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Norm(nn.Module):
    def __init__(self, size=16, bias=False):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        if bias:
            self.bias = nn.Parameter(torch.rand(size))
        self.eps = 1e-5


class CastThenWeight(Norm):
    def forward(self, x):
        y = x.to(torch.float32)
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class WeightThenCast(Norm):
    def forward(self, x):
        y = x.float()
        return (self.weight * (y * torch.rsqrt(y.square().mean(dim=-1, keepdim=True) + self.eps))).type_as(x)


class ByDivision(Norm):
    def forward(self, x):
        y = x.float()
        return (y / torch.sqrt((y * y).mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class AsksItsWeight(Norm):
    def forward(self, x):
        y = x * torch.rsqrt(x.to(torch.float32).pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight.dtype in HALF:
            y = y.to(self.weight.dtype)
        return self.weight * y


class OnePlus(Norm):
    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def forward(self, x):
        return (self._norm(x.float()) * (1.0 + self.weight.float())).type_as(x)


class Weightless(nn.Module):
    def forward(self, x):
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)


class LayerNorm(Norm):
    def forward(self, x):
        y = x.float()
        mean = y.mean(-1, keepdim=True)
        y = (y - mean) * torch.rsqrt((y - mean).pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * y).to(x.dtype)


class LayerNormWithBias(Norm):
    def forward(self, x):
        y = (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, unbiased=False, keepdim=True) + self.eps)
        return self.weight * y + self.bias


NORMS = {
    CastThenWeight: "rms_norm",
    WeightThenCast: "rms_norm",
    ByDivision: "rms_norm",
    AsksItsWeight: "rms_norm",
    OnePlus: "rms_norm of 1 + weight in float32",
    Weightless: "rms_norm",
    LayerNorm: "layer_norm",
    lambda: LayerNormWithBias(bias=True): "layer_norm",
}


class NoRoot(Norm):
    def forward(self, x):
        return x / x.square().mean(-1, keepdim=True) * self.weight


class EpsilonBehindTheRoot(Norm):
    def forward(self, x):
        return x / (x.square().mean(-1, keepdim=True).sqrt() + 0.1) * self.weight


class UnbiasedVariance(Norm):
    def forward(self, x):
        return self.weight * (x - x.mean(-1, keepdim=True)) / torch.sqrt(x.var(-1, keepdim=True) + self.eps)


class OverRows(Norm):
    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-2, keepdim=True) + self.eps)


class AsksTheShape(CastThenWeight):
    def forward(self, x):
        return 2 * super().forward(x) if x.shape[0] > 2 else super().forward(x)


class AsksTheValues(CastThenWeight):
    def forward(self, x):
        return super().forward(x) if x.abs().max() < 1000 else x


class AsksTheDtype(CastThenWeight):
    def forward(self, x):
        return x if x.dtype is torch.float16 else super().forward(x)


class MeanOfTheAbsolute(Norm):
    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.abs().mean(-1, keepdim=True) + self.eps)


OTHERS = [NoRoot, EpsilonBehindTheRoot, UnbiasedVariance, OverRows, AsksTheShape, AsksTheValues, AsksTheDtype]
OTHERS += [MeanOfTheAbsolute]


def run(module, *inputs):
    """The output, and the gradients of inputs and parameters."""
    given = [x.clone().requires_grad_() for x in inputs]
    module.zero_grad()
    y = module(*given)
    grads = torch.autograd.grad(y, [*given, *module.parameters()], torch.ones_like(y) * 0.5, allow_unused=True)
    return [y.detach(), *grads]


def near(found, expected):
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.dtype is other.dtype and one.shape == other.shape
            bound = TOLERANCE[other.dtype] * max(1.0, float(other.abs().max()))
            torch.testing.assert_close(one, other, rtol=0, atol=bound)


def ran(module, *inputs):
    with cupyops.trace() as trace:
        module(*inputs)
    return [record.operator.removeprefix("cupyops::") for record in trace.records]


# --- norms ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("make", NORMS, ids=lambda make: getattr(make, "__name__", "?"))
def test_norms(make, dtype):
    torch.manual_seed(1)
    module = make().to(dtype)
    for scale in (1.0, 1e-3):
        x = (scale * torch.randn(2, 5, 16)).to(dtype)
        expected = run(module, x)
        with cupyops.swap(module) as swap:
            assert [one.what for one in swap.replaced] == [NORMS[make]]
            near(run(module, x), expected)
            offset = "1 +" in NORMS[make]
            own = dtype is torch.float64 or (offset and dtype is not torch.float32)
            assert ran(module, x) == ([] if own else [NORMS[make].split()[0]])


@pytest.mark.parametrize("make", OTHERS)
def test_what_is_almost_a_norm(make):
    module = make()
    swap = cupyops.swap(module)
    assert not swap.replaced and [one.name for one in swap.kept] == [""] and type(module) is make


@pytest.mark.parametrize("make", [CastThenWeight, WeightThenCast, AsksItsWeight, OnePlus, LayerNorm])
@pytest.mark.parametrize("weight", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_mixed_dtypes(make, weight, autocast, dtype):
    """As autocast gives a norm its input, and as models keep some weights in float32."""
    module, x = make().to(weight), torch.randn(3, 16).to(dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = module(x)
        with cupyops.swap(module):
            found = module(x)
    assert found.dtype is expected.dtype
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=0.05)


def test_epsilon_stays_an_attribute():
    module, x = CastThenWeight(), torch.randn(3, 16)
    cupyops.swap(module)
    module.eps = 0.5
    expected = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.5) * module.weight
    torch.testing.assert_close(module(x), expected)
    assert ran(module, x) == ["rms_norm"]


def test_other_arguments_take_the_module_s_own_forward():
    class Scaled(CastThenWeight):
        def forward(self, x, factor=1.0):
            return factor * super().forward(x)

    module, x = CastThenWeight(), torch.randn(3, 16)
    cupyops.swap(module)
    torch.testing.assert_close(module(x=x), module(x))
    scaled = Scaled()
    expected = scaled(x, 3.0)
    cupyops.swap(scaled)
    torch.testing.assert_close(scaled(x, 3.0), expected)
    torch.testing.assert_close(scaled(x, factor=3.0), expected)


def test_random_numbers_stay_as_they_were():
    torch.manual_seed(5)
    expected = torch.rand(3)
    model = nn.Sequential(CastThenWeight(), MLP(), QuickGELU(), TanhGELU())
    torch.manual_seed(5)
    cupyops.swap(model)
    assert torch.equal(torch.rand(3), expected)


# --- activations and gates ------------------------------------------------------------------------------------------


class TanhGELU(nn.Module):
    def forward(self, x):
        return 0.5 * x * (1.0 + torch.tanh(0.7978845608028654 * (x + 0.044715 * torch.pow(x, 3.0))))


class ErfGELU(nn.Module):
    def forward(self, x):
        return x * 0.5 * (1.0 + torch.erf(x / 1.4142135623730951))


class Swish(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(x)


class QuickGELU(nn.Module):
    def forward(self, x):
        return x * torch.sigmoid(1.702 * x)


class Stored(nn.Module):
    def __init__(self):
        super().__init__()
        self.act = F.gelu

    def forward(self, x):
        return self.act(x)


@pytest.mark.parametrize(
    ("make", "what"), [(TanhGELU, "gelu_tanh"), (ErfGELU, "gelu"), (Swish, "silu"), (Stored, "gelu")]
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_activations(make, what, dtype):
    module, x = make(), torch.linspace(-4, 4, 101).to(dtype)
    expected = run(module, x)
    swap = cupyops.swap(module)
    assert [one.what for one in swap.replaced] == [what]
    near(run(module, x), expected)
    assert ran(module, x) == [what.split("_")[0]]


def test_an_activation_that_is_none_of_ours():
    swap = cupyops.swap(QuickGELU())
    assert [one.reason for one in swap.kept] == ["an activation that is none of cupyops"]


class MLP(nn.Module):
    def __init__(self, act=None):
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)
        self.act = act or nn.SiLU()

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class Packed(MLP):
    def __init__(self, act=None):
        super().__init__(act)
        self.both, self.drop = nn.Linear(6, 16), nn.Dropout(0.0)
        del self.gate, self.up

    def forward(self, x):
        gate, up = self.both(x).chunk(2, dim=-1)
        return self.drop(self.down(up * self.act(gate)))


class PackedTheOtherWay(Packed):
    def forward(self, x):
        up, gate = self.both(x).chunk(2, dim=-1)
        return self.drop(self.down(self.act(gate) * up))


class AndMore(MLP):
    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(2 * x))


@pytest.mark.parametrize("make", [MLP, Packed, PackedTheOtherWay])
@pytest.mark.parametrize(("act", "what"), [(nn.SiLU(), "swiglu"), (nn.GELU("tanh"), "geglu"), (ErfGELU(), "geglu")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gates(make, act, what, dtype):
    torch.manual_seed(2)
    module, x = make(copy.deepcopy(act)).to(dtype), torch.randn(4, 6).to(dtype)
    expected = run(module, x)
    with cupyops.swap(module) as swap:
        assert what in {one.what for one in swap.replaced}
        near(run(module, x), expected)
        assert what in ran(module, x)
    near(run(module, x), expected)


@pytest.mark.parametrize("module", [AndMore(), MLP(nn.Tanh())], ids=["and more", "tanh"])
def test_what_is_almost_a_gate(module):
    x = torch.randn(4, 6)
    expected = module(x)
    swap = cupyops.swap(module)
    assert not {"swiglu", "geglu"} & {one.what for one in swap.replaced}
    torch.testing.assert_close(module(x), expected)


def test_why_a_gate_is_none():
    swap = cupyops.swap(MLP(nn.Tanh()))
    assert next(one.reason for one in swap.kept if not one.name) == "Tanh has no gated operator"


def test_a_hook_inside_a_gate_is_called():
    module, seen = MLP(), []
    cupyops.swap(module)
    module.act.register_forward_hook(lambda *_: seen.append("act"))
    module.gate.register_forward_pre_hook(lambda *_: seen.append("gate"))
    module(torch.randn(2, 6))
    assert seen == ["gate", "act"]


def test_an_activation_that_is_another_one_later():
    module, x = MLP(), torch.randn(2, 6)
    cupyops.swap(module)
    module.act = nn.Tanh()
    torch.testing.assert_close(module(x), module.down(torch.tanh(module.gate(x)) * module.up(x)))


# --- as a whole -----------------------------------------------------------------------------------------------------


def whole():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(16, 6), MLP(), nn.Linear(6, 16), CastThenWeight(), TanhGELU())


def test_undo_and_names():
    model = whole()
    before, classes = repr(model), [type(m) for m in model.modules()]
    swap = cupyops.swap(model)
    assert (
        repr(model) == before and isinstance(model[3], CastThenWeight) and type(model[3]).__name__ == "CastThenWeight"
    )
    assert cupyops.swap(model).replaced == ()
    swap.undo()
    assert [type(m) for m in model.modules()] == classes


def test_copies():
    model, x = whole(), torch.randn(3, 16)
    cupyops.swap(model)
    expected, file = model(x), io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert [type(m) for m in other.modules()] == [type(m) for m in model.modules()]
        assert torch.equal(other(x), expected)


def test_a_forward_that_is_another_one_since():
    """As where somebody patches a class between two swaps: what was derived of it before is of no use."""

    class Patched(CastThenWeight):
        pass

    module, x = Patched(), torch.randn(3, 16)
    cupyops.swap(module).undo()
    Patched.forward = lambda self, x: 2 * CastThenWeight.forward(self, x)
    expected = module(x)
    cupyops.swap(module)
    torch.testing.assert_close(module(x), expected)


def test_exact_leaves_steps_alone():
    swap = cupyops.swap(whole(), exact=True)
    reasons = {one.name: one.reason for one in swap.kept}
    assert reasons["3"] == "rms_norm rounds once, and exact is asked for"
    assert reasons["1"] == "swiglu rounds once, and exact is asked for"
    assert {one.name for one in swap.replaced} == {"0", "1.gate", "1.up", "1.down", "1.act", "2"}


def test_exact_gives_the_same_bits_on_the_cpu():
    model, x = whole().bfloat16(), torch.randn(3, 16).bfloat16()
    expected = run(model, x)
    cupyops.swap(model, exact=True)
    assert all(map(torch.equal, run(model, x), expected))


def test_compiled():
    model, x = whole(), torch.randn(3, 16)
    expected = model(x)
    cupyops.swap(model)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(model, backend="eager", fullgraph=True)(x), expected)


def test_in_the_simulator():
    model, x = whole(), torch.randn(3, 16)
    expected = run(model, x)
    with cupyops.swap(model), cupyops.simulate(), cupyops.trace() as trace:
        torch.testing.assert_close(run(model, x), expected, rtol=1e-4, atol=1e-5)
    assert trace.routes() == {"simulator"}
    assert {"cupyops::rms_norm", "cupyops::swiglu", "cupyops::gelu"} <= {r.operator for r in trace.records}


def test_a_weight_that_is_no_parameter_any_more():
    """As in a replica of DataParallel, and where a weight is made of others before each call."""
    module, x = CastThenWeight(), torch.randn(3, 16)
    expected = module(x)
    cupyops.swap(module)
    weight = module._parameters.pop("weight")
    module.weight = weight.detach()
    assert "weight" not in module._parameters
    torch.testing.assert_close(module(x), expected)
    module.weight = 2 * module.weight
    torch.testing.assert_close(module(x), 2 * expected)


def test_patched_objects_stay():
    module = CastThenWeight()
    module.forward = lambda x: x
    swap = cupyops.swap(module)
    assert [one.reason for one in swap.kept] == ["its forward was replaced on the object itself"]


def test_parameters_of_another_kind_stay():
    class Other(torch.Tensor):
        pass

    module = CastThenWeight()
    module.weight = nn.Parameter(torch.ones(16).as_subclass(Other))
    assert not cupyops.swap(module).replaced
