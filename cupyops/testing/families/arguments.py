"""Other arguments: shapes and numbers that the sample call has not, and the reference takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..._util.torch_private import tree_flatten, tree_unflatten
from ..call import Call, Outcome, gradients, tensors_of
from ..case import Case
from ..hazard import Failure, NotApplicable, hazard, told
from ..refusals import REFUSALS, is_clear

_MOST_DIMS = 4  # of a tensor, that are made 1


@hazard("a tensor that is broadcast gives the right results, and gradients summed over what it is broadcast along")
def broadcast(case: Case) -> None:
    """Each tensor in turn with each size 1, with all of them, and without its first dimension, where the results stay as
    large as they were."""
    if len(case.call.all_tensors()) < 2:
        raise NotApplicable("one tensor alone")
    shapes = [y.shape for y in case.plain.outputs]
    tried = _Tried(case)
    for index, tensor in enumerate(case.call.all_tensors()):
        for what, smaller in _smaller(tensor):
            call = case.call.replaced(tensor, smaller.requires_grad_(tensor.requires_grad))
            expected = _taken(case, call)
            if expected is not None and [y.shape for y in expected.outputs] == shapes:
                tried(call, f"tensor {index} {what}")
    tried.anything("the reference broadcasts no tensor of this call")


@hazard("tensors of one dimension more, and of one less, give PyTorch's answer, or an error")
def dimensions(case: Case) -> None:
    """The largest tensors, or else all of them, twice under each other; then the first row of them."""
    case.needs_floating()
    most = max(tensor.dim() for tensor in case.call.all_tensors())
    tried = _Tried(case)
    changes: dict[str, Callable[[Tensor], Tensor]] = {"one more": _stacked, "one less": lambda t: t[0].clone()}
    for what, change in changes.items():
        for least in (most, 1):
            call = case.call.map(lambda t: _changed(t, change) if t.dim() >= least and t.numel() else t)  # noqa: B023
            if most and _taken(case, call) is not None:
                tried(call, f"of {what} dimension")
                break
    tried.anything("the reference takes no other number of dimensions")


@hazard("other numbers and flags give PyTorch's answer, or an error")
def numbers(case: Case) -> None:
    """Each that is given or has a default, in turn: numbers a little larger and smaller, flags the other way."""
    tried = _Tried(case, lenient=False)
    for call, what in _other_numbers(case):
        expected = _taken(case, call)
        if expected is not None and not _is_random(case, call, expected):
            tried(call, what)
    tried.anything("no number or flag can be another")


class _Tried:
    """Judges calls that may be refused, and remembers what came of them."""

    def __init__(self, case: Case, lenient: bool = True) -> None:
        self.case, self.lenient = case, lenient
        self.judged, self.refusal = False, ""

    def __call__(self, call: Call, what: str) -> None:
        """Judge a call. A forward may refuse it; a backward after a forward that did not may not."""
        leaves = call.relaid()
        try:
            outputs = tensors_of(leaves.of(self.case.target.function))
        except REFUSALS as error:
            if not is_clear(error):
                raise
            self.refusal = f"it refuses {what}: {str(error).partition(chr(10))[0]}"
            return
        with told(what):
            try:
                found = gradients(outputs, leaves, self.case.grads(outputs))
            except REFUSALS as error:
                raise Failure(f"backward: {type(error).__name__}: {error}") from error
            self.case.judge(Outcome(outputs, found), call, lenient=self.lenient)
        self.judged = True

    def anything(self, otherwise: str) -> None:
        """Raise `NotApplicable` where nothing was judged: for what the last refusal says, or for another reason."""
        if not self.judged:
            raise NotApplicable(self.refusal or otherwise)


def _taken(case: Case, call: Call) -> Outcome | None:
    """What the reference gives; None where it refuses the call, or its backward."""
    try:
        return case.expected(call)[0]
    except (NotApplicable, *REFUSALS):
        return None


def _smaller(tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    plain = tensor.detach()
    dims = [dim for dim, size in enumerate(plain.shape) if size > 1][:_MOST_DIMS]
    for dim in dims:
        yield f"of size 1 in dimension {dim}", plain.narrow(dim, 0, 1).clone()
    if len(dims) > 1:
        yield "of one element", plain[tuple(slice(1) for _ in plain.shape)].clone()
    if plain.dim() and plain.shape[0]:
        yield "without its first dimension", plain[0].clone()


def _changed(tensor: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    return change(tensor.detach()).requires_grad_(tensor.requires_grad)


def _stacked(tensor: Tensor) -> Tensor:
    """Twice, the second time in another order, as far as that is among the values that may change places."""
    return torch.stack([tensor, tensor.roll(1, -1) if tensor.dim() and tensor.is_floating_point() else tensor])


def _other_numbers(case: Case) -> Iterator[tuple[Call, str]]:
    """Calls with one number or flag another, and which."""
    call = case.call.like(case.call.args, {**_defaults(case), **case.call.kwargs})
    leaves, form = tree_flatten((call.args, call.kwargs))
    for place, leaf in enumerate(leaves):
        for other in _others(leaf):
            args, kwargs = tree_unflatten([*leaves[:place], other, *leaves[place + 1 :]], form)
            yield call.like(args, kwargs), f"{other!r} for {leaf!r}"


def _defaults(case: Case) -> dict[str, Any]:
    """The numbers and flags that the call leaves to the function's own signature."""
    try:
        parameters = list(inspect.signature(case.target.function).parameters.values())
    except (TypeError, ValueError):  # as of what is built in
        return {}
    left = parameters[len(case.call.args) :]
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {one.name: one.default for one in left if one.kind in kinds and isinstance(one.default, (bool, int, float))}


def _others(value: Any) -> tuple[Any, ...]:
    if isinstance(value, bool):
        return (not value,)
    if isinstance(value, float):
        return value + 0.5, value * 0.5
    return (value + 1, value - 1) if isinstance(value, int) else ()


def _is_random(case: Case, call: Call, given: Outcome) -> bool:
    """Whether the reference gives something else when it is called again."""
    again = case.theirs(call)
    return any(not torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(given.outputs, again.outputs))
