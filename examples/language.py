"""What the examples of language models share: a text of characters, a loop on one device or several, checkpoints."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import cupyops

console = Console()


# --- the text ---


@dataclass
class Text:
    """Characters as numbers; the last tenth is held for the evaluation."""

    name: str
    alphabet: str
    train: Tensor
    held: Tensor

    def batch(self, part: Tensor, rows: int, context: int, seed: int) -> tuple[Tensor, Tensor]:
        """Rows of a part, drawn by a seed, and what follows each character."""
        starts = torch.randint(len(part) - context, (rows,), generator=torch.Generator().manual_seed(seed))
        drawn = part[starts.unsqueeze(1) + torch.arange(context + 1)]
        return drawn[:, :-1].contiguous(), drawn[:, 1:].contiguous()

    @staticmethod
    def of(name: str, text: str, context: int, alphabet: str | None = None) -> Text:
        """In its own alphabet, or in one that has its characters and more."""
        alphabet = alphabet or "".join(sorted(set(text)))
        numbers = {character: number for number, character in enumerate(alphabet)}
        whole = torch.tensor([numbers[character] for character in text], dtype=torch.long)
        split = len(whole) * 9 // 10
        if len(whole) - split <= context:
            said = f"{name} has {len(whole)} characters, expected {10 * (context + 1)} or more"
            raise typer.BadParameter(said, param_hint="--data")
        return Text(name, alphabet, whole[:split], whole[split:])


def read(path: Path | None, context: int, alphabet: str | None = None) -> Text:
    """A file's text, or that of the package."""
    if path is not None:
        return Text.of(str(path), read_text(path), context, alphabet)
    files = sorted(Path(cupyops.__file__).parent.rglob("*.py"))
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    return Text.of("cupyops' source text", text, context, alphabet)


def read_text(path: Path) -> str:
    """A file of `--data`."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{path} cannot be read as text: {error}", param_hint="--data") from error


# --- training ---


@dataclass
class Devices:
    """What this process computes on, and which of how many it is."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @staticmethod
    def found(device: str | None) -> Devices:
        """As torchrun says, or one."""
        kind = device or ("cuda" if torch.cuda.is_available() else "cpu")
        if "RANK" not in os.environ:
            return Devices(torch.device(kind))
        local = torch.device(kind, int(os.environ["LOCAL_RANK"])) if kind == "cuda" else torch.device(kind)
        if kind == "cuda":
            torch.cuda.set_device(local)
        dist.init_process_group("nccl" if kind == "cuda" else "gloo")
        return Devices(local, dist.get_rank(), dist.get_world_size())


class Trainer:
    """A network with its optimizer and its schedule, and the losses so far.

    The network is a module: `network(characters, targets)` is the mean loss, `network(characters)` the scores of the
    character after the last, `network.blocks` what FSDP2 gathers one after another, `network.sizes` a dict of its sizes.
    """

    def __init__(
        self, make: Callable[[], nn.Module], devices: Devices, lr: float, steps: int, seed: int, ours: bool = True
    ) -> None:
        torch.manual_seed(seed)
        self.devices = devices
        self.network: Any = make().to(devices.device)
        half = torch.bfloat16 if devices.device.type == "cuda" else torch.float32
        self.autocast = torch.autocast(devices.device.type, half, enabled=half is torch.bfloat16)
        if devices.size > 1:
            shard(self.network, devices)
        optim: Any = cupyops.optim if ours else torch.optim
        self.optimizer = optim.AdamW(self.trained(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
        warm = max(1, min(100, steps // 10))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: min((step + 1) / warm, 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / max(1, steps))))),
        )
        self.clip: Any = cupyops.nn.utils.clip_grad_norm_ if ours else nn.utils.clip_grad_norm_
        self.losses: list[float | Tensor] = []

    def trained(self) -> list[nn.Parameter]:
        """The parameters that are not frozen."""
        return [parameter for parameter in self.network.parameters() if parameter.requires_grad]

    def step(self, characters: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = self.loss(characters, targets)
        loss.backward()
        self.clip(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.losses.append(loss.detach())  # read later, so that the GPU is not waited for

    def loss(self, characters: Tensor, targets: Tensor) -> Tensor:
        """Of this device's rows."""
        rows = slice(self.devices.rank, None, self.devices.size)
        characters, targets = (one[rows].contiguous().to(self.devices.device) for one in (characters, targets))
        with self.autocast:
            return self.network(characters, targets)

    @torch.no_grad()
    def evaluate(self, text: Text, batch: int) -> float:
        """The mean loss of a few batches that were held."""
        batches = (text.batch(text.held, batch, self.network.sizes["context"], seed) for seed in range(4))
        return self.mean(torch.stack([self.loss(*one) for one in batches]).mean())

    def mean(self, loss: Tensor) -> float:
        """Over all devices."""
        if self.devices.size > 1:
            dist.all_reduce(loss)
        return loss.item() / self.devices.size

    def values(self) -> list[float]:
        """The losses of all steps so far, of all devices together."""
        self.losses = [one if isinstance(one, float) else self.mean(one.clone()) for one in self.losses]
        return [float(one) for one in self.losses]


def shard(network: Any, devices: Devices) -> None:
    """FSDP2: a block is gathered when it is its turn."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(devices.device.type, (devices.size,))
    for block in network.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(network, mesh=mesh)


def save(path: Path, trainer: Trainer, text: Text) -> None:
    """What is trained in one file, the same on one device and on several; the old one stays until the new one is whole."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True, ignore_frozen_params=True)
    model, optimizer = get_state_dict(trainer.network, trainer.optimizer, options=whole)
    losses = trainer.values()
    if trainer.devices.rank == 0:
        kept = {"model": model, "optimizer": optimizer, "schedule": trainer.schedule.state_dict(), "losses": losses}
        part = path.with_name(f"{path.name}.part")
        torch.save({**kept, "config": trainer.network.sizes, "alphabet": text.alphabet}, part)
        part.replace(path)


def load(path: Path, trainer: Trainer, text: Text, hint: str = "--checkpoint") -> None:
    """Go on where `save` was."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    kept = torch.load(path, map_location="cpu", weights_only=True)
    if kept["config"] != trainer.network.sizes or kept["alphabet"] != text.alphabet:
        raise typer.BadParameter(
            f"{path} is of another network or text: {kept['config']}; give its sizes, or another file",
            param_hint=hint,
        )
    set_state_dict(
        trainer.network,
        trainer.optimizer,
        model_state_dict=kept["model"],
        optim_state_dict=kept["optimizer"],
        options=StateDictOptions(full_state_dict=True, strict=False),  # what is frozen is not in it
    )
    trainer.schedule.load_state_dict(kept["schedule"])
    trainer.losses = list(kept["losses"])


def train(runs: list[Trainer], text: Text, steps: int, batch: int, every: int, checkpoint: Path | None) -> float:
    """Every run sees the same batches in the same order; how many characters a second the first one took."""
    first, context = runs[0], runs[0].network.sizes["context"]
    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, TextColumn("{task.fields[note]}"), console=console, disable=first.devices.rank > 0
    ) as progress:
        done = len(first.losses)
        task, note, taken, count = progress.add_task("training", total=steps, completed=done, note=""), "", 0.0, 0
        for step in range(done, steps):
            drawn = text.batch(text.train, batch, context, seed=1000 + step)
            began = time.perf_counter()
            first.step(*drawn)
            last = step == steps - 1
            if last or step % 10 == 9:
                loss = first.mean(torch.as_tensor(first.losses[-1]).clone())
                note = f"loss {loss:.3f}"
            taken, count = taken + time.perf_counter() - began, count + batch * context
            for twin in runs[1:]:
                twin.step(*drawn)
            if last or step % every == every - 1:
                progress.console.print(
                    f"step {step + 1}: loss on the text that was held {first.evaluate(text, batch):.3f}"
                )
                if checkpoint is not None:
                    save(checkpoint, first, text)
            progress.update(task, completed=step + 1, note=f"{note}  {count / taken:,.0f} characters/s")
    return count / taken if taken else math.nan


@torch.no_grad()
def sample(trainer: Trainer, text: Text, count: int, seed: int) -> str:
    """Characters drawn one after another, by what the network says comes next."""
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.tensor([[text.alphabet.find("\n") % len(text.alphabet)]])
    for _ in range(count):
        with trainer.autocast:
            scores = trainer.network(drawn[:, -trainer.network.sizes["context"] :].to(trainer.devices.device))
        chosen = torch.multinomial(scores.float().cpu().softmax(-1), 1, generator=generator)
        drawn = torch.cat((drawn, chosen), 1)
    return "".join(text.alphabet[number] for number in drawn[0, 1:].tolist())


def plot(path: Path, runs: list[Trainer], title: str) -> None:
    """The loss of each step, as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for run, name, line in zip(runs, ("cupyops", "PyTorch"), ("-", "--")):
        axes.plot(np.array(run.values()), line, label=name, linewidth=1)
    axes.set(xlabel="step", ylabel="loss, nats per character", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def session(
    runs: list[Trainer],
    text: Text,
    *,
    steps: int,
    batch: int,
    every: int,
    checkpoint: Path | None,
    picture: Path,
    characters: int,
    seed: int,
    trace: bool,
) -> None:
    """Go on from a checkpoint, train, evaluate, draw, write; runs beyond the first are twins to compare with."""
    first, devices = runs[0], runs[0].devices
    if batch % devices.size:
        raise typer.BadParameter(
            f"{batch} rows, expected a multiple of the {devices.size} devices", param_hint="--batch-size"
        )
    if checkpoint is not None and checkpoint.exists():
        load(checkpoint, first, text)
    console.quiet = devices.rank > 0
    size = sum(parameter.numel() for parameter in first.network.parameters())
    console.print(
        f"{text.name}: {len(text.train):,} characters of {len(text.alphabet)} kinds to train, {len(text.held):,} held; "
        f"{size:,} parameters, on {devices.size} x {devices.device.type}", highlight=False, soft_wrap=True,
    )  # fmt: skip
    if trace:
        with cupyops.trace() as seen:
            first.loss(*text.batch(text.train, batch, first.network.sizes["context"], seed=0)).backward()
        console.print(str(seen), soft_wrap=True, markup=False)
    speed = train(runs, text, steps, batch, every, checkpoint)
    losses = [run.values() for run in runs]
    console.print(f"last loss: [bold]{losses[0][-1]:.4f}[/], {speed:,.0f} characters a second", highlight=False)
    for values in losses[1:]:
        difference = max(abs(a - b) for a, b in zip(losses[0], values))
        console.print(
            f"PyTorch: {values[-1]:.4f}; largest difference in loss at any step: {difference:.2e}", highlight=False
        )
    if devices.rank == 0:
        plot(picture, runs, f"{text.name}: loss {losses[0][-1]:.3f}")
        console.print(f"loss curve: {picture}")
    if characters:
        written = sample(first, text, characters, seed)
        console.print(written, markup=False, highlight=False, soft_wrap=True)
    if devices.size > 1:
        dist.destroy_process_group()
