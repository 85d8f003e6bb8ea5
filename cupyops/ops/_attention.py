"""attention: softmax(query key^T * scale) value, with a bound or a window, and the log-sum-exp of each row."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .._dispatch import attention as kernels
from .._dispatch import attentions, shardings
from .._dispatch.attention_scores import attend, sees
from .._dispatch.gpu import gpu
from .._expression import captures
from .._expression.captures import Variant
from .._kernel.kernel import FLOATING
from .._operator.define import operator
from .._operator.derivation.autocast import cast
from .._util import arguments
from ..errors import InputError


@operator(
    "cupyops::attention",
    autocast="lower",
    dtypes=FLOATING,
    mixed=("c0", "c1", "c2", "c3"),
    sharding=shardings.attention,
)
def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    low: int | None,
    high: int | None,
    scale: float | None,
    text: str | None,
    numbers: list[float] | None,
    c0: Tensor | None,
    c1: Tensor | None,
    c2: Tensor | None,
    c3: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Query i sees the keys from i + low to i + high; (batch, heads, rows, head_dim). A variant has a text."""
    return _eager(Variant(text, numbers, (c0, c1, c2, c3)), query, key, value, low, high, scale)


def _eager(
    variant: Variant, query: Tensor, key: Tensor, value: Tensor, low: int | None, high: int | None, scale: float | None
) -> tuple[Tensor, Tensor]:
    mask = sees((query.shape[2], key.shape[2]), low, high, query.device)
    given = query, key, value, mask, kernels.scale_of(query, scale)
    change = None if variant.text is None else partial(captures.change, variant)
    if arguments.autocast(query.device):  # which would round the scores
        with torch.autocast(query.device.type, enabled=False):
            y, lse = attend(*given, change=change)
    else:
        y, lse = attend(*given, change=change)
    return y.contiguous(), lse


@_attention.forward
def forward(query, key, value, low, high, scale, text, numbers, c0, c1, c2, c3):
    low, high, variant = captures.bound(Variant(text, numbers, (c0, c1, c2, c3)), low, high)
    return attentions.forward(query, key, value, low, high, scale, variant), ()


@_attention.backward
def backward(
    saved, grad_y, grad_lse, query, key, value, low, high, scale, text, numbers, c0, c1, c2, c3, y, lse, needs_grad
):
    given, bounds = Variant(text, numbers, (c0, c1, c2, c3)), (low, high)
    needs = needs_grad.query, needs_grad.key, needs_grad.value
    more = needs_grad.c0, needs_grad.c1, needs_grad.c2, needs_grad.c3
    found = captures.gradients(
        lambda variant: _eager(variant, query, key, value, *bounds, scale), given, more, (grad_y, grad_lse)
    )
    *bounds, variant = captures.bound(given, *bounds)
    grads = attentions.backward(query, key, value, bounds, scale, (y, lse), (grad_y, grad_lse), needs, variant)
    return (*grads, *found)


@_attention.unsupported
def unsupported(query, key, value, low, high, scale, text, numbers, c0, c1, c2, c3):
    reason = captures.why_not(Variant(text, numbers, (c0, c1, c2, c3)))
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
    **captured: Any,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention, softmax(query key^T * scale) value, without the scores in memory (arXiv:2205.14135).

    Args:
        query: (batch, heads, queries, head_dim), of any strides; kernels serve fp16 and bf16, head_dim a multiple of 8 up to
            128, from compute capability 8.0 on. Everything else is computed by PyTorch, with the scores in memory.
        key: (batch, kv_heads, keys, head_dim). `heads` is a multiple of `kv_heads`; so many heads share one, as in
            grouped-query attention, and it is not repeated in memory.
        value: of the shape of `key`.
        causal: "top_left", query i sees the keys up to i; "bottom_right", the last query sees all keys, as a decoder with a
            cache needs it; None, no such bound. Both are the same where there are as many queries as keys.
        window: (left, right): of the keys around its own, on the diagonal that `causal` names, or bottom_right without it, a
            query sees so many to the left and to the right; None for no bound on that side.
        scale: greater than 0 for the kernels; by default 1 / sqrt(head_dim).
        return_lse: also the logarithm of the sum of exponentials of each row of scores, natural, with a gradient.
        score: what becomes of a scaled score, as an expression in the C of `cupyops.elementwise`: `"tanh(s / cap) * cap"`. It
            names `s`; `q` and `k`, the rows of query and key; `b` and `h`, the batch and the head of the query, all from 0
            on; and what is captured. The gradient by `s` is derived from it.
        mask: which keys are seen, an expression of the same but `s`: `"k <= q && doc[b, q] == doc[b, k]"`. It holds beside
            `causal` and `window`. What it says of `q - k` alone, compared with integers, has blocks of keys left out.
        softcap: scores become softcap * tanh(score / softcap).
        alibi_slopes: (heads,) or (batch, heads): each slope times the distance from the key to its query's own, on the diagonal
            that `causal` names, or bottom_right without it, is taken from the score; after `softcap`.
        sinks: (heads,), a score that each row of a head has besides: it joins the sum of exponentials, also of `return_lse`,
            and no value goes with it. It has a gradient.
        **captured: what `score` and `mask` name: numbers, and at most 4 tensors of up to 4 dimensions, which have an index for
            each, `slopes[h]` or `bias[b, h, q, k]`; where one is outside, the nearest element counts. A dimension of size 1
            has the same for all. The gradients of tensors are computed by PyTorch, with the scores in memory.

    Returns:
        Tensor (batch, heads, queries, head_dim), by kernels laid out as `query`; and with `return_lse` (batch, heads,
        queries), fp32 or fp64. A query that sees no key has zeros, and -inf. Backward sums in a fixed order: the same bits
        every time.

    Raises:
        InputError: an argument is of the wrong kind, dtype, shape or device; an expression that cannot be read, or names what
            is not given.
        CompileError: at the first launch of an expression, where the C does not compile.

    Example:
        >>> q, k = torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 2, 1)
        >>> cupyops.attention(q, k, torch.tensor([[[[1.0], [3.0]]]]), causal="top_left")
        tensor([[[[1.],
                  [2.]]]])
        >>> slopes = torch.tensor([0.5])
        >>> far = cupyops.attention(q, k, q, score="s - slopes[h] * abs(q - k)", mask="q - k < n", slopes=slopes, n=64)
    """
    _check(query, key, value)
    if isinstance(window, int) and (score or mask):  # a number that they name
        window, captured = None, captured | {"window": window}
    apart = key.shape[2] - query.shape[2]
    low, high = _bounds(causal, window, apart)
    score, captured = captures.usual(softcap, alibi_slopes, 0 if causal == "top_left" else apart, score, captured)
    if arguments.autocast(query.device):  # wherever it is computed
        query, key, value = cast((query, key, value), torch.get_autocast_dtype(query.device.type))
    given = captures.variant(score, mask, captured, query, key)
    whole = query, key, value, low, high, _scale(scale), given.text, given.numbers, *given.tensors
    if given.text is not None and arguments.autocast(query.device):  # which would round what is captured
        with torch.autocast(query.device.type, enabled=False):
            y, lse = _attention(*whole)
    else:
        y, lse = _attention(*whole)
    if sinks is not None:
        y, lse = captures.with_sinks(y, lse, sinks)
    return (y, lse) if return_lse else y


def _check(query: Tensor, key: Tensor, value: Tensor) -> None:
    arguments.floating("query", query)
    arguments.floating("key", key)
    arguments.floating("value", value)
    arguments.same_device(query=query, key=key, value=value)
    if not arguments.autocast(query.device):
        arguments.same_dtype(query=query, key=key, value=value)
    if query.dim() != 4:
        arguments.fail("query", query, "(batch, heads, queries, head_dim)")
    batches, heads, _, width = query.shape
    if key.dim() != 4 or (key.shape[0], key.shape[3]) != (batches, width):
        arguments.fail("key", key, f"({batches}, kv_heads, keys, {width}), as query has it")
    if value.shape[:3] != key.shape[:3] or value.dim() != 4:
        arguments.fail("value", value, f"{tuple(key.shape[:3])} and head_dim, as key has it")
    if heads % key.shape[1] if key.shape[1] else heads:
        raise InputError(f"key has {key.shape[1]} heads, expected a divisor of the {heads} of query")


def _scale(scale: float | None) -> float | None:
    if scale is not None and (isinstance(scale, bool) or not isinstance(scale, (int, float))):
        arguments.fail("scale", scale, "a number, or None for 1 / sqrt(head_dim)")
    return None if scale is None else float(scale)


def _bounds(
    causal: str | None, window: tuple[int | None, int | None] | None, apart: int
) -> tuple[int | None, int | None]:
    """(low, high) of the keys that a query sees; `apart`: how many keys more than queries there are."""
    arguments.choice("causal", causal, (None, "top_left", "bottom_right"))
    diagonal = 0 if causal == "top_left" else apart
    high = None if causal is None else diagonal
    if window is None:
        return None, high
    if not isinstance(window, (tuple, list)) or len(window) != 2 or not all(_is_size(side) for side in window):
        arguments.fail("window", window, "(left, right), each an int of at least 0 or None")
    left, right = window
    if right is not None:
        high = diagonal + (right if causal is None else 0)
    return None if left is None else diagonal - left, high


def _is_size(side: int | None) -> bool:
    return side is None or (isinstance(side, int) and not isinstance(side, bool) and side >= 0)
