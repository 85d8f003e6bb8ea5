"""fused_linear_cross_entropy: flops of the GEMMs that cannot be avoided, one forward and two backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from common import beside
from torch import Tensor

import cupyops
import cupyops.nn
from cupyops.bench import Case

SHAPES = [(8192, 4096, 128256), (4096, 4096, 32000)]  # rows, features, classes


def cases() -> Iterator[Case]:
    """Heads of language models in bf16; a small one in the other dtypes."""
    for shape in SHAPES:
        yield _case(shape, torch.bfloat16)
    yield beside(_case((8192, 2048, 50257), torch.bfloat16), _case((8192, 2048, 50256), torch.bfloat16))
    for dtype in (torch.float16, torch.float32):
        yield _case((2048, 1000, 32000), dtype)
    yield _softcapped((4096, 2304, 256000), torch.bfloat16)


def _softcapped(shape: tuple[int, int, int], dtype: torch.dtype) -> Case:
    """Gemma's head, a chunk of rows at a time, whose logits backward makes again."""
    plain, cap = _case(shape, dtype), 30.0

    def eager(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(cap * torch.tanh(F.linear(x, weight).float() / cap), target)

    return replace(
        plain, op="linear_log_prob", eager=eager, liger=None, backward_flops=3 * plain.forward_flops, together=False,
        ours=lambda x, weight, target: -cupyops.nn.linear_log_prob(x, weight, target, softcap=cap).mean(),
        small=lambda: _softcapped((4, 16, 33), dtype),
    )  # fmt: skip


def _case(shape: tuple[int, int, int], dtype: torch.dtype) -> Case:
    rows, features, classes = shape

    def make(device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.randn(rows, features, device=device).to(dtype).requires_grad_()
        weight = torch.randn(classes, features, device=device).div_(features**0.5).to(dtype).requires_grad_()
        return x, weight, torch.randint(classes, (rows,), device=device)

    def liger() -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

        return LigerFusedLinearCrossEntropyLoss()

    flops = 2 * rows * features * classes
    return Case(
        op="fused_linear_cross_entropy",
        size="x".join(map(str, shape)),
        dtype=dtype,
        make=make,
        ours=lambda x, weight, target: cupyops.fused_linear_cross_entropy(x, weight, target),
        eager=lambda x, weight, target: F.cross_entropy(F.linear(x, weight), target).float(),
        liger=lambda x, weight, target: liger()(weight, x, target),
        forward_flops=flops,
        backward_flops=2 * flops,
        together=True,  # ours makes the gradients in forward
        small=lambda: _case((4, 16, 33), dtype),
    )
