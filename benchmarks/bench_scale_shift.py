"""scale_shift: a factor and a summand for each column, each row, each channel, or one of each."""

from common import ALL, HALF, beside, randn
from torch import Size

import cupyops
from cupyops.bench import Case


def eager(x, weight, bias):
    return x * weight + bias


def case(shape, dtype, factor, kind):
    moved = Size(shape).numel() * dtype.itemsize
    return Case(
        "scale_shift", f"{'x'.join(map(str, shape))} {kind}", dtype, randn(shape, factor, factor), cupyops.scale_shift,
        eager, forward_bytes=2 * moved, backward_bytes=3 * moved,
        small=lambda: case(tuple(min(n, 9) for n in shape), dtype, tuple(min(n, 9) for n in factor), kind),
    )  # fmt: skip


def cases():
    for dtype in ALL:
        yield case((131072, 1024), dtype, (1024,), "per column")
    yield case((131072, 1024), HALF, (), "scalar")
    yield case((131072, 1024), HALF, (131072, 1), "per row")
    yield case((64, 256, 56, 56), HALF, (256, 1, 1), "per channel")
    for rows, columns, even in ((16383, 1001, 1000), (131072, 1000, 1024), (32768, 4095, 4096), (1000003, 17, 16)):
        odd, round = (case((rows, n), HALF, (n,), "per column") for n in (columns, even))
        yield beside(odd, round)
