"""Attention of one layer's queries, keys and values, after swap: their gradients are written to one tensor, once."""

import contextlib

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import cupyops
from cupyops.testing import assume_gpu


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x):
        q, k, v = self.parts(self.qkv(x))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Iterated(Base):
    def parts(self, qkv):
        return qkv.unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)


class Unbound(Base):  # as timm has it
    def parts(self, qkv):
        b, n, _ = qkv.shape
        return qkv.reshape(b, n, 3, 4, 6).permute(2, 0, 3, 1, 4).unbind(0)


class Split(Base):  # as GPT-2 has it
    def parts(self, qkv):
        return [one.view(*one.shape[:-1], 4, 6).transpose(1, 2) for one in qkv.split(24, dim=2)]


class ByHeads(Base):  # as GPT-NeoX has it
    def parts(self, qkv):
        return qkv.unflatten(-1, (4, 18)).transpose(1, 2).chunk(3, dim=-1)


class Swapped(Base):  # the value before the key
    def parts(self, qkv):
        q, v, k = qkv.unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return q, k, v


PARTS = [Iterated, Unbound, Split, ByHeads, Swapped]


class Same(Base):
    def parts(self, qkv):
        q, k, _ = qkv.unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return q, k, k


class Scaled(Base):
    def parts(self, qkv):
        q, k, v = qkv.unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return 2 * q, k, v


class Some(Base):
    def parts(self, qkv):
        return qkv[..., :4, :].unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)


class Detached(Base):
    def parts(self, qkv):
        q, k, v = qkv.unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return q, k.detach(), v


class Of3Copies(Base):
    def parts(self, qkv):
        q = qkv.unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)[0]
        return q, q, q


OTHERS = [Same, Scaled, Some, Detached, Of3Copies]


def simulated():
    stack = contextlib.ExitStack()
    stack.enter_context(assume_gpu(shared=232448))
    stack.enter_context(cupyops.simulate("sm_90"))
    return stack


def step(model, x):
    x = x.clone().requires_grad_()
    y = model(x)
    y.square().sum().backward()
    found = [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]
    model.zero_grad()
    return found, y


def nodes(y):
    """The names of the nodes behind a result."""
    pending, seen = [y.grad_fn], set()
    while pending:
        node = pending.pop()
        if node is not None and node not in seen:
            seen.add(node)
            pending += [one for one, _ in node.next_functions]
    return {type(one).__name__ for one in seen}


@pytest.mark.parametrize("kind", PARTS + OTHERS)
def test_same_numbers(kind):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(2, 5, 24)
    expected, _ = step(model, x)
    with cupyops.swap(model), simulated():
        found, y = step(model, x)
        assert ("_PartsBackward" in nodes(y)) is (kind in PARTS)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", PARTS + OTHERS)
def test_on_a_gpu(kind):
    torch.manual_seed(1)
    model, x = kind().cuda(), torch.randn(2, 9, 24, device="cuda")
    expected, _ = step(model, x)
    with torch.autocast("cuda", torch.bfloat16), cupyops.swap(model):
        for _ in range(3):  # recorded, and replayed
            found, _ = step(model, x)
            for a, b in zip(found, expected):
                assert (a.float() - b).norm() <= 0.05 * b.norm() + 1e-3


def test_autocast_and_the_kernels():
    torch.manual_seed(1)
    model, x = Unbound(), torch.randn(2, 9, 24)
    with torch.autocast("cpu", torch.bfloat16):
        expected, _ = step(model, x)
        with cupyops.swap(model), simulated():
            found, y = step(model, x)
            assert "_PartsBackward" in nodes(y)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a, b, rtol=3e-2, atol=3e-2 * b.abs().max().item())


class Wide(Iterated):
    """Of rows of whole vectors, as the kernels take them, and of what a layer gives."""

    def __init__(self):
        super().__init__()
        self.stem, self.qkv, self.out = nn.Linear(24, 24), nn.Linear(24, 96), nn.Linear(32, 24)

    def forward(self, x):
        q, k, v = self.parts(self.qkv(self.stem(x)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class WideByHeads(Wide):
    def parts(self, qkv):
        return qkv.unflatten(-1, (4, 24)).transpose(1, 2).chunk(3, dim=-1)


@pytest.mark.parametrize("kind", [Wide, WideByHeads])
@pytest.mark.parametrize("backend", ["simulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_kernels_write_the_gradient_where_it_belongs(kind, backend):
    torch.manual_seed(5)
    device = "cuda" if backend == "gpu" else "cpu"
    model, x = kind().to(device), torch.randn(2, 9, 24, device=device)
    expected, _ = step(model, x)
    with torch.autocast(device, torch.bfloat16), cupyops.swap(model), cupyops.never_slower(False):
        for _ in range(3 if backend == "gpu" else 1):  # recorded, and replayed
            with simulated() if backend == "simulator" else contextlib.nullcontext(), cupyops.trace() as trace:
                found, y = step(model, x)
            names = {record.operator for record in trace.records}
            assert "cupyops::packed_attention" in names
            assert ("cupyops::linear_lowered" in names) is (backend == "gpu")
            assert "_PartsBackward" not in nodes(y)
            for a, b in zip(found, expected):
                assert (a.float() - b).norm() <= 0.05 * b.norm() + 1e-3


def test_second_derivatives_hooks_and_no_gradient():
    torch.manual_seed(2)
    model, x = Iterated(), torch.randn(2, 5, 24, requires_grad=True, dtype=torch.float64)
    model.double()

    def second():
        (grad,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.pow(2).sum(), (x, model.qkv.weight))

    heard = []

    def listen(module, args, y):
        if y.requires_grad:
            y.register_hook(lambda grad: heard.append(grad.shape))

    model.qkv.register_forward_hook(listen)
    with sdpa_kernel(SDPBackend.MATH):  # the other one has no second derivative
        expected = second()
    with cupyops.swap(model), simulated():
        before = len(heard)
        for a, b in zip(second(), expected):
            torch.testing.assert_close(a, b)
        assert len(heard) == 2 * before
        with torch.no_grad():
            assert model(x).shape == x.shape


def test_transforms():
    torch.manual_seed(3)
    model, x = Split(), torch.randn(2, 5, 24)
    expected, plain = step(model, x)[0], torch.vmap(model)(x[None])
    with cupyops.swap(model), simulated():
        torch.testing.assert_close(torch.vmap(model)(x[None]), plain)
        compiled = torch.compile(model, backend="aot_eager")
        for a, b in zip(step(compiled, x)[0], expected):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("retains", [False, True])
def test_who_asks_for_the_gradient_of_a_part(which, retains):
    class Asked(Iterated):
        def parts(self, qkv):
            found = qkv.unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4).unbind(0)
            self.part = found[which]
            self.part.retain_grad() if retains else self.part.register_hook(lambda grad: 2 * grad)
            return found

    torch.manual_seed(5)
    model, x = Asked(), torch.randn(2, 5, 24)
    expected, part = step(model, x)[0], model.part
    with cupyops.swap(model):
        for context in (contextlib.nullcontext(), simulated()):
            with context:
                found, _ = step(model, x)
            for a, b in zip([*found, model.part.grad] if retains else found, [*expected, part.grad]):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("full", [False, True])
def test_hooks_on_the_layer(full):
    """Those on its result, and those on the module, which has a node of its own for them."""
    torch.manual_seed(4)
    model, x, heard = Iterated(), torch.randn(2, 5, 24), []
    expected, _ = step(model, x)

    def listen(module, args, y):
        y.register_hook(lambda grad: heard.append(tuple(grad.shape)))

    if full:
        model.qkv.register_full_backward_hook(lambda module, inputs, outputs: heard.append(tuple(outputs[0].shape)))
    else:
        model.qkv.register_forward_hook(listen)
    with cupyops.swap(model):
        for context in (contextlib.nullcontext(), simulated()):  # PyTorch's own layer, and ours
            with context:
                found, _ = step(model, x)
            assert heard.pop() == (2, 5, 72) and not heard
            for a, b in zip(found, expected):
                torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
