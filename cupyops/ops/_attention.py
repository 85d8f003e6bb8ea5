"""attention: softmax(query key^T * scale) value, with a bound or a window, and the log-sum-exp of each row."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._dispatch.attention import attention as kernels
from .._dispatch.attention import launches as attentions
from .._dispatch.attention.arguments import bounds, check, number
from .._dispatch.attention.scores import attend, sees
from .._dispatch.core import shardings
from .._dispatch.core.gpu import gpu
from .._expression import captures
from .._expression.captures import Variant
from .._kernel.kernel import FLOATING
from .._operator.define import operator
from .._operator.derivation.autocast import cast
from .._util import arguments


@operator(
    "cupyops::attention",
    autocast="lower",
    dtypes=FLOATING,
    mixed=("sinks", "c0", "c1", "c2", "c3"),
    sharding=shardings.attention,
)
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sinks: Tensor | None,
    low: int | None,
    high: int | None,
    scale: float | None,
    text: str | None,
    given: list[float] | None,
    c0: Tensor | None,
    c1: Tensor | None,
    c2: Tensor | None,
    c3: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Query i sees the keys from i + low to i + high; (batch, heads, rows, head_dim). A variant has a text."""
    variant = Variant(text, given, (c0, c1, c2, c3))
    packed = captures.is_packed(variant)  # bounds are then of each sequence
    mask = None if packed else sees((query.shape[2], key.shape[2]), low, high, query.device)
    change = None if text is None else partial(captures.change, variant, (low, high))
    drop = None if text is None else partial(captures.drop, variant)
    tokens = query.shape[2]
    if packed:
        query, key, value = captures.unpacked(variant, query, key, value)
    scaled = query, key, value, mask, kernels.scale_of(query, scale)
    if arguments.autocast(query.device):  # which would round the scores
        with torch.autocast(query.device.type, enabled=False):
            y, lse = attend(*scaled, change=change, drop=drop)
    else:
        y, lse = attend(*scaled, change=change, drop=drop)
    if packed:
        y, lse = captures.packed(variant, y, lse, tokens)
    if sinks is not None:
        y, lse = captures.with_sinks(y, lse, sinks)
    return y.contiguous(), lse


@_attention.forward
def forward(query, key, value, sinks, low, high, scale, text, given, c0, c1, c2, c3):
    low, high, variant = captures.bound(Variant(text, given, (c0, c1, c2, c3)), low, high)
    return attentions.forward(query, key, value, low, high, scale, variant, sinks), ()


@_attention.backward
def backward(
    saved, grad_y, grad_lse, query, key, value, sinks, low, high, scale, text, given, c0, c1, c2, c3, y, lse, needs_grad
):
    whole, grads = Variant(text, given, (c0, c1, c2, c3)), (grad_y, grad_lse)
    more = needs_grad.c0, needs_grad.c1, needs_grad.c2, needs_grad.c3
    eager = partial(_attention.reference, query, key, value, sinks, low, high, scale)
    found = captures.gradients(lambda one: eager(*one[:2], *one.tensors), whole, more, grads)
    least, most, variant = captures.bound(whole, low, high)
    needs, of = (needs_grad.query, needs_grad.key, needs_grad.value), (query, key, value, (least, most), scale)
    beside = sinks if needs_grad.sinks else None
    return (*attentions.backward(*of, (y, lse), grads, needs, variant, sinks=beside), *found)


@_attention.unsupported
def unsupported(query, key, value, sinks, low, high, scale, text, given, c0, c1, c2, c3):
    reason = captures.why_not(Variant(text, given, (c0, c1, c2, c3)))
    return reason or kernels.why_not(query, key, value, scale, gpu(query.device))


@_attention.interface
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    causal: str | None = None,
    window: tuple[int | None, int | None] | int | None = None,
    scale: float | None = None,
    return_lse: bool = False,
    score: str | None = None,
    mask: str | None = None,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout_p: float = 0.0,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    **captured: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention, softmax(query key^T * scale) value, without the scores in memory (arXiv:2205.14135).

    Args:
        query: (batch, heads, queries, head_dim), of any strides; kernels serve fp16 and bf16, head_dim a multiple of 8 up to
            256, from compute capability 8.0 on. Everything else is computed by PyTorch, with the scores in memory.
        key: (batch, kv_heads, keys, head_dim). `heads` is a multiple of `kv_heads`; so many heads share one, as in
            grouped-query attention, and it is not repeated in memory.
        value: (batch, kv_heads, keys, value_dim), by kernels up to 256 too.
        causal: "top_left", query i sees the keys up to i; "bottom_right", the last query sees all keys, as a decoder with a
            cache needs it; None, no such bound. Both are the same where there are as many queries as keys.
        window: (left, right): of the keys around its own, on the diagonal that `causal` names, or bottom_right without it, a
            query sees so many to the left and to the right; None for no bound on that side.
        scale: greater than 0 for the kernels; by default 1 / sqrt(head_dim).
        return_lse: also the logarithm of the sum of exponentials of each row of scores, natural, with a gradient.
        score: what becomes of a scaled score, an expression in the C of `cupyops.elementwise`: `"tanh(s / cap) * cap"`. It
            names `s`; `q` and `k`, the rows of query and key; `b` and `h`, the batch and the head of the query, all from
            0 on; and what is captured. The gradient by `s` is derived from it.
        mask: which keys are seen, an expression of the same but `s`: `"k <= q && doc[b, q] == doc[b, k]"`. It holds beside
            `causal` and `window`. What it says of `q - k` alone, compared with integers, bounds the keys; of the rest each
            call makes a map, by which blocks are left out that no query sees.
        softcap: scores become softcap * tanh(score / softcap).
        alibi_slopes: (heads,) or (batch, heads): each slope times the distance from the key to its query's own, on the
            diagonal that `causal` names, or bottom_right without it, is taken from the score; after `softcap`.
        sinks: (heads,), a score that each row of a head has besides: it joins the sum of exponentials, also of `return_lse`,
            and no value goes with it. It has a gradient.
        dropout_p: the probability that a weight is dropped; what is left grows by 1 / (1 - dropout_p). 0 in evaluation. Each
            call draws one number from PyTorch's generator of the device, as `cupyops.dropout` does, and a weight's batch,
            head, query and key make the rest: forward and backward drop the same, and no mask is stored. `return_lse` is
            that of all scores.
        cu_seqlens_q: (sequences + 1,), int32 or int64, with the other three: of packed sequences, where each begins and the
            last ends among the tokens. `query` is then (tokens, heads, head_dim), and so are key, value and the result;
            `return_lse` gives (heads, tokens). Each sequence sees itself alone; `b` counts them, `q` and `k` the rows of
            each, and `causal`, `window` and slopes are as its own lengths have it. On Hopper kernels run them by wgmma where
            `head_dim` is that of the values and at most 128, and by mma.sync else.
        cu_seqlens_k: the same of keys and values.
        max_seqlen_q: the rows of the longest, at least; so nothing is read back from the GPU.
        max_seqlen_k: the same of keys and values.
        **captured: what `score` and `mask` name: numbers, and at most 4 tensors, 3 beside `dropout_p`, of up to 4
            dimensions, which have an index for each, `slopes[h]` or `bias[b, h, q, k]`; where one is outside, the nearest
            element counts. A dimension of size 1 has the same for all. The gradients of tensors are computed by PyTorch,
            with the scores in memory.

    Returns:
        Tensor (batch, heads, queries, value_dim), by kernels laid out as `query`; and with `return_lse` (batch, heads,
        queries), fp32 or fp64. A query that sees no key has zeros, and -inf or its sink. Backward sums in a fixed order,
        for the same bits every time, under `torch.use_deterministic_algorithms(True)`, and by default where that takes
        about as long. From 512 queries and keys on, or on Hopper 1,024 where rows are wider than 64, it adds up the
        gradient of `query` in fp32 in no order, so that its last bits differ from run to run, as those of cuDNN and flash
        attention do, where all three gradients are needed; with a window from 1,024 on, or on Hopper 4,096 where rows are
        wider than 64; with a score, a mask or dropout so on Hopper alone; never of packed sequences, nor on GPUs with too
        little shared memory.

    Raises:
        InputError: an argument is of the wrong kind, dtype, shape or device; an expression that cannot be read, or names
            what is not given.
        CompileError: at the first launch of an expression, where the C does not compile.

    Example:
        >>> q, k = torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2, 1)
        >>> cupyops.attention(q, k, torch.tensor([[[[1.0], [3.0]]]]), causal="top_left")
        tensor([[[[1.],
                  [2.]]]])
        >>> slopes = torch.tensor([0.5])
        >>> far = cupyops.attention(q, k, q, score="s - slopes[h] * abs(q - k)", mask="q - k < n", slopes=slopes, n=64)
    """
    starts, longest, last = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), causal != "top_left"
    if packed := captures.sequences(query, key, starts, longest, last):
        query, key, value = (x.transpose(0, 1).unsqueeze(0) for x in captures.of_tokens(query, key, value))
    check(query, key, value)
    captures.check_sinks(query, sinks)
    sides: Any = window
    if isinstance(window, int) and not (score is None and mask is None):  # a number that they name
        sides, captured = None, captured | {"window": window}
    apart = 0 if packed else key.shape[2] - query.shape[2]
    low, high = bounds(causal, sides, apart)
    score, captured = captures.usual(softcap, alibi_slopes, (None if packed else apart) if last else 0, score, captured)
    if arguments.autocast(query.device):  # wherever it is computed
        query, key, value = cast((query, key, value), torch.get_autocast_dtype(query.device.type))
    given = captures.variant(score, mask, captured, query, key, packed, captures.dropout(dropout_p, query))
    whole = query, key, value, sinks, low, high, number(scale), given.text, given.numbers, *given.tensors
    exact = given.text is not None or sinks is not None
    if exact and arguments.autocast(query.device):  # which would round what is captured, and sinks
        with torch.autocast(query.device.type, enabled=False):
            y, lse = _attention(*whole)
    else:
        y, lse = _attention(*whole)
    if packed:
        y, lse = y.squeeze(0).transpose(0, 1), lse.squeeze(0)
    return (y, lse) if return_lse else y
