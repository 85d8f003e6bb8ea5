"""Times on the GPU, with cold caches and the host out of the way; and times of the host."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .._util import torch_private

FLUSH = 256 << 20  # bytes written before each sample: more than any L2 cache holds
AHEAD = 500_000  # cycles that the GPU waits, in which the host enqueues the sample
MOST_AHEAD = 64 * AHEAD  # where that is too little: some 20 ms


@dataclass(frozen=True)
class Time:
    """Microseconds: the median of samples, and their quartiles."""

    median: float
    low: float
    high: float
    samples: int

    @staticmethod
    def of(samples: Sequence[float]) -> Time:
        """Summarise single samples, at least one."""
        ordered = sorted(samples)
        low, high = (ordered[min(len(ordered) - 1, round(q * (len(ordered) - 1)))] for q in (0.25, 0.75))
        return Time(statistics.median(ordered), low, high, len(ordered))


class Clock(Protocol):
    """Takes samples: calls what it is given and says how long it took."""

    def sample(self, call: Callable[[Any], Any], before: Callable[[], Any] | None = None) -> float:
        """us of `call`, which is given what `before`, outside of the time, returns."""
        ...


class GpuClock:
    """Between events on the current stream, with nothing of use left in the L2 cache."""

    def __init__(self) -> None:
        self._flush = torch.empty(FLUSH, dtype=torch.uint8, device="cuda")

    def sample(self, call: Callable[[Any], Any], before: Callable[[], Any] | None = None) -> float:
        """us of `call`. Where the GPU came to it before the host had enqueued all of it, once more with a longer wait."""
        ahead = AHEAD
        while True:
            given = None if before is None else before()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._flush.zero_()
            torch_private.spin(ahead)
            begin.record()
            result = call(given)  # kept until it is timed: what is freed early could be waited for
            end.record()
            late = begin.query()
            end.synchronize()
            del result
            if not late or ahead >= MOST_AHEAD:  # what waits for the GPU itself is late always
                return begin.elapsed_time(end) * 1e3
            ahead *= 2


def interleaved(
    runs: dict[str, Callable[[Clock], dict[str, float]]], clock: Clock, seconds: float = 0.25, most: int = 40
) -> dict[str, dict[str, Time]]:
    """The times of several, a sample of each in turn, so that the clocks of the GPU drift for all alike.

    Args:
        runs: name -> a function that takes one sample of each of its parts, by name.
        clock: what they sample with.
        seconds: after which no round begins, once there are nine: a GPU at its limit of power has moods.
        most: rounds.
    """
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in runs}
    begun = time.monotonic()
    order = list(runs)
    for round in range(most if runs else 0):
        if round >= 9 and time.monotonic() - begun > seconds:
            break
        for name in order[round % len(order) :] + order[: round % len(order)]:
            for part, us in runs[name](clock).items():
                samples[name].setdefault(part, []).append(us)
    return {name: {part: Time.of(found) for part, found in parts.items()} for name, parts in samples.items()}


def host(call: Callable[[], Any], calls: int = 2000, repeats: int = 9) -> Time:
    """Microseconds of the host for one call, of many without a wait between them."""
    found = []
    for _ in range(200):
        call()
    for _ in range(repeats):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(calls):
            call()
        found.append((time.perf_counter() - begun) / calls * 1e6)
    torch.cuda.synchronize()
    return Time.of(found)


def wall(call: Callable[[], Any], calls: int = 30) -> float:
    """Microseconds of a call, host and device together, of many one after the other."""
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(calls):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / calls * 1e6


def peak_memory(call: Callable[[], Any]) -> int:
    """Bytes that a call needs beyond what is there before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def ceilings(clock: Clock) -> dict[str, float]:
    """Best rates of this GPU, by PyTorch: GB/s of copying, reading and writing, TFLOP/s of matrix products."""
    x = torch.randn(1 << 29, device="cuda").bfloat16()
    y = torch.empty_like(x)
    size = x.numel() * x.element_size()
    calls: list[tuple[str, Callable[[Any], Any], float]] = [
        ("copy", lambda _: y.copy_(x), 2 * size / 1e3),
        ("read", lambda _: x.view(torch.float32).amax(), size / 1e3),
        ("write", lambda _: y.fill_(1), size / 1e3),
    ]
    for dtype, n in ((torch.bfloat16, 8192), (torch.float32, 4096)):
        a, b = (torch.randn(n, n, device="cuda").to(dtype) for _ in range(2))
        calls.append((f"matmul {str(dtype).removeprefix('torch.')}", _product(a, b), 2.0 * n**3 / 1e6))
    found = {}
    for name, call, work in calls:
        samples = [clock.sample(call) for _ in range(12)][2:]
        found[name] = work / statistics.median(samples)
    return found


def _product(a: Tensor, b: Tensor) -> Callable[[Any], Tensor]:
    return lambda _: torch.mm(a, b)


def leaves(arguments: Sequence[Any]) -> list[Tensor]:
    """The arguments that get a gradient."""
    return [one for one in arguments if isinstance(one, Tensor) and one.requires_grad]
