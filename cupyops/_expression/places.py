"""Where scores stand, in PyTorch: batch, head, query and key, also of packed sequences; and which weights are dropped."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .._util.philox import factors, philox


def places(scores: Tensor) -> Iterator[Tensor]:
    """The batch, the head, the query and the key of scores, which broadcast."""
    for dim, size in enumerate(scores.shape):
        shape = [-1 if dim == at else 1 for at in range(4)]
        yield torch.arange(size, dtype=torch.int32, device=scores.device).view(shape)


def sequences(
    q: Tensor, k: Tensor, starts: tuple[Tensor, Tensor], bounds: tuple[int | None, int | None], last: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(sequence, row of the query, row of the key, which keys are seen) of tokens `q` and `k` of packed sequences.

    `last`: the bounds are those of the diagonal on which the last query is at the last key.
    """
    starts_q, starts_k = (one.long() for one in starts)
    most = len(starts_q) - 2
    of_q, of_k = (
        torch.searchsorted(one[1:].contiguous(), tokens.long(), right=True)
        for one, tokens in ((starts_q, q), (starts_k, k))
    )
    seen = (of_q == of_k) & (of_q <= most)
    of_q, of_k = of_q.clamp(max=most), of_k.clamp(max=most)
    q, k = q - starts_q[of_q], k - starts_k[of_k]
    distance = k - q
    if last:
        distance = distance - (starts_k[of_q + 1] - starts_k[of_q] - starts_q[of_q + 1] + starts_q[of_q])
    low, high = bounds
    seen = seen if low is None else seen & (distance >= low)
    seen = seen if high is None else seen & (distance <= high)
    return of_q.int(), q.int(), k.int(), seen


def dropped(weights: Tensor, at: tuple[Tensor, ...], seed: Tensor, p: float) -> Tensor:
    """Weights at such places, of which some are 0 and the others as much larger: by the bits that kernels make of the seed.

    A draw has the four of two queries 8 apart and two keys 8 apart.
    """
    threshold, scale = factors(p)
    b, h, q, k = (x.long() for x in at)
    of = b * weights.shape[1] + h
    four = philox(seed, _group(k), _group(q), of, torch.zeros_like(of))
    word = (2 * (q // 8 % 2) + k // 8 % 2).expand(weights.shape)
    bits = four.expand(*weights.shape, 4).gather(-1, word.unsqueeze(-1)).squeeze(-1)
    return weights * ((bits >= threshold).to(weights.dtype) * scale)


def _group(x: Tensor) -> Tensor:
    """Which pair of rows 8 apart a row is of."""
    return x // 16 * 8 + x % 8
