"""Calls too large for a reference: repeated along a dimension, so that a small call says what must come out."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .._util.torch_private import tree_map
from .call import Call, Function, Outcome, gradients, tensors_of
from .case import Case, other_values
from .hazard import Failure, NotApplicable
from .target import kernels_only

_PROBE = 1 << 22  # elements of a call whose use of memory is measured
_SPARE = 1.25  # times the memory that this foretells
_NARROW = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Repetition:
    """A small call, and how its results repeat when the size `size` does.

    Attributes:
        call: where only what repeats wants a gradient.
        last: the same with other values in what repeats, for the last of the repetitions: an index that wraps around to an
            earlier one finds other values there.
        size: that repeats, wherever it occurs.
        grads: of the outputs that take one.
        along: for each output and gradient the dimension along which it repeats.
        grads_along: the same for `grads`.
    """

    call: Call
    last: Call
    size: int
    grads: list[Tensor]
    along: list[int]
    grads_along: list[int]

    def run(self, function: Function, count: int) -> Outcome:
        """The call `count` times as large, forward and backward."""
        call = _larger(self.call, self.size, count, self.last)
        grads = [_repeated(grad, dim, count) for grad, dim in zip(self.grads, self.grads_along, strict=True)]
        outputs = tensors_of(call.of(function))
        return Outcome(outputs, gradients(outputs, call, grads))

    def part(self, outcome: Outcome, number: int, count: int) -> Outcome:
        """Results of one of the repetitions."""
        parts = [
            None if result is None else _part(result, dim, number, count)
            for (_, result), dim in zip(outcome.named(), self.along, strict=True)
        ]
        outputs = len(outcome.outputs)
        return Outcome([part for part in parts[:outputs] if part is not None], parts[outputs:])


def large_sizes(case: Case, *elements: int) -> None:
    """Raise `Failure` unless a call with more elements than that gives, in places, what a small one gives.

    Of several numbers of elements the first is taken for which the memory suffices.
    """
    case.needs_floating()
    repetition = _repetition(case)
    largest = max(tensor.numel() for tensor in repetition.call.all_tensors() if repetition.size in tensor.shape)
    each = _memory_for_each(case, repetition, max(1, _PROBE // largest))
    counts = [number // largest + 2 for number in elements]
    count = next((count for count in counts if each * count <= _free(case)), None)
    if count is None:
        least = each * min(counts)
        raise NotApplicable(f"needs {least / 2**30:.0f} GiB of memory, {_free(case) / 2**30:.0f} are free")
    try:
        with kernels_only() if case.backend == "gpu" else nullcontext():
            found = repetition.run(case.target.function, count)
        for number in sorted({0, count // 2, count - 2, count - 1}):
            _judge_part(case, repetition, found, number, count)
    except torch.cuda.OutOfMemoryError as error:
        raise NotApplicable("the memory does not suffice") from error
    finally:
        _release(case)


def _judge_part(case: Case, repetition: Repetition, found: Outcome, number: int, count: int) -> None:
    small = repetition.call if number < count - 1 else repetition.last
    try:
        case.judge(repetition.part(found, number, count), small, repetition.grads)
    except Failure as failure:
        where = f"repetition {number} of {count} along the size {repetition.size}"
        raise Failure(f"{small!r}, {where}: {failure}") from None


# --- how the results repeat -------------------------------------------------------------------------------------------


def _repetition(case: Case) -> Repetition:
    """Repeat the call in the narrowest dtype in which it is right."""
    for dtype in _NARROW:
        narrow = case.call.map_floating(lambda t: t.detach().to(dtype).requires_grad_(t.requires_grad))  # noqa: B023
        try:
            case.judge(case.both_ways(narrow), narrow)
        except (Failure, NotApplicable, TypeError, ValueError, RuntimeError):
            continue  # other hazards tell of that
        for size in dict.fromkeys(size for tensor in narrow.all_tensors() for size in tensor.shape if size > 1):
            repetition = _along(case, narrow, size)
            if repetition is not None:
                return repetition
        raise NotApplicable("the result repeats along no dimension")
    raise NotApplicable("the call itself is right in no dtype")


def _along(case: Case, call: Call, size: int) -> Repetition | None:
    """The call with `size` as what repeats; None if the results do not, exactly, in float64."""
    if any(tensor.shape.count(size) > 1 for tensor in call.all_tensors()):
        return None
    call = call.map(lambda t: t.detach().requires_grad_(t.requires_grad and size in t.shape))
    last = call.map_values(lambda t: other_values(t) if size in t.shape else t)
    try:
        outputs = case.theirs(call).outputs
        dims = [_longer(a, b) for a, b in zip(outputs, case.theirs(_larger(call, size, 3, last)).outputs, strict=True)]
    except NotApplicable:
        return None
    if None in dims:
        return None
    grads_along = [dim for dim, y in zip(dims, outputs) if dim is not None and y.requires_grad]
    grads = case.grads(outputs)
    one, other = (case.truth(small, grads).named() for small in (call, last))
    more = [_repeated(grad, dim, 3) for grad, dim in zip(grads, grads_along, strict=True)]
    three = case.truth(_larger(call, size, 3, last), more).named()
    along = [_repeats(a, b, c) for (_, a), (_, b), (_, c) in zip(one, other, three, strict=True)]
    if None in along:
        return None
    return Repetition(call, last, size, grads, [dim for dim in along if dim is not None], grads_along)


def _repeats(one: Tensor | None, last: Tensor | None, three: Tensor | None) -> int | None:
    """The dimension along which the one twice, then the last, are the three."""
    if one is None or last is None or three is None:
        return None if one is not three else 0
    dim = _longer(one, three)
    if dim is None or not torch.allclose(
        torch.cat([one, one, last], dim), three, rtol=1e-9, atol=1e-12, equal_nan=True
    ):
        return None
    return dim


def _longer(one: Tensor, three: Tensor) -> int | None:
    """The one dimension that is three times as long."""
    if one.dim() != three.dim():
        return None
    differ = [dim for dim, (a, b) in enumerate(zip(one.shape, three.shape)) if a != b]
    return differ[0] if len(differ) == 1 and three.shape[differ[0]] == 3 * one.shape[differ[0]] else None


def _larger(call: Call, size: int, count: int, last: Call) -> Call:
    """Every extent of `size`, and every int of that value, `count` times as large; the last of each from `last`."""

    def change(value: Any, at_last: Any) -> Any:
        if isinstance(value, Tensor):
            dim = list(value.shape).index(size) if size in value.shape else None
            larger = value.detach() if dim is None else _repeated(value.detach(), dim, count)
            if dim is not None:
                larger.narrow(dim, size * (count - 1), size).copy_(at_last.detach())
            return larger.requires_grad_(value.requires_grad)
        return size * count if type(value) is int and value == size else value

    args, kwargs = tree_map(change, (call.args, call.kwargs), (last.args, last.kwargs))
    return Call(*args, **kwargs)


def _repeated(tensor: Tensor, dim: int, count: int) -> Tensor:
    return tensor.repeat([count if d == dim else 1 for d in range(tensor.dim())])


def _part(result: Tensor, dim: int, number: int, count: int) -> Tensor:
    length = result.shape[dim] // count
    return result.detach().narrow(dim, number * length, length)


# --- memory -----------------------------------------------------------------------------------------------------------


def _memory_for_each(case: Case, repetition: Repetition, probe: int) -> float:
    """Bytes that a repetition takes, by the use of a smaller call; 0 on a CPU, where nothing tells."""
    if case.device.type != "cuda":
        return 0.0
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(case.device)
    torch.cuda.reset_peak_memory_stats(case.device)
    repetition.run(case.target.function, probe)
    return _SPARE * (torch.cuda.max_memory_allocated(case.device) - before) / probe


def _free(case: Case) -> int:
    if case.device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(case.device)
    return free


def _release(case: Case) -> None:
    if case.device.type == "cuda":
        torch.cuda.empty_cache()
