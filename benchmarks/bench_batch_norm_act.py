"""batch_norm_act: what stands behind the convolutions of ResNet-50, with and without a residual, in training and not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import cupyops
from cupyops.bench import Case

SIZES = [  # and whether a residual is added
    ((128, 64, 112, 112), False),
    ((128, 64, 56, 56), False),
    ((128, 256, 56, 56), True),
    ((128, 512, 28, 28), True),
    ((128, 1024, 14, 14), True),
    ((128, 512, 7, 7), False),
    ((128, 2048, 7, 7), True),
]


def cases() -> Iterator[Case]:
    """The sizes above, with channels side by side and not; one of them in fp32, and by running statistics."""
    for last in (True, False):
        for shape, adds in SIZES:
            yield _case(shape, adds, torch.bfloat16, True, last)
    yield _case((128, 256, 56, 56), True, torch.float32, True, True)
    yield _case((128, 256, 56, 56), True, torch.bfloat16, False, True)


def _case(shape: tuple[int, ...], adds: bool, dtype: torch.dtype, training: bool, last: bool) -> Case:
    def make(device: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        x, residual = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
        if last:
            x, residual = (t.to(memory_format=torch.channels_last) for t in (x, residual))
        parameters = torch.promote_types(dtype, torch.float32)
        weight, bias, mean = (torch.randn(shape[1], device=device).to(parameters) for _ in range(3))
        leaves = (x, weight, bias, *([residual] if adds else []))
        return mean, torch.ones_like(mean), *(t.requires_grad_() for t in leaves)

    def ours(mean: Tensor, var: Tensor, x: Tensor, weight: Tensor, bias: Tensor, *residual: Tensor) -> Tensor:
        more = {"residual": residual[0]} if residual else {}
        return cupyops.batch_norm_act(x, mean, var, weight, bias, training, **more)

    def eager(mean: Tensor, var: Tensor, x: Tensor, weight: Tensor, bias: Tensor, *residual: Tensor) -> Tensor:
        y = F.batch_norm(x, mean, var, weight, bias, training)
        for one in residual:
            y += one
        return F.relu(y, inplace=True)

    size = torch.Size(shape).numel() * dtype.itemsize
    kind = " ".join(["training" if training else "inference", *["residual"] * adds, *["channels_last"] * last])
    return Case(
        op="batch_norm_act",
        size=f"{'x'.join(map(str, shape))} {kind}",
        dtype=dtype,
        make=make,
        ours=ours,
        eager=eager,
        liger=None,
        forward_bytes=(2 + adds) * size,
        backward_bytes=(3 + adds) * size,
        small=lambda: _case((3, 8, 2, 4), adds, dtype, training, last),
    )
