"""gated_linear: half of a gated feed-forward layer. `tools/forms_ab.py gated_linear` has its epilogue beside it."""

import math

import torch
from common import HALF
from torch.nn import functional as F

import cupyops
from cupyops.bench import Case


def eager(x, weight, up, f):
    weight, up = weight.chunk(2) if up is None else (weight, up)
    return f(F.linear(x, weight)) * F.linear(x, up)


def case(activation, m, n, k, packed=False):
    f = F.silu if activation == "silu" else F.gelu

    def make(device, dtype):
        shapes = [(m, k), (2 * n, k)] if packed else [(m, k), (n, k), (n, k)]
        x, *weights = (torch.randn(shape, device=device) for shape in shapes)
        made = x, *(weight / math.sqrt(k) for weight in weights)  # products near 1
        return tuple(t.to(dtype).requires_grad_() for t in made)

    flops, inputs = 4.0 * m * n * k, m * k + 2 * k * n
    return Case(
        op=f"gated_linear {activation}{' packed' if packed else ''}", size=f"{m}x{n}x{k}", dtype=HALF, make=make,
        ours=lambda x, w, up=None: cupyops.gated_linear(x, w, up, activation),
        eager=lambda x, w, up=None: eager(x, w, up, f), liger=None,
        forward_flops=flops, backward_flops=2 * flops, forward_bytes=(inputs + 3 * m * n) * HALF.itemsize,
        backward_bytes=(2 * inputs + 5 * m * n) * HALF.itemsize,
        small=lambda: case(activation, 5, 6, 33, packed),
    )  # fmt: skip


def cases():
    for packed in (False, True):
        yield case("silu", 8192, 14336, 4096, packed)
        yield case("silu", 8192, 5632, 2048, packed)
    yield case("gelu", 8192, 5632, 2048)
    yield case("silu", 4095, 5631, 2048)
