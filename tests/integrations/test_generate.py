"""transformers' `generate`, with a swapped model and with a compiled one: the tokens that the plain model gives."""

import functools
from contextlib import nullcontext

import pytest
import torch
from selection import slow

import cupyops

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = [pytest.mark.filterwarnings("ignore")]  # of transformers, about its own configurations

SMALL = dict(vocab_size=96, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, pad_token_id=0)
FAMILY = {
    "llama": lambda: transformers.LlamaConfig(**SMALL, intermediate_size=48, num_key_value_heads=2),
    "gpt2": lambda: transformers.GPT2Config(
        vocab_size=96, n_embd=32, n_layer=2, n_head=4, pad_token_id=0, bos_token_id=1, eos_token_id=None
    ),
    "mistral, a sliding window of 6": lambda: transformers.MistralConfig(
        **SMALL, intermediate_size=48, num_key_value_heads=2, sliding_window=6
    ),
    "gemma2, full and sliding layers": lambda: transformers.Gemma2Config(
        **SMALL, intermediate_size=48, num_key_value_heads=2, head_dim=8, sliding_window=6
    ),
    "qwen3": lambda: transformers.Qwen3Config(**SMALL, intermediate_size=48, num_key_value_heads=2, head_dim=8),
}
MODES = {
    "greedy": {},
    "sampling": dict(do_sample=True, temperature=0.8, top_k=20),
    "beams": dict(num_beams=3),
    "prompt lookup": dict(prompt_lookup_num_tokens=3),
    "a penalty": dict(repetition_penalty=1.3, no_repeat_ngram_size=2),
    "a prompt in chunks": dict(prefill_chunk_size=3),
    "without a cache": dict(use_cache=False),
}
CACHES = {"dynamic": {}, "static": dict(cache_implementation="static")}
ROLLED = ("mistral, a sliding window of 6", "gemma2, full and sliding layers")  # each step moves their whole caches


@functools.cache
def built(family):
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(FAMILY[family]()).eval()


def prompts(padded, count=2):
    ids = torch.randint(3, 96, (2, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    if padded:
        ids[0, :3], mask[0, :3] = 0, 0
    return dict(input_ids=ids[:count], attention_mask=mask[:count])


def tokens(model, padded=False, **options):
    torch.manual_seed(3)
    options = {"max_new_tokens": 10, "do_sample": False} | options
    count = 1 if "prompt_lookup_num_tokens" in options else 2  # transformers looks up for one sequence
    return model.generate(**prompts(padded, count), **options).tolist()


def supported(cache, mode):
    """Combinations that transformers itself has."""
    return not (cache != "dynamic" and mode in ("without a cache", "prompt lookup"))


COMBINATIONS = [(cache, mode) for cache in CACHES for mode in MODES if supported(cache, mode)]


@pytest.mark.parametrize("padded", [True, *slow(False)], ids=["padded", "whole"])
@pytest.mark.parametrize(("cache", "mode"), COMBINATIONS)
def test_a_swapped_model(cache, mode, padded):
    model = built("llama")
    expected = tokens(model, padded, **CACHES[cache], **MODES[mode])
    with cupyops.swap(model):
        assert tokens(model, padded, **CACHES[cache], **MODES[mode]) == expected


@pytest.mark.parametrize("family", FAMILY)
@pytest.mark.parametrize("cache", CACHES)
def test_families_swapped(family, cache):
    model = built(family)
    expected = tokens(model, padded=True, **CACHES[cache])
    with cupyops.swap(model):
        assert tokens(model, padded=True, **CACHES[cache]) == expected


def compiling():
    configuration = transformers.CompileConfig(backend="cupyops", mode=None, fullgraph=True)
    configuration._compile_all_devices = True  # as on a GPU
    return dict(cache_implementation="static", compile_config=configuration)


@pytest.fixture
def fresh():
    """No graph, and no compiled forward, is left of another test."""
    torch._dynamo.reset()
    yield
    for family in FAMILY:
        vars(built(family)).pop("_compiled_call", None)
    torch._dynamo.reset()


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("mode", ["greedy", *slow("sampling", "a penalty", "a prompt in chunks")])
def test_a_compiled_model(mode):
    """The graph of a step is compiled as `generate` asks for it."""
    model = built("llama")
    expected = tokens(model, padded=True, **MODES[mode])
    with cupyops.trace() as trace:
        assert tokens(model, padded=True, **compiling(), **MODES[mode]) == expected
    assert any(record.operator == "torch.compile: inference" for record in trace.records)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("swapped", [False, True], ids=["", "swapped"])
@pytest.mark.parametrize("family", ["llama", *slow(*list(FAMILY)[1:])])
def test_families_compiled_by_their_kernels(family, swapped):
    """In the simulator; kernels write into the cache and attend to it, and no cache is copied but a rolled one."""
    model = built(family)
    expected = tokens(model, padded=True, max_new_tokens=4)
    with cupyops.swap(model) if swapped else nullcontext(), cupyops.simulate(), cupyops.trace() as trace:
        assert tokens(model, padded=True, max_new_tokens=4, **compiling()) == expected
    notes = [record.note for record in trace.records if record.operator == "torch.compile: inference"]
    assert notes
    if family not in ROLLED:
        assert all("decode_attention" in note and "index_copy" not in note for note in notes), notes
