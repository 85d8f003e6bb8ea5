"""var: rows, columns, all; odd widths, and images."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from common import FLOAT, HALF, ODD_REDUCTIONS, beside, randn

import cupyops
from cupyops.bench import Case

SIZES = [  # shape, dim, dtypes
    ((8192, 8192), 1, (HALF, FLOAT)),
    ((8192, 8192), 0, (HALF, FLOAT)),
    ((8192, 8192), None, (HALF,)),
    ((64, 256, 56, 56), (0, 2, 3), (HALF,)),
]


def cases() -> Iterator[Case]:
    """Backward reads the input again and writes a gradient of its size."""
    for shape, dim, dtypes in SIZES:
        for dtype in dtypes:
            yield _case(shape, dim, dtype)
    for shape, even, dim in ODD_REDUCTIONS:
        yield beside(_case(shape, dim, HALF), _case(even, dim, HALF))


def _case(shape: tuple[int, ...], dim: int | tuple[int, ...] | None, dtype: torch.dtype) -> Case:
    moved = torch.Size(shape).numel() * dtype.itemsize
    return Case(
        op="var",
        size=f"{'x'.join(map(str, shape))} over {'all' if dim is None else dim}",
        dtype=dtype,
        make=randn(shape),
        ours=lambda x: cupyops.var(x, dim),
        eager=lambda x: torch.var(x, dim),
        liger=None,
        forward_bytes=moved,
        backward_bytes=2 * moved,
        want=None,
        small=lambda: _case(tuple(range(3, 3 + len(shape))), dim, dtype),
    )
