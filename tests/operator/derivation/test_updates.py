"""Operators that update statistics beside what they return, and that mix dtypes."""

import pytest
import torch
from torch import Tensor
from toys import Calls, executor, fresh

import cupyops
from cupyops import InputError


def centred(**options):
    """y = x - mean(x), and `mean` moved half of the way to it; the roles that ran."""
    calls = Calls()

    @cupyops.operator(fresh("centred"), updates=("mean",), **options)
    def op(x: Tensor, mean: Tensor | None = None) -> Tensor:
        calls.reference(x)
        found = x.mean(0)
        if mean is not None:
            with torch.no_grad():
                mean.lerp_(found.to(mean.dtype), 0.5)
        return x - found

    @op.forward
    def _(x, mean):
        calls.append("forward")
        found = x.mean(0)
        if mean is not None:
            mean.lerp_(found.to(mean.dtype), 0.5)
        return x - found, ()

    @op.backward
    def _(saved, grad_y):
        calls.append("backward")
        return grad_y - grad_y.mean(0)

    return op, calls


@pytest.fixture(params=["reference", "forward"])
def route(request):
    """CPU tensors take the reference, or the route of kernels."""
    if request.param == "reference":
        yield request.param
    else:
        with executor():
            yield request.param


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("gradient", [False, True], ids=["plain", "gradient"])
def test_updated_once_a_call(route, gradient, compiled):
    op, calls = centred()
    x = torch.randn(4, 3, requires_grad=gradient)
    mean, expected = torch.zeros(3), torch.zeros(3)
    function = torch.compile(lambda x: op(x, mean), fullgraph=True, backend="aot_eager") if compiled else op
    for _ in range(2):
        before = mean._version
        y = function(x) if compiled else op(x, mean)
        expected.lerp_(x.detach().mean(0), 0.5)
        torch.testing.assert_close(mean, expected)
        torch.testing.assert_close(y, x - x.mean(0))
        assert mean._version > before and not mean.requires_grad
        if gradient:
            torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x)[0], 2 * y.detach())
    torch.testing.assert_close(mean, expected)
    assert route in calls


def test_a_second_derivative_updates_nothing(route):
    op, _ = centred()
    x, mean = torch.randn(4, 3, dtype=torch.float64, requires_grad=True), torch.zeros(3, dtype=torch.float64)
    (grad,) = torch.autograd.grad(op(x, mean).square().sum(), x, create_graph=True)
    after = mean.clone()
    grad.square().sum().backward()
    assert torch.equal(mean, after) and torch.equal(after, x.detach().mean(0) / 2)


def test_nothing_to_update(route):
    x = torch.randn(4, 3)
    torch.testing.assert_close(centred()[0](x), x - x.mean(0))


def test_another_dtype_takes_the_kernels_where_it_is_declared():
    x = torch.randn(4, 3).bfloat16()
    with executor():
        for mixed, role in (((), "reference"), (("mean",), "forward")):
            op, calls = centred(mixed=mixed)
            op(x, torch.zeros(3))
            assert calls == [role]


def test_definitions():
    def one(x: Tensor, mean: Tensor | None = None, n: int = 1) -> Tensor: ...

    def wrong(match, **options):
        with pytest.raises(InputError, match=match):
            cupyops.operator(fresh(), **options)(one)

    for name in ("z", "n"):
        wrong(f"updates names '{name}', expected one of: x, mean", updates=(name,))
        wrong(f"mixed names '{name}', expected one of: x, mean", mixed=(name,))
    wrong("updates names 'x', a Tensor; expected one that may be None", updates=("x",))
    wrong("an operator that mutates x cannot have updates as well", mutates=("x",), updates=("mean",))
