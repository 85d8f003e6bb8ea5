"""Rules by which work on DTensors is split, where they depend on arguments; `cupyops.operator` explains the notation."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from string import ascii_lowercase
from typing import Any


def _dims(ndim: int, whole: Collection[int] = (), left_out: Collection[int] = ()) -> str:
    """A letter for each dimension: capitals for those that are whole on every device; without those left out."""
    letters = ascii_lowercase[:ndim]
    return "".join(one.upper() if dim in whole else one for dim, one in enumerate(letters) if dim not in left_out)


def along(x: Any, dim: int, dtype: Any) -> str:
    """Rule of softmax: whole along one dimension."""
    dims = _dims(x.ndim, {dim % max(1, x.ndim)})
    return f"{dims} -> {dims}"


def reduced(x: Any, dim: list[int], *more: Any) -> str:
    """Rule of amax and var, of which `keepdim` is the last argument: reduced dimensions are whole."""
    keepdim = more[-1]
    return f"{_dims(x.ndim, dim)} -> {_dims(x.ndim, dim, () if keepdim else dim)}"


def pointwise(inputs: int, outputs: int) -> str:
    """Rule for tensors that broadcast."""
    return f"{', '.join(['...'] * inputs)} -> {', '.join(['...'] * outputs)}"


def linear_epilogue(weight: Any, captured: Sequence[Any]) -> str:
    """Rule of a product whose result goes through an epilogue with captured tensors: the summed dimension is whole."""
    parts = ["*" if not one.ndim else "...n" if one.shape[-1] == weight.shape[0] else "...Z" for one in captured]
    return f"{', '.join(['...K', 'nK', 'n', *parts])} -> ...n"


def folded(tensors: Sequence[Any], dim: list[int], keepdim: bool) -> str:
    """Rule of a reduction of tensors that broadcast: reduced dimensions are whole."""
    ndim = max(one.ndim for one in tensors)
    dims = _dims(ndim, dim)
    inputs = ", ".join(dims[ndim - one.ndim :] for one in tensors)
    return f"{inputs} -> {_dims(ndim, dim, () if keepdim else dim)}"


def averaged(x: Any, dim: list[int], keepdim: bool, dtype: Any, size: list[int]) -> str:
    """Rule of mean, which is told the sizes of `x`."""
    dims = _dims(x.ndim, dim)
    return f"{dims}, size={dims} -> {_dims(x.ndim, dim, () if keepdim else dim)}"


def summed(x: Any, dim: list[int], keepdim: bool, dtype: Any, size: list[int]) -> str:
    """Rule of sum: each device may have a part of the summands, unless their dimension is kept."""
    dims = _dims(x.ndim, dim if keepdim else ())
    return f"{dims}, size={dims} -> {_dims(x.ndim, dim, () if keepdim else dim)}"


def layer_norm(x: Any, normalized_shape: list[int], weight: Any, bias: Any, eps: float) -> str:
    """Rule of layer_norm: rows are whole."""
    row = _dims(len(normalized_shape)).upper()
    return f"...{row}, {row}, {row} -> ...{row}"


def rms_norm(x: Any, normalized_shape: list[int], weight: Any, eps: float | None) -> str:
    """Rule of rms_norm: rows are whole."""
    row = _dims(len(normalized_shape)).upper()
    return f"...{row}, {row} -> ...{row}"


def add_rms_norm(x: Any, residual: Any, normalized_shape: list[int], weight: Any, eps: float | None) -> str:
    """Rule of add_rms_norm: rows are whole."""
    row = _dims(len(normalized_shape)).upper()
    return f"...{row}, ...{row}, {row} -> ...{row}, ...{row}"


def group_norm(x: Any, *more: Any) -> str:
    """Rule of group_norm: samples are whole."""
    dims = _dims(x.ndim, range(1, x.ndim))
    return f"{dims}, B, B -> {dims}"


def batch_norm(x: Any, *more: Any) -> str:
    """Channels are whole, whose statistics are of all samples."""
    dims = _dims(x.ndim, {*range(x.ndim)} - {1})
    return f"{dims}, b, b, b, b -> {dims}"


def batch_norm_inference(x: Any, *more: Any) -> str:
    """Rule of batch_norm with given statistics."""
    dims = _dims(x.ndim)
    return f"{dims}, b, b, b, b -> {dims}"


def batch_norm_act(x: Any, *more: Any) -> str:
    """Rule of batch_norm_act: that of batch_norm; a residual is split as the result. Moments given are of whole tensors."""
    dims = _dims(x.ndim, {*range(x.ndim)} - {1})
    return f"{dims}, b, b, {dims}, b, b, *, * -> {dims}"


def batch_norm_act_inference(x: Any, *more: Any) -> str:
    """Rule of batch_norm_act with given statistics."""
    dims = _dims(x.ndim)
    return f"{dims}, b, b, {dims}, b, b -> {dims}"


def gated(gate: Any, up: Any, *more: Any) -> str:
    """Packed rows, whose halves go together, are whole."""
    return "...C, * -> ...C" if up is None else "..., ... -> ..."


def gated_linear(x: Any, weight: Any, weight_up: Any, *more: Any) -> str:
    """Features, whose products are whole; packed weights, whose halves go together, too."""
    return "...K, CK, * -> ...C" if weight_up is None else "...K, nK, nK -> ...n"


def grouped_mm(input: Any, mat2: Any, *more: Any) -> str:
    """Rule of grouped_mm: the dimension that groups divide is whole, since they end anywhere."""
    if input.ndim == 2:
        return "Rk, Gkn, G -> Rn" if mat2.ndim == 3 else "mR, Rn, G -> Gmn"
    return "Gmk, kR, G -> mR" if mat2.ndim == 2 else "gmk, gkn, * -> gmn"


def matmul(a: Any, b: Any) -> str:
    """Rule of products of vectors, matrices and batches."""
    rows, columns = "" if a.ndim == 1 else "...m", "" if b.ndim == 1 else "n"
    batch = "..." if b.ndim > 2 else ""
    return f"{rows}k, {batch}k{columns} -> {rows or batch}{columns}"


def conv2d(x: Any, weight: Any, bias: Any, stride: Any, padding: Any, dilation: Any, groups: int) -> str:
    """Images and output channels; input channels as a sum. Of groups, images."""
    return "ncHW, ocYX, +o -> noHW" if groups == 1 else "nCHW, OIYX, O -> nOHW"


def of_classes(x: Any, target: Any, reduction: str) -> str:
    """Rule of losses over classes. Positions are independent; of a mean nobody knows how many positions are counted."""
    classes = min(1, x.ndim - 1)
    dims = _dims(x.ndim, range(x.ndim) if reduction == "mean" else {classes})
    positions = dims[:classes] + dims[classes + 1 :]
    targets = dims if target.ndim == x.ndim and target.is_floating_point() else positions
    return f"{dims}, {targets}, {dims[classes]} -> {positions if reduction == 'none' else ''}"


def cross_entropy(x: Any, target: Any, weight: Any, ignore_index: int, reduction: str, label_smoothing: float) -> str:
    """Rule of cross_entropy of class indices."""
    return of_classes(x, target, reduction)


def cross_entropy_fp32(x: Any, target: Any, ignore_index: int, reduction: str, label_smoothing: float) -> str:
    """Rule of cross_entropy without weights."""
    return cross_entropy(x, target, None, ignore_index, reduction, label_smoothing)


def cross_entropy_probabilities(x: Any, target: Any, weight: Any, reduction: str, label_smoothing: float) -> str:
    """Rule of cross_entropy of probabilities."""
    return of_classes(x, target, reduction)


def nll_loss(x: Any, target: Any, weight: Any, ignore_index: int, reduction: str) -> str:
    """Rule of nll_loss of class indices."""
    return of_classes(x, target, reduction)


def fused_linear_cross_entropy(
    x: Any, weight: Any, target: Any, bias: Any, class_weight: Any, ignore_index: int, reduction: str, *more: Any
) -> str:
    """Rule of fused_linear_cross_entropy: rows, each with all classes."""
    row = "R" if reduction == "mean" else "r"
    return f"{row}K, CK, {row}, C, C -> {row if reduction == 'none' else ''}"


def kl_div(x: Any, target: Any, reduction: str, log_target: bool, batch: int) -> str:
    """Element by element; of a mean nobody knows the count."""
    return {"none": "..., ... -> ...", "mean": "*, * -> *"}.get(reduction, "..., ... ->")


def attention(
    query: Any, key: Any, value: Any, sinks: Any, low: Any, high: Any, scale: Any, text: str | None, *more: Any
) -> str:
    """Batch and heads; heads of keys stay with those of their queries. A variant counts them, and is whole."""
    if text is not None:
        return "*, *, *, *, *, *, *, * -> *, *"
    return "bhQD, bhKD, bhKE, h, *, *, *, * -> bhQE, bhQ"


def scaled_dot_product_attention(query: Any, key: Any, value: Any, attn_mask: Any, dropout_p: float, *more: Any) -> str:
    """Batch and heads, where no mask of dropout is over all of them."""
    if dropout_p or query.ndim != 4:
        return "*, *, *, * -> *"
    mask = "*" if attn_mask is None else "bhQK"[4 - attn_mask.ndim :] if attn_mask.ndim <= 4 else "*"
    return f"bhQD, bhKD, bhKE, {mask} -> bhQE"


def decode_attention(q: Any, k: Any, v: Any, lengths: Any, table: Any, *more: Any) -> str:
    """Batch and heads; of a paged cache, whose blocks any sequence may have, heads alone."""
    cache, batch = ("bKhD, bKhE", "b") if table is None else ("PKhD, PKhE", "B")
    return f"{batch}QhD, {cache}, {batch}, {batch}N, {batch}QM -> {batch}QhE, {batch}Qh"


def rope(x: Any, cos: Any, sin: Any, positions: Any, interleaved: bool, seq_dim: int, back: bool) -> str:
    """Rule of rope: rows are whole, and so is what counts positions."""
    dims = _dims(x.ndim, {seq_dim % x.ndim, x.ndim - 1})
    seq = dims[seq_dim % x.ndim]
    at = "*" if positions is None else seq if positions.ndim == 1 else f"a{seq}"
    return f"{dims}, *, *, {at} -> {dims}"
