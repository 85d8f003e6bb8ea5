"""Subject of a hazard: one call of one function on one backend, and the means to judge what comes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .._kernel.kernel import FLOATING
from .._operator.derivation.definition import takes_gradient
from .call import INFERENCE, Call, Function, Gradients, Outcome, differentiable, inference, run
from .hazard import Failure, InferenceFails, NotApplicable
from .recast import (
    FINEST,
    coarser,
    distance,
    exact,
    narrowed,
    nudged,
    on_cpu,
    other_truth,
    other_values,
    rounded_otherwise,
    widened,
)
from .target import Target, running
from .tolerance import Tolerance, computable, largest

_DRAWS = 8  # calls much like another
MEMORY = 2 * 2**30
ROUNDINGS = 8.0  # units in the last place that a variant may be off by: another order of a sum
_LENIENCE = 8.0  # where the plain call is too far off, how much further off a variant may be
_FINER = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps


class Case:
    """A call under test.

    Attributes:
        target: the function, its reference, its operator.
        call: the arguments, as the caller gave them.
        backend: "reference", "simulator" or "gpu": where the calls run while a hazard is tried.
        tolerance: how exact the results must be.
        seed: of everything random.
        memory: bytes that a variant of the call may take on the CPU.
        changes: the settings of the process that calls have changed, each with the hazard that made them.
    """

    def __init__(
        self, target: Target, call: Call, backend: str, tolerance: Tolerance, seed: int = 0, memory: int = MEMORY
    ) -> None:
        self.target, self.call, self.backend = target, call, backend
        self.tolerance, self.seed, self.memory = tolerance, seed, memory
        self._sound: dict[Callable[[Case], str | None], bool] = {}
        self._made: dict[Any, Any] = {}
        self.changes: list[tuple[str, str]] = []  # (hazard, setting of the process that its calls have changed)
        self._last: tuple[Any, Any] = None, None  # the call of which it was asked last what is expected, and that

    def _with(self, **others: Any) -> Case:
        """Copy of this case with some attributes replaced."""
        names = ("target", "call", "backend", "tolerance", "seed", "memory")
        return Case(**{name: getattr(self, name) for name in names} | others)

    def with_call(self, call: Call) -> Case:
        """Copy of this case with another call."""
        return self._with(call=call)

    def with_units(self, units: Mapping[torch.dtype, float]) -> Case:
        """Copy of this case that allows other units in the last place."""
        return self._with(tolerance=replace(self.tolerance, ulps={**self.tolerance.ulps, **units}))

    def wrapped(self, change: Callable[[Function], Function]) -> Case:
        """Copy of this case with function and reference changed; judged with the slack of the plain call."""
        of = replace(self.target, function=change(self.target.function), reference=change(self.target.reference))
        case = self._with(target=of)
        case.__dict__["slack"] = self.slack
        return case

    def alone(self) -> Case:
        """Copy of this case in which the plain call itself is judged: nothing it gets wrong is allowed for."""
        case = self._with()
        case.__dict__["slack"] = {}
        return case

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """Result of `make`, which is called once for this case and that key."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    @property
    def device(self) -> torch.device:
        """Device of the call's tensors."""
        return next((tensor.device for tensor in self.call.all_tensors()), torch.device("cpu"))

    def generator(self, number: int = 0) -> torch.Generator:
        """A fresh source of random numbers on the CPU; the same for the same number."""
        return torch.Generator().manual_seed(self.seed * 1000 + number)

    # --- calls ---

    def ours(self, call: Call, grads: Sequence[Tensor] | None = None) -> Outcome:
        """The function under test; its gradients too, if `grads` is given."""
        return run(self.target.function, call, grads)

    def theirs(
        self, call: Call, grads: Sequence[Tensor] | Gradients | None = None, as_it_lies: bool = False
    ) -> Outcome:
        """The reference, on dense tensors or on such as lie like the call's. Raises `NotApplicable` where it refuses."""
        try:
            if self.backend == "gpu" and not all(t.is_floating_point() for t in call.all_tensors()):
                run(self.target.reference, on_cpu(call))  # an index out of range would end the process there
            return run(self.target.reference, call.relaid() if as_it_lies else call.leaves(), grads)
        except (RuntimeError, ValueError, TypeError, IndexError, AssertionError, ArithmeticError) as error:
            raise NotApplicable(f"the reference refuses: {_brief(error)}") from error

    def truth(self, call: Call, grads: Sequence[Tensor] | None = None) -> Outcome:
        """The reference in float64."""
        wide = grads if grads is None else [widened(grad) for grad in grads]
        return run(self.target.reference, exact(call), wide)

    def grads(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """A gradient for each output that takes one: normal values, laid out as the output is, the same in every call."""
        source = self.generator(1)
        made = []
        for y in differentiable(outputs):
            values = torch.randn(y.shape, generator=source, dtype=torch.complex128 if y.is_complex() else torch.float64)
            made.append(torch.empty_like(y, requires_grad=False).copy_(values))
        return made

    def both_ways(self, call: Call) -> Outcome:
        """Forward and backward of the function under test, on fresh leaves; and its forward where no gradient is wanted."""
        outcome = self.through(call.relaid())
        outcome.inference = self.inference(call.relaid())
        return outcome

    def through(self, call: Call) -> Outcome:
        """Forward and backward on these very tensors."""
        return run(self.target.function, call, self.grads)

    def inference(self, call: Call) -> list[Tensor]:
        """The outputs on these very tensors where no gradient is wanted; none if the call itself wants none.

        Functions take another way there. An error is a `Failure`: the call that wants gradients has been taken.
        """
        if not call.tensors():
            return []
        try:
            return inference(self.target.function, call)
        except NotApplicable:
            raise
        except Exception as error:  # whatever an operator raises
            raise InferenceFails(f"{INFERENCE.strip()}: {type(error).__name__}: {error}") from error

    @property
    def ways(self) -> list[Callable[[Call], Outcome]]:
        """The ways of making a call, on fresh leaves: with gradients; and without, where the call wants some."""
        with_gradients = lambda call: self.through(call.relaid())  # noqa: E731
        without = lambda call: Outcome([], [], self.inference(call.relaid()))  # noqa: E731
        return [with_gradients, without] if self.call.tensors() else [with_gradients]

    def varied(self) -> Call:
        """The call with the values of each floating-point tensor in another order; halved where that changes nothing."""
        return self.call.map_values(other_values)

    def nudged(self, call: Call, number: int = 0) -> Call:
        """Return a similar call, every value a few hundredths away; deterministic for each `number`."""
        source = self.generator(2 + number)
        return call.map_values(lambda tensor: nudged(tensor, source))

    # --- the plain call, which every hazard varies ---

    @cached_property
    def failing(self) -> str:
        """Error that the plain call ends in, "" where it ends well: nothing can be varied then."""
        try:
            with running(self.backend):
                self.both_ways(self.call)
        except Exception as error:  # whatever an operator raises
            return _brief(error)
        return ""

    @cached_property
    def plain(self) -> Outcome:
        """Forward and backward of the call as it was given."""
        return self.both_ways(self.call)

    @cached_property
    def slack(self) -> dict[str, float]:
        """Factor by which the plain call itself is worse than allowed, 1 where it is not.

        `accuracy` reports that. The other hazards judge what they vary by this measure, so that one fault shows in one row.
        """
        named = triples(self.plain, *self._expected_of_plain)
        return {what: self._slack(mine, theirs, truth) for (what, mine), theirs, truth in named}

    def slack_of(self, what: str) -> float:
        """Slack of an output or gradient; an output of the inference call without one has that of the plain call."""
        return self.slack.get(what, self.slack.get(wanted(what), 1.0))

    def excused(self, what: str) -> float:
        """The error that a variant may have where the plain call's is too large, however small the variant's values are."""
        slack = self.slack_of(what)
        theirs, truth = (dict(outcome.named()).get(wanted(what)) for outcome in self._expected_of_plain)
        if slack == 1 or theirs is None or truth is None:
            return 0.0
        return slack * self.tolerance.allowed(theirs, truth)

    @cached_property
    def _expected_of_plain(self) -> tuple[Outcome, Outcome]:
        return self._expected(self.call)

    def _scale(self, what: str, result: Tensor, truth: Outcome) -> float:
        """Largest value rounded on the way to a result: of the plain call, or of any result where all of it cancels."""
        plain = dict(self._expected_of_plain[1].named()).get(wanted(what))
        scales = [0.0 if plain is None else largest(plain)]
        if not largest(result):
            scales += [largest(other) for _, other in truth.named() if other is not None]
        return max(scales)

    def _slack(self, mine: Tensor | None, theirs: Tensor | None, truth: Tensor | None) -> float:
        if mine is None or theirs is None or truth is None:
            return 1.0 if mine is theirs else math.inf
        try:
            self.tolerance.judge(mine, theirs, truth, "")
        except Failure:
            comparable = mine.shape == theirs.shape and mine.dtype == theirs.dtype and takes_gradient(mine)
            excess = self.tolerance.excess(mine, theirs, truth) if comparable else math.inf
            return _LENIENCE * excess if excess > 1 else math.inf
        return 1.0

    # --- judging ---

    def expected(self, call: Call, grads: Sequence[Tensor] | None = None) -> tuple[Outcome, Outcome]:
        """(the reference's outcome, the truth), forward and backward."""
        if grads is None and call is self.call:
            return self._expected_of_plain
        if grads is None and self._last[0] is call:
            return self._last[1]
        found = self._expected(call, grads)
        if grads is None:
            self._last = call, found
        return found

    def _expected(self, call: Call, grads: Sequence[Tensor] | None = None) -> tuple[Outcome, Outcome]:
        theirs = self.theirs(call, self.grads if grads is None else grads)
        return theirs, self.truth(call, self.grads(theirs.outputs) if grads is None else grads)

    def judge(self, ours: Outcome, call: Call, grads: Sequence[Tensor] | None = None, lenient: bool = True) -> None:
        """Raise `Failure` unless `ours` is as good as the reference on `call`, or with `lenient` as the plain call is."""
        theirs, truth = self.expected(call, grads)
        try:
            self.compare(ours, theirs, truth, lenient)
        except Failure:
            given = self.grads(theirs.outputs) if grads is None else grads
            self.compare(ours, theirs, truth, lenient, errors=self._usual_errors(call, given))

    def _usual_errors(self, call: Call, grads: Sequence[Tensor]) -> dict[str, float]:
        """The largest errors of the reference among calls much like this one, in which it may have been lucky.

        One is the same call on tensors that lie as they do, of which PyTorch's products may be less exact. In float64,
        where the reference is the truth itself, those that it makes in float32, but for the size of a unit. And how far the
        truth moves when the incoming gradients, or inputs in float64, are rounded otherwise: where terms cancel, their
        rounding is all that is left.
        """
        found: dict[str, float] = {}
        laid, truth = self.theirs(call, grads, as_it_lies=True), self.expected(call, grads)[1]
        for (what, result), (_, exactly) in zip(laid.named(), truth.named()):
            if result is not None and exactly is not None and takes_gradient(result):
                found[what] = distance(result, exactly)
        for number in range(_DRAWS):
            near = self.nudged(call, number)
            theirs, truth = self.expected(near, grads)
            coarse = self._errors_in_float32(near, grads)
            source = self.generator(10 + number)
            other_grads = [rounded_otherwise(grad, source) for grad in grads]
            moved = self.truth(near.map_values(lambda t: other_truth(t, source)), other_grads)  # noqa: B023
            for (what, result), (_, exactly), (_, other) in zip(theirs.named(), truth.named(), moved.named()):
                if result is None or exactly is None or other is None or not takes_gradient(result):
                    continue
                found[what] = max(found.get(what, 0.0), distance(result, exactly), distance(other, exactly))
                if result.dtype in FINEST:
                    found[what] = max(found[what], coarse.get(what, 0.0))
        return found

    def _errors_in_float32(self, call: Call, grads: Sequence[Tensor]) -> dict[str, float]:
        """Errors of the reference on a call in float64, in units of float64; none where it has no float32."""
        if not any(tensor.dtype in FINEST for tensor in call.all_tensors()):
            return {}
        try:
            theirs, truth = self.expected(coarser(call), [narrowed(grad) for grad in grads])
        except NotApplicable:
            return {}
        named = zip(theirs.named(), truth.named())
        return {
            what: _FINER * distance(result, exactly)
            for (what, result), (_, exactly) in named
            if result is not None and exactly is not None
        }

    def judge_outputs(self, outputs: Sequence[Tensor], call: Call) -> None:
        """Judge the outputs alone, leniently."""
        self.compare(Outcome(list(outputs), []), self.theirs(call), self.truth(call))

    def compare(
        self,
        ours: Outcome,
        theirs: Outcome,
        truth: Outcome,
        lenient: bool = True,
        moved: Outcome | None = None,
        errors: Mapping[str, float] | None = None,
    ) -> None:
        """Raise `Failure` unless `ours` is as good as `theirs`.

        `moved` is a truth that would do as well as `truth`; `errors` are what the reference may be expected to be off by.
        """
        same_number(ours, theirs)
        for (what, a), b, c in triples(ours, theirs, truth):
            slack = self.slack_of(what) if lenient else 1.0
            if slack == math.inf:
                continue  # of another form, or not finite, in the plain call already
            if (a is None) != (b is None):
                if not computable(b if a is None else a).any():
                    continue  # PyTorch takes a gradient that is not there for zeros
                raise Failure(f"{what} is {_presence(a)}, the reference's is {_presence(b)}")
            if slack * self.tolerance.factor >= 1 and _are_equal(a, b):
                continue  # its error is the reference's own, whatever the truth is
            if a is not None:
                other = None if moved is None else dict(moved.named())[wanted(what)]
                extra = (
                    self.tolerance.units(a.dtype, self._scale(what, c, truth)) + self.excused(what) if lenient else 0.0
                )
                extra += 0.0 if other is None else distance(other, c)
                if errors is not None and wanted(what) in errors:
                    extra = max(extra, self._usual(a.dtype, errors[wanted(what)], largest(c), slack, lenient))
                self.tolerance.judge(a, b, c, what, slack, extra)

    def _usual(self, dtype: torch.dtype, error: float, scale: float, slack: float, lenient: bool) -> float:
        units = self.tolerance.units(dtype, scale) * (ROUNDINGS if lenient else 1)
        return slack * (self.tolerance.factor * error + units)

    def same_as_plain(self, ours: Outcome) -> None:
        """Raise `Failure` unless `ours`, of a call with the plain call's values, is as good as the plain call."""
        self.judge(ours, self.call)

    # --- what a hazard needs ---

    def note(self, hazard: Callable[[Case], str | None], sound: bool) -> None:
        """Remember what came of a hazard, for others that need it."""
        self._sound[hazard] = sound

    def needs(self, other: Callable[[Case], str | None]) -> None:
        """Raise `NotApplicable` where another hazard fails on this case, which this one would only show again."""
        if other not in self._sound:
            try:
                other(self)
            except NotApplicable:
                pass
            except Exception:  # whatever an operator raises is a failure
                self._sound[other] = False
            self._sound.setdefault(other, True)
        if not self._sound[other]:
            raise NotApplicable(f"see {other.__name__}")

    def needs_gradient(self) -> None:
        """Raise `NotApplicable` where no input wants a gradient or no output can take one."""
        if not self.call.tensors():
            raise NotApplicable("no input wants a gradient")
        if not differentiable(self.plain.outputs):
            raise NotApplicable("no output has a gradient")

    def needs_floating(self) -> list[Tensor]:
        """The floating-point tensors of the call. Raises `NotApplicable` where there is none."""
        found = [tensor for tensor in self.call.all_tensors() if tensor.dtype in FLOATING]
        if not found:
            raise NotApplicable("no floating-point tensor")
        return found

    def needs_known_sizes(self) -> None:
        """Raise `NotApplicable` where the size of an output is in the data: there PyTorch's own functions refuse, too."""
        if self.target.operator is not None and self.target.operator.definition.fake is not None:
            raise NotApplicable("the size of an output is in the data")

    def needs_new_outputs(self) -> None:
        """Raise `NotApplicable` for operators that work in place: arrays must not change, nor tensors outside a vmap."""
        if self.target.operator is not None and self.target.operator.definition.mutated:
            raise NotApplicable("it works in place")

    def needs_operator(self) -> Any:
        """The `Operator`. Raises `NotApplicable` for a plain function."""
        if self.target.operator is None:
            raise NotApplicable("a plain function, not a cupyops operator")
        return self.target.operator


def same_number(ours: Outcome, theirs: Outcome) -> None:
    """Raise `Failure` where there are more or fewer outputs than the reference has."""
    for outputs, where in ((ours.outputs or ours.inference, ""), (ours.inference or ours.outputs, INFERENCE)):
        if len(outputs) != len(theirs.outputs):
            raise Failure(f"{len(outputs)} outputs{where}, the reference has {len(theirs.outputs)}")


def triples(ours: Outcome, theirs: Outcome, truth: Outcome) -> Iterator[tuple[tuple[str, Any], Any, Any]]:
    """((name, ours), theirs, truth) of each output and gradient.

    Outputs where no gradient is wanted are left out if they are bit for bit those where one is.
    """
    mine, expected, exact = (dict(outcome.named()) for outcome in (ours, theirs, truth))
    for what, result in mine.items():
        plain = wanted(what)
        if plain == what or not _are_equal(result, mine.get(plain)):
            yield (what, result), expected[plain], exact[plain]


def wanted(what: str) -> str:
    """The name of the same output where a gradient is wanted."""
    return what.removesuffix(INFERENCE)


def _are_equal(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or (a.dtype, a.shape, a.device) != (b.dtype, b.shape, b.device):
        return False
    return torch.equal(computable(a), computable(b))


def _presence(tensor: Tensor | None) -> str:
    return "None" if tensor is None else "a tensor"


def _brief(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:200]
