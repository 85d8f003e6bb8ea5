"""embedding: rows of a table by their numbers."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from .. import check
from ..common.norms import card
from ..errors import InputError
from ..kernel import FLOATING, Kernel, ceil_div
from ..layout import is_dry
from ..operator import operator

embedding_fwd = Kernel("embedding.cu", "embedding_fwd<T, VEC>", T=FLOATING, VEC=(False, True))
embedding_bwd = Kernel("embedding.cu", "embedding_bwd<T, VEC, FREQ>", T=FLOATING, VEC=(False, True), FREQ=(False, True))
embedding_bwd_sort = Kernel("embedding.cu", "embedding_bwd_sort<T>", T=FLOATING)
embedding_bwd_finish = Kernel("embedding.cu", "embedding_bwd_finish<T>", T=FLOATING)

THREADS = 256  # kThreads
LOADS = 4  # of a thread of forward, about
SINGLES = 4  # kSingles: single elements of a row that a thread of backward has
RUNS = 8, 32  # positions of a run of backward: so few, or more where that still makes
ENOUGH_THREADS = 1 << 16
FINISH = 32, 16  # kFinishColumns, kFinishRuns
SORT = 1024  # threads of a block that sorts, of which there is one
MOST_SORTED = 1 << 14  # by it: kSortKeys each; fewer where the device has less shared memory than these need
COUNTS = 32 * 1024 + 32  # bytes of it that are no keys
FILL = 1 << 15  # bytes of a block that writes zeros, about
FILL_BLOCKS = 131 * 2


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
    vectors = size % vector == 0 and stride % vector == 0 and (weight.data_ptr() | y.data_ptr()) % 16 == 0
    grid, block = forward_plan(tokens, size // vector if vectors else ceil_div(size, vector) + 1)
    embedding_fwd[grid, block](weight, indices.contiguous(), y, tokens, rows, size, stride, T=weight.dtype, VEC=vectors)
    return y, ()


@_embedding.backward
def _(saved, grad_y, indices, rows, padding_idx, scale_grad_by_freq):
    size, count = grad_y.shape[-1], indices.numel()
    if is_dry(grad_y) or grad_y.numel() == 0:
        return torch.zeros((rows, size), dtype=grad_y.dtype, device=grad_y.device)
    grad_y = grad_y.contiguous()
    keys, order, grad_weight = sort(indices.reshape(-1), grad_y, rows, size)
    vector = 16 // grad_y.element_size()
    vectors = size % vector == 0 and grad_y.data_ptr() % 16 == 0
    run, runs, grid, block, finish = backward_plan(count, size, vector if vectors else 1)
    acc = torch.float64 if grad_y.dtype is torch.float64 else torch.float32
    partial = torch.empty((2 * runs, size), dtype=acc, device=grad_y.device)
    sizes, options = (count, size, run), (padding_idx, scale_grad_by_freq)
    template = dict(T=grad_y.dtype, VEC=vectors, FREQ=scale_grad_by_freq)
    embedding_bwd[grid, block](grad_y, keys, order, grad_weight, partial, *sizes, padding_idx, **template)
    embedding_bwd_finish[finish, FINISH](keys, partial, grad_weight, *sizes, runs, *options, T=grad_y.dtype)
    return grad_weight


def sort(indices: Tensor, like: Tensor, rows: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """(the indices sorted, where each was, zeros for the gradient)."""
    count = indices.numel()
    if count > min(MOST_SORTED, (card(like.device)[1] - COUNTS) // 8):
        keys, order = torch.sort(indices.int(), stable=True)
        return keys, order, torch.zeros((rows, size), dtype=like.dtype, device=like.device)
    grad_weight = torch.empty((rows, size), dtype=like.dtype, device=like.device)
    passes = max(1, ceil_div((rows - 1).bit_length(), 8))
    keys = torch.empty(count, dtype=torch.int32, device=like.device)
    order = torch.empty(count, dtype=torch.int64, device=like.device)
    blocks = 1 + max(1, min(FILL_BLOCKS, grad_weight.numel() * like.element_size() // FILL))
    given = indices.contiguous(), keys, order, grad_weight, count, passes, grad_weight.numel()
    embedding_bwd_sort[blocks, SORT, 8 * count](*given, T=like.dtype)
    return keys, order, grad_weight


@_embedding.reference_backward
def _(saved, grad_y, indices, rows, padding_idx, scale_grad_by_freq):
    return torch.ops.aten.embedding_dense_backward(grad_y, indices, rows, padding_idx, scale_grad_by_freq)


@functools.lru_cache(maxsize=4096)
def forward_plan(tokens: int, units: int) -> tuple[int, tuple[int, int]]:
    """(grid, block) for rows of so many vectors, or spans."""
    along = min(THREADS, _power_of_two(ceil_div(units, LOADS)))
    return ceil_div(tokens, THREADS // along), (along, THREADS // along)


@functools.lru_cache(maxsize=4096)
def backward_plan(
    count: int, size: int, vector: int
) -> tuple[int, int, tuple[int, int], tuple[int, int], tuple[int, int]]:
    """(positions of a run, runs, grid, block, grid of the second kernel): of the sizes alone, so the bits are too."""
    vectors = ceil_div(size, vector if vector > 1 else SINGLES)  # or as many single elements as a thread has
    run = min(max(_power_of_two(count * vectors // ENOUGH_THREADS), RUNS[0]), RUNS[1])
    runs = ceil_div(count, run)
    along = min(THREADS, ceil_div(vectors, 32) * 32 if vectors > 32 else _power_of_two(vectors))
    grid = ceil_div(runs, THREADS // along), ceil_div(vectors, along)
    finish = ceil_div(runs - 1, FINISH[1]), ceil_div(size, FINISH[0])
    return run, runs, grid, (along, THREADS // along), finish


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
    rows = weight.shape[0]
    padding = -1 if padding_idx is None else _row(padding_idx, rows)
    if max_norm is not None:
        _renorm(weight, input, max_norm, norm_type)
    return _embedding(weight, input.long(), rows, padding, bool(scale_grad_by_freq), bool(sparse))


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
