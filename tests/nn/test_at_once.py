"""Modules that call PyTorch's own function at once, where it is as fast: when they do, and that it is the same function."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import cupyops
from cupyops import nn
from cupyops._dispatch.core import library
from cupyops._dispatch.core.gpu import Gpu
from cupyops._dispatch.gemm import linear as products
from cupyops.nn import activation
from cupyops.nn._swap import activations, packed

H200 = Gpu(
    capability=9, multiprocessors=132, shared=232448, shared_total=233472, threads=2048, l2=50 << 20, library=True
)
ON_A_GPU = SimpleNamespace(is_cuda=True)


@pytest.fixture
def at_once(monkeypatch):
    """Modules take tensors on the CPU for those of an H200, of which nobody else is told."""
    monkeypatch.setattr(library, "at_once", lambda tensor: True)
    monkeypatch.setattr(library, "gpu", lambda device: H200)
    products._pytorch.clear()
    yield
    products._pytorch.clear()


class TestWhen:
    @pytest.fixture(autouse=True)
    def as_users_have_it(self):
        with cupyops.never_slower():
            yield

    def test_on_a_gpu(self):
        assert library.at_once(ON_A_GPU) and not library.at_once(torch.ones(2))

    @pytest.mark.parametrize(
        "inside",
        [
            cupyops.trace,
            lambda: cupyops.plans(False),
            lambda: cupyops.never_slower(False),
            lambda: cupyops.use_form("softmax:two_pass"),
            lambda: cupyops.testing.assume_gpu(multiprocessors=1),
            lambda: FlopCounterMode(display=False),
        ],
        ids=["trace", "plans", "never_slower", "use_form", "assume_gpu", "dispatch mode"],
    )
    def test_not_where_somebody_is_to_see_kernels_of_ours(self, inside):
        with inside():
            assert not library.at_once(ON_A_GPU)
        assert library.at_once(ON_A_GPU)

    def test_not_where_a_compiler_traces(self):
        seen = []

        def backend(graph, _):
            seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
            return graph.forward

        layer = nn.Linear(8, 8)
        torch.compile(layer, backend=backend, fullgraph=True)(torch.randn(2, 8))
        assert any("cupyops.linear" in name for name in seen)


class TestProducts:
    def test_forms(self, at_once):
        """By the forms of an H200: PyTorch's, but for products that ours is measured to be faster in."""

        def chosen(m, n, k, dtype=torch.bfloat16):
            x, weight = (torch.empty(size, dtype=dtype, device="meta") for size in ((m, k), (n, k)))
            return products.is_pytorch(x, weight, dtype)

        assert chosen(197, 768, 768) and chosen(4096, 4096, 4096, torch.float32)
        assert not chosen(1, 4096, 4096, torch.float16)  # few rows, which are bound by reading the weight
        assert not chosen(2, 64, 64, torch.float32)  # small ones of float32 are as fast by FMAs
        assert not chosen(8192, 1024, 32)  # by wgmma
        assert not chosen(0, 8, 8)

    def test_a_setting_is_heeded(self, at_once, monkeypatch):
        x = weight = torch.ones(8, 8, dtype=torch.bfloat16)
        assert products.is_pytorch(x, weight, x.dtype)
        with cupyops.never_slower(False):
            monkeypatch.setattr(library, "gpu", lambda device: H200.__class__(**{**vars(H200), "library": False}))
            assert not products.is_pytorch(x, weight, x.dtype)
        monkeypatch.setattr(library, "gpu", lambda device: H200)
        assert products.is_pytorch(x, weight, x.dtype)

    @pytest.mark.parametrize("autocast", [False, True])
    @pytest.mark.parametrize("bias", [False, True])
    def test_linear(self, at_once, monkeypatch, autocast, bias):
        """The same bits as PyTorch's layer, forward and backward, and by its function."""
        dtype = torch.float32 if autocast else torch.bfloat16
        theirs = torch.nn.Linear(16, 8, bias=bias, dtype=dtype)
        ours = nn.Linear(16, 8, bias=bias, dtype=dtype)
        ours.load_state_dict(theirs.state_dict())
        calls = []
        real = F.linear
        results = []
        for layer in (theirs, ours):
            if layer is ours:
                monkeypatch.setattr(F, "linear", lambda *args: calls.append(len(args)) or real(*args))
            x = torch.linspace(-1, 1, 96).view(3, 2, 16).to(dtype).requires_grad_()
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                y = layer(x * 1)  # no leaf
            grads = torch.autograd.grad(y.float().square().sum(), [x, *layer.parameters()])
            results.append([y, *grads])
        assert calls == [3]
        for found, expected in zip(results[1], results[0], strict=True):
            assert found.dtype is expected.dtype and torch.equal(found, expected)

    def test_dtypes_that_differ_are_told_by_name(self, at_once):
        with pytest.raises(cupyops.InputError, match="float64"):
            nn.Linear(8, 8)(torch.ones(2, 8, dtype=torch.float64))


class TestActivations:
    @pytest.mark.parametrize(
        "ours, theirs",
        [
            (nn.ReLU(), F.relu),
            (nn.SiLU(), F.silu),
            (nn.GELU(), F.gelu),
            (nn.GELU("tanh"), lambda x: F.gelu(x, approximate="tanh")),
        ],
        ids=["relu", "silu", "gelu", "gelu_tanh"],
    )
    def test_few_elements(self, at_once, monkeypatch, ours, theirs):
        name = type(ours).__name__.lower()
        monkeypatch.setattr(activation, name, None)  # which none of these calls asks for
        x = torch.linspace(-4, 4, 33, dtype=torch.bfloat16)
        assert torch.equal(ours(x), theirs(x))
        monkeypatch.setattr(activation, "SMALL", 32)
        with pytest.raises(TypeError):
            ours(x)

    @pytest.mark.parametrize("kind", [nn.ReLU, nn.SiLU])
    def test_in_place(self, at_once, kind):
        x = torch.linspace(-4, 4, 33)
        expected = kind()(x)
        y = kind(inplace=True)(x)
        assert y is x and torch.equal(x, expected)

    def test_of_another_class(self, at_once, monkeypatch):
        class Steps(torch.nn.Module):
            def forward(self, x):
                return x * torch.sigmoid(x)

        module = Steps()
        cupyops.swap(module)
        monkeypatch.setitem(activations.PYTORCHS, "silu", None)  # the class has taken PyTorch's already
        x = torch.linspace(-4, 4, 33)
        assert torch.equal(module(x), F.silu(x))


class TestDropout:
    def test_evaluation(self):
        layer, x = nn.Dropout(0.5).eval(), torch.ones(3)
        assert layer(x) is x
        layer.p = 1.5
        with pytest.raises(cupyops.InputError, match="p is 1.5"):
            layer(x)


class TestAttention:
    @pytest.fixture
    def asked(self, at_once, monkeypatch):
        """Attention in which PyTorch's function is the faster; the list of what was asked for that."""
        found = []
        definition = SimpleNamespace(why_not=lambda args: found.append(args) or library.FASTER)
        monkeypatch.setattr(packed, "_sdpa", SimpleNamespace(definition=definition))
        monkeypatch.setattr(packed, "scaled_dot_product_attention", lambda *args, **options: "ours")
        packed._pytorchs.clear()
        yield found
        packed._pytorchs.clear()

    def test_without_a_gradient(self, asked):
        q, k, v = (torch.randn(1, heads, 5, 8) for heads in (4, 2, 2))
        for _ in range(3):
            with torch.inference_mode():
                y = packed.attention(q, k, v, is_causal=True, enable_gqa=True)
            assert torch.equal(y, F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        assert len(asked) == 1 and asked[0][3:] == (None, 0.0, True, None, True)

    def test_not_with_a_gradient_a_mask_or_dropout(self, asked):
        q = torch.randn(1, 2, 5, 8)
        assert packed.attention(q, q, q) == "ours"
        with torch.no_grad():
            assert packed.attention(q, q, q, dropout_p=0.5) == packed.attention(q, q, q, q @ q.mT) == "ours"
        assert not asked
