"""Linear layers under autocast whose float32 parameters get gradients that are not rounded to the half type before."""

import contextlib
import sys

import pytest
import torch

import cupyops
from cupyops._dispatch import library
from cupyops.ops._linear import linear_lowered

HALF = [torch.bfloat16, torch.float16]
SHAPES = [((3, 7, 64), 48), ((130, 36), 65), ((5,), 3), ((0, 8), 4), ((2, 1), 1)]


@pytest.fixture(autouse=True)
def wide_gradients(monkeypatch):
    monkeypatch.setattr(sys.modules["cupyops.nn.linear"], "WIDE_GRADIENTS", True)


def layers(shape, outputs, bias=True, device="cpu"):
    torch.manual_seed(0)
    ours = cupyops.nn.Linear(shape[-1], outputs, bias, device=device)
    theirs = torch.nn.Linear(shape[-1], outputs, bias, device=device)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs


def results(layer, x, grad_y, dtype):
    """The result, and the gradients of x and the parameters."""
    x = x.clone().requires_grad_()
    with torch.autocast(x.device.type, dtype):
        y = layer(x)
    return y.detach(), *torch.autograd.grad(y, (x, *layer.parameters()), grad_y.to(y.dtype))


def compare(shape, outputs, dtype, x_dtype, device, context, bias=True):
    ours, theirs = layers(shape, outputs, bias, device)
    x = torch.randn(shape, device=device).to(x_dtype)
    grad_y = torch.randn(*shape[:-1], outputs, device=device)
    with context:
        found = results(ours, x, grad_y, dtype)
    expected = results(theirs, x, grad_y, dtype)
    exact = layers(shape, outputs, bias, device)[1].double()
    leaf = x.to(dtype).double().requires_grad_()
    with torch.no_grad():
        for parameter in exact.parameters():
            parameter.copy_(parameter.to(dtype))
    truth = exact(leaf)
    truth = truth.detach(), *torch.autograd.grad(truth, (leaf, *exact.parameters()), grad_y.to(dtype).double())
    for a, b, c in zip(found, expected, truth):
        assert a.dtype is b.dtype and a.shape == b.shape
        if c.numel():
            rounding = 8 * torch.finfo(torch.float32).eps * c.abs().max().clamp(min=1)
            assert (a.double() - c).abs().max() <= 2 * (b.double() - c).abs().max() + rounding


@pytest.mark.parametrize(("shape", "outputs"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_as_torch(dtype, shape, outputs):
    for x_dtype in (torch.float32, dtype):
        compare(shape, outputs, dtype, x_dtype, "cpu", contextlib.nullcontext())
        compare(shape, outputs, dtype, x_dtype, "cpu", cupyops.simulate("sm_90"), bias=outputs != 48)


@pytest.mark.gpu
@pytest.mark.parametrize(("shape", "outputs"), SHAPES, ids=str)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_as_torch_on_a_gpu(dtype, shape, outputs):
    for faster in (True, False):
        compare(shape, outputs, dtype, torch.float32, "cuda", cupyops.never_slower(faster))


@pytest.mark.gpu
def test_the_gradient_of_the_weight_is_not_rounded_on_a_gpu():
    ours, _ = layers((64, 32), 48, device="cuda")
    x, grad_y = (torch.randn(64, n, device="cuda", dtype=torch.bfloat16) for n in (32, 48))
    with cupyops.never_slower(True), torch.autocast("cuda", torch.bfloat16):
        for _ in range(6):  # replayed
            ours.zero_grad()
            ours(x).backward(grad_y)
    torch.testing.assert_close(ours.weight.grad, grad_y.float().T @ x.float(), rtol=1e-5, atol=1e-4)
    assert not torch.equal(ours.weight.grad, ours.weight.grad.bfloat16().float())


def test_where_pytorch_has_the_sum_it_is_not_rounded(monkeypatch):
    """As on a GPU, where PyTorch multiplies matrices of a half type into one of float32."""
    asked = []

    def multiply_wide(a, b, y):
        asked.append((a.dtype, b.dtype, y.dtype, a.shape, b.shape, y.shape))
        torch.mm(a.float(), b.float(), out=y)

    monkeypatch.setattr(library, "is_wanted", lambda tensor: True)
    monkeypatch.setattr(library, "multiply_wide", multiply_wide)
    x, weight = torch.randn(9, 32).bfloat16(), torch.randn(24, 32, requires_grad=True)
    grad_y = torch.randn(9, 24).bfloat16()
    with cupyops.simulate("sm_90"):
        linear_lowered(x, weight, weight.detach().bfloat16(), None).backward(grad_y)
    assert asked == [(torch.bfloat16, torch.bfloat16, torch.float32, (24, 9), (9, 32), (24, 32))]
    torch.testing.assert_close(weight.grad, grad_y.float().T @ x.float(), rtol=1e-6, atol=1e-6)


def test_frozen_parameters_and_other_types_take_the_other_way():
    ours, theirs = layers((4, 8), 6)
    x = torch.randn(4, 8)

    def called():
        with cupyops.trace() as trace:
            y = ours(x)
        return {record.operator for record in trace.records if record.operator}, y

    assert called()[0] == {"cupyops::linear"}  # no autocast
    with torch.autocast("cpu", torch.bfloat16):
        assert called()[0] == {"cupyops::linear_lowered"}
        assert torch.equal(called()[1], theirs(x))
        with torch.no_grad():
            assert called()[0] == {"cupyops::linear"}
        ours.weight.requires_grad_(False)
        assert called()[0] == {"cupyops::linear"}
        ours.weight.requires_grad_()
        with pytest.raises(cupyops.errors.InputError, match="in_features 7"):
            ours(torch.randn(4, 7))
        ours.double()
        x = x.double()
        assert called()[0] == {"cupyops::linear"}


def test_second_derivatives_and_compile():
    ours, theirs = layers((4, 8), 6)
    x = torch.randn(4, 8, requires_grad=True)

    def second(layer):
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        (grad,) = torch.autograd.grad(y.float().pow(3).sum(), layer.weight, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), (x, layer.weight))

    for a, b in zip(second(ours), second(theirs)):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * b.abs().max().item())
    with torch.autocast("cpu", torch.bfloat16):
        compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), theirs(x))
        compiled(x).float().sum().backward()
        assert ours.weight.grad.dtype is torch.float32
        program = torch.export.export(ours, (x,))  # which wants no gradient
        assert torch.equal(program.module()(x), theirs(x))


def test_plans_are_replayed():
    ours, theirs = layers((16, 32), 24)
    x, grad_y = torch.randn(16, 32), torch.randn(16, 24)
    expected = results(theirs, x, grad_y, torch.bfloat16)
    with cupyops.simulate("sm_90"):
        for _ in range(6):
            for a, b in zip(results(ours, x, grad_y, torch.bfloat16), expected):
                torch.testing.assert_close(a, b, rtol=1e-2, atol=5e-2)
