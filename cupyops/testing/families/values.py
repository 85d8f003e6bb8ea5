"""Values: how exact, in which dtypes, and what becomes of those that are special or out of range."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from io import StringIO

import torch
from torch import Tensor

from ..._kernel.kernel import FLOATING, executors, kernels
from ..._simulate import simulate
from ..._util import tracing
from ..call import Call, Outcome
from ..case import Case, triples
from ..hazard import Failure, NotApplicable, hazard, told
from ..recast import cast, distance
from ..refusals import REFUSALS, is_clear, unless_refused
from ..special import PLANTS, denormals, flushed, judge_signs_of_zero, judge_trusted, nearly_zero, planted, zeros
from ..tolerance import name

_BROKEN = 128.0  # of slack: an operator that is so far off says nothing in another dtype
_INTEGERS = (*(getattr(torch, f"{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)),)
_FAR = 1_000_003  # past any sample's sizes
_UNITS = 16.0  # in the last place, that exact instructions and a good use of approximate ones stay within
_DRAWS = 4  # calls of the kind, in which the reference's errors are looked at
_APPROXIMATE = re.compile(r"\.(approx|full)\.")


@hazard("forward and every gradient are as near to float64 as PyTorch's own in the same dtype")
def accuracy(case: Case) -> None:
    """The call as it was given."""
    case.judge(case.plain, case.call, lenient=False)


@hazard("the same is true in every floating dtype that PyTorch takes; what is refused, is refused by an error")
def dtypes(case: Case) -> None:
    """Half types must add up in float32, and float64 in float64."""
    given = {tensor.dtype for tensor in case.needs_floating()}
    _needs_accuracy(case)
    others = [dtype for dtype in FLOATING if given != {dtype}]
    calls = [(name(dtype), case.call.map_floating(lambda t: cast(t, dtype))) for dtype in others]  # noqa: B023
    if not sum(_judged(case, call, what) for what, call in calls):
        raise NotApplicable("no other dtype is taken")


@hazard("inputs of two floating dtypes give PyTorch's answer in PyTorch's dtype, or an error", launches=False)
def mixed_dtypes(case: Case) -> None:
    """Each floating input in turn in another dtype than it was given in."""
    tensors = case.needs_floating()
    if len(tensors) < 2:
        raise NotApplicable("one floating-point tensor alone")
    _needs_accuracy(case)
    for index, tensor in enumerate(tensors):
        likely = (torch.float16, torch.float64) if tensor.dtype == torch.float32 else (torch.float32,)
        for dtype in likely:
            what = f"floating tensor {index} in {name(dtype)}"
            _answered_or_refused(case, case.call.replaced(tensor, cast(tensor, dtype)), what)


@hazard("integers where floating-point numbers are expected give PyTorch's answer, or an error", launches=False)
def integer_inputs(case: Case) -> None:
    """All floating inputs as int64, then each in turn."""
    tensors = case.needs_floating()
    _needs_accuracy(case)
    _answered_or_refused(case, case.call.map_floating(_as_integers), "integers")
    for index, tensor in enumerate(tensors if len(tensors) > 1 else ()):
        _answered_or_refused(
            case, case.call.replaced(tensor, _as_integers(tensor)), f"floating tensor {index} as int64"
        )


@hazard("NaN, infinities, zeros of both signs, denormals and huge values come out as they do from PyTorch")
def special_values(case: Case) -> None:
    """Each kind in each floating input in turn; judged where PyTorch agrees with itself in float64."""
    tried = False
    free = {id(tensor) for tensor in case.call.free_values()}
    for index, tensor in enumerate(case.needs_floating()):
        if not tensor.numel() or id(tensor) not in free:
            continue
        for plant in PLANTS:
            call = case.call.replaced(tensor, planted(tensor, plant))
            try:
                _refused_on_cpu(case, call)
                ours = case.both_ways(call)
                judge_trusted(case, ours, call, flushed(case, call) if plant is denormals else 0.0)
                if plant is zeros:
                    limit = case.theirs(case.call.replaced(tensor, planted(tensor, nearly_zero)))
                    judge_signs_of_zero(ours, _votes(case, call), limit)
            except NotApplicable:
                continue  # PyTorch refuses such values here
            except Failure as failure:
                raise Failure(f"{plant.__name__} in floating tensor {index}: {failure}") from None
            tried = True
    if not tried:
        raise NotApplicable("PyTorch refuses every special value")


@hazard("values near 1, near 0 and in the thousands give PyTorch's answer, as inexact as fast instructions may be")
def approximations(case: Case) -> None:
    """Let each approximate instruction err as far as the PTX manual allows, in the simulator.

    Near 1 a fast logarithm is wrong, near 0 what is a difference, far from 0 a fast sine.
    """
    if case.backend == "reference" and case.target.operator is not None:
        raise NotApplicable("no kernel runs")
    case.needs_floating()
    _ = case.slack  # of the plain call, with instructions as they are
    tried = False
    with _inexact(case) as mode:
        for what, change in RANGES.items():
            call = case.call.map_values(change)
            with told(f"{what}{mode}"), unless_refused():
                case.expected(call)
                tried = True
                _judge_range(case, call, change)
    if not tried:
        raise NotApplicable("the reference takes no such values")


def _judge_range(case: Case, call: Call, change: Callable[[Tensor], Tensor]) -> None:
    """Raise `Failure` where a result is far from the truth, and so is none of the reference's for values of the kind."""
    ours = case.both_ways(call)
    try:
        judge_trusted(case, ours, call, units=_UNITS)
    except Failure:
        errors: dict[str, float] = {}
        for number in range(_DRAWS):
            theirs, truth = case.expected(case.nudged(case.call, number).map_values(change))
            for (what, result), expected, _ in triples(theirs, truth, truth):
                if result is not None and expected is not None:
                    errors[what] = max(errors.get(what, 0.0), distance(result, expected))
        judge_trusted(case, ours, call, units=_UNITS, errors=errors)


def _spread(tensor: Tensor, center: float, scale: float) -> Tensor:
    moved = center + scale * tensor.detach().double()
    return moved.to(tensor.dtype).requires_grad_(tensor.requires_grad)


RANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "values near 1": lambda tensor: _spread(tensor, 1.0, 2.0**-10),
    "values near 0": lambda tensor: _spread(tensor, 0.0, 2.0**-10),
    "values in the thousands": lambda tensor: _spread(tensor, 0.0, 1000.0),
    "values as given": lambda tensor: tensor,
}


@contextmanager
def _inexact(case: Case) -> Iterator[str]:
    """Simulate the worst that approximate instructions may give, if the kernels of the call have any; in words."""
    if case.backend != "simulator" or not _approximates(case):
        yield ""
        return
    with simulate(approximate="worst"):
        yield ", approximate instructions as inexact as PTX allows"


def _approximates(case: Case) -> bool:
    with tracing.trace() as trace:
        case.both_ways(case.call)
    arch = getattr(executors["cpu"], "arch", "sm_80")
    launched = {record.kernel for record in trace.launches()}
    instances = (one for kernel in kernels() for one in list(kernel._specialised.values()) if one.name in launched)
    return any(_APPROXIMATE.search(one.binary(arch).ptx) for one in instances)


@hazard("an index out of range gives an error or PyTorch's answer, never a wild read or a wrong number", launches=False)
def indices(case: Case) -> None:
    """Negative, one past each size, and far out, one at a time in each integer tensor."""
    tensors = [t for t in case.call.all_tensors() if t.dtype in _INTEGERS and t.numel()]
    if not tensors:
        raise NotApplicable("no tensor of integers")
    tried = False
    for index, tensor in enumerate(tensors):
        for value in _candidates(case.call, tensor):
            call = case.call.replaced(tensor, _with_value(tensor, value))
            if case.backend != "gpu" or _tolerated(case, call):
                _answered_or_refused(case, call, f"{value} in integer tensor {index}", near_truth=False)
                tried = True
    if not tried:
        raise NotApplicable("PyTorch itself refuses such an index, and on a GPU that ends the process")


# --- calls that may be refused ----------------------------------------------------------------------------------------


def _judged(case: Case, call: Call, what: str) -> bool:
    """Judge a call, unless PyTorch or the function refuses it; whether it was judged."""
    try:
        case.theirs(call)
        ours = case.both_ways(call)
        case.judge(ours, call, lenient=False)
    except NotApplicable:
        return False
    except Failure as failure:
        raise Failure(f"{what}: {failure}") from None
    except REFUSALS as error:
        if not is_clear(error):
            raise
        return False
    return True


def _answered_or_refused(case: Case, call: Call, what: str, near_truth: bool = True) -> None:
    """Raise `Failure` unless the function refuses, or gives PyTorch's answer, or where PyTorch refuses the truth."""
    try:
        with redirect_stdout(StringIO()):  # a kernel's last words, in the simulator
            ours = case.both_ways(call)
    except REFUSALS as error:
        if not is_clear(error):
            raise
        return
    try:
        _coarser(case, call).judge(ours, call)
    except NotApplicable as refusal:
        if not near_truth:
            raise Failure(f"{what}: a result, where {refusal}") from None
        _near_truth(case, ours.outputs, call, what)
    except Failure as failure:
        raise Failure(f"{what}: {failure}") from None


def _coarser(case: Case, call: Call) -> Case:
    """The case with the units in the last place of the coarsest dtype of a call, where there are several."""
    eps = {t.dtype: torch.finfo(t.dtype).eps for t in call.all_tensors() if t.is_floating_point()}
    if len(eps) < 2:
        return case
    return case.with_units({dtype: max(1.0, max(eps.values()) / torch.finfo(dtype).eps) for dtype in FLOATING})


def _near_truth(case: Case, outputs: list[Tensor], call: Call, what: str) -> None:
    """Check that a result for a mix of dtypes that PyTorch refuses is still right to the coarsest of them."""
    pairs = zip(call.all_tensors(), case.call.all_tensors())
    numbers = {id(tensor) for tensor, given in pairs if given.is_floating_point()}
    wide = call.map(lambda t: t.detach().double() if id(t) in numbers else t)
    try:
        truth = case.theirs(wide).outputs
    except NotApplicable:
        return  # PyTorch has no answer in float64 either: nothing says what would be right
    dtypes = {t.dtype for t in [*call.all_tensors(), *outputs] if t.is_floating_point()}
    coarsest = max((torch.finfo(dtype).eps for dtype in dtypes), default=torch.finfo(torch.float32).eps)
    for index, (a, b) in enumerate(zip(outputs, truth, strict=True)):
        scale = b.abs().max().item() if b.numel() else 0.0
        if a.shape != b.shape or not torch.allclose(a.double(), b.double(), rtol=0, atol=16 * coarsest * scale):
            raise Failure(
                f"{what}: PyTorch refuses this, and output {index}, in {name(a.dtype)}, is far from the truth"
            )


def _needs_accuracy(case: Case) -> None:
    if any(slack > _BROKEN for slack in case.slack.values()):
        raise NotApplicable("the call itself is wrong, see accuracy")


def _refused_on_cpu(case: Case, call: Call) -> None:
    """Raise `NotApplicable` where PyTorch refuses these values: on a GPU the refusal would end the process."""
    if case.backend == "gpu":
        case.theirs(call.map(lambda t: t.detach().cpu()))


def _tolerated(case: Case, call: Call) -> bool:
    try:
        _refused_on_cpu(case, call)
    except NotApplicable:
        return False
    return True


# --- variants ---------------------------------------------------------------------------------------------------------


def _as_integers(tensor: Tensor) -> Tensor:
    return (tensor.detach() * 3).round().long()


def _votes(case: Case, call: Call) -> list[Outcome]:
    """PyTorch's outcome in this dtype, in float64, and of tensors with gaps, which take another path through it."""
    gaps = call.map_floating(lambda t: t.detach().unsqueeze(-1).repeat_interleave(2, dim=-1)[..., 0])
    return [case.theirs(call), case.truth(call), case.theirs(gaps)]


def _candidates(call: Call, tensor: Tensor) -> list[int]:
    sizes = sorted({size for t in call.all_tensors() if t is not tensor for size in t.shape})[:3]
    info = torch.iinfo(tensor.dtype)
    return [value for value in (-1, -100, *sizes, _FAR) if info.min <= value <= info.max]


def _with_value(tensor: Tensor, value: int) -> Tensor:
    def plant(values: Tensor) -> None:
        values.view(-1)[values.numel() // 2] = value

    return planted(tensor, plant)
