"""geglu, exact and by tanh."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from common import beside
from torch import Tensor

import cupyops
from cupyops.bench import Case


def cases() -> Iterator[Case]:
    yield _case(8192, 14336, torch.bfloat16, "tanh")
    yield _case(8192, 14336, torch.bfloat16, "none")
    yield _case(8192, 14336, torch.float16, "tanh")
    yield _case(8192, 7168, torch.float32, "tanh")
    for cols, even in ((1000, 1024), (4095, 4096), (50257, 50256), (64, 1024), (17, 16)):
        odd, round = (_case(2**26 // n, n, torch.bfloat16, "tanh") for n in (cols, even))
        yield beside(odd, round)


def by_liger(gate: Tensor, up: Tensor) -> Any:
    from liger_kernel.ops.geglu import LigerGELUMulFunction

    return LigerGELUMulFunction.apply(gate, up)


def _case(rows: int, cols: int, dtype: torch.dtype, approximate: str) -> Case:
    n = rows * cols * dtype.itemsize
    return Case(
        op="geglu",
        size=f"{rows}x{cols} {approximate}",
        dtype=dtype,
        make=lambda device, dtype: tuple(
            torch.randn(rows, cols, device=device, dtype=dtype, requires_grad=True) for _ in range(2)
        ),
        ours=lambda gate, up: cupyops.geglu(gate, up, approximate),
        eager=lambda gate, up: torch.nn.functional.gelu(gate, approximate=approximate) * up,
        liger=by_liger if approximate == "tanh" else None,
        forward_bytes=3 * n,
        backward_bytes=5 * n,
        small=lambda: _case(4, 33, dtype, approximate),
    )
