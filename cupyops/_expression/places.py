"""Indices of scores in PyTorch: batch, head, query, key; packed sequences, each by itself; the weights that are dropped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .._util.philox import factors, philox


def places(scores: Tensor) -> Iterator[Tensor]:
    """The batch, the head, the query and the key of scores, which broadcast."""
    for dim, size in enumerate(scores.shape):
        shape = [-1 if dim == at else 1 for at in range(4)]
        yield torch.arange(size, dtype=torch.int32, device=scores.device).view(shape)


def unpacked(x: Tensor, starts: Tensor, longest: int) -> Tensor:
    """(sequences, heads, longest, width) of packed (1, heads, tokens, width): each sequence by itself, zeros after its end.

    So nothing of a sequence reaches another, be it NaN.
    """
    tokens = x.shape[2]
    begin, end = _begins_and_ends(starts, tokens)
    rows = begin[:, None] + torch.arange(longest, device=x.device)
    return _append_row(x.squeeze(0), 0.0)[:, torch.where(rows < end[:, None], rows, tokens)].transpose(0, 1)


def packed(y: Tensor, starts: Tensor, tokens: int, none: float) -> Tensor:
    """Undo `unpacked`: return (1, heads, tokens, ...), with `none` for the tokens of no sequence."""
    count, longest = y.shape[0], y.shape[2]
    begin, end = _begins_and_ends(starts, tokens)
    token = torch.arange(tokens, device=y.device)
    of = torch.searchsorted(end, token, right=True).clamp(max=count - 1)
    row = token - begin[of]
    held = (row >= 0) & (row < longest) & (token < end[of])
    at = torch.where(held, of * longest + row, count * longest)
    return _append_row(y.transpose(0, 1).flatten(1, 2), none)[:, at].unsqueeze(0)


def seen_in(
    scores: Tensor, starts: tuple[Tensor, Tensor], tokens: tuple[int, int], bounds: Sequence[int | None], last: bool
) -> Tensor:
    """Return a mask (sequences, heads, queries, keys): True for keys of the sequence, within the bounds.

    `last`: the bounds are those of the diagonal on which the last query is at the last key.
    """
    begins_and_ends = (_begins_and_ends(one, count) for one, count in zip(starts, tokens))
    queries, keys = ((end - begin).view(-1, 1, 1, 1) for begin, end in begins_and_ends)
    _, _, q, k = places(scores)
    seen, distance, (low, high) = k < keys, k - q, bounds
    if last:
        distance = distance - (keys - queries)
    seen = seen if low is None else seen & (distance >= low)
    return seen if high is None else seen & (distance <= high)


def _begins_and_ends(starts: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    within = starts.long().clamp(0, tokens)
    return within[:-1], within[1:].contiguous()


def _append_row(x: Tensor, value: float) -> Tensor:
    """(heads, rows, ...), with a row of `value` behind the others."""
    return torch.cat([x, x.new_full((x.shape[0], 1, *x.shape[2:]), value)], 1)


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
    """Number of the pair of rows, 8 apart, to which a row belongs."""
    return x // 16 * 8 + x % 8
