"""cupyops.swap on models of transformers, built tiny: what is found; loss and gradients are those of the unswapped model."""

import architectures
import pytest
import torch

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


def near(found, expected, rtol):
    """Each within `rtol` of its largest element: sums are added in another order."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        bound = rtol * float(tensor.abs().max()) + 1e-6
        torch.testing.assert_close(
            found[name], tensor, rtol=0, atol=bound, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("name", architectures.names())
def test_architecture(name):
    model, batch = model_and_batch(name)
    expected = architectures.step(model, batch)
    classes, implementation = {m: type(m) for m in model.modules()}, model.config._attn_implementation

    swap = cupyops.swap(model)
    assert list(model.modules()) == list(classes)
    near(architectures.step(model, batch), expected, 1e-4)
    if transformers.__version__ == architectures.recorded_version():
        assert architectures.row(name, swap) == architectures.recorded().get(name), (
            "docs/models.md says otherwise: python tests/support/architectures.py writes it"
        )
    swap.undo()
    assert all(map(torch.equal, architectures.step(model, batch).values(), expected.values()))
    assert {m: type(m) for m in model.modules()} == classes
    assert model.config._attn_implementation == implementation and "_loss_function" not in vars(model)


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
        near(architectures.step(model, batch), expected, 1e-3)
    notes = {record.note for record in trace.records if record.route == "reference"}
    assert notes <= {"no kernel for torch.float32"}, "attention alone has no kernels for float32"
    assert "simulator" in trace.routes()
