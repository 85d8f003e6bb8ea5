"""quantized_linear: the products of a step of decoding, of Llama with 1.2 B parameters, with weights of 8 and 4 bits.

Beside PyTorch's product of the same weights in bfloat16, and its own kernels for weights of so few bits. A call goes through
copies of the weights that no L2 cache holds, one product after the other, as the layers of a model do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from common import HALF
from torch import Tensor
from torch.nn import functional as F

import cupyops
from cupyops.bench import Case

ROWS = (1, 8, 32)
COLD = 160 << 20  # bytes of stored weights of a call
LAYERS = {"q or o": (2048, 2048), "gate or up": (8192, 2048), "down": (2048, 8192), "head": (128256, 2048)}  # n, k
GROUP = 128
STORED = {"int8": torch.int8, "float8": torch.float8_e4m3fn, "int4": torch.uint8}


class Weight(NamedTuple):
    """Tensors of one layer: what it stands for in bfloat16, and that in few bits, for us and for PyTorch's kernels."""

    dense: Tensor
    stored: Tensor
    scale: Tensor
    zero_point: Tensor | None
    packed: Tensor | None
    packed_scale: Tensor | None


def weight(kind: str, n: int, k: int, group: int, device: Any) -> Weight:
    """Random numbers, whose scales are powers of two and zero points whole, so that bfloat16 has all of them."""
    if kind == "int4":
        shape = n, k // group
        numbers = torch.randint(0, 16, (n, k), device=device, dtype=torch.uint8)
        scale = (2.0 ** torch.randint(-8, -5, shape, device=device)).to(HALF)
        zero_point = torch.randint(6, 10, shape, device=device).to(HALF)
        each = [one.float().repeat_interleave(group, 1) for one in (scale, zero_point)]
        dense = ((numbers - each[1]) * each[0]).to(HALF)
        packed, packed_scale = _tinygemm(numbers, scale, zero_point)
        return Weight(dense, numbers[:, ::2] | numbers[:, 1::2] << 4, scale, zero_point, packed, packed_scale)
    integers = torch.randint(-127, 128, (n, k), device=device)
    stored = integers.to(torch.int8) if kind == "int8" else (integers / 32).to(STORED[kind])
    scale = 2.0 ** torch.randint(-11 if kind == "int8" else -6, -8 if kind == "int8" else -3, (n,), device=device)
    dense = (stored.float() * scale[:, None]).to(HALF)
    of_pytorch = (stored, scale.to(HALF)) if kind == "int8" else (None, None)
    return Weight(dense, stored, scale.float(), None, *of_pytorch)


def _tinygemm(numbers: Tensor, scale: Tensor, zero_point: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Pack weights for torch._weight_int4pack_mm on a GPU, whose zero points lie among the weights."""
    if not numbers.is_cuda:
        return None, None
    packed = torch._convert_weight_to_int4pack(numbers[:, ::2] << 4 | numbers[:, 1::2], 8)
    return packed, torch.stack([scale, (8 - zero_point) * scale], -1).transpose(0, 1).contiguous()


def _every(function: Callable[[Tensor, Weight], Tensor]) -> Callable[..., list[Tensor]]:
    """Call `function` with one layer after the other."""

    def call(x: Tensor, *tensors: Any) -> list[Tensor]:
        each = len(Weight._fields)
        return [function(x, Weight(*tensors[at : at + each])) for at in range(0, len(tensors), each)]

    return call


def _ours(x: Tensor, of: Weight) -> Tensor:
    return cupyops.quantized_linear(x, of.stored, of.scale, of.zero_point)


def _int8pack(x: Tensor, of: Weight) -> Tensor:
    return torch._weight_int8pack_mm(x, of.packed, of.packed_scale)  # type: ignore[arg-type]


def _int4pack(x: Tensor, of: Weight) -> Tensor:
    return torch._weight_int4pack_mm(x, of.packed, GROUP, of.packed_scale)  # type: ignore[arg-type]


def case(kind: str, layer: str, rows: int, n: int, k: int, cold: int = COLD, group: int = GROUP) -> Case:
    size = n * k // 2 + 4 * n * (k // group) if kind == "int4" else n * k + 4 * n
    copies = max(1, cold // size)

    def make(device: Any, dtype: torch.dtype) -> tuple[Any, ...]:
        layers = (weight(kind, n, k, group, device) for _ in range(copies))
        return torch.randn(rows, k, device=device).to(dtype), *(one for layer in layers for one in layer)

    peers = {"int8": {"int8pack": _every(_int8pack)}, "int4": {"int4pack": _every(_int4pack)}}
    return Case(
        "quantized_linear", f"{kind}, {layer}, {rows}x{n}x{k}, {copies} times", HALF, make, _every(_ours),
        _every(lambda x, of: F.linear(x, of.dense)), others=peers.get(kind, {}), compiled=False,
        forward_bytes=copies * (size + 2 * rows * (n + k)), small=lambda: case(kind, layer, rows, 24, 64, 0, 32),
    )  # fmt: skip


def cases() -> Iterator[Case]:
    for kind in STORED:
        for layer, (n, k) in LAYERS.items():
            for rows in ROWS:
                yield case(kind, layer, rows, n, k)
