"""scaled_dot_product_attention: what a model calls; bench_attention.py has more sizes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from bench_attention import TOKENS, case

import cupyops
from cupyops.bench import Case


def cases() -> Iterator[Case]:
    for rows in (1024, 4096):
        yield _named(case(TOKENS // rows, 16, 16, rows, 128, True))


def _named(of: Case) -> Case:
    small = of.small
    return replace(
        of,
        op="scaled_dot_product_attention",
        ours=lambda q, k, v: cupyops.scaled_dot_product_attention(q, k, v, is_causal=True),
        small=(lambda: _named(small())) if callable(small) else None,
    )
