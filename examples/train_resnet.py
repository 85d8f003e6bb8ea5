"""Train a ResNet on images: PyTorch's modules, one line that has cupyops compute them, and a step as a CUDA graph.

python examples/train_resnet.py                      scikit-learn's digits, enlarged; nothing is downloaded
python examples/train_resnet.py --data DIR           images of yours: a folder for each class
python examples/train_resnet.py --compare            the same without that line and as no graph, step by step beside it
python examples/train_resnet.py --checkpoint rn.pt   keep it after each evaluation, and go on from there if it is there

On a GPU it trains in channels_last, in bfloat16 by autocast, each step as one CUDA graph (`--no-graph`: as it is written).
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

import cupyops

console = Console()
F = nn.functional


# --- images ---


@dataclass
class Images:
    """Pixels of shape (n, 3, size, size), of mean 0 and deviation 1, and the classes' numbers; a fifth is held."""

    name: str
    classes: list[str]
    train: tuple[Tensor, Tensor]
    held: tuple[Tensor, Tensor]

    @staticmethod
    def of(name: str, classes: list[str], pixels: Tensor, labels: Tensor, device: torch.device) -> Images:
        """Shuffled, always in the same way."""
        if len(pixels) < 10 or len(classes) < 2:
            said = f"{name} has {len(pixels)} images of {len(classes)} classes, expected 10 or more, of 2 or more"
            raise typer.BadParameter(said, param_hint="--data")
        order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
        pixels, labels, split = pixels[order], labels[order].to(device), len(pixels) * 4 // 5
        std, mean = torch.std_mean(pixels[:split])
        pixels = ((pixels - mean) / std).to(device, memory_format=torch.channels_last)
        return Images(name, classes, (pixels[:split], labels[:split]), (pixels[split:], labels[split:]))

    def batch(self, rows: int, seed: int) -> tuple[Tensor, Tensor]:
        """Images to train, drawn by a seed, and all moved by a few pixels."""
        generator = torch.Generator().manual_seed(seed)
        pixels, labels = self.train
        chosen = torch.randint(len(pixels), (rows,), generator=generator).to(pixels.device)
        most = pixels.shape[-1] // 12
        down, right = torch.randint(-most, most + 1, (2,), generator=generator).tolist()
        moved = pixels[chosen].roll((down, right), dims=(2, 3))
        return moved.contiguous(memory_format=torch.channels_last), labels[chosen]


def digits(size: int, device: torch.device) -> Images:
    """scikit-learn's 1,797 digits of 8x8 pixels, enlarged."""
    from sklearn.datasets import load_digits

    small, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(small, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    pixels = F.interpolate(pixels, size=(size, size), mode="bilinear", align_corners=False).expand(-1, 3, -1, -1)
    return Images.of("scikit-learn's digits", [str(d) for d in range(10)], pixels, torch.tensor(labels), device)


def folders(path: Path, size: int, device: torch.device) -> Images:
    """The images in the folders of a folder, whose names are the classes."""
    from PIL import Image

    classes = sorted(folder.name for folder in path.iterdir() if folder.is_dir()) if path.is_dir() else []
    pixels, labels = [], []
    for label, name in enumerate(classes):
        for file in sorted((path / name).iterdir()):
            try:
                with Image.open(file) as image:
                    pixels.append(np.asarray(image.convert("RGB").resize((size, size)), np.float32).transpose(2, 0, 1))
            except OSError as error:
                raise typer.BadParameter(f"{file} is no image: {error}", param_hint="--data") from error
            labels.append(label)
    found = torch.tensor(np.stack(pixels)) if pixels else torch.empty(0, 3, size, size)
    return Images.of(str(path), classes, found, torch.tensor(labels, dtype=torch.long), device)


# --- the network ---


class Block(nn.Module):
    """Two convolutions with batch norms, and what came in added; a convolution of 1x1 where the size changes."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn1, self.bn2, self.relu = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs), nn.ReLU()
        nn.init.zeros_(self.bn2.weight)  # a block begins as what came in
        self.short: nn.Module = nn.Identity()
        if stride > 1 or inputs != outputs:
            self.short = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(y)) + self.short(x))


class ResNet(nn.Module):
    """ResNet-18 (arXiv:1512.03385) with the stem that small images have: by default 11 million parameters."""

    def __init__(self, classes: int, width: int = 64, blocks: int = 2) -> None:
        super().__init__()
        self.sizes = {"classes": classes, "width": width, "blocks": blocks}
        self.conv, self.bn, self.relu = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        layers, inputs = [], width
        for stage in range(4):
            for index in range(blocks):
                layers.append(Block(inputs, width << stage, 2 if stage and index == 0 else 1))
                inputs = width << stage
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.relu(self.bn(self.conv(x)))).mean((2, 3)))


# --- training ---


class Trainer:
    """A network with its optimizer, and the losses so far. `ours`: by cupyops, and where `graphed` as a CUDA graph."""

    def __init__(
        self, sizes: dict[str, int], device: torch.device, lr: float, steps: int, seed: int, ours: bool, graphed: bool
    ) -> None:
        torch.manual_seed(seed)
        self.network = ResNet(**sizes).to(device, memory_format=torch.channels_last)
        self.report = cupyops.swap(self.network) if ours else None  # the one line
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
        self.peak, self.steps = lr, steps
        self.rate = torch.tensor(lr, device=device)  # a tensor, which a graph reads anew at each step
        optim: Any = cupyops.optim if ours else torch.optim
        self.optimizer = optim.SGD(
            self.network.parameters(), lr=self.rate, momentum=0.9, nesterov=True, weight_decay=5e-4
        )
        self.loss: Any = cupyops.cross_entropy if ours else F.cross_entropy
        self.once = cupyops.graph(self._step) if graphed else self._step
        self.losses: list[Tensor] = []

    def _step(self, pixels: Tensor, labels: Tensor) -> Tensor:
        self.optimizer.zero_grad()
        with self.autocast:
            loss = self.loss(self.network(pixels), labels)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def step(self, pixels: Tensor, labels: Tensor) -> None:
        done, warm = len(self.losses), max(1, self.steps // 10)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, done / self.steps)))
        self.rate.fill_(self.peak * min((done + 1) / warm, cosine))
        self.losses.append(self.once(pixels, labels).clone())  # read later, so that the GPU is not waited for

    @torch.no_grad()
    def accuracy(self, images: Images) -> float:
        """Of the images that were held."""
        self.network.eval()
        with self.autocast:
            hits = [(self.network(x).argmax(1) == y).sum() for x, y in zip(*(one.split(500) for one in images.held))]
        self.network.train()
        return torch.stack(hits).sum().item() / len(images.held[1])

    def values(self) -> list[float]:
        return torch.stack(self.losses).tolist()


def save(path: Path, trainer: Trainer) -> None:
    """All of it in one file; the old one stays until the new one is whole."""
    part = path.with_name(f"{path.name}.part")
    model, optimizer = trainer.network.state_dict(), trainer.optimizer.state_dict()
    torch.save(
        {"sizes": trainer.network.sizes, "model": model, "optimizer": optimizer, "losses": trainer.values()}, part
    )
    part.replace(path)


def load(path: Path, trainer: Trainer) -> None:
    """Go on where `save` was."""
    kept = torch.load(path, map_location=trainer.rate.device, weights_only=True)
    if kept["sizes"] != trainer.network.sizes:
        said = f"{path} is of another network, {kept['sizes']}; give its sizes, or another file"
        raise typer.BadParameter(said, param_hint="--checkpoint")
    trainer.network.load_state_dict(kept["model"])
    trainer.optimizer.load_state_dict(kept["optimizer"])
    for group in trainer.optimizer.param_groups:
        group["lr"] = trainer.rate
    trainer.losses = list(torch.tensor(kept["losses"], device=trainer.rate.device))


def train(
    runs: list[Trainer], images: Images, steps: int, batch: int, every: int, checkpoint: Path | None, trace: bool
) -> float:
    """Every run sees the same batches in the same order; how many images a second the first one took."""
    first, taken, count, began = runs[0], 0.0, 0, time.perf_counter()
    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("{task.fields[note]}"), console=console) as progress:
        done = len(first.losses)
        task = progress.add_task("training", total=steps, completed=done, note="")
        for step in range(done, steps):
            drawn = images.batch(batch, seed=1000 + step)
            began = time.perf_counter()
            with cupyops.trace() if trace and step == done else nullcontext() as seen:
                first.step(*drawn)
            last = step == steps - 1
            loss = first.losses[-1].item() if last or step % 10 == 9 else None  # waits for the GPU
            taken, count = taken + time.perf_counter() - began, count + batch
            for twin in runs[1:]:
                twin.step(*drawn)
            if seen is not None:
                progress.console.print(str(seen), soft_wrap=True, markup=False)
            if last or step % every == every - 1:
                progress.console.print(f"step {step + 1}: accuracy on held images {first.accuracy(images):.1%}")
                if checkpoint is not None:
                    save(checkpoint, first)
            progress.update(task, completed=step + 1)
            if loss is not None:
                progress.update(task, note=f"loss {loss:.3f}  {count / taken:,.0f} images/s")
    return count / taken if taken else math.nan


def plot(path: Path, runs: list[Trainer], title: str) -> None:
    """The loss of each step, as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for run, name, line in zip(runs, ("cupyops", "PyTorch"), ("-", "--")):
        axes.plot(run.values(), line, label=name, linewidth=1)
    axes.set(xlabel="step", ylabel="cross-entropy", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    data: Annotated[Path | None, typer.Option(help="A folder with a folder of images for each class.")] = None,
    size: Annotated[int, typer.Option(min=8, help="Pixels of an image, each way.")] = 32,
    steps: Annotated[int, typer.Option(min=1)] = 300,
    batch: Annotated[int, typer.Option("--batch-size", min=2)] = 64,
    width: Annotated[int, typer.Option(min=4, help="Channels of the first stage.")] = 64,
    blocks: Annotated[int, typer.Option(min=1, help="Of each of the four stages.")] = 2,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate.")] = 0.05,
    every: Annotated[int, typer.Option("--evaluate-every", min=1, help="Steps between evaluations.")] = 100,
    graphed: Annotated[bool, typer.Option("--graph/--no-graph", help="On a GPU, a step as a CUDA graph.")] = True,
    compare: Annotated[bool, typer.Option("--compare", help="Train the network as it is beside it.")] = False,
    checkpoint: Annotated[Path | None, typer.Option(help="Where to keep it, and from where to go on.")] = None,
    picture: Annotated[Path, typer.Option("--plot", help="Where to draw the loss.")] = Path("out/resnet_loss.png"),
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda if there is one.")] = None,
    seed: int = 0,
    trace: Annotated[bool, typer.Option(help="Print which kernels the first step ran.")] = False,
) -> None:
    """Train, evaluate, draw."""
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    images = digits(size, where) if data is None else folders(data, size, where)
    sizes = {"classes": len(images.classes), "width": width, "blocks": blocks}
    runs = [
        Trainer(sizes, where, lr, steps, seed, ours, graphed and ours)
        for ours in ((True, False) if compare else (True,))
    ]
    first = runs[0]
    if checkpoint is not None and checkpoint.exists():
        load(checkpoint, first)
    numbers = sum(parameter.numel() for parameter in first.network.parameters())
    console.print(
        f"{images.name}: {len(images.train[0])} to train, {len(images.held[0])} held, of {len(images.classes)} classes; "
        f"{numbers:,} parameters, on {where}", highlight=False, soft_wrap=True,
    )  # fmt: skip
    console.print("cupyops.swap:", first.report, markup=False, highlight=False, soft_wrap=True)
    speed = train(runs, images, steps, batch, every, checkpoint, trace)
    losses = [run.values() for run in runs]
    accuracy = first.accuracy(images)
    console.print(f"accuracy: [bold]{accuracy:.2%}[/], last loss: {losses[0][-1]:.4f}, {speed:,.0f} images a second")
    for run, values in zip(runs[1:], losses[1:]):
        difference = max(abs(a - b) for a, b in zip(losses[0], values))
        console.print(f"PyTorch: {run.accuracy(images):.2%}; largest difference in loss at any step: {difference:.2e}")
    plot(picture, runs, f"{images.name}: accuracy {accuracy:.1%}")
    console.print(f"loss curve: {picture}")


if __name__ == "__main__":
    app()
