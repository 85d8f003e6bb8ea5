"""An attention of your own that trains: heads that learn a rhythm, beside heads that know no positions.

The score of a query and a key changes with how far apart they are: each head has a decay, as ALiBi's but by the logarithm,
and a wave whose length, height and phase it learns. That is one line of C; its derivative, the kernels for a GPU and the
reference for a CPU come from it. Two small models of characters, alike but for that line, see the same batches.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import torch
import typer
from language import read
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

import cupyops

console = Console()

SCORE = "s + height[h] * cos(rate[h] * (q - k) + phase[h]) - decay[h] * log1p(fabs(q - k))"


class Rhythm(nn.Module):
    """What the line names: a number for each head."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.height = nn.Parameter(torch.full((heads,), 0.1))
        self.rate = nn.Parameter(torch.linspace(0.1, 1.5, heads))
        self.phase = nn.Parameter(torch.zeros(heads))
        self.decay = nn.Parameter(torch.linspace(0.2, 2.0, heads))

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cupyops.attention(q, k, v, score=SCORE, mask="k <= q", **dict(self.named_parameters()))  # type: ignore[return-value]


class Plain(nn.Module):
    """Scores as they are."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cupyops.attention(q, k, v, causal="top_left")  # type: ignore[return-value]


class Block(nn.Module):
    """Attention and a gated layer, each behind a norm."""

    def __init__(self, dim: int, heads: int, rhythm: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv = cupyops.nn.RMSNorm(dim), cupyops.nn.Linear(dim, 3 * dim, bias=False)
        self.out, self.attend = cupyops.nn.Linear(dim, dim, bias=False), Rhythm(heads) if rhythm else Plain()
        self.second, self.up = cupyops.nn.RMSNorm(dim), cupyops.nn.Linear(dim, 4 * dim, bias=False)
        self.act, self.down = cupyops.nn.SwiGLU(), cupyops.nn.Linear(2 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(self.act(self.up(self.second(x))))


class Model(nn.Module):
    """Characters to the loss of the next ones."""

    def __init__(self, alphabet: int, dim: int, heads: int, layers: int, rhythm: bool) -> None:
        super().__init__()
        self.embedding = cupyops.nn.Embedding(alphabet, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads, rhythm) for _ in range(layers)), cupyops.nn.RMSNorm(dim))
        self.classes = nn.Parameter(torch.randn(alphabet, dim) * dim**-0.5)

    def forward(self, characters: Tensor, targets: Tensor) -> Tensor:
        x = self.blocks(self.embedding(characters)).flatten(0, 1)
        return cupyops.fused_linear_cross_entropy(x, self.classes, targets.flatten())


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    data: Annotated[Path | None, typer.Option(help="A text; by default the source of cupyops.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda if there is one.")] = None,
    steps: Annotated[int, typer.Option(min=1)] = 100,
    context: Annotated[int, typer.Option(min=2)] = 64,
    dim: Annotated[int, typer.Option(min=8, help="A multiple of the heads.")] = 64,
    heads: Annotated[int, typer.Option(min=1)] = 4,
    layers: Annotated[int, typer.Option(min=1)] = 2,
    batch_size: Annotated[int, typer.Option(min=1)] = 16,
    lr: float = 0.01,
    seed: int = 0,
    trace: Annotated[bool, typer.Option(help="Print which kernels the first step ran.")] = False,
) -> None:
    """Train both, and compare their losses on text that was held."""
    if dim % heads:
        raise typer.BadParameter(f"{dim} is no multiple of the {heads} heads", param_hint="--dim")
    text, on = read(data, context), torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    half = torch.autocast(on.type, torch.bfloat16, enabled=on.type == "cuda")
    held = {}
    for rhythm in (False, True):
        torch.manual_seed(seed)
        name = "with a rhythm" if rhythm else "without"
        model, begun = Model(len(text.alphabet), dim, heads, layers, rhythm).to(on), time.perf_counter()
        optimizer = cupyops.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95))
        for step in track(range(steps), description=name, console=console, transient=True):
            batch = (one.to(on) for one in text.batch(text.train, batch_size, context, seed + step))
            optimizer.param_groups[0]["lr"] = (
                lr * min(1.0, (step + 1) / 10) * (1 + math.cos(math.pi * step / steps)) / 2
            )
            with cupyops.trace() if trace and step == 0 and rhythm else nullcontext() as seen, half:
                optimizer.zero_grad()
                loss = model(*batch)
            loss.backward()
            optimizer.step()
            if seen is not None:
                console.print(str(seen), soft_wrap=True, markup=False)
        with torch.no_grad(), half:
            batches = [text.batch(text.held, 64, context, number) for number in range(4)]
            held[name] = sum(model(*(one.to(on) for one in batch)).item() for batch in batches) / len(batches)
        console.print(f"{name}: held loss {held[name]:.3f}, {time.perf_counter() - begun:.1f} s", highlight=False)
    for number, block in enumerate(model.blocks):
        if isinstance(block, Block):
            lengths = [f"{2 * math.pi / abs(rate):.1f}" for rate in block.attend.rate.tolist()]  # type: ignore[union-attr, operator]
            console.print(f"block {number}: waves of {', '.join(lengths)} characters", highlight=False)


if __name__ == "__main__":
    app()
