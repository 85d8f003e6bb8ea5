"""Conversion of two equal recordings to a plan: the function that checks a call's signature and replays it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._util import torch_private
from . import interpreter
from .autograd import ForwardCall, will_be_used
from .codegen import Writer
from .constants import MISS, Ref
from .guard import executor, globals_of, miss_if, modes, surroundings, tensors, values
from .kept import Pooled
from .parameters import Addresses, Machine
from .replay import Body, Retry, Unfit, leave_on_error, needed
from .steps import Alloc, Inner, Recording, filled, numbers_in

machines: dict[str, Callable[[torch.device], Machine]] = {"cuda": Machine}
"""Functions that generated code calls, by type of device; where there are none, recordings are interpreted."""


class Plan:
    """Function that replays one signature, with its recording.

    Attributes:
        entry: the function of the call's arguments; it gives MISS where they are of another signature.
        recording: what it replays; None where it makes the call the plain way.
        call: what backward has to know, where a gradient is wanted.
    """

    def __init__(
        self, entry: Callable[..., Any], recording: Recording | None = None, call: ForwardCall | None = None
    ) -> None:
        self.entry, self.recording, self.call = entry, recording, call


def plain(title: str, made: Callable[..., Any], args: Sequence[Any], with_numbers: bool, aligned: bool) -> Plan:
    """A plan that makes the call the plain way, by `made`: it stands for a signature that is given up."""
    writer, names = Writer(), [f"_a{index}" for index in range(len(args))]
    if with_numbers:
        values(writer, names, args)
    tensors(writer, names, args)
    executor(writer, next(one for one in args if isinstance(one, Tensor)).device)
    if not aligned:
        modes(writer)
    else:
        addresses = " | ".join(f"{name}.data_ptr()" for name, one in zip(names, args) if isinstance(one, Tensor))
        miss_if(writer, f"({addresses}) & 15")
    writer.line(f"return {writer.name(made)}({', '.join(names)})")
    return Plan(writer.function(title, ", ".join(names)))


def plan(owner: Any, args: Sequence[Any], recording: Recording, call: ForwardCall | None) -> Plan:
    """The plan of a recording of `owner.plain(*args)`; `call`, where a gradient is wanted."""
    names = [f"_a{index}" for index in range(len(args))]
    code = _Code(args[owner.first].device, names, args, recording)
    code.guard([*owner.authors(), *[one.forward for one in recording.operators]])
    if recording.inner is None:
        code.whole(recording.result)
    else:
        assert call is not None
        code.around(recording.inner, call)
    return Plan(code.writer.function(f"{owner.name} (recorded)", ", ".join(names)), recording, call)


def backward(
    call: ForwardCall,
    kept: Sequence[Any],
    grads: Sequence[Any],
    needs: tuple[bool, ...],
    last: bool,
    recording: Recording,
) -> Callable[..., Any]:
    """The code of a recorded backward, a function of ctx, the tensors kept and the gradients."""
    of = call.of
    names = [f"_g{index}" for index in range(len(grads))], [f"_s{index}" for index in range(len(kept))]
    given = next(value for value in (*grads, *kept) if value is not None)
    code = _Code(given.device, [*names[0], *names[1]], (*grads, *kept), recording)
    if kept:
        code.writer.line("".join(f"{name}, " for name in names[1]) + "= _tensors")
    if len(of.tensors) > 1:
        asked = "_ctx.needs_input_grad"
        if call.chooses((*grads, *kept)):
            given = tuple(index in call.given for index in of.tensors)
            asked = f"{code.writer.name(will_be_used)}(_ctx, {code.writer.name(given)}, {code.writer.name(needs)})"
        miss_if(code.writer, f"{asked} != {code.writer.name(needs)}")
    if of.backward_asks:
        miss_if(code.writer, f"{code.writer.name(torch_private.keeps_graph)}() is {last}")
    assert of.launch_backward is not None
    code.guard([of.launch_backward.launch])
    code.whole((None, *recording.result))
    return code.writer.function(f"{of.name} (recorded backward)", ", ".join(("_ctx", "_tensors", *names[0])))


class _Code:
    """Writer of a plan's function: the conditions under which it does not apply, then the recorded steps, in a `try:`."""

    def __init__(self, device: torch.device, names: Sequence[str], args: Sequence[Any], recording: Recording) -> None:
        self.device, self.names, self.args, self.recording = device, names, args, recording
        self.inputs: dict[int, str] = {}  # the names of the tensors that come in, by their numbers
        self.examples: dict[int, Tensor] = {}
        known: dict[int, int] = {}
        for name, value in zip(names, args):
            if isinstance(value, Tensor) and id(value) not in known:
                number = known[id(value)] = len(known)
                self.inputs[number], self.examples[number] = name, value
        self.addresses = Addresses(recording)
        self.writer = Writer()
        self.writer.block("try:")
        self.leave = f"return {self.writer.name(MISS)}"
        make = machines.get(device.type)
        self.machine = None if make is None else make(device)

    def guard(self, authors: Sequence[Any]) -> None:
        """Write the conditions under which a call leaves the plan."""
        values(self.writer, self.names, self.args)
        tensors(self.writer, self.names, self.args)
        surroundings(self.writer, self.device, self.recording.asks_default_dtype)
        self.writer.scope = globals_of(self.writer, authors)
        self._addresses(self.addresses.roots(self.recording.steps))

    def whole(self, result: Any) -> None:
        """All steps, then `result`."""
        steps = self.recording.steps
        if self.machine is None:
            leave_on_error(self.writer, self.leave)
            self.writer.line(f"return {self._interpreter(result)}({', '.join(self.inputs.values())})")
            return
        body = Body(self.writer, self.machine, self.addresses, self.inputs, self.leave)
        body.write(steps, needed(steps, numbers_in(result)), {}, self.addresses.roots(steps))
        self.writer.line(f"return {body.expression(result)}")

    def around(self, inner: Inner, call: ForwardCall) -> None:
        """The steps before the operator, then autograd.Function, which runs its forward."""
        apply = inner.operator.apply
        given = [inner.args[index] for index in inner.operator.tensors]
        steps = self.recording.steps[: inner.start]
        if self.machine is None:
            forward = self.writer.name(_interpreted_forward(self.recording, inner, call, self.device))
            before = self.writer.name(_interpreter(steps, given, self.device))
            self.writer.line(f"_tensors = {before}({', '.join(self.inputs.values())})")
            leave_on_error(self.writer, self.leave)
            self.writer.line(f"return {self.writer.name(apply)}(({forward},), *_tensors)")
            return
        body = Body(self.writer, self.machine, self.addresses, self.inputs, self.leave)
        numbers = set(numbers_in(given))
        roots = self.addresses.roots(self.recording.steps)
        run, passed = _forward(self.machine, self.recording, inner, call, self.addresses, numbers)
        if any(isinstance(one, Pooled) for one in call.saved or ()):
            miss_if(self.writer, f"{self.writer.name(torch_private.saved_tensors_hooks)}(True) is not None")
        body.write(steps, needed(steps, numbers), {}, roots)
        texts = [self.writer.name(run), *(self.addresses.text(self.writer, one) for one in passed)]
        self.writer.block("try:")
        self.writer.line(
            f"return {self.writer.name(apply)}(({', '.join(texts)},), {', '.join(map(body.expression, given))})"
        )
        self.writer.end()
        self.writer.block(f"except {self.writer.name(Retry)}:")
        self.writer.line(self.leave)
        self.writer.end()

    def _interpreter(self, result: Any) -> str:
        return self.writer.name(_interpreter(self.recording.steps, result, self.device))

    def _addresses(self, roots: set[int]) -> None:
        """Write the inputs' addresses; the plan does not apply if one has another alignment or no memory."""
        writer = self.writer
        asked = {number: (most, rest) for number, most, rest in self.recording.alignments}
        conditions = []
        even: dict[int, list[str]] = {}
        for number, name in self.inputs.items():
            if number not in roots and number not in asked:
                continue
            writer.line(f"_p{number} = {name}.data_ptr()")
            most, rest = asked.get(number, (1, 0))
            if self.examples[number].numel():
                conditions.append(f"not _p{number}")
            if rest:
                conditions.append(f"_p{number} & {most - 1} != {rest}")
            elif most > 1:
                even.setdefault(most - 1, []).append(f"_p{number}")
        conditions += [f"({' | '.join(names)}) & {mask}" for mask, names in even.items()]
        if conditions:
            miss_if(writer, " or ".join(conditions))


def _forward(
    machine: Machine, recording: Recording, inner: Inner, call: ForwardCall, addresses: Addresses, given: set[int]
) -> tuple[Callable[..., Any], list[int]]:
    """Return the code of an operator's forward, and the tensors whose addresses it takes after itself."""
    op, steps = inner.operator, recording.steps[inner.start : inner.end]
    writer = Writer()
    names: dict[int, str] = {}
    for index in op.tensors:
        if isinstance(inner.args[index], Ref):
            names.setdefault(inner.args[index].number, f"_i{index}")
    roots = addresses.roots(steps)
    made = {number for step in steps for number in _tensors_made(step)}
    passed = sorted({addresses.of(number)[0] for number in given} & roots)
    if not roots <= made | set(passed):
        raise Unfit("its forward uses a tensor that is none of the operator's arguments")
    kept = inner.kept
    inputs = [inner.args[index] for index in kept.inputs]
    outputs = [Ref(inner.outputs[index]) for index in kept.outputs]
    tensors_ = needed(steps, [*numbers_in([*inputs, *outputs]), *inner.outputs])
    pooled = _pools(op, inner, steps, tensors_)
    tensors_ = needed(steps, [*tensors_, *(one for one in inner.saved if one not in pooled)])
    writer.line("".join(f"{name}, " for name in ("_", *(f"_p{number}" for number in passed))) + "= _run")
    writer.block("try:")
    body = Body(writer, machine, addresses, names, f"raise {writer.name(Retry)}() from _error")
    body.write(steps, tensors_, pooled, roots)
    saved, call.saved = _laid_out(steps, inner, pooled, addresses, kept.before_saved)
    writer.line(f"_ctx.call = {writer.name(call)}")
    texts = [body.expression(one) for one in (*inputs, *outputs)] + [
        one if isinstance(one, str) else body.name(one) for one in saved
    ]
    writer.line(f"_ctx.to_save = ({''.join(text + ', ' for text in texts)})")
    exact = [body.name(number) for number, floating in zip(inner.outputs, inner.floating) if not floating]
    if exact:
        writer.line(f"_ctx.mark_non_differentiable({', '.join(exact)})")
    results = [body.name(number) for number in inner.outputs]
    writer.line(f"return {results[0]}" if len(results) == 1 else f"return ({', '.join(results)})")
    parameters = ", ".join(("_ctx", "_run", *(f"_i{index}" for index in op.tensors)))
    return writer.function(f"{op.name} (recorded forward)", parameters), passed


def _pools(op: Any, inner: Inner, steps: Sequence[Any], tensors_: set[int]) -> dict[int, str]:
    """Assign saved tensors to shared allocations, by dtype: memory of forward's own that launches alone see.

    None where hooks on saved tensors are open: they are to see as many tensors as the roles save, and of their sizes, since
    checkpoint compares them.
    """
    if torch_private.saved_tensors_hooks(True) is not None:
        return {}
    allocs = {step.number: step for step in steps if isinstance(step, Alloc)}
    by_dtype: dict[torch.dtype, list[int]] = {}
    for place, number in enumerate(inner.saved):
        alone = number in allocs and number not in tensors_ and inner.saved.count(number) == 1
        if alone and place not in op.unpooled:
            by_dtype.setdefault(allocs[number].dtype, []).append(number)
    groups = [numbers for numbers in by_dtype.values() if len(numbers) > 1]
    return {number: f"_w{index}" for index, numbers in enumerate(groups) for number in numbers}


def _laid_out(
    steps: Sequence[Any], inner: Inner, pooled: dict[int, str], addresses: Addresses, first: int
) -> tuple[list[str | int], list[int | Pooled]]:
    """Return (names of pools and numbers of tensors to keep for `saved`, the place of each saved tensor among them)."""
    allocs = {step.number: step for step in steps if isinstance(step, Alloc)}
    stored: list[str | int] = []
    places: list[int | Pooled] = []
    for number in inner.saved:
        pool = pooled.get(number)
        if pool is None:
            places.append(first + len(stored))
            stored.append(number)
            continue
        if pool not in stored:
            stored.append(pool)
        alloc = allocs[number]
        start = addresses.shared[number][1] // alloc.dtype.itemsize
        places.append(Pooled(first + stored.index(pool), start, alloc.size, alloc.stride))
    return stored, places


def _tensors_made(step: Any) -> list[int]:
    """The numbers of the tensors that a step makes."""
    if isinstance(step, Alloc):
        return [step.number]
    return [number for number in getattr(step, "results", ()) if number is not None]


def _interpreter(steps: Sequence[Any], result: Any, device: torch.device) -> Callable[..., Any]:
    def interpret(*inputs: Tensor) -> Any:
        tensors_ = dict(enumerate(inputs))
        interpreter.run(steps, tensors_, device)
        return filled(result, tensors_)

    return interpret


def _interpreted_forward(
    recording: Recording, inner: Inner, call: ForwardCall, device: torch.device
) -> Callable[..., Any]:
    op, steps = inner.operator, recording.steps[inner.start : inner.end]
    kept = inner.kept

    def forward(ctx: Any, run: Any, *given: Any) -> Any:
        tensors_ = {inner.args[index].number: tensor for index, tensor in zip(op.tensors, given) if tensor is not None}
        interpreter.run(steps, tensors_, device)
        outputs = tuple(tensors_[number] for number in inner.outputs)
        ctx.call = call
        ctx.to_save = kept.pack(filled(inner.args, tensors_), outputs, [tensors_[number] for number in inner.saved])
        ctx.mark_non_differentiable(*[y for y, floating in zip(outputs, inner.floating) if not floating])
        return outputs[0] if op.outputs == 1 else outputs

    return forward
