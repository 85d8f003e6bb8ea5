"""embedding: rows of a table by their numbers."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import check
from ..common.norms import card
from ..errors import InputError
from ..kernel import FLOATING, Kernel, ceil_div
from ..layout import aligned, is_dry
from ..operator import operator

embedding_fwd = Kernel("embedding.cu", "embedding_fwd<T, VEC>", T=FLOATING, VEC=(False, True))
embedding_bwd_link = Kernel("embedding.cu", "embedding_bwd_link<T>", T=FLOATING)
embedding_bwd_segments = Kernel("embedding.cu", "embedding_bwd_segments<T>", T=FLOATING)
embedding_bwd = Kernel("embedding.cu", "embedding_bwd<T, VEC>", T=FLOATING, VEC=(False, True))

THREADS = 256  # kThreads
LOADS = 4  # of a thread of forward, about
ALL_THREADS = 132 * 1024  # of forward at a time; where so many suffice, one has one load
LISTED = 32  # kListed
LINKED = 1 << 15  # kLinked
LEAST_SLOTS = 8
SLOTS = 32, 128  # at most, linked and sorted: kAdded // kListed, kSlots
LISTERS = 256  # blocks that have them, at least, as far as these limits allow
LISTER_BYTES = 24 * 1024  # of what a block adds up, about: it waits for one load after the other
WARP = 32
WARP_BYTES = 1 << 13  # of zeros for a warp of backward, about
WARPS = 132 * 32  # for them, at least, where rows are short
LEAST_PIECE = 2 * (LISTED + 1)  # positions; so a list has no more pieces than it has LISTED + 1 positions
FEW = 1 << 26  # indices of which any device's shared memory holds a piece, the square root
OTHER_SHARED = 15 * 1024  # bytes of it that are no positions
MOST_ADDERS = 1 << 10


@operator("cupyops::embedding")
def _embedding(
    weight: Tensor, indices: Tensor, rows: int, padding_idx: int, scale_grad_by_freq: bool, sparse: bool
) -> Tensor:
    try:
        return torch.embedding(weight, indices, padding_idx, scale_grad_by_freq, sparse)
    except IndexError as error:
        raise InputError(f"input: {error}") from error


@_embedding.unsupported
def _(weight, indices, rows, padding_idx, scale_grad_by_freq, sparse):
    if sparse:
        return "a sparse gradient"
    count = indices.numel()
    if count > FEW and (count >= 1 << 31 or count > ((card(weight.device)[1] - OTHER_SHARED) // 4) ** 2):
        return "2^31 indices or more, or a piece of them larger than shared memory"
    return "2^31 rows or more" if rows >= 1 << 31 else None


@_embedding.forward
def _(weight, indices, rows, padding_idx, scale_grad_by_freq, sparse):
    size = weight.shape[1]
    y = torch.empty((*indices.shape, size), dtype=weight.dtype, device=weight.device)
    if is_dry(y) or y.numel() == 0:
        return y, ()
    if size > 1 and weight.stride(1) != 1:
        weight = weight.contiguous()
    vector, stride, tokens = 16 // weight.element_size(), weight.stride(0), indices.numel()
    vectors = size % vector == 0 and stride % vector == 0 and aligned(weight) and aligned(y)
    grid, block = forward_plan(tokens, size // vector if vectors else ceil_div(size, vector) + 1)
    embedding_fwd[grid, block](weight, indices.contiguous(), y, tokens, rows, size, stride, T=weight.dtype, VEC=vectors)
    return y, ()


@_embedding.backward
def _(saved, grad_y, indices, rows, padding_idx, scale_grad_by_freq):
    size, count = grad_y.shape[-1], indices.numel()
    if is_dry(grad_y) or grad_y.numel() == 0:
        return torch.zeros((rows, size), dtype=grad_y.dtype, device=grad_y.device)
    grad_y = grad_y.contiguous()
    vector = 16 // grad_y.element_size()
    vectors = size % vector == 0 and aligned(grad_y)
    plan = backward_plan(count, rows, size, vector, vectors)
    given, scratch = indices.reshape(-1).contiguous(), functools.partial(torch.empty, device=grad_y.device)
    zeros = torch.zeros(rows + 2 * count + 1, dtype=torch.int32, device=grad_y.device)
    work = zeros, scratch(2 * plan.pieces + plan.stride * count, dtype=torch.int32)
    sizes = rows, count, plan.piece, plan.pieces
    grid = ceil_div(count, THREADS), THREADS
    if plan.stride > 1:
        embedding_bwd_link[grid](given, *work, *sizes, padding_idx, T=grad_y.dtype)
    else:
        keys, order = torch.sort(given.int(), stable=True)
        embedding_bwd_segments[grid](keys, order, *work, *sizes, padding_idx, T=grad_y.dtype)
    acc = torch.float64 if grad_y.dtype is torch.float64 else torch.float32
    partial = scratch((plan.pieces, (ceil_div(size, vector) + 1) * vector), dtype=acc)
    grad_weight = scratch((rows, size), dtype=grad_y.dtype)
    tensors = grad_y, given, *work, partial, grad_weight
    numbers = plan.adders, plan.listers, plan.slots, plan.batch, plan.stride, scale_grad_by_freq
    launch = embedding_bwd[plan.grid, plan.block, 4 * plan.piece]
    launch(*tensors, rows, size, *sizes[1:], *numbers, T=grad_y.dtype, VEC=vectors)
    return grad_weight


@_embedding.reference_backward
def _(saved, grad_y, indices, rows, padding_idx, scale_grad_by_freq):
    return torch.ops.aten.embedding_dense_backward(grad_y, indices, rows, padding_idx, scale_grad_by_freq)


@functools.lru_cache(maxsize=4096)
def forward_plan(tokens: int, units: int) -> tuple[int, tuple[int, int]]:
    """(grid, block) for rows of so many vectors, or spans."""
    loads = LOADS if tokens * units > ALL_THREADS else 1
    along = min(THREADS, _threads(ceil_div(units, loads)))
    return ceil_div(tokens, THREADS // along), (along, THREADS // along)


class Backward(NamedTuple):
    """Of backward: of the sizes alone, so the bits are too."""

    stride: int  # of lists: LISTED, or 1 where the indices are sorted
    piece: int  # positions of a long list that are added at once
    pieces: int  # at most
    adders: int  # blocks for them
    listers: int  # blocks for short lists
    slots: int  # positions of one, at which they begin
    batch: int  # rows of a warp that writes zeros: less than WARP, or a multiple of it
    grid: int
    block: tuple[int, int]


@functools.lru_cache(maxsize=4096)
def backward_plan(count: int, rows: int, size: int, vector: int, vectors: bool) -> Backward:
    """For `count` indices and rows in vectors, or not."""
    units = size // vector if vectors else ceil_div(size, vector) + 1
    along = _threads(ceil_div(units, ceil_div(units, THREADS)))
    # as many pieces as one has positions, where all indices are one row
    piece = max(LEAST_PIECE, math.isqrt(count - 1) + 1)
    pieces = count // (LISTED + 1)
    linked = count <= LINKED
    row_bytes = 16 * ceil_div(size, vector)
    slots = min(SLOTS[0 if linked else 1], max(LEAST_SLOTS, min(count // LISTERS, LISTER_BYTES // row_bytes)))
    listers = ceil_div(count, slots)
    adders = min(pieces, MOST_ADDERS, listers)
    batch = max(1, WARP_BYTES * vector // (16 * size))
    if batch >= WARP:
        batch = max(1, min(batch, rows // WARPS) // WARP) * WARP
    block = along, THREADS // along
    grid = adders + listers + ceil_div(rows, batch * (block[0] * block[1] // WARP))
    return Backward(LISTED if linked else 1, piece, pieces, adders, listers, slots, batch, grid, block)


def _threads(least: int) -> int:
    """Of a row, at least: whole warps, or a part of one that divides it."""
    return ceil_div(least, 32) * 32 if least > 32 else _power_of_two(least)


def _power_of_two(least: int) -> int:
    return 1 << (max(least, 1) - 1).bit_length()


@_embedding.interface
def embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """The rows of `weight` that `input` names; as `torch.nn.functional.embedding`.

    The gradient adds what belongs to a row in a fixed order: the same bits every time.

    Args:
        input: rows, int32 or int64, of any shape.
        weight: the table, (rows, size); kernels serve fp16, bf16, fp32 and fp64.
        padding_idx: a row that gets no gradient; from the end where it is negative.
        max_norm: rows that are named and whose norm is more are first scaled to it, in place.
        norm_type: the p of that norm.
        scale_grad_by_freq: divide the gradient of each row by how often `input` names it.
        sparse: make the gradient of `weight` a sparse tensor; by PyTorch.

    Returns:
        Tensor of shape (*input.shape, size) and the dtype of `weight`.

    Raises:
        InputError: `input` is not of int32 or int64 or, on the CPU, out of range, `weight` is no matrix,
            or `padding_idx` is out of range. On a GPU an index out of range prints itself and stops the kernel.

    Example:
        >>> cupyops.embedding(torch.tensor([2, 0]), torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]))
        tensor([[4., 5.],
                [0., 1.]])
    """
    padding = _checked_padding(input, weight, padding_idx, max_norm, norm_type)
    if max_norm is not None:
        _renorm(weight, input, max_norm, norm_type)
    return _embedding(weight, input.long(), weight.shape[0], padding, bool(scale_grad_by_freq), bool(sparse))


def _checked_padding(
    input: Tensor, weight: Tensor, padding_idx: int | None, max_norm: float | None, norm_type: float
) -> int:
    """The row of `padding_idx`, -1 for none, when all arguments have been checked."""
    check.tensor("input", input)
    check.tensor("weight", weight)
    check.same_device(input=input, weight=weight)
    if input.dtype not in (torch.int64, torch.int32):
        check.fail("input", input, "a tensor of int32 or int64")
    if weight.dim() != 2:
        check.fail("weight", weight, "a tensor of shape (rows, size)")
    if max_norm is not None:
        check.floating("weight", weight)
        _check_number("max_norm", max_norm)
        _check_number("norm_type", norm_type)
    return -1 if padding_idx is None else _row(padding_idx, weight.shape[0])


def _row(padding_idx: Any, rows: int) -> int:
    """`padding_idx` counted from the front."""
    if isinstance(padding_idx, bool) or not isinstance(padding_idx, (int, torch.SymInt)):
        check.fail("padding_idx", padding_idx, "an int or None")
    if not -rows <= padding_idx < rows:
        check.fail("padding_idx", padding_idx, f"a row of weight in [{-rows}, {rows})")
    return padding_idx + rows if padding_idx < 0 else padding_idx  # type: ignore[return-value]  # a SymInt: an int


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        check.fail(name, value, "a number")


def _renorm(weight: Tensor, input: Tensor, max_norm: float, norm_type: float) -> None:
    """Scale the rows that are named, in place; PyTorch's, which asks for indices that are contiguous."""
    try:
        with torch.no_grad():
            torch.embedding_renorm_(weight.detach(), input.contiguous(), max_norm, norm_type)
    except IndexError as error:
        raise InputError(f"input: {error}") from error
