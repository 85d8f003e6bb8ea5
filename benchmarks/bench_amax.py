"""amax: rows and columns; and odd widths."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from common import FLOAT, HALF, ODD_REDUCTIONS, beside, randn

import cupyops
from cupyops.bench import Case


def cases() -> Iterator[Case]:
    """Backward reads the input again and writes a gradient of its size."""
    for dim in (1, 0):
        yield _case((8192, 8192), dim, HALF)
        yield _case((8192, 8192), dim, FLOAT)
    for shape, even, dim in ODD_REDUCTIONS:
        yield beside(_case(shape, dim, HALF), _case(even, dim, HALF))


def _case(shape: tuple[int, int], dim: int, dtype: torch.dtype) -> Case:
    moved = shape[0] * shape[1] * dtype.itemsize
    return Case(
        op="amax",
        size=f"{shape[0]}x{shape[1]} over {dim}",
        dtype=dtype,
        make=randn(shape),
        ours=lambda x: cupyops.amax(x, dim),
        eager=lambda x: torch.amax(x, dim),
        liger=None,
        forward_bytes=moved,
        backward_bytes=2 * moved,
        want=None,
        small=lambda: _case((5, 5), dim, dtype),
    )
