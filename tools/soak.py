"""Random calls of the operators for minutes on end, in threads and on streams: nothing leaks, and every bit is as expected.

    python tools/soak.py --minutes 10 --threads 4 --streams 4                # on a GPU
    python tools/soak.py relu softmax --minutes 1 --backend reference --pool 20

Calls are drawn first, for each operator, and made once by one thread: kernels round in a fixed order, so what they gave
then they must give always. Then threads make them at random: forward and backward; without a gradient; with the backward
in another thread; on a GPU also with inputs from another stream, and in a CUDA graph that is replayed. Every few seconds
the threads end, the memory and all else that a process holds is measured, and new threads go on. At each quarter of the
time the plans of calls are forgotten, of which there may be thousands: the Python objects left then are counted. Where GPU
memory grows, the lines are named that have allocated what came in the second half of the time and stays.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import random
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import gpu
import torch
import typer
from hypothesis import HealthCheck, Phase, given, seed, settings
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor

import cupyops
from cupyops._operator.derivation import plans
from cupyops.testing.call import Call, Outcome, differentiable, gradients, tensors_of

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
from fuzzing import FUZZED  # type: ignore[import-not-found]

PERIOD = 5.0  # seconds between two measurements
REPLAYS = 3
_ROUNDS = 8  # at least: fewer measurements would not tell growth from chance
_LARGE = {"cuda": 1 << 20, "cpu": 1 << 14}  # elements of the largest tensor of a call made larger
_EVERY = 10  # one call in so many is made larger
_BURST = 4  # calls under way at once in a thread, at most
_PATIENCE = 120.0  # seconds after which threads that do not end hang

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
console = Console()


@dataclass(frozen=True)
class Known:
    """A call, and what one thread alone got from it."""

    name: str
    number: int  # among those drawn for the operator
    function: Callable[..., Any]
    call: Call
    grads: list[Tensor]
    forward: list[Tensor]  # without a gradient
    outcome: Outcome

    def differs(self, found: Outcome) -> str:
        """Which result of a call is not the one expected, and where; "" where all are."""
        expected = self.outcome.named()
        return _difference(found.named(), expected)

    def forward_differs(self, found: list[Tensor]) -> str:
        """The same for a call without a gradient."""
        return _difference(Outcome(found, []).named(), Outcome(self.forward, []).named())


class Fault(Exception):
    """A wrong result, or a call that raised; says of what."""


def _difference(found: list[tuple[str, Tensor | None]], expected: list[tuple[str, Tensor | None]]) -> str:
    if [name for name, _ in found] != [name for name, _ in expected]:
        return f"{len(found)} results, not {len(expected)}"
    return next((f"{name}: {_where(a, b)}" for (name, a), (_, b) in zip(found, expected) if not _same(a, b)), "")


def _where(a: Tensor | None, b: Tensor | None) -> str:
    """The first place that differs, and how many do."""
    if a is None or b is None or a.shape != b.shape or a.dtype != b.dtype:
        return "of another form"
    wrong = ~((a == b) | (a.isnan() & b.isnan())).flatten()
    if not wrong.any():
        return f"{a.dtype}, the sign of a zero or the bits of a NaN"
    place = int(wrong.int().argmax())
    first, other = (t.detach().flatten()[place].item() for t in (a, b))
    return f"{a.dtype}, {int(wrong.sum())} of {a.numel()} elements, the first {first!r} for {other!r}"


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    """To the bit."""
    if a is None or b is None:
        return a is b
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.detach().contiguous().view(bits), b.detach().contiguous().view(bits))


# --- the calls --------------------------------------------------------------------------------------------------------


def draw(name: str, count: int, start: int, device: str, torchs: bool = False) -> list[Known]:
    """So many sound calls of an operator, some of them large; of at most four times as many that hypothesis draws.

    `torchs`: calls of PyTorch's function instead.
    """
    ours, theirs, strategy = FUZZED[name]
    function = theirs if torchs else ours
    found: list[Known] = []

    @seed(start)
    @settings(
        max_examples=4 * count,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate,),
    )
    @given(strategy)
    def collect(call: Call) -> None:
        if not _refused(function, call) and (device == "cuda" or _harmless(function, call)):
            chosen = _larger(function, call, _LARGE[device]) if len(found) % _EVERY == 0 else call
            if name == "grouped_mm" and _by_pytorch(chosen):
                return
            known = _known(name, len(found), function, chosen, device)
            found.extend([] if known is None else [known])
        if len(found) == count:
            raise _Enough

    random.seed(start)
    with contextlib.suppress(_Enough):
        collect()
    if not found:
        raise Fault(f"{name}: none of {4 * count} calls drawn is sound, and done by kernels")
    return found


class _Enough(BaseException):
    """Which hypothesis takes for no failure."""


def _refused(function: Callable[..., Any], call: Call) -> bool:
    """By the reference, which is PyTorch: it may raise anything."""
    try:
        call.relaid().of(function)
    except Exception:
        return True
    return False


def _by_pytorch(call: Call) -> bool:
    """Whether groups are parts of columns or of k: PyTorch's kernel, which would do it, ends the process where one of them
    does not begin at a whole vector."""
    input, mat2 = call.args[:2]
    return call.kwargs.get("offs") is not None and (input.dim(), mat2.dim()) != (2, 3)


def _harmless(function: Callable[..., Any], call: Call) -> bool:
    """Whether zeros give no infinities, as a window of max_pool2d does in which there is nothing.

    With ceil_mode and dilation there are such. PyTorch's backward on a CPU then writes outside the gradient.
    """
    with torch.no_grad():
        zeros = call.map_floating(torch.zeros_like)
        return not any(bool(y.isinf().any()) for y in tensors_of(zeros.of(function)))


def _larger(function: Callable[..., Any], call: Call, elements: int) -> Call:
    """The call with its longest extent, wherever that is, so long that its largest tensor has so many elements or so.

    The call itself where that would be no call, or the results far larger.
    """
    largest = max(call.all_tensors(), key=torch.numel)
    size = max(largest.shape, default=0)
    if size < 5 or not largest.numel():
        return call
    times = [(t.numel(), list(t.shape).count(size)) for t in call.all_tensors() if t.numel() and size in t.shape]
    larger = call.resized(size, int(min(size * (elements / numel) ** (1 / count) for numel, count in times)))
    try:
        outputs = tensors_of(larger.map(lambda t: t.detach().to("meta")).of(function))
    except (cupyops.InputError, RuntimeError, ValueError, IndexError):  # PyTorch's own refusals too
        return call
    return larger if sum(y.numel() for y in outputs) <= 4 * elements else call


def _known(name: str, number: int, function: Callable[..., Any], drawn: Call, device: str) -> Known | None:
    """None for what no kernel does: on a GPU PyTorch would do it, whose sums may be in any order, or would refuse it."""
    call = drawn.map(lambda t: gpu.placed(t, device))
    try:
        with torch.no_grad(), cupyops.trace() as trace:
            try:
                forward = tensors_of(call.relaid().of(function))
            except RuntimeError:
                if device == "cuda" and trace.routes() == {"reference"}:
                    return None
                raise
        if device == "cuda" and trace.routes() - {"kernel"}:
            return None
        first = call.relaid()
        outputs = tensors_of(first.of(function))
        grads = _gradients_for(outputs)
        outcome = Outcome([y.detach() for y in outputs], gradients(outputs, first, grads))
        known = Known(name, number, function, call, grads, forward, outcome)
        differs = known.differs(both_ways(known, call.relaid()))
    except Exception as error:
        raise Fault(f"{name}, call {number}: {type(error).__name__}: {error}: {call!r}") from error
    if differs:
        raise Fault(f"{name}, call {number}, not the same twice: {differs}: {call!r}")
    return known


def _gradients_for(outputs: list[Tensor]) -> list[Tensor]:
    source = torch.Generator().manual_seed(0)
    made = []
    for y in differentiable(outputs):
        values = torch.randn(y.shape, generator=source, dtype=torch.float64)
        made.append(torch.empty_like(y, requires_grad=False).copy_(values))
    return made


# --- what threads do with them ----------------------------------------------------------------------------------------

Check = Callable[[], str]  # compares a call's results once they are there; "" where they are right


def both_ways(known: Known, call: Call) -> Outcome:
    """Forward and backward, on these tensors."""
    outputs = tensors_of(call.of(known.function))
    return Outcome(outputs, gradients(outputs, call, known.grads))


class Streams:
    """So many streams, which all threads share; on a CPU there are none, and `chosen` does nothing."""

    def __init__(self, count: int, device: str) -> None:
        self.cuda = device == "cuda"
        self._all = [torch.cuda.Stream() for _ in range(count)] if self.cuda else [None]
        self._capturing = torch.cuda.Stream() if self.cuda else None
        self._lock = threading.Lock()

    def any(self, source: random.Random) -> Any:
        """One of them."""
        return source.choice(self._all)

    @contextlib.contextmanager
    def alone(self) -> Iterator[Any]:
        """A stream that nobody else launches on, to capture a graph: one thread at a time."""
        with self._lock:
            yield self._capturing


def on(stream: Any) -> contextlib.AbstractContextManager[Any]:
    """With `stream` current, if there is one."""
    return contextlib.nullcontext() if stream is None else torch.cuda.stream(stream)


def _handed_to(stream: Any, before: Any) -> None:
    """What `before` makes, `stream` may use: it waits.

    The tensors are to be held until `stream` is done. `record_stream` would not do: PyTorch takes what is recorded while
    any thread captures a graph for a use inside that graph, and forgets it.
    """
    if stream is not None and stream is not before:
        stream.wait_stream(before)


def plainly(known: Known, streams: Streams, source: random.Random) -> Check:
    """Forward and backward on one stream."""
    stream = streams.any(source)
    with on(stream):
        outcome = both_ways(known, known.call.relaid())
    return _check(stream, lambda: known.differs(outcome))


def without_gradient(known: Known, streams: Streams, source: random.Random) -> Check:
    """Forward alone, under no_grad."""
    stream = streams.any(source)
    with on(stream), torch.no_grad():
        outputs = tensors_of(known.call.relaid().of(known.function))
    return _check(stream, lambda: known.forward_differs(outputs))


def backward_elsewhere(known: Known, streams: Streams, source: random.Random) -> Check:
    """The backward in a thread of its own, called on another stream."""
    stream, other = streams.any(source), streams.any(source)
    with on(stream):
        call = known.call.relaid()
        outputs = tensors_of(call.of(known.function))
    results: list[Any] = []

    def backward() -> None:
        torch.set_num_threads(1)
        try:
            with on(other):
                _handed_to(other, stream)
                results.append(gradients(outputs, call, known.grads))
        except Exception as error:  # raised again in the thread that waits
            results.append(error)

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    if isinstance(results[0], Exception):
        raise results[0]
    return _check(other, lambda: known.differs(Outcome(outputs, results[0])), call)


def from_another_stream(known: Known, streams: Streams, source: random.Random) -> Check:
    """The inputs are made on one stream and used on another."""
    before, stream = streams.any(source), streams.any(source)
    with on(before):
        call = known.call.relaid()
    with on(stream):
        _handed_to(stream, before)
        outcome = both_ways(known, call)
    return _check(stream, lambda: known.differs(outcome), call)


def in_a_graph(known: Known, streams: Streams, source: random.Random) -> Check:
    """Captured while other threads go on, and replayed; its results are wiped out before each replay."""
    with streams.alone() as stream, torch.cuda.stream(stream):
        call, graph = known.call.relaid(), torch.cuda.CUDAGraph()
        stream.synchronize()
        outcome = _captured(graph, lambda: both_ways(known, call))
        differs = ""
        for _ in range(1 if known.call.kwargs.get("inplace") else REPLAYS):  # each replay changes the input again
            _wipe(outcome, [*call.all_tensors(), *known.grads])
            graph.replay()
            differs = differs or known.differs(outcome)
        stream.synchronize()
        del outcome
        graph.reset()
    return lambda: differs


def _captured(graph: torch.cuda.CUDAGraph, step: Callable[[], Any]) -> Any:
    graph.capture_begin(capture_error_mode="thread_local")  # other threads may allocate meanwhile
    try:
        outcome = step()
    except Exception:
        with contextlib.suppress(RuntimeError):  # of the end of the capture, which would hide why
            graph.capture_end()
        raise
    graph.capture_end()
    return outcome


def _wipe(outcome: Outcome, inputs: list[Tensor]) -> None:
    """Nothing in the results; but for one that is an input itself, as the gradient of a sum is the gradient given."""
    kept = {tensor.untyped_storage().data_ptr() for tensor in inputs}
    for _, result in outcome.named():
        if result is not None and result.untyped_storage().data_ptr() not in kept:
            storage = torch.empty(0, dtype=torch.uint8, device=result.device).set_(result.untyped_storage())
            storage.fill_(0x5A)


def _check(stream: Any, differs: Check, *held: Call) -> Check:
    """Compare on `stream`, which is waited for; `held` are not freed before."""

    def check() -> str:
        with on(stream):
            found = differs()
            if stream is not None:
                stream.synchronize()
            held_until_now.clear()
            return found

    held_until_now = list(held)
    return check


Way = Callable[[Known, Streams, random.Random], Check]
WAYS: dict[Way, int] = {plainly: 8, without_gradient: 4, backward_elsewhere: 3}
WAYS_ON_A_GPU: dict[Way, int] = {**WAYS, from_another_stream: 4, in_a_graph: 1}


class Soak:
    """Threads that make known calls until told to stop, and what they found.

    Args:
        known: the calls.
        threads: how many at once.
        streams: where they run.
        seed: of what is chosen.
    """

    def __init__(self, known: list[Known], threads: int, streams: Streams, seed: int = 0) -> None:
        self.known, self.threads, self.streams = known, threads, streams
        self.ways = WAYS_ON_A_GPU if streams.cuda else WAYS
        self.counts: dict[str, Counter[str]] = {one.name: Counter() for one in known}
        self.faults: list[str] = []
        self._seeds = random.Random(seed)
        self._lock = threading.Lock()

    def round(self, seconds: float) -> None:
        """New threads, for so long; then they are gone."""
        end = time.monotonic() + seconds
        made = [
            threading.Thread(target=self._work, args=(self._seeds.random(), end), daemon=True)
            for _ in range(self.threads)
        ]
        for thread in made:
            thread.start()
        for thread in made:
            thread.join(max(end + _PATIENCE - time.monotonic(), 0))
        if any(thread.is_alive() for thread in made):
            faulthandler.dump_traceback(2)  # the standard error
            self.faults.append(f"a thread hangs: not done after {_PATIENCE:.0f} s; where, stands above")

    def _work(self, seed: float, end: float) -> None:
        torch.set_num_threads(1)  # which is a thread's own, where a library asks OpenMP: sums in the same order
        source = random.Random(seed)
        while time.monotonic() < end and not self.faults:
            under_way = [self._begin(source) for _ in range(source.randint(1, _BURST))]
            for known, way, check in under_way:
                self._finish(known, way, check)

    def _begin(self, source: random.Random) -> tuple[Known, str, Check]:
        known = source.choice(self.known)
        (way,) = source.choices(list(self.ways), list(self.ways.values()))
        try:
            return known, way.__name__, way(known, self.streams, source)
        except Exception as error:  # whatever an operator, PyTorch or CUDA raises
            message = f"raised {type(error).__name__}: {error}"
            return known, way.__name__, lambda: message

    def _finish(self, known: Known, way: str, check: Check) -> None:
        try:
            wrong = check()
        except Exception as error:
            wrong = f"raised {type(error).__name__}: {error}"
        with self._lock:
            self.counts[known.name][way] += 1
            if wrong:
                self.counts[known.name]["wrong"] += 1
                self.faults.append(f"{known.name}, call {known.number}, {way}: {wrong}: {known.call!r}")


# --- what a process holds -----------------------------------------------------------------------------------------------

# How much each may have grown by at the end. What is allocated is the same to the byte where nothing leaks; what the
# allocators keep, and what of the process is resident, goes up and down.
SLACK = {
    "GPU memory allocated": 1 << 20,
    "GPU memory reserved": 64 << 20,
    "resident memory": 64 << 20,
    "open files": 4,
    "threads": 4,
    "Python objects": 5000,
}


def measure(cuda: bool, objects: bool = False) -> dict[str, int]:
    """What is held while no thread is at work; Python's objects, where they are asked for."""
    gc.collect()
    held: dict[str, int] = {}
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held |= {
            "GPU memory allocated": torch.cuda.memory_allocated(),
            "GPU memory reserved": torch.cuda.memory_reserved(),
        }
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # what the C library has not given back is no leak
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return held | {
        "resident memory": pages * os.sysconf("SC_PAGESIZE"),
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        **({"Python objects": len(gc.get_objects())} if objects else {}),
    }


def cost_of_a_graph(count: int = 300) -> float:
    """Bytes of resident memory that a captured graph leaves behind though it is destroyed, where it is all PyTorch's own.

    They are the driver's: as many for a relu, forward and backward, as for an operator of ours.
    """
    x, stream = torch.zeros(64, device="cuda", requires_grad=True), torch.cuda.Stream()
    grad = torch.ones_like(x)

    def capture() -> None:
        with torch.cuda.stream(stream):
            for _ in range(count):
                graph = torch.cuda.CUDAGraph()
                stream.synchronize()
                _captured(graph, lambda: torch.autograd.grad(torch.relu(x), x, grad))
                for _ in range(REPLAYS):
                    graph.replay()
                stream.synchronize()
                graph.reset()

    capture()  # what is needed once
    before = measure(cuda=True)["resident memory"]
    capture()
    return max(measure(cuda=True)["resident memory"] - before, 0) / count


def growth(samples: list[dict[str, int]]) -> dict[str, tuple[int, int]]:
    """(the most in the second quarter, the least in the last) of each: what goes up and down alone does not grow so.

    The first quarter is not looked at: kernels are loaded and caches filled then.
    """
    found = {}
    for what in {what: None for sample in samples for what in sample}:
        numbers = [sample[what] for sample in samples if what in sample]
        quarter = max(len(numbers) // 4, 1)
        early, late = numbers[quarter : 2 * quarter] or numbers[:1], numbers[-quarter:]
        found[what] = max(early), min(late)
    return found


def what_stays(snapshot: dict[str, Any]) -> Counter[str]:
    """Bytes of GPU memory by the lines that allocated them, of a snapshot by PyTorch, from when lines were recorded on."""
    found = Counter[str]()
    torchs = str(Path(torch.__file__).parent)
    for block in (block for segment in snapshot["segments"] for block in segment["blocks"]):
        lines = [one for one in block.get("frames", ()) if not one["filename"].startswith(torchs)]
        if block["state"] == "active_allocated" and lines:
            named = (f"{Path(one['filename']).name}:{one['line']} {one['name']}" for one in lines[:4])
            found[" < ".join(named)] += block["size"]
    return found


def leaks(samples: list[dict[str, int]]) -> list[str]:
    """What has grown by more than its slack."""
    return [what for what, (early, late) in growth(samples).items() if late - early > SLACK[what]]


# --- the command line ---------------------------------------------------------------------------------------------------


@app.command()
def main(
    names: Annotated[list[str] | None, typer.Argument(metavar="[OPERATOR]...", help="By default all.")] = None,
    minutes: Annotated[float, typer.Option(help="How long, once the calls are drawn.")] = 10.0,
    threads: Annotated[int, typer.Option(min=1)] = 4,
    streams: Annotated[int, typer.Option(min=1, max=16, help="On a GPU.")] = 4,
    backend: Annotated[str, typer.Option(help="gpu or reference.")] = "gpu",
    start: Annotated[int, typer.Option("--seed")] = 0,
    pool: Annotated[int, typer.Option(min=1, help="Calls drawn for each operator.")] = 300,
    torchs: Annotated[
        bool, typer.Option("--torch", help="PyTorch's own functions instead: what fails there too is not ours.")
    ] = False,
) -> None:
    """Make random calls for minutes on end. Ends with 1 where one is wrong or something leaks."""
    device = {"gpu": "cuda", "reference": "cpu"}.get(backend)
    if device is None or set(names or ()) - set(FUZZED):
        raise typer.BadParameter(f"--backend gpu or reference; operators: {', '.join(FUZZED)}")
    if device == "cuda" and not torch.cuda.is_available():
        console.print("no CUDA GPU on this machine; --backend reference runs on the CPU")
        raise typer.Exit(2)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen = list(names or FUZZED)
    if device == "cuda":
        gpu.compile_ahead(console, chosen)
    again = f"python tools/soak.py {' '.join(names or ())} --backend {backend} --seed {start} --pool {pool}"
    with cupyops.never_slower(False), _in_order():  # kernels of ours alone
        begun = time.monotonic()
        try:
            known = _draw_all(chosen, pool, start, device, torchs)
        except Fault as fault:
            console.print(f"{fault}\n{again}", markup=False, highlight=False)
            raise typer.Exit(1) from None
        console.print(f"{len(known)} calls of {len(chosen)} operators were drawn in {time.monotonic() - begun:.0f} s")
        soak = Soak(known, threads, Streams(streams, device), start)
        graph = cost_of_a_graph() if device == "cuda" else 0.0
        samples = _run(soak, 60 * minutes, graph)
    if graph:
        console.print(
            f"A captured graph of PyTorch's own leaves {graph / 1024:.0f} KiB of resident memory: not counted."
        )
    _show(soak, samples)
    if soak.faults or leaks(samples):
        console.print(again, markup=False, highlight=False)
        raise typer.Exit(1)


@contextlib.contextmanager
def _in_order() -> Iterator[None]:
    """Deterministic algorithms, as bits are compared: what adds in no order, as attention of long sequences does, has
    another form for that."""
    settings: Any = torch.utils.deterministic
    before = torch.get_deterministic_debug_mode(), settings.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    settings.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before[0])
        settings.fill_uninitialized_memory = before[1]


def _draw_all(names: list[str], pool: int, start: int, device: str, torchs: bool) -> list[Known]:
    with Progress(console=console, transient=True) as progress:
        drawn = (draw(name, pool, start, device, torchs) for name in progress.track(names, description="drawing"))
        return [one for calls in drawn for one in calls]


def _run(soak: Soak, seconds: float, graph: float = 0.0) -> list[dict[str, int]]:
    """Rounds until the time is up, eight at least, or something is wrong; what was held after each.

    `graph`: bytes of resident memory that each graph costs, which are left out.
    """
    if soak.streams.cuda:
        torch.cuda.synchronize()  # the calls were drawn on the default stream
    samples: list[dict[str, int]] = []
    begun, quarters = time.monotonic(), 0
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=seconds)
        while (len(samples) < _ROUNDS or time.monotonic() < begun + seconds) and not soak.faults:
            soak.round(min(PERIOD, seconds / _ROUNDS))
            if not soak.faults:
                share = min((time.monotonic() - begun) / seconds, len(samples) / (_ROUNDS - 1))
                ends, quarters = int(4 * share) > quarters, int(4 * share)
                if ends:
                    plans.forget_all()
                if ends and quarters == 2 and soak.streams.cuda:
                    torch.cuda.memory._record_memory_history("state", stacks="python")
                held = measure(soak.streams.cuda, objects=ends)
                graphs = sum(count[in_a_graph.__name__] for count in soak.counts.values())
                samples.append(held | {"resident memory": held["resident memory"] - round(graphs * graph)})
            calls = sum(sum(count.values()) for count in soak.counts.values())
            progress.update(task, completed=time.monotonic() - begun, description=f"{calls} calls")
    return samples


def _show(soak: Soak, samples: list[dict[str, int]]) -> None:
    ways = [way.__name__ for way in soak.ways]
    table = Table("operator", "drawn", *(way.replace("_", " ") for way in ways), "wrong", title="calls")
    for name, count in soak.counts.items():
        drawn = sum(one.name == name for one in soak.known)
        table.add_row(name, str(drawn), *(str(count[way]) for way in [*ways, "wrong"]))
    console.print(table)
    if samples:
        held = Table(
            "held", "first", "early, at most", "late, at least", "slack", "", title=f"{len(samples)} measurements"
        )
        wrong = leaks(samples)
        for what, (early, late) in growth(samples).items():
            first = next(sample[what] for sample in samples if what in sample)
            numbers = (first, early, late, SLACK[what])
            held.add_row(what, *(f"{number:,}" for number in numbers), "[red]grows[/]" if what in wrong else "")
        console.print(held)
        if "GPU memory allocated" in wrong:
            for line, size in what_stays(torch.cuda.memory._snapshot()).most_common(10):
                console.print(f"{size:,} bytes since half of the time: {line}", markup=False, highlight=False)
    for fault in soak.faults[:5]:
        console.print(fault, style="red", markup=False, highlight=False)


if __name__ == "__main__":
    app()
