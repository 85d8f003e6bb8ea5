"""What decode_attention means, by PyTorch, written another time."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


def by_cache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_lengths: Tensor | None = None,
    block_table: Tensor | None = None,
    *,
    mask: Tensor | None = None,
    window: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> Any:
    """Blocks gathered, heads repeated, scores in memory, softmax in fp32, weights rounded."""
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k_cache, v_cache = (x if x.dtype == torch.float64 else x.to(dtype) for x in (q, k_cache, v_cache))
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        k, v = k_cache, v_cache
        if block_table is not None:
            k, v = (x[block_table.long()].reshape(q.shape[0], -1, *x.shape[2:]) for x in (k, v))
        if q.shape[2] and not k.shape[2]:
            raise ValueError("no heads of keys")
        rows, queries = k.shape[1], q.shape[1]
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        lengths = torch.full((len(q),), rows, device=q.device) if kv_lengths is None else kv_lengths.clamp(0, rows)
        own = lengths[:, None] - queries + torch.arange(queries, device=q.device)
        keys = torch.arange(rows, device=q.device)
        unseen = (keys > own[..., None]) | (keys < (own - rows if window is None else own - window)[..., None])
        if mask is not None:
            unseen = (keys >= lengths[:, None])[:, None] | ~mask
        read = ~unseen.all(1)[:, None, :, None]  # what no query sees is nothing
        k, v = (x.where(read, 0).repeat_interleave(q.shape[1] // max(k.shape[1], 1), 1) for x in (k, v))
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = (q @ k.mT).to(wide) * (q.shape[3] ** -0.5 if scale is None else scale)
        scores = scores if softcap is None else torch.tanh(scores / softcap) * softcap
        scores = torch.where(unseen[:, None], -math.inf, scores)
        some = ~unseen.all(-1)[:, None]
        scores = torch.where(some[..., None], scores, 0.0)
        y = (torch.where(some[..., None], scores.softmax(-1), 0.0).to(v.dtype) @ v).transpose(1, 2)
        lse = torch.where(some, scores.logsumexp(-1), -math.inf).transpose(1, 2)
        y, lse = (x.clone(memory_format=torch.contiguous_format) for x in (y, lse))
        return (y, lse) if return_lse else y
