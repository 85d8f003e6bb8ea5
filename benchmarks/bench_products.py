"""products: forty linear layers by their three products: y = x weight^T, grad_x = grad_y weight, grad_weight = grad_y^T x.

As they are called: where no kernel of ours is measured as fast, PyTorch's own is what runs, and `cupyops.trace()` says so.
"""

import math

import torch
from common import HALF

import cupyops
from cupyops.bench import Case

LAYERS = [  # tokens, outputs, inputs
    # language models and vision transformers
    (4096, 4096, 4096), (8192, 4096, 4096), (8192, 6144, 4096), (8192, 14336, 4096), (8192, 4096, 14336),
    (8192, 32000, 4096), (8192, 2048, 2048), (8192, 512, 2048), (8192, 8192, 2048), (8192, 2048, 8192),
    (16384, 768, 768), (16384, 2304, 768), (16384, 3072, 768), (16384, 768, 3072), (25216, 768, 768),
    (25216, 3072, 768), (2048, 5120, 5120), (65536, 1024, 1024), (65536, 4096, 1024), (8192, 8192, 8192),
    # few tokens
    (1, 4096, 4096), (1, 14336, 4096), (16, 4096, 4096), (64, 4096, 4096), (128, 4096, 4096), (256, 4096, 4096),
    (512, 4096, 4096), (1024, 4096, 4096),
]  # fmt: skip
ODD = [
    (1001, 999, 1003), (777, 1111, 555), (2047, 2049, 2051), (4097, 4095, 4088), (4096, 4096, 4095), (4096, 4095, 4096),
    (8192, 4097, 4096), (16384, 50257, 768), (8191, 4095, 1023),
]  # fmt: skip
BATCHED = [(64, 1024, 1024, 64), (128, 512, 512, 128), (16, 2048, 2048, 128)]


def case(layer, way):
    *batch, m, n, k = layer

    def make(device, dtype):
        x, weight, grad = (torch.randn((*batch, *shape), device=device) for shape in ((m, k), (n, k), (m, n)))
        x, weight, grad = x.to(dtype), (weight / math.sqrt(k)).to(dtype), (grad / math.sqrt(n)).to(dtype)
        return {"forward": (x, weight.mT), "grad_x": (grad, weight), "grad_weight": (grad.mT, x)}[way]

    elements = m * k + n * k + m * n
    return Case(
        "products", f"{'x'.join(map(str, layer))} {way}", HALF, make, cupyops.matmul, torch.matmul, compiled=False,
        forward_flops=2.0 * math.prod(layer), forward_bytes=math.prod(batch) * elements * HALF.itemsize,
        small=lambda: case((*(2 for _ in batch), 5, 6, 33), way),
    )  # fmt: skip


def cases():
    for layer in [*LAYERS, *ODD, *BATCHED]:
        for way in ("forward", "grad_x", "grad_weight"):
            yield case(layer, way)
