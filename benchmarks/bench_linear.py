"""linear: the layers of language models, and one of a small network."""

import math

import torch
from common import FLOAT, HALF
from torch.nn import functional as F

import cupyops
from cupyops.bench import Case


def case(m, n, k, dtype, want=None):
    def make(device, dtype):
        x, w, b = (torch.randn(shape, device=device) for shape in ((m, k), (n, k), (n,)))
        return tuple(t.to(dtype).requires_grad_() for t in (x, w / math.sqrt(k), b))  # outputs near 1

    flops, inputs = 2.0 * m * n * k, m * k + k * n
    return Case(
        "linear", f"{m}x{n}x{k}", dtype, make, cupyops.linear, F.linear, forward_flops=flops, backward_flops=2 * flops,
        forward_bytes=(inputs + m * n) * dtype.itemsize, backward_bytes=(2 * inputs + m * n) * dtype.itemsize,
        want=want, small=lambda: case(5, 6, 33, dtype),
    )  # fmt: skip


def cases():
    yield case(4096, 4096, 4096, HALF, (750, 730))
    yield case(8192, 14336, 4096, HALF, (740, 740))
    yield case(64, 128, 3136, FLOAT)
