"""Values that are special: planting them in a tensor, and judging results where PyTorch itself can be trusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from .._operator.derivation.definition import takes_gradient
from .call import INFERENCE, Call, Outcome
from .case import ROUNDINGS, Case, same_number, triples, wanted
from .hazard import Failure
from .tolerance import computable, largest, same_form

_HUGE = 1e30  # its square overflows in float32; half types take a part of their largest value

Plant = Callable[[Tensor], None]


def planted(tensor: Tensor, plant: Plant) -> Tensor:
    """A copy laid out alike, in which `plant` has changed values."""
    values = tensor.detach().clone(memory_format=torch.contiguous_format)
    plant(values)
    return torch.empty_like(tensor, requires_grad=False).copy_(values).requires_grad_(tensor.requires_grad)


def one_nan(values: Tensor) -> None:
    """Plant a NaN in the middle."""
    values.view(-1)[values.numel() // 2] = math.nan


def infinities(values: Tensor) -> None:
    """+inf in an early row, -inf in the last."""
    values.view(-1)[values.numel() // 4] = math.inf
    values.view(-1)[-1] = -math.inf


def minus_infinity(values: Tensor) -> None:
    """A line of -inf along every dimension, as a row is that is masked in full."""
    for dim in range(values.dim()):
        values[tuple(slice(None) if d == dim else 0 for d in range(values.dim()))] = -math.inf


def all_nan(values: Tensor) -> None:
    """Fill a tensor with NaN."""
    values.fill_(math.nan)


def zeros(values: Tensor) -> None:
    """+0 and -0 in turn."""
    values.zero_()
    values.view(-1)[1::2] = -0.0


def nearly_zero(values: Tensor) -> None:
    """Smallest normal numbers, of which `zeros` are the limit."""
    values.fill_(torch.finfo(values.dtype).tiny)
    values.view(-1)[1::2] *= -1


def denormals(values: Tensor) -> None:
    """Make values too small for a normal number, with the smallest of these between."""
    tiny = torch.finfo(values.dtype).tiny
    values.copy_(values.double().clamp(-1, 1) * (0.99 * tiny))
    values.view(-1)[::3] = tiny


def huge(values: Tensor) -> None:
    """Each a large part of what the dtype can hold."""
    values.copy_(values.double().clamp(-4, 4) * min(_HUGE, torch.finfo(values.dtype).max / 16))


PLANTS: tuple[Plant, ...] = (one_nan, infinities, minus_infinity, all_nan, zeros, denormals, huge)


def flushed(case: Case, call: Call) -> float:
    """Largest error of a sum by atomics on subnormals: a GPU flushes these in memory, as PyTorch's own sums there do."""
    if case.target.operator is None or not case.target.operator.definition.nondeterministic:
        return 0.0
    added = max((tensor.numel() for tensor in call.all_tensors()), default=0)
    return added * torch.finfo(torch.float32).tiny


def judge_trusted(
    case: Case,
    ours: Outcome,
    call: Call,
    lost: float = 0.0,
    units: float = ROUNDINGS,
    errors: Mapping[str, float] | None = None,
) -> None:
    """Raise `Failure` where `ours` differs from PyTorch's answer, as far as that is an answer: where float64 agrees.

    What overflows on the way is PyTorch's own affair. In gradients inf and NaN are one, since inf - inf hangs on the order
    of a product, and the gradient of an input element that is NaN may be anything. `lost` is an error that is let pass, and
    so are `units` in the last place, and twice the `errors` that the reference makes in calls of the kind.
    """
    theirs, truth = case.expected(call)
    same_number(ours, theirs)
    inputs = {f"gradient {i}": tensor for i, tensor in enumerate(call.tensors())}
    for (what, a), b, c in triples(ours, theirs, truth):
        given = inputs.get(what)
        slack = case.slack_of(what)
        if a is None or b is None or c is None or slack == math.inf:
            continue  # whether there is a gradient at all does not hang on values
        same_form(a, b, what)
        mine, expected, exact = (computable(result) for result in (a, b, c))
        if given is not None:
            free = computable(given).isnan()
            mine, expected, exact = (_one_kind(result, free) for result in (mine, expected, exact))
        if not takes_gradient(b) or _agree(expected, exact):
            rounding = units * case.tolerance.units(a.dtype, largest(exact))
            usual = 0.0 if errors is None else case.tolerance.factor * errors.get(wanted(what), 0.0) + rounding
            case.tolerance.judge(mine, expected, exact, what, slack, max(rounding, case.excused(what), lost, usual))


def judge_signs_of_zero(ours: Outcome, votes: Sequence[Outcome], limit: Outcome) -> None:
    """Raise `Failure` where an output is a zero of the wrong sign: where all votes are zeros of one sign, and so is `limit`.

    `limit` is PyTorch's outcome near zero: relu(-0.0) is -0 on a CPU and +0 on a GPU, and either will do.
    """
    each = [("", index, y) for index, y in enumerate(ours.outputs)]
    each += [(INFERENCE, index, y) for index, y in enumerate(ours.inference)]
    for when, index, output in each:
        a, near, *theirs = map(computable, (output, *(one.outputs[index] for one in (limit, *votes))))
        if not a.is_floating_point() or a.shape != near.shape:
            continue
        sign = near.signbit()
        agreed = (a == 0) & torch.stack([(b == 0) & (b.signbit() == sign) for b in theirs]).all(0)
        wrong = agreed & (a.signbit() != sign)
        if wrong.any():
            place = wrong.nonzero()[0].tolist()
            expected = "-0" if sign[tuple(place)] else "+0"
            raise Failure(
                f"output {index}{when}: at {place} not {expected}, as PyTorch has it; {int(wrong.sum())} differ"
            )


def _one_kind(gradient: Tensor, undefined: Tensor) -> Tensor:
    """NaN for all that is not finite, 0 where nothing is defined."""
    return gradient.where(gradient.isfinite(), math.nan).where(~undefined, 0)


def _agree(theirs: Tensor, truth: Tensor) -> bool:
    """True if PyTorch's result is right throughout: near the truth, and not finite where the truth in this dtype is not."""
    truth = truth.to(theirs.dtype)
    finite = truth.isfinite()
    sizes = truth.double().abs()
    usual = sizes[finite].median() if finite.any() else sizes.new_zeros(())  # one huge value says nothing of the others
    near = (theirs.double() - truth.double()).abs() <= math.sqrt(torch.finfo(theirs.dtype).eps) * sizes.clamp(min=usual)
    same = (theirs == truth) | (theirs.isnan() & truth.isnan())
    return bool(torch.where(finite, near, same).all())
