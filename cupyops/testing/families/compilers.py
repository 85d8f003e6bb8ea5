"""Compilers: torch.compile, export, tracing, and the registration that they rest on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..._operator.operator import operators
from ..._util import torch_private, tracing
from ..._util.garbage import count_as_old
from ..._util.torch_private import FakeTensorMode, OpOverload, TorchDispatchMode, without_cse
from ..call import Call, Function, Outcome, gradients, tensors_of
from ..case import ROUNDINGS, Case
from ..derived import brief
from ..hazard import Failure, NotApplicable, hazard, told
from ..shrink import smaller_calls

_BUILT_IN = ("aten", "prims", "prim", "profiler", "inductor", "_c10d_functional", "c10d_functional")

# where the first output has integers: opcheck adds all of them up in its dtype; `compile_fullgraph` sees to such a call
_ADDED = "result type Float can't be cast to the desired output type"


@hazard("torch.compile(fullgraph=True) gives the same values, strides and gradients")
def compile_fullgraph(case: Case) -> None:
    """Compile by inductor on a GPU; on the CPU by aot_eager, which needs no compiler there.

    The call is compiled once for this and for `compile_dynamic`; and for its sizes alone where the result is wrong.
    """
    try:
        ours = case.once(_compiled_once, lambda: _compiled_once(case))[1][0]
        _judge_compiled(case, ours)
    except Exception:  # whatever a compiler or an operator raises: sizes that are symbols may be at fault
        with _compiled(case, case.target.function, dynamic=False) as (function, _):
            ours = _both_ways(case, function, case.call)
        _judge_compiled(case, ours)


def _judge_compiled(case: Case, ours: Outcome) -> None:
    case.same_as_plain(ours)
    _same_strides(case, ours.outputs)


# its kernels are launched where `compile_fullgraph` makes the calls of both
@hazard("torch.compile(dynamic=True) takes other sizes without a compilation for each", launches=False)
def compile_dynamic(case: Case) -> None:
    """Three sizes; one compilation may follow those of the first, or as many as the reference needs."""
    case.needs(compile_fullgraph)
    calls, outcomes, later = case.once(_compiled_once, lambda: _compiled_once(case))
    if len(calls) < 3:
        raise NotApplicable("no size of the call can be made smaller twice")
    for call, ours in zip(calls, outcomes):
        with told(f"for {call!r}"):
            case.judge(ours, call)
    if later > 1 and later > _needed_by_reference(case, calls):
        raise Failure(f"{later} more compilations for {len(calls) - 1} more sizes: {', '.join(map(repr, calls))}")


@hazard("torch.export gives a program that computes the same, for other values too")
def export(case: Case) -> None:
    """A cupyops operator must be one node of it: else its kernels are lost."""
    plain = _without_grad(case.call)

    class Module(torch.nn.Module):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return case.target.function(*args, **kwargs)

    with _told_as_failure("torch.export"):
        program = torch.export.export(Module(), plain.args, plain.kwargs)
        run = program.module()
    for call in (plain, _without_grad(case.varied())):
        with told("exported"):
            case.judge_outputs(tensors_of(call.of(run)), call)
    called = _operators_in(case)
    if called and called.isdisjoint(_operators_of(program.graph_module)):
        raise Failure(f"{' and '.join(sorted(called))} is not in the exported graph")


@hazard("make_fx traces what is computed, not the values that came out")
def make_fx(case: Case) -> None:
    """The traced graph on other values; what is done behind the dispatcher's back would be a constant in it."""
    from torch.fx.experimental.proxy_tensor import make_fx as traced

    case.needs_known_sizes()
    plain = _without_grad(case.call)
    inputs = [t for t in plain.all_tensors() if t.is_floating_point()]
    if not inputs:
        raise NotApplicable("no floating-point tensor")
    with _told_as_failure("make_fx"):
        graph = traced(lambda *values: tensors_of(plain.with_tensors(inputs, values).of(case.target.function)))(*inputs)
    for call in (plain, _without_grad(case.varied())):
        with told("traced"):
            case.judge_outputs(graph(*(t for t in call.all_tensors() if t.is_floating_point())), call)


@hazard("on fake tensors shapes, strides and dtypes are those of the real results", launches=False)
def fake_tensors(case: Case) -> None:
    """Outputs and gradients; compilers allocate and index by them."""
    case.needs_known_sizes()
    mode = FakeTensorMode()
    fakes = case.call.map(lambda t: mode.from_tensor(t.detach()).requires_grad_(t.requires_grad))
    plain = case.plain
    with mode, _told_as_failure("FakeTensorMode"):
        outputs = tensors_of(fakes.of(case.target.function))
        found = Outcome(outputs, gradients(outputs, fakes, [torch.empty_like(y) for y in outputs if y.requires_grad]))
    if len(found.outputs) != len(plain.outputs):
        raise Failure(f"{len(found.outputs)} fake outputs, {len(plain.outputs)} real ones")
    for (what, fake), (_, real) in zip(found.named(), plain.named()):
        if (fake is None) != (real is None):
            raise Failure(f"{what} is {'None' if fake is None else 'a tensor'} on fake tensors only")
        if fake is not None and real is not None:
            _same_metadata(what, fake, real)
    _same_strides(case, found.outputs)


@hazard("torch.library.opcheck passes for every registered operator that the call makes")
def opcheck(case: Case) -> None:
    """Schema, autograd registration, fake tensors and AOT dispatch."""
    recorder = _Recorder()
    with recorder:
        case.call.leaves().of(case.target.function)
    if not recorder.calls:
        raise NotApplicable("the call makes no registered operator")
    for op, call in recorder.calls.items():
        with without_cse():
            verdicts = torch.library.opcheck(op, call.args, call.kwargs, raise_exception=False, **_tolerances(call))
        for test, verdict in verdicts.items():
            if verdict != "SUCCESS" and not (test == "test_aot_dispatch_dynamic" and _ADDED in str(verdict)):
                raise Failure(f"{op}, {test}: {brief(verdict)}")


def _tolerances(call: Call) -> dict[str, Any]:
    """Tolerances of opcheck for the coarsest dtype of a call; its own ones are of fewer roundings than half types have."""
    eps = max((torch.finfo(t.dtype).eps for t in call.all_tensors() if t.is_floating_point()), default=0.0)
    return {"rtol": ROUNDINGS * eps, "atol": ROUNDINGS * eps} if eps > torch.finfo(torch.float32).eps else {}


# --- compiling ---


def _compiled_once(case: Case) -> tuple[list[Call], list[Outcome], int]:
    """(the call and two smaller ones, if there are any, what a compiled function gives for each, later compilations)."""
    calls = [call.leaves() for call in (case.call, *smaller_calls(case, 2))]
    return calls, *_over_sizes(case, case.target.function, calls)


def _over_sizes(case: Case, function: Function, calls: list[Call]) -> tuple[list[Outcome], int]:
    """(what a compiled function gives for each call, how often it was compiled again after the first of them)."""
    with _compiled(case, function, dynamic=True) as (compiled, count):
        found = [(_both_ways(case, compiled, call), count()) for call in calls]
    return [outcome for outcome, _ in found], found[-1][1] - found[0][1]


def _needed_by_reference(case: Case, calls: list[Call]) -> int:
    try:
        return _over_sizes(case, case.target.reference, calls)[1]
    except Exception:  # it cannot be compiled, as the reference of an operator cannot
        return 0


@contextmanager
def _compiled(case: Case, function: Function, dynamic: bool) -> Iterator[tuple[Callable[..., Any], Callable[[], int]]]:
    """(the function compiled, how often it was compiled until now); nothing compiled is left behind."""

    backend = torch_private.lookup_backend("inductor" if case.device.type == "cuda" else "aot_eager")
    count_as_old()  # what that has imported, since Dynamo collects garbage
    compilations: list[None] = []

    def counting(*given: Any, **options: Any) -> Any:
        compilations.append(None)
        return backend(*given, **options)

    torch.compiler.reset()
    torch_private.leave_our_modes_alone()  # else Dynamo traces a frame with one twice: see trace_without_our_modes
    try:
        with _told_as_failure("torch.compile"), without_cse():
            wrapped = lambda *args, **kwargs: function(*args, **kwargs)  # noqa: E731
            yield torch.compile(wrapped, fullgraph=True, dynamic=dynamic, backend=counting), lambda: len(compilations)
    finally:
        torch.compiler.reset()


def _both_ways(case: Case, function: Callable[..., Any], call: Call) -> Outcome:
    leaves = call.relaid()
    outputs = tensors_of(leaves.of(function))
    return Outcome(outputs, gradients(outputs, leaves, case.grads(outputs)))


@contextmanager
def _told_as_failure(what: str) -> Iterator[None]:
    """An error of a compiler, which may be pages long, in its first lines."""
    try:
        yield
    except (Failure, NotApplicable):
        raise
    except Exception as error:  # whatever a compiler raises
        raise Failure(f"{what} fails: {type(error).__name__}: {brief(error)}") from error


# --- what is compared ---


def _same_strides(case: Case, outputs: list[Tensor]) -> None:
    for index, (mine, plain) in enumerate(zip(outputs, case.plain.outputs)):
        if plain.numel() > 1 and _strides(mine) != _strides(plain):
            raise Failure(f"output {index}: strides {mine.stride()}, not {plain.stride()} as in a plain call")


def _strides(tensor: Tensor) -> list[int]:
    """Strides of the dimensions larger than 1."""
    return [int(stride) for size, stride in zip(tensor.shape, tensor.stride()) if size > 1]


def _same_metadata(what: str, fake: Tensor, real: Tensor) -> None:
    for attribute in ("shape", "dtype", "device"):
        found, expected = getattr(fake, attribute), getattr(real, attribute)
        if found != expected:
            raise Failure(f"{what}: {attribute} {found} on fake tensors, {expected} on real ones")


def _without_grad(call: Call) -> Call:
    return call.map(lambda t: t.detach().clone(memory_format=torch.preserve_format))


# --- operators ---


def _operators_in(case: Case) -> set[str]:
    """The cupyops operators that a plain call makes."""
    with tracing.trace() as trace:
        case.ours(_without_grad(case.call))
    return {record.operator for record in trace.records} & set(operators())


def _operators_of(module: torch.fx.GraphModule) -> Iterator[str]:
    graphs = (part.graph for part in module.modules() if isinstance(part, torch.fx.GraphModule))
    return (node.target._schema.name for one in graphs for node in one.nodes if isinstance(node.target, OpOverload))


class _Recorder(TorchDispatchMode):
    """Keeps the first call of each operator that is not PyTorch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, Call] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in _BUILT_IN and func not in self.calls:
            self.calls[func] = Call(*args, **(kwargs or {})).relaid()  # before the call can change them
        return func(*args, **(kwargs or {}))
