"""attention: 16,384 tokens in sequences of several lengths, full, causal and in a window, with grouped heads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import cupyops
from cupyops.bench import Case

TOKENS, HIDDEN = 16384, 2048
HALF = torch.bfloat16


def cases() -> Iterator[Case]:
    for width in (128, 64):
        for rows in (512, 1024, 4096, 16384):
            for causal in (False, True):
                yield case(TOKENS // rows, HIDDEN // width, HIDDEN // width, rows, width, causal)
    yield case(4, 32, 8, 4096, 128, True)
    yield case(4, 16, 16, 4096, 128, True, dtype=torch.float16)
    yield case(4, 16, 16, 4096, 80, True)


def case(batch: int, heads: int, kv_heads: int, rows: int, width: int, causal: bool, dtype: torch.dtype = HALF) -> Case:
    """As a projection of the heads of all tokens gives them."""

    def make(device: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        count = heads, kv_heads, kv_heads
        given = (torch.randn(batch, rows, h, width, device=device).to(dtype).transpose(1, 2) for h in count)
        return tuple(x.requires_grad_() for x in given)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return cupyops.attention(q, k, v, causal="top_left" if causal else None)

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=kv_heads < heads)

    flops = 4.0 * batch * heads * rows * rows * width * (0.5 if causal else 1)
    shared = f"/{kv_heads}" if kv_heads < heads else ""
    return Case(
        op="attention",
        size=f"{batch}x{heads}{shared}x{rows}x{width}" + " causal" * causal,
        dtype=dtype,
        make=make,
        ours=ours,
        eager=eager,
        others={"flash": _by(SDPBackend.FLASH_ATTENTION, eager), "cuDNN": _by(SDPBackend.CUDNN_ATTENTION, eager)},
        forward_flops=flops,
        backward_flops=2.5 * flops,
        small=None if rows < 64 else lambda: case(1, 2, 1 if kv_heads < heads else 2, 33, 16, causal, dtype),
    )


def _by(backend: SDPBackend, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """By one of PyTorch's backends, where there is a GPU for it."""

    def run(*args: Tensor) -> Tensor:
        with sdpa_kernel([backend] if args[0].is_cuda else [SDPBackend.MATH]):
            return function(*args)

    return run
