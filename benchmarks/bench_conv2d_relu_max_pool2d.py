"""conv2d_relu_max_pool2d: the layers of a small network for MNIST."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch.nn import functional as F

import cupyops
from cupyops.bench import Case


def in_three(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.max_pool2d(F.relu(F.conv2d(x, weight, bias, padding=1)), 2)


def case(images: int, channels: int, filters: int, size: int, dtype: torch.dtype) -> Case:
    def make(device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        shapes = ((images, channels, size, size), (filters, channels, 3, 3), (filters,))
        x, weight, bias = (torch.randn(shape, device=device, dtype=dtype) for shape in shapes)
        return (
            x.requires_grad_(channels > 1),
            (weight / math.sqrt(9 * channels)).requires_grad_(),
            bias.requires_grad_(),
        )

    flops = 2.0 * images * filters * size * size * channels * 9
    return Case(
        op="conv2d_relu_max_pool2d",
        size=f"n{images} {channels}->{filters} {size}x{size}",
        dtype=dtype,
        make=make,
        ours=lambda x, weight, bias: cupyops.conv2d_relu_max_pool2d(x, weight, bias, padding=1),
        eager=in_three,
        forward_flops=flops,
        backward_flops=flops * (2 if channels > 1 else 1),
        unit="us",
        small=lambda: case(2, channels if channels < 4 else 3, 5, 6, dtype),
    )


def cases() -> Iterator[Case]:
    """Both layers; the input of the first wants no gradient."""
    for dtype in (torch.float32, torch.bfloat16):
        for images in (64, 1024):
            yield case(images, 1, 32, 28, dtype)
            yield case(images, 32, 64, 14, dtype)
