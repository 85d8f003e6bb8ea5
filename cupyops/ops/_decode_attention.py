"""decode_attention: the last queries of sequences, attending to all keys of a cache."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from .._dispatch.attention import decode as kernels
from .._dispatch.attention.attention import scale_of
from .._dispatch.core import shardings
from .._dispatch.core.gpu import gpu
from .._operator.define import operator
from .._util import arguments
from ..errors import InputError


@operator(
    "cupyops::decode_attention",
    autocast="lower",
    dtypes=kernels.DTYPES,
    sharding=shardings.decode_attention,
)
def _decode(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_lengths: Tensor | None,
    block_table: Tensor | None,
    mask: Tensor | None,
    window: int | None,
    scale: float | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Attend with the scores in memory. What no query sees of the cache may be anything, NaN among it."""
    wide = torch.promote_types(q.dtype, torch.float32)
    _check_values(k_cache, kv_lengths, block_table)
    k, v = (_of_sequences(x, block_table).transpose(1, 2) for x in (k_cache, v_cache))
    queries, rows = q.shape[1], k.shape[2]
    lengths = (
        torch.full((q.shape[0],), rows, device=q.device) if kv_lengths is None else kv_lengths.long().clamp(0, rows)
    )
    keys, own = torch.arange(rows, device=q.device), torch.arange(queries, device=q.device) - queries
    seen = (keys < lengths[:, None])[:, None]
    behind = lengths[:, None, None] + own[:, None] - keys  # how far before that of the query a key lies
    seen = seen & (behind >= 0 if mask is None else mask)
    if window is not None:
        seen = seen & (behind <= window)
    unread = ~seen.any(1)[:, None, :, None]  # of no query
    k, v = (x.masked_fill(unread, 0.0).to(wide) for x in (k, v))
    k, v = (_repeated(x, q.shape[2]) for x in (k, v))
    scores = q.to(wide).transpose(1, 2) @ k.mT * scale_of(q, scale)
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    none = ~seen.any(-1)[:, None, :, None]
    scores = scores.masked_fill(~seen[:, None], -math.inf).masked_fill(none, 0.0)
    weights = scores.softmax(-1).masked_fill(none, 0.0)
    y, lse = weights @ v, scores.logsumexp(-1).masked_fill(none.squeeze(-1), -math.inf)
    y, lse = (x.transpose(1, 2).clone(memory_format=torch.contiguous_format) for x in (y.to(q.dtype), lse))
    return y, lse


def _repeated(x: Tensor, heads: int) -> Tensor:
    """(batch, heads, rows, head_dim), those of the keys each as often as they are shared."""
    if not x.shape[1]:
        return x
    group = heads // x.shape[1]
    return x.unsqueeze(2).expand(-1, -1, group, -1, -1).flatten(1, 2)


def _of_sequences(cache: Tensor, block_table: Tensor | None) -> Tensor:
    """(batch, rows, kv_heads, head_dim); of entries that name no block, which no sequence may come to, the first one."""
    if block_table is None:
        return cache
    named = (block_table >= 0) & (block_table < cache.shape[0])
    return cache[torch.where(named, block_table, 0).long()].flatten(1, 2)


def _check_values(k_cache: Tensor, kv_lengths: Tensor | None, block_table: Tensor | None) -> None:
    """Lengths fit, and the blocks exist that a sequence comes to; where they can be read."""
    rows = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if kv_lengths is not None:
        arguments.in_range("kv_lengths, element {},", kv_lengths, rows + 1, "one")
    if block_table is not None:
        starts = torch.arange(block_table.shape[1], device=block_table.device) * k_cache.shape[1]
        reached = block_table if kv_lengths is None else block_table.where(starts < kv_lengths[:, None], 0)
        arguments.in_range("block_table, element {},", reached, k_cache.shape[0], "one")


@_decode.forward
def forward(q, k_cache, v_cache, kv_lengths, block_table, mask, window, scale, softcap):
    given = q, k_cache, v_cache, kv_lengths, block_table, mask, window
    return kernels.forward(*given, scale_of(q, scale), softcap), ()


@_decode.unsupported
def unsupported(q, k_cache, v_cache, kv_lengths, block_table, mask, window, scale, softcap):
    return kernels.why_not(q, k_cache, v_cache, block_table, scale, gpu(q.device))


@_decode.interface
def decode_attention(
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
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of the last queries of each sequence to the keys and values in a cache, those of the queries among them.

    The keys are split over blocks of a GPU, so that one sequence alone keeps all of it busy. Lengths and tables stay on the
    GPU: a CUDA graph of a step is right for every length.

    Args:
        q: (batch, queries, heads, head_dim): of each sequence the last ones, most often one. Kernels serve fp16, bf16 and
            fp32, head_dim a multiple of 8 up to 256, from compute capability 8.0 on; PyTorch computes everything else. One
            query of whole caches without `window`, `softcap` and `return_lse` is PyTorch's own attention where that was
            measured to be as fast: of half types, on Hopper with a head_dim of 128 at most.
        k_cache: (batch, rows, kv_heads, head_dim), or, with `block_table`, (blocks, block_size, kv_heads, head_dim);
            `kv_heads` divides `heads`, and so many heads share one.
        v_cache: of the shape of `k_cache`.
        kv_lengths: integers (batch,): how many rows of the cache each sequence has; by default all. What lies beyond is not
            read. At most as many as there are rows: on the CPU others are an error, on a GPU all rows are taken.
        block_table: integers (batch, n): the block of `k_cache` that has the first `block_size` rows of a sequence, the next
            ones, and so on. Entries beyond its length are not read. Kernels serve a block_size that is a multiple of 16.
        mask: bool (batch, queries, rows of a sequence), of any strides: which of the first `kv_lengths` keys a query sees,
            in place of those up to its own; not with `window`. The kernels do not read keys that no query sees.
        window: how many keys before its own a query sees; by default all. Query i of n is at row `kv_lengths - n + i`.
        scale: by default 1 / sqrt(head_dim); greater than 0 for the kernels.
        softcap: greater than 0: scores become `softcap * tanh(scores / softcap)`.
        return_lse: also the logarithm of the sum of exponentials of each row of scores, natural.

    Returns:
        Tensor (batch, queries, heads, head_dim), contiguous; and with `return_lse` (batch, queries, heads), fp32 or fp64. A
        query that sees no key has zeros, and -inf. Gradients, where they are wanted, are computed by PyTorch.

    Raises:
        InputError: an argument is of the wrong kind, dtype, shape or device; on the CPU, a length or a block out of range.
            On a GPU a block out of range prints itself and stops the kernel.

    Example:
        >>> k = torch.zeros(1, 4, 1, 1)
        >>> v = torch.tensor([1.0, 3.0, 5.0, 7.0]).view(1, 4, 1, 1)
        >>> cupyops.decode_attention(torch.zeros(1, 1, 1, 1), k, v, torch.tensor([2])).item()
        2.0
    """
    _check(q, k_cache, v_cache, block_table)
    _check_integers(q, kv_lengths, block_table)
    _check_mask(q, k_cache, block_table, mask, window)
    if window is not None and (isinstance(window, bool) or not isinstance(window, int) or window < 0):
        arguments.fail("window", window, "an int of at least 0, or None")
    for name, value in (("scale", scale), ("softcap", softcap)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            arguments.fail(name, value, "a number, or None")
    if softcap is not None and not 0 < softcap < math.inf:
        arguments.fail("softcap", softcap, "greater than 0 and finite, or None")
    numbers = (None if x is None else float(x) for x in (scale, softcap))
    if not return_lse and kv_lengths is block_table is mask is window is softcap is None and not is_dynamo_compiling():
        found = kernels.by_pytorch(q, k_cache, v_cache, scale)
        if found is not None:
            return found
    y, lse = _decode(q, k_cache, v_cache, kv_lengths, block_table, mask, window, *numbers)
    return (y, lse) if return_lse else y


def _check(q: Tensor, k_cache: Tensor, v_cache: Tensor, block_table: Tensor | None) -> None:
    arguments.floating("q", q)
    arguments.floating("k_cache", k_cache)
    arguments.floating("v_cache", v_cache)
    arguments.same_device(q=q, k_cache=k_cache, v_cache=v_cache)
    if not arguments.autocast(q.device):
        arguments.same_dtype(q=q, k_cache=k_cache, v_cache=v_cache)
    if q.dim() != 4:
        arguments.fail("q", q, "(batch, queries, heads, head_dim)")
    batch, _, heads, width = q.shape
    first = f"{batch}, rows" if block_table is None else "blocks, block_size"
    if k_cache.dim() != 4 or k_cache.shape[3] != width or (block_table is None and k_cache.shape[0] != batch):
        arguments.fail("k_cache", k_cache, f"({first}, kv_heads, {width}), as q has it")
    if v_cache.dim() != 4 or v_cache.shape[:3] != k_cache.shape[:3]:
        arguments.fail("v_cache", v_cache, f"{tuple(k_cache.shape[:3])} and head_dim, as k_cache has it")
    if heads % k_cache.shape[2] if k_cache.shape[2] else heads:
        raise InputError(f"k_cache has {k_cache.shape[2]} heads, expected a divisor of the {heads} of q")


def _check_integers(q: Tensor, kv_lengths: Tensor | None, block_table: Tensor | None) -> None:
    arguments.optional_tensor("kv_lengths", kv_lengths)
    arguments.optional_tensor("block_table", block_table)
    arguments.same_device(q=q, kv_lengths=kv_lengths, block_table=block_table)
    for name, value in (("kv_lengths", kv_lengths), ("block_table", block_table)):
        if value is not None and value.dtype not in (torch.int32, torch.int64):
            arguments.fail(name, value, "int32 or int64")
    if block_table is not None and (block_table.dim() != 2 or block_table.shape[0] != q.shape[0]):
        arguments.fail("block_table", block_table, f"({q.shape[0]}, blocks of a sequence)")
    if kv_lengths is not None and kv_lengths.shape != (q.shape[0],):
        arguments.fail("kv_lengths", kv_lengths, f"shape ({q.shape[0]},)")


def _check_mask(q: Tensor, k_cache: Tensor, block_table: Tensor | None, mask: Tensor | None, window: Any) -> None:
    arguments.optional_tensor("mask", mask)
    if mask is None:
        return
    arguments.same_device(q=q, mask=mask)
    if mask.dtype is not torch.bool:
        arguments.fail("mask", mask, "bool")
    rows = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    if mask.shape != (*q.shape[:2], rows):
        arguments.fail("mask", mask, f"shape {(*q.shape[:2], rows)}: batch, queries, rows of a sequence")
    if window is not None:
        arguments.fail("window", window, "None with a mask, which says what is seen")
