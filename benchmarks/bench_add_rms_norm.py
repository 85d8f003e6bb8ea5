"""add_rms_norm: the sizes of transformers, then odd widths."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from common import beside, randn

import cupyops
from cupyops.bench import Case

EPS = 1e-6
SIZES = [
    (32768, 4096, torch.bfloat16),
    (8192, 16384, torch.bfloat16),
    (32768, 4096, torch.float16),
    (32768, 4096, torch.float32),
    (2048, 50256, torch.bfloat16),
]
ODD = [(131072, 1000, 1024), (32768, 4095, 4096), (2048, 50257, 50256), (1 << 20, 64, 1024), (1000003, 17, 16)]


def eager(x: Any, residual: Any, w: Any) -> Any:
    """Two operators of PyTorch's."""
    summed = x + residual
    return F.rms_norm(summed, w.shape, w, EPS), summed


def liger(x: Any, residual: Any, w: Any) -> Any:
    """Liger's."""
    from liger_kernel.transformers.functional import liger_fused_add_rms_norm

    return liger_fused_add_rms_norm(x, residual, w, EPS, in_place=False)


def cases() -> Iterator[Case]:
    """One for each size."""
    for rows, size, dtype in SIZES:
        yield _case(rows, size, dtype)
    for rows, size, even in ODD:
        yield beside(_case(rows, size, torch.bfloat16), _case(rows * size // even, even, torch.bfloat16))


def _case(rows: int, size: int, dtype: torch.dtype) -> Case:
    nbytes = rows * size * dtype.itemsize
    return Case(
        op="add_rms_norm",
        size=f"{rows}x{size}",
        dtype=dtype,
        make=randn((rows, size), (rows, size), (size,)),
        ours=lambda x, residual, w: cupyops.add_rms_norm(x, residual, w.shape, w, EPS),
        eager=eager,
        liger=liger,
        forward_bytes=4 * nbytes,
        backward_bytes=4 * nbytes,
        small=lambda: _case(4, 33, dtype),
    )
