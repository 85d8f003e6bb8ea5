"""Results that overwrite what nothing reads afterwards: found where they may, and harmless where backward runs again."""

import pytest
import torch
import torch.nn.functional as F
from compiled import assert_as_eager, compiled

import cupyops
from cupyops._compile import reuse

TARGET = torch.arange(64) * 37 % 1000


@pytest.fixture(autouse=True)
def however_small(monkeypatch):
    monkeypatch.setattr(reuse, "LEAST", 1)


def loss(x, w):
    return F.cross_entropy((x @ w).float(), TARGET)


def given():
    generator = torch.Generator().manual_seed(0)
    shapes = (64, 32), (32, 1000)
    return [torch.randn(*s, generator=generator).to(torch.bfloat16).requires_grad_() for s in shapes]


def overwriting(program):
    return [store for store in program.lowering.stores if store.overwrites]


def test_the_gradient_of_logits_takes_the_place_of_the_logits():
    forward, backward = assert_as_eager(loss, given())
    assert not overwriting(forward)
    assert [store.buffer.shape for store in overwriting(backward)] == [(64, 1000)]


def test_backward_may_run_twice():
    x, w = given()
    with cupyops.simulate("sm_90"):
        y = compiled(loss)(x, w)
        first = torch.autograd.grad(y, (x, w), retain_graph=True)
        second = torch.autograd.grad(y, (x, w))
    assert all(torch.equal(a, b) for a, b in zip(first, second))


def test_neither_inputs_nor_what_is_returned_are_overwritten():
    def function(x, w):
        y = x @ w
        return y, y.exp(), x.sin()

    made = assert_as_eager(function, given())
    assert not any(overwriting(program) for program in made)


def test_what_is_read_at_another_place_is_not_overwritten():
    def function(x, w):
        y = (x @ w).float()
        return (y.flip(0) * y).sum(), (y.t() * 2).contiguous().sum()

    assert_as_eager(function, given())
