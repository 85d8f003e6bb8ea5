"""Memory: what is written, what is left alone, what is kept and for how long."""

from __future__ import annotations

import gc
import inspect
from typing import Any

import torch
from torch import Tensor

from ..._kernel.kernel import FLOATING
from ..._simulate import simulate
from ..call import INFERENCE, Call, Outcome, gradients, inference, tensors_of
from ..case import Case
from ..guards import HUGE, NAN, Guards, Poison, Poisoned
from ..hazard import Failure, NotApplicable, hazard, told
from ..numbers import neutral, other_numbers
from ..recast import cast
from ..refusals import unless_refused
from ..tolerance import name
from ..unchanged import Births, Unchanged, attributes, different_bits, functions, same_bits, saved, shared, storages

_ROUNDS = 4  # of calls whose memory is looked for afterwards
_SEEDS = range(1, 6)  # of orders in which the simulator runs blocks and warps
_CALLS = 10  # between two looks at how much memory is in use


@hazard("nothing outside an input, an output, a gradient or a scratch tensor is written, forward or backward")
def guard_zones(case: Case) -> None:
    """Inputs, and what Python code allocates, have 4 KiB of a known pattern on both sides."""
    if case.backend == "simulator":
        raise NotApplicable("the simulator checks each access of a kernel")
    if case.backend == "reference" and case.target.operator is not None:
        raise NotApplicable("no kernel runs")
    with Guards() as guards:
        outcome = case.through(guards.around(case.call))
        outcome.inference = case.inference(guards.around(case.call))
    if not guards.fenced:
        raise NotApplicable("there is no memory to guard")
    guards.check(outcome.named())


@hazard("results are the same whatever their memory, and that of scratch tensors, held before")
def unwritten_outputs(case: Case) -> None:
    """Memory from `torch.empty` holds NaN in one run, huge values in another: an element never written differs."""
    filled = _filled(case, NAN), _filled(case, HUGE)
    try:
        same_bits(*filled, "with memory full of NaN, then of huge values")
    except Failure:
        # of an operator that never gives the same bits twice, NaN still shows
        again = _filled(case, HUGE)
        if all(_agree(a, b) for (_, a), (_, b) in zip(again.named(), filled[1].named())):
            raise
        for (what, a), (_, b) in zip(*(outcome.named() for outcome in filled)):
            if a is not None and b is not None and (found := different_bits(a.isnan(), b.isnan())):
                raise Failure(f"{what} is NaN where its memory was: {found}") from None


def _filled(case: Case, poison: Poison) -> Outcome:
    call, memory = case.call.relaid(), Poisoned(poison)
    with memory:
        outputs = tensors_of(call.of(case.target.function))
    grads = case.grads(outputs)
    with memory:
        outcome = Outcome(outputs, gradients(outputs, call, grads), case.inference(case.call.relaid()))
    if not memory.count:
        raise NotApplicable("nothing is allocated by torch.empty in Python")
    return outcome


def _agree(a: Tensor | None, b: Tensor | None) -> bool:
    return a is None or b is None or not different_bits(a, b)


@hazard("inputs, outputs, incoming gradients and saved tensors keep their values and version counters")
def inputs_unchanged(case: Case) -> None:
    """Watch tensors through forward and backward. What the reference changes too is meant to change."""
    if _arguments(case).get("inplace"):
        raise NotApplicable("asked to work in place")
    call, watch = case.call.relaid(), Unchanged()
    watch.add("input", call.all_tensors())
    outputs = tensors_of(call.of(case.target.function))
    _unchanged(case, call, watch, "forward")
    grads = case.grads(outputs)
    watch.add("output", outputs)
    watch.add("incoming gradient", grads)
    watch.add("saved tensor", [tensor for node in functions(outputs) for tensor in saved(node)])
    gradients(outputs, call, grads)
    _unchanged(case, call, watch, "backward")
    call, watch = case.call.relaid(), Unchanged()
    watch.add("input", call.all_tensors())
    case.inference(call)
    _unchanged(case, call, watch, f"forward{INFERENCE}")


def _unchanged(case: Case, call: Call, watch: Unchanged, by: str) -> None:
    try:
        watch.check(by)
    except Failure:
        watch.check(by, except_for=_meant_to_change(case, call))


def _meant_to_change(case: Case, call: Call) -> list[Tensor]:
    """The inputs that the reference changes."""
    theirs = case.call.relaid()
    theirs.of(case.target.reference)
    changed = [different_bits(a, b) for a, b in zip(case.call.all_tensors(), theirs.all_tensors())]
    return [tensor for tensor, one in zip(call.all_tensors(), changed) if one]


@hazard("on the same tensors, after other values were written into them, the result is that of the new values")
def other_values_in_place(case: Case) -> None:
    """A step of an optimizer does so: what was computed of a tensor must not outlive its values."""
    leaves, other = case.call.leaves(), case.varied()
    for _ in range(_ROUNDS):
        case.through(leaves), case.inference(leaves)
    _write(leaves, other)
    outcome = case.through(leaves)
    _write(leaves, other)  # again: a function may be meant to change what it is given
    outcome.inference = case.inference(leaves)
    case.judge(outcome, other)


def _write(call: Call, values: Call) -> None:
    with torch.no_grad():
        for tensor, others in zip(call.all_tensors(), values.all_tensors()):
            tensor.copy_(others)


@hazard("with inplace=True the result is the input itself, its version counter tells, and a leaf is refused")
def declared_inplace(case: Case) -> None:
    """Check functions that have an argument of that name."""
    if "inplace" not in _arguments(case):
        raise NotApplicable("has no argument inplace")
    leaves = _with_inplace(case, case.call.relaid())
    first, wanted = leaves.all_tensors()[0], leaves.tensors()
    call = leaves.map(lambda t: t.clone() if t is first else t)
    target = call.all_tensors()[0]
    version = target._version
    outputs = tensors_of(call.of(case.target.function))
    if outputs[0].data_ptr() != target.data_ptr():
        raise Failure("the result is not in the input's memory")
    if target._version == version:
        raise Failure(f"the input's version counter is still {version}: PyTorch cannot tell that it was changed")
    case.same_as_plain(Outcome(outputs, gradients(outputs, leaves, case.grads(outputs))))
    if any(tensor is first for tensor in wanted):
        _refuses_leaf(case)


def _refuses_leaf(case: Case) -> None:
    call = _with_inplace(case, case.call.relaid())
    try:
        call.of(case.target.function)
    except RuntimeError:
        return
    raise Failure("a leaf that requires a gradient was overwritten; PyTorch refuses that with a RuntimeError")


def _with_inplace(case: Case, call: Call) -> Call:
    bound = inspect.signature(case.target.function).bind(*call.args, **call.kwargs)
    bound.arguments["inplace"] = True
    return call.like(bound.args, bound.kwargs)


def _arguments(case: Case) -> dict[str, Any]:
    """The arguments by name, defaults filled in; none where the function shows no signature."""
    try:
        bound = inspect.signature(case.target.function).bind(*case.call.args, **case.call.kwargs)
    except (TypeError, ValueError):
        return {}
    bound.apply_defaults()
    return dict(bound.arguments)


@hazard("no output lies in the memory of an input or of another output, unless the reference's does")
def outputs_do_not_alias(case: Case) -> None:
    """Inductor takes that for granted; and who changes one in place changes the other.

    A function may have nothing to do for one value of a number, in one dtype, for contiguous or for single elements.
    """
    _judge_aliases(case, case.call)
    dense = case.call.map(lambda t: t.detach().contiguous().clone().requires_grad_(t.requires_grad))
    others = [(dense, "contiguous inputs"), (one_element(case.call), "single elements")]
    others += [(case.call.map_floating(lambda t: cast(t, dtype)), name(dtype)) for dtype in FLOATING]  # noqa: B023
    for call, what in (*others, *other_numbers(case, neutral)):
        with told(f"with {what}"), unless_refused():  # for others to judge
            case.theirs(call)
            _judge_aliases(case, call)


def _judge_aliases(case: Case, call: Call) -> None:
    for when, way in (("", lambda function, leaves: tensors_of(leaves.of(function))), (INFERENCE, inference)):
        found = []
        for function in (case.target.function, case.target.reference):
            leaves = call.relaid()
            found.append(shared(way(function, leaves), leaves.all_tensors()))
        if extra := sorted(found[0] - found[1]):
            raise Failure("; ".join(f"{a} lies in the memory of {b}{when}" for a, b in extra))


def one_element(call: Call) -> Call:
    """The call with every size made 1."""
    for size in {n for tensor in call.all_tensors() for n in tensor.shape if n > 1}:
        call = call.resized(size, 1)
    return call


@hazard("the same call gives the same bits, at once and after other work")
def deterministic(case: Case) -> None:
    """Forward and backward. Between the second and the third run: a call with other values, and other memory in use.

    The simulator runs blocks and warps in several other orders too: a sum by atomicAdd rounds in the order of its terms.
    """
    operator = case.target.operator
    declared = operator.definition.nondeterministic if operator is not None else ""
    try:
        _same_from_call_to_call(case)
    except Failure as failure:
        if declared:
            raise NotApplicable(f"declared to be nondeterministic ({declared})") from failure
        if operator is None or case.backend == "reference":
            raise
        raise Failure(
            f"{failure}. Add up in a fixed order, or say so: cupyops.operator({operator.name!r}, nondeterministic=...)"
        ) from failure


def _same_from_call_to_call(case: Case) -> None:
    for way in case.ways:
        first = way(case.call)
        same_bits(first, way(case.call), "of the same call twice")
        other = way(case.varied()), [torch.ones(1000 * n, device=case.device) for n in range(1, 8)]
        same_bits(first, way(case.call), "of the same call before and after another")
        del other
        for seed in _SEEDS if case.backend == "simulator" else ():
            with simulate(seed=seed):
                again = way(case.call)
            same_bits(
                first, again, f"of the same call with its blocks and warps in another order, simulate(seed={seed})"
            )


@hazard("memory is given back: no call leaves a tensor alive that nobody holds")
def no_leak(case: Case) -> None:
    """Inputs, outputs, gradients, saved and scratch tensors. What is kept of the first or the last call alone may stay."""
    rounds = [_one_round(case) for _ in range(_ROUNDS)]
    if _leaking(rounds):
        gc.collect()  # a cycle is slow to go, but it goes
    if _leaking(rounds):
        counts = ", ".join(str(sum(storage() is not None for storage in one)) for one in rounds)
        raise Failure(f"of {_ROUNDS} calls that are over, so many storages are still alive: {counts}")
    if case.backend == "gpu":
        _no_growth(case)


def _leaking(rounds: list[list[Any]]) -> bool:
    return sum(any(storage() is not None for storage in one) for one in rounds) >= _ROUNDS - 1


def _one_round(case: Case) -> list[Any]:
    """Weak references to the memory of all that a call has to do with."""
    with Births() as births:
        call = case.call.relaid()
        outputs = tensors_of(call.of(case.target.function))
        kept = [tensor for node in functions(outputs) for tensor in saved(node)]
        grads = case.grads(outputs)
        found = gradients(outputs, call, grads)
        others = case.inference(call)
    return [*births.storages, *storages([*call.all_tensors(), *outputs, *kept, *grads, *found, *others])]


def _no_growth(case: Case) -> None:
    """Memory that Python does not see: twice some calls, and each time more of it in use."""
    used = []
    for calls in (2, _CALLS, _CALLS):
        for _ in range(calls):
            case.both_ways(case.call)
        gc.collect()
        torch.cuda.synchronize(case.device)
        used.append(torch.cuda.memory_allocated(case.device))
    if used[0] < used[1] < used[2]:
        raise Failure(f"bytes in use grow: {used[0]:,}, after {_CALLS} calls {used[1]:,}, after as many {used[2]:,}")


@hazard("a tensor kept for backward goes by save_for_backward, and is freed by it")
def saved_tensors_freed(case: Case) -> None:
    """One kept as an attribute of ctx lives as long as the output, and PyTorch does not notice if it is changed."""
    case.needs_gradient()
    call = case.call.relaid()
    outputs = tensors_of(call.of(case.target.function))
    nodes = list(functions(outputs))
    if not nodes:
        raise NotApplicable("there is no torch.autograd.Function of Python in the graph")
    gradients(outputs, call, case.grads(outputs))
    held = [f"ctx.{key} of {tuple(t.shape)} in {type(node).__name__}" for node in nodes for key, t in attributes(node)]
    if held:
        raise Failure(f"still held after backward: {', '.join(held)}")
