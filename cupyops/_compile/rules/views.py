"""Rules of operators that show or move elements without computing: they are maps of the index."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..builder import Builder, Result, rule
from ..index import Affine, Compute, flatten, unflatten
from ..size import Size
from ..values import Concatenation, Constant, Index, IndexMap, Placed, Value, View, expanded
from .pointwise import converted

aten = torch.ops.aten


def _view(result: Result, x: Value, map: IndexMap) -> View:
    """A view in eager too."""
    return View(x, result.shape, map, alias=True)


def reshaped(x: Value, shape: Sequence[int], *, alias: bool = False) -> View:
    """x in another shape, in row-major order."""
    shape = tuple(shape)

    def map(index: Index, compute: Compute) -> Index:
        return unflatten(flatten(index, shape), x.shape, compute)

    return View(x, shape, map, alias=alias)


@rule(aten.view.default, aten.reshape.default, aten._unsafe_view.default)
@rule(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims)
def view(build: Builder, result: Result, x: Value, size: Any = None, shape: Any = None, dim: Any = None) -> Any:
    """x in another shape."""
    return reshaped(x, result.shape, alias=True)


@rule(aten.unsqueeze.default)
def unsqueeze(build: Builder, result: Result, x: Value, dim: int) -> Any:
    """Insert a dimension of size 1."""
    dim %= len(x.shape) + 1
    return _view(result, x, lambda index, compute: index[:dim] + index[dim + 1 :])


@rule(aten.permute.default)
def permute(build: Builder, result: Result, x: Value, dims: Any) -> Any:
    """Dimension d of the result is dimension dims[d] of x."""
    back = [0] * len(dims)
    for d, of in enumerate(dims):
        back[of % len(dims)] = d
    return _view(result, x, lambda index, compute: tuple(index[b] for b in back))


@rule(aten.transpose.int, aten.t.default)
def transpose(build: Builder, result: Result, x: Value, dim0: int = 0, dim1: int = -1) -> Any:
    """Two dimensions exchanged."""
    dims = list(range(len(x.shape)))
    if dims:
        dims[dim0], dims[dim1] = dims[dim1], dims[dim0]
    return permute(build, result, x, dims)


@rule(aten.expand.default)
def expand(build: Builder, result: Result, x: Value, size: Any, implicit: bool = False) -> Any:
    """Dimensions of size 1 repeated."""
    return expanded(x, result.shape, alias=True)


def _first(size: Any, start: Any) -> Any:
    """First index of a slice, as Python counts it; its last follows from the shape of the result."""
    start = start or 0
    return min(max(start + size if start < 0 else start, 0), size)


def _at(size: Any, index: Any) -> Any:
    """An index, counted from the front."""
    return index + size if index < 0 else index


def _sliced(x: Value, shape: Sequence[int], dim: int, first: Any, step: int = 1, *, alias: bool = True) -> View:
    """Every `step`-th index of a dimension from `first` on."""
    return View(
        x, shape, lambda index, compute: (*index[:dim], index[dim] * step + first, *index[dim + 1 :]), alias=alias
    )


@rule(aten.slice.Tensor)
def slice_(
    build: Builder, result: Result, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    """Every `step`-th index from `start` on."""
    dim %= len(x.shape)
    return _sliced(x, result.shape, dim, _first(x.shape[dim], start), step)


@rule(aten.select.int)
def select(build: Builder, result: Result, x: Value, dim: int, index: Any) -> Any:
    """One index of a dimension."""
    if not isinstance(index, (int, Size)):
        return NotImplemented
    dim %= len(x.shape)
    at = _at(x.shape[dim], index)
    return _view(result, x, lambda index, compute: (*index[:dim], Affine(const=at), *index[dim:]))


@rule(aten.split.Tensor, aten.split_with_sizes.default)
def split(
    build: Builder, results: list[Result], x: Value, split_size: Any = None, split_sizes: Any = None, dim: int = 0
) -> Any:
    """Parts along a dimension."""
    dim %= len(x.shape)
    found, first = [], 0
    for one in results:
        found.append(_sliced(x, one.shape, dim, first))
        first += one.shape[dim]
    return found


@rule(aten.diagonal.default)
def diagonal(build: Builder, result: Result, x: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Elements whose two coordinates differ by `offset`."""
    rank = len(x.shape)
    one, two = dim1 % rank, dim2 % rank

    def map(index: Index, compute: Compute) -> Index:
        rest = list(index[:-1])
        at = {one: index[-1] + max(-offset, 0), two: index[-1] + max(offset, 0)}
        return tuple(at[d] if d in at else rest.pop(0) for d in range(rank))

    return _view(result, x, map)


@rule(aten.unfold.default)
def unfold(build: Builder, result: Result, x: Value, dimension: int, size: int, step: int) -> Any:
    """Windows of a dimension, whose elements become the last one."""
    if not x.shape:
        return NotImplemented
    dim = dimension % len(x.shape)
    return _view(result, x, lambda index, compute: (*index[:dim], index[dim] * step + index[-1], *index[dim + 1 : -1]))


@rule(aten.alias.default, aten.detach.default, *([aten.lift.default] if hasattr(aten, "lift") else []))
def alias(build: Builder, result: Result, x: Value) -> Any:
    """All of x."""
    return _view(result, x, lambda index, compute: index)


# -- copies that are maps of the index too -----------------------------------------------------------------------------


@rule(aten.flip.default)
def flip(build: Builder, result: Result, x: Value, dims: Any) -> Any:
    """Dimensions backwards."""
    flipped = {d % len(x.shape) for d in dims} if x.shape else set()

    def map(index: Index, compute: Compute) -> Index:
        return tuple(-i + (s - 1) if d in flipped else i for d, (i, s) in enumerate(zip(index, x.shape)))

    return View(x, result.shape, map)


@rule(aten.repeat.default)
def repeat(build: Builder, result: Result, x: Value, repeats: Any) -> Any:
    """The tensor as a tile."""
    lead = len(result.shape) - len(x.shape)

    def map(index: Index, compute: Compute) -> Index:
        return tuple(
            Affine() if s == 1 else i.divmod(s, compute)[1] if size != s else i
            for i, s, size in zip(index[lead:], x.shape, result.shape[lead:])
        )

    return View(x, result.shape, map) if x.numel else NotImplemented


@rule(aten.cat.default)
def cat(build: Builder, result: Result, tensors: Any, dim: int = 0) -> Any:
    """Tensors one after another."""
    parts = [p for p in tensors if not (len(p.shape) == 1 and p.shape[0] == 0 and len(result.shape) > 1)]
    parts = [p for p in parts if p.numel] or parts[:1]
    if len(parts) > 8 or not result.shape:
        return NotImplemented
    dim %= len(result.shape)
    made = []
    for p in parts:
        part = converted(build, Result(p.shape, result.dtype), p, rounds=True) if p.dtype != result.dtype else p
        made.append(build.used(part))
    return Concatenation(made, dim, result.shape, result.dtype)


@rule(aten.constant_pad_nd.default)
def constant_pad_nd(build: Builder, result: Result, x: Value, pad: Any, value: Any = 0) -> Any:
    """A number around x; negative widths cut."""
    if not isinstance(value, (bool, int, float)):
        return NotImplemented
    if not x.numel:
        return Constant(value, result.shape, result.dtype)
    found: Value = x
    for k in range(len(pad) // 2):
        dim, low, high = len(x.shape) - 1 - k, pad[2 * k], pad[2 * k + 1]
        if low < 0 or high < 0:
            shape = (*found.shape[:dim], found.shape[dim] + min(low, 0) + min(high, 0), *found.shape[dim + 1 :])
            found = _sliced(found, shape, dim, max(-low, 0), alias=False)
            low, high = max(low, 0), max(high, 0)
        if low or high:
            shape = (*found.shape[:dim], found.shape[dim] + low + high, *found.shape[dim + 1 :])
            found = Placed(build.used(found), dim, low, shape, Constant(value, shape, result.dtype))
    return found if isinstance(found, Placed) else converted(build, result, found, rounds=False)


def _placed(build: Builder, result: Result, x: Value, src: Value, dim: int, low: Any, step: int = 1) -> Placed:
    """x with `src` at every `step`-th index of a dimension from `low` on."""
    return Placed(build.used(src), dim, low, result.shape, build.used(x), step)


@rule(aten.slice_scatter.default)
def slice_scatter(
    build: Builder,
    result: Result,
    x: Value,
    src: Value,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> Any:
    """x with a slice replaced."""
    if src.dtype != x.dtype:
        return NotImplemented
    if not src.numel:
        return converted(build, result, x, rounds=False)
    dim %= len(x.shape)
    return _placed(build, result, x, src, dim, _first(x.shape[dim], start), step)


@rule(aten.select_scatter.default)
def select_scatter(build: Builder, result: Result, x: Value, src: Value, dim: int, index: int) -> Any:
    """x with one index of a dimension replaced."""
    dim %= len(x.shape)
    if src.dtype != x.dtype or not isinstance(index, int):
        return NotImplemented
    row = View(src, (*src.shape[:dim], 1, *src.shape[dim:]), lambda at, compute: at[:dim] + at[dim + 1 :])
    return _placed(build, result, x, row, dim, _at(x.shape[dim], index))
