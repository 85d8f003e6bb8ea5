"""log_softmax over the last dimension: attention's rows, vocabularies, odd widths."""

from functools import partial

from common import ALL, HALF, beside, rows_of
from torch.nn import functional as F

import cupyops


def case(rows, columns, dtype, want=None):
    ours, eager = (partial(f, dim=-1) for f in (cupyops.log_softmax, F.log_softmax))
    return rows_of("log_softmax", ours, eager, rows, columns, dtype, want=want)


def cases():
    yield case(65536, 4096, HALF, (4060, 4200))
    yield case(2048, 131072, HALF, (3900, 4000))
    for dtype in ALL[1:]:
        yield case(32768, 4096, dtype)
    for rows, columns, even in (
        (131072, 1000, 1024), (32768, 4095, 4096), (4096, 50257, 50256), (1 << 20, 64, 1024), (1000003, 17, 16)
    ):  # fmt: skip
        yield beside(case(rows, columns, HALF), case(rows * columns // even, even, HALF))
