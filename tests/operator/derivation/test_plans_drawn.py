"""Calls drawn at random, in a sequence: with plans each gives the bits that it gives without, whatever came before it."""

from __future__ import annotations

import random
from contextlib import ExitStack, nullcontext

import plan_driver as driver
import pytest
import torch
from plan_samples import counted, plainly, same, scaled
from torch.utils.checkpoint import checkpoint

import cupyops
from cupyops._operator.derivation import plans

CALLS = 100


class Draw:
    """One call and its backward, as a function that may be run twice."""

    def __init__(self, chance: random.Random, op) -> None:
        self.chance, self.pick = chance, chance.choice
        self.seed = chance.randrange(1000)
        self.function, self.args = self.pick([self.relu, self.layer_norm, self.softmax, self.cross_entropy, self.toy])(
            op
        )
        self.layout = self.pick(["dense", "dense", "dense", "transposed", "misaligned", "expanded", "negative"])
        self.parameters = chance.random() < 0.7  # whether they want a gradient
        self.grad_mode = chance.random() < 0.8
        self.thread = self.pick([None] * 8 + ["autocast bf16", "autocast fp16", "inference", "hooks", "subclass"])
        self.backward = self.pick(["plain", "plain", "expanded", "twice", "checkpoint", "partial"])
        self.dtype = self.pick([torch.float32, torch.float32, torch.float64, torch.float16])

    def relu(self, op):
        return cupyops.relu, [("x", (4, 8))]

    def layer_norm(self, op):
        eps = self.pick([1e-5, 1e-5, 1e-3])
        return (lambda x, w, b: cupyops.layer_norm(x, (8,), w, b, eps)), [("x", (4, 8)), ("w", (8,)), ("b", (8,))]

    def softmax(self, op):
        dim = self.pick([-1, -1, 0])
        return (lambda x: cupyops.softmax(x, dim)), [("x", (4, 8))]

    def cross_entropy(self, op):
        reduction = self.pick(["mean", "mean", "none"])
        target = torch.arange(4) % 3
        return (lambda x: cupyops.cross_entropy(x, target, reduction=reduction)), [("x", (4, 8))]

    def toy(self, op):
        by = self.pick([2.0, 2.0, 2, 3.0])
        return (lambda x: op(x, by)), [("x", self.pick([(4, 8), (5, 3)]))]

    def laid_out(self, value):
        if self.layout == "transposed" and value.dim() == 2:
            return value.t().contiguous().t()
        if self.layout == "misaligned":
            return torch.cat([value.flatten()[:1], value.flatten()])[1:].view(value.shape)
        if self.layout == "expanded" and value.dim() == 2:
            return value[:1].expand(value.shape)
        return torch._neg_view(value) if self.layout == "negative" else value

    def run(self):
        generator = torch.Generator().manual_seed(self.seed)
        values = [
            self.laid_out(torch.randn(shape, generator=generator).to(self.dtype)) if name == "x"
            else torch.randn(shape, generator=generator).to(self.dtype)
            for name, shape in self.args
        ]  # fmt: skip
        if self.thread == "subclass":
            values[0] = values[0].as_subclass(Plain)
        for index, value in enumerate(values):
            value.requires_grad_(index == 0 or self.parameters)
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(self.grad_mode))
            if self.thread in ("autocast bf16", "autocast fp16"):
                dtype = torch.bfloat16 if self.thread.endswith("bf16") else torch.float16
                stack.enter_context(torch.autocast("cpu", dtype=dtype))
            stack.enter_context(torch.inference_mode() if self.thread == "inference" else nullcontext())
            if self.thread == "hooks":
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t))
            if self.backward == "checkpoint" and self.thread is None and self.grad_mode:
                y = checkpoint(self.function, *values, use_reentrant=False)
            else:
                y = self.function(*values)
        found = [y]
        if y.requires_grad:
            leaves = values[:1] if self.backward == "partial" else [v for v in values if v.requires_grad]
            grad = torch.ones_like(y) / 2
            grad = grad[..., :1].expand(y.shape) if self.backward == "expanded" and y.dim() else grad
            times = 2 if self.backward == "twice" else 1
            for time in range(times):
                found += torch.autograd.grad(y, leaves, grad.as_subclass(torch.Tensor), retain_graph=time < times - 1)
        return [one.as_subclass(torch.Tensor) for one in found]


class Plain(torch.Tensor):
    """A subclass, which takes a route of its own."""


@pytest.mark.parametrize("how", ["interpreted", "generated"])
@pytest.mark.parametrize("seed", range(3))
def test_the_bits_of_plain_calls(seed, how):
    chance = random.Random(seed)
    plans.forget_all()
    replayed = recorded = 0
    with cupyops.simulate() if how == "interpreted" else driver.driver():
        op = scaled(autocast="lower")
        draws = [Draw(chance, op) for _ in range(12)]
        for step in range(CALLS):
            draw = chance.choice(draws)
            with counted() as count:
                found = draw.run()
            replayed += not (count.misses or count.backward_misses)
            recorded += count.recorded
            assert same(found, plainly(draw.run)), (step, vars(draw))
    plans.forget_all()
    assert replayed > 20 and recorded > 10
