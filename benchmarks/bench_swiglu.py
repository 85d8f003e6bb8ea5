"""swiglu: of two tensors and of one that is packed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from common import beside
from torch import Tensor

import cupyops
from cupyops.bench import Case


def cases() -> Iterator[Case]:
    half, full = torch.bfloat16, torch.float32
    yield _case(8192, 14336, half, want=(4240, 4240))
    yield _case(8192, 14336, torch.float16)
    yield _case(8192, 7168, full)
    yield _packed(8192, 14336, half)
    for cols, even in ((1000, 1024), (4095, 4096), (50257, 50256), (64, 1024), (17, 16)):
        for of in (_case, _packed):
            yield beside(of(2**26 // cols, cols, half), of(2**26 // even, even, half))


def by_torch(gate: Tensor, up: Tensor) -> Tensor:
    return torch.nn.functional.silu(gate) * up


def by_liger(gate: Tensor, up: Tensor) -> Any:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    return LigerSiLUMulFunction.apply(gate, up)


def _case(rows: int, cols: int, dtype: torch.dtype, want: Any = None) -> Case:
    n = rows * cols * dtype.itemsize
    return Case(
        op="swiglu",
        size=f"{rows}x{cols}",
        dtype=dtype,
        make=lambda device, dtype: tuple(
            torch.randn(rows, cols, device=device, dtype=dtype, requires_grad=True) for _ in range(2)
        ),
        ours=cupyops.swiglu,
        eager=by_torch,
        liger=by_liger,
        forward_bytes=3 * n,
        backward_bytes=5 * n,
        want=want,
        small=lambda: _case(4, 33, dtype),
    )


def _packed(rows: int, cols: int, dtype: torch.dtype) -> Case:
    n = rows * cols * dtype.itemsize
    return Case(
        op="swiglu",
        size=f"{rows}x2x{cols}",
        dtype=dtype,
        make=lambda device, dtype: (torch.randn(rows, 2 * cols, device=device, dtype=dtype, requires_grad=True),),
        ours=cupyops.swiglu,
        eager=lambda x: by_torch(*x.chunk(2, -1)),
        liger=None,
        forward_bytes=3 * n,
        backward_bytes=5 * n,
        small=lambda: _packed(4, 33, dtype),
    )
