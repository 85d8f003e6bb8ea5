"""Rules of sums, means, variances and extremes over dimensions.

A reduction over the innermost dimension in memory is one kernel in which a warp or a block has a row. One over rows is made
in parts, by as many blocks as the GPU runs, and a second kernel adds the parts. Nothing is added atomically: the same input
gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..builder import Builder, Result, rule
from ..index import Affine, Compute, flatten, never, unflatten
from ..size import Size, about
from ..values import (
    Constant,
    Index,
    OneHot,
    Placed,
    Pointwise,
    Range,
    Reduction,
    Value,
    View,
    accumulated,
    dense_strides,
    layout,
    memory_order,
)
from .numbers import literal
from .pointwise import as_stored, converted
from .views import reshaped

aten = torch.ops.aten

UNKNOWN_PARTS = 7919  # stands for the number of parts until their kernel is known
IN_PARTS = 512  # rows from which on column sums are made in parts
SHORT_COLUMN = 8  # rows up to which a column sum is written out as additions
MEAN_OF_FIRST = 256  # rows whose mean the variance is computed about
MOST_PARTS = 1024  # of a row
LEAST_ROW = 32  # constant columns from which on they are summed up apart from those of a size
COMBINE = {"sum": "add({0}, {1})", "max": "maximum({0}, {1})", "min": "minimum({0}, {1})"}


def dimensions(x: Value, dims: Any) -> tuple[int, ...]:
    """The dimensions that are meant, counted from the front; None and () mean all."""
    rank = len(x.shape)
    given = [dims] if isinstance(dims, int) else dims or range(rank)
    return tuple(d % rank for d in given) if rank else ()


def reduced(
    build: Builder, op: str, x: Value, dims: Sequence[int], shape: Sequence[int], like: Value | None = None
) -> Any:
    """x reduced over dims, in the dtype in which it is accumulated, as a value of `shape`."""
    dtype = accumulated(x.dtype)
    if not x.numel:
        return Constant(0, shape, dtype)  # the sum of nothing; extremes have no result
    build.used(x)
    if not dims:
        found: Value = _written_out(op, x, (), dtype)
    else:
        found = _split(build, op, x, tuple(dims), dtype, like if like is not None else x)
    if op == "sum" and isinstance(found, Reduction) and found.parts is None:
        found.largest = _largest(x, found)
    if found.shape != tuple(shape):
        view = reshaped(found, shape)
        found = Pointwise("{0}", [view], shape, dtype)
    return found


def _finished(build: Builder, result: Result, value: Value) -> Any:
    return value if value.dtype == result.dtype else build.pointwise(result, "{0}", [value], value.dtype)


@rule(aten.sum.default, aten.sum.dim_IntList)
def sum_(build: Builder, result: Result, x: Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """Sum over dimensions."""
    if x.dtype != result.dtype:
        x = converted(build, Result(x.shape, result.dtype), x, rounds=True)
    one = _sum_of_one_hot(x, dimensions(x, dim))
    if one is not None:
        return build.pointwise(result, "{0}", [reshaped(one, result.shape)], one.dtype)
    return _finished(build, result, reduced(build, "sum", x, dimensions(x, dim), result.shape))


def _sum_of_one_hot(x: Value, dims: tuple[int, ...]) -> Value | None:
    """Simplify the sum of a one-hot row times a factor that is constant along the row: it is their product."""
    if len(dims) != 1 or not isinstance(x, Pointwise) or x.text != "mul({0}, {1})":
        return None
    dim = dims[0]
    for hot, factor in (x.operands, x.operands[::-1]):
        if (
            isinstance(hot, OneHot)
            and hot.dim == dim
            and isinstance(hot.inputs[0], Constant)
            and hot.inputs[0].number == 0
            and not isinstance(hot.value, Value)
            and isinstance(factor, View)
            and factor.base.shape == hot.inputs[1].shape
            and factor.base.shape[dim] == 1
            and not isinstance(factor.base, Reduction)
        ):
            return Pointwise(f"mul({{0}}, {literal(hot.value, x.dtype)})", [factor.base], factor.base.shape, x.dtype)
    return None


@rule(aten.mean.default, aten.mean.dim)
def mean(build: Builder, result: Result, x: Value, dim: Any = None, keepdim: bool = False, dtype: Any = None) -> Any:
    """Mean over dimensions."""
    dims = dimensions(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    if not count or not result.dtype.is_floating_point:
        return NotImplemented
    if x.dtype != result.dtype:
        x = converted(build, Result(x.shape, result.dtype), x, rounds=True)
    total = reduced(build, "sum", x, dims, result.shape)
    return build.pointwise(result, f"div({{0}}, {literal(count, total.dtype)})", [total], total.dtype)


def _extreme(op: str, *overloads: Any) -> None:
    @rule(*overloads)
    def extreme(build: Builder, result: Result, x: Value, dim: Any = (), keepdim: bool = False) -> Any:
        if not x.numel:
            return NotImplemented
        x = as_stored(build, x)  # backward compares it with the elements
        return _finished(build, result, reduced(build, op, x, dimensions(x, list(dim)), result.shape))


_extreme("max", aten.amax.default, aten.max.default)
_extreme("min", aten.amin.default, aten.min.default)


def _places(build: Builder, op: str, x: Value, dim: int | None, shape: Sequence[int]) -> tuple[Value, Value]:
    """(extremes of x over a dimension, or over all of it, and where each is first found; NaN is an extreme)."""
    if dim is None:
        x, dim = reshaped(x, (x.numel,)), 0
    dim %= len(x.shape)
    build.in_memory(x)  # what is compared is read from memory each time
    kept = [1 if d == dim else size for d, size in enumerate(x.shape)]
    top = reduced(build, op, x, (dim,), kept)
    number = View(Range(0, 1, (x.shape[dim],), torch.int64), x.shape, lambda index, compute: (index[dim],))
    text = f"({{0}} == {{1}} || {{0}} != {{0}} ? {{2}} : {literal(x.shape[dim], torch.int64)})"
    operands, compute = [x, top, number], [x.dtype, x.dtype, torch.int64]
    found = build.pointwise(Result(x.shape, torch.int64), text, operands, compute)
    place = reduced(build, "min", found, (dim,), shape)
    return build.pointwise(Result(tuple(shape), x.dtype), "{0}", [reshaped(top, shape)], top.dtype), place


def _extreme_and_place(op: str, place: Any, both: Any) -> None:
    @rule(place, both)
    def found(build: Builder, result: Any, x: Value, dim: Any = None, keepdim: bool = False) -> Any:
        two = isinstance(result, list)
        if not x.numel or not x.shape or (two and x.dtype is torch.bool):
            return NotImplemented
        top, at = _places(build, op, x, dim, result[0].shape if two else result.shape)
        return [top, at] if two else at


_extreme_and_place("max", aten.argmax.default, aten.max.dim)
_extreme_and_place("min", aten.argmin.default, aten.min.dim)


def _any_or_all(op: str, *overloads: Any) -> None:
    @rule(*overloads)
    def found(build: Builder, result: Result, x: Value, dim: Any = None, keepdim: bool = False) -> Any:
        if result.dtype is not torch.bool:
            return NotImplemented
        if not x.numel:
            return Constant(op == "min", result.shape, torch.bool)
        truth = build.pointwise(Result(x.shape, torch.bool), "{0}", [x], torch.bool)
        return reduced(build, op, truth, dimensions(x, dim), result.shape)


_any_or_all("max", aten.any.default, aten.any.dim, aten.any.dims)
_any_or_all("min", aten.all.default, aten.all.dim, aten.all.dims)


@rule(aten.var.correction, aten.var_mean.correction)
def var_mean(build: Builder, result: Any, x: Value, dim: Any = None, correction: Any = 1, keepdim: bool = False) -> Any:
    """Variance, or variance and mean, over dimensions."""
    results = result if isinstance(result, list) else [result]
    found = _moments(build, x, dim, correction, [one.shape for one in results])
    if found is NotImplemented:
        return NotImplemented
    made = [_finished(build, r, f) for r, f in zip(results, found)]
    return made if isinstance(result, list) else made[0]


def _moments(build: Builder, x: Value, dim: Any, correction: Any, shapes: list[tuple[int, ...]]) -> Any:
    """[variance, mean], of the given shapes, in the dtype of accumulation."""
    dims = dimensions(x, dim)
    count = math.prod(x.shape[d] for d in dims)
    correction = 1 if correction is None else correction
    if not count or not x.dtype.is_floating_point:
        return NotImplemented
    dtype = accumulated(x.dtype)
    kept = Result(tuple(1 if d in dims else s for d, s in enumerate(x.shape)), dtype)
    full = Result(x.shape, dtype)
    whole = not isinstance(correction, float) or correction.is_integer()
    left = count - int(correction) if whole else int(count) - correction
    n, divisor = literal(count, dtype), literal(max(left, 0), dtype)  # x / 0 is inf or nan, as in eager
    order = [d for d in memory_order(layout(x)) if x.shape[d] > 1]
    if not order or order[-1] in dims:  # a row stays in registers: the mean first
        mean = build.pointwise(kept, f"div({{0}}, {n})", [reduced(build, "sum", x, dims, kept.shape)], dtype)
        centred = build.pointwise(full, "square({0} - {1})", [x, mean], dtype)
        squares = reduced(build, "sum", centred, dims, kept.shape)
        variance = build.pointwise(kept, f"div({{0}}, {divisor})", [squares], dtype)
    else:  # one pass over memory, about a mean of few rows: E[x^2] - mean^2 would cancel where |mean| >> std
        about = _mean_of_first(build, x, dims, kept)
        centred = build.pointwise(full, "({0} - {1})", [x, about], dtype)
        first = reduced(build, "sum", centred, dims, kept.shape, like=x)
        squares = build.pointwise(full, "square({0} - {1})", [x, about], dtype)
        second = reduced(build, "sum", squares, dims, kept.shape, like=x)
        mean = build.pointwise(kept, f"({{0}} + div({{1}}, {n}))", [about, first], dtype)
        # the mean of the first rows may be all of the sum: then rounding must not make the difference negative
        text = f"div(maximum({{0}} - div({{1}} * {{1}}, {n}), 0 * {{0}}), {divisor})"
        variance = build.pointwise(kept, text, [second, first], dtype)
    return [
        one if one.shape == shape else Pointwise("{0}", [reshaped(one, shape)], shape, dtype)
        for one, shape in zip((variance, mean), shapes)
    ]


def _mean_of_first(build: Builder, x: Value, dims: Sequence[int], kept: Result) -> Value:
    """Mean over the first rows, at most `MEAN_OF_FIRST` of them."""
    shape, left = list(x.shape), MEAN_OF_FIRST
    for d in reversed([d for d in memory_order(layout(x)) if d in dims]):
        known = shape[d].least if isinstance(shape[d], Size) else shape[d]
        shape[d] = min(max(known, 1), max(left, 1))
        left //= shape[d]
    few = View(x, shape, lambda index, compute: index)
    few.strides = x.strides
    few.meta = x.meta  # same order in memory
    count = math.prod(shape[d] for d in dims)
    total = reduced(build, "sum", few, dims, kept.shape)
    found = build.pointwise(kept, f"div({{0}}, {literal(count, kept.dtype)})", [total], kept.dtype)
    build.store(found)
    return found


def _largest(x: Value, sum_: Reduction) -> Reduction | None:
    """The maximum of `a` in a sum of exp(a - that): both can be found in one pass over a long row."""
    if not (isinstance(x, Pointwise) and x.text == "exp({0})" and isinstance(x.operands[0], Pointwise)):
        return None
    difference = x.operands[0]
    if difference.text != "sub({0}, {1})" or len(difference.inputs) != 2:
        return None
    a, b = difference.inputs
    while isinstance(b, View) or (isinstance(b, Pointwise) and b.text == "{0}" and b.dtype == b.inputs[0].dtype):
        b = b.inputs[0]
    if not (isinstance(b, Reduction) and b.op == "max" and b.dims == sum_.dims):
        return None
    return b if a.dtype in (torch.float32, torch.float64) and b.source is a else None


# -- one reduction as several ------------------------------------------------------------------------------------------


def _split(build: Builder, op: str, x: Value, dims: tuple[int, ...], dtype: torch.dtype, like: Value) -> Value:
    """One reduction, or several where the order in memory or the number of rows asks for it."""
    order = [d for d in memory_order(layout(like)) if x.shape[d] > 1]
    over = [d in dims for d in order]
    if not any(over):
        return _written_out(op, x, dims, dtype)
    inner: list[int] = []
    while over and over[-1]:
        over.pop()
        inner.insert(0, order[len(over)])
    if inner:
        return _rows(build, op, x, dims, dtype, inner)
    tail = len(over)
    while not over[tail - 1]:
        tail -= 1
    head = tail
    while head and over[head - 1]:
        head -= 1
    if any(over[:head]):  # dimensions that are no neighbours in memory: the innermost first
        near = tuple(order[head:tail])
        return _rest(build, op, _split(build, op, x, near, dtype, like), x, near, dims, dtype)
    count = math.prod(x.shape[d] for d in dims)
    if isinstance(count, int) and count <= SHORT_COLUMN and about(x.numel) // count >= 2048:
        return _written_out(op, x, dims, dtype)
    if about(count) < IN_PARTS:
        return build.store(Reduction(op, x, dims, dtype)).value
    parts = build.store(Reduction(op, x, dims, dtype, parts=UNKNOWN_PARTS)).value
    return build.store(Reduction(op, parts, (0,), dtype)).value


def _rest(
    build: Builder, op: str, first: Value, x: Value, done: Sequence[int], dims: Sequence[int], dtype: torch.dtype
) -> Value:
    """Reduce the rest of `dims` after `done`."""
    names = [d for d in range(len(x.shape)) if d not in done]
    rest = tuple(names.index(d) for d in dims if d not in done)
    return _split(build, op, first, rest, dtype, first)


def _rows(build: Builder, op: str, x: Value, dims: tuple[int, ...], dtype: torch.dtype, inner: list[int]) -> Value:
    """Reduce over the innermost dimensions in memory, then over the rest."""
    rest = [d for d in dims if d not in inner and x.shape[d] > 1]
    rows = math.prod(s for d, s in enumerate(x.shape) if d not in inner)
    if isinstance(math.prod(x.shape[d] for d in inner), Size):
        inner = _last(x, inner)
        rest = [d for d in dims if d not in inner and x.shape[d] > 1]
    columns = math.prod(x.shape[d] for d in inner)
    done = inner if rest else dims
    if about(rows) < 128 and columns >= 65536 and math.prod(x.shape[d] for d in rest) < 128:
        parts = build.store(Reduction(op, *_cut_rows(op, x, done, inner), dtype)).value
        first = build.store(Reduction(op, parts, (len(parts.shape) - 1,), dtype)).value
    else:
        first = build.store(Reduction(op, x, tuple(done), dtype)).value
    if not rest:
        return first
    first.strides = dense_strides(first.shape)
    return _rest(build, op, first, x, inner, [*inner, *rest], dtype)


def _last(x: Value, inner: list[int]) -> list[int]:
    """The last of some dimensions whose sizes are constants, if these make a row together; else the last one alone."""
    tail = [d for k, d in enumerate(inner) if all(isinstance(x.shape[e], int) for e in inner[k:])]
    return tail if math.prod(x.shape[d] for d in tail) >= LEAST_ROW else inner[-1:]


def _number_of_parts(columns: int) -> int | None:
    """Number of equal parts into which a row is cut, with 16-byte accesses if possible; None where no number fits."""
    most = min(MOST_PARTS, columns // 2048)
    for multiple in (8, 1):
        found = next((p for p in range(most, most // 8, -1) if columns % (p * multiple) == 0), None)
        if found:
            return found
    return None


def _cut_rows(op: str, x: Value, done: Sequence[int], inner: Sequence[int]) -> tuple[View, tuple[int, ...]]:
    """(x with its inner dimensions as (parts, rest), the dimension of the rest). Parts of a size reach beyond the row."""
    kept = [d for d in range(len(x.shape)) if d not in done]
    within = tuple(x.shape[d] for d in inner)
    columns = math.prod(within)
    parts = None if isinstance(columns, Size) else _number_of_parts(columns)
    rest = -(-columns // (MOST_PARTS * 8)) * 8 if parts is None else columns // parts

    def in_rows(index: Index, compute: Compute) -> Index:
        at = dict(zip(inner, unflatten(index[-1], within, compute))) | dict(zip(kept, index))
        return tuple(at.get(d, Affine()) for d in range(len(x.shape)))

    rows: Value = View(x, (*(x.shape[d] for d in kept), columns), in_rows)
    shape = *rows.shape[:-1], parts or MOST_PARTS, rest
    if parts is None:
        longer = *rows.shape[:-1], MOST_PARTS * rest
        rows = Placed(rows, len(kept), 0, longer, Constant(_nothing(op, x.dtype), longer, x.dtype))
    return View(rows, shape, lambda index, _: (*index[:-2], flatten(index[-2:], shape[-2:]))), (len(shape) - 1,)


def _nothing(op: str, dtype: torch.dtype) -> Any:
    """The number that changes no sum, or no extreme."""
    if op == "sum":
        return 0
    if dtype.is_floating_point:
        return -math.inf if op == "max" else math.inf
    if dtype is torch.bool:
        return op == "min"
    return torch.iinfo(dtype).min if op == "max" else torch.iinfo(dtype).max


def _written_out(op: str, x: Value, dims: Sequence[int], dtype: torch.dtype) -> Value:
    """A few elements, combined one by one in each thread."""
    kept = [d for d in range(len(x.shape)) if d not in dims]
    shape, over = tuple(x.shape[d] for d in kept), [x.shape[d] for d in dims]
    total: Value | None = None
    for k in range(math.prod(over)):
        at = dict(zip(dims, unflatten(Affine(const=k), over, never)))

        def map(index: Index, compute: Compute, at: dict[int, Affine] = at) -> Index:
            return tuple(at[d] if d in at else index[kept.index(d)] for d in range(len(x.shape)))

        one = Pointwise("{0}", [View(x, shape, map)], shape, dtype, x.dtype)
        total = one if total is None else Pointwise(COMBINE[op], [total, one], shape, dtype)
    assert total is not None
    return total
