"""linear_epilogue: epilogues that are lines of C. `tools/forms_ab.py linear_epilogue` compares the fused kernel."""

import math

import torch
from common import HALF
from torch.nn import functional as F

import cupyops
from cupyops.bench import Case

EPILOGUES = {
    "quick_gelu": (
        cupyops.linear_epilogue("bench_quick_gelu(T z) -> T y", "y = z * sigmoid(1.702 * z)"),
        lambda z: z * torch.sigmoid(1.702 * z),
        0,
    ),
    "quick_gelu + residual": (
        cupyops.linear_epilogue("bench_quick_gelu_add(T z, T r) -> T y", "y = z * sigmoid(1.702 * z) + r"),
        lambda z, r: z * torch.sigmoid(1.702 * z) + r,
        1,
    ),
    "softplus": (
        cupyops.linear_epilogue("bench_softplus(T z) -> T y", "y = z > 20 ? z : log1p(exp(z))"),
        F.softplus,
        0,
    ),
    "softcap": (
        cupyops.linear_epilogue("bench_softcap(T z) -> T y", "y = 30 * tanh(z / 30)"),
        lambda z: 30 * torch.tanh(z / 30),
        0,
    ),
}


def case(name, m, n, k):
    ours, epilogue, matrices = EPILOGUES[name]

    def make(device, dtype):
        shapes = (m, k), (n, k), (n,), *[(m, n)] * matrices
        x, weight, *others = (torch.randn(shape, device=device) for shape in shapes)
        made = (x, weight / math.sqrt(k), *others)  # results near 1
        return tuple(t.to(dtype).requires_grad_() for t in made)

    flops, inputs = 2.0 * m * n * k, m * k + k * n + m * n * matrices
    return Case(
        op=f"linear_epilogue {name}", size=f"{m}x{n}x{k}", dtype=HALF, make=make, ours=ours,
        eager=lambda x, w, b, *captured: epilogue(F.linear(x, w, b), *captured), liger=None,
        forward_flops=flops, backward_flops=2 * flops, forward_bytes=(inputs + 2 * m * n) * HALF.itemsize,
        backward_bytes=(2 * inputs + 4 * m * n) * HALF.itemsize,
        small=lambda: case(name, 5, 6, 33),
    )  # fmt: skip


def cases():
    yield case("quick_gelu", 16384, 3072, 768)
    yield case("quick_gelu + residual", 8192, 4096, 4096)
    yield case("quick_gelu + residual", 16384, 3072, 768)
    yield case("quick_gelu + residual", 2048, 11008, 4096)
    yield case("softplus", 16384, 3072, 768)
    yield case("softcap", 8192, 32000, 4096)
