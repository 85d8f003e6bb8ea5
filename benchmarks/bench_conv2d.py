"""conv2d: the layers of a small network, and one for the tensor cores."""

import math

import torch
from common import FLOAT, HALF
from torch.nn import functional as F

import cupyops
from cupyops.bench import Case


def case(images, channels, filters, size, dtype, unit="us", want=None):
    def make(device, dtype):
        shapes = ((images, channels, size, size), (filters, channels, 3, 3), (filters,))
        x, w, b = (torch.randn(shape, device=device) for shape in shapes)
        return tuple(t.to(dtype).requires_grad_() for t in (x, w / math.sqrt(9 * channels), b))

    flops = 2.0 * images * filters * size * size * channels * 9
    return Case(
        "conv2d", f"n{images} {channels}->{filters} {size}x{size}", dtype, make,
        lambda x, w, b: cupyops.conv2d(x, w, b, padding=1), lambda x, w, b: F.conv2d(x, w, b, padding=1),
        forward_flops=flops, backward_flops=2 * flops, unit=unit, want=want,
        small=lambda: case(2, channels if channels < 4 else 3, 5, 6, dtype),
    )  # fmt: skip


def cases():
    yield case(64, 1, 32, 28, FLOAT, want=(8, 25))
    yield case(64, 32, 64, 14, FLOAT, want=(15, 45))
    yield case(64, 256, 256, 14, HALF, unit="TFLOP/s", want=(310, 280))
