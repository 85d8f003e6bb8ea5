"""The losses of a GPT-2 on real text, step by step: as PyTorch trains it, and after `cupyops.swap`.

    python tools/curves.py run --data FILE     train, on a GPU: benchmarks/results/h100_curves.csv
    python tools/curves.py draw                the picture and the section of docs/models.md, from that file

Bytes are the tokens, so nothing is downloaded. Every run has the same parameters to begin with and the same batches. How far
two runs of PyTorch are apart that differ in rounding alone, is measured too: by another of its own kernels of attention.
"""

from __future__ import annotations

import contextlib
import csv
import datetime
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import cupyops
from cupyops import optim
from cupyops.nn.utils import clip_grad_norm_

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "h100_curves.csv"
PAGE, PICTURE = ROOT / "docs" / "models.md", ROOT / "docs" / "assets" / "curves.png"
BEGIN, END = "<!-- curves: written by tools/curves.py -->", "<!-- end of curves -->"
RUNS = {
    "eager": "PyTorch",
    "again": "PyTorch, by its other kernels of attention",
    "swap": "after swap",
    "graph": "after swap, with our AdamW, as a CUDA graph",
}
COLOURS = {"eager": "#e08a1e", "again": "#8a8f98", "swap": "#2f6fde", "graph": "#17408b"}
LAST = 50  # steps, whose mean says where a run has come to
SMOOTHED = 10  # steps, over which the picture takes the mean


# --- training ---


def model_of(tiny: bool) -> Any:
    """A GPT-2 of the small size over bytes, without dropout, whose random numbers would differ; the same each time."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32} if tiny else {}
    dropped = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    config = GPT2Config(vocab_size=256, bos_token_id=0, eos_token_id=0, use_cache=False, **sizes, **dropped)
    torch.manual_seed(0)
    return GPT2LMHeadModel(config)


def batches_of(text: Tensor, count: int, rows: int, length: int) -> list[Tensor]:
    """Pieces of a text, from places drawn at random."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        places = torch.randint(0, len(text) - length, (rows,), generator=generator)
        found.append(torch.stack([text[at : at + length] for at in places.tolist()]).long())
    return found


@contextlib.contextmanager
def attention_of(name: str, device: str) -> Iterator[None]:
    """PyTorch's own choice of its kernels of attention, or for "again" another that is as good."""
    if name != "again":
        yield
    else:
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION] if device == "cuda" else [SDPBackend.MATH]):
            yield


def losses_of(name: str, batches: list[Tensor], device: str, tiny: bool) -> list[float]:
    """The loss of each step of a run."""
    model = model_of(tiny).to(device).train()
    parameters = [*model.parameters()]
    options: dict[str, Any] = {"lr": 3e-4, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    clip: Callable[..., Any] = torch.nn.utils.clip_grad_norm_
    optimizer: Any
    if name in ("swap", "graph"):
        cupyops.swap(model)
    if name == "graph":
        clip = clip_grad_norm_
        optimizer = optim.AdamW(parameters, **options, capturable=device == "cuda")
    else:
        optimizer = torch.optim.AdamW(parameters, **options, fused=device == "cuda")

    def step(tokens: Tensor) -> Tensor:
        optimizer.zero_grad()
        with torch.autocast(device, torch.bfloat16):
            loss: Tensor = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        clip(parameters, 1.0)
        optimizer.step()
        return loss.detach()

    run: Callable[[Tensor], Tensor] = cupyops.graph(step) if name == "graph" and device == "cuda" else step
    with attention_of(name, device):
        return torch.stack([run(tokens.to(device)).float().clone() for tokens in batches]).tolist()


def run(
    data: Annotated[Path, typer.Option(help="Any text.")],
    csv_file: Annotated[Path, typer.Option("--csv", help="Where the losses go.")] = RESULTS,
    steps: Annotated[int, typer.Option(min=1)] = 200,
    tiny: Annotated[bool, typer.Option(help="A network of two narrow layers, as for a CPU.")] = False,
) -> None:
    """Train each way and keep the losses."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = torch.frombuffer(bytearray(data.read_bytes()), dtype=torch.uint8)
    rows, length = (4, 32) if tiny else (8, 1024)
    batches, losses = batches_of(text, steps, rows, length), {}
    for name in RUNS:
        began = time.perf_counter()
        losses[name] = losses_of(name, batches, device, tiny)
        took = time.perf_counter() - began
        print(f"{name:6} {took:6.1f} s  {losses[name][0]:.4f} to {losses[name][-1]:.4f}", flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()
    gpu = torch.cuda.get_device_name() if device == "cuda" else "none"
    about = f"GPT-2 {'tiny' if tiny else '124M'} over bytes, {rows} x {length}, bfloat16 by autocast, AdamW, clip"
    lines = [f"# gpu: {gpu}", f"# torch: {torch.__version__}", f"# text: {data.name}", f"# about: {about}"]
    lines += [f"# date: {datetime.date.today()}", ",".join(["step", *RUNS])]
    lines += [",".join([str(at), *(f"{losses[name][at]:.6f}" for name in RUNS)]) for at in range(steps)]
    csv_file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(csv_file)
    for name, (mean, most, last) in apart(losses).items():
        print(
            f"{name:6} from eager: {mean:.2e} in the mean, {most:.2e} at most, {last:.2e} in the mean of the last {LAST}"
        )


# --- what came of it ---


def read(path: Path = RESULTS) -> dict[str, list[float]]:
    """The losses of each run."""
    lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    rows = list(csv.DictReader(lines))
    return {name: [float(row[name]) for row in rows] for name in RUNS}


def apart(losses: dict[str, list[float]]) -> dict[str, tuple[float, float, float]]:
    """How far each run is from the first: in the mean of all steps, at most, and in the mean loss of the last."""
    base, found = losses["eager"], {}
    for name in [*RUNS][1:]:
        differences = [abs(a - b) for a, b in zip(losses[name], base)]
        last = abs(statistics.fmean(losses[name][-LAST:]) - statistics.fmean(base[-LAST:]))
        found[name] = statistics.fmean(differences), max(differences), last
    return found


def section(path: Path = RESULTS) -> str:
    """What docs/models.md says of it."""
    losses = read(path)
    of, count = apart(losses), len(losses["eager"])
    first, last = losses["eager"][0], statistics.fmean(losses["eager"][-LAST:])
    again, swap, graph = (f"{of[name][0]:.5f}" for name in ("again", "swap", "graph"))
    return f"""## The losses are PyTorch's

GPT-2 of transformers, 124M parameters in bfloat16 by autocast, learns Shakespeare byte by byte, on an H100. In {count} steps
its loss goes from {first:.2f} to {last:.2f}, the mean of the last {LAST}. Two runs of PyTorch, one of which computes
attention by other kernels of its own, are {again} apart at a step, in the mean: so much is rounding in bfloat16. After
`swap` the model is {swap} from the first of them, and with our AdamW and as a CUDA graph {graph}.

![The losses of four runs, and how far three of them are from the first](assets/curves.png)

`python tools/curves.py run --data FILE` trains them on any text.
"""


def figure(losses: dict[str, list[float]]) -> Any:
    """The losses, and beside them how far they are from PyTorch's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    made, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.6), layout="constrained")
    for name, values in losses.items():
        width = 3.5 if name == "eager" else 1.2
        left.plot(values, color=COLOURS[name], linewidth=width, label=RUNS[name])
    left.set_title("loss", fontsize=11)
    left.legend(frameon=False, fontsize=8)
    for name in [*RUNS][1:]:
        differences = [abs(a - b) for a, b in zip(losses[name], losses["eager"])]
        means = [statistics.fmean(differences[at : at + SMOOTHED]) for at in range(len(differences) - SMOOTHED + 1)]
        right.plot(range(SMOOTHED, len(differences) + 1), means, color=COLOURS[name], linewidth=1.5, label=RUNS[name])
    right.set_title(f"how far from PyTorch's loss, mean of {SMOOTHED} steps", fontsize=11)
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xlabel("step", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return made


def draw(csv_file: Annotated[Path, typer.Option("--csv")] = RESULTS) -> None:
    """Write the picture and the section."""
    from cupyops.bench.charts import png

    PICTURE.write_bytes(png(figure(read(csv_file))))
    text = PAGE.read_text(encoding="utf-8")
    begin, end = text.index(BEGIN), text.index(END)
    PAGE.write_text(f"{text[:begin]}{BEGIN}\n\n{section(csv_file)}\n{text[end:]}", encoding="utf-8")
    print(PICTURE, f"{PICTURE.stat().st_size} bytes")


app = typer.Typer(add_completion=False, no_args_is_help=True, help=__doc__)
app.command()(run)
app.command()(draw)

if __name__ == "__main__":
    app()
