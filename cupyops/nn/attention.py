"""Attention of a decoder's block: one projection, rotary positions, grouped heads, and a cache of keys and values."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._kernel.kernel import FLOATING
from ..errors import InputError
from ..ops._attention import attention
from ..ops._decode_attention import decode_attention
from ..ops._rope import rope as rotated
from ..ops._scaled_dot_product_attention import scaled_dot_product_attention
from .linear import Linear
from .normalization import RMSNorm
from .rope import RoPE


class KVCache:
    """Keys and values of earlier tokens, to which `Attention` appends in place; `Attention.new_cache` makes one.

    How many rows there are stays on the device: a CUDA graph of a step, or a compiled one, is right at every length.

    Attributes:
        keys, values: (batch, max_rows, kv_heads, head_dim).
        lengths: (batch,), int32: the rows of each sequence that are there. Of prompts of several lengths, padded at the
            right, set it to theirs after the prompt, `cache.lengths.copy_(lengths)`: what follows takes the padding's place.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.keys, self.values = keys, values
        self.lengths = torch.zeros(keys.shape[0], dtype=torch.int32, device=keys.device)
        self.is_empty = True

    def reset(self) -> None:
        """Begin anew, in the same memory."""
        self.lengths.zero_()
        self.is_empty = True

    def positions(self, rows: int) -> Tensor:
        """(batch, rows): of tokens that are to be appended."""
        return self.lengths[:, None] + torch.arange(rows, dtype=torch.int32, device=self.lengths.device)

    def append(self, keys: Tensor, values: Tensor, positions: Tensor) -> None:
        """Put rows (batch, rows, kv_heads, head_dim) where `positions` says, and count them."""
        if self.lengths.device.type == "cpu" and not torch.compiler.is_compiling():
            longest, most = int(positions.max()) + 1, self.keys.shape[1]
            if longest > most:
                raise InputError(f"cache has {most} rows, expected at least {longest}; make it with a larger max_rows")
        at = (torch.arange(keys.shape[0], device=keys.device)[:, None], positions)
        self.keys.index_put_(at, keys.to(self.keys.dtype))
        self.values.index_put_(at, values.to(self.values.dtype))
        self.lengths += keys.shape[1]
        self.is_empty = False


class Attention(torch.nn.Module):
    """Attention of a decoder's block, from (batch, rows, dim) to the same, by the operators of cupyops.

    One projection makes queries, keys and values, `cupyops.rms_norm` and `cupyops.rope` change queries and keys, and
    `cupyops.scaled_dot_product_attention`, or with a window `cupyops.attention`, reads the heads where they are; with a
    cache, later steps are `cupyops.decode_attention`.

    Args:
        dim: of the input.
        heads: of the queries.
        kv_heads: of keys and values, a divisor of `heads`; by default `heads`.
        head_dim: by default `dim / heads`.
        bias: of both projections.
        qk_norm: "rms": queries and keys are normalised, each head by itself, with a weight for each; None: they are not.
        rope: of `head_dim` or less, and as long as sequences become; layers may share one. None: no positions.
        causal: whether a token sees none that are later.
        window: how many tokens before its own a token sees; by default all. Only where `causal`.
        device, dtype: of the parameters.

    Raises:
        InputError: sizes that do not divide, or options that do not go together.

    Example:
        >>> rope = cupyops.nn.RoPE(8, max_positions=64)
        >>> layer = cupyops.nn.Attention(32, 4, kv_heads=2, qk_norm="rms", rope=rope).eval()
        >>> x = torch.randn(1, 6, 32)
        >>> with torch.no_grad():
        ...     cache = layer.new_cache(1, max_rows=64)
        ...     steps = [layer(x[:, :4], cache=cache), layer(x[:, 4:5], cache=cache), layer(x[:, 5:], cache=cache)]
        ...     torch.testing.assert_close(torch.cat(steps, 1), layer(x))
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        *,
        bias: bool = False,
        qk_norm: str | None = None,
        rope: RoPE | None = None,
        causal: bool = True,
        window: int | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        kv_heads = heads if kv_heads is None else kv_heads
        if min(dim, heads, kv_heads) <= 0 or heads % kv_heads:
            raise InputError(
                f"kv_heads is {kv_heads}, expected a divisor of heads, {heads}, all of them greater than 0"
            )
        if head_dim is None and dim % heads:
            raise InputError(f"dim is {dim}, expected a multiple of heads, {heads}; or give head_dim")
        if qk_norm not in (None, "rms"):
            raise InputError(f"qk_norm is {qk_norm!r}, expected 'rms' or None")
        if window is not None and (not causal or window < 0):
            raise InputError(f"window is {window}, expected at least 0, and causal=True beside it; or None")
        self.dim, self.heads, self.kv_heads = dim, heads, kv_heads
        self.head_dim = dim // heads if head_dim is None else head_dim
        if rope is not None and rope.dim > self.head_dim:
            raise InputError(f"rope turns {rope.dim} elements, expected at most head_dim, {self.head_dim}")
        self.causal, self.window = causal, window
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        self.qkv = Linear(dim, (heads + 2 * kv_heads) * self.head_dim, bias=bias, **options)
        self.out = Linear(heads * self.head_dim, dim, bias=bias, **options)
        self.q_norm = RMSNorm(self.head_dim, **options) if qk_norm else None
        self.k_norm = RMSNorm(self.head_dim, **options) if qk_norm else None
        self.rope = rope

    def new_cache(self, batch: int, max_rows: int, *, device: Any = None, dtype: torch.dtype | None = None) -> KVCache:
        """An empty cache for `batch` sequences of up to `max_rows` tokens; by default as the layer's parameters.

        Of another `dtype` (fp16, bf16, fp32 or fp64), later steps are computed in that, from keys and values rounded to it.
        """
        like = self.qkv.weight
        if dtype not in (None, *FLOATING):
            raise InputError(f"dtype is {dtype!r}, expected None or one of {', '.join(map(str, FLOATING))}")
        shape = batch, max_rows, self.kv_heads, self.head_dim
        keys, values = (like.new_zeros(shape, device=device, dtype=dtype) for _ in range(2))
        return KVCache(keys, values)

    def forward(self, input: Tensor, *, positions: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """Attend.

        Args:
            input: (batch, rows, dim).
            positions: integers (rows,) or (batch, rows), for `rope`; by default 0, 1, 2 ..., after those of the cache.
            cache: to which the keys and values of `input` are appended. A first call has the prompt, of any length; later
                ones have one token or a few. Only where `causal`, and without gradients.

        Returns:
            Tensor (batch, rows, dim).

        Raises:
            InputError: `input` or the cache is of another shape, a gradient is wanted beside a cache, or, on the CPU, the
                cache is full, which is as it was then. On a GPU a row beyond the cache stops the program.
        """
        self._check(input, cache)
        sizes = [n * self.head_dim for n in (self.heads, self.kv_heads, self.kv_heads)]
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in self.qkv(input).split(sizes, -1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        rows = None if cache is None else cache.positions(input.shape[1])
        if self.rope is not None:
            tables, at = (self.rope.cos, self.rope.sin), rows if positions is None else positions
            q, k = (rotated(x, *tables, at, interleaved=self.rope.interleaved, seq_dim=1) for x in (q, k))
        first = cache is None or cache.is_empty
        if cache is not None and rows is not None:
            cache.append(k, v, rows)
        if cache is None or first:  # the keys are these alone
            q, k, v = (x.transpose(1, 2) for x in (q, k, v))
            if self.window is None:  # PyTorch has that too, and is taken where it is faster
                y = scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=self.kv_heads < self.heads)
            else:
                y = attention(q, k, v, causal="top_left" if self.causal else None, window=(self.window, 0))
            return self.out(y.transpose(1, 2).flatten(-2))  # type: ignore[union-attr, no-any-return]
        y = decode_attention(q.to(cache.keys.dtype), cache.keys, cache.values, cache.lengths, window=self.window)
        return self.out(y.to(q.dtype).flatten(-2))  # type: ignore[union-attr, no-any-return]

    def _check(self, input: Tensor, cache: KVCache | None) -> None:
        if input.dim() != 3 or input.shape[-1] != self.dim:
            raise InputError(f"input is a tensor of shape {tuple(input.shape)}, expected (batch, rows, {self.dim})")
        if cache is None:
            return
        if not self.causal:
            raise InputError("cache was given, expected None: the layer is not causal, and later keys would be missing")
        if torch.is_grad_enabled() and (input.requires_grad or self.qkv.weight.requires_grad):
            raise InputError("a cache has no gradient, which is wanted here: call the layer inside torch.no_grad()")
        expected = input.shape[0], self.kv_heads, self.head_dim
        if (cache.keys.shape[0], *cache.keys.shape[2:]) != expected:
            raise InputError(
                f"cache has shape {tuple(cache.keys.shape)}, expected ({input.shape[0]}, max_rows, {expected[1]}, "
                f"{expected[2]}): make one with new_cache"
            )

    def extra_repr(self) -> str:
        options = "".join(f", {name}={value}" for name, value in (("window", self.window),) if value is not None)
        return f"{self.dim}, heads={self.heads}, kv_heads={self.kv_heads}, causal={self.causal}{options}"
