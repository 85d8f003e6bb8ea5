"""group_norm: images, from groups that one block holds to groups that several share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from common import beside
from torch import Tensor

import cupyops
from cupyops.bench import Case
from cupyops.ops._group_norm import group_norm_alike

SIZES = [
    ((32, 512, 32, 32), 32, torch.bfloat16),
    ((8, 256, 128, 128), 32, torch.bfloat16),
    ((32, 512, 32, 32), 32, torch.float16),
    ((32, 512, 32, 32), 32, torch.float32),
]
LAST = [  # of channels_last, as UNets of diffusers have them
    ((32, 128, 64, 64), 32, torch.float32),
    ((32, 256, 32, 32), 32, torch.bfloat16),
    ((32, 512, 8, 8), 32, torch.float32),
    ((8, 256, 128, 128), 32, torch.bfloat16),
]
ODD = [  # and a rounder shape
    ((32, 512, 31, 33), (32, 512, 32, 32), 32),
    ((32, 480, 31, 33), (32, 480, 32, 32), 32),  # no group is whole packs
    ((64, 256, 1000), (64, 256, 1024), 32),
    ((64, 256, 4095), (64, 256, 4096), 32),
    ((64, 32, 50257), (64, 32, 50256), 2),
    ((2, 32, 50257), (2, 32, 50256), 2),
    ((2, 64, 1000), (2, 64, 1024), 32),
    ((1024, 64, 7, 7), (784, 64, 8, 8), 16),  # a launch is half of it
    ((16384, 64, 7, 7), (12544, 64, 8, 8), 16),
    ((256, 2048, 7, 7), (196, 2048, 8, 8), 32),  # many borders of channels in a group
]


def cases() -> Iterator[Case]:
    """The sizes above."""
    for shape, groups, dtype in SIZES:
        yield _case(shape, groups, dtype)
    for shape, groups, dtype in LAST:
        yield _case(shape, groups, dtype, torch.channels_last)
    for shape, even, groups in ODD:
        yield beside(_case(shape, groups, torch.bfloat16), _case(even, groups, torch.bfloat16))


def _case(
    shape: tuple[int, ...], groups: int, dtype: torch.dtype, layout: torch.memory_format = torch.contiguous_format
) -> Case:
    ours = cupyops.group_norm if layout is torch.contiguous_format else group_norm_alike

    def make(device: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        x, *parameters = (torch.randn(size, device=device).to(dtype) for size in (shape, shape[1:2], shape[1:2]))
        return tuple(one.requires_grad_() for one in (x.contiguous(memory_format=layout), *parameters))

    def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.nn.functional.group_norm(x, groups, weight, bias).contiguous(memory_format=layout)

    def liger(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        from liger_kernel.ops.group_norm import LigerGroupNormFunction

        channels = shape[1]
        return LigerGroupNormFunction.apply(x, weight, bias, channels, groups, 1e-5)

    size = torch.Size(shape).numel() * dtype.itemsize
    return Case(
        op="group_norm",
        size=f"{'x'.join(map(str, shape))} G{groups}{'' if ours is cupyops.group_norm else ' channels_last'}",
        dtype=dtype,
        make=make,
        ours=lambda x, weight, bias: ours(x, groups, weight, bias, 1e-5),
        eager=eager,
        liger=liger if ours is cupyops.group_norm else None,
        forward_bytes=2 * size,
        backward_bytes=3 * size,
        small=lambda: _case((2, 6, 5, 7)[: len(shape)], 3, dtype, layout),
    )
