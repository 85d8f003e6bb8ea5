"""amax: rows and columns; and odd widths."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from common import FLOAT, HALF, beside, randn

import cupyops
from cupyops.bench import Case


def cases() -> Iterator[Case]:
    """Backward reads the input again and writes a gradient of its size."""
    for dim in (1, 0):
        yield _case(8192, dim, HALF)
        yield _case(8192, dim, FLOAT)
        yield beside(_case(4095, dim, HALF), _case(4096, dim, HALF))


def _case(size: int, dim: int, dtype: torch.dtype) -> Case:
    moved = size * size * dtype.itemsize
    return Case(
        op="amax",
        size=f"{size}x{size} over {dim}",
        dtype=dtype,
        make=randn((size, size)),
        ours=lambda x: cupyops.amax(x, dim),
        eager=lambda x: torch.amax(x, dim),
        liger=None,
        forward_bytes=moved,
        backward_bytes=2 * moved,
        want=None,
        small=lambda: _case(5, dim, dtype),
    )
