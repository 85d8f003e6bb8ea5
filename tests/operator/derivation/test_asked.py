"""Which gradients a backward computes: those that the task under way will use, where tensors are large."""

from __future__ import annotations

import itertools

import pytest
import torch
from plan_samples import counted
from twins import CASES

import cupyops
from cupyops._operator.derivation import autograd, build
from cupyops._util import torch_private

SEVERAL = {name: case for name, case in CASES.items() if case.kernels and len(case.tensors()) > 1}
CHOOSE = [name for name in SEVERAL if cupyops.operators()[f"cupyops::{name}"].definition.backward_chooses]


@pytest.fixture
def of_any_size(monkeypatch):
    monkeypatch.setattr(autograd, "_LARGE", 1)


def graph(case):
    """The tensors, which all want a gradient, and the result of each side."""
    tensors = [one.requires_grad_() for one in case.tensors()]
    ours, theirs = (function(*tensors, *case.others()) for function in (case.ours, case.theirs))
    return tensors, ours, theirs


def test_those_of_products_are_among_them():
    assert {"linear", "matmul", "conv2d", "linear_act", "gated_linear"} <= {*CHOOSE}


@pytest.mark.parametrize("name", CHOOSE)
def test_each_choice_in_turns(name, of_any_size):
    """One graph is asked for different gradients again and again: each recording is for its own choice."""
    with cupyops.simulate():
        tensors, ours, theirs = graph(SEVERAL[name])
        grad = torch.randn(theirs.shape, generator=torch.Generator().manual_seed(1)).to(theirs.dtype)
        choices = [one for n in (1, len(tensors)) for one in itertools.combinations(tensors, n)]
        for asked in choices * 4:
            expected = torch.autograd.grad(theirs, asked, grad, retain_graph=True)
            found = torch.autograd.grad(ours, asked, grad.to(ours.dtype), retain_graph=True)
            for one, other in zip(found, expected):
                torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("name", ["linear", "matmul"])
def test_a_product_less(name, of_any_size):
    with cupyops.simulate():
        tensors, ours, _ = graph(SEVERAL[name])
        launches = {}
        for asked in ([tensors[0]], [tensors[1]], tensors[:2]):
            with cupyops.trace() as trace:
                torch.autograd.grad(ours, asked, torch.ones_like(ours), retain_graph=True)
            launches[len(asked), asked[0] is tensors[0]] = len(trace.launches())
    assert launches == {(1, True): 1, (1, False): 1, (2, True): 2}


def test_inputs_of_backward_and_what_lies_behind_them(of_any_size):
    x, weight = torch.randn(8, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    with cupyops.simulate():
        for _ in range(6):
            y = cupyops.linear(2 * x, weight)
            (behind,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
            torch.testing.assert_close(behind, 2 * weight.sum(0).expand(8, 6))
            x.grad = weight.grad = None
            y.sum().backward(inputs=[weight])
            assert x.grad is None
            torch.testing.assert_close(weight.grad, 2 * x.sum(0).expand(4, 6))
            cupyops.linear(2 * x, weight).sum().backward()
            torch.testing.assert_close(x.grad, behind)
            torch.testing.assert_close(weight.grad, 4 * x.sum(0).expand(4, 6))


def test_they_are_replayed(of_any_size):
    x, weight = torch.randn(8, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    with cupyops.simulate(), counted() as count:
        for times in range(12):
            y = cupyops.linear(x, weight)
            torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True)
            torch.autograd.grad(y, weight, torch.ones_like(y))
            if times == 7:
                before = count.backward_misses
    assert count.backward_misses == before > 0


def test_the_one_that_is_used_is_not_asked_of(monkeypatch, of_any_size):
    """PyTorch raises for a leaf whose gradient is used: a recording knows which one that is."""
    found, ask = [], torch_private.will_use_gradient
    monkeypatch.setattr(torch_private, "will_use_gradient", lambda node: found.append(ask(node)) or found[-1])
    x, weight, bias = (torch.randn(*size, requires_grad=True) for size in ((8, 6), (4, 6), (4,)))
    with cupyops.simulate():
        for one in (x, weight, bias):
            for _ in range(6):
                y = cupyops.linear(x, weight, bias)
                found.clear()
                (grad,) = torch.autograd.grad(y, one, torch.ones_like(y))
            assert grad.shape == one.shape and found[-2:] == [False, False]  # of the recording that fits


def test_small_ones_are_not_asked_of(monkeypatch):
    refuse = lambda *_: pytest.fail("autograd is asked")
    monkeypatch.setattr(autograd, "will_be_used", refuse)
    monkeypatch.setattr(build, "will_be_used", refuse)
    x, weight = torch.randn(8, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    with cupyops.simulate():
        for _ in range(6):
            y = cupyops.linear(x, weight)
            torch.autograd.grad(y, x, torch.ones_like(y))
