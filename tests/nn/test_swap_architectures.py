"""cupyops.swap on models of transformers, built tiny: what is found; loss and gradients are those of the unswapped model."""

import architectures
import pytest
import torch
import walk
import zoo

import cupyops

transformers = pytest.importorskip("transformers", reason="transformers is not installed: no model to swap")
pytestmark = [pytest.mark.filterwarnings("ignore")]  # of transformers, about its own configurations

SIMULATED = """llama CausalLM, gpt2 CausalLM, gpt_neox CausalLM, olmo2 CausalLM, phi3 CausalLM, qwen3 CausalLM,
falcon CausalLM, bert MaskedLM, t5 Seq2SeqLM, vit ImageClassification"""


CHANGES = "cohere", "cohere2", "gemma2", "gemma3_text", "granite", "opt"  # the logits before its loss sees them


def model_and_batch(name):
    if name.split()[0] not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    model = architectures.build(name)
    return model, architectures.inputs(model, name)


@pytest.mark.parametrize("name", architectures.names())
def test_what_is_found(name):
    model, _ = model_and_batch(name)
    classes, implementation = {m: type(m) for m in model.modules()}, model.config._attn_implementation
    swap = cupyops.swap(model)
    assert list(model.modules()) == list(classes)
    if transformers.__version__ == architectures.recorded_version():
        assert architectures.row(name, swap) == architectures.recorded().get(name), (
            "docs/models.md says otherwise: python tests/support/architectures.py writes it"
        )
    swap.undo()
    assert {m: type(m) for m in model.modules()} == classes
    assert model.config._attn_implementation == implementation and "_loss_function" not in vars(model)


RUNS_CODE = [
    "rwkv CausalLM",
    "big_bird CausalLM",
    "moshi CausalLM",
    "nllb-moe Seq2SeqLM",
    "switch_transformers Seq2SeqLM",
]


@pytest.mark.parametrize("name", [*architectures.names(), *RUNS_CODE])
def test_either_mode_and_undo(name):
    """Loss, gradients and state in both modes, whichever a model was swapped in, and all attributes after the undo."""
    model_and_batch(name)
    assert walk.walk(*zoo.built(f"transformers:{name}")) == {}


@pytest.mark.parametrize("name", [name for name in architectures.names() if name.endswith("CausalLM")])
def test_without_logits(name):
    """Under autocast, where a model's forward lets its head and its loss be one."""
    model, batch = model_and_batch(name)
    with torch.autocast("cpu", torch.bfloat16):
        expected = architectures.step(model.train(), batch)
        swap = cupyops.swap(model, keep_logits=False)
        joined = "none when it trains" in swap.settings[-1]
        assert joined == (name.split()[0] not in CHANGES), swap.settings
        assert not joined or model(**batch).logits is None
        found = architectures.step(model, batch)
    largest = max(float(tensor.abs().max()) for tensor in expected.values())  # the gradient of a key's bias is none
    for key, tensor in expected.items():
        bound = 0.05 * float(tensor.abs().max()) + 1e-5 * largest
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=bound, msg=key)


def test_the_table_is_of_these_architectures():
    assert tuple(architectures.recorded()) == architectures.names() and len(architectures.names()) >= 60


@pytest.mark.parametrize("name", [name.strip() for name in SIMULATED.split(",")])
def test_in_the_simulator(name):
    model, batch = model_and_batch(name)
    expected = architectures.step(model, batch)
    cupyops.swap(model)
    with cupyops.simulate(), cupyops.trace() as trace:
        walk.near(architectures.step(model, batch), expected, 1e-3, name)
    notes = {record.note for record in trace.records if record.route == "reference"}
    assert notes <= {"no kernel for torch.float32"}, "attention alone has no kernels for float32"
    assert "simulator" in trace.routes()
