"""dropout, by one seed: PyTorch draws another mask, so that its product with ours is what is compared."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from common import beside
from torch import Tensor

import cupyops
from cupyops.bench import Case


def cases() -> Iterator[Case]:
    yield _case((2**27,), torch.bfloat16)
    yield _case((2**27,), torch.float16)
    yield _case((2**26,), torch.float32)
    yield beside(_case((2**27 - 1,), torch.bfloat16), _case((2**27,), torch.bfloat16))
    yield _case((2**16,), torch.bfloat16)


def _case(shape: tuple[int, ...], dtype: torch.dtype) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return torch.randn(shape, device=device, dtype=dtype, requires_grad=True), torch.tensor(7, device=device)

    def by_mask(x: Tensor, seed: Tensor) -> Tensor:
        return x * operator(torch.ones_like(x, requires_grad=False), seed, 0.5)

    operator = cupyops.operators()["cupyops::dropout"]
    n = torch.Size(shape).numel() * dtype.itemsize
    return Case(
        op="dropout",
        size="x".join(map(str, shape)),
        dtype=dtype,
        make=make,
        ours=lambda x, seed: operator(x, seed, 0.5),
        eager=by_mask,
        liger=None,
        forward_bytes=2 * n,
        backward_bytes=2 * n,
        small=lambda: _case((133,), dtype),
        want=(4200, 4200) if shape == (2**27,) and dtype is torch.bfloat16 else None,
    )
