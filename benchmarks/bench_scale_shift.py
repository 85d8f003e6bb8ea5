"""scale_shift: a factor and a summand for each column, or one of each."""

from common import ALL, HALF, randn

import cupyops
from cupyops.bench import Case


def eager(x, weight, bias):
    return x * weight + bias


def case(rows, columns, dtype, shape, kind):
    moved = rows * columns * dtype.itemsize
    return Case(
        "scale_shift", f"{rows}x{columns} {kind}", dtype, randn((rows, columns), shape, shape), cupyops.scale_shift, eager,
        forward_bytes=2 * moved, backward_bytes=3 * moved,
        small=lambda: case(4, 33, dtype, (33,) if shape else (), kind),
    )  # fmt: skip


def cases():
    for dtype in ALL:
        yield case(131072, 1024, dtype, (1024,), "per column")
    yield case(131072, 1024, HALF, (), "scalar")
    yield case(16383, 1001, HALF, (1001,), "per column")
