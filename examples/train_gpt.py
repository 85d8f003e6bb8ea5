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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from language import Devices, Text, Trainer, console, read, session
from torch import Tensor, nn

import cupyops

F = nn.functional


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
        self.by, self.sizes = by, asdict(config)
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


def trainer(config: Config, by: Any, devices: Devices, lr: float, steps: int, seed: int) -> Trainer:
    """A network by cupyops or by `Torch`, with the optimizer of the same."""
    return Trainer(lambda: GPT(config, by), devices, lr, steps, seed, ours=by is cupyops)


def simulate(config: Config, text: Text, steps: int, lr: float, seed: int) -> None:
    """A few steps by the kernels, in the simulator, and by PyTorch: both come to the same losses."""
    ours, theirs = (trainer(config, by, Devices(torch.device("cpu")), lr, steps, seed) for by in (cupyops, Torch))
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
    devices, text = Devices.found(device), read(data, context)
    config = Config(len(text.alphabet), layers, heads, kv_heads, dim, context)
    runs = [trainer(config, by, devices, lr, steps, seed) for by in ((cupyops, Torch) if compare else (cupyops,))]
    session(
        runs, text, steps=steps, batch=batch, every=every, checkpoint=checkpoint, picture=picture, characters=characters,
        seed=seed, trace=trace,
    )  # fmt: skip
    if simulated and devices.rank == 0:
        simulate(config, text, simulated, lr, seed)


if __name__ == "__main__":
    app()
