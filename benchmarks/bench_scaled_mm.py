"""scaled_mm: products of float8 matrices beside PyTorch's own, which some of them are but for `cupyops.never_slower(False)`.

m x n x k: layers of Llama 3 8B for 8,192 tokens and for a few, square ones, and sizes that are no whole tiles.
"""

import torch
from common import HALF

import cupyops
from cupyops.bench import Case

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
LARGE = [(8192, 4096, 4096), (8192, 14336, 4096), (8192, 4096, 14336), (4096, 4096, 4096), (8192, 8192, 8192)]
FEW = [(16, 4096, 4096), (64, 4096, 4096), (128, 4096, 4096), (1000, 4096, 4096), (4097, 4112, 4080)]


def case(m, n, k, by_row, fast=False, second=E4M3):
    def make(device, dtype):
        a, b = torch.randn(m, k, device=device).to(E4M3), torch.randn(n, k, device=device).to(second)
        shapes = ((m, 1), (1, n)) if by_row else ((), ())
        return a, b, *(torch.rand(shape, device=device) / k**0.25 + 0.01 for shape in shapes)

    def eager(a, b, scale_a, scale_b):
        if a.dtype is torch.float64:
            return a @ b.T * (scale_a * scale_b)
        return torch._scaled_mm(a, b.T, scale_a, scale_b, out_dtype=HALF, use_fast_accum=fast)

    def ours(a, b, scale_a, scale_b):
        return cupyops.scaled_mm(a, b.T, scale_a, scale_b, out_dtype=HALF, use_fast_accum=fast)

    kind = ("rows" if by_row else "one scale") + ", e5m2" * (second is E5M2) + ", fast" * fast
    return Case(
        op="scaled_mm", size=f"{m}x{n}x{k}, {kind}", dtype=HALF, make=make,
        ours=ours, eager=eager, liger=None,
        forward_flops=2.0 * m * n * k, forward_bytes=m * k + n * k + m * n * HALF.itemsize, compiled=False,
        small=lambda: case(32, 48, 64, by_row, fast, second),
    )  # fmt: skip


def cases():
    for by_row in (True, False):
        for size in LARGE + FEW:
            yield case(*size, by_row)
            yield case(*size, by_row, fast=True)
    yield case(8192, 4096, 4096, True, second=E5M2)
