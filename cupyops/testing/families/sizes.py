"""Sizes: none, one, odd ones, more than a grid or an int can count."""

from __future__ import annotations

import torch
from torch import Tensor

from ..._util import tracing
from ..call import Call
from ..case import Case
from ..foretold import STEP, Allocated, Computed, needs_memory, smaller_sizes
from ..hazard import GPU, Failure, NotApplicable, hazard, told
from ..large_sizes import large_sizes
from ..ran import why_none
from ..remainders import Remainders, other_remainders
from ..report import NO_KERNEL

_SIZES = 3  # of a call, the largest, that are varied one at a time
_TAILS = (31, 33, 127, 257)  # around a warp, and past a block of 128 and of 256
_ROWS = 65_539  # more than a grid's y and z can count
_PROBE = 512  # rows, of which the simulator tells how long more of them would take
_FEW = 2  # to which other sizes are cut where there are so many rows
_MOST = 2_000_000  # elements of a call
_UNITS = 1024.0  # of float64, in a sum over that many: the truth is no more exact
_INSTRUCTIONS = 500_000_000  # that the simulator runs in two seconds


@hazard("a size of zero gives PyTorch's answer; where nothing comes out, nothing is launched", launches=False)
def empty(case: Case) -> None:
    """Each size in turn, everywhere that it occurs."""
    tried = False
    for size in _sizes(case.call, 1):
        call = _resized(case, size, 0)
        if call is None:
            continue
        with told(f"size 0 in place of {size}"):
            with tracing.trace() as trace:
                ours = case.both_ways(call)
            case.judge(ours, call)
            if launches := trace.launches() if ours.is_empty() else []:
                raise Failure(
                    f"{launches[0].kernel} is launched on {launches[0].grid} for no elements; return before that"
                )
        tried = True
    if not tried:
        raise NotApplicable("the reference takes no size of zero")


@hazard("a size of one gives PyTorch's answer")
def size_one(case: Case) -> None:
    """Each size in turn, everywhere that it occurs."""
    taken = [_tried(case, size, 1) for size in _sizes(case.call, 2)]
    if not any(taken):
        raise NotApplicable("the reference takes no size of one in place of another")


@hazard("tensors without dimensions give PyTorch's answer")
def zero_dim(case: Case) -> None:
    """Every floating-point tensor a single number."""
    if not any(tensor.dim() and tensor.numel() for tensor in case.needs_floating()):
        raise NotApplicable("no tensor has a dimension")
    call = case.call.map_floating(_one_number)
    case.expected(call)
    case.judge(case.both_ways(call), call)


@hazard("sizes next to those of the call, and those of every remainder modulo 16, give PyTorch's answer")
def tails(case: Case) -> str:
    """One less and one more of each size, then sizes that no block or vector divides; then what is left of 16 remainders."""
    sizes = _sizes(case.call, 2)[:_SIZES]
    wanted = [(size, new) for size in sizes for new in (size - 1, size + 1)]
    wanted += [(size, new) for size in sizes[:1] for new in _TAILS if new != size]
    calls = [call for size, new in wanted if (call := _tried(case, size, new))]
    remainders = Remainders()
    for call in (case.call, *calls):
        remainders.add(call)
    for call in other_remainders(case, remainders):
        with told(f"for {call!r}"):
            case.judge(case.both_ways(call), call)
        calls.append(call)
    if not calls:
        raise NotApplicable("the reference takes no other size")
    return str(remainders)


@hazard("more than 65,535 rows give PyTorch's answer")
def many_rows(case: Case) -> None:
    """The leading size of the largest tensor made larger than a grid's y and z, the others and numbers small if need be."""
    largest = max(case.call.all_tensors(), key=Tensor.numel, default=None)
    if largest is None or not largest.numel() or not largest.dim():
        raise NotApplicable("no tensor has rows")
    if case.backend == "reference" and case.target.operator is not None:
        raise NotApplicable("no kernel runs here")
    rows, few = largest.shape[0], case.with_units({torch.float64: _UNITS})
    for size in _sizes(case.call, _FEW + 1):
        if size != rows and (smaller := _resized(few, size, _FEW if rows != _FEW else _FEW + 1, (False, True))):
            few = few.with_call(smaller)
    shapes = [tensor.shape for tensor in few.call.all_tensors()]
    elements = sum(shape.numel() * (_ROWS // rows) ** shape.count(rows) for shape in shapes)
    if elements > _MOST:
        raise NotApplicable(f"{elements:,} elements are too many to try")
    if case.backend == "simulator":
        _needs_simulation(few, rows)
    _needs_memory(few, rows, _ROWS, (False,))
    grown = _resized(few, rows, _ROWS, (False,))
    if grown is None:
        raise NotApplicable("the reference takes no more rows")
    few.judge(few.both_ways(grown), grown)


@hazard("more than 2^31 elements give PyTorch's answer", backends=GPU)
def more_than_2_31(case: Case) -> None:
    """The call repeated along a dimension along which its result repeats, to more than 2^32 where the memory suffices."""
    large_sizes(case, 2**32, 2**31)


# --- variants ---------------------------------------------------------------------------------------------------------


def _sizes(call: Call, least: int) -> list[int]:
    """The sizes in a call, the largest first."""
    return sorted({size for tensor in call.all_tensors() for size in tensor.shape if size >= least}, reverse=True)


def _resized(case: Case, size: int, new: int, with_numbers: tuple[bool, ...] = (True, False)) -> Call | None:
    """The call with another size, if the reference takes it: with the numbers of that value changed too, or without."""
    for numbers in with_numbers:
        call = case.call.resized(size, new, numbers)
        try:
            case.expected(call)
        except NotApplicable:
            continue
        return call
    return None


def _tried(case: Case, size: int, new: int) -> Call | None:
    """Judge the call with another size; None where the reference does not take it, or it is too large."""
    if _elements(case.call.resized(size, new)) > _MOST:
        return None
    try:
        _needs_memory(case, size, new)
    except NotApplicable:
        return None
    call = _resized(case, size, new)
    if call is not None:
        with told(f"size {new} in place of {size}"):
            case.judge(case.both_ways(call), call)
    return call


def _needs_memory(case: Case, size: int, new: int, with_numbers: tuple[bool, ...] = (True, False)) -> None:
    """Raise `NotApplicable` where the reference or the function would take more memory with `new` for a size than it may."""
    if new <= STEP * size or case.backend == "gpu":
        return

    def by_reference(n: int) -> int | None:
        with Computed() as computed:
            call = _resized(case, size, n, with_numbers)
        return None if call is None else computed.bytes

    def by_function(n: int) -> int | None:
        call = _resized(case, size, n, with_numbers)
        if call is None:
            return None
        with Allocated() as allocated:
            try:
                case.both_ways(call)
            except Exception:  # whatever an operator raises; that is for the variant to tell
                return None
        return allocated.bytes

    needs_memory(new, smaller_sizes(new, new), by_reference, case.memory)
    needs_memory(new, smaller_sizes(new, _PROBE), by_function, case.memory)


def _needs_simulation(case: Case, rows: int) -> None:
    """Raise `NotApplicable` where a smaller number of rows foretells that so many take too long, or launch no kernel."""
    call = _resized(case, rows, _PROBE, (False,))
    if call is None:
        raise NotApplicable("the reference takes no more rows")
    with tracing.trace() as trace:
        case.both_ways(call)
    if not trace.launches() and (why := why_none(case)):
        raise NotApplicable(f"{NO_KERNEL} {why}")
    instructions = sum(record.instructions or 0 for record in trace.launches()) * (_ROWS // _PROBE)
    if instructions > _INSTRUCTIONS:
        raise NotApplicable(f"the simulator would run {instructions:,} instructions")


def _elements(call: Call) -> int:
    return sum(tensor.numel() for tensor in call.all_tensors())


def _one_number(tensor: Tensor) -> Tensor:
    number = tensor.detach().flatten()[:1].clone()
    return number.reshape(() if number.numel() else tensor.shape).requires_grad_(tensor.requires_grad)
