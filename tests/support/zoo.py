"""Models of other libraries, built small from their configurations: what `walk.py` tries `cupyops.swap` on.

A name is that of a library, of a model and, for transformers, of its head: `transformers:llama CausalLM`, `timm:resnet18`.
Architectures that transformers has without such a head are walked as base models, on whatever input they take.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import architectures
import torch

Batch = dict[str, Any]
Make = Callable[[], torch.nn.Module]

LARGEST = 32_000_000  # parameters of a model of transformers
# the smallest model of each module of timm that has at most 30 million parameters, one of each family of torchvision, and
# configurations of diffusers with the shapes of their inputs
LISTED: dict[str, Any] = json.loads(Path(__file__).with_suffix(".json").read_text("utf-8"))
# what base models want beside `architectures.SMALL`
MORE: dict[str, Any] = {
    "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 20, "num_frames": 2, "num_queries": 4,
    "projection_dim": 16, "d_ff": 48, "d_kv": 8, "num_layers": 2, "n_layer": 2, "n_layers": 2, "num_codebooks": 2,
    "conv_dim": (16, 16, 16), "conv_kernel": (10, 3, 2), "conv_stride": (5, 2, 2), "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2, "num_feat_extract_layers": 3, "max_length": 32,
}  # fmt: skip


def names() -> Iterator[str]:
    """The names of all models, those of transformers with each head that they have."""
    from transformers.models.auto import modeling_auto as auto

    heads = {
        "CausalLM": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "MaskedLM": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "Seq2SeqLM": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "ImageClassification": auto.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
        "": auto.MODEL_MAPPING_NAMES,
    }
    for head, known in heads.items():
        yield from (f"transformers:{name} {head}" for name in known)
    for library, listed in LISTED.items():
        yield from (f"{library}:{name}" for name in listed)


def built(name: str) -> tuple[Make, Batch]:
    """A factory of a model, whose weights are the same at each call, and a batch for it.

    Raises:
        Exception: it cannot be built small, or does not run.
    """
    library, _, model = name.partition(":")
    _load_torchvision()
    error: Exception = ValueError("no way to build it is known")
    for make, batch in globals()[f"_of_{library}"](model):
        try:
            step(make(), batch)
            return make, batch
        except Exception as failed:
            error = failed
    raise error


def step(model: Any, batch: Batch) -> dict[str, torch.Tensor]:
    """Every tensor that a model returns, a loss among them, and the gradient of each parameter for random ones of these.

    Without gradients where they are off.
    """
    model.zero_grad()
    found = {f"output {at}": one for at, one in enumerate(_tensors(model(**batch)))}
    if not torch.is_grad_enabled():
        return found
    generator = torch.Generator().manual_seed(2)
    losses = [(one * torch.randn(one.shape, generator=generator)).mean() for one in found.values() if one.requires_grad]
    torch.stack(losses).sum().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return {name: one.detach() for name, one in found.items()} | gradients


def _tensors(output: Any) -> Iterator[torch.Tensor]:
    if isinstance(output, torch.Tensor) and output.is_floating_point():
        yield output
    elif isinstance(output, (dict, list, tuple)):
        for one in output.values() if isinstance(output, dict) else output:
            yield from _tensors(one)


def _seeded(make: Make) -> torch.nn.Module:
    """The model without what would draw other random numbers, and with weights of which none is 0 or 1."""
    torch.manual_seed(0)
    model = make()
    for one in model.modules():
        known = {key for key, value in vars(one).items() if isinstance(value, float)}
        drops = "drop" in type(one).__name__.lower() or "StochasticDepth" in type(one).__name__
        vars(one).update(dict.fromkeys((key for key in known if "drop" in key or (drops and key == "p")), 0.0))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    return model


@functools.cache
def _load_torchvision() -> None:
    """Import torchvision, which other libraries want, even if its own code does not load, as of a build for CUDA."""
    with contextlib.suppress(ImportError):
        try:
            import torchvision
        except RuntimeError:
            for op in "nms", "qnms":
                torch.library.define(
                    f"torchvision::{op}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
                )
            import torchvision  # noqa: F401


def _of_timm(name: str) -> Iterator[tuple[Make, Batch]]:
    import timm

    for size in (64, 96, 128, timm.get_pretrained_cfg_value(name, "input_size")[-1]):
        for options in ({}, {"img_size": size}):
            make = functools.partial(timm.create_model, name, num_classes=5, **options)
            yield functools.partial(_seeded, make), {"x": torch.randn(2, 3, size, size)}


def _of_torchvision(name: str) -> Iterator[tuple[Make, Batch]]:
    from torchvision.models import get_model

    options: dict[str, Any] = {"weights_backbone": None} if "resnet50" in name or "_v3_large" in name else {}
    options |= {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
    make = functools.partial(_seeded, functools.partial(get_model, name, weights=None, **options))
    inputs = [key for key, one in inspect.signature(make().forward).parameters.items() if one.default is one.empty]
    images = [(2, 3, size, size) for size in (64, 128, 224, 299)]
    for shape in (*images, (2, 3, 8, 64, 64), (2, 3, 16, 112, 112), (1, 3, 16, 224, 224)):
        yield make, {key: torch.randn(shape) for key in inputs}


def _of_diffusers(name: str) -> Iterator[tuple[Make, Batch]]:
    import diffusers

    def drawn(key: str, shape: Any) -> Any:
        if isinstance(shape, int):
            return shape
        if key in ("class_labels", "input_ids", "timestep"):
            return torch.randint(1, 8, shape)
        return torch.ones(shape) if "mask" in key else torch.randn(shape)

    one = LISTED["diffusers"][name]
    make = functools.partial(getattr(diffusers, name), **one["config"])
    yield functools.partial(_seeded, make), {key: drawn(key, shape) for key, shape in one["inputs"].items()}


def _of_transformers(name: str) -> Iterator[tuple[Make, Batch]]:
    import transformers

    short, _, head = name.partition(" ")
    if head:
        make = _light(functools.partial(architectures.build, name))
        yield make, architectures.inputs(make(), name)
        return

    def base(words: dict[str, Any]) -> torch.nn.Module:
        config = _shrunk(transformers.CONFIG_MAPPING[short], words)
        model: torch.nn.Module = transformers.AutoModel.from_config(config)
        return model

    few = {key: value for key, value in architectures.SMALL.items() if "layers" in key or "vocab" in key}
    for words in (architectures.SMALL | MORE, architectures.SMALL, few | MORE, few):
        make = functools.partial(_seeded, functools.partial(base, words))
        try:
            model = _light(make)()
        except Exception as error:
            yield functools.partial(_refuse, error), {}
            continue
        yield from ((make, batch) for batch in _batches(model))


def _refuse(error: Exception) -> torch.nn.Module:
    raise error


def _light(make: Make) -> Make:
    with torch.device("meta"):
        size = sum(p.numel() for p in make().parameters())
    if size > LARGEST:
        raise ValueError(f"{size / 1e6:.0f} million parameters")
    return make


def _shrunk(cls: Any, words: dict[str, Any]) -> Any:
    """A configuration of a class, and of all that it is made of, with those of the words that it knows."""
    known = cls()
    values = {key: value for key, value in words.items() if hasattr(known, key)}
    lists = {key: value for key, value in vars(known).items() if isinstance(value, (list, tuple))}
    values |= {key: [1] * len(lists[key]) for key in ("depths", "layer_depths", "num_blocks") if key in lists}
    values |= {k: 0.0 for k, v in vars(known).items() if "drop" in k and isinstance(v, float)}
    for key in cls.sub_configs:
        if (part := getattr(known, key, None)) is not None and hasattr(part, "sub_configs"):
            values[key] = _shrunk(type(part), words)
    return cls(**values)


def _batches(model: Any) -> Iterator[Batch]:
    """Inputs that a base model may take, those of all kinds first."""
    config, generator = model.config, torch.Generator().manual_seed(1)
    parts = (config, *(getattr(config, name, None) for name in type(config).sub_configs))

    def word(key: str, default: int) -> int:
        value = next((v for one in parts if (v := getattr(one, key, None)) is not None), default)
        return int(value[0] if isinstance(value, (list, tuple)) else value)

    size, channels, mel = word("image_size", 64), word("num_channels", 3), word("num_mel_bins", 80)
    size, hidden = size if size <= 256 else 64, word("hidden_size", 32)
    image, frames = (channels, size, size), word("num_frames", 2)
    shapes = {
        "pixel_values": [(2, *image), (2, frames, *image), (2, 3, 64, 64), (2, 3, 224, 224)],
        "pixel_values_videos": [(2, frames, *image)],
        "input_values": [(2, 2000), (2, 1, 2000), (2, word("max_length", 32), mel), (2, mel, 32)],
        "input_features": [
            (2, mel, 2 * word("max_source_positions", 20)),
            (2, 40, mel),
            (2, 40, word("input_dim", 160)),
        ],
        "hidden_states": [(2, 6, hidden), (2, 32, 6)],
        "inputs_embeds": [(2, 6, hidden)],
    }
    ids = torch.randint(3, min(64, word("vocab_size", 64)), (2, 6), generator=generator)
    offers = {"input_ids": [ids], "decoder_input_ids": [ids]} | {
        key: [torch.randn(shape, generator=generator) for shape in listed] for key, listed in shapes.items()
    }
    taken, main = inspect.signature(model.forward).parameters, model.main_input_name
    whole = {key for key in taken if key != "inputs_embeds"} | {main}
    for chosen in (whole, {key for key in whole if key.endswith("_ids")}, {main, "decoder_input_ids"} & whole, {main}):
        given = {key: listed for key, listed in offers.items() if key in chosen}
        if given:
            yield from (dict(zip(given, values)) for values in itertools.product(*given.values()))
