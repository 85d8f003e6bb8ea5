"""Rotary position embedding, with the tables that it needs. torch.nn has none."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops._rope import rope


class RoPE(torch.nn.Module):
    """Rotary position embedding, by `cupyops.rope`: pair j of a row at position p is turned by p / base^(2j / dim).

    Args:
        dim: how many elements of a row are turned, an even number; those beyond pass.
        max_positions: rows of the tables.
        base: of the angles.
        interleaved: whether neighbours are pairs, or j and j + dim / 2.
        seq_dim: the dimension of the input that counts positions.
        device: of the tables.

    Attributes:
        cos, sin: buffers of shape (max_positions, dim / 2), float32 to begin with; they are not in the `state_dict`.

    Example:
        >>> cupyops.nn.RoPE(4, max_positions=2)(torch.ones(2, 4))
        tensor([[ 1.0000,  1.0000,  1.0000,  1.0000],
                [-0.3012,  0.9900,  1.3818,  1.0099]])
    """

    cos: Tensor
    sin: Tensor

    def __init__(
        self,
        dim: int,
        max_positions: int = 2048,
        base: float = 10000.0,
        interleaved: bool = False,
        seq_dim: int = -2,
        device: Any = None,
    ) -> None:
        super().__init__()
        self.dim, self.max_positions, self.base = dim, max_positions, base
        self.interleaved, self.seq_dim = interleaved, seq_dim
        pairs = torch.arange(0, dim, 2, dtype=torch.float64, device=device)
        angles = torch.arange(max_positions, dtype=torch.float64, device=device)[:, None] * base ** (-pairs / dim)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

    def forward(self, input: Tensor, positions: Tensor | None = None) -> Tensor:
        return rope(input, self.cos, self.sin, positions, interleaved=self.interleaved, seq_dim=self.seq_dim)

    def extra_repr(self) -> str:
        return f"{self.dim}, max_positions={self.max_positions}, base={self.base}, interleaved={self.interleaved}"
