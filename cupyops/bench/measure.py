"""A case measured: compared first, then timed beside its peers."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ..testing import Failure, Tolerance
from .case import Case
from .results import BASE, Figure, Row
from .timing import Clock, interleaved, leaves, peak_memory, wall

Gradients = dict[Any, Tensor]  # that outputs are given, by place and layout

_BESIDE = "ours, of the size beside"
_LOOSE = {torch.float64: 1e-10, torch.float32: 1e-3}  # of a peer's result; half types 5e-2


def measure(case: Case, against: Iterable[str], clock: Clock) -> Row:
    """The row of a case. What gives a wrong result, or raises, has a reason in the place of its figures."""
    torch.manual_seed(0)
    arguments = case.make(torch.device("cuda"), case.dtype)
    row = Row.of(case)
    calls = {
        "ours": case.ours,
        **{name: call for name, call in case.peers().items() if name in {*against, *case.others}},
    }
    if case.compiled:
        torch.compiler.reset()
        calls |= compiled(case, against)
    for name in _right(case, arguments, calls, row):
        del calls[name]
    grads: Gradients = {}  # the same for all who have the arguments in common
    runs = {
        name: samples(case, call, _arguments_for(name, arguments), grads if _in_common(name) else {})
        for name, call in calls.items()
    }
    if case.beside is not None and "ours" in runs:
        row.beside = Row.of(case.beside)
        given = case.beside.make(torch.device("cuda"), case.beside.dtype)
        if not _right(case.beside, given, {"ours": case.beside.ours}, row.beside):
            runs[_BESIDE] = samples(case.beside, case.beside.ours, given, {})
    with _algorithms_tried():
        for name, (_, whole) in runs.items():
            for _ in range(2):
                whole()
            row.memory[name] = peak_memory(whole)
        times = interleaved({name: run for name, (run, _) in runs.items()}, clock)
    for name, parts in times.items():
        row.figures[name] = {way: Figure.of(time) for way, time in parts.items()}
    if row.beside is not None and _BESIDE in times:
        row.beside.figures["ours"], row.beside.memory["ours"] = row.figures.pop(_BESIDE), row.memory.pop(_BESIDE)
    return row


@contextlib.contextmanager
def _algorithms_tried() -> Iterator[None]:
    """cuDNN's convolutions are those that it has found to be the fastest."""
    cudnn = torch.backends.cudnn
    before, cudnn.benchmark = cudnn.benchmark, True
    try:
        yield
    finally:
        cudnn.benchmark = before


def compiled(case: Case, against: Iterable[str]) -> dict[str, Callable[..., Any]]:
    """Compile a case by torch.compile, also tuned as by `max-autotune`; without a graph, whose outputs are overwritten."""
    modes = {"compile": None, "max-autotune": "max-autotune-no-cudagraphs"}
    return {
        name: torch.compile(case.eager, dynamic=False, mode=mode) for name, mode in modes.items() if name in against
    }


def call_once(case: Case) -> None:
    """Let our kernels be compiled and kept: forward and backward once."""
    arguments = case.make(torch.device("cuda"), case.dtype)
    _gradients(case.ours(*arguments), leaves(arguments), None)


def compile_only(case: Case) -> None:
    """Let torch.compile fill its cache: forward and backward once."""
    torch.compiler.reset()
    arguments = case.make(torch.device("cuda"), case.dtype)
    call = torch.compile(case.eager, dynamic=False)
    _gradients(call(*arguments), leaves(arguments), None)


def told(error: Exception) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {error}".splitlines()[0][:300]


def compare(case: Case, device: str) -> bool:
    """Ours against PyTorch; False where there is nothing to compare. Raises `Failure` where it is wrong."""
    arguments = case.make(torch.device(device), case.dtype)
    row = Row.of(case)
    _right(case, arguments, {"ours": case.ours, "eager": case.eager}, row)
    if "ours" in row.wrong:
        raise Failure(f"{case}: {row.wrong['ours']}")
    return row.compared


def samples(
    case: Case, call: Callable[..., Any], arguments: tuple[Any, ...], made: Gradients
) -> tuple[Callable[[Clock], dict[str, float]], Callable[[], Any]]:
    """(one sample of each part, all of it at once). Gradients of outputs are those `made`, and further ones join them."""
    wanted = leaves(arguments)
    if not wanted or not (case.backward_bytes or case.backward_flops or case.unit == "us"):

        def forward(clock: Clock) -> dict[str, float]:
            if case.wall:
                return {"forward": wall(lambda: call(*arguments))}
            return {"forward": clock.sample(lambda _: call(*arguments))}

        return forward, lambda: call(*arguments)
    grads = []
    for index, y in enumerate(outputs(call(*arguments))):
        key = index, y.shape, y.stride(), y.dtype
        if key not in made:
            made[key] = torch.randn_like(y)
        grads.append(made[key])

    def whole() -> Any:
        return _gradients(call(*arguments), wanted, grads)

    def each(clock: Clock) -> dict[str, float]:
        if case.together:
            return {"together": clock.sample(lambda _: whole())}
        return {
            "forward": clock.sample(lambda _: call(*arguments)),
            "backward": clock.sample(lambda y: _gradients(y, wanted, grads), before=lambda: call(*arguments)),
        }

    return each, whole


def outputs(found: Any) -> list[Tensor]:
    """The outputs that have a gradient."""
    every = found if isinstance(found, (tuple, list)) else (found,)
    return [y for y in every if isinstance(y, Tensor) and y.requires_grad]


def _gradients(found: Any, wanted: list[Tensor], grads: list[Tensor] | None) -> tuple[Tensor, ...]:
    given = outputs(found)
    if not wanted or not given:
        return ()
    if grads is None:
        grads = [torch.ones_like(y) for y in given]
    # of a loss the gradient is 1, as loss.backward() has it
    grads = [torch.ones_like(y) if y.dim() == 0 else grad for y, grad in zip(given, grads)]
    return torch.autograd.grad(given, wanted, grads, allow_unused=True)


def _right(case: Case, arguments: Any, calls: dict[str, Callable[..., Any]], row: Row) -> list[str]:
    """The names of what is not to be timed; the row has the reasons."""
    truth = theirs = None
    if case.same:
        torch.manual_seed(1)
        # of contiguous arguments: PyTorch's backward of overlapping windows is another one in channels_last
        truth, theirs = (
            _results(case.eager, _own(arguments, dtype, torch.contiguous_format)) for dtype in (torch.float64, None)
        )
    row.compared = bool(truth)
    for name, call in calls.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = _results(call, _arguments_for(name, arguments))
            if truth is not None and theirs is not None:
                _judge(case, name, found, theirs, truth)
        except Exception as error:  # whatever a peer raises: its place in the table says so
            row.wrong[name] = told(error)
    return [name for name in row.wrong if name in calls]


def _in_common(name: str) -> bool:
    """Return True if a call works on the same tensors as ours: Liger writes gradients over what was saved."""
    return name in ("ours", *BASE)


def _arguments_for(name: str, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments for one of the calls."""
    return arguments if _in_common(name) else _own(arguments)


def _own(
    arguments: Iterable[Any],
    dtype: torch.dtype | None = None,
    memory_format: torch.memory_format = torch.preserve_format,
) -> tuple[Any, ...]:
    """Copies of the tensors of numbers, in a dtype."""

    def copy(one: Any) -> Any:
        if not isinstance(one, Tensor) or not one.is_floating_point():
            return one
        return one.detach().to(dtype, copy=True, memory_format=memory_format).requires_grad_(one.requires_grad)

    return tuple(copy(one) for one in arguments)


def _results(call: Callable[..., Any], arguments: Any) -> list[Tensor]:
    """Outputs and gradients, of a gradient that is the same for all."""
    found, wanted = call(*arguments), leaves(arguments)
    every = [y for y in (found if isinstance(found, (tuple, list)) else (found,)) if isinstance(y, Tensor)]
    generator = torch.Generator(device="cuda" if every and every[0].is_cuda else "cpu").manual_seed(2)
    grads = []
    for y in outputs(found):
        grad = torch.randn(y.shape, generator=generator, device=y.device, dtype=torch.float32)
        grads.append(grad.bfloat16().to(y.dtype))  # exact in every dtype
    return [*(y.detach() for y in every), *(g for g in _gradients(found, wanted, grads) if g is not None)]


def _judge(case: Case, name: str, found: list[Tensor], theirs: list[Tensor], truth: list[Tensor]) -> None:
    if len(found) != len(theirs):
        raise Failure(f"{len(found)} outputs and gradients, PyTorch has {len(theirs)}")
    for index, (mine, other, exact) in enumerate(zip(found, theirs, truth)):
        what = f"output or gradient {index}"
        if name == "ours":
            Tolerance().judge(mine, other, exact, what)
            continue
        error, scale = (mine.double() - exact.double()).abs().max(), exact.double().abs().max()
        allowed = max(_LOOSE.get(case.dtype, 5e-2), 4 * float((other.double() - exact.double()).abs().max() / scale))
        if not error <= allowed * scale:
            raise Failure(f"{what} is off by {float(error):.3g}, of values up to {float(scale):.3g}")
