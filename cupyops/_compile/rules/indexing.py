"""Rules of operators that read elements where an index tensor says."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..builder import Builder, Result, rule
from ..index import Affine
from ..values import Buffer, Gather, Index, OneHot, Scattered, Value, View, broadcast

aten = torch.ops.aten


def _inserted(index: Index, coordinate: Affine, first: int, at: int) -> Index:
    """The index from `first` on, with a coordinate more before place `at`."""
    return (*index[first:at], coordinate, *index[at:])


def _replaced(index: Index, coordinate: Affine, dim: int) -> Index:
    return (*index[:dim], coordinate, *index[dim + 1 :])


@rule(aten.gather.default)
def gather(build: Builder, result: Result, x: Value, dim: int, index: Value, sparse_grad: bool = False) -> Any:
    """Elements whose coordinate in `dim` is that of the index tensor."""
    if not x.shape or not x.numel or index.dtype is not torch.int64:
        return NotImplemented
    dim %= len(x.shape)
    place = functools.partial(_replaced, dim=dim)
    return Gather(build.used(x), build.used(index), result.shape, x.shape[dim], lambda at: at, place, wraps=False)


@rule(aten.embedding.default)
def embedding(
    build: Builder,
    result: Result,
    weight: Value,
    indices: Value,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    """Rows of a table."""
    if not weight.numel or len(weight.shape) != 2:
        return NotImplemented
    rows, numbers, place = build.used(weight), build.used(indices), functools.partial(_inserted, first=-1, at=-1)
    return Gather(rows, numbers, result.shape, weight.shape[0], lambda at: at[:-1], place, wraps=False)


@rule(aten.index_select.default)
def index_select(build: Builder, result: Result, x: Value, dim: int, index: Value) -> Any:
    """Slices of a dimension, by number."""
    if not x.shape or not x.numel or len(index.shape) != 1:
        return NotImplemented
    dim %= len(x.shape)
    place = functools.partial(_replaced, dim=dim)
    return Gather(
        build.used(x), build.used(index), result.shape, x.shape[dim], lambda at: (at[dim],), place, wraps=False
    )


@rule(aten.index.Tensor, aten._unsafe_index.Tensor)
def index(build: Builder, result: Result, x: Value, indices: Any) -> Any:
    """`x[index, ...]` by tensors of integers, which broadcast.

    One dimension after the other is read by its tensor: the dimensions of the tensors come first until all are. They belong
    where the first of those dimensions was, if they are neighbours, and else stay in front.
    """
    given = [(d, one) for d, one in enumerate(indices) if one is not None]
    if not x.numel or any(one.dtype not in (torch.int64, torch.int32) for _, one in given):
        return NotImplemented
    block = torch.broadcast_shapes(*(one.shape for _, one in given))
    rank, left, found = len(block), list(range(len(x.shape))), build.used(x)
    for k, (dim, one) in enumerate(given):
        at = left.index(dim)
        left.remove(dim)
        found = Gather(
            found,
            build.used(broadcast(one, block)),
            (*block, *(x.shape[d] for d in left)),
            x.shape[dim],
            lambda index: index[:rank],
            functools.partial(_inserted, first=0 if k else rank, at=rank + at),
        )
    dims = [d for d, _ in given]
    start = dims[0] if dims == list(range(dims[0], dims[-1] + 1)) else 0
    return View(
        found,
        result.shape,
        lambda index, compute: (*index[start : start + rank], *index[:start], *index[start + rank :]),
    )


@rule(aten.scatter.value, aten.scatter.src)
def scatter(
    build: Builder, result: Result, x: Value, dim: int, index: Value, value: Any = None, src: Any = None
) -> Any:
    """x with one element of each row replaced."""
    if not x.shape or not x.numel:
        return NotImplemented
    dim %= len(x.shape)
    number = value if src is None else src
    if len(index.shape) != len(x.shape) or index.shape[dim] != 1 or index.dtype is not torch.int64:
        return NotImplemented
    if any(a != b for k, (a, b) in enumerate(zip(index.shape, x.shape)) if k != dim):
        return NotImplemented
    if isinstance(number, Value) and (number.shape != index.shape or number.dtype != x.dtype):
        return NotImplemented
    return OneHot(build.used(x), dim, build.used(index, x.shape), number)


@rule(aten.index_copy_.default)
def index_copy_(build: Builder, result: Result, x: Value, dim: int, index: Value, source: Value) -> Any:
    """Slices of an input overwritten, by number."""
    return _written(build, x, dim, index, source, wraps=False) if len(index.shape) == 1 else NotImplemented


@rule(aten.index_put_.default)
def index_put_(build: Builder, result: Result, x: Value, indices: Any, values: Value, accumulate: bool = False) -> Any:
    """`x[..., index] = values` of an input, with one tensor of integers."""
    dims = [d for d, one in enumerate(indices) if one is not None]
    if accumulate or len(dims) != 1 or len(indices[dims[0]].shape) != 1:
        return NotImplemented
    index = indices[dims[0]]
    shape = (*x.shape[: dims[0]], *index.shape, *x.shape[dims[0] + 1 :])
    return _written(build, x, dims[0], index, broadcast(values, shape), wraps=True)


def _written(build: Builder, x: Value, dim: int, index: Value, source: Value, *, wraps: bool) -> Any:
    """x with slices of `source`. Of equal indices any one wins: several are PyTorch's where all is to be deterministic."""
    if not isinstance(x, Buffer) or not x.shape or source.dtype != x.dtype or not source.numel:
        return NotImplemented
    if index.dtype not in (torch.int64, torch.int32):
        return NotImplemented
    if torch.are_deterministic_algorithms_enabled() and index.numel != 1:
        return NotImplemented
    return build.scatter(x, Scattered(build.used(source), dim % len(x.shape), build.used(index), x, wraps=wraps))
