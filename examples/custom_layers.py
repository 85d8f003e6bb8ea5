"""Layers of your own on the functions of cupyops, beside the built-in ones: the same results, and how long each takes.

A linear layer and a scalar scale-and-shift layer, written as you would write them, go into a small network. The twin is
made of torch.nn.Linear and plain tensor arithmetic, starts from the same weights and sees the same batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from statistics import median
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import cupyops

console = Console()


class MyLinear(nn.Module):
    """y = x @ weight.T + bias."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(in_features), as torch.nn.Linear begins."""
        bound = 1 / math.sqrt(self.weight.shape[1])
        nn.init.uniform_(self.weight, -bound, bound)
        nn.init.uniform_(self.bias, -bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        return cupyops.linear(x, self.weight, self.bias)


class MyScaleShift(nn.Module):
    """y = x * weight + bias with one number of each."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(()))
        self.bias = nn.Parameter(torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return cupyops.scale_shift(x, self.weight, self.bias)


class BuiltInScaleShift(MyScaleShift):
    """The same by tensor arithmetic."""

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


def network(width: int, linear: type[nn.Module], scale_shift: type[nn.Module], relu: type[nn.Module]) -> nn.Sequential:
    """A curve fitter: one number in, one number out."""
    return nn.Sequential(linear(1, width), scale_shift(), relu(), linear(width, width), relu(), linear(width, 1))


def largest_difference(ours: Tensor | None, theirs: Tensor | None) -> float:
    if ours is None or theirs is None:
        raise ValueError("a gradient is missing")
    return (ours - theirs).abs().max().item()


def milliseconds(call: Callable[[], object], device: torch.device, repeats: int = 20) -> float:
    """Median wall time of `call`, the GPU's work included."""
    times = []
    for _ in range(repeats + 3):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(1000 * (time.perf_counter() - start))
    return median(times[3:])


def compare_layer(table: Table, name: str, ours: nn.Module, theirs: nn.Module, x: Tensor) -> float:
    """One row: differences of output and of gradients, and both times. Returns the largest difference."""
    theirs.load_state_dict(ours.state_dict())
    x, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    y, expected = ours(x), theirs(other)
    grad = torch.randn_like(y)

    def step(layer: nn.Module, value: Tensor) -> None:
        layer(value).backward(grad)

    step(ours, x)
    step(theirs, other)
    gradients = [largest_difference(p.grad, q.grad) for p, q in zip(ours.parameters(), theirs.parameters())]
    forward, backward = largest_difference(y, expected), max([largest_difference(x.grad, other.grad), *gradients])
    times = [
        milliseconds(lambda layer=layer, v=v: step(layer, v), x.device) for layer, v in ((ours, x), (theirs, other))
    ]
    table.add_row(name, f"{forward:.1e}", f"{backward:.1e}", *(f"{t:.3f}" for t in times))
    return max(forward, backward)


def fit(models: list[nn.Module], device: torch.device, steps: int, trace: bool) -> tuple[list[float], float]:
    """Train both on sin(x), step by step. The last losses and the largest difference between the two."""
    optimizers = [
        make(m.parameters(), lr=0.05, momentum=0.9) for make, m in zip((cupyops.optim.SGD, torch.optim.SGD), models)
    ]
    worst = 0.0
    for step in track(range(steps), description="fitting sin(x)", console=console, transient=True):
        x = torch.rand(256, 1, device=device) * 2 * math.pi - math.pi
        losses = []
        for model, optimizer in zip(models, optimizers):
            with cupyops.trace() if trace and step == 0 and model is models[0] else nullcontext() as seen:
                optimizer.zero_grad()
                loss = (model(x) - torch.sin(x)).square().mean()
                loss.backward()
                optimizer.step()
            if seen is not None:
                console.print(str(seen), soft_wrap=True, markup=False)
            losses.append(loss.item())
        worst = max(worst, abs(losses[0] - losses[1]))
    return losses, worst


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda if there is one.")] = None,
    steps: Annotated[int, typer.Option(min=1)] = 300,
    width: Annotated[int, typer.Option(min=1, help="Features of the layers.")] = 256,
    seed: int = 0,
    trace: Annotated[bool, typer.Option(help="Print which kernels the first step ran.")] = False,
) -> None:
    """Compare the layers, then the networks."""
    torch.manual_seed(seed)
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if where.type == "cpu":
        runs = "the kernels in the simulator" if cupyops.simulating() else "their PyTorch reference"
        console.print(f"no GPU in use: the functions of cupyops run {runs}")
    table = Table(
        "layer", "output", "gradients", "ours (ms)", "built in (ms)", title="largest differences, forward + backward"
    )
    x = torch.randn(1024, width, device=where)
    compare_layer(table, "MyLinear", MyLinear(width, width).to(where), nn.Linear(width, width).to(where), x)
    compare_layer(table, "MyScaleShift", MyScaleShift().to(where), BuiltInScaleShift().to(where), x)
    compare_layer(
        table, "cupyops.nn.Linear", cupyops.nn.Linear(width, width).to(where), nn.Linear(width, width).to(where), x
    )
    compare_layer(table, "cupyops.nn.ScaleShift", cupyops.nn.ScaleShift().to(where), BuiltInScaleShift().to(where), x)
    console.print(table)

    ours = network(width, MyLinear, MyScaleShift, cupyops.nn.ReLU).to(where)
    theirs = network(width, nn.Linear, BuiltInScaleShift, nn.ReLU).to(where)
    theirs.load_state_dict(ours.state_dict())
    losses, worst = fit([ours, theirs], where, steps, trace)
    console.print(
        f"last loss: ours {losses[0]:.3e}, built in {losses[1]:.3e}; largest difference at any step {worst:.1e}"
    )


if __name__ == "__main__":
    app()
