"""Models of Hugging Face's transformers, built tiny from their configurations: what `cupyops.swap` is tried on.

`python tests/support/architectures.py` writes what it finds in them into docs/models.md.
"""

from __future__ import annotations

import collections
import functools
import re
from pathlib import Path
from typing import Any

import torch

import cupyops

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

# what a small configuration says, where a class of configurations knows the word
SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "embedding_size": 32, "intermediate_size": 48, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "head_dim": 8,
    "max_position_embeddings": 64, "type_vocab_size": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "image_size": 16, "patch_size": 8,
    "num_channels": 3, "num_labels": 5, "use_cache": False,
}  # fmt: skip
CAUSAL, MASKED, SEQ2SEQ, IMAGE = "CausalLM", "MaskedLM", "Seq2SeqLM", "ImageClassification"
LISTS = {
    CAUSAL: """apertus arcee biogpt bloom codegen cohere cohere2 ernie4_5 exaone4 falcon gemma gemma2 gemma3_text glm glm4
gpt2 gpt_bigcode gpt_neo gpt_neox gptj granite helium llama mistral ministral mixtral mpt nemotron olmo olmo2 olmo3 olmoe
openai-gpt opt persimmon phi phi3 qwen2 qwen2_moe qwen3 qwen3_moe seed_oss smollm3 stablelm starcoder2 xglm""",
    MASKED: """albert bert camembert convbert data2vec-text deberta-v2 distilbert electra ernie esm modernbert mpnet rembert
roberta roberta-prelayernorm roformer xlm-roberta""",
    SEQ2SEQ: "bart blenderbot m2m_100 marian mbart mt5 pegasus t5 umt5",
    IMAGE: "beit convnext convnextv2 dinov2 efficientnet ijepa mobilevit poolformer regnet resnet segformer swin vit",
}
# what else a family wants, and the words of SMALL that it does not take (None)
OVERRIDES: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 4, "head_dim": None},
    "gptj": {"rotary_dim": 4, "head_dim": None},
    "falcon": {"head_dim": None},
    "gpt_neo": {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "num_hidden_layers": None},
    "marian": {"decoder_vocab_size": 64, "decoder_start_token_id": 0},
    "t5": {"d_kv": 8, "d_ff": 48, "num_layers": 1, "decoder_start_token_id": 0, "num_hidden_layers": None},
    "mt5": {"d_kv": 8, "d_ff": 48, "num_layers": 1, "decoder_start_token_id": 0, "num_hidden_layers": None},
    "umt5": {"d_kv": 8, "d_ff": 48, "num_layers": 1, "decoder_start_token_id": 0, "num_hidden_layers": None},
    "switch_transformers": {"d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_hidden_layers": None}
    | {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "decoder_start_token_id": 0},
    "longt5": {"d_kv": 8, "d_ff": 48, "num_layers": 1, "decoder_start_token_id": 0, "num_hidden_layers": None},
    "convnext": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 32, "patch_size": 2},
    "convnextv2": {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 32, "patch_size": 2},
    "efficientnet": {"image_size": 64, "width_coefficient": 0.25, "depth_coefficient": 0.2, "hidden_dim": 320},
    "segformer": {
        "num_attention_heads": [1, 2, 2, 2], "hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "image_size": 64,
        "patch_size": None, "decoder_hidden_size": 16,
    },
    "swin": {"num_heads": [2, 2], "depths": [1, 1], "embed_dim": 16, "window_size": 2, "num_attention_heads": None}
    | {"num_hidden_layers": None, "patch_size": 2},
    "mobilevit": {"hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32], "image_size": 64}
    | {"patch_size": 2},
    "poolformer": {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1], "image_size": 64, "patch_size": None}
    | {"num_hidden_layers": None},
    "regnet": {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8, "groups_width": 8, "image_size": 32},
    "resnet": {"hidden_sizes": [8, 16], "depths": [1, 1], "embedding_size": 8, "image_size": 32},
} | dict.fromkeys(  # of latent attention
    ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "longcat_flash")
    + ("minicpm3", "sarvam_mla", "youtu"),
    {"num_key_value_heads": 4, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "kv_lora_rank": 16}
    | {"q_lora_rank": 16, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1},
)  # fmt: skip


@functools.cache
def names() -> tuple[str, ...]:
    return tuple(f"{name} {kind}" for kind, listed in LISTS.items() for name in listed.split())


def build(name: str) -> torch.nn.Module:
    """The model of a name, in training mode without dropout, with weights drawn anew from the same seed."""
    import transformers

    short, kind = name.split()
    known = transformers.CONFIG_MAPPING[short]()
    values = {k: v for k, v in SMALL.items() if hasattr(known, k)} | OVERRIDES.get(short, {})
    values = {k: v for k, v in values.items() if v is not None}
    values |= {k: 0.0 for k, v in vars(known).items() if "drop" in k and isinstance(v, float)}
    torch.manual_seed(0)
    config = transformers.CONFIG_MAPPING[short](**values)
    model = getattr(transformers, f"AutoModelFor{kind}").from_config(config)
    with torch.no_grad():
        for (
            parameter
        ) in model.parameters():  # norms' weights are 1 and many biases 0, which would hide what is left out
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model.train()


def inputs(model: Any, name: str) -> dict[str, torch.Tensor]:
    """A batch with labels."""
    generator = torch.Generator().manual_seed(1)
    if name.endswith(IMAGE):
        size = getattr(model.config, "image_size", 32) or 32
        size = size if isinstance(size, int) else size[0]
        return {
            "pixel_values": torch.randn(2, 3, size, size, generator=generator),
            "labels": torch.tensor([1, 3]),
        }
    ids = torch.randint(3, 64, (2, 6), generator=generator)
    return {"input_ids": ids, "labels": ids}


def step(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The loss and the gradient of each parameter."""
    model.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    return {"loss": loss.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def row(name: str, swap: Any) -> str:
    """One line of the table: what is replaced by what, how often, and what stays and why."""
    found = collections.Counter(_short(one.what) for one in swap.replaced)
    kept = collections.Counter(f"{one.type.__name__}: {one.reason}" for one in swap.kept if one.near)
    settings = {text.partition(":")[0]: text for text in swap.settings}
    attention = "yes" if "now" in settings.get("attention", "") else "no"
    loss = "yes" if "loss" in settings else "no"
    shown = ", ".join(f"{count} {what}" for what, count in sorted(found.items()))
    left = "; ".join(f"{count} {what}" for what, count in sorted(kept.items()))
    return f"| {' | '.join((*name.split(), shown, attention, loss, left))} |"


def _short(what: str) -> str:
    return what.replace("cupyops.nn.", "").replace(" in its forward", "").replace(", ", " + ")


def recorded() -> dict[str, str]:
    """The lines of the table by the name of the model."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    return {f"{c[1]} {c[2]}": line for c, line in zip(cells, lines) if c[2] in LISTS}


def recorded_version() -> str | None:
    """The version of transformers that the table is of."""
    found = re.search(r"transformers ([0-9.]+[0-9])", PAGE.read_text(encoding="utf-8"))
    return found and found[1]


def write() -> None:
    """Write the table anew."""
    import transformers

    rows = [row(name, cupyops.swap(build(name))) for name in names()]
    head = ["| model | with a head for | replaced | attention | loss | kept |", "|---|---|---|---|---|---|"]
    text = re.sub(r"transformers [0-9.]+[0-9]", f"transformers {transformers.__version__}", PAGE.read_text("utf-8"))
    begin, end = "<!-- table: written by tests/support/architectures.py -->", "<!-- end of table -->"
    before, after = text.split(begin)[0], text.split(end)[1]
    PAGE.write_text("\n".join([before + begin, "", *head, *rows, "", end]) + after, "utf-8")


if __name__ == "__main__":
    write()
