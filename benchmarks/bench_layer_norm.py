"""layer_norm: the sizes of transformers, then tails, odd widths and small rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from common import beside, randn

import cupyops
from cupyops.bench import Case

SIZES = [
    (131072, 1024, torch.bfloat16, (4060, 3750)),
    (32768, 4096, torch.bfloat16, (4060, 3750)),
    (8192, 16384, torch.bfloat16, (4060, 3750)),
    (32768, 4096, torch.float16, None),
    (32768, 4096, torch.float32, None),
    (2048, 50256, torch.bfloat16, None),
]
ODD = [
    (131072, 1000, 1024),
    (16383, 1001, 1000),
    (32768, 4095, 4096),
    (2048, 50257, 50256),
    (1 << 20, 64, 1024),
    (1000003, 17, 16),
]


def liger(x: Any, w: Any, b: Any) -> Any:
    """Liger's."""
    from liger_kernel.transformers.functional import liger_layer_norm

    return liger_layer_norm(x, w, b, 1e-5)


def cases() -> Iterator[Case]:
    """One for each size."""
    for rows, size, dtype, want in SIZES:
        yield _case(rows, size, dtype, want)
    for rows, size, even in ODD:
        yield beside(_case(rows, size, torch.bfloat16), _case(rows * size // even, even, torch.bfloat16))


def _case(rows: int, size: int, dtype: torch.dtype, want: Any = None) -> Case:
    nbytes = rows * size * dtype.itemsize
    return Case(
        op="layer_norm",
        size=f"{rows}x{size}",
        dtype=dtype,
        make=randn((rows, size), (size,), (size,)),
        ours=lambda x, w, b: cupyops.layer_norm(x, w.shape, w, b),
        eager=lambda x, w, b: F.layer_norm(x, w.shape, w, b),
        liger=liger,
        forward_bytes=2 * nbytes,
        backward_bytes=3 * nbytes,
        want=want,
        small=lambda: _case(4, 33, dtype),
    )
