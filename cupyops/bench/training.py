"""A model's training step, timed in several ways: as it is, by torch.compile, Liger, `cupyops.swap`, and as a CUDA graph."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import optim
from .._kernel.graph import graph
from ..nn._swap import swap
from .case import module_of, shipped
from .model_table import Figures

VARIANTS = ("eager", "compile", "liger", "swap", "graph", "lean")
"""`swap` is `cupyops.swap(model)` with an optimizer of ours that clips in its step; `graph` is that as a CUDA graph; `lean`
is such a graph of a model that makes no logits (`keep_logits=False`)."""
OURS = ("swap", "graph", "lean")
WARM, ROUNDS, STEPS = 4, 11, 4  # steps that do not count; times that are taken, of how many steps each
BATCHES = 4


Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Model:
    """A training step.

    Attributes:
        name: what the command line calls it.
        about: sizes, dtypes and the optimizer, in a line.
        needs: the package that has the model, None for PyTorch alone.
        make: the model, or its tiny twin, on the CPU and in float32.
        batch: the `i`-th batch, of the twin's size where that is asked for.
        loss: of a model and a batch.
        unit: what a step is counted in, and how many there are in one.
        half: "pure" for parameters in bfloat16, "autocast" for float32 ones under autocast.
        images: whether parameters and images are channels_last.
        sgd: SGD with momentum instead of AdamW.
        clip: the norm to which gradients are clipped; None: they are not.
        liger: puts Liger's kernels into the model; None where Liger has none for it.
        lean: it makes no logits where `cupyops.swap` is told so.
    """

    name: str
    about: str
    needs: str | None
    make: Callable[[bool], nn.Module]
    batch: Callable[[int, bool], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    unit: str
    each: int
    half: str = "autocast"
    images: bool = False
    sgd: bool = False
    clip: float | None = 1.0
    liger: Callable[[nn.Module], None] | None = None
    lean: bool = False


@functools.cache
def models() -> Mapping[str, Model]:
    """The models that are declared beside the operators' benchmarks, by name."""
    found: Mapping[str, Model] = module_of(shipped() / "models.py").MODELS
    return found


class Step:
    """A model with its optimizer, from a state, ready for one step after another."""

    def __init__(self, model: Model, variant: str, state: dict[str, Tensor], device: str, tiny: bool) -> None:
        self.model, self.device = model, device
        with torch.device(device):  # where random numbers that are overwritten at once take no time
            module = model.make(tiny)
        module.load_state_dict(state)
        ours = variant in OURS
        module = module.to(device, torch.bfloat16) if model.half == "pure" else module.to(device)
        if model.images:
            module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.module = module.train()
        self.note = ""
        if variant == "liger":
            assert model.liger is not None
            model.liger(module)
        if ours:
            swapped = swap(module, keep_logits=variant != "lean")
            self.note = f"{len(swapped.replaced)} replaced, {len(swapped.kept)} kept"
        self.called = _compiled(module, device) if variant == "compile" else module
        self.parameters = [one for one in module.parameters() if one.requires_grad]
        self.optimizer = self._optimizer(ours, variant in ("graph", "lean"))
        self.clip: Callable[[float], Any] = functools.partial(nn.utils.clip_grad_norm_, self.parameters)
        if ours:
            self.clip = self.optimizer.clip_grad_norm_
        self.step: Callable[..., Tensor] = graph(self._step) if variant in ("graph", "lean") else self._step

    def _optimizer(self, ours: bool, capturable: bool) -> Any:
        options: dict[str, Any] = {} if ours or self.device == "cpu" else {"fused": True}
        library: Any = optim if ours else torch.optim
        if self.model.sgd:
            return library.SGD(self.parameters, lr=0.01, momentum=0.9, weight_decay=1e-4, **options)
        if capturable:
            options["capturable"] = True
        return library.AdamW(self.parameters, lr=1e-4, weight_decay=0.1, betas=(0.9, 0.95), **options)

    def _step(self, *batch: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        with torch.autocast(self.device, torch.bfloat16, enabled=self.model.half == "autocast"):
            loss = self.model.loss(self.called, batch)
        loss.backward()
        if self.model.clip is not None:
            self.clip(self.model.clip)
        self.optimizer.step()
        return loss.detach()


def _compiled(module: nn.Module, device: str) -> Any:
    return torch.compile(module, backend="aot_eager" if device == "cpu" else "inductor")


def why_not(model: Model, variant: str, device: str) -> str | None:
    """Return why a variant of a model is not available here, or None."""
    if model.needs is not None and importlib.util.find_spec(model.needs) is None:
        return f"{model.needs} is not installed"
    if variant == "liger" and model.liger is None:
        return "Liger has nothing for it"
    if variant == "liger" and importlib.util.find_spec("liger_kernel") is None:
        return "liger-kernel is not installed"
    if variant == "lean" and not model.lean:
        return "its logits are no part of its memory"
    return "there is no GPU" if variant in ("graph", "lean", "liger") and device == "cpu" else None


def state_of(model: Model, tiny: bool) -> dict[str, Tensor]:
    """The parameters that every variant begins with."""
    torch.manual_seed(0)
    with torch.device("cpu" if tiny else "cuda"):
        made = model.make(tiny)
    return {name: value.detach().cpu().clone() for name, value in made.state_dict().items()}


def batches_of(model: Model, device: str, tiny: bool) -> list[Batch]:
    """The batches that every variant sees."""
    found = []
    for index in range(BATCHES):
        batch = tuple(one.to(device) for one in model.batch(index, tiny))
        if model.images:
            batch = tuple(one.contiguous(memory_format=torch.channels_last) if one.dim() == 4 else one for one in batch)
        found.append(batch)
    return found


class Timed:
    """A variant under measurement: its first steps are made, and rounds of more are to come."""

    def __init__(
        self, model: Model, variant: str, state: dict[str, Tensor], batches: Sequence[Batch], tiny: bool = False
    ) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(1)
        began = time.perf_counter()
        self.model, self.variant, self._batches = model, variant, batches
        self._run = Step(model, variant, state, "cuda", tiny)
        self._losses: list[Tensor] = []
        self._times: list[float] = []
        self._steps(1)
        self._first = time.perf_counter() - began
        self._steps(WARM - 1)
        self._peak = (torch.cuda.max_memory_allocated() - before) / 2**30

    def round(self) -> None:
        """Time some steps, with the host as far ahead as it gets."""
        began = time.perf_counter()
        self._steps(STEPS)
        self._times.append(1e3 * (time.perf_counter() - began) / STEPS)

    def _steps(self, count: int) -> None:
        for _ in range(count):
            self._losses.append(self._run.step(*self._batches[len(self._losses) % BATCHES]).clone())
        torch.cuda.synchronize()

    def figures(self) -> Figures:
        """The median round."""
        times, model = self._times, self.model
        return Figures(
            model.name, model.about, self.variant, statistics.median(times), min(times), max(times), model.each,
            model.unit, self._peak, self._first, [loss.item() for loss in self._losses], self._run.note,
        )  # fmt: skip


def measure(timed: Sequence[Timed]) -> list[Figures]:
    """The variants of a model, a round of each in turn, there and back: what slows the machine for a while slows them all,
    and who comes after one that heats it does so every other time."""
    gc.collect()
    gc.freeze()  # no collection of one's garbage looks through the modules of all the others
    try:
        for turn in range(ROUNDS):
            for one in timed[:: -1 if turn % 2 else 1]:
                torch.cuda.synchronize()
                one.round()
    finally:
        gc.unfreeze()
    return [one.figures() for one in timed]


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Remove all that earlier runs have left on the host and on the GPU."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
        gc.collect()
        torch.cuda.empty_cache()


def compare(
    model: Model, variant: str, state: dict[str, Tensor], batches: Sequence[Batch], steps: int = 3
) -> list[float]:
    """The losses of a few steps of the tiny twin, on the CPU."""
    torch.compiler.reset()
    torch.manual_seed(1)
    run = Step(model, variant, state, "cpu", tiny=True)
    return [run.step(*batches[index % BATCHES]).item() for index in range(steps)]
