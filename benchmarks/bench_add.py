"""add: two tensors of one shape, and one that is broadcast: along the rows, along the columns, a number for each channel."""

import torch
from common import FLOAT, HALF, beside, elementwise, randn

import cupyops
from cupyops.bench import Case


def cases():
    for dtype in (HALF, FLOAT):
        # the gradients are grad_y itself: nothing moves
        yield elementwise("add", cupyops.add, torch.add, 1 << 26, dtype, inputs=2, backward=0, size="2^26")
    yield broadcast((32768, 4096), (4096,))
    yield beside(broadcast((32768, 4095), (4095,)), broadcast((32768, 4096), (4096,)))
    yield broadcast((32768, 4096), (32768, 1))
    yield broadcast((64, 256, 56, 56), (256, 1, 1))


def broadcast(shape, other):
    moved = torch.Size(shape).numel() * HALF.itemsize
    return Case(
        "add", " + ".join("x".join(map(str, one)) for one in (shape, other)), HALF, randn(shape, other), cupyops.add,
        torch.add, forward_bytes=2 * moved, backward_bytes=moved,
        small=lambda: broadcast(tuple(min(size, 5) for size in shape), tuple(min(size, 5) for size in other)),
    )  # fmt: skip
