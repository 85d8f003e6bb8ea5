"""Attention in PyTorch operations: with the scores in memory, in fp32 or fp64, and every derivative."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

Change = Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor | None]]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    dropout_p: float = 0.0,
    change: Change | None = None,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """(y, log-sum-exp of each row) of (..., heads, rows, width), where `heads` of keys divide those of the query.

    mask: bool, whether a key is seen, or a summand of the scores. change: scores and a mask of bools as they are to be.
    drop: weights as they are to be.
    A row that sees no key, or whose scores are all -inf, has zeros and -inf.
    """
    wide = torch.promote_types(query.dtype, torch.float32)
    q, k, v = query.to(wide), *(_repeated(x, query).to(wide) for x in (key, value))
    scores = q @ k.mT * scale
    if change is not None:
        scores, mask = change(scores, mask)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
    # such a row is computed as if it saw all alike, and put right in the end
    sees_none = (scores == -math.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(sees_none, 0.0)
    weights = scores.softmax(-1).masked_fill(sees_none, 0.0)
    if dropout_p:
        weights = torch.nn.functional.dropout(weights, dropout_p)
    if drop is not None:
        weights = drop(weights)
    return (weights @ v).to(query.dtype), scores.logsumexp(-1).masked_fill(sees_none.squeeze(-1), -math.inf)


def sees(scores: tuple[int, int], low: int | None, high: int | None, device: torch.device) -> Tensor | None:
    """(queries, keys): whether query i sees the key, from i + low to i + high; None where each sees all."""
    if low is None and high is None:
        return None
    low, high = (-scores[0] if low is None else low), (scores[1] if high is None else high)
    rows, columns = (torch.arange(size, device=device) for size in scores)
    distance = columns - rows[:, None]
    return (distance >= low) & (distance <= high)


def _repeated(x: Tensor, query: Tensor) -> Tensor:
    """Repeat the heads of `x` to as many as the query has, where that is a multiple."""
    if min(x.dim(), query.dim()) < 3 or x.shape[-3] in (0, 1, query.shape[-3]):
        return x
    return x.repeat_interleave(query.shape[-3] // x.shape[-3], -3)
