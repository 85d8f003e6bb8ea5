"""scaled_dot_product_attention: PyTorch's, by the kernels of attention where they serve."""

from __future__ import annotations

import torch
from torch import Tensor

from .._dispatch.attention import attention as kernels
from .._dispatch.attention import launches as attentions
from .._dispatch.attention.library import slower
from .._dispatch.attention.scores import attend, sees
from .._dispatch.core import shardings
from .._dispatch.core.gpu import gpu
from .._expression import captures
from .._operator.define import operator
from .._util import arguments, symbolic, torch_private
from ..errors import InputError


@operator(
    "cupyops::scaled_dot_product_attention",
    autocast="lower",
    dtypes=kernels.HALF,
    sharding=shardings.scaled_dot_product_attention,
)
def _sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    if _has_every_derivative(query, key, value):
        if query.is_cuda and _empty(
            query, key, value
        ):  # of which PyTorch's makes None, or ends the process: 0 kv_heads
            return query.new_zeros((*query.shape[:-1], value.shape[-1])) + 0 * (query.sum() + key.sum() + value.sum())
        query, key, value = (kernels.taken(x) for x in (query, key, value))
        attn_mask = None if attn_mask is None else kernels.taken_mask(attn_mask)
        y: Tensor = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        if y.is_cuda and y.requires_grad:
            y.register_hook(kernels.taken)  # a gradient too may begin where PyTorch's kernels fault
        return y
    if attn_mask is None and is_causal:
        attn_mask = sees((query.shape[-2], key.shape[-2]), None, 0, query.device)
    return attend(query, key, value, attn_mask, kernels.scale_of(query, scale), dropout_p)[0]


def _empty(*tensors: Tensor) -> bool:
    """Return True if a tensor has no elements."""
    return any(symbolic.known(size == 0) for x in tensors for size in x.shape)


def _has_every_derivative(*tensors: Tensor) -> bool:
    """Return True if PyTorch's fused functions have the derivatives that may be asked for, or doing without is too slow."""
    if torch_private.functorch_active() or torch_private.forward_mode():
        return False
    return tensors[0].dtype is not torch.float64 or not any(x.requires_grad for x in tensors)


@_sdpa.forward
def forward(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    low, high, variant = captures.bound(captures.of_mask(attn_mask), None, 0 if is_causal else None)
    y, lse = attentions.forward(query, key, value, low, high, scale, variant)
    return y, (lse,)


@_sdpa.backward
def backward(saved, grad_y, query, key, value, attn_mask, is_causal, scale, y, needs_grad):
    needs, results, grads = (needs_grad.query, needs_grad.key, needs_grad.value), (y, *saved), (grad_y, None)
    low, high, variant = captures.bound(captures.of_mask(attn_mask), None, 0 if is_causal else None)
    found = attentions.backward(query, key, value, (low, high), scale, results, grads, needs, variant)
    if not needs_grad.attn_mask:
        return (*found[:3], None)
    with torch.enable_grad():  # through the scores, in memory
        mask = attn_mask.detach().requires_grad_()
        again = attend(query, key, value, mask, kernels.scale_of(query, scale))[0]
    return (*found[:3], *torch.autograd.grad(again, mask, grad_y))


@_sdpa.reference_backward
def reference_backward(saved, grad_y, query, key, value, attn_mask, is_causal, scale):
    """Differentiate through scores in memory: PyTorch's fused functions have no second derivative."""
    floating = attn_mask is not None and attn_mask.dtype != torch.bool
    tensors = (query, key, value, attn_mask) if floating else (query, key, value)
    with torch.enable_grad():
        given = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in tensors]
        mask = sees((query.shape[2], key.shape[2]), None, 0, query.device) if is_causal else attn_mask
        y = attend(*given[:3], given[3] if floating else mask, kernels.scale_of(query, scale))[0]
    grads = torch.autograd.grad(y, given, grad_y, create_graph=True)
    return grads if floating else (*grads, None)


@_sdpa.unsupported
def unsupported(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
    if dropout_p:
        return "dropout"
    if query.dim() != 4:
        return f"{query.dim()} dimensions"
    heads, shared = query.shape[1], key.shape[1]
    empty = _empty(query, key, value)
    if query.shape[0] != key.shape[0] or key.shape[:3] != value.shape[:3] or empty or not heads:
        return "another batch, heads or rows, or none"
    if heads != shared and not enable_gqa:
        return "heads that are broadcast"
    if attn_mask is not None and not _broadcasts(attn_mask, (*query.shape[:3], key.shape[2])):
        return "a mask of another shape than the scores, or of none"
    card = gpu(query.device)
    refused = kernels.why_not(query, key, value, scale, card)
    return refused or slower(query, key, value, attn_mask, is_causal, card)


def _broadcasts(mask: Tensor, scores: tuple[int, ...]) -> bool:
    """Return True if the mask broadcasts to the shape of the scores."""
    sizes = zip(reversed(mask.shape), reversed(scores))
    return mask.dim() <= 4 and mask.numel() > 0 and all(size in (1, whole) for size, whole in sizes)


@_sdpa.interface(twin=torch.nn.functional.scaled_dot_product_attention)
def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(query key^T * scale + attn_mask) value; as `torch.nn.functional.scaled_dot_product_attention`.

    Kernels serve four dimensions of fp16 and bf16, head_dim a multiple of 8 up to 256, without dropout, where they are
    measured as fast as PyTorch's; the gradient of a mask takes the scores in memory. All else is PyTorch's own function,
    which is given copies of what it would not read where it lies. `cupyops.trace()` says which and why.

    Args:
        query: (..., heads, queries, head_dim), of any strides.
        key: (..., kv_heads, keys, head_dim).
        value: (..., kv_heads, keys, value_dim).
        attn_mask: bool, true where a key is seen, or of the dtype of `query`, added to the scores; broadcast to
            (..., heads, queries, keys). Not beside `is_causal`.
        dropout_p: the probability that a weight is dropped; 0 in evaluation.
        is_causal: query i sees the keys up to i, also where there are more keys; `cupyops.attention` has the other diagonal.
        scale: by default 1 / sqrt(head_dim).
        enable_gqa: `kv_heads` divides `heads`, and so many heads share one.

    Returns:
        Tensor (..., heads, queries, value_dim), by kernels laid out as `query`.

    Raises:
        InputError: an argument is of no floating-point dtype; dtypes, devices or shapes do not fit; a mask and `is_causal`.

    Example:
        >>> q = k = torch.zeros(1, 1, 2, 1)
        >>> cupyops.scaled_dot_product_attention(q, k, torch.tensor([[[[1.0], [3.0]]]]), is_causal=True)
        tensor([[[[1.],
                  [2.]]]])
    """
    _check(query, key, value, attn_mask, is_causal)
    if not 0 <= dropout_p <= 1:
        arguments.fail("dropout_p", dropout_p, "a probability in [0, 1]")
    _check_heads(query, key, value, enable_gqa)
    heads = query.dim() == key.dim() == value.dim() == 3 and (attn_mask is None or attn_mask.dim() <= 3)
    if heads and (query.dtype in kernels.HALF or arguments.autocast(query.device)):
        batched = (x.unsqueeze(0) for x in (query, key, value))
        return _sdpa(*batched, attn_mask, dropout_p, is_causal, scale, enable_gqa).squeeze(0)
    return _sdpa(query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa)


def _check(query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool) -> None:
    arguments.floating("query", query)
    arguments.floating("key", key)
    arguments.floating("value", value)
    arguments.optional_tensor("attn_mask", attn_mask)
    arguments.same_device(query=query, key=key, value=value, attn_mask=attn_mask)
    if not arguments.autocast(query.device):
        arguments.same_dtype(query=query, key=key, value=value)
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.dim() < 2:
            arguments.fail(name, x, "(..., rows, head_dim)")
    if key.shape[-1] != query.shape[-1]:
        arguments.fail("key", key, f"head_dim {query.shape[-1]}, the last dimension of query")
    if value.shape[-2] != key.shape[-2]:
        arguments.fail("value", value, f"{key.shape[-2]} rows, as many as key has")
    if attn_mask is not None and is_causal:
        arguments.fail("attn_mask", attn_mask, "None beside is_causal")


def _check_heads(query: Tensor, key: Tensor, value: Tensor, enable_gqa: bool) -> None:
    if not enable_gqa or min(query.dim(), key.dim(), value.dim()) < 3:
        return
    heads = query.shape[-3]
    for name, x in (("key", key), ("value", value)):
        if x.shape[-3] and heads % x.shape[-3]:
            raise InputError(f"{name} has {x.shape[-3]} heads, expected a divisor of the {heads} of query")
