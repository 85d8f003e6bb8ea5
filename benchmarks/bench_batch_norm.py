"""batch_norm: images and matrices, in training and not; contiguous and channels_last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
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
    ((4096, 1000), torch.float32, True, False),
    ((4096, 1000), torch.bfloat16, True, False),
    ((4096, 4095), torch.bfloat16, True, False),
    ((256, 2048, 7, 7), torch.bfloat16, True, False),
    ((64, 3, 224, 223), torch.bfloat16, True, False),
    ((64, 32, 28, 28), torch.float32, True, False),
]


def cases() -> Iterator[Case]:
    """The sizes above."""
    for shape, dtype, training, last in SIZES:
        yield _case(shape, dtype, training, last)


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
