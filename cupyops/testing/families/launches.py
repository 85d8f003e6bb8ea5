"""Launches: on which stream, inside which graph, and what is said when one fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ..._kernel.compile import backend
from ..._kernel.kernel import Specialised, kernels
from ..._kernel.launch.configuration import Configuration
from ..._operator.derivation.plans import forget_all
from ..._util import torch_private, tracing
from ..call import Outcome, differentiable, gradients, tensors_of
from ..case import Case
from ..hazard import GPU, KERNELS, Failure, NotApplicable, hazard

_CYCLES = 60_000_000  # some 30 ms of a GPU: a launch on another stream is long over by then
_LOADS_WHILE_CAPTURING = 12030  # the first driver that does
_BLOCK = (2048, 1, 1)  # more threads than any GPU takes


# --- streams ----------------------------------------------------------------------------------------------------------


@hazard("on a side stream whose work is still under way, a forward waits for its inputs", GPU)
def side_stream(case: Case) -> None:
    """Kernels run on torch's current stream: on any other they would see the inputs before their values arrive."""
    _compiled(case)
    call = case.call.leaves()
    with torch.cuda.device(case.device), torch.cuda.stream(torch.cuda.Stream(case.device)):
        _arrive_late(call.all_tensors())
        outputs = tensors_of(call.of(case.target.function))
        _arrive_late(call.all_tensors())
        without = case.inference(call)
        torch.cuda.synchronize()
    case.judge_outputs(outputs, case.call)
    if call.tensors():
        case.judge_outputs(without, case.call)


@hazard("backward runs on the stream that the forward ran on, and waits for the gradient that arrives", GPU)
def backward_stream(case: Case) -> None:
    """Backward is called where another stream is current, on which the incoming gradient is still being computed."""
    case.needs_gradient()
    _compiled(case)
    call = case.call.leaves()
    with torch.cuda.device(case.device):
        of_forward, of_backward = (torch.cuda.Stream(case.device) for _ in range(2))
        torch.cuda.synchronize()
        with torch.cuda.stream(of_forward):
            outputs = tensors_of(call.of(case.target.function))
        torch.cuda.synchronize()
        grads = case.grads(outputs)
        with torch.cuda.stream(of_backward):
            _arrive_late(grads)
            found = gradients(outputs, call, grads)
        torch.cuda.synchronize()
    case.same_as_plain(Outcome(outputs, found))


def _compiled(case: Case) -> None:
    """Everything has run once: a compilation would outlast the sleep."""
    _ = case.plain
    torch.cuda.synchronize(case.device)


def _arrive_late(tensors: Sequence[Tensor]) -> None:
    """Refill tensors with their values a while later on the current stream; until then they hold NaN, and integers 0."""
    torch.cuda.synchronize()
    values = [tensor.detach().clone() for tensor in tensors]
    with torch.no_grad():
        for tensor in tensors:
            tensor.fill_(torch.nan if tensor.is_floating_point() or tensor.is_complex() else 0)
        torch.cuda.synchronize()
        torch_private.spin(_CYCLES)
        for tensor, value in zip(tensors, values):
            tensor.copy_(value)


# --- graphs -----------------------------------------------------------------------------------------------------------


@hazard("captured into a CUDA graph and replayed, forward and backward follow inputs changed in place", GPU)
def cuda_graph(case: Case) -> None:
    """Capture after a first call on a side stream, as PyTorch asks for."""
    case.needs_floating()
    _compiled(case)
    with torch.cuda.device(case.device):
        _replay(case, warm_up=True)


@hazard("the first call of all can be inside the capture of a CUDA graph", GPU)
def cuda_graph_first_call(case: Case) -> None:
    """Kernels are loaded again while the capture is under way."""
    case.needs_operator()
    case.needs_floating()
    case.needs(cuda_graph)
    version = backend.cupy().cuda.runtime.driverGetVersion()
    if version < _LOADS_WHILE_CAPTURING:
        raise NotApplicable(
            f"this driver, of CUDA {version // 1000}.{version % 1000 // 10}, loads nothing in a capture"
        )
    _compiled(case)
    with torch.cuda.device(case.device), _not_loaded():
        _replay(case, warm_up=False)


def _replay(case: Case, warm_up: bool) -> None:
    """Capture, change the values, replay, judge."""
    call, grads, other = case.call.leaves(), case.grads(case.plain.outputs), case.varied()

    def step() -> Outcome:
        outputs = tensors_of(call.of(case.target.function))
        return Outcome(outputs, gradients(outputs, call, grads), case.inference(call))

    stream, graph = torch.cuda.Stream(case.device), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    if warm_up:
        with torch.cuda.stream(stream):
            step()
        torch.cuda.synchronize()
    captured = _captured(graph, stream, step)
    with torch.no_grad():
        for mine, changed in zip(call.all_tensors(), other.all_tensors()):
            mine.copy_(changed)
    graph.replay()
    torch.cuda.synchronize()
    case.judge(captured, other)


def _captured(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, step: Callable[[], Outcome]) -> Outcome:
    reason: list[Exception] = []
    try:
        with _capture(graph, stream):
            try:
                return step()
            except Exception as error:  # which the end of the capture would hide by an error of its own
                reason.append(error)
                raise
    except Exception as error:
        _recover()
        cause = reason[0] if reason else error
        raise Failure(f"cannot be captured: {type(cause).__name__}: {cause}") from cause


@contextmanager
def _capture(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream) -> Iterator[None]:
    # the current stream is named, to be restored: a capture that fails leaves its own current
    with torch.cuda.stream(torch.cuda.current_stream()), torch.cuda.graph(graph, stream=stream):
        yield


def _recover() -> None:
    """Take PyTorch's random numbers out of a failed capture, by one that succeeds."""
    with suppress(RuntimeError), _capture(torch.cuda.CUDAGraph(), torch.cuda.Stream()):
        torch.zeros(1, device="cuda")


@contextmanager
def _not_loaded() -> Iterator[None]:
    """No kernel of cupyops is loaded on any device inside."""
    held = [(kernel, dict(kernel._specialised), dict(kernel._table), kernel._fast) for kernel in kernels()]
    try:
        for kernel, *_ in held:
            _set_loaded(kernel, {}, {}, None)
        forget_all()  # what was recorded launches what is loaded
        yield
    finally:
        for kernel, specialised, table, fast in held:
            _set_loaded(kernel, specialised, table, fast)


def _set_loaded(kernel: Any, specialised: dict[Any, Any], table: dict[Any, Any], fast: Any) -> None:
    with kernel._lock:
        kernel._specialised = specialised
        kernel._table.clear()  # the launch functions that were written hold this very dict
        kernel._table.update(table)
        kernel._fast = fast
        kernel._configured.clear()


# --- failures ---------------------------------------------------------------------------------------------------------


@hazard("a launch that fails names operator, kernel, grid and block, and the next call works", KERNELS, launches=False)
def launch_error(case: Case) -> None:
    """Forward, then backward, with a block of 2048 threads."""
    operator = case.needs_operator()
    call = case.call.relaid()
    outputs = tensors_of(_failing(operator.name, lambda: call.of(case.target.function), "forward"))
    if differentiable(outputs) and call.tensors():
        grads = case.grads(outputs)
        _failing(operator.name, lambda: gradients(outputs, call, grads, retain_graph=True), "backward")
        case.same_as_plain(Outcome(outputs, gradients(outputs, call, grads)))
    else:
        case.same_as_plain(Outcome(outputs, [None] * len(call.tensors())))


def _failing(operator: str, work: Callable[[], Any], role: str) -> Any:
    """Do it with launches that fail, and judge the error; then do it again, and give what that gives."""
    tried: list[tuple[str, Any]] = []
    launch = Specialised.launch

    def too_large(self: Specialised, anchor: Any, configuration: Configuration, *others: Any) -> Any:
        tried.append((self.name.partition("<")[0], configuration.grid))
        return launch(self, anchor, replace(configuration, block=_BLOCK), *others)

    message = ""
    with (
        mock.patch.object(Specialised, "launch", too_large),
        tracing.trace(),
    ):  # a trace takes launches off the fast path
        try:
            work()
        except Exception as error:  # whichever: it is what it says that counts
            message = "\n".join([str(error), *getattr(error, "__notes__", [])])
    if not tried:
        if role == "forward":
            raise NotApplicable("no kernel is launched")
        return work()
    if not message:
        raise Failure(f"no error from the {role}, though a block of {_BLOCK[0]} threads was asked for {tried[0][0]}")
    missing = [word for word in (operator, tried[0][0], str(tried[0][1]), str(_BLOCK)) if word not in message]
    if missing:
        raise Failure(f"the error of the {role} does not name {', '.join(missing)}; it says: {message}")
    try:
        return work()
    except Exception as error:
        raise Failure(f"the {role} after one that failed ends in {type(error).__name__}: {error}") from error
