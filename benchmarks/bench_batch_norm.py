"""batch_norm: images and matrices, in training and not; contiguous and channels_last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from common import beside
from torch import Tensor

import cupyops
from cupyops.bench import Case

SIZES = [
    ((64, 256, 56, 56), torch.float32, True, False),
    ((64, 256, 56, 56), torch.bfloat16, True, False),
    ((64, 256, 56, 56), torch.float32, False, False),
    ((64, 256, 56, 56), torch.bfloat16, False, False),
    ((64, 256, 56, 56), torch.float16, True, True),
    ((64, 256, 56, 56), torch.bfloat16, True, True),
    ((256, 64, 112, 112), torch.float32, True, False),
    ((256, 64, 112, 112), torch.bfloat16, True, False),
    ((64, 32, 28, 28), torch.float32, True, False),
]
ODD = [  # and a rounder shape
    ((4096, 1000), (4096, 1024), torch.float32),
    ((4096, 1000), (4096, 1024), torch.bfloat16),
    ((4096, 4095), (4096, 4096), torch.bfloat16),
    ((256, 2048, 7, 7), (196, 2048, 8, 8), torch.bfloat16),
    ((64, 3, 224, 223), (64, 3, 224, 224), torch.bfloat16),
]


def cases() -> Iterator[Case]:
    """The sizes above."""
    for shape, dtype, training, last in SIZES:
        yield _case(shape, dtype, training, last)
    for shape, even, dtype in ODD:
        yield beside(_case(shape, dtype, True, False), _case(even, dtype, True, False))


def _case(shape: tuple[int, ...], dtype: torch.dtype, training: bool, last: bool) -> Case:
    def make(device: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        x = torch.randn(shape, device=device).to(dtype)
        x = x.to(memory_format=torch.channels_last) if last else x
        weight, bias, mean = (torch.randn(shape[1], device=device).to(dtype) for _ in range(3))
        return *(t.requires_grad_() for t in (x, weight, bias)), mean, torch.ones_like(mean)

    def run(function: Any) -> Any:
        return lambda x, weight, bias, mean, var: function(x, mean, var, weight, bias, training)

    size = torch.Size(shape).numel() * dtype.itemsize
    kind = ("training" if training else "inference") + (" channels_last" if last else "")
    return Case(
        op="batch_norm",
        size=f"{'x'.join(map(str, shape))} {kind}",
        dtype=dtype,
        make=make,
        ours=run(cupyops.batch_norm),
        eager=run(torch.nn.functional.batch_norm),
        liger=None,
        forward_bytes=2 * size,
        backward_bytes=3 * size,
        small=lambda: _case((4, 3, 5, 7)[: len(shape)], dtype, training, last),
    )
