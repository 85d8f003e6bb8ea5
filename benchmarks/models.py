"""The models that `python -m cupyops bench --models` trains: each a step of a real size, and a tiny twin for the CPU."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from cupyops.bench.training import Batch, Model

F = nn.functional
VOCABULARY = 211  # of the tiny models


def _generator(index: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 + index)


def _tokens(
    vocabulary: int, shape: tuple[int, int], tiny_shape: tuple[int, int] = (2, 16)
) -> Callable[[int, bool], Batch]:
    """Random tokens: what a step costs does not depend on them."""

    def batch(index: int, tiny: bool) -> Batch:
        size, rows = (VOCABULARY, tiny_shape) if tiny else (vocabulary, shape)
        return (torch.randint(3, size, rows, generator=_generator(index)),)

    return batch


def _images(rows: int, size: int = 224, tiny: int = 32, classes: int = 1000) -> Callable[[int, bool], Batch]:
    def batch(index: int, is_tiny: bool) -> Batch:
        count, pixels = (2, tiny) if is_tiny else (rows, size)
        generator = _generator(index)
        images = torch.randn(count, 3, pixels, pixels, generator=generator)
        return images, torch.randint(0, classes, (count,), generator=generator)

    return batch


def _of_language(model: Any, batch: Batch) -> Tensor:
    loss: Tensor = model(input_ids=batch[0], labels=batch[0]).loss
    return loss


def _of_classes(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


# --- Hugging Face ---


def _llama(tiny: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = dict(
        hidden_size=64, intermediate_size=172, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    if not tiny:
        sizes = dict(
            hidden_size=2048, intermediate_size=8192, num_hidden_layers=8, num_attention_heads=32, num_key_value_heads=8
        )
    vocabulary = VOCABULARY if tiny else 128256
    config = LlamaConfig(
        **sizes, vocab_size=vocabulary, tie_word_embeddings=True, use_cache=False, attn_implementation="sdpa"
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model


def _liger_llama(model: nn.Module) -> None:
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    apply_liger_kernel_to_llama(model=model)


def _moe(tiny: bool) -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, intermediate_size=64)
    if not tiny:
        sizes = dict(hidden_size=1024, num_hidden_layers=6, num_attention_heads=16, num_key_value_heads=4, head_dim=64)
        experts = dict(num_experts=32, num_experts_per_tok=4, moe_intermediate_size=512, intermediate_size=2048)
    vocabulary = VOCABULARY if tiny else 32000
    config = Qwen3MoeConfig(**sizes, **experts, vocab_size=vocabulary, use_cache=False, attn_implementation="sdpa")
    model: nn.Module = Qwen3MoeForCausalLM(config)
    return model


def _bert(tiny: bool) -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = dict(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=VOCABULARY
    )
    dropped = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # so that losses can be compared
    config = BertConfig(**(sizes if tiny else {}), **dropped, attn_implementation="sdpa")
    model: nn.Module = BertForMaskedLM(config)
    return model


class _Whisper(nn.Module):
    """The encoder, with a head on the mean of its outputs."""

    def __init__(self, tiny: bool) -> None:
        super().__init__()
        from transformers import WhisperConfig
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        sizes = dict(
            d_model=32, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64, max_source_positions=20
        )
        if not tiny:
            sizes = dict(d_model=768, encoder_layers=12, encoder_attention_heads=12, encoder_ffn_dim=3072)
        config = WhisperConfig(**sizes, num_mel_bins=80, attn_implementation="sdpa")
        self.encoder = WhisperEncoder(config)
        self.head = nn.Linear(config.d_model, 1000)

    def forward(self, spectra: Tensor) -> Tensor:
        found: Tensor = self.head(self.encoder(spectra).last_hidden_state.mean(1))
        return found


def _spectra(index: int, tiny: bool) -> Batch:
    generator, rows = _generator(index), 2 if tiny else 16
    spectra = torch.randn(rows, 80, 40 if tiny else 3000, generator=generator)
    return spectra, torch.randint(0, 1000, (rows,), generator=generator)


# --- PyTorch alone ---


class _Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.gelu, self.down = nn.Linear(dim, 4 * dim), nn.GELU("tanh"), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(h.transpose(1, 2).flatten(2))
        found: Tensor = x + self.down(self.gelu(self.up(self.norm_2(x))))
        return found


class _GPT2(nn.Module):
    """GPT-2's sizes, of PyTorch's modules."""

    def __init__(self, tiny: bool) -> None:
        super().__init__()
        vocabulary, dim, heads, layers, context = (VOCABULARY, 32, 4, 2, 16) if tiny else (50304, 768, 12, 12, 1024)
        self.tokens, self.places = nn.Embedding(vocabulary, dim), nn.Embedding(context, dim)
        self.blocks, self.norm = nn.ModuleList(_Block(dim, heads) for _ in range(layers)), nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x[:, :-1])).flatten(0, 1), tokens[:, 1:].flatten())


# --- timm, diffusers ---


def _timm(name: str, /, **tiny_sizes: Any) -> Callable[[bool], nn.Module]:
    def make(tiny: bool) -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(tiny_sizes.get("name", name) if tiny else name, **_sizes(tiny))
        return model

    def _sizes(tiny: bool) -> dict[str, Any]:
        return {key: value for key, value in tiny_sizes.items() if key != "name"} if tiny else {}

    return make


class _UNet(nn.Module):
    """A diffusion model: the noise in an image, at a time."""

    def __init__(self, tiny: bool) -> None:
        super().__init__()
        from diffusers import UNet2DModel

        channels = (16, 32) if tiny else (128, 256, 256, 512)
        kinds = ["DownBlock2D"] * (len(channels) - 1) + ["AttnDownBlock2D"]
        self.unet = UNet2DModel(
            sample_size=16 if tiny else 64,
            block_out_channels=channels,
            down_block_types=kinds,
            up_block_types=[kind.replace("Down", "Up") for kind in reversed(kinds)],
            norm_num_groups=8 if tiny else 32,
        )

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        found: Tensor = self.unet(images, times).sample
        return found


def _noised(index: int, tiny: bool) -> Batch:
    generator, (rows, size) = _generator(index), (2, 16) if tiny else (32, 64)
    images, noise = (torch.randn(rows, 3, size, size, generator=generator) for _ in range(2))
    return images, torch.randint(0, 1000, (rows,), generator=generator), noise


def _of_noise(model: nn.Module, batch: Batch) -> Tensor:
    images, times, noise = batch
    return F.mse_loss(model(images, times).float(), noise)


def _gpt2_loss(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(batch[0])
    return loss


_AUTOCAST = "bfloat16 by autocast, AdamW, clip"
MODELS = {
    one.name: one
    for one in (
        Model(
            "llama", "Llama: 8 layers, hidden 2048, vocabulary 128256, 4 x 2048 tokens, all in bfloat16, AdamW, clip",
            "transformers", _llama, _tokens(128256, (4, 2048)), _of_language, "tokens", 4 * 2048, "pure",
            liger=_liger_llama, lean=True,
        ),
        Model(
            "moe", f"Qwen3-MoE: 6 layers, hidden 1024, 32 experts, 4 of each token, 4 x 1024 tokens, {_AUTOCAST}",
            "transformers", _moe, _tokens(32000, (4, 1024)), _of_language, "tokens", 4 * 1024, lean=True,
        ),
        Model(
            "gpt2", f"GPT-2: 124M, 16 x 1024 tokens, {_AUTOCAST}",
            None, _GPT2, _tokens(50304, (16, 1024)), _gpt2_loss, "tokens", 16 * 1024,
        ),
        Model(
            "bert", f"BERT base, 32 x 512 tokens, {_AUTOCAST}",
            "transformers", _bert, _tokens(30522, (32, 512)), _of_language, "tokens", 32 * 512,
        ),
        Model(
            "vit", f"ViT-B/16 of timm, 128 images of 224^2, {_AUTOCAST}",
            "timm", _timm("vit_base_patch16_224", img_size=32, depth=2, embed_dim=48, num_heads=3),
            _images(128), _of_classes, "images", 128,
        ),
        Model(
            "resnet50", "ResNet-50 of timm, 128 images of 224^2, channels_last, bfloat16 by autocast, SGD with momentum",
            "timm", _timm("resnet50", name="resnet18"),
            _images(128), _of_classes, "images", 128, images=True, sgd=True, clip=None,
        ),
        Model(
            "convnext", f"ConvNeXt-T of timm, 128 images of 224^2, channels_last, {_AUTOCAST}",
            "timm", _timm("convnext_tiny", depths=(1, 1, 1, 1), dims=(8, 16, 32, 64)),
            _images(128), _of_classes, "images", 128, images=True,
        ),
        Model(
            "unet", f"UNet of diffusers, 32 images of 64^2, channels_last, {_AUTOCAST}",
            "diffusers", _UNet, _noised, _of_noise, "images", 32, images=True,
        ),
        Model(
            "whisper", f"Whisper small's encoder, 16 x 30 s of sound, {_AUTOCAST}",
            "transformers", _Whisper, _spectra, _of_classes, "clips", 16,
        ),
    )
}  # fmt: skip
