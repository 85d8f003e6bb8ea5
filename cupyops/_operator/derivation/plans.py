"""Recorded plans: what a call does on the host, found once for a signature and replayed afterwards.

The first call of a signature is made the plain way, the second and third are recorded; where the two recordings are equal, a
function is written that checks the signature and replays them. What cannot be replayed is remembered with the reason, and
goes the plain way. Without a gradient a plan is the whole of the public function; with one it is the operator's forward, and
the plans of its backward hang on it.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from ..._kernel.kernel import executors
from ..._kernel.launch import reload
from ..._util import observed, settings, torch_private
from . import build
from .autograd import ForwardCall, batched
from .constants import NoConstant, freeze
from .overrides import of_layout

# Below, recorder and code generation are imported at first use: programs that only import should not pay for them.
if TYPE_CHECKING:
    from .build import Plan
    from .steps import Recording

MOST, MOST_IN_ALL = 256, 4096  # plans of a function, and of the process
MOST_NUMBERS = 8  # signatures of the same tensors with other numbers: more would be recorded for ever
MOST_SEEN = 1024  # signatures that are remembered and have no plan yet
_TRIES = 3  # recordings that differ, or plans that do not last, before a signature is given up

_ORDINARY = (Tensor, Parameter)
_everywhere: OrderedDict[int, tuple[weakref.ref[Plans], Hashable, Any]] = OrderedDict()
_changing = threading.RLock()
_all: weakref.WeakSet[Plans] = weakref.WeakSet()


@contextmanager
def plans(enabled: bool = True) -> Iterator[None]:
    """Allow or forbid that calls inside are replayed from recorded plans; for the whole process.

    A plan is what a call does on the host: its checks, allocations and launches, recorded for a signature (shapes, strides,
    dtypes, alignments, numbers, modes) and replayed for calls alike. `CUPYOPS_PLANS=0` turns plans off for a whole program.

    Args:
        enabled: False to have every call made in full, as its Python says. True changes nothing, not even inside
            `plans(False)`.

    Example:
        >>> with cupyops.plans(enabled=False):
        ...     y = cupyops.relu(torch.tensor([-1.0, 2.0]))
    """
    if enabled:
        yield
        return
    observed.go_plainly()
    try:
        yield
    finally:
        observed.go_plainly(-1)


def forget_all() -> None:
    """Forget every plan and every signature seen; of functions that are gone, too."""
    for one in list(_all):
        one.forget()
    with _changing:
        for number in [number for number, (owner, *_) in _everywhere.items() if owner() is None]:
            _everywhere.pop(number)


observed.call_when_settings_change(forget_all)


class Seen:
    """State of a signature that has no plan."""

    def __init__(self) -> None:
        self.calls = 0
        self.recording: Recording | None = None
        self.tries = 0
        self.reason = ""  # why it is given up


class History:
    """Progress of each signature towards a plan."""

    def __init__(self, backward: bool) -> None:
        self._backward = backward
        self.seen: OrderedDict[Hashable, Seen] = OrderedDict()

    def of(self, key: Hashable) -> Seen:
        """Return the state of a signature; make it at its first call."""
        with _changing:
            found = self.seen.get(key)
            if found is None:
                if len(self.seen) >= MOST_SEEN:
                    self.seen.popitem(last=False)
                found = self.seen[key] = Seen()
            return found

    def call(
        self,
        seen: Seen,
        inputs: Sequence[Tensor],
        function: Callable[[], Any],
        build_plan: Callable[[Recording], None],
    ) -> Any:
        """`function()`, recorded where that is its turn; `build_plan` takes a recording that another one equals."""
        if seen.calls == 0 and not self._backward:
            seen.calls = 1
            return function()
        from .recorder import Recorder
        from .replay import Unfit

        recorder = Recorder(inputs, launches=not self._backward)
        result, recording = recorder.run(function)
        seen.calls += 1
        if recording is None:
            seen.reason = "" if recorder.passing else recorder.reason
        elif seen.recording is None:
            seen.recording = recording
        elif recording == seen.recording:
            seen.tries += 1
            seen.recording = None
            try:
                build_plan(recording)
            except Unfit as why:
                seen.reason = str(why)
            except Exception as error:  # the call has its result; PyTorch's private names may have changed
                seen.reason = f"no plan can be made of it: {type(error).__name__}: {error}"
        else:
            seen.tries += 1
            seen.recording = recording
        if seen.tries > _TRIES and not seen.reason:
            seen.reason = "what it does differs between calls alike"
        return result


class Plans:
    """The plans of one function: an operator, or the public face of one.

    Args:
        plain: the call made in full, of its arguments in order.
        first: the place of the first tensor, by whose shape plans are looked up.
        authors: the functions whose globals a plan depends on.
        suspends: whether plans inside are not to be made meanwhile: those of the operators that a public function calls.
        settled: for arguments whose signature is given up, and the reason, the function that makes calls alike: of the same
            signature if the flag is True, else of the same tensors with any other arguments.
    """

    def __init__(
        self,
        name: str,
        plain: Callable[..., Any],
        first: int,
        authors: Callable[[], Sequence[Any]],
        suspends: bool = False,
        settled: Callable[[tuple[Any, ...], str, bool], Callable[..., Any]] | None = None,
    ) -> None:
        self.name, self.plain, self.first, self.authors, self.suspends = name, plain, first, authors, suspends
        self.settled = settled or (lambda args, reason, alike: plain)
        self.table: dict[Any, tuple[Callable[..., Any], ...]] = {}  # by shape: the code of plans, the latest first
        self.plans: OrderedDict[int, Plan] = OrderedDict()
        self.history = History(backward=False)
        self._variants: OrderedDict[Hashable, set[Hashable]] = OrderedDict()  # of signatures, the numbers seen
        _all.add(self)

    @property
    def reason(self) -> str:
        """Reason why the latest signature that was given up cannot be replayed."""
        return next((one.reason for one in reversed(self.history.seen.values()) if one.reason), "")

    def call(self, args: tuple[Any, ...]) -> Any:
        """Make a call for which no plan is found: without one, or recorded."""
        if observed.unplanned or not self._is_ordinary(args):
            return self.plain(*args)
        try:
            tensors, numbers = signature(args)
        except NoConstant:
            return self.plain(*args)
        key = tensors, numbers
        seen = self.history.of(key)
        if seen.reason:
            return self.plain(*args)
        if self._differ(tensors, numbers):
            seen.reason = "its numbers differ from call to call"
            self._give_up(args, seen.reason, with_numbers=False)
            return self.plain(*args)
        inputs = unique(args)
        result = self.history.call(seen, inputs, lambda: self._in_full(args), lambda found: self._add(args, found))
        if self.history.of(key).reason and torch_private.saved_tensors_hooks(True) is None:
            self._give_up(args, seen.reason, with_numbers=True)
        return result

    def _differ(self, tensors: Hashable, numbers: Hashable) -> bool:
        """Return True if the same tensors have come with so many different numbers that none is worth a plan."""
        with _changing:
            variants = self._variants.setdefault(tensors, set())
            if len(variants) <= MOST_NUMBERS:
                variants.add(numbers)
            if len(self._variants) > MOST_SEEN:
                self._variants.popitem(last=False)
            return len(variants) > MOST_NUMBERS

    def _in_full(self, args: tuple[Any, ...]) -> Any:
        if not self.suspends:
            return self.plain(*args)
        observed.go_plainly()
        try:
            return self.plain(*args)
        finally:
            observed.go_plainly(-1)

    def _is_ordinary(self, args: tuple[Any, ...]) -> bool:
        """Return True if the call is of a kind that plans are made for."""
        first = args[self.first]
        if type(first) not in _ORDINARY or first.device.type not in executors or not torch_private.available:
            return False
        if any(isinstance(value, Tensor) and type(value) not in _ORDINARY for value in args) or of_layout(args):
            return False
        if torch_private.functorch_active() or torch_private.dispatch_modes() or torch_private.forward_mode():
            return False
        return not (torch_private.opaque_modes() or reload.wanted())

    def _add(self, args: tuple[Any, ...], recording: Recording) -> None:
        """A plan for calls like this one."""

        plan = build.plan(self, args, recording, PlannedCall.of_recording(recording))
        for definition in recording.operators:
            definition.dependents.add(self)
        self._insert(args[self.first].shape, plan)

    def _give_up(self, args: tuple[Any, ...], reason: str, with_numbers: bool) -> None:
        """Calls like this one are made the plain way, with no look at their signature."""

        made, title = self.settled(args, reason, with_numbers), f"{self.name} (not recorded)"
        aligned = isinstance(reason, observed.Faster)  # PyTorch's own kernels are asked, some of which need that
        if aligned and any(isinstance(one, Tensor) and one.data_ptr() % 16 for one in args):
            made, aligned = self.plain, False
        self._insert(args[self.first].shape, build.plain(title, made, args, with_numbers, aligned))

    def _insert(self, shape: Hashable, plan: Plan) -> None:
        with _changing:
            self.plans[id(plan)] = plan
            self.table[shape] = (plan.entry, *self.table.get(shape, ()))
            _everywhere[id(plan)] = weakref.ref(self), shape, plan
            while len(self.plans) > MOST:
                _drop(next(iter(self.plans)))
            while len(_everywhere) > MOST_IN_ALL:
                _drop(next(iter(_everywhere)))

    def remove(self, shape: Hashable, plan: Plan) -> None:
        """Forget one plan."""
        self.plans.pop(id(plan), None)
        left = tuple(entry for entry in self.table.get(shape, ()) if entry is not plan.entry)
        if left:
            self.table[shape] = left
        else:
            self.table.pop(shape, None)

    def forget(self) -> None:
        """Forget every plan and every signature: what they were recorded of has changed."""
        with _changing:
            self.table.clear()
            for plan in self.plans.values():
                if plan.call is not None:
                    plan.call.backwards = ()
                _everywhere.pop(id(plan), None)
            self.plans.clear()
            self.history.seen.clear()
            self._variants.clear()


class PlannedCall(ForwardCall):
    """Record of forwards that one plan has run, for their backwards; it holds the plans of backward."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.history = History(backward=True)

    @classmethod
    def of_recording(cls, recording: Recording) -> PlannedCall | None:
        """Make the record for the operator that a recording runs with a gradient; None where there is none."""
        inner = recording.inner
        if inner is None:
            return None
        return cls(inner.operator, inner.args, inner.strides, inner.kept, inner.values)

    def backward(self, ctx: Any, tensors: Sequence[Any], grads: Sequence[Tensor | None]) -> tuple[Any, ...]:
        """The gradients by the roles, recorded where that is its turn."""
        if not self._is_ordinary(tensors, grads):
            return super().backward(ctx, tensors, grads)
        values = (*grads, *tensors)
        asked = self.asked(ctx, values)
        needs, last = self.needs(asked), self.of.backward_asks and not torch_private.keeps_graph()
        seen = self.history.of((signature(values), tuple(needs), last))
        if seen.reason:
            return super().backward(ctx, tensors, grads)

        def add(recording: Recording) -> None:

            replay = build.backward(self, tensors, grads, tuple(asked), last, recording)
            if len(self.backwards) < MOST_NUMBERS:
                self.backwards = (replay, *self.backwards)

        function = lambda: self.checked(ctx, grads, self.gradients(tensors, grads, needs, last))  # noqa: E731
        return (None, *self.history.call(seen, unique(values), function, add))

    def gradients(
        self, tensors: Sequence[Any], grads: Sequence[Tensor | None], needs: Sequence[bool], last: bool
    ) -> list[Tensor | None]:
        """Compute the gradients by the roles; copy one in forward's shared memory, and share that no more from then on."""
        found = super().gradients(tensors, grads, needs, last)
        pooled = {place: one for place, one in enumerate(self.saved or ()) if not isinstance(one, int)}
        if pooled and not batched(grads):  # of a batch the reference makes all anew
            shared = {(_storage(tensors[one.place]), one.offset): place for place, one in pooled.items()}
            for index, gradient in enumerate(found):
                place = None if gradient is None else shared.get((_storage(gradient), _start(gradient)))
                if gradient is not None and place is not None:
                    observed.refuse("its backward returns what forward has saved")
                    self.of.unpooled |= {place}
                    found[index] = gradient.clone()
        return found

    def _is_ordinary(self, tensors: Sequence[Any], grads: Sequence[Tensor | None]) -> bool:
        if observed.unplanned or self.of.launch_backward is None or torch.is_grad_enabled():
            return False
        given = [value for value in (*grads, *tensors) if value is not None]
        if any(type(value) not in _ORDINARY for value in given) or torch_private.functorch_active():
            return False
        if torch_private.dispatch_modes() or torch_private.forward_mode() or batched(grads):
            return False
        return not (torch_private.opaque_modes() or reload.wanted())


def signature(args: Sequence[Any]) -> tuple[Hashable, Hashable]:
    """(what is known of the tensors and of the thread, the other arguments), by which calls are told apart."""
    places: dict[int, int] = {}
    tensors: list[Any] = []
    others: list[Any] = []
    for value in args:
        if not isinstance(value, Tensor):
            others.append(freeze(value))
            continue
        place = places.setdefault(id(value), len(places))
        bits = value.is_neg(), value.is_conj(), value.is_inference(), value.requires_grad
        laid_out = value.shape, value.stride(), value.dtype, value.device, value.data_ptr() % 16
        tensors.append((place, len(others), type(value), bits, laid_out))
    first = next(value for value in args if isinstance(value, Tensor))
    kind = first.device.type
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    hooked = torch_private.saved_tensors_hooks(True) is not None
    thread = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast, hooked
    process = torch.get_default_dtype(), torch_private.deterministic(), id(executors.get(kind))
    return (tuple(tensors), thread, process), tuple(others)


def _storage(tensor: Tensor) -> int:
    with torch_private.without_function_modes():
        return tensor.untyped_storage()._cdata


def _start(tensor: Tensor) -> int:
    with torch_private.without_function_modes():
        return int(tensor.storage_offset())


def unique(values: Sequence[Any]) -> list[Tensor]:
    """The tensors, each once."""
    return list({id(value): value for value in values if isinstance(value, Tensor)}.values())


def _drop(number: int) -> None:
    """Forget the plan of this number, whichever function it belongs to."""
    owner, shape, plan = _everywhere.pop(number)
    if (found := owner()) is not None:
        found.remove(shape, plan)


def off_if_asked() -> None:
    """Make every call the plain way where the environment says so."""
    if not settings.PLANS.read(default=True):
        observed.go_plainly()


def _after_fork() -> None:
    """Reset a child process: nobody will release a lock that another thread held, and nothing is loaded on a device."""
    global _changing
    _changing = threading.RLock()
    forget_all()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
