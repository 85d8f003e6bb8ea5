"""Train a small language model of characters, by the operators of cupyops, on one device or several.

python examples/train_gpt.py                        on the source text of cupyops itself; nothing is downloaded
python examples/train_gpt.py --data FILE            on a text of yours
python examples/train_gpt.py --compare              the same network by PyTorch's functions, step by step beside it
python examples/train_gpt.py --checkpoint gpt.pt    keep it after each evaluation, and go on from there if it is there
python examples/train_gpt.py --simulate 2           then two steps of the kernels in the simulator, compared with PyTorch
torchrun --nproc-per-node 2 examples/train_gpt.py   FSDP2: each device has a part of each parameter, and of each batch
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import cupyops

console = Console()
F = nn.functional


# --- the network ---


class Torch:
    """What the network calls, as PyTorch has it: the twin of cupyops."""

    linear = staticmethod(F.linear)
    embedding = staticmethod(F.embedding)
    rms_norm = staticmethod(F.rms_norm)
    scaled_dot_product_attention = staticmethod(F.scaled_dot_product_attention)

    @staticmethod
    def swiglu(both: Tensor) -> Tensor:
        gate, up = both.chunk(2, -1)
        return F.silu(gate) * up

    @staticmethod
    def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos[: x.shape[-2]], sin[: x.shape[-2]]
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    @staticmethod
    def fused_linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor) -> Tensor:
        logits = F.linear(x, weight).float()
        return F.cross_entropy(logits.flatten(0, -2), target.flatten())


@dataclass(frozen=True)
class Config:
    """The sizes of a network."""

    characters: int
    layers: int
    heads: int
    kv_heads: int
    dim: int
    context: int


class Block(nn.Module):
    """Attention and a gated network, each behind a norm and added to what came in."""

    def __init__(self, config: Config, by: Any) -> None:
        super().__init__()
        self.by, self.config = by, config
        dim, head_dim = config.dim, config.dim // config.heads
        hidden = -(-8 * dim // 3 // 16) * 16
        self.attention_norm, self.network_norm = (nn.Parameter(torch.ones(dim)) for _ in range(2))
        self.qkv = nn.Parameter(torch.randn((config.heads + 2 * config.kv_heads) * head_dim, dim) * 0.02)
        self.out = nn.Parameter(torch.randn(dim, dim) * 0.02 / math.sqrt(2 * config.layers))
        self.gate_up = nn.Parameter(torch.randn(2 * hidden, dim) * 0.02)
        self.down = nn.Parameter(torch.randn(dim, hidden) * 0.02 / math.sqrt(2 * config.layers))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        by, config = self.by, self.config
        heads, kv_heads = config.heads, config.kv_heads
        h = by.rms_norm(x, x.shape[-1:], self.attention_norm)
        h = by.linear(h, self.qkv).unflatten(-1, (heads + 2 * kv_heads, -1)).transpose(1, 2)
        q, k, v = h.split((heads, kv_heads, kv_heads), 1)
        q, k = by.rope(q, cos, sin), by.rope(k, cos, sin)
        h = by.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        x = x + by.linear(h.transpose(1, 2).flatten(2), self.out)
        h = by.rms_norm(x, x.shape[-1:], self.network_norm)
        return x + by.linear(by.swiglu(by.linear(h, self.gate_up)), self.down)


class GPT(nn.Module):
    """A decoder of characters, whose embedding is its head too. `by` is cupyops or `Torch`."""

    def __init__(self, config: Config, by: Any = cupyops) -> None:
        super().__init__()
        self.by, self.config = by, config
        self.embedding = nn.Parameter(torch.randn(config.characters, config.dim) * 0.02)
        self.blocks = nn.ModuleList(Block(config, by) for _ in range(config.layers))
        self.norm = nn.Parameter(torch.ones(config.dim))
        pairs = config.dim // config.heads // 2
        angles = torch.outer(torch.arange(config.context), 10000.0 ** -(torch.arange(pairs) / pairs))
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, characters: Tensor, targets: Tensor | None = None) -> Tensor:
        """The mean loss, or without targets the scores of the character after the last."""
        x = self.by.embedding(characters, self.embedding)
        cos, sin = (table.to(x.dtype) for table in (self.cos, self.sin))
        for block in self.blocks:
            x = block(x, cos, sin)
        x = self.by.rms_norm(x, x.shape[-1:], self.norm)
        if targets is None:
            return self.by.linear(x[:, -1], self.embedding)
        return self.by.fused_linear_cross_entropy(x, self.embedding, targets)


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
        return drawn[:, :-1], drawn[:, 1:]


def read(path: Path | None, context: int) -> Text:
    """A file's text, or that of the package."""
    if path is None:
        files = sorted(Path(cupyops.__file__).parent.rglob("*.py"))
        name, text = "cupyops' source text", "".join(file.read_text(encoding="utf-8") for file in files)
    else:
        try:
            name, text = str(path), path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise typer.BadParameter(f"{path} cannot be read as text: {error}", param_hint="--data") from error
    alphabet = "".join(sorted(set(text)))
    numbers = {character: number for number, character in enumerate(alphabet)}
    whole = torch.tensor([numbers[character] for character in text], dtype=torch.long)
    split = len(whole) * 9 // 10
    if len(whole) - split <= context:
        needed = 10 * (context + 1)
        raise typer.BadParameter(f"{name} has {len(whole)} characters, expected {needed} or more", param_hint="--data")
    return Text(name, alphabet, whole[:split], whole[split:])


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
    """A network with its optimizer and its schedule, and the losses so far."""

    def __init__(self, config: Config, by: Any, devices: Devices, lr: float, steps: int, seed: int) -> None:
        torch.manual_seed(seed)
        self.devices = devices
        self.model = GPT(config, by).to(devices.device)
        half = torch.bfloat16 if devices.device.type == "cuda" else torch.float32
        self.autocast = torch.autocast(devices.device.type, half, enabled=half is torch.bfloat16)
        if devices.size > 1:
            shard(self.model, devices)
        optim = cupyops.optim.AdamW if by is cupyops else torch.optim.AdamW
        self.optimizer = optim(self.model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
        warm = max(1, min(100, steps // 10))
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer,
            lambda step: min((step + 1) / warm, 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, step / max(1, steps))))),
        )
        self.clip = cupyops.nn.utils.clip_grad_norm_ if by is cupyops else nn.utils.clip_grad_norm_
        self.losses: list[float | Tensor] = []

    def step(self, characters: Tensor, targets: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = self.loss(characters, targets)
        loss.backward()
        self.clip(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.losses.append(loss.detach())  # read later, so that the GPU is not waited for

    def loss(self, characters: Tensor, targets: Tensor) -> Tensor:
        """Of this device's rows."""
        rows = slice(self.devices.rank, None, self.devices.size)
        characters, targets = (one[rows].to(self.devices.device) for one in (characters, targets))
        with self.autocast:
            return self.model(characters, targets)

    @torch.no_grad()
    def evaluate(self, text: Text, batch: int) -> float:
        """The mean loss of a few batches that were held."""
        batches = (text.batch(text.held, batch, self.model.config.context, seed) for seed in range(4))
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


def shard(model: GPT, devices: Devices) -> None:
    """FSDP2: a block is gathered when it is its turn."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(devices.device.type, (devices.size,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def save(path: Path, trainer: Trainer, text: Text) -> None:
    """All of it in one file, the same on one device and on several; the old one stays until the new one is whole."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    whole = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer, options=whole)
    losses = trainer.values()
    if trainer.devices.rank == 0:
        kept = {"model": model, "optimizer": optimizer, "schedule": trainer.schedule.state_dict(), "losses": losses}
        part = path.with_name(f"{path.name}.part")
        torch.save({**kept, "config": asdict(trainer.model.config), "alphabet": text.alphabet}, part)
        part.replace(path)


def load(path: Path, trainer: Trainer, text: Text) -> None:
    """Go on where `save` was."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    kept = torch.load(path, map_location="cpu", weights_only=True)
    if kept["config"] != asdict(trainer.model.config) or kept["alphabet"] != text.alphabet:
        raise typer.BadParameter(
            f"{path} is of another network or text: {kept['config']}; give its sizes, or another file",
            param_hint="--checkpoint",
        )
    set_state_dict(
        trainer.model,
        trainer.optimizer,
        model_state_dict=kept["model"],
        optim_state_dict=kept["optimizer"],
        options=StateDictOptions(full_state_dict=True),
    )
    trainer.schedule.load_state_dict(kept["schedule"])
    trainer.losses = list(kept["losses"])


def train(runs: list[Trainer], text: Text, steps: int, batch: int, every: int, checkpoint: Path | None) -> float:
    """Every run sees the same batches in the same order; how many characters a second the first one took."""
    first, context = runs[0], runs[0].model.config.context
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
            scores = trainer.model(drawn[:, -trainer.model.config.context :].to(trainer.devices.device))
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


def simulate(config: Config, text: Text, steps: int, lr: float, seed: int) -> None:
    """A few steps by the kernels, in the simulator, and by PyTorch: both come to the same losses."""
    ours, theirs = (Trainer(config, by, Devices(torch.device("cpu")), lr, steps, seed) for by in (cupyops, Torch))
    launches = []
    for step in range(steps):
        drawn = text.batch(text.train, 1, min(16, config.context), seed=step)
        with cupyops.simulate(), cupyops.trace() as seen:
            ours.step(*drawn)
        theirs.step(*drawn)
        launches += seen.launches()
    torch.testing.assert_close(ours.values(), theirs.values(), rtol=1e-4, atol=1e-4)
    names = sorted({launch.kernel for launch in launches})
    console.print(f"{steps} steps of one row in the simulator end as those of PyTorch. It ran:", *names, sep="\n  ")


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    data: Annotated[Path | None, typer.Option(help="A file of text.")] = None,
    steps: Annotated[int, typer.Option(min=1)] = 300,
    batch: Annotated[int, typer.Option("--batch-size", min=1, help="Rows in a step, over all devices.")] = 32,
    context: Annotated[int, typer.Option(min=2, help="Characters in a row.")] = 128,
    layers: Annotated[int, typer.Option(min=1)] = 4,
    heads: Annotated[int, typer.Option(min=1)] = 4,
    kv_heads: Annotated[int, typer.Option(min=1, help="Heads of keys and values.")] = 2,
    dim: Annotated[int, typer.Option(min=8)] = 128,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate.")] = 2e-3,
    every: Annotated[int, typer.Option("--evaluate-every", min=1, help="Steps between evaluations.")] = 100,
    compare: Annotated[bool, typer.Option("--compare", help="Train PyTorch's twin beside it.")] = False,
    checkpoint: Annotated[Path | None, typer.Option(help="Where to keep it, and from where to go on.")] = None,
    picture: Annotated[Path, typer.Option("--plot", help="Where to draw the loss.")] = Path("out/gpt_loss.png"),
    characters: Annotated[int, typer.Option("--sample", min=0, help="Then write so many characters.")] = 200,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda if there is one.")] = None,
    seed: int = 0,
    trace: Annotated[bool, typer.Option(help="Print which kernels a step runs.")] = False,
    simulated: Annotated[
        int, typer.Option("--simulate", min=0, help="Then so many steps of the kernels, in the simulator.")
    ] = 0,
) -> None:
    """Train, evaluate, write, draw."""
    if dim % (2 * heads) or heads % kv_heads:
        raise typer.BadParameter(f"dim {dim} is no multiple of 2 * heads, or heads {heads} none of kv_heads {kv_heads}")
    devices = Devices.found(device)
    if batch < devices.size:
        raise typer.BadParameter(f"{batch} rows for {devices.size} devices", param_hint="--batch-size")
    text = read(data, context)
    config = Config(len(text.alphabet), layers, heads, kv_heads, dim, context)
    runs = [Trainer(config, by, devices, lr, steps, seed) for by in ((cupyops, Torch) if compare else (cupyops,))]
    if checkpoint is not None and checkpoint.exists():
        load(checkpoint, runs[0], text)
    talks = devices.rank == 0
    console.quiet = not talks
    size = sum(parameter.numel() for parameter in runs[0].model.parameters())
    console.print(
        f"{text.name}: {len(text.train):,} characters of {len(text.alphabet)} kinds to train, {len(text.held):,} held; "
        f"{size:,} parameters, on {devices.size} x {devices.device.type}", highlight=False, soft_wrap=True,
    )  # fmt: skip
    if trace:
        with cupyops.trace() as seen:
            runs[0].loss(*text.batch(text.train, batch, context, seed=0)).backward()
        console.print(str(seen), soft_wrap=True, markup=False)
    speed = train(runs, text, steps, batch, every, checkpoint)
    losses = [run.values() for run in runs]
    console.print(f"last loss: [bold]{losses[0][-1]:.4f}[/], {speed:,.0f} characters a second", highlight=False)
    if compare:
        difference = max(abs(a - b) for a, b in zip(*losses))
        console.print(
            f"PyTorch: {losses[1][-1]:.4f}; largest difference in loss at any step: {difference:.2e}", highlight=False
        )
    if talks:
        plot(picture, runs, f"{text.name}: loss {losses[0][-1]:.3f}")
        console.print(f"loss curve: {picture}")
    if characters:
        written = sample(runs[0], text, characters, seed)
        console.print(written, markup=False, highlight=False, soft_wrap=True)
    if simulated and talks:
        simulate(config, text, simulated, lr, seed)
    if devices.size > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    app()
