"""add: two tensors of one shape, and a vector along the rows."""

import torch
from common import FLOAT, HALF, elementwise, randn

import cupyops
from cupyops.bench import Case


def cases():
    for dtype in (HALF, FLOAT):
        # the gradients are grad_y itself: nothing moves
        yield elementwise("add", cupyops.add, torch.add, 1 << 26, dtype, inputs=2, backward=0, size="2^26")
    yield rows(32768, 4096, small=lambda: rows(4, 33))


def rows(rows, columns, small=None):
    moved = rows * columns * HALF.itemsize
    return Case(
        "add", f"{rows}x{columns} + {columns}", HALF, randn((rows, columns), (columns,)), cupyops.add, torch.add,
        forward_bytes=2 * moved, backward_bytes=moved, small=small,
    )  # fmt: skip
