"""embedding: rows of a table by their numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .._dispatch.core.gpu import gpu
from .._dispatch.embedding import BACKWARD, FORWARD, LISTING, Problem, embedding_bwd_linked, lists_of, too_many
from .._kernel.kernel import ceil_div
from .._operator.derivation import distributed
from .._operator.floating import operator
from .._util import arguments
from .._util.strides import aligned, is_dry
from ..errors import InputError


@operator("cupyops::embedding", sharding="Vd, ... -> ...d")
def _embedding(
    weight: Tensor, indices: Tensor, rows: int, padding_idx: int, scale_grad_by_freq: bool, sparse: bool
) -> Tensor:
    arguments.in_range("input[{}]", indices, rows, "a row of weight")
    try:
        return torch.embedding(weight, indices, padding_idx, scale_grad_by_freq, sparse)
    except IndexError as error:
        raise InputError(f"input: {error}; expected indices of rows of weight") from error


@_embedding.unsupported
def unsupported(weight, indices, rows, padding_idx, scale_grad_by_freq, sparse):
    return "a sparse gradient" if sparse else too_many(indices.numel(), rows, gpu(weight.device))


@_embedding.forward
def forward(weight, indices, rows, padding_idx, scale_grad_by_freq, sparse):
    size = weight.shape[1]
    y = torch.empty((*indices.shape, size), dtype=weight.dtype, device=weight.device)
    if is_dry(y) or y.numel() == 0:
        return y, ()
    if size > 1 and weight.stride(1) != 1:
        weight = weight.contiguous()
    vector, stride, tokens = 16 // weight.itemsize, weight.stride(0), indices.numel()
    in_vectors = size % vector == 0 and stride % vector == 0 and aligned(weight) and aligned(y)
    launch = FORWARD.launch(Problem(tokens, rows, size, weight.dtype, in_vectors), gpu(weight.device))
    launch(weight, indices.contiguous(), y, tokens, rows, size, stride)
    return y, ()


@_embedding.backward
def backward(saved, grad_y, indices, rows, padding_idx, scale_grad_by_freq):
    size, count = grad_y.shape[-1], indices.numel()
    if is_dry(grad_y) or grad_y.numel() == 0:
        return torch.zeros((rows, size), dtype=grad_y.dtype, device=grad_y.device)
    grad_y, indices = grad_y.contiguous(), indices.reshape(-1).contiguous()
    dtype, device, vector = grad_y.dtype, grad_y.device, 16 // grad_y.itemsize
    problem = Problem(count, rows, size, dtype, size % vector == 0 and aligned(grad_y))
    lists, problem = _lists(indices, problem, padding_idx)
    acc = torch.float64 if dtype is torch.float64 else torch.float32
    pieces = lists_of(count, problem.linked).pieces
    partials = torch.empty((pieces, (ceil_div(size, vector) + 1) * vector), dtype=acc, device=device)
    grad_weight = torch.empty((rows, size), dtype=dtype, device=device)
    launch = BACKWARD.launch(problem, gpu(device))
    launch(grad_y, indices, *lists, partials, grad_weight, scale_grad_by_freq, rows, size)
    return grad_weight


def _lists(indices: Tensor, problem: Problem, padding_idx: int) -> tuple[tuple[Tensor, Tensor], Problem]:
    """The memory of the lists of positions that name a row, and the problem with how they are made."""
    rows, count, device = problem.rows, problem.indices, indices.device
    launch = LISTING.launch(problem, gpu(device))
    problem = problem._replace(linked=launch.kernel is embedding_bwd_linked)
    _, pieces, stride = lists_of(count, problem.linked)
    zeros = torch.zeros(rows + 2 * count + 1, dtype=torch.int32, device=device)
    memory = zeros, torch.empty(2 * pieces + stride * count, dtype=torch.int32, device=device)
    if problem.linked:
        launch(indices, *memory, padding_idx)
    else:
        keys, order = torch.sort(indices.int(), stable=True)
        launch(keys, order, *memory, padding_idx)
    return memory, problem


@_embedding.reference_backward
def reference_backward(saved, grad_y, indices, rows, padding_idx, scale_grad_by_freq):
    return torch.ops.aten.embedding_dense_backward(grad_y, indices, rows, padding_idx, scale_grad_by_freq)


@_embedding.interface(twin=torch.nn.functional.embedding)
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
    arguments.tensor("input", input)
    arguments.tensor("weight", weight)
    arguments.same_device(input=input, weight=weight)
    if input.dtype not in (torch.int64, torch.int32):
        arguments.fail("input", input, "a tensor of int32 or int64")
    if weight.dim() != 2:
        arguments.fail("weight", weight, "a tensor of shape (rows, size)")
    if max_norm is not None:
        arguments.floating("weight", weight)
        _check_number("max_norm", max_norm)
        _check_number("norm_type", norm_type)
    return -1 if padding_idx is None else _row(padding_idx, weight.shape[0])


def _row(padding_idx: Any, rows: int) -> int:
    """`padding_idx` counted from the front."""
    if isinstance(padding_idx, bool) or not isinstance(padding_idx, (int, torch.SymInt)):
        arguments.fail("padding_idx", padding_idx, "an int or None")
    if not -rows <= padding_idx < rows:
        arguments.fail("padding_idx", padding_idx, f"a row of weight in [{-rows}, {rows})")
    return padding_idx + rows if padding_idx < 0 else padding_idx  # type: ignore[return-value]  # a SymInt: an int


def _check_number(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        arguments.fail(name, value, "a number")


def _renorm(weight: Tensor, input: Tensor, max_norm: float, norm_type: float) -> None:
    """Scale the rows that are named, in place; PyTorch's, which asks for indices that are contiguous."""

    def renorm(weight: Tensor, indices: Tensor) -> None:
        arguments.in_range("input[{}]", indices, weight.shape[0], "a row of weight")
        torch.embedding_renorm_(weight, indices.contiguous(), max_norm, norm_type)

    with torch.no_grad():
        if distributed.is_spread(weight):
            distributed.call(renorm, "embedding", (weight, input), changed=(0,))
        else:
            renorm(weight.detach(), input)
