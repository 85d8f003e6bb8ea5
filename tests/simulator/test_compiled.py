"""torch.compile inside `simulate()`: the graphs are those that are made outside of it."""

import contextlib

import pytest
import torch

import cupyops


@pytest.fixture(autouse=True)
def anew():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def _unflatten(x):
    return x.unflatten(-1, (2, -1)) * 2


def _split(x):
    return torch.cat([one * n for n, one in enumerate(x.split(2, dim=-1))]).norm(dim=0)


def _arange(x):
    """`device` and `shape` of a tensor, of which tracing a mode took one for the other."""
    return x + torch.arange(x.shape[-1], device=x.device) + x.new_empty(x.shape).fill_(x.dim())


def _operator(x):
    return cupyops.gelu(x.unflatten(0, (-1, 2))).flatten()


@pytest.mark.parametrize("function", [_unflatten, _split, _arange, _operator])
def test_one_graph_as_outside(function):
    x = torch.randn(4, 4)
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    for opened in (cupyops.simulate, contextlib.nullcontext, cupyops.simulate):
        with opened():
            torch.testing.assert_close(compiled(x), function(x))


def test_a_mode_of_the_users_own_is_traced():
    class Doubling(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            found = func(*args, **(kwargs or {}))
            return 2 * found if func is torch.sin else found

    x = torch.randn(3)
    compiled = torch.compile(torch.sin, backend="eager", fullgraph=True)
    with cupyops.simulate(), Doubling():
        torch.testing.assert_close(compiled(x), 2 * torch.sin(x))
    with Doubling(), cupyops.simulate():
        torch.testing.assert_close(compiled(x), 2 * torch.sin(x))
    torch.testing.assert_close(compiled(x), torch.sin(x))


def test_a_graph_break_leaves_the_simulator_on():
    def function(x):
        y = x.unflatten(-1, (2, -1)) * 2
        torch._dynamo.graph_break()
        return cupyops.relu(y).flatten(1)

    x = torch.randn(4, 4)
    with cupyops.simulate(), cupyops.trace() as trace:
        torch.testing.assert_close(torch.compile(function, backend="eager")(x), (2 * x).relu())
        cupyops.relu(x)
    assert trace.launches()
