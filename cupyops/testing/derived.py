"""Derivatives of a function and of its reference, compared; each is a function of a function and a call."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from .call import Call, Function, tensors_of
from .case import Case, exact
from .hazard import Failure, NotApplicable

_FLOOR = 1e-12  # of errors in float64, where terms may cancel and PyTorch's own error is not known
_SLACK = 8.0  # a derivative of a derivative is rounded more than once, in another order than PyTorch's

Derivative = Callable[[Function, Call], list[Tensor]]


def same(case: Case, call: Call, ours: Derivative, theirs: Derivative | None = None) -> None:
    """Judge a derivative of the function against the same, or another way to it, of the reference."""
    theirs = theirs or ours
    if math.inf in case.slack.values():
        raise NotApplicable("the plain call is not right already")
    try:
        expected = theirs(case.target.reference, call.leaves())
        truth = theirs(case.target.reference, exact(call))
    except Exception as error:  # whatever a reference raises
        raise NotApplicable(f"the reference has no such derivative: {brief(error)}") from error
    try:
        _judge(case, ours(case.target.function, call.leaves()), expected, truth)
    except Exception as error:  # whatever an operator raises
        failure = error if isinstance(error, Failure) else Failure(f"{type(error).__name__}: {brief(error)}")
        if ours is not theirs and _is_wrong(case, lambda: ours(case.target.reference, call.leaves()), expected, truth):
            raise NotApplicable(f"PyTorch's own is wrong for the reference too: {failure}") from error
        if ours is not theirs and not isinstance(error, Failure) and (refusal := _refusal(case, call, ours)):
            raise NotApplicable(f"the reference refuses it too: {refusal}") from error
        raise failure from error


def _judge(case: Case, found: list[Tensor], expected: list[Tensor], truth: list[Tensor]) -> None:
    if len(found) != len(expected):
        raise Failure(f"{len(found)} results, PyTorch gives {len(expected)}")
    slack = _SLACK * max(1.0, *case.slack.values())
    for index, (a, b, c) in enumerate(zip(found, expected, truth)):
        extra = _FLOOR if a.dtype is torch.float64 else 0.0
        case.tolerance.judge(a, b, c, "result" if len(found) == 1 else f"result {index}", slack, extra)


def _is_wrong(case: Case, found: Callable[[], list[Tensor]], expected: list[Tensor], truth: list[Tensor]) -> bool:
    try:
        _judge(case, found(), expected, truth)
    except Failure:
        return True
    except Exception:  # whatever a reference raises: it is not wrong, there is none
        return False
    return False


def _refusal(case: Case, call: Call, way: Derivative) -> str:
    """Error of the reference when it is called in this way; empty where it answers."""
    try:
        way(case.target.reference, call.leaves())
    except Exception as error:  # whatever a reference raises
        return brief(error)
    return ""


def brief(error: object) -> str:
    """The beginning of what an error says, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines)[:400]


def of_its_inputs(case: Case, function: Function, call: Call) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """(f, inputs): f of the tensors that want a gradient gives the outputs that have one."""
    wanted = call.tensors()
    chosen = [i for i, y in enumerate(case.plain.outputs) if y.requires_grad]

    def f(*values: Tensor) -> tuple[Tensor, ...]:
        outputs = tensors_of(call.with_tensors(wanted, values).of(function))
        return tuple(outputs[i] for i in chosen)

    return f, tuple(tensor.detach() for tensor in wanted)


def weighted(case: Case, f: Callable[..., tuple[Tensor, ...]]) -> Callable[..., Tensor]:
    """A number: the outputs' sum with random weights, which unlike a plain sum leaves no term out."""
    weights = case.grads(case.plain.outputs)

    def total(*values: Tensor) -> Tensor:
        terms = [(y * weight.to(y.dtype)).sum() for y, weight in zip(f(*values), weights, strict=True)]
        return torch.stack(terms).sum()

    return total


def matching(call: Call, like: Call, chosen: Sequence[Tensor]) -> list[Tensor]:
    """The tensors of `call` that stand where the chosen ones stand in `like`."""
    places = {id(tensor) for tensor in chosen}
    return [mine for mine, other in zip(call.all_tensors(), like.all_tensors()) if id(other) in places]
