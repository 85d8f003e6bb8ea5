"""Devices: other threads, another GPU, tensors that are elsewhere; and the process that all of them share."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..._util import tracing
from ...errors import CupyopsError
from .. import state
from ..call import Call, Function, Outcome, gradients, inference, run, tensors_of
from ..case import Case
from ..hazard import GPU, Failure, NotApplicable, hazard
from ..tolerance import same_form

_ROUNDS = 5  # of calls in each of two threads
_SHOWN = 3  # changes of settings in a message


# --- threads ----------------------------------------------------------------------------------------------------------


@hazard("two threads that call at once, with different values, each get their own results")
def second_thread(case: Case) -> None:
    """Forward and backward, several times; Python changes threads as often as it can."""
    calls = case.call, case.varied()
    _ = case.slack  # what is known of the plain call is found out here, not in the threads
    rounds = 1 if case.backend == "simulator" else _ROUNDS
    start = threading.Barrier(len(calls))

    def work(call: Call) -> list[Outcome]:
        start.wait()
        outcomes = [case.both_ways(call) for _ in range(rounds)]
        _wait(case)
        return outcomes

    with _busy_switching(), ThreadPoolExecutor(len(calls)) as pool:
        found = [pool.submit(work, call) for call in calls]
    for call, outcomes in zip(calls, found):
        for outcome in outcomes.result():
            case.judge(outcome, call)


@hazard("backward can be called in another thread than the forward")
def backward_thread(case: Case) -> None:
    """Data-parallel training does so, and PyTorch itself for every CUDA tensor."""
    case.needs_gradient()
    call = case.call.relaid()
    outputs = tensors_of(call.of(case.target.function))
    grads = case.grads(outputs)
    _wait(case)

    def work() -> list[Tensor | None]:
        found = gradients(outputs, call, grads)
        _wait(case)
        return found

    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(work).result()
    case.same_as_plain(Outcome(outputs, found))


def _wait(case: Case) -> None:
    """Wait until the GPU is done, where the case is on one."""
    if case.device.type == "cuda":
        torch.cuda.synchronize(case.device)


@contextmanager
def _busy_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


# --- elsewhere --------------------------------------------------------------------------------------------------------


@hazard("tensors on one GPU while another is current give the same result, and the current one stays current", GPU)
def second_device(case: Case) -> None:
    """Forward and backward."""
    if torch.cuda.device_count() < 2:
        raise NotApplicable("needs two GPUs")
    here = case.device
    there = torch.device("cuda", (here.index + 1) % torch.cuda.device_count())
    call = case.call.map(lambda t: t.detach().to(there).requires_grad_(t.requires_grad))
    with torch.cuda.device(here):
        outcome = case.both_ways(call)
        current = torch.cuda.current_device()
        torch.cuda.synchronize(there)
    if current != here.index:
        raise Failure(f"afterwards cuda:{current} is current; cuda:{here.index} was before")
    case.judge(outcome, call)


@hazard("on meta tensors, the form of the reference's results or an error", launches=False)
def meta_tensors(case: Case) -> None:
    """Tensors without memory: their data pointer is 0, without an error."""
    call = case.call.map(lambda t: torch.empty_like(t, device="meta", requires_grad=t.requires_grad))
    if not call.all_tensors():
        raise NotApplicable("no tensor")
    theirs = case.theirs(call)
    theirs = case.theirs(call, case.grads(theirs.outputs))
    try:
        ours = case.through(call)
    except (RuntimeError, ValueError, TypeError) as error:
        if case.target.operator is None or isinstance(error, CupyopsError):
            return
        raise
    if len(ours.outputs) != len(theirs.outputs):
        raise Failure(f"{len(ours.outputs)} outputs, the reference has {len(theirs.outputs)}")
    for (what, a), (_, b) in zip(ours.named(), theirs.named(), strict=True):
        if a is not None and b is not None:
            same_form(a, b, what)


@hazard("with a tensor on another device, an error and no launch, unless the reference takes it", launches=False)
def mixed_devices(case: Case) -> None:
    """Each tensor in turn, but not one number alone, which PyTorch takes from anywhere."""
    tensors = case.call.all_tensors()
    moved = [index for index, tensor in enumerate(tensors) if tensor.dim() and tensor.numel()]
    if len(tensors) < 2 or not moved:
        raise NotApplicable("there are not two tensors, one of which could be elsewhere")
    other = "cpu" if case.device.type == "cuda" else "meta"
    for index in moved:
        _mix(case, _with_one_on(case.call, index, other), f"with input {index} on {other}, others on {case.device}")


def _mix(case: Case, call: Call, situation: str) -> None:
    accepted = _accepted(case.target.function, call)
    _wait(case)  # a kernel that read a pointer of the other device fails here
    with tracing.trace() as trace:
        _accepted(case.target.function, call)
    if launched := trace.launches():
        raise Failure(f"{situation}: {launched[0].kernel} was launched")
    if accepted is None:
        return
    theirs = _accepted(case.target.reference, call)
    if theirs is None:
        raise Failure(f"{situation}: a result and no error; the reference refuses")
    for number, (ours, expected) in enumerate(zip(accepted, theirs, strict=True)):
        same_form(ours, expected, f"{situation}: output {number}")


def _accepted(function: Callable[..., Any], call: Call) -> list[Tensor] | None:
    """The outputs; None if the call was refused."""
    try:
        return tensors_of(call.leaves().of(function))
    except Exception:  # any is an answer
        return None


def _with_one_on(call: Call, index: int, device: str) -> Call:
    numbers = iter(range(len(call.all_tensors())))
    move = lambda t: t.detach().to(device).requires_grad_(t.requires_grad)  # noqa: E731
    return call.map(lambda t: move(t) if next(numbers) == index else t)


# --- the process ------------------------------------------------------------------------------------------------------


@hazard("no call changes a setting of the process, or the state of random numbers that the reference leaves alone")
def global_state(case: Case) -> None:
    """Settings are compared, and set back, around every hazard; around this one, where the plain call is made again."""
    before = state.settings()
    _random_numbers(case)
    here = [("the call", one) for one in state.restored(before)]
    if found := [*here, *case.changes]:
        raise Failure("; ".join(f"{what} (by {where})" for where, what in found[:_SHOWN]))


def _random_numbers(case: Case) -> None:
    """Raise `Failure` where the function draws numbers and the reference does not, or sets a seed."""
    at_first = state.generators()
    try:
        drawn, again = (_moved(case, case.target.function, start) for start in range(2))
        theirs = _moved(case, case.target.reference, 0)
    finally:
        state.set_back(at_first)
    for name in sorted(drawn.keys() - theirs.keys()):
        raise Failure(f"{name} was changed, which the reference leaves alone")
    for name in sorted(drawn.keys() & again.keys()):
        if not state.moved({name: drawn[name]}, {name: again[name]}):
            raise Failure(f"{name} is the same after two calls in turn: random numbers were seeded anew")


def _moved(case: Case, function: Function, start: int) -> dict[str, Any]:
    """The states in which forward and backward leave the generators that they move from a state of this number."""
    state.scramble(start)
    before = state.generators()
    run(function, case.call.relaid(), case.grads)
    inference(function, case.call.relaid())
    after = state.generators()
    return {name: after[name] for name in state.moved(before, after)}
