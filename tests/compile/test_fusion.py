"""What fuses: values and gradients of small functions by their kernels in the simulator, and how many kernels they are."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from compiled import assert_as_eager, traced

from cupyops._compile.values import Unit

HALF = torch.bfloat16


def rand(*shape, dtype=torch.float32, grad=True):
    generator = torch.Generator().manual_seed(sum(shape) + 1)
    return torch.randn(*shape, generator=generator).to(dtype).requires_grad_(grad)


def channels_last(x):
    return x.detach().contiguous(memory_format=torch.channels_last).requires_grad_(x.requires_grad)


def rms_norm(x, weight):
    return weight * (x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rotated(x, cos, sin):
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def norm_relu(x, weight, bias):
    return F.relu(F.batch_norm(x, None, None, weight, bias, True))


TARGET = torch.arange(24) * 37 % 1000

# name: (function, arguments, kernels of forward, kernels of backward)
CASES = {
    "sum of products": (lambda a, b: a + b * 2, [rand(4, 64), rand(4, 64)], 1, 1),
    "broadcast": (lambda a, b: (a * b).exp(), [rand(4, 64), rand(64)], 1, 1),
    "gelu in bfloat16": (lambda a, b: F.gelu(a) * b, [rand(4, 64, dtype=HALF), rand(4, 64, dtype=HALF)], 1, 1),
    "gated": (lambda a, b: F.silu(a) * b, [rand(64, 96, dtype=HALF), rand(64, 96, dtype=HALF)], 1, 1),
    "softmax": (lambda a: F.softmax(a, -1), [rand(6, 96, dtype=HALF)], 1, 1),
    "layer_norm": (lambda a, w, b: F.layer_norm(a, (96,), w, b), [rand(16, 96), rand(96), rand(96)], 1, 2),
    "layer_norm of wide rows": (
        lambda a, w, b: F.layer_norm(a, (1536,), w, b),
        [rand(600, 1536, dtype=HALF), rand(1536, dtype=HALF), rand(1536, dtype=HALF)],
        1,
        2,
    ),
    "rms_norm": (rms_norm, [rand(16, 4, 128, dtype=HALF), rand(128, dtype=HALF)], 1, 2),
    "bias and gelu": (
        lambda a, w, b: F.gelu(F.linear(a, w, b)),
        [rand(1024, 64, dtype=HALF), rand(96, 64, dtype=HALF), rand(96, dtype=HALF)],
        0,
        2,
    ),
    "cross_entropy": (lambda a: F.cross_entropy(a, TARGET), [rand(24, 1000)], 2, 1),
    "batch_norm and relu": (norm_relu, [rand(4, 8, 6, 6), rand(8), rand(8)], 5, 4),
    "batch_norm and relu, channels_last": (norm_relu, [channels_last(rand(8, 16, 10, 10)), rand(16), rand(16)], 4, 3),
    "rotary embedding": (
        rotated,
        [rand(2, 4, 16, 64, dtype=HALF), rand(16, 64, dtype=HALF, grad=False), rand(16, 64, dtype=HALF, grad=False)],
        1,
        1,
    ),
    "four reductions": (lambda a: (a.mean(), a.sum(0), a.amax(1), a.var(1)), [rand(32, 48)], 2, 1),
    "sums of an odd number of columns": (lambda a: a.float().sum(0), [rand(700, 3, 7, 7, dtype=HALF)], 2, 1),
    "sums of few rows and an odd number of columns": (lambda a: a.sum(0), [rand(40, 3, 7, 7)], 1, 0),
    "sums of tiles that are partly empty": (lambda a: (a.sum(0), a.exp()), [rand(600, 96, dtype=HALF)], 2, 1),
    "sums beside a parameter, in tiles that are partly empty": (
        lambda a, b: ((a - b) * a).sum(0),
        [rand(600, 100), rand(100)],
        2,
        2,
    ),
    "layer_norm of an image's channels": (
        lambda a, w, b: F.layer_norm(a.flatten(2).mT, (48,), w, b),
        [rand(2, 48, 5, 5, dtype=HALF), rand(48, dtype=HALF), rand(48, dtype=HALF)],
        1,
        2,
    ),
    "permuted": (lambda a: (a.view(4, 8, 2, 16).transpose(1, 2) * 2).reshape(8, -1), [rand(4, 8, 32)], 1, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_as_eager_in_few_kernels(name):
    function, arguments, forward, backward = CASES[name]
    made = assert_as_eager(function, arguments)
    assert [len(program.kernels) for program in made] == [forward, backward]


def test_texts_do_not_depend_on_addresses(monkeypatch):
    """Sets of steps are in the order of their addresses; kernels have the same text in each process, so they are cached."""

    def text(sign):
        numbers = itertools.count(1)
        monkeypatch.setattr(Unit, "__hash__", lambda step: sign * step.__dict__.setdefault("number", next(numbers)))
        function = traced(lambda x: [torch.var_mean(x, (0, 2))[0], x.sum(1)])
        function(torch.ones(5, 6, 40, 33))
        return function.runners[0].make(()).text()

    assert text(1) == text(-1)


def text_of(function, *arguments):
    fast = traced(function)
    fast(*arguments)
    return fast.runners[0].make(()).text()


def test_a_pointwise_kernel_goes_as_its_result_lies():
    """The first of its values, which it alone uses, may lie in another order."""
    x = channels_last(rand(2, 8, 4, 4, grad=False))
    text = text_of(lambda x: [F.interpolate(x, scale_factor=2, mode="bilinear").relu()], x)
    assert "Vector<float, 4> w0" in text and "*(const Vector<float, 4>*)(g0 + " in text
