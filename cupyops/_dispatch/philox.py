"""Random numbers that are a function of a seed and a counter, as common/core/philox.cuh makes them: the same in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
DEFINE = {"PHILOX_ROUNDS": ROUNDS}
_LOW = 0xFFFFFFFF


def philox(seed: Tensor, counter: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For each counter four numbers of 32 random bits, all in int64: Philox4x32-7."""
    zero = torch.zeros_like(counter)
    a, b, c, d = counter & _LOW, counter >> 32 & _LOW, zero, zero
    key0, key1 = seed & _LOW, seed >> 32 & _LOW
    for _ in range(ROUNDS):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (right >> 32 & _LOW) ^ b ^ key0, right & _LOW, (left >> 32 & _LOW) ^ d ^ key1, left & _LOW
        key0, key1 = (key0 + 0x9E3779B9) & _LOW, (key1 + 0xBB67AE85) & _LOW
    return a, b, c, d
