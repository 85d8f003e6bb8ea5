"""Fine-tune a small Llama of Hugging Face's by low-rank adapters of peft: the weights stay, the adapters learn.

python examples/finetune_lora.py                         what has read the Python of cupyops learns its CUDA; no download
python examples/finetune_lora.py --data FILE             learns a text of yours instead
python examples/finetune_lora.py --base base.pt          keep the first training, and take it from there if it is there
python examples/finetune_lora.py --checkpoint lora.pt    keep the adapters after each evaluation, and go on from there
python examples/finetune_lora.py --adapters DIR          save them as peft does, for `PeftModel.from_pretrained`
python examples/finetune_lora.py --compare               the same model without `cupyops.swap`, step by step beside it

It needs transformers and peft: pip install "cupyops[examples,finetune]".
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from language import Devices, Text, Trainer, console, load, read, read_text, session, train
from torch import nn
from train_llama import SIZES, Llama

import cupyops


def cuda_text() -> str:
    """The package's kernels, which lie in the wheel, or beside the package in a checkout."""
    package = Path(cupyops.__file__).parent
    folder = next(folder for folder in (package / "cuda_src", package.parent / "cuda_src") if folder.is_dir())
    files = sorted([*folder.rglob("*.cu"), *folder.rglob("*.cuh")])
    return "".join(file.read_text(encoding="utf-8") for file in files)


def texts(data: Path | None, context: int) -> tuple[Text, Text]:
    """What the base reads, and what the adapters learn, in one alphabet."""
    base = read(None, context)
    name, text = ("cupyops' CUDA", cuda_text()) if data is None else (str(data), read_text(data))
    alphabet = "".join(sorted({*base.alphabet, *text}))
    return read(None, context, alphabet), Text.of(name, text, context, alphabet)


def with_adapters(network: Llama, rank: int, alpha: float) -> Llama:
    """Beside each linear layer of the blocks, and nothing else to train."""
    import peft

    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules="all-linear", task_type="CAUSAL_LM")
    network.model = peft.get_peft_model(network.model, config)
    network.sizes = {**network.sizes, "rank": rank, "alpha": alpha}
    return network


def swapped(network: Llama) -> Llama:
    """By cupyops what that has, the adapters' own products too."""
    report = cupyops.swap(network)
    classes = sorted({one.type.__name__ for one in report.replaced})
    console.print(f"cupyops.swap: {len(report.replaced)} replaced, {len(report.kept)} kept: {', '.join(classes)}")
    return network


def base_weights(
    text: Text, devices: Devices, make: Any, lr: float, steps: int, batch: int, seed: int, kept: Path | None
) -> dict[str, Any]:
    """Those of the model that the adapters go by: from a file, or trained here."""
    base = Trainer(lambda: swapped(make()), devices, lr, steps, seed)
    if kept is not None and kept.exists():
        load(kept, base, text, hint="--base")
    else:
        console.print(f"the base reads {text.name}")
        train([base], text, steps, batch, steps, kept)
    return {name: value.cpu() for name, value in base.network.state_dict().items()}


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    data: Annotated[Path | None, typer.Option(help="A file of text to learn.")] = None,
    base: Annotated[Path | None, typer.Option(help="Where to keep the base, and to take it from.")] = None,
    base_steps: Annotated[int, typer.Option(min=1, help="Steps of the base.")] = 300,
    rank: Annotated[int, typer.Option(min=1, help="Of the adapters.")] = 8,
    alpha: Annotated[float, typer.Option(min=0, help="The adapters count alpha / rank times.")] = 16.0,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the adapters.")] = 200,
    batch: Annotated[int, typer.Option("--batch-size", min=1)] = 32,
    context: Annotated[int, typer.Option(min=2, help="Characters in a row.")] = 128,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate.")] = 2e-3,
    every: Annotated[int, typer.Option("--evaluate-every", min=1, help="Steps between evaluations.")] = 100,
    compare: Annotated[bool, typer.Option("--compare", help="Train the model as it is beside it.")] = False,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Where to keep the adapters, and from where to go on.")
    ] = None,
    adapters: Annotated[Path | None, typer.Option(help="Where to save them as peft does.")] = None,
    picture: Annotated[Path, typer.Option("--plot", help="Where to draw the loss.")] = Path("out/lora_loss.png"),
    characters: Annotated[int, typer.Option("--sample", min=0, help="Then write so many characters.")] = 200,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda if there is one.")] = None,
    seed: int = 0,
    trace: Annotated[bool, typer.Option(help="Print which kernels a step runs.")] = False,
) -> None:
    """Train the base, then the adapters, and compare what they know."""
    devices = Devices.found(device)
    if devices.size > 1:
        raise typer.BadParameter("this example is for one device; train_llama.py shows several", param_hint="torchrun")
    first, second = texts(data, context)

    def made() -> Llama:
        return Llama(len(first.alphabet), context, SIZES)

    weights = base_weights(first, devices, made, lr, base_steps, batch, seed, base)

    def adapted(ours: bool) -> nn.Module:
        network = made()
        network.load_state_dict(weights)
        network = with_adapters(network, rank, alpha)
        return swapped(network) if ours else network

    ways = (True, False) if compare else (True,)
    runs = [Trainer(lambda ours=ours: adapted(ours), devices, lr, steps, seed, ours) for ours in ways]
    before = runs[0].evaluate(second, batch)  # an adapter begins as nothing
    trained = sum(parameter.numel() for parameter in runs[0].trained())
    console.print(
        f"the adapters learn {second.name}: {trained:,} numbers; the base has a loss of {before:.3f}", highlight=False
    )
    session(
        runs, second, steps=steps, batch=batch, every=every, checkpoint=checkpoint, picture=picture, characters=characters,
        seed=seed, trace=trace,
    )  # fmt: skip
    after = runs[0].evaluate(second, batch)
    console.print(
        f"loss on the text that was held: {before:.3f} of the base, {after:.3f} with adapters", highlight=False
    )
    if adapters is not None:
        runs[0].network.model.save_pretrained(adapters)
        size = sum(file.stat().st_size for file in adapters.iterdir())
        console.print(f"adapters: {adapters}, {size / 1024:,.0f} KB", highlight=False)


if __name__ == "__main__":
    app()
