"""`cupyops.explain_compile` and `python -m cupyops explain --model`: kernels, bytes, what is fused, what is left."""

import json

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

import cupyops
from cupyops.cli.app import app
from cupyops.errors import InputError


@pytest.fixture(autouse=True)
def afresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_forward_and_backward_of_a_module():
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 10))
    before = [one.clone() for one in model.parameters()]
    found = cupyops.explain_compile(model, torch.randn(32, 64))
    forward, backward = found.graphs
    assert (forward.kind, backward.kind, found.breaks) == ("forward", "backward", ())
    (kernel,) = forward.kernels
    assert kernel.fused[:2] == ("gelu", "var_mean") and "__global__" in kernel.text
    assert [(one.operator, one.count) for one in forward.left] == [("aten.addmm.default", 2)]
    assert all(
        set(kernel.fused) & {"sum", "gelu_backward", "mul"} and "mm" not in kernel.fused for kernel in backward.kernels
    )
    assert len(backward.kernels) >= 2 and "def run(args)" in backward.program
    assert all(torch.equal(*both) for both in zip(before, model.parameters()))
    assert all(one.grad is None for one in model.parameters())


@pytest.mark.parametrize(
    "function, shapes, elements",
    [
        (lambda x: x * 2, [(64, 32)], 2 * 64 * 32),
        (lambda x: x[:, :8].exp(), [(64, 32)], 2 * 64 * 8),
        (lambda x, y: x + y, [(64, 32), (32,)], 2 * 64 * 32 + 32),
        (lambda x: x.sum(1), [(64, 32)], 64 * 32 + 64),
        (lambda x, y: torch.cat([x, y]) * 2, [(64, 32), (16, 32)], 2 * 80 * 32),
        (lambda x: F.softmax(x, -1), [(64, 32)], 2 * 64 * 32),
        (lambda x: x.t() * x.t(), [(64, 32)], 2 * 64 * 32),
    ],
    ids=["pointwise", "slice", "broadcast", "sum", "cat", "softmax", "transposed"],
)
def test_least_bytes(function, shapes, elements):
    """Each element that is needed is counted once, whatever the number of loads."""
    (graph,) = cupyops.explain_compile(function, *[torch.randn(*shape) for shape in shapes]).graphs
    assert graph.bytes == 4 * elements


def test_bundled_kernels_are_counted_together():
    def function(*xs):
        return [x * 2 for x in xs]

    sizes = (64, 128, 256)
    (graph,) = cupyops.explain_compile(function, *[torch.ones(size) for size in sizes]).graphs
    assert len(graph.kernels) == 1 and graph.kernels[0].fused == ("mul",) * 3
    assert graph.bytes == 2 * 4 * sum(sizes)


def test_an_operator_with_kernels_of_its_own_is_told_from_one_without():
    x = torch.ones(1, 2, 64, 64, dtype=torch.bfloat16)
    (graph,) = cupyops.explain_compile(lambda x: torch.nn.functional.scaled_dot_product_attention(x, x, x), x).graphs
    assert [(one.operator, one.reason) for one in graph.left] == [
        ("cupyops.attention.default", "an operator with kernels of its own")
    ]


def test_breaks_and_what_pytorch_runs_have_a_reason():
    def function(x):
        y = torch.fft.rfft(x).abs() * 2
        torch._dynamo.graph_break()
        return y.sum()

    found = cupyops.explain_compile(function, torch.ones(8, 8))
    assert len(found.graphs) == 2 and len(found.breaks) == 1
    left = {one.operator: one.reason for one in found.graphs[0].left}
    assert left["aten._fft_r2c.default"] == "the backend has no kernel for it"
    assert left["aten.abs.default"] == "a tensor of torch.complex64, layout torch.strided"
    text = str(found)
    for word in ("graph break: ", "not fused: aten._fft_r2c.default x 1", "kernel 1: ", "mul"):
        assert word in text


def test_a_graph_that_pytorch_runs_says_why(monkeypatch):
    from cupyops._compile.lowering import Lowering

    monkeypatch.setattr(Lowering, "_by_rule", lambda *_: 1 / 0)
    with pytest.warns(UserWarning, match="backend cupyops"):
        (graph,) = cupyops.explain_compile(lambda x: x * 2, torch.ones(4)).graphs
    assert not graph.kernels and "ZeroDivisionError" in graph.reason and "PyTorch runs it, because" in str(graph)


def test_sizes_that_are_symbols_are_those_of_the_call():
    x = torch.ones(6, 4)
    torch._dynamo.mark_dynamic(x, 0)
    (graph,) = cupyops.explain_compile(lambda x: x * 2, x).graphs
    assert graph.bytes == 2 * 6 * 4 * 4


def test_what_was_compiled_before_is_explained_as_well():
    def function(x):
        return x * 2

    for size in range(20):
        torch.compile(function, backend="eager", dynamic=False)(torch.ones(size + 2))
    assert len(cupyops.explain_compile(function, torch.ones(4)).graphs) == 1


def test_what_cannot_be_called_is_refused():
    with pytest.raises(InputError, match="function is 3"):
        cupyops.explain_compile(3)
    with pytest.raises(InputError, match="'cudagraph'"):
        cupyops.explain_compile(lambda x: x * 2, torch.ones(4), options={"cudagraph": True})


# -- the command line --------------------------------------------------------------------------------------------------

MODEL = """
import torch
from torch import nn

def net():
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.LayerNorm(32)), (torch.randn(8, 16),)

def nothing():
    return 3

def wrong():
    return nn.ReLU(), torch.ones(3)
"""


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "explained_net.py"
    path.write_text(MODEL, encoding="utf-8")

    def run(*words):
        return CliRunner().invoke(app, ["explain", *(word.replace("FILE", str(path)) for word in words)])

    return run


def test_the_command_prints_and_writes(command, tmp_path):
    said = command("--model", "FILE:net", "--code", "--json", str(tmp_path / "out.json"))
    assert said.exit_code == 0, said.output
    for word in ("forward graph of", "backward graph of", "aten.addmm.default", "__global__ void", "def run(args):"):
        assert word in said.output
    written = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert [one["kind"] for one in written["graphs"]] == ["forward", "backward"]
    assert written["graphs"][0]["kernels"][0]["fused"]


def test_the_command_without_a_gradient(command):
    said = command("--model", "FILE:net", "--no-backward")
    assert said.exit_code == 0 and "inference graph of" in said.output and "backward" not in said.output


@pytest.mark.parametrize(
    "words, expected",
    [
        (("--model", "FILE:nothing"), "returned int, expected it to return a model"),
        (("--model", "FILE:wrong"), "returned (ReLU, Tensor)"),
        (("--model", "FILE:absent"), "has no 'absent'"),
        (("relu", "--model", "FILE:net"), "give an operator, or --model"),
        ((), "give an operator, or --model"),
    ],
)
def test_the_command_says_what_is_wrong(words, expected, command):
    said = command(*words)
    assert said.exit_code == 2 and expected in " ".join(said.output.split())


def test_rows_too_long_for_sums_of_their_columns_take_kernels_of_their_own():
    """32,768 columns are what a block keeps sums of; the backward of wider norms has a kernel for the sums alone."""
    x, w = torch.empty(600, 40_000, requires_grad=True), torch.empty(40_000, requires_grad=True)
    graphs = cupyops.explain_compile(lambda x, w: F.layer_norm(x, w.shape, w), x, w).graphs
    assert [(graph.kind, len(graph.kernels), graph.reason) for graph in graphs] == [
        ("forward", 1, ""),
        ("backward", 3, ""),
    ]
