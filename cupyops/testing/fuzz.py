"""Calls drawn at random, by hypothesis: shapes, strides, dtypes, values and arguments from a function's signature.

@given(calls(cupyops.softmax))
def test_softmax(call):
    agree(cupyops.softmax, torch.nn.functional.softmax, call)
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from .._kernel.kernel import FLOATING
from ..errors import CupyopsError, InputError
from .call import Call, Function
from .case import Case
from .hazard import Failure, NotApplicable
from .special import judge_trusted
from .target import running, target
from .tolerance import Tolerance

_MOST_ELEMENTS = 4096
_SIZES = st.sampled_from([0, 1, 1, 2, 3, 3, 4, 5, 7, 8, 9, 16, 17, 31, 33, 64, 65])
_LARGE = 1e15
_SPECIAL = (float("nan"), float("inf"), -float("inf"), -0.0, 1e-40, 1e30)


def shapes(least: int = 0, most: int = 4) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes of so many dimensions, empty ones and single elements among them."""
    return st.lists(_SIZES, min_size=least, max_size=most).map(_bounded)


@st.composite
def layouts(draw: st.DrawFn, values: Tensor) -> Tensor:
    """`values`, laid out otherwise: permuted, every other element of a larger tensor, one element on."""
    kind = draw(st.sampled_from(["contiguous", "contiguous", "permuted", "strided", "shifted"]))
    if kind == "permuted" and values.dim() > 1:
        order = draw(st.permutations(range(values.dim())))
        back = [order.index(dim) for dim in range(values.dim())]
        return values.permute(order).contiguous().permute(back)
    if kind == "strided" and values.dim():
        return values.repeat_interleave(2, dim=-1)[..., ::2]
    if kind == "shifted":
        return torch.cat([values.flatten()[:1], values.flatten()])[-values.numel() or 1 :].view(values.shape)
    return values


@st.composite
def tensors(
    draw: st.DrawFn,
    shape: st.SearchStrategy[tuple[int, ...]] | tuple[int, ...],
    dtype: torch.dtype,
    special: bool = True,
    high: int | None = None,
) -> Tensor:
    """A tensor of one dtype: normal values, now and then special ones, in any layout; integers below `high`."""
    extent = shape if isinstance(shape, tuple) else draw(shape)
    source = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    if not dtype.is_floating_point:
        return torch.randint(0, high or 5, extent, generator=source).to(dtype)
    values = torch.randn(extent, generator=source, dtype=torch.float64).to(dtype)
    if special and values.numel() and draw(st.integers(0, 7)) == 0:
        place = draw(st.integers(0, values.numel() - 1))
        values.view(-1)[place] = draw(st.sampled_from(_SPECIAL))
    return draw(layouts(values)).requires_grad_(draw(st.integers(0, 3)) > 0)


@st.composite
def calls(draw: st.DrawFn, function: Function, **given: st.SearchStrategy[Any]) -> Call:
    """A call of `function`, by the annotations of its parameters; tensors share one dtype and the sizes of one shape.

    Args:
        given: a strategy for an argument, instead of what its annotation says.
    """
    dtype = draw(st.sampled_from(FLOATING))
    base = draw(shapes())
    kwargs = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.default is not inspect.Parameter.empty and draw(st.booleans()):
            continue
        kind = typing.get_type_hints(function).get(parameter.name, parameter.annotation)
        strategy = given.get(parameter.name)
        kwargs[parameter.name] = draw(_argument(kind, base, dtype) if strategy is None else strategy)
    return Call(**kwargs)


def agree(
    function: Function, reference: Function, call: Call, backend: str = "reference", tolerance: Tolerance | None = None
) -> str:
    """Raise `Failure` unless both functions give the same, forward and backward, or both refuse.

    Returns:
        "agreed" or "refused"; or "unsupported": what the function says clearly that it does not do, and PyTorch does.
    """
    case = Case(target(function, reference), call, backend, tolerance or Tolerance())
    try:
        judge = case.with_call(_taken(case)).alone()
    except NotApplicable as theirs:
        with running(backend):
            return _refused(case, theirs)
    try:
        with running(backend):
            ours = case.both_ways(call)
    except InputError:
        return "unsupported"
    if any(_extreme(tensor) for tensor in call.all_tensors()):
        judge_trusted(judge, ours, judge.call)
    else:
        judge.judge(ours, judge.call)
    return "agreed"


def _extreme(tensor: Tensor) -> bool:
    """True if some value or its square may not be finite, where PyTorch's own answer may be none."""
    return tensor.is_floating_point() and bool((~(tensor.abs() < _LARGE)).any())


def _taken(case: Case) -> Call:
    """The call, or its values laid out plainly: some layouts PyTorch cannot take, and we can."""
    plain = case.call.map(lambda t: t.detach().contiguous().requires_grad_(t.requires_grad))
    try:
        case.expected(case.call)
    except NotApplicable:
        case.expected(plain)
        return plain
    return case.call


def _refused(case: Case, theirs: NotApplicable) -> str:
    try:
        case.both_ways(case.call)
    except (CupyopsError, TypeError):
        return "refused"
    except Exception as error:
        if str(error) == str(theirs.__cause__):
            return "refused"  # in PyTorch's own words
        raise Failure(f"{theirs}; ours ends in {type(error).__name__}: {error}, which is no InputError") from error
    raise Failure(f"{theirs}; ours gives a result")


# --- arguments ---------------------------------------------------------------------------------------------------------


def _argument(kind: Any, base: tuple[int, ...], dtype: torch.dtype) -> st.SearchStrategy[Any]:
    """Values for an annotation."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of([st.none() if one is type(None) else _argument(one, base, dtype) for one in arguments])
    if kind is Tensor:
        return _related(base).flatmap(lambda shape: tensors(shape, dtype))
    if kind is bool:
        return st.booleans()
    if kind is int:
        return st.integers(-len(base) - 1, len(base) + 2)
    if kind is float:
        return st.sampled_from([0.0, 1.0, -1.0, 0.5, 1e-5, 2.0])
    if kind is torch.dtype:
        return st.sampled_from([*FLOATING, torch.int64])
    if origin in (list, tuple, Sequence) or kind in (list, tuple):
        return st.one_of(st.just(base[-1:]), st.just(base), st.lists(st.integers(0, 4), max_size=3).map(tuple))
    raise InputError(f"no strategy for {kind}; give one by the parameter's name")


def _related(base: tuple[int, ...]) -> st.SearchStrategy[tuple[int, ...]]:
    """Shapes that go with `base`: itself, its end, or with single elements in it."""
    singles = st.lists(st.booleans(), min_size=len(base), max_size=len(base)).map(
        lambda keep: tuple(size if one else 1 for size, one in zip(base, keep))
    )
    return st.one_of(st.just(base), st.just(base), st.integers(0, len(base)).map(lambda n: base[n:]), singles)


def _bounded(sizes: list[int]) -> tuple[int, ...]:
    """Drop dimensions from the front until there are at most `_MOST_ELEMENTS` elements."""
    count, kept = 1, []
    for size in reversed(sizes):
        if count * max(size, 1) > _MOST_ELEMENTS:
            break
        count *= max(size, 1)
        kept.append(size)
    return tuple(reversed(kept))
