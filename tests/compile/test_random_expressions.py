"""Random expressions, forward and backward: what fuses in ways that nobody has thought of is still what eager computes."""

import math
import random

import pytest
import torch
import torch.nn.functional as F
from compiled import assert_as_eager

SEEDS = range(20)
DTYPES = (torch.float32, torch.float32, torch.float16, torch.bfloat16)


class Expression:
    """A chain of operators on inputs that broadcast, drawn from a seed."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        draw, self.dtype = self.random, self.random.choice(DTYPES)
        self.shape = [draw.choice([1, 2, 3, 4, 5, 6, 8, 12, 16, 33, 64]) for _ in range(draw.choice([1, 2, 3]))]
        self.shape.append(draw.choice([1, 7, 16, 33, 64, 96]))
        while math.prod(self.shape) > 20000:
            self.shape[draw.randrange(len(self.shape) - 1)] = 2
        self.generator = torch.Generator().manual_seed(seed)
        self.inputs = [self._input(first=k == 0) for k in range(draw.choice([1, 2, 2, 3]))]
        self.steps = [
            (draw.choice(STEPS), draw.random(), draw.randrange(len(self.inputs))) for _ in range(draw.randint(3, 8))
        ]
        self.end = draw.choice(ENDS)

    def _input(self, first):
        draw, shape = self.random, list(self.shape)
        if not first:
            shape = [1 if draw.random() < 0.3 else size for size in shape]
            while len(shape) > 1 and shape[0] == 1 and draw.random() < 0.5:
                shape = shape[1:]
        x = torch.randn(shape, generator=self.generator) * 0.7
        if draw.random() < 0.3 and x.dim() >= 2:
            x = x.transpose(-1, -2).contiguous().transpose(-1, -2)
        x = x.to(self.dtype)
        return x.requires_grad_(draw.random() < 0.9 or first)

    def __call__(self, *given):
        x = given[0]
        for step, number, which in self.steps:
            x = step(x, number, given[which])
        return self.end(x)


def other(x, y):
    """y, or its mean where the shapes do not broadcast."""
    fits = y.dim() <= x.dim() and all(a in (1, b) for a, b in zip(reversed(y.shape), reversed(x.shape)))
    return y if fits else y.mean()


def halves_of(x):
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)


def wide(x):
    return x.double() if x.dtype is torch.float64 else x.float()


def dim(x, r):
    return int(r * x.dim())


STEPS = [
    *(
        lambda x, r, y, op=op: op(x, other(x, y))
        for op in (torch.add, torch.sub, torch.mul, torch.maximum)
        for _ in range(2)
    ),
    lambda x, r, y: x / (other(x, y).square() + 1),
    lambda x, r, y: torch.where(x > other(x, y), x, x * 0.2),
    lambda x, r, y: torch.exp(-x * x * 0.1),
    lambda x, r, y: torch.rsqrt(x * x + 1),
    lambda x, r, y: torch.log1p(x * x),
    lambda x, r, y: x.tanh(),
    lambda x, r, y: x.sigmoid() * 2,
    lambda x, r, y: F.relu(x) + 0.1,
    lambda x, r, y: F.gelu(x),
    lambda x, r, y: F.silu(x),
    lambda x, r, y: x.abs(),
    lambda x, r, y: x.clamp(-1.0, 1.5),
    lambda x, r, y: wide(x),
    lambda x, r, y: x.to(y.dtype),
    lambda x, r, y: x.softmax(dim(x, r)),
    lambda x, r, y: F.layer_norm(x, x.shape[-1:]),
    lambda x, r, y: x - x.mean(dim(x, r), keepdim=True),
    lambda x, r, y: x - x.amax(dim(x, r), keepdim=True),
    lambda x, r, y: x * x.sum(dim(x, r), keepdim=True) * 0.1,
    lambda x, r, y: x * torch.rsqrt(wide(x).pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype),
    lambda x, r, y: x.permute(*range(1, x.dim()), 0),
    lambda x, r, y: x.transpose(0, -1),
    lambda x, r, y: x.reshape(-1, x.shape[-1]),
    lambda x, r, y: x.reshape(-1)[None],
    lambda x, r, y: halves_of(x) if x.shape[-1] > 2 else x,
    lambda x, r, y: F.pad(x, (1, 2))[..., 1:],
    lambda x, r, y: x.flip(dim(x, r)),
    lambda x, r, y: x[..., :: 1 + int(r * 2)],
    lambda x, r, y: x.unsqueeze(dim(x, r)).expand(*x.shape[: dim(x, r)], 2, *x.shape[dim(x, r) :]).sum(dim(x, r)),
    lambda x, r, y: torch.stack([x, x * 0.5], dim(x, r)).amax(dim(x, r)),
]
ENDS = [
    lambda x: x,
    lambda x: x.sum(),
    lambda x: x.mean(),
    lambda x: x.sum(0),
    lambda x: x.amax(-1),
    lambda x: wide(x).var(-1, correction=0),
    lambda x: (x, x.mean(-1), (x * x).sum(0)),
    lambda x: (wide(x).logsumexp(-1), x.t() if x.dim() == 2 else x * 2),
]


@pytest.mark.parametrize("seed", SEEDS)
def test_random_expressions(seed):
    expression = Expression(seed)
    assert_as_eager(expression, expression.inputs, dynamo=False, factor=8.0, eps=32.0)
