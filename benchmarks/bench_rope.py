"""rope: heads after the sequence and before it, halves and neighbours, part of a row."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from common import beside
from torch import Tensor

import cupyops
from cupyops.bench import Case


def cases() -> Iterator[Case]:
    half = torch.bfloat16
    yield _case((4, 32, 4096, 128), 128, half)
    yield _case((4, 4096, 32, 128), 128, half, seq_dim=-3)
    yield _case((4, 32, 4096, 128), 128, half, interleaved=True)
    yield _case((4, 32, 4096, 128), 64, half)
    yield _case((4, 32, 4096, 128), 128, torch.float16)
    yield _case((4, 32, 4096, 128), 128, torch.float32)
    for size in (80, 126):
        yield beside(_case((4, 32, 4096, size), size, half), _case((4, 32, 4096, 128), 128, half))
    yield beside(_case((64, 4096, 1, 64), 64, half, seq_dim=-3), _case((64, 4096, 1, 128), 128, half, seq_dim=-3))
    yield _case((128, 1, 32, 128), 128, half, seq_dim=-3)


def by_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, seq_dim: int) -> Tensor:
    rotary = 2 * cos.shape[-1]
    if seq_dim == -3:
        cos, sin = cos[:, None], sin[:, None]
    turned, rest = x[..., :rotary], x[..., rotary:]
    if interleaved:
        a, b = turned[..., ::2], turned[..., 1::2]
        return torch.cat((torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2), rest), -1)
    a, b = turned.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def _case(
    shape: tuple[int, ...], rotary: int, dtype: torch.dtype, interleaved: bool = False, seq_dim: int = -2
) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> tuple[Tensor, ...]:
        angles = torch.rand(shape[seq_dim], rotary // 2, device=device) * 6
        return (
            torch.randn(shape, device=device, dtype=dtype, requires_grad=True),
            angles.cos().to(dtype),
            angles.sin().to(dtype),
        )

    n = torch.Size(shape).numel() * dtype.itemsize
    return Case(
        op="rope",
        size="x".join(map(str, shape)) + f" r{rotary}" + " interleaved" * interleaved + " bshd" * (seq_dim == -3),
        dtype=dtype,
        make=make,
        ours=lambda x, cos, sin: cupyops.rope(x, cos, sin, interleaved=interleaved, seq_dim=seq_dim),
        eager=lambda x, cos, sin: by_torch(x, cos, sin, interleaved, seq_dim),
        liger=None,  # it turns q and k together
        forward_bytes=2 * n,
        backward_bytes=2 * n,
        small=lambda: _case((2, 3, 4, 16), min(16, 16 * rotary // shape[-1]), dtype, interleaved, seq_dim),
    )
