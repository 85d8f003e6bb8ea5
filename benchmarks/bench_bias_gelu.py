"""bias_gelu, both forms: what a feed-forward layer does between its matrix products."""

from common import HALF, beside, randn
from torch.nn import functional as F

import cupyops
from cupyops.bench import Case


def case(form, rows, columns):
    moved = rows * columns * HALF.itemsize
    return Case(
        op=f"bias_gelu {form}", size=f"{rows}x{columns}", dtype=HALF, make=randn((rows, columns), (columns,)),
        ours=lambda x, b: cupyops.bias_gelu(x, b, form), eager=lambda x, b: F.gelu(x + b, approximate=form),
        liger=None, forward_bytes=2 * moved, backward_bytes=3 * moved,
        small=lambda: case(form, 4, 33),
    )  # fmt: skip


def cases():
    for form in ("none", "tanh"):
        yield case(form, 16384, 4096)
    yield beside(case("none", 16384, 4095), case("none", 16384, 4096))
