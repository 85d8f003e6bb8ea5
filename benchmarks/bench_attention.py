"""attention: 16,384 tokens in sequences of several lengths, full and causal, with grouped heads, packed, and variants."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

import cupyops
from cupyops.bench import Case

TOKENS, HIDDEN = 16384, 2048
HALF = torch.bfloat16


def cases() -> Iterator[Case]:
    for width in (128, 64):
        for rows in (512, 1024, 4096, 16384):
            for causal in (False, True):
                yield case(TOKENS // rows, HIDDEN // width, HIDDEN // width, rows, width, causal)
    yield case(4, 32, 8, 4096, 128, True)
    yield case(4, 16, 16, 4096, 128, True, dtype=torch.float16)
    yield case(4, 16, 16, 4096, 80, True)
    for width, values, heads in ((96, 96, 16), (192, 128, 16), (256, 256, 8)):
        for causal in (False, True):
            yield case(4, heads, heads, 4096, width, causal, values=values)
    for width in (64, 128):
        yield case(4, HIDDEN // width, HIDDEN // width, 4096, width, True, window=1023)
    for name in ("softcap", "alibi", "sinks", "documents", "dropout"):
        yield variant(4, 16, 4096, 128, name)
    yield variant(1, 16, 16384, 128, "documents")
    yield packed(16, 1024, 16, 128)
    yield packed(4, 4096, 16, 128)
    yield packed(4, 4096, 32, 64)


def case(
    batch: int,
    heads: int,
    kv_heads: int,
    rows: int,
    width: int,
    causal: bool,
    dtype: torch.dtype = HALF,
    values: int | None = None,
    window: int | None = None,
) -> Case:
    """As a projection of the heads of all tokens gives them; a causal window beside a mask, and beside flash attention's."""
    value_width = values or width

    def make(device: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        count = (heads, width), (kv_heads, width), (kv_heads, value_width)
        given = (torch.randn(batch, rows, h, w, device=device).to(dtype).transpose(1, 2) for h, w in count)
        return tuple(x.requires_grad_() for x in given)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Any:
        sides = None if window is None else (window, 0)
        return cupyops.attention(q, k, v, causal="top_left" if causal else None, window=sides)

    def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if window is None:
            return scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=kv_heads < heads)
        apart = torch.arange(rows, device=q.device)[:, None] - torch.arange(rows, device=q.device)
        return scaled_dot_product_attention(q, k, v, (apart >= 0) & (apart <= window))

    def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if window is None or not q.is_cuda:
            return _by(SDPBackend.FLASH_ATTENTION, eager)(q, k, v)
        return _flash(*(x.transpose(1, 2) for x in (q, k, v)), None, rows, window).transpose(1, 2)

    peers = {"flash": flash} if value_width == width else {}  # which takes values of the width of keys alone
    if window is None:
        peers["cuDNN"] = _by(SDPBackend.CUDNN_ATTENTION, eager)
    if window is None or window >= rows:
        seen = 0.5 * rows * rows if causal else float(rows * rows)
    else:  # the scores that are computed
        seen = (window + 1.0) * (rows - window - 1) + (window + 1) * (window + 2) / 2
    flops = 2.0 * batch * heads * seen * (width + value_width)
    shared = f"/{kv_heads}" if kv_heads < heads else ""
    of_values = f"/{value_width}" if value_width != width else ""
    bound = (" causal" if causal else "") + ("" if window is None else f" window {window + 1}")

    def small() -> Case:
        few = None if window is None else 7
        return case(1, 2, 1 if kv_heads < heads else 2, 33, 16, causal, dtype, 8 if of_values else None, few)

    return Case(
        op="attention",
        size=f"{batch}x{heads}{shared}x{rows}x{width}{of_values}{bound}",
        dtype=dtype,
        make=make,
        ours=ours,
        eager=eager,
        others=peers,
        forward_flops=flops,
        backward_flops=2.5 * flops,
        same=rows < 16384,  # the truth of longer ones does not fit, and shorter ones are compared
        small=None if rows < 64 else small,
    )


def variant(batch: int, heads: int, rows: int, width: int, name: str, dtype: torch.dtype = HALF) -> Case:
    """Causal, with scores or a mask that PyTorch's fused function does not know, beside FlexAttention; or with dropout."""
    slopes = [2.0 ** (-8 * (i + 1) / heads) for i in range(heads)]

    def make(device: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        given = (torch.randn(batch, rows, heads, width, device=device).to(dtype).transpose(1, 2) for _ in range(3))
        of_heads = torch.tensor(slopes, device=device)
        return *(x.requires_grad_() for x in given), of_heads, (torch.arange(rows, device=device) * 4 // rows).int()

    def ours(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, documents: Tensor) -> Any:
        if name == "softcap":
            return cupyops.attention(q, k, v, causal="top_left", softcap=30.0)
        if name == "alibi":
            return cupyops.attention(q, k, v, causal="top_left", alibi_slopes=slopes)
        if name == "sinks":
            return cupyops.attention(q, k, v, causal="top_left", sinks=slopes)
        if name == "dropout":
            return cupyops.attention(q, k, v, causal="top_left", dropout_p=0.1)
        return cupyops.attention(q, k, v, causal="top_left", mask="of[q] == of[k]", of=documents)

    def eager(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, documents: Tensor) -> Tensor:
        if name == "dropout":
            return scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        if name == "documents":  # one by one: the scores of all do not fit
            ends = [-(-rows * (i + 1) // 4) for i in range(4)]  # the first row of the next
            parts = zip(*(x.split([end - start for start, end in zip([0, *ends], ends)], 2) for x in (q, k, v)))
            return torch.cat([scaled_dot_product_attention(*part, is_causal=True) for part in parts], 2)
        scores = (q @ k.mT).float() * q.shape[-1] ** -0.5
        distance = torch.arange(rows, device=q.device)[:, None] - torch.arange(rows, device=q.device)
        seen = distance >= 0
        if name == "sinks":  # a key of no value, which all rows see
            scores = scores.masked_fill(~seen, -torch.inf)
            with_sinks = torch.cat([scores, slopes[:, None, None].expand(batch, heads, rows, 1)], -1)
            return with_sinks.softmax(-1)[..., :-1].to(v.dtype) @ v
        if name == "softcap":
            scores = 30 * torch.tanh(scores / 30)
        else:
            scores = scores - slopes[:, None, None] * distance.abs()
        return scores.masked_fill(~seen, -torch.inf).softmax(-1).to(v.dtype) @ v

    def flex(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, documents: Tensor) -> Tensor:
        if not q.is_cuda:  # where it is no kernel
            return eager(q, k, v, slopes, documents)
        found: Tensor = _flex(rows, name)(q, k, v, slopes, documents)
        return found

    return Case(
        op="attention",
        size=f"{batch}x{heads}x{rows}x{width} causal {name}",
        dtype=dtype,
        make=make,
        ours=ours,
        eager=eager,
        others={} if name == "dropout" else {"FlexAttention": flex},
        same=name != "dropout",
        forward_flops=2.0 * batch * heads * rows * rows * width,
        backward_flops=5.0 * batch * heads * rows * rows * width,
        small=None if rows < 64 else lambda: variant(1, 2, 33, 16, name, dtype),
    )


@functools.cache
def _flex(rows: int, name: str) -> Callable[..., Any]:
    """FlexAttention as its documents have it: compiled, with a block mask that is made once."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    compiled: Any = torch.compile(flex_attention, dynamic=False)
    blocks: list[Any] = []

    def run(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor, documents: Tensor) -> Any:
        def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
            return (i >= j) & (documents[i] == documents[j]) if name == "documents" else i >= j

        def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return s - slopes[h] * (i - j).abs() if name == "alibi" else 30 * torch.tanh(s / 30)

        def changed(scores: Tensor, lse: Tensor) -> Tensor:
            """As one more score in the sum of exponentials makes them."""
            return scores * torch.sigmoid(lse - slopes[:, None]).unsqueeze(-1).to(scores.dtype)

        if not blocks:
            blocks.append(create_block_mask(seen, None, None, rows, rows, device=q.device))
        if name == "sinks":
            return changed(*compiled(q, k, v, block_mask=blocks[0], return_lse=True))
        return compiled(q, k, v, score_mod=None if name == "documents" else score, block_mask=blocks[0])

    return run


def packed(sequences: int, mean: int, heads: int, width: int, dtype: torch.dtype = HALF) -> Case:
    """Sequences of lengths from half to one and a half of the mean; beside PyTorch's causal attention of one by one."""
    lengths = [mean // 2 + mean * i // max(1, sequences - 1) for i in range(sequences)]
    ends = [sum(lengths[: i + 1]) for i in range(sequences)]

    def make(device: Any, dtype: torch.dtype) -> tuple[Tensor, ...]:
        given = (torch.randn(ends[-1], heads, width, device=device).to(dtype) for _ in range(3))
        return *(x.requires_grad_() for x in given), torch.tensor([0, *ends], dtype=torch.int32, device=device)

    def ours(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Any:
        most = max(lengths)
        return cupyops.attention(
            q, k, v, causal="top_left", cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=most, max_seqlen_k=most
        )

    def eager(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        parts = zip(*(x.transpose(0, 1).unsqueeze(0).split(lengths, 2) for x in (q, k, v)))
        found = [scaled_dot_product_attention(*part, is_causal=True) for part in parts]
        return torch.cat(found, 2).squeeze(0).transpose(0, 1)

    def flash(q: Tensor, k: Tensor, v: Tensor, starts: Tensor) -> Tensor:
        return _flash(q, k, v, starts, max(lengths), None) if q.is_cuda else eager(q, k, v, starts)

    flops = 2.0 * sum(rows * rows for rows in lengths) * heads * width
    return Case(
        op="attention",
        size=f"{sequences}x{mean}x{heads}x{width} causal packed",
        dtype=dtype,
        make=make,
        ours=ours,
        eager=eager,
        others={"flash": flash},
        forward_flops=flops,
        backward_flops=2.5 * flops,
        small=None if mean < 64 else lambda: packed(3, 20, 2, 16, dtype),
    )


def _flash(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, longest: int, window: int | None) -> Tensor:
    """PyTorch's flash attention, causal: of packed sequences, or within a window, which no public function of 2.11 has."""
    sides = {} if window is None else {"window_size_left": window, "window_size_right": 0}
    call = torch.ops.aten._flash_attention_forward
    found: Tensor = call(q, k, v, starts, starts, longest, longest, 0.0, True, False, **sides)[0]
    return found


def _by(backend: SDPBackend, function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """By one of PyTorch's backends, where there is a GPU for it."""

    def run(*args: Tensor) -> Tensor:
        with sdpa_kernel([backend] if args[0].is_cuda else [SDPBackend.MATH]):
            return function(*args)

    return run
