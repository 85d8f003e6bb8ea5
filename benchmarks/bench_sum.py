"""sum and mean: rows, columns, all; and odd widths."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from common import ODD_REDUCTIONS, beside

import cupyops
from cupyops.bench import Case

SIZES = [  # shape, dim, dtypes
    ((8192, 8192), 1, (torch.bfloat16, torch.float16, torch.float32)),
    ((8192, 8192), 0, (torch.bfloat16, torch.float32)),
    ((8192, 8192), None, (torch.bfloat16, torch.float32)),
    ((64, 256, 56, 56), (0, 2, 3), (torch.bfloat16,)),
]


def cases() -> Iterator[Case]:
    """Each size for `sum`; the first for `mean` too, whose kernel is the same."""
    for shape, dim, dtypes in SIZES:
        for dtype in dtypes:
            yield _case("sum", shape, dim, dtype)
    for shape, even, dim in ODD_REDUCTIONS:
        yield beside(_case("sum", shape, dim, torch.bfloat16), _case("sum", even, dim, torch.bfloat16))
    yield _case("mean", *SIZES[0][:2], torch.bfloat16)


def _case(op: str, shape: tuple[int, ...], dim: int | tuple[int, ...] | None, dtype: torch.dtype) -> Case:
    ours, theirs = getattr(cupyops, op), getattr(torch, op)
    count = torch.Size(shape).numel()
    return Case(
        op=op,
        size=f"{'x'.join(map(str, shape))} over {'all' if dim is None else dim}",
        dtype=dtype,
        make=lambda device, dtype: (torch.randn(shape, device=device, dtype=dtype),),
        ours=lambda x: ours(x, dim),
        eager=lambda x: theirs(x, dim),
        liger=None,
        forward_bytes=count * dtype.itemsize,
        backward_bytes=0,
        want=None,
        small=lambda: _case(op, tuple(range(3, 3 + len(shape))), dim, dtype),
    )
