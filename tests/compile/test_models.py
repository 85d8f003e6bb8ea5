"""Small models of transformers, compiled: loss and every gradient are eager's, in one graph where Dynamo makes one.

All by the graph on the CPU, and a few of them by the kernels too, in the simulator.
"""

import copy

import architectures
import pytest
import torch
import walk
from compiled import compiled

import cupyops
from cupyops._util import observed

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


@pytest.mark.parametrize("name", ["llama CausalLM", "bert MaskedLM", "vit ImageClassification", *BY_KERNELS[1:]])
def test_a_swapped_model_is_compiled_as_it_was(name, monkeypatch):
    """On a GPU, where a registered operator would be a border for fusion; `never_slower(False)` keeps our operators."""

    def seen(x):  # as if tensors were on a GPU
        return isinstance(x, torch.Tensor) and torch.compiler.is_dynamo_compiling() and observed.prefers_library

    monkeypatch.setattr(observed, "is_left_to_compilers", seen)
    model = architectures.build(name)
    batch = architectures.inputs(model, name)
    graphs = []

    def keep(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph

    def compile_anew():
        torch._dynamo.reset()
        graphs.clear()
        architectures.step(torch.compile(model, backend=keep), batch)
        return [list(graph) for graph in graphs]

    with cupyops.never_slower():
        plain = compile_anew()
        cupyops.swap(model)
        assert compile_anew() == plain
    assert any(target.startswith("cupyops.") for graph in compile_anew() for target in graph)


@pytest.mark.gpu
def test_a_compiler_sees_pytorch_s_functions_of_a_swapped_model_on_a_gpu():
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.GELU(), torch.nn.Softmax(-1))
    x, seen = torch.rand(8, 64, device="cuda"), []

    def keep(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    cupyops.swap(model.cuda())
    with cupyops.never_slower():
        torch.testing.assert_close(torch.compile(model, backend=keep)(x), model(x))
    assert len(seen) == 4 and not any("cupyops" in target for target in seen)
