"""max_pool2d: windows that tile and windows that overlap, both layouts."""

import math

import torch
from common import FLOAT, HALF, beside
from torch.nn import functional as F

import cupyops
from cupyops.bench import Case


def case(shape, window, dtype, last=False, want=None):
    memory = torch.channels_last if last else torch.contiguous_format

    def make(device, dtype):
        return (torch.randn(shape, device=device).to(dtype, memory_format=memory).requires_grad_(),)

    x = torch.empty(shape, device="meta")
    moved = (math.prod(shape) + F.max_pool2d(x, **window).numel()) * dtype.itemsize
    name = (
        "x".join(map(str, shape)) + " " + " ".join(f"{k[0]}{v}" for k, v in window.items()) + (" last" if last else "")
    )
    return Case(
        "max_pool2d", name, dtype, make, lambda x: cupyops.max_pool2d(x, **window), lambda x: F.max_pool2d(x, **window),
        forward_bytes=moved, backward_bytes=moved, want=want,
        small=lambda: case((2, 3, 9, 11), window, dtype, last),
    )  # fmt: skip


def cases():
    by_two, by_three = {"kernel_size": 2}, {"kernel_size": 3, "stride": 2, "padding": 1}
    yield case((256, 64, 112, 112), by_two, FLOAT, want=(4100, 3800))
    yield case((256, 64, 112, 112), by_two, HALF)
    yield case((256, 64, 112, 112), by_three, HALF)
    yield case((256, 64, 112, 112), by_three, HALF, last=True)
    yield beside(case((256, 64, 111, 111), by_two, HALF), case((256, 64, 112, 112), by_two, HALF))
