"""Linear layers whose parameters are of float32, and whose input and result are of a half type, as under autocast."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

import cupyops
from cupyops.ops._linear_lowered import linear_lowered
from cupyops.testing import assume_gpu

HALF = [torch.bfloat16, torch.float16]
SHAPES = [((3, 4), 5), ((2, 3, 16), 24), ((64, 128), 10), ((300, 5), 7), ((7, 64), 65), ((2, 1, 3), 1)]
HOPPER = {"capability": 9, "multiprocessors": 132, "shared": 232448, "library": True}


@pytest.fixture(params=["simulator", "library", pytest.param("gpu", marks=pytest.mark.gpu)])
def run(request):
    """A context in which kernels run, or PyTorch's products in their place, and the device of the tensors."""
    if request.param == "gpu":
        return contextlib.nullcontext, "cuda"

    def simulated():
        stack = contextlib.ExitStack()
        stack.enter_context(cupyops.simulate("sm_90"))
        if request.param == "library":
            stack.enter_context(assume_gpu(**HOPPER))
        return stack

    return simulated, "cpu"


def leaves(shape, out, dtype, device, bias=True):
    torch.manual_seed(0)
    shapes = (shape, dtype), ((out, shape[-1]), torch.float32), ((out,), torch.float32)
    return [torch.randn(s, device=device).to(t).requires_grad_() for s, t in shapes[: 2 + bias]]


def results(function, inputs, grad):
    y = function(*inputs, *[None] * (3 - len(inputs)))
    return y, *torch.autograd.grad(y, inputs, grad)


def by_casts(x, weight, bias):
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


@pytest.mark.parametrize("shape, out", SHAPES)
@pytest.mark.parametrize("bias", [True, False])
def test_values_and_gradients(run, shape, out, bias):
    """As near to float64 as PyTorch's casts and product; gradients of parameters are of float32."""
    context, device = run
    dtype = HALF[out % 2]
    inputs = leaves(shape, out, dtype, device, bias)
    grad = torch.randn(*shape[:-1], out, device=device).to(dtype)
    truth = [x.detach().double().requires_grad_() for x in inputs]
    expected = results(lambda x, w, b: F.linear(x, w, b), truth, grad.double())
    theirs = results(by_casts, inputs, grad)
    for _ in range(4):  # recorded, and replayed
        with context(), cupyops.never_slower(True) if device == "cuda" else contextlib.nullcontext():
            ours = results(linear_lowered, inputs, grad)
        for a, b, c, x in zip(ours, theirs, expected, (grad, *inputs)):
            assert a.dtype is x.dtype and a.shape == c.shape
            assert (a - c).norm() <= 1.2 * (b - c).norm() + 1e-6 * c.norm()


def test_gradients_are_not_rounded_on_the_way():
    """Where PyTorch makes the product; by kernels they are those of the half type."""
    inputs = leaves((64, 32), 48, torch.bfloat16, "cpu")
    grad = torch.randn(64, 48).bfloat16()
    exact = grad.double().T @ inputs[0].detach().double()
    with cupyops.simulate("sm_90"), assume_gpu(**HOPPER), cupyops.trace() as trace:
        _, _, grad_weight, grad_bias = results(linear_lowered, inputs, grad)
    assert [one.kernel for one in trace.launches() if one.kernel.startswith("torch.")] == [
        "torch.addmm", "torch.mm", "torch.mm",
    ]  # fmt: skip
    torch.testing.assert_close(grad_weight.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grad_bias.double(), grad.double().sum(0), rtol=1e-5, atol=1e-5)


def test_what_is_not_wanted_and_what_is_empty(run):
    context, device = run
    for wanted in ([0], [1], [2], [0, 2], [1, 2]):
        inputs = [x.detach().requires_grad_(i in wanted) for i, x in enumerate(leaves((5, 8), 6, HALF[0], device))]
        with context():
            y = linear_lowered(*inputs)
            found = torch.autograd.grad(y, [inputs[i] for i in wanted], torch.ones_like(y))
        expected = by_casts(*inputs)
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
        for a, i in zip(found, wanted):
            assert a.dtype is inputs[i].dtype and a.shape == inputs[i].shape
    for shape, out in (((0, 8), 6), ((4, 8), 0), ((4, 0), 3)):
        inputs = leaves(shape, out, HALF[1], device)
        with context():
            y, *grads = results(linear_lowered, inputs, torch.ones(*shape[:-1], out, device=device, dtype=HALF[1]))
        torch.testing.assert_close(y, by_casts(*inputs))
        assert [g.shape for g in grads] == [x.shape for x in inputs] and not any(g.isnan().any() for g in grads)


def test_transforms_and_second_derivatives():
    x, weight, bias = leaves((3, 4), 5, torch.bfloat16, "cpu")
    same = dict(rtol=2e-2, atol=2e-2)
    batch = torch.randn(2, 3, 4).bfloat16()
    torch.testing.assert_close(
        torch.vmap(lambda one: linear_lowered(one, weight, bias))(batch), by_casts(batch, weight, bias), **same
    )
    found = []
    for function in (by_casts, linear_lowered):
        (grad,) = torch.autograd.grad(function(x, weight, bias).float().square().sum(), x, create_graph=True)
        found += torch.autograd.grad(grad.float().sum(), weight)
    torch.testing.assert_close(found[1], found[0], rtol=5e-2, atol=0.3)


@pytest.mark.parametrize("copied", [False, True])
def test_the_gradient_of_a_gradient_reads_the_weight(copied):
    """By kernels too, and of the weight itself, whatever the copies in a half type are."""
    generator = torch.Generator().manual_seed(3)
    x, weight, bias, v = (torch.randn(*size, generator=generator) for size in ((24, 16), (32, 16), (32,), (24, 16)))
    x, weight, bias = x.bfloat16().requires_grad_(), weight.requires_grad_(), bias.requires_grad_()
    copies = (weight.detach().bfloat16(), bias.detach().bfloat16()) if copied else (None, None)

    def second(function):
        y = function(x, weight, bias)
        grad_y = torch.ones_like(y).requires_grad_()
        (grad_x,) = torch.autograd.grad(y, x, grad_y, create_graph=True)
        return torch.autograd.grad((grad_x.float() * v).sum(), (grad_y, weight))

    with cupyops.simulate("sm_90"):
        found = second(lambda *given: linear_lowered(*given, *copies))
    for one, right in zip(found, second(lambda x, *given: F.linear(x, *(one.bfloat16() for one in given)))):
        torch.testing.assert_close(one, right)


@pytest.mark.gpu
def test_which_layers_take_it():
    """Under autocast, with gradients, of float32; and the gradients are nearer than PyTorch's."""
    torch.manual_seed(0)
    theirs = torch.nn.Sequential(torch.nn.Linear(768, 768), torch.nn.Linear(768, 2304)).cuda()
    x = torch.randn(16384, 768, device="cuda")
    truth = F.linear(F.linear(x.bfloat16().double(), theirs[0].weight.double(), theirs[0].bias.double()),
                     theirs[1].weight.double(), theirs[1].bias.double())  # fmt: skip
    expected = torch.autograd.grad(truth.square().mean(), theirs[1].weight)[0]
    errors = []
    for swapped in (False, True):
        if swapped:
            cupyops.swap(theirs)
        for _ in range(4):
            with cupyops.never_slower(), torch.autocast("cuda", torch.bfloat16):
                y = theirs(x)
            (found,) = torch.autograd.grad(y.float().square().mean(), theirs[1].weight)
        errors.append((found - expected).norm() / expected.norm())
    assert found.dtype is torch.float32 and errors[1] <= 1.05 * errors[0]
    names = []
    x.requires_grad_()
    for grads in (True, False):
        with torch.set_grad_enabled(grads), torch.autocast("cuda", torch.bfloat16), cupyops.trace() as trace:
            theirs(x)
        names.append({record.operator for record in trace.records})
    assert "cupyops::linear_lowered" in names[0] and "cupyops::linear_lowered" not in names[1]
