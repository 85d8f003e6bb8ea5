"""few_rows: the products of a step of decoding, of Llama with 1.2 B parameters, by how many sequences are decoded.

A call goes through copies of the weights that no L2 cache holds, one product after the other, as the layers of a model do.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from common import ALL, HALF
from torch import Tensor
from torch.nn import functional as F

import cupyops
from cupyops.bench import Case

ROWS = (1, 2, 4, 8, 16, 32, 64)
COLD = 160 << 20  # bytes of weights of a call
LAYERS: dict[str, tuple[int, tuple[int, ...]]] = {  # in_features, and out_features of the weights that share them
    "qkv": (2048, (2048, 512, 512)),
    "o + residual": (2048, (2048,)),
    "silu(gate) * up": (2048, (8192, 8192)),
    "down + residual": (8192, (2048,)),
    "head": (2048, (128256,)),
}


def _ours(layer: str, x: Tensor, residual: Tensor, weights: tuple[Tensor, ...]) -> list[Tensor]:
    if layer == "silu(gate) * up":
        return [cupyops.gated_linear(x, *weights)]
    if layer.endswith("residual"):
        return [cupyops.linear_act(x, weights[0], None, "none", residual)]
    return [cupyops.linear(x, weight) for weight in weights]


def _eager(layer: str, x: Tensor, residual: Tensor, weights: tuple[Tensor, ...]) -> list[Tensor]:
    products = [F.linear(x, weight) for weight in weights]
    if layer == "silu(gate) * up":
        return [F.silu(products[0]) * products[1]]
    return [products[0] + residual] if layer.endswith("residual") else products


def _every(function: Callable[..., list[Tensor]], layer: str, each: int) -> Callable[..., list[Tensor]]:
    """Call `function` with the weights of one layer after the other, `each` of them."""

    def call(x: Tensor, residual: Tensor, *weights: Tensor) -> list[Tensor]:
        layers = [weights[at : at + each] for at in range(0, len(weights), each)]
        return [y for own in layers for y in function(layer, x, residual, own)]

    return call


def case(layer: str, rows: int, dtype: torch.dtype, k: int, features: tuple[int, ...], cold: int = COLD) -> Case:
    size = sum(features) * k * dtype.itemsize
    copies = max(1, cold // size)
    each = rows * (k + sum(features) + features[0] * layer.endswith("residual")) * dtype.itemsize

    def make(device: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        x, residual = (torch.randn(rows, width, device=device).to(dtype) for width in (k, features[0]))
        shapes = [(n, k) for _ in range(copies) for n in features]
        return x, residual, *((torch.randn(shape, device=device) / math.sqrt(k)).to(dtype) for shape in shapes)

    return Case(
        "few_rows", f"{layer}, {rows} of {k}, {copies} times", dtype, make, _every(_ours, layer, len(features)),
        _every(_eager, layer, len(features)), compiled=False, forward_bytes=copies * (size + each),
        small=lambda: case(layer, rows, dtype, 40, tuple(6 for _ in features), 0),
    )  # fmt: skip


def cases() -> Iterator[Case]:
    for layer, (k, features) in LAYERS.items():
        for rows in ROWS:
            yield case(layer, rows, HALF, k, features)
        for dtype in ALL[1:]:
            for rows in (1, 8):
                yield case(layer, rows, dtype, k, features)
