"""One step of an optimizer, and the clipping of gradients, beside PyTorch's fused ones."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

import cupyops
from cupyops.bench import Case

# elements of each tensor, and how many there are
SETS = {
    "300x333333": (333_333, 300),
    "200x1000": (1000, 200),
    "100x1048576": (2**20, 100),
    "60x50257x32": (50257 * 32, 60),
}
OPTIMIZERS: dict[str, tuple[Any, Any, int]] = {  # ours, PyTorch's, arrays read and written
    "adamw": (cupyops.optim.AdamW, torch.optim.AdamW, 7),
    "sgd": (cupyops.optim.SGD, torch.optim.SGD, 5),
}


def cases() -> Iterator[Case]:
    """Every optimizer on every set; all of them in fp32, AdamW in the half types too."""
    for size, (numel, count) in SETS.items():
        for dtype in (torch.bfloat16, torch.float32):
            for op, (ours, theirs, moved) in OPTIMIZERS.items():
                yield step_of(op, size, numel, count, dtype, ours, theirs, moved)
            yield clipping(size, numel, count, dtype)


def step_of(op: str, size: str, numel: int, count: int, dtype: torch.dtype, ours: Any, theirs: Any, moved: int) -> Case:
    options: dict[str, Any] = {"lr": 1e-3, **({"momentum": 0.9} if op == "sgd" else {})}

    def make(device: Any, dtype: torch.dtype) -> tuple[Any, ...]:
        return (
            ours(parameters(numel, count, device, dtype), **options),
            theirs(parameters(numel, count, device, dtype), fused=True, **options),
        )

    return Case(
        op=op, size=size, dtype=dtype, make=make, ours=lambda a, b: a.step(), eager=lambda a, b: b.step(), liger=None,
        forward_bytes=moved * numel * count * dtype.itemsize, backward_bytes=None, want=None,
    )  # fmt: skip


def clipping(size: str, numel: int, count: int, dtype: torch.dtype) -> Case:
    def make(device: Any, dtype: torch.dtype) -> tuple[Any, ...]:
        return (parameters(numel, count, device, dtype),)

    return Case(
        op="clip_grad_norm_", size=size, dtype=dtype, make=make,
        ours=lambda p: cupyops.nn.utils.clip_grad_norm_(p, 1e-3),
        eager=lambda p: torch.nn.utils.clip_grad_norm_(p, 1e-3),
        liger=None, forward_bytes=3 * numel * count * dtype.itemsize, backward_bytes=None, want=None,
    )  # fmt: skip


def parameters(numel: int, count: int, device: Any, dtype: torch.dtype) -> list[Tensor]:
    """With gradients."""
    made = [torch.nn.Parameter(torch.randn(numel, device=device, dtype=dtype)) for _ in range(count)]
    for one in made:
        one.grad = torch.randn_like(one)
    return made
