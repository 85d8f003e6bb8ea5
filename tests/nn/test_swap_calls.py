"""cupyops.swap and the functions that a forward calls: those of torch.nn.functional, and rotary embeddings."""

import copy
import functools
import inspect
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import CrossEntropyLoss

import cupyops
from cupyops.nn._swap import calls, rotary


def ran(module, *inputs, **named):
    with cupyops.trace() as trace:
        module(*inputs, **named)
    return [record.operator.removeprefix("cupyops::") for record in trace.records]


def helper(x):
    return F.softmax(x, dim=-1)


def factor():
    return 2.0


class Calls(nn.Module):
    def forward(self, x, scale=1.0, *, shift=0.0):
        y = nn.functional.silu(F.relu(x)) + F.softplus(x)
        return scale * helper(F.layer_norm(y, (8,))) * factor() + shift


class WithALoss(nn.Module):
    """As models of transformers make it."""

    def forward(self, x, labels=None):
        if labels is None:
            return x * 2
        return CrossEntropyLoss(ignore_index=3)(x, labels) + nn.NLLLoss()(x, labels) + nn.MSELoss()(x, x + 1)


class InAClosure(nn.Module):
    def forward(self, x):
        return (lambda y: F.gelu(y))(x) + sum(F.silu(x) for _ in range(2))


def decorated(function):
    @functools.wraps(function)
    def wrapper(self, *args, **kwargs):
        return function(self, *args, **kwargs) + 1

    return wrapper


class Decorated(nn.Module):
    @decorated
    def forward(self, x):
        return F.silu(x)


class ByAMethod(nn.Module):
    def forward(self, x):
        return self.inner(x)

    def inner(self, x):
        return F.gelu(x, approximate="tanh")


class Child(ByAMethod):
    def inner(self, x):
        return 3 * super().inner(x)


CASES = {
    Calls: ["relu", "silu", "layer_norm", "softmax"],
    InAClosure: ["gelu", "silu", "silu"],
    Decorated: ["silu"],
    ByAMethod: ["gelu"],
    Child: [],
}


@pytest.mark.parametrize("make", CASES)
def test_functions(make):
    module, x = make(), torch.randn(3, 8)
    expected = module(x)
    with cupyops.swap(module) as swap:
        assert torch.equal(module(x), expected) and ran(module, x) == CASES[make]
        assert bool(swap.replaced) is bool(CASES[make])
    assert type(module) is make and ran(module, x) == []
    assert ran(make(), x) == [], "other modules of the class are as they were"


def test_signature_and_defaults_stay():
    module, x = Calls(), torch.randn(3, 8)
    expected = module(x, 2.0, shift=1.0)
    cupyops.swap(module)
    assert torch.equal(module(x, 2.0, shift=1.0), expected)
    with pytest.raises(TypeError):
        module(x, 2.0, 1.0)


def test_globals_are_those_of_the_original(monkeypatch):
    module, x = Calls(), torch.randn(3, 8)
    cupyops.swap(module)
    before = module(x)
    monkeypatch.setitem(globals(), "factor", lambda: 4.0)
    torch.testing.assert_close(module(x), 2 * before)


def test_copies():
    module, x = Calls(), torch.randn(3, 8)
    cupyops.swap(module)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is type(module) and torch.equal(other(x), module(x)) and ran(other, x) == CASES[Calls]


def test_compiled():
    module, x = Calls(), torch.randn(3, 8)
    expected = module(x)
    cupyops.swap(module)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(module, backend="eager", fullgraph=True)(x), expected)


def test_every_function_has_the_parameters_of_pytorch_s():
    for name, ours in calls.OURS.items():
        try:
            theirs = inspect.signature(getattr(F, name))
        except ValueError:
            assert name in ("conv2d", "linear", "gelu", "scaled_dot_product_attention", "avg_pool2d")
            continue
        assert list(inspect.signature(ours).parameters) == list(theirs.parameters), name


# --- super() --------------------------------------------------------------------------------------------------------


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


class Named(nn.LayerNorm):
    def __init__(self, channels, eps=1e-6):
        super().__init__(channels, eps=eps)


class OverChannels(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Other(nn.Linear):
    def forward(self, input):
        return input


@pytest.mark.parametrize(
    ("module", "shape", "operators"),
    [
        (Doubled(8, 4), (3, 8), ["linear"]),
        (Named(8), (3, 8), ["layer_norm"]),
        (OverChannels(4), (2, 4, 3, 3), ["layer_norm"]),
        (Other(8, 4), (3, 8), []),
    ],
    ids=["doubled", "named", "channels", "other"],
)
def test_subclasses(module, shape, operators):
    x, before = torch.randn(shape), type(module)
    expected = module(x)
    with cupyops.swap(module):
        assert torch.equal(module(x), expected) and ran(module, x) == operators
        other = pickle.loads(pickle.dumps(module))
        assert isinstance(other, before) and torch.equal(other(x), expected)
    assert type(module) is before


# --- rotary embeddings ----------------------------------------------------------------------------------------------


def rotate_half(x):
    a, b = x.chunk(2, -1)
    return torch.cat((-b, a), -1)


def apply_rotary(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def apply_partial(q, k, cos, sin, unsqueeze_dim=1):
    size = cos.shape[-1]
    turned = apply_rotary(q[..., :size], k[..., :size], cos, sin, unsqueeze_dim)
    return tuple(torch.cat((one, rest[..., size:]), -1) for one, rest in zip(turned, (q, k)))


def rotate_pairs(x):
    return torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)


def apply_interleaved(q, k, cos, sin, unsqueeze_dim=1):
    cos, sin = (t[..., : t.shape[-1] // 2].repeat_interleave(2, -1).unsqueeze(unsqueeze_dim) for t in (cos, sin))
    return q * cos + rotate_pairs(q) * sin, k * cos + rotate_pairs(k) * sin


def apply_backwards(q, k, cos, sin, unsqueeze_dim=1):
    return apply_rotary(q, k, cos, -sin, unsqueeze_dim)


def apply_to_queries(q, k, cos, sin, unsqueeze_dim=1):
    return apply_rotary(q, k, cos, sin, unsqueeze_dim)[0], k


def apply_if_short(q, k, cos, sin, unsqueeze_dim=1):
    return apply_rotary(q, k, cos, sin, unsqueeze_dim) if q.shape[2] < 100 else (q, k)


def tables(batch, seq, size, dtype):
    angles = torch.randn(batch, seq, size // 2)
    angles = torch.cat((angles, angles), -1)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("function", [apply_rotary, apply_partial, apply_interleaved])
def test_rotary(function, batch, dim, dtype):
    torch.manual_seed(4)
    ours = rotary.recognised(function)
    heads = [(3, h, 5, 8) if dim == 1 else (3, 5, h, 8) for h in (4, 2)]
    q, k = (torch.randn(shape).to(dtype).requires_grad_() for shape in heads)
    cos, sin = tables(batch, 5, 4 if function is apply_partial else 8, dtype)
    expected, found = (f(q, k, cos, sin, unsqueeze_dim=dim) for f in (function, ours))
    bound = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float64: 0.0}[dtype]
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)
    wanted = [torch.ones_like(y) for y in expected]
    grads = [torch.autograd.grad(y, (q, k), wanted) for y in (found, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=bound)
    with cupyops.trace() as trace:
        ours(q, k, cos, sin, unsqueeze_dim=dim)
    assert len(trace.records) == (0 if dtype is torch.float64 else 2)


def test_rotary_leaves_heads_where_they_lie():
    """Of a projection seen head by head, results lie as the function's, and gradients as q and k: nobody copies them."""
    ours = rotary.recognised(apply_rotary)
    cos, sin = tables(1, 5, 8, torch.float32)
    for transposed in (True, False):
        leaves = [torch.randn(3, 5, h, 8).requires_grad_() for h in (4, 2)]
        given = [x.transpose(1, 2) if transposed else x.transpose(1, 2).contiguous() for x in leaves]
        found, expected = ours(*given, cos, sin), apply_rotary(*given, cos, sin)
        grads = [torch.autograd.grad(y, given, [torch.ones_like(one) for one in y]) for y in (found, expected)]
        torch.testing.assert_close((*found, *grads[0]), (*expected, *grads[1]))
        assert [y.stride() for y in found] == [y.stride() for y in expected]
        assert [g.stride() for g in grads[0]] == [x.stride() for x in given]


@pytest.mark.parametrize("function", [apply_backwards, apply_to_queries, apply_if_short])
def test_what_is_almost_rotary(function):
    assert rotary.recognised(function) is None


class Embedding(nn.Module):
    def __init__(self, halves=True):
        super().__init__()
        self.halves = halves
        self.inv_freq = nn.Buffer(0.5 ** torch.arange(4.0))

    def forward(self, x, position_ids):
        angles = position_ids[..., None].float() * self.inv_freq
        angles = torch.cat((angles, angles if self.halves else 2 * angles), -1)
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


class Attention(nn.Module):
    def forward(self, q, k, cos, sin):
        return torch.cat(apply_rotary(q, k, cos, sin), 1)


class Model(nn.Module):
    def __init__(self, halves=True):
        super().__init__()
        self.embedding, self.attention = Embedding(halves), Attention()

    def forward(self, q, k):
        return self.attention(q, k, *self.embedding(q, torch.arange(q.shape[2])[None]))


@pytest.mark.parametrize("halves", [True, False])
def test_rotary_only_where_the_tables_are_known(halves):
    model, q = Model(halves), torch.randn(2, 3, 5, 8)
    expected = model(q, q)
    swap = cupyops.swap(model)
    torch.testing.assert_close(model(q, q), expected)
    assert ran(model, q, q) == (["rope", "rope"] if halves else [])
    assert bool(swap.replaced) is halves
    assert not cupyops.swap(Attention()).replaced, "no embedding, no table to look at"
    assert not cupyops.swap(Model(), exact=True).replaced


def test_tables_that_are_others_later(monkeypatch):
    model, q = Model(), torch.randn(2, 3, 5, 8)
    twin = copy.deepcopy(model)
    cupyops.swap(model)
    assert ran(model, q, q) == ["rope", "rope"]
    for one in (model, twin):
        one.embedding.halves = False
    torch.testing.assert_close(model(q, q), twin(q, q))
    assert ran(model, q, q) == []
    for one in (model, twin):
        one.embedding.halves = True
    assert ran(model, q, q) == ["rope", "rope"]
    for one in (model, twin):
        one.embedding = Embedding(halves=False)
    torch.testing.assert_close(model(q, q), twin(q, q))
    with monkeypatch.context() as patch:
        patch.setattr(f"{__name__}.rotate_half", lambda x: x)
        torch.testing.assert_close(model(q, q), twin(q, q))


def test_tables_in_inference_mode():
    """Tensors made in it count no changes in place, so the model's own function takes them; elsewhere tables stay known."""
    model, q = Model(), torch.randn(2, 3, 5, 8)
    expected, tables = model(q, q), model.embedding(q, torch.arange(5)[None])
    cupyops.swap(model)
    known = model.embedding(q, torch.arange(5)[None])
    with torch.inference_mode():
        torch.testing.assert_close(model(q, q), expected)
        torch.testing.assert_close(model.attention(q, q, *known), expected)
        assert ran(model, q, q) == [] and ran(model.attention, q, q, *known) == ["rope", "rope"]
        assert ran(model.attention, q, q, *tables) == []
    assert ran(model, q, q) == ["rope", "rope"]


def test_losses_that_a_forward_makes():
    x, labels = torch.randn(5, 7, requires_grad=True), torch.tensor([0, 3, 6, 3, 1])
    module = WithALoss()
    expected = module(x, labels)
    gradient = torch.autograd.grad(expected, x)
    with cupyops.swap(module) as swap:
        assert ran(module, x, labels) == ["cross_entropy", "nll_loss"]
        found = module(x, labels)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(torch.autograd.grad(found, x), gradient)
        assert "CrossEntropyLoss" in str(swap)
    assert ran(module, x, labels) == []
