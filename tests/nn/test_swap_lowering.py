"""Norms that products alone read give the half type of autocast at once, after swap; every other one stays float32."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import cupyops

HALF = torch.bfloat16


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.out = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x, mask=None, **kwargs):
        shape = x.shape[:-1]
        q = self.q(x).view(*shape, 2, 8)
        k = self.k(x).view(*shape, 2, 8)
        y = (q.transpose(1, 2) @ k.transpose(1, 2).mT).softmax(-1) @ k.transpose(1, 2)
        return self.out(y.transpose(1, 2).reshape(*shape, 16)), None


class TransposedLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 16) / 4), nn.Parameter(torch.zeros(16))

    def forward(self, x):
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(x.shape)


class Rms(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(16) + 0.5), 1e-5

    def forward(self, x):
        y = x.float()
        return self.weight * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Flagged(nn.LayerNorm):
    """As timm has it: the function of torch.nn.LayerNorm, or another."""

    def __init__(self, fast=False, eps=1e-6):
        super().__init__(16, eps=eps)
        self.fast = fast

    def forward(self, x):
        if self.fast:
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, 2 * self.eps) + 1
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class Block(nn.Module):
    """Pre-norm: of `one` several linear layers of another module are readers, of `two` one that calls a function."""

    def __init__(self, norm=lambda: nn.LayerNorm(16)):
        super().__init__()
        self.one, self.two, self.attention = norm(), norm(), Attention()
        self.mlp = nn.Sequential(TransposedLinear(), nn.GELU(), nn.Linear(16, 16))

    def forward(self, x, mask=None):
        residual = x
        x = self.one(x)
        y, _ = self.attention(x, mask=mask)
        x = residual + y
        return x + self.mlp(self.two(x))


class Model(nn.Module):
    def __init__(self, block=Block):
        super().__init__()
        self.blocks = nn.ModuleList([block(), block()])
        self.last, self.head = nn.LayerNorm(16), nn.Linear(16, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


def lowered(model, exact=False):
    """The names of the norms that a swap makes give a half type."""
    return {one.name for one in cupyops.swap(model, exact=exact).replaced if "half under autocast" in one.what}


def results(model, x):
    x = x.clone().requires_grad_()
    with torch.autocast("cpu", HALF):
        y = model(x)
    y.float().square().mean().backward()
    return y.detach(), x.grad, {name: p.grad for name, p in model.named_parameters()}


NORMS = {"layer": lambda: nn.LayerNorm(16), "rms": lambda: nn.RMSNorm(16), "steps": Rms, "call": Flagged}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_the_result_has_the_same_bits(norm):
    torch.manual_seed(0)
    model, x = Model(lambda: Block(norm)), torch.randn(2, 5, 16)
    plain, ours = copy.deepcopy(model), copy.deepcopy(model)
    assert not lowered(plain, exact=True)
    assert lowered(ours) == {*(f"blocks.{i}.{name}" for i in (0, 1) for name in ("one", "two")), "last"}
    with cupyops.trace() as trace:
        y, grad_x, grads = results(ours, x)
    called = [record.operator for record in trace.records if "lowered" in str(record.operator)]
    assert len(called) >= 5  # `last` is a LayerNorm
    expected, expected_x, expected_grads = results(plain, x)
    assert torch.equal(y, expected)
    torch.testing.assert_close(grad_x, expected_x, rtol=2e-2, atol=2e-2 * expected_x.abs().max().item())
    for name, grad in expected_grads.items():
        assert grads[name].dtype is torch.float32
        # what several layers read has their gradients summed in the half type
        torch.testing.assert_close(grads[name], grad, rtol=3e-2, atol=2e-2 * grad.abs().max().item(), msg=name)
    for name in ("blocks.1.mlp.2.weight", "blocks.1.two.weight", "blocks.1.two.bias", "last.weight", "head.weight"):
        if name in grads:
            assert torch.equal(grads[name], expected_grads[name])  # one reader, and none of several behind it
    with torch.no_grad():
        assert torch.equal(ours(x), plain(x))  # without autocast all is float32


def test_gradients_are_as_near_to_float64():
    torch.manual_seed(1)
    model, x = Model(), torch.randn(4, 9, 16)
    truth = copy.deepcopy(model).double()
    truth(x.double()).square().mean().backward()
    errors = []
    for ours in (False, True):
        one = copy.deepcopy(model)
        if ours:
            assert lowered(one)
        _, _, grads = results(one, x)
        exact = {name: p.grad for name, p in truth.named_parameters()}
        # a constant added to all scores changes nothing: the gradient of k's bias is rounding alone
        errors.append([(grads[n] - exact[n]).norm() / exact[n].norm() for n in exact if not n.endswith("k.bias")])
    assert all(ours <= 2 * theirs + 1e-6 for theirs, ours in zip(*errors))


# --- what is no reader that products alone are -----------------------------------------------------------------------


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.act, self.attention = nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU(), Attention()


class Residual(Base):  # as BERT has it
    def forward(self, x):
        x = self.norm(x)
        return x + self.linear(x)


class Returned(Base):
    def forward(self, x):
        x = self.norm(x)
        return self.linear(x), x


class ThroughActivation(Base):
    def forward(self, x):
        return self.linear(self.act(self.norm(x)))


class InOneBranch(Base):
    def forward(self, x, add=False):
        y = self.norm(x)
        if add:
            x = y
        return x + self.linear(y)


class AsksTheDtype(Base):
    def forward(self, x):
        y = self.norm(x)
        if y.dtype == torch.float32:
            return self.linear(y)
        return self.linear(-y)


class WithoutAutocast(Base):
    def forward(self, x):
        y = self.norm(x)
        with torch.autocast("cpu", enabled=False):
            return self.linear(y)


class InPlace(Base):
    def forward(self, x):
        y = self.norm(x)
        y += 1
        return self.linear(y)


class InALoop(Base):
    def forward(self, x):
        for _ in range(2):
            x = self.linear(self.norm(x))
        return x


class Captured(Base):
    def forward(self, x):
        def again():
            return y * 2

        y = self.norm(x)
        return self.linear(y) + again()


class Alias(Base):
    def forward(self, x):
        norm = self.norm
        return self.linear(norm(x))


class OfAnotherMethod(Base):
    def embed(self, x):
        return self.norm(x)

    def forward(self, x):
        return self.linear(self.norm(x))


class HandsItselfOn(Base):
    def forward(self, x):
        return self.linear(self.norm(x)) + first_norm(self, x)


def first_norm(module, x):
    return module.norm(x)


class Kept(Base):
    def forward(self, x):
        self.seen = self.norm(x)
        return self.linear(self.seen)


class InAList(Base):
    def forward(self, x):
        found = [self.norm(x)]
        return self.linear(found[0])


class Starred(Base):
    def forward(self, x):
        return self.linear(*(self.norm(x),))


class Decorated(Base):
    @torch.autocast("cpu", enabled=False)
    def forward(self, x):
        return self.linear(self.norm(x))


class ReadByAnother(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.linear = Plain(), nn.Linear(16, 16)

    def forward(self, x):
        return self.linear(x) + self.block.norm(x) + self.block(x)


class Plain(Base):
    def forward(self, x):
        return self.linear(self.norm(x))


class OfItsBase(Residual):
    def forward(self, x):
        return self.linear(self.norm(x)) + super().forward(x)


class OfAProperty(Base):
    @property
    def first(self):
        return self.norm

    def forward(self, x):
        return self.linear(self.norm(x)) + self.first(x)


class EachInside(Base):
    def forward(self, x):
        y = self.linear(self.norm(x))
        for module in self.children():
            return y + module(x)


class Both(Base):
    """A residual in one branch, and the result of another norm in the other."""

    def forward(self, x, post: bool = False):
        if post:
            return self.linear(x) + self.norm(x)
        return self.linear(self.norm(x))


NOT_LOWERED = [Residual, Returned, ThroughActivation, InOneBranch, AsksTheDtype, WithoutAutocast, InPlace, InALoop]
NOT_LOWERED += [Captured, Alias, OfAnotherMethod, HandsItselfOn, Kept, InAList, Starred, Decorated, ReadByAnother, Both]
NOT_LOWERED += [OfItsBase, OfAProperty, EachInside]


@pytest.mark.parametrize("cls", NOT_LOWERED, ids=lambda cls: cls.__name__)
def test_another_reader(cls):
    torch.manual_seed(0)
    model, x = cls(), torch.randn(2, 3, 16)
    with torch.autocast("cpu", HALF):
        expected = model(x)
    assert not lowered(model)
    with torch.autocast("cpu", HALF):
        found = model(x)
    torch.testing.assert_close(found, expected)


class Views(Base):
    def forward(self, x):
        y = self.norm(x)
        z = y if x.dim() > 2 else y.unsqueeze(0)
        return F.linear(z.flatten(0, 1)[1:], self.linear.weight) + torch.matmul(
            y.view(-1, y.size(-1))[1:], self.linear.weight
        )


class NeverCalled(Base):
    def forward(self, x, other=None):
        y = self.norm(x)
        if other is not None:
            if not hasattr(self, "cross"):
                raise ValueError(f"{self} has none")
            return self.cross(y)
        return self.attention(x=y)[0]


@pytest.mark.parametrize("cls", [Plain, Views, NeverCalled], ids=lambda cls: cls.__name__)
def test_products_alone(cls):
    torch.manual_seed(0)
    model, x = cls(), torch.randn(2, 3, 16)
    with torch.autocast("cpu", HALF):
        expected = model(x)
    assert lowered(model) == {"norm"}
    with torch.autocast("cpu", HALF):
        assert torch.equal(model(x), expected) and model.norm(x).dtype is HALF
    assert model.norm(x).dtype is torch.float32


class Offset(Flagged):
    def forward(self, x):
        return F.layer_norm(x, self.normalized_shape, self.weight, None, self.eps)


class Twice(Flagged):
    def forward(self, x):
        return F.layer_norm(
            F.layer_norm(x, self.normalized_shape), self.normalized_shape, self.weight, self.bias, self.eps
        )


@pytest.mark.parametrize("norm", [lambda: Flagged(True), Offset, Twice], ids=["fast", "offset", "twice"])
def test_what_is_another_function(norm):
    model, x = Plain(), torch.randn(2, 3, 16)
    model.norm = norm()
    with torch.autocast("cpu", HALF):
        expected = model(x)
    assert not lowered(model)
    with torch.autocast("cpu", HALF):
        assert torch.equal(model(x), expected)


def test_pickle_of_a_norm_that_calls_the_function():
    model, x = Plain(), torch.randn(2, 3, 16)
    model.norm = Flagged()
    swap = cupyops.swap(model)
    again = pickle.loads(pickle.dumps(model))
    with torch.autocast("cpu", HALF):
        assert again.norm(x).dtype is HALF and torch.equal(again(x), model(x))
        assert torch.equal(model.norm(x), model.norm(x=x).to(HALF))
    swap.undo()
    assert type(model.norm) is Flagged


class Optional(Base):
    """As timm's attention: a module that may be there."""

    def __init__(self):
        super().__init__()
        self.gate = None

    def forward(self, x):
        y = self.norm(x)
        gate = self.gate(y).sigmoid() if self.gate is not None else None
        z = self.linear(y)
        return z if gate is None else z * gate


def test_a_module_that_is_not_there():
    model = Optional()
    assert lowered(model) == {"norm"}
    model = Optional()
    model.gate = nn.Linear(16, 16)
    assert lowered(model) == {"norm"}
    model = Optional()
    model.gate = nn.Sigmoid()
    assert not lowered(model)


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_the_kernels_in_the_simulator(norm):
    torch.manual_seed(0)
    model, x = Plain(), torch.randn(2, 3, 16)
    model.norm = norm()
    theirs = copy.deepcopy(model)
    del model.attention, theirs.attention  # which is not called
    assert lowered(model) == {"norm"}
    expected = results(theirs, x)
    for _ in range(5):
        with cupyops.simulate("sm_90"), cupyops.trace() as trace:
            found = results(model, x)
        launched = {launch.kernel.partition("<")[0] for launch in trace.launches()}
        assert {"norm_lowered_fwd", "norm_lowered_bwd"} <= launched
        torch.testing.assert_close(found[:2], expected[:2], rtol=2e-2, atol=2e-2)
        with cupyops.simulate("sm_90"):  # recorded, and replayed
            torch.testing.assert_close(results(model, x)[:2], expected[:2], rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
@pytest.mark.parametrize("faster", [True, False])
@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_on_a_gpu(norm, faster):
    torch.manual_seed(0)
    model, x = Model(lambda: Block(norm)).cuda(), torch.randn(2, 5, 16, device="cuda")
    plain, ours = copy.deepcopy(model), copy.deepcopy(model)
    cupyops.swap(plain, exact=True)
    assert lowered(ours)

    def results(model, x):
        x = x.clone().requires_grad_()
        with torch.autocast("cuda", HALF):
            y = model(x)
        return y.detach(), *torch.autograd.grad(y.float().square().mean(), [x, *model.parameters()])

    with cupyops.never_slower(faster):
        for given in (x, x.to(HALF)):
            with cupyops.trace() as trace:
                results(ours, given)
            launched = {launch.kernel.partition("<")[0] for launch in trace.launches()}
            assert {"norm_lowered_fwd", "norm_lowered_bwd"} <= launched
            for _ in range(6):  # recorded, and replayed
                for a, b in zip(results(ours, given), results(plain, given)):
                    assert a.dtype is b.dtype
                    torch.testing.assert_close(a, b, rtol=5e-2, atol=3e-2 * b.abs().max().item())


def test_shared_hooked_or_called_otherwise():
    model = Plain()
    model.again = model.norm  # of two names, either of which may be called
    assert not lowered(model)
    model = Plain()
    model.linear.register_forward_pre_hook(lambda module, args: None)
    assert not lowered(model)
    model = Plain()
    model.linear.forward = model.linear.forward
    assert not lowered(model)


def test_who_listens_to_the_norm_gets_float32():
    model, x, seen = Plain(), torch.randn(2, 3, 16), []
    assert lowered(model)
    hook = model.norm.register_forward_hook(lambda module, args, y: seen.append(y.dtype))
    with torch.autocast("cpu", HALF):
        model(x)
        hook.remove()
        assert seen == [torch.float32] and model.norm(x).dtype is HALF


def test_exact_undo_copies_and_a_second_swap():
    model = Plain()
    exact = cupyops.swap(model, exact=True)
    assert type(model.norm) is cupyops.nn.LayerNorm
    exact.undo()
    swap = cupyops.swap(model)
    assert isinstance(model.norm, cupyops.nn.LayerNorm) and type(model.norm).__name__ == "LayerNorm"
    assert not lowered(model)  # it is ours already
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    again = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)]
    x = torch.randn(2, 3, 16)
    with torch.autocast("cpu", HALF):
        for one in again:
            assert one.norm(x).dtype is HALF and torch.equal(one(x), model(x))
    assert [*model.state_dict()] == [*Plain().state_dict()]
    swap.undo()
    assert type(model.norm) is nn.LayerNorm


def test_compile_and_export():
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 5, 16)
    assert lowered(model)
    with torch.autocast("cpu", HALF):
        expected = model(x)
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        found = compiled(x)
        torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)
        found.float().sum().backward()
        program = torch.export.export(model, (x,))
        torch.testing.assert_close(program.module()(x), expected, rtol=1e-2, atol=1e-2)
    assert "layer_norm_lowered" in str(program.graph)


def test_half_inputs_and_parameters_stay_as_they_were():
    model = Plain()
    assert lowered(model)
    with torch.autocast("cpu", HALF):
        x = torch.randn(2, 3, 16, dtype=HALF)
        assert torch.equal(model.norm(x), F.layer_norm(x, (16,), model.norm.weight, model.norm.bias))
    model.double()
    with torch.autocast("cpu", HALF):
        assert model.norm(torch.randn(2, 3, 16, dtype=torch.float64)).dtype is torch.float64
