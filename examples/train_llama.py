"""Train a small Llama of Hugging Face's on characters: the model as it is, with one line that has cupyops compute it.

python examples/train_llama.py                        on the source text of cupyops itself; nothing is downloaded
python examples/train_llama.py --data FILE            on a text of yours
python examples/train_llama.py --compare              the same model without that line, step by step beside it
python examples/train_llama.py --config config.json   the sizes of a model, as its config.json has them
python examples/train_llama.py --checkpoint llama.pt  keep it after each evaluation, and go on from there if it is there
torchrun --nproc-per-node 2 examples/train_llama.py   FSDP2: each device has a part of each parameter, and of each batch
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from language import Devices, Trainer, console, read, session
from torch import Tensor, nn

import cupyops

SIZES = {
    "hidden_size": 128, "intermediate_size": 352, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


class Llama(nn.Module):
    """Hugging Face's model, as the loop wants it: a loss of characters and what follows them."""

    def __init__(self, characters: int, context: int, sizes: dict[str, Any]) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.sizes = {**sizes, "vocab_size": characters, "context": context}
        config = LlamaConfig(
            **sizes, vocab_size=characters, max_position_embeddings=context, use_cache=False, attn_implementation="sdpa",
            bos_token_id=0, eos_token_id=0, pad_token_id=None,
        )  # fmt: skip
        self.model = LlamaForCausalLM(config)

    @property
    def blocks(self) -> nn.ModuleList:
        return self.model.get_decoder().layers

    def forward(self, characters: Tensor, targets: Tensor | None = None) -> Tensor:
        """The mean loss, or without targets the scores of the character after the last."""
        if targets is None:
            return self.model(input_ids=characters).logits[:, -1]
        return self.model(input_ids=characters, labels=targets, shift_labels=targets).loss


def sizes_of(path: Path | None) -> dict[str, Any]:
    """Those of a config.json that make a Llama what it is, or small ones."""
    if path is None:
        return dict(SIZES)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{path} cannot be read: {error}", param_hint="--config") from error
    if not isinstance(found, dict) or found.get("model_type", "llama") != "llama":
        raise typer.BadParameter(f'{path} is of no Llama, whose model_type is "llama"', param_hint="--config")
    known = (*SIZES, "head_dim", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "attention_bias", "mlp_bias")
    return {name: found[name] for name in known if name in found}


app = typer.Typer(add_completion=False)


@app.command(help=__doc__)
def main(
    data: Annotated[Path | None, typer.Option(help="A file of text.")] = None,
    config: Annotated[Path | None, typer.Option(help="A config.json of Hugging Face's.")] = None,
    steps: Annotated[int, typer.Option(min=1)] = 300,
    batch: Annotated[int, typer.Option("--batch-size", min=1, help="Rows in a step, over all devices.")] = 32,
    context: Annotated[int, typer.Option(min=2, help="Characters in a row.")] = 128,
    lr: Annotated[float, typer.Option(min=0, help="Learning rate.")] = 2e-3,
    every: Annotated[int, typer.Option("--evaluate-every", min=1, help="Steps between evaluations.")] = 100,
    compare: Annotated[bool, typer.Option("--compare", help="Train the model as it is beside it.")] = False,
    checkpoint: Annotated[Path | None, typer.Option(help="Where to keep it, and from where to go on.")] = None,
    picture: Annotated[Path, typer.Option("--plot", help="Where to draw the loss.")] = Path("out/llama_loss.png"),
    characters: Annotated[int, typer.Option("--sample", min=0, help="Then write so many characters.")] = 200,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; cuda if there is one.")] = None,
    seed: int = 0,
    trace: Annotated[bool, typer.Option(help="Print which kernels a step runs.")] = False,
) -> None:
    """Train, evaluate, write, draw."""
    sizes, devices, text = sizes_of(config), Devices.found(device), read(data, context)

    def made(swapped: bool) -> Llama:
        model = Llama(len(text.alphabet), context, sizes)
        if swapped:
            report = cupyops.swap(model)  # the one line
            console.print(f"cupyops.swap: {len(report.replaced)} replaced, {len(report.kept)} kept", highlight=False)
        return model

    ways = (True, False) if compare else (True,)
    runs = [Trainer(lambda ours=ours: made(ours), devices, lr, steps, seed, ours) for ours in ways]
    session(
        runs, text, steps=steps, batch=batch, every=every, checkpoint=checkpoint, picture=picture, characters=characters,
        seed=seed, trace=trace,
    )  # fmt: skip


if __name__ == "__main__":
    app()
