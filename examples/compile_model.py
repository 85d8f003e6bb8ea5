"""Train a small network on handwritten digits, compiled by torch.compile(backend="cupyops").

python examples/compile_model.py               on a GPU the kernels, without one PyTorch
python examples/compile_model.py --simulate    two steps more, whose kernels run in the simulator, beside PyTorch
python examples/compile_model.py --explain     what is fused, and what stays PyTorch's

No C compiler is needed: NVRTC compiles the kernels.
"""

from __future__ import annotations

from typing import Annotated

import torch
import torch.nn.functional as F
import typer
from rich.console import Console
from torch import Tensor, nn

import cupyops

console = Console()
app = typer.Typer(add_completion=False)


class Network(nn.Module):
    """Two convolutions and two linear layers for images of 8x8 pixels."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2)
        )
        self.norm = nn.LayerNorm(16 * width)
        self.hidden, self.head = nn.Linear(16 * width, 4 * width), nn.Linear(4 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Logits of the ten digits."""
        features = self.norm(self.convolutions(images).flatten(1))
        return self.head(F.gelu(self.hidden(features)))


def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """scikit-learn's 1,797 digits: images and labels for training, then for the test."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    pixels = (torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) - 4.9) / 6.0
    pixels, targets = pixels[order], torch.tensor(labels)[order]
    return pixels[:1500], targets[:1500], pixels[1500:], targets[1500:]


def trained(model: nn.Module, images: Tensor, labels: Tensor, steps: int, batch: int) -> list[float]:
    """The losses of some steps of AdamW; the call of the model and its loss are one compiled function."""

    def loss_of(images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(model(images), labels)

    step = torch.compile(loss_of, backend="cupyops")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for number in range(steps):
        first = number * batch % (len(images) - batch)
        loss = step(images[first : first + batch], labels[first : first + batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@app.command(help=__doc__)
def main(
    steps: Annotated[int, typer.Option(help="Steps of training.")] = 200,
    width: Annotated[int, typer.Option(help="Channels of the convolution.")] = 16,
    simulate: Annotated[bool, typer.Option("--simulate", help="Two steps in the simulator, beside PyTorch's.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="Print what becomes of the model.")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Print the launches of one more step.")] = False,
    device: Annotated[str | None, typer.Option(help="By default the GPU, if there is one.")] = None,
    seed: Annotated[int, typer.Option(help="Of the first weights.")] = 0,
) -> None:
    """Train, and say how many digits of the test are right."""
    torch.manual_seed(seed)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    images, labels, test_images, test_labels = (one.to(device) for one in digits())
    model = Network(width).to(device)
    if explain:
        console.print(str(cupyops.explain_compile(Network(width).to(device), images[:64])), highlight=False)
    losses = trained(model, images, labels, steps, batch=100)
    if trace:
        with cupyops.trace() as launches:
            trained(model, images, labels, 1, batch=100)
        console.print(str(launches), markup=False, highlight=False, soft_wrap=True)
    model.eval()
    with torch.no_grad():
        right = (model(test_images).argmax(1) == test_labels).float().mean()
    console.print(f"loss {losses[0]:.3f}, then {losses[-1]:.3f}; {right:.1%} of the test's digits", highlight=False)
    if simulate:
        _beside_pytorch(images[:64].cpu(), labels[:64].cpu())


def _beside_pytorch(images: Tensor, labels: Tensor) -> None:
    losses = []
    for kernels in (True, False):
        torch.manual_seed(1)
        model = Network(4)
        if kernels:
            with cupyops.simulate(), cupyops.trace() as trace:
                losses.append(trained(model, images, labels, 2, batch=16))
            console.print(f"{len(trace.launches())} launches in the simulator", highlight=False)
        else:
            losses.append(trained(model, images, labels, 2, batch=16))
    worst = max(abs(one - other) for one, other in zip(*losses))
    console.print(f"two steps by kernels: losses within {worst:.1e} of PyTorch's", highlight=False)


if __name__ == "__main__":
    app()
