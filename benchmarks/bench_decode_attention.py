"""decode_attention: one query of each sequence against 8k to 128k rows, with grouped heads; short caches with a mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import cupyops
from cupyops.bench import Case

HALF = torch.bfloat16


def cases() -> Iterator[Case]:
    for batch, rows in ((16, 8192), (4, 32768), (1, 131072)):
        yield _case(batch, 1, 32, 8, rows, 128)
    yield _case(1, 1, 32, 8, 8192, 128)
    yield _case(64, 1, 32, 8, 8192, 128)
    yield _case(4, 1, 32, 32, 16384, 128)
    yield _case(4, 1, 64, 1, 65536, 128)
    yield _case(4, 4, 32, 8, 32768, 128)
    yield _case(4, 1, 32, 8, 32768, 64)
    yield _case(4, 1, 16, 4, 32768, 256)
    yield _case(4, 1, 32, 8, 32768, 128, torch.float16)
    for rows, width in ((32768, 64), (16384, 128), (8192, 256)):
        yield _case(4, 1, 32, 8, rows, width, torch.float32)
    for batch in (1, 8, 32, 64):
        yield _case(batch, 1, 32, 8, 640, 64, masked=True)


def _case(
    batch: int,
    queries: int,
    heads: int,
    kv_heads: int,
    rows: int,
    width: int,
    dtype: torch.dtype = HALF,
    masked: bool = False,
) -> Case:
    """masked: by a tensor, as a static cache of transformers has it, whose last rows hold no keys yet."""

    def make(device: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        q = torch.randn(batch, queries, heads, width, device=device, dtype=dtype)
        k, v = (torch.randn(batch, rows, kv_heads, width, device=device, dtype=dtype) for _ in range(2))
        filled = torch.arange(rows, device=device) < rows - 4
        return (q, k, v, filled.expand(batch, queries, rows).contiguous()) if masked else (q, k, v)

    def ours(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
        return cupyops.decode_attention(q, k, v, mask=seen)

    def eager(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None = None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if queries > 1:
            seen = torch.ones(queries, rows, dtype=torch.bool, device=q.device).tril(rows - queries)
        elif seen is not None:
            seen = seen[:, None]
        return scaled_dot_product_attention(q, k, v, seen, enable_gqa=kv_heads < heads).transpose(1, 2)

    shared = f"/{kv_heads}" if kv_heads < heads else ""
    return Case(
        op="decode_attention",
        size=f"{batch}x{queries}x{heads}{shared}x{width} of {rows}{', masked' if masked else ''}",
        dtype=dtype,
        make=make,
        ours=ours,
        eager=eager,
        forward_bytes=(2 * rows * kv_heads + 2 * queries * heads) * batch * width * dtype.itemsize,
        small=None if rows < 64 else lambda: _case(2, queries, 4, 4 * kv_heads // heads or 1, 40, 16, dtype, masked),
    )
