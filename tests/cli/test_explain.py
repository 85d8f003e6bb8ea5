"""`python -m cupyops explain`: which launches a call makes, on which card; nothing is run."""

import json

import pytest
import torch
from typer.testing import CliRunner

import cupyops
from cupyops._dispatch.core.cards import CARDS, card
from cupyops._warmup.explanation import explain
from cupyops.cli.app import app
from cupyops.cli.explain import _USUAL

MINE = """
import torch, cupyops

CODE = "__global__ void twice_fwd(const float* x, float* y, int n) { y[threadIdx.x] = 2 * x[threadIdx.x]; }"
k = cupyops.Kernel(CODE, "twice_fwd")

@cupyops.operator("explain_mine::twice")
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x

@twice.forward
def forward(x):
    y = torch.empty_like(x)
    k[1, x.numel()](x, y, x.numel())
    return y, ()
"""


def command(*words):
    return CliRunner().invoke(app, ["explain", *map(str, words)], env={"COLUMNS": "160"})


def described(tmp_path, *words):
    path = tmp_path / "explained.json"
    done = command(*words, "--no-compile", "--json", path)
    assert done.exit_code == 0, done.output
    return json.loads(path.read_text())


def test_what_is_shown():
    done = command("silu", "--shape", "1000x1000", "--dtype", "float16", "--card", "A100")
    assert done.exit_code == 0
    assert done.output.startswith("silu(1000x1000 float16) on A100 (sm_80)")
    forward, backward = done.output.split("backward ─")
    assert "silu_fwd<__half>" in forward and "silu_bwd<__half>" in backward
    for said in (
        "grid 977, block 128",
        "a thread, no spills",
        "blocks a multiprocessor, limited by",
        "at the 2,039 GB/s of A100",
    ):
        assert said in forward


@pytest.mark.parametrize("name", sorted(_USUAL))
def test_each_operator_is_supplied_with_what_it_takes(name, tmp_path):
    shape = "8x32x28x28" if any(part in name for part in ("pool", "conv", "batch", "group")) else "64x1000"
    found = described(tmp_path, name, "--shape", shape, "--dtype", "bfloat16")
    assert found["forward"]["launches"] or "pytorch" in str(found["forward"]["forms"])
    assert "backward" in found
    assert all(launch["bytes"] for launch in found["forward"]["launches"])


def test_big_tensors_cost_nothing(tmp_path):
    torch.use_deterministic_algorithms(False)  # with which PyTorch fills what is empty, and so takes all of its memory
    found = described(tmp_path, "relu", "--shape", "65536x65536", "--dtype", "bfloat16", "--no-backward")
    (launch,) = found["forward"]["launches"]
    assert launch["bytes"] == 2 * 2 * 2**32 and "backward" not in found


def test_strides_and_further_arguments(tmp_path):
    found = described(
        tmp_path, "softmax", "--shape", "64x128", "--strides", "1x64", "--arg", 0, "--arg", "dtype=torch.float32"
    )
    assert "softmax" in found["forward"]["launches"][0]["kernel"]
    two = described(tmp_path, "matmul", "--shape", "64x32", "--shape", "32x16", "--no-backward")
    assert two["forward"]["launches"]


def test_an_operator_of_a_user(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "explain_mine.py").write_text(MINE)
    found = described(tmp_path, "explain_mine.py:twice", "--shape", 32)
    assert [launch["kernel"] for launch in found["forward"]["launches"]] == ["twice_fwd"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["sofmax", "--shape", "3"],
            "there is no operator 'sofmax'; give one of your own as MODULE:NAME; did you mean softmax?",
        ),
        (["relu"], "give --shape 4096x1024"),
        (["relu", "--shape", "3x"], "--shape is '3x', expected sizes such as 4096x1024"),
        (["relu", "--shape", "3", "--dtype", "half8"], "--dtype is 'half8', expected one such as bfloat16"),
        (["relu", "--shape", "3", "--strides", "1x2"], "--strides is '1x2', expected 1 numbers"),
        (["relu", "--shape", "3", "--strides", "1", "--strides", "1"], "more than there are --shape"),
        (["relu", "--shape", "3", "--dtype", "int32"], "relu launches no kernel for this call: it takes the reference"),
        (["relu", "--shape", "3", "--card", "H900"], "there is no card 'H900'; there are T4 (sm_75), A100"),
        (["rope", "--shape", "3x4"], "rope: rope() missing 2 required positional arguments"),
        (["softmax", "--shape", "3x4", "--arg", "7"], "dim"),
    ],
)
def test_bad_arguments(words, message):
    done = command(*words)
    assert done.exit_code == 2 and message in " ".join(done.output.split())


def test_cards():
    assert card("sm_90").name == "H100" and card("rtx-4090").arch == "sm_89" and card("NVIDIA H200").name == "H200"
    for one in CARDS:
        assert one.gpu.capability == int(one.arch[3:]) // 10 and one.gpu.shared <= one.gpu.shared_total


def test_as_a_function():
    x = torch.empty(4, 8, requires_grad=True)
    forward, backward = explain(cupyops.gelu, (x,), {}, card("T4"))
    assert all(one.instance.name.startswith("gelu_fwd<float") for one in forward.launches) and forward.launches
    assert backward.launches and x.grad is not None


def test_a_backward_by_the_reference_is_not_run(monkeypatch):
    """Of an operator without backward kernels; sizes whose scores would take 4 TiB. Nobody touches the memory."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    q, cache = (torch.empty(1, n, 64, 64, requires_grad=True) for n in (1 << 17, 1 << 17))
    forward, backward = explain(cupyops.decode_attention, (q, cache, cache), {}, card("H100"))
    assert forward.launches and not backward.launches and backward.references == ["cupyops::decode_attention"]
    done = command("decode_attention", "--shape", "2x1x8x64", *2 * ("--shape", "2x99x8x64"), "--no-compile")
    assert "cupyops::decode_attention: by PyTorch, through the reference" in done.output.split("backward ─")[1]
