"""Train a small convolutional network on handwritten digits, by the operators of cupyops alone.

python examples/mnist_cnn.py                   scikit-learn's 8x8 digits, enlarged; nothing is downloaded
python examples/mnist_cnn.py --data DIR        MNIST's IDX files, gzipped or not
python examples/mnist_cnn.py --openml          MNIST, fetched by scikit-learn
python examples/mnist_cnn.py --compare         the same network of torch.nn, step by step beside it
python examples/mnist_cnn.py --simulate 3      then three steps of the kernels in the simulator, compared with torch.nn
"""

from __future__ import annotations

import gzip
import struct
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

import cupyops

console = Console()


# --- data ---


@dataclass
class Digits:
    """Images of shape (n, 1, 28, 28) and their labels, for training and for the test."""

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    def ready(self, device: torch.device) -> Digits:
        """On `device`, with the training pixels' mean 0 and their standard deviation 1."""
        std, mean = torch.std_mean(self.train_images)
        images = [((images - mean) / std).to(device) for images in (self.train_images, self.test_images)]
        return Digits(self.name, images[0], self.train_labels.to(device), images[1], self.test_labels.to(device))


def split(name: str, images: Tensor, labels: Tensor, held: int, seed: int) -> Digits:
    """The last `held` of the shuffled images for the test."""
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    images, labels = images[order], labels[order]
    return Digits(name, images[:-held], labels[:-held], images[-held:], labels[-held:])


def bundled_digits(seed: int) -> Digits:
    """scikit-learn's 1,797 digits of 8x8 pixels, enlarged to 28x28; a fifth of them for the test."""
    from sklearn.datasets import load_digits

    small, labels = load_digits(return_X_y=True)
    images = torch.tensor(small, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    images = torch.nn.functional.interpolate(images, size=(28, 28), mode="bilinear", align_corners=False)
    return split("scikit-learn's digits", images, torch.tensor(labels), len(images) // 5, seed)


def openml_digits(seed: int) -> Digits:
    """The 70,000 images of MNIST, fetched by scikit-learn; the last 10,000 are the usual test set."""
    from sklearn.datasets import fetch_openml

    pixels, labels = fetch_openml("mnist_784", version=1, return_X_y=True, as_frame=False, parser="liac-arff")
    images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 28, 28) / 255
    labels = torch.tensor(labels.astype(np.int64))
    return Digits("MNIST from OpenML", images[:60000], labels[:60000], images[60000:], labels[60000:])


def idx_digits(folder: Path, seed: int) -> Digits:
    """MNIST's IDX files in `folder`: both sets, or one of the two, of which a tenth is held for the test."""
    found = {stem: pair for stem in ("train", "t10k") if (pair := idx_pair(folder, stem)) is not None}
    if not found:
        looked = "\n".join(f"  {folder / name}[.gz]" for stem in ("train", "t10k") for name in idx_names(stem))
        raise typer.BadParameter(f"no MNIST files. Looked for:\n{looked}", param_hint="--data")
    if len(found) == 2:
        return Digits(f"MNIST in {folder}", *found["train"], *found["t10k"])
    ((stem, (images, labels)),) = found.items()
    return split(f"MNIST in {folder} ({stem} files only)", images, labels, len(images) // 10, seed)


def idx_names(stem: str) -> tuple[str, str]:
    return f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte"


def idx_pair(folder: Path, stem: str) -> tuple[Tensor, Tensor] | None:
    """Images and labels, or None where neither file is there."""
    paths = [next((p for p in (folder / n, folder / f"{n}.gz") if p.is_file()), None) for n in idx_names(stem)]
    if paths == [None, None]:
        return None
    if None in paths:
        missing = idx_names(stem)[paths.index(None)]
        raise typer.BadParameter(f"{folder} has the other {stem} file, but no {missing}[.gz]", param_hint="--data")
    images, labels = (read_idx(path, dims) for path, dims in zip(paths, (3, 1)))
    if len(images) != len(labels) or images.shape[1:] != (28, 28):
        shapes = f"{tuple(images.shape)} images and {len(labels)} labels"
        raise typer.BadParameter(
            f"{shapes} in the {stem} files, expected as many of both, of 28x28", param_hint="--data"
        )
    return images.unsqueeze(1).float() / 255, labels.long()


def read_idx(path: Path, dims: int) -> Tensor:
    """The bytes of an IDX file: two zeros, type 8 (unsigned bytes), the number of dimensions, each size, the data."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as file:
            content = file.read()
    except (OSError, EOFError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}", param_hint="--data") from error
    header = 4 + 4 * dims
    if len(content) < header or content[:4] != bytes([0, 0, 8, dims]):
        raise typer.BadParameter(
            f"{path} begins with {content[:4].hex()}, expected {bytes([0, 0, 8, dims]).hex()}", param_hint="--data"
        )
    shape = struct.unpack(f">{dims}I", content[4:header])
    expected = header + int(np.prod(shape))
    if len(content) != expected:
        raise typer.BadParameter(f"{path} holds {len(content)} bytes, its header says {expected}", param_hint="--data")
    return torch.frombuffer(bytearray(content[header:]), dtype=torch.uint8).view(shape)


# --- the network ---


class SimpleCNN(torch.nn.Module):
    """Two convolutions and two linear layers; the log-probabilities of the ten digits.

    `nn` is the module that the layers come from: cupyops.nn, or torch.nn for the twin.
    """

    def __init__(self, nn: ModuleType = cupyops.nn) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            *pooled_convolution(nn, 1, 32),
            *pooled_convolution(nn, 32, 64),
            torch.nn.Flatten(),
            nn.Linear(3136, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
            nn.LogSoftmax(dim=1),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


def pooled_convolution(nn: ModuleType, channels: int, filters: int) -> list[torch.nn.Module]:
    """A convolution, ReLU and max-pooling by 2."""
    return [nn.Conv2d(channels, filters, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]


class Trainer:
    """A network, its loss and its optimizer, with the losses so far."""

    def __init__(self, model: SimpleCNN, loss: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.losses: list[Tensor] = []

    def step(self, images: Tensor, labels: Tensor) -> None:
        self.optimizer.zero_grad()
        loss = self.loss(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())  # read later, so that the GPU is not waited for

    def values(self) -> np.ndarray:
        return torch.stack(self.losses).double().cpu().numpy()

    def accuracy(self, images: Tensor, labels: Tensor) -> float:
        with torch.no_grad():
            hits = [(self.model(x).argmax(1) == y).sum() for x, y in zip(images.split(500), labels.split(500))]
        return torch.stack(hits).sum().item() / len(labels)


def trainers(device: torch.device, lr: float, momentum: float, compare: bool) -> list[Trainer]:
    """Ours, and with `compare` PyTorch's twin from the same weights."""
    model = SimpleCNN().to(device)
    ours = Trainer(model, cupyops.nn.NLLLoss(), cupyops.optim.SGD(model.parameters(), lr=lr, momentum=momentum))
    if not compare:
        return [ours]
    twin = SimpleCNN(torch.nn).to(device)
    twin.load_state_dict(model.state_dict())
    return [ours, Trainer(twin, torch.nn.NLLLoss(), torch.optim.SGD(twin.parameters(), lr=lr, momentum=momentum))]


def shifted(images: Tensor, most: int, generator: torch.Generator) -> Tensor:
    """A batch moved by up to `most` pixels each way: the few digits there are then teach more."""
    down, right = torch.randint(-most, most + 1, (2,), generator=generator).tolist()
    return images.roll((down, right), dims=(-2, -1))


def train(runs: list[Trainer], data: Digits, epochs: int, batch: int, seed: int, shift: int, trace: bool) -> None:
    """Every run sees the same batches in the same order."""
    generator = torch.Generator().manual_seed(seed)
    columns = ("[progress.description]{task.description}", BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, TextColumn("loss {task.fields[loss]}"), console=console) as progress:
        steps = -(-len(data.train_images) // batch)
        task = progress.add_task("training", total=epochs * steps, loss="...")
        for epoch in range(epochs):
            progress.update(task, description=f"epoch {epoch + 1}/{epochs}")
            order = torch.randperm(len(data.train_images), generator=generator).to(data.train_images.device)
            for index, chosen in enumerate(order.split(batch)):
                images, labels = shifted(data.train_images[chosen], shift, generator), data.train_labels[chosen]
                with cupyops.trace() if trace and epoch == index == 0 else nullcontext() as seen:
                    runs[0].step(images, labels)
                for twin in runs[1:]:
                    twin.step(images, labels)
                if seen is not None:
                    progress.console.print(str(seen), soft_wrap=True, markup=False)
                if index % 20 == 0 or index == steps - 1:
                    progress.update(task, loss=f"{runs[0].losses[-1].item():.4f}")
                progress.advance(task)


def plot(path: Path, runs: list[Trainer], title: str) -> None:
    """The loss of each step, and its running mean, as a picture."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for run, name, colour in zip(runs, ("cupyops", "torch.nn"), ("tab:blue", "tab:orange")):
        losses = run.values()
        window = max(1, min(25, len(losses) // 4))
        mean = np.convolve(losses, np.full(window, 1 / window), mode="valid")
        first = name == "cupyops"
        axes.plot(losses, color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(
            np.arange(window - 1, len(losses)), mean, color=colour, linestyle="-" if first else "--",
            label=f"{name}, mean of {window} steps",
        )  # fmt: skip
    axes.set(xlabel="step", ylabel="negative log-likelihood", title=title, yscale="log")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


FEW = 4  # images in a step that the simulator runs


def simulate(digits: Digits, steps: int, lr: float, momentum: float) -> None:
    """A few steps by the kernels, in the simulator, and by torch.nn: both come to the same losses and weights."""
    ours, theirs = trainers(torch.device("cpu"), lr, momentum, compare=True)
    launches = []
    for images, labels in zip(digits.train_images.split(FEW)[:steps], digits.train_labels.split(FEW)):
        with cupyops.simulate(), cupyops.trace() as seen:
            ours.step(images, labels)
        theirs.step(images, labels)
        launches += seen.launches()
    for mine, expected in zip([*ours.losses, *ours.model.parameters()], [*theirs.losses, *theirs.model.parameters()]):
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
    names = sorted({launch.kernel for launch in launches})
    console.print(
        f"{steps} steps of {FEW} images in the simulator end as those of torch.nn. It ran:", *names, sep="\n  "
    )


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    epochs: Annotated[int, typer.Option(min=1)] = 30,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate.")] = 0.01,
    momentum: Annotated[float, typer.Option(min=0)] = 0.9,
    batch: Annotated[int, typer.Option("--batch-size", min=1)] = 64,
    data: Annotated[Path | None, typer.Option(help="Folder with MNIST's IDX files.")] = None,
    openml: Annotated[bool, typer.Option("--openml", help="Fetch MNIST from openml.org.")] = False,
    compare: Annotated[bool, typer.Option("--compare", help="Train torch.nn's twin beside it.")] = False,
    picture: Annotated[Path, typer.Option("--plot", help="Where to draw the loss.")] = Path("out/mnist_loss.png"),
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda if there is one.")] = None,
    seed: int = 0,
    shift: Annotated[int, typer.Option(min=0, help="Move each batch by up to so many pixels.")] = 2,
    trace: Annotated[bool, typer.Option(help="Print which kernels the first step ran.")] = False,
    steps: Annotated[
        int, typer.Option("--simulate", min=0, help="Then so many steps of the kernels, in the simulator.")
    ] = 0,
) -> None:
    """Train, test, draw."""
    if data is not None and openml:
        raise typer.BadParameter("--data and --openml are two sources; give one")
    torch.manual_seed(seed)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    digits = idx_digits(data, seed) if data is not None else openml_digits(seed) if openml else bundled_digits(seed)
    console.print(f"{digits.name}: {len(digits.train_images)} to train, {len(digits.test_images)} to test, on {where}")
    digits = digits.ready(where)
    runs = trainers(where, lr, momentum, compare)
    train(runs, digits, epochs, batch, seed, shift, trace)
    accuracies = [run.accuracy(digits.test_images, digits.test_labels) for run in runs]
    console.print(f"test accuracy: [bold]{accuracies[0]:.2%}[/]  last loss: {runs[0].values()[-1]:.4f}")
    if compare:
        difference = np.abs(runs[0].values() - runs[1].values()).max()
        same = " (without a GPU both are PyTorch)" if where.type == "cpu" else ""
        console.print(f"torch.nn: {accuracies[1]:.2%}; largest difference in loss at any step: {difference:.2e}{same}")
    plot(picture, runs, f"{digits.name}: test accuracy {accuracies[0]:.2%}")
    console.print(f"loss curve: {picture}")
    if steps:
        simulate(digits, steps, lr, momentum)


if __name__ == "__main__":
    app()
