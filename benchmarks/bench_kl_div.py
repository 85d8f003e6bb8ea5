"""kl_div: bytes of the two inputs forward; of the target and the gradient of the input backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from common import beside
from torch import Tensor

import cupyops
from cupyops.bench import Case

SHAPES = [(8192, 32000), (4096, 128256)]
ODD = [(65536, 1000, 1024), (16384, 4095, 4096), (2048, 50257, 50256), (8, 1000, 1024), (1000003, 17, 16)]


def cases() -> Iterator[Case]:
    """Models' sizes in bf16, one of them in the other dtypes, odd widths; logarithms too."""
    for shape in SHAPES:
        yield _case(shape, torch.bfloat16)
    for rows, columns, even in ODD:
        yield beside(_case((rows, columns), torch.bfloat16), _case((rows, even), torch.bfloat16))
    for dtype in (torch.float16, torch.float32):
        yield _case(SHAPES[0], dtype)
    yield _case(SHAPES[0], torch.bfloat16, log_target=True)


def _case(shape: tuple[int, int], dtype: torch.dtype, log_target: bool = False) -> Case:
    def make(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        x, target = (torch.randn(shape, device=device).log_softmax(1) for _ in range(2))
        return x.to(dtype).requires_grad_(), (target if log_target else target.exp()).to(dtype)

    options: dict[str, Any] = {"reduction": "batchmean", "log_target": log_target}

    def liger() -> Callable[[Tensor, Tensor], Tensor]:
        from liger_kernel.transformers import LigerKLDIVLoss

        return LigerKLDIVLoss(**options)

    moved = 2 * shape[0] * shape[1] * dtype.itemsize
    return Case(
        op="kl_div",
        size=f"{shape[0]}x{shape[1]}" + (" log_target" if log_target else ""),
        dtype=dtype,
        make=make,
        ours=lambda x, target: cupyops.kl_div(x, target, **options),
        eager=lambda x, target: F.kl_div(x, target, **options),
        liger=lambda x, target: liger()(x, target),
        forward_bytes=moved,
        backward_bytes=moved,
        small=lambda: _case((4, 33), dtype, log_target),
    )
