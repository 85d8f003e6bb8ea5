"""matmul: bf16 by the tensor cores, fp32 without tf32, an odd size."""

import torch
from common import FLOAT, HALF, randn

import cupyops
from cupyops.bench import Case


def case(m, n, k, dtype, want=None):
    flops, inputs = 2.0 * m * n * k, m * k + k * n
    return Case(
        "matmul", f"{m}x{n}x{k}", dtype, randn((m, k), (k, n)), cupyops.matmul, torch.matmul, forward_flops=flops,
        forward_bytes=(inputs + m * n) * dtype.itemsize, backward_bytes=(2 * inputs + m * n) * dtype.itemsize,
        backward_flops=2 * flops, want=want, small=lambda: case(5, 6, 33, dtype),
    )  # fmt: skip


def cases():
    yield case(4096, 4096, 4096, FLOAT, (52, 52))
    yield case(4096, 4096, 4096, HALF)
    yield case(1001, 999, 1003, HALF)
