"""Sums of a gradient in fp32, to which blocks of a form that passes once add, and what rounds them (attention/sums.cuh)."""

from __future__ import annotations

import numpy as np

from .._kernel.kernel import Kernel, ceil_div
from .attention import HALF, Problem
from .forms import Launch

attention_bwd_collect = Kernel("attention.cu", "attention_bwd_collect<T>", T=HALF)


def collect(p: Problem, to: tuple[int, ...], columns: int, padded: int) -> Launch:
    """Launch that rounds the sums of `columns` columns for each of the `padded` rows of the heads of `p`."""
    across = ceil_div(columns, 64)
    blocks = p.batches * p.heads * padded // 64 * across
    args = across, np.array(to, dtype=np.int64), p.sizes(padded)
    return Launch(attention_bwd_collect, blocks, 128, template={"T": p.dtype}, args=args)
