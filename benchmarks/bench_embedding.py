"""embedding: the tables of language models; tokens as often as words are; odd rows, and one token over and over."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from common import FLOAT, HALF, beside
from torch import Tensor
from torch.nn import functional as F

import cupyops
from cupyops.bench import Case

TOKENS = 8 * 2048


def cases() -> Iterator[Case]:
    """Backward moves grad_y and the whole gradient of the table."""
    yield _case(128256, 4096, HALF)
    yield _case(50257, 768, HALF)
    yield _case(50257, 768, torch.float16)
    yield _case(50257, 768, FLOAT)
    yield beside(_case(50257, 1000, HALF), _case(50257, 1024, HALF))
    yield _case(50257, 4096, HALF)
    yield beside(_case(50257, 4095, HALF), _case(50257, 4096, HALF))
    yield beside(_case(1000003, 17, HALF), _case(1000003, 16, HALF))
    yield _case(50257, 768, HALF, zipf=True)
    yield _case(50257, 768, HALF, named=1)
    yield _case(50257, 768, HALF, tokens=256)


def _case(
    rows: int, size: int, dtype: torch.dtype, tokens: int = TOKENS, named: int | None = None, zipf: bool = False
) -> Case:
    element = dtype.itemsize
    return Case(
        op="embedding",
        size=f"{tokens} of {rows}x{size}" + ("" if named is None else f", {named} named") + ", zipf" * zipf,
        dtype=dtype,
        make=_arguments(rows, size, tokens, named or rows, zipf),
        ours=cupyops.embedding,
        eager=F.embedding,
        liger=None,
        forward_bytes=2 * tokens * size * element + 8 * tokens,
        backward_bytes=(tokens + rows) * size * element + 8 * tokens,
        want=None,
        small=lambda: _case(7, 5, dtype, 9, named, zipf),
    )


def _arguments(
    rows: int, size: int, tokens: int, named: int, zipf: bool
) -> Callable[[Any, torch.dtype], tuple[Tensor, ...]]:
    """With `zipf` the k-th token is k times rarer than the first, as words are."""

    def make(device: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        weight = torch.randn(rows, size, device=device).to(dtype).requires_grad_()
        often = torch.arange(1, named + 1, device=device, dtype=torch.float64).reciprocal() ** zipf
        return torch.multinomial(often, tokens, replacement=True), weight

    return make
