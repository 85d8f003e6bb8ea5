"""Random numbers as kernels make them (cuda_src/common/core/philox.cuh), in PyTorch: Philox4x32 of a seed and a counter."""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
DEFINE = {"PHILOX_ROUNDS": ROUNDS}
_LOW = 0xFFFFFFFF


def philox(seed: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
    """Four numbers of 32 random bits, the last dimension, in int64, for each counter of four words, int64 that broadcast."""
    key0, key1 = seed & _LOW, (seed >> 32) & _LOW
    for _ in range(ROUNDS):
        left, right = 0xD2511F53 * a, 0xCD9E8D57 * c
        a, b, c, d = (right >> 32 & _LOW) ^ b ^ key0, right & _LOW, (left >> 32 & _LOW) ^ d ^ key1, left & _LOW
        key0, key1 = (key0 + 0x9E3779B9) & _LOW, (key1 + 0xBB67AE85) & _LOW
    return torch.stack((a, b, c, d), -1)


def of_counter(seed: Tensor, counter: Tensor) -> Tensor:
    """Draw the random numbers for counters of 64 bits."""
    zero = torch.zeros_like(counter)
    return philox(seed, counter & _LOW, counter >> 32 & _LOW, zero, zero)


def factors(p: float) -> tuple[int, float]:
    """(bits from which on an element is kept, what it is then multiplied by), for the probability that it is not."""
    return min(round(p * 2**32), 2**32 - 1), 0.0 if p == 1 else 1 / (1 - p)
