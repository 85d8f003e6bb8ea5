"""Small models of transformers, compiled: loss and every gradient are eager's, in one graph where Dynamo makes one.

All by the graph on the CPU, and a few of them by the kernels too, in the simulator.
"""

import copy

import architectures
import pytest
import walk
from compiled import compiled

import cupyops

transformers = pytest.importorskip("transformers", reason="transformers is not installed: no model to compile")
pytestmark = [pytest.mark.filterwarnings("ignore")]  # of transformers, about its own configurations

BY_KERNELS = "llama CausalLM", "t5 Seq2SeqLM", "regnet ImageClassification"
BROKEN = "gpt2 CausalLM", "openai-gpt CausalLM"  # log a warning, which Dynamo does not trace


def steps(name, fullgraph):
    """The model's own step, and a function that makes the compiled model's."""
    if name.split()[0] not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    model = architectures.build(name)
    batch, fast = architectures.inputs(model, name), compiled(copy.deepcopy(model), fullgraph=fullgraph)

    def step():
        return {key.removeprefix("_orig_mod."): tensor for key, tensor in architectures.step(fast, batch).items()}

    return architectures.step(model, batch), step


@pytest.mark.parametrize("name", BY_KERNELS)
def test_a_model_by_its_kernels(name, monkeypatch):
    monkeypatch.setenv("CUPYOPS_STRICT", "1")
    expected, step = steps(name, fullgraph=True)
    with cupyops.simulate(), cupyops.trace() as trace:
        walk.near(step(), expected, 1e-3, name)
    assert "simulator" in trace.routes()


@pytest.mark.slow
@pytest.mark.parametrize("name", architectures.names())
def test_a_model_by_its_graph(name):
    expected, step = steps(name, fullgraph=name not in BROKEN)
    walk.near(step(), expected, 1e-4, name)
