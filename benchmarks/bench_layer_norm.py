"""layer_norm: the sizes of language models, odd widths, small rows."""

from common import ALL, HALF, rows_of
from torch.nn import functional as F

import cupyops

WANT = (4060, 3750)


def liger(x, weight, bias):
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction

    return LigerLayerNormFunction.apply(x, weight, bias, 1e-5)


def case(rows, columns, dtype, want=None):
    return rows_of(
        "layer_norm", lambda x, w, b: cupyops.layer_norm(x, (columns,), w, b),
        lambda x, w, b: F.layer_norm(x, (columns,), w, b), rows, columns, dtype, parameters=2, want=want, liger=liger,
    )  # fmt: skip


def cases():
    for rows, columns in ((131072, 1024), (32768, 4096), (8192, 16384)):
        yield case(rows, columns, HALF, WANT)
    for dtype in ALL[1:]:
        yield case(32768, 4096, dtype)
    for rows, columns in ((131072, 1000), (32768, 4095), (2048, 50257), (1 << 20, 64)):
        yield case(rows, columns, HALF)
