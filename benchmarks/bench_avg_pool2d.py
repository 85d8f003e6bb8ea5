"""avg_pool2d: windows that tile and windows that overlap, both layouts, and whole planes."""

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
    moved = (math.prod(shape) + F.avg_pool2d(x, **window).numel()) * dtype.itemsize
    name = (
        "x".join(map(str, shape)) + " " + " ".join(f"{k[0]}{v}" for k, v in window.items()) + (" last" if last else "")
    )

    def eager(x):  # of a contiguous copy: PyTorch's gradient channels last is another where windows overlap
        return F.avg_pool2d(x.contiguous(), **window)

    return Case(
        "avg_pool2d", name, dtype, make, lambda x: cupyops.avg_pool2d(x, **window), eager,
        forward_bytes=moved, backward_bytes=moved, want=want,
        small=lambda: case((2, 3, 9, 11), window, dtype, last),
    )  # fmt: skip


def cases():
    by_two, by_three = {"kernel_size": 2}, {"kernel_size": 3, "stride": 2, "padding": 1}
    yield case((256, 64, 112, 112), by_two, FLOAT)
    yield case((256, 64, 112, 112), by_two, HALF)
    yield case((256, 64, 112, 112), by_three, HALF)
    yield case((256, 64, 112, 112), by_three, HALF, last=True)
    yield beside(case((256, 64, 111, 111), by_two, HALF), case((256, 64, 112, 112), by_two, HALF))
    yield beside(case((256, 2048, 7, 7), {"kernel_size": 7}, HALF), case((196, 2048, 8, 8), {"kernel_size": 8}, HALF))
