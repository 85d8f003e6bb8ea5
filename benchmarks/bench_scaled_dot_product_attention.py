"""scaled_dot_product_attention: what a model calls, with masks too; bench_attention.py has more sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from bench_attention import HALF, TOKENS, case
from torch import Tensor

import cupyops
from cupyops.bench import Case


def cases() -> Iterator[Case]:
    for rows in (1024, 4096):
        yield _named(case(TOKENS // rows, 16, 16, rows, 128, True))
    for dtype in (torch.bool, HALF):
        yield masked(8, 16, 2048, 128, dtype)
        yield masked(32, 12, 512, 64, dtype)


def _named(of: Case) -> Case:
    small = of.small
    return replace(
        of,
        op="scaled_dot_product_attention",
        ours=lambda q, k, v: cupyops.scaled_dot_product_attention(q, k, v, is_causal=True),
        small=(lambda: _named(small())) if callable(small) else None,
    )


def masked(batch: int, heads: int, rows: int, width: int, of: torch.dtype) -> Case:
    """A mask for each of a batch, of a causal model whose sequences are padded: bool, or added to the scores."""

    def make(device: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        given = (torch.randn(batch, rows, heads, width, device=device).to(dtype).transpose(1, 2) for _ in range(3))
        seen = torch.ones(batch, 1, rows, rows, dtype=torch.bool, device=device).tril()
        for index in range(batch):
            seen[index, :, :, rows - index * rows // (2 * batch) :] = False
        added = torch.zeros(seen.shape, device=device).masked_fill(~seen, -torch.inf).to(dtype)
        return *(x.requires_grad_() for x in given), seen if of is torch.bool else added

    def run(function: Any) -> Any:
        return lambda q, k, v, mask: function(q, k, v, mask)

    flops = 4.0 * batch * heads * rows * rows * width
    return Case(
        op="scaled_dot_product_attention",
        size=f"{batch}x{heads}x{rows}x{width} mask {str(of).removeprefix('torch.')}",
        dtype=HALF,
        make=make,
        ours=run(cupyops.scaled_dot_product_attention),
        eager=run(torch.nn.functional.scaled_dot_product_attention),
        forward_flops=flops,
        backward_flops=2.5 * flops,
        small=None if rows < 64 else lambda: masked(2, 2, 33, 16, of),
    )
