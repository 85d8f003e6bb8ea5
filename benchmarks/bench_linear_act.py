"""linear_act: what follows a linear layer of a transformer. `tools/forms_ab.py linear_act` has each epilogue beside it."""

import math

import torch
from common import HALF
from torch.nn import functional as F

import cupyops
from cupyops.bench import Case

FUNCTIONS = {
    "none": lambda z: z,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
    "silu": F.silu,
}


def eager(x, weight, bias, activation, residual):
    y = FUNCTIONS[activation](F.linear(x, weight, bias))
    return y if residual is None else y + residual


def case(activation, m, n, k, residual=False):
    def make(device, dtype):
        shapes = (m, k), (n, k), (n,), *([(m, n)] if residual else [])
        x, weight, *others = (torch.randn(shape, device=device) for shape in shapes)
        made = (x, weight / math.sqrt(k), *others)  # outputs near 1
        return tuple(t.to(dtype).requires_grad_() for t in made)

    flops, inputs = 2.0 * m * n * k, m * k + k * n + m * n * residual
    return Case(
        op=f"linear_act {activation}{' + residual' if residual else ''}", size=f"{m}x{n}x{k}", dtype=HALF, make=make,
        ours=lambda x, w, b, r=None: cupyops.linear_act(x, w, b, activation, r),
        eager=lambda x, w, b, r=None: eager(x, w, b, activation, r), liger=None,
        forward_flops=flops, backward_flops=2 * flops, forward_bytes=(inputs + 2 * m * n) * HALF.itemsize,
        backward_bytes=(2 * inputs + 4 * m * n) * HALF.itemsize,
        small=lambda: case(activation, 5, 6, 33, residual),
    )  # fmt: skip


def cases():
    for activation in ("relu", "gelu", "gelu_tanh", "silu"):
        yield case(activation, 16384, 3072, 768)
    yield case("gelu", 8192, 16384, 4096)
    yield case("gelu_tanh", 8192, 16384, 4096)
    yield case("none", 16384, 768, 3072, residual=True)
    yield case("none", 8192, 4096, 4096, residual=True)
    yield case("gelu", 8191, 4095, 4088, residual=True)
