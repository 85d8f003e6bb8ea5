"""The comparison benchmark: it refuses a wrong result, and what it prints is what it measured."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import cupyops

PATH = Path(__file__).resolve().parents[1] / "benchmarks" / "compare.py"


@pytest.fixture(scope="module")
def compare():
    spec = importlib.util.spec_from_file_location("benchmark_compare", PATH)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def tf32_restored():
    owners = (torch.backends.cudnn, torch.backends.cuda.matmul)
    before = [owner.allow_tf32 for owner in owners]
    yield
    for owner, value in zip(owners, before):
        owner.allow_tf32 = value


def invoke(compare, *arguments):
    return CliRunner().invoke(compare.app, [*map(str, arguments)], env={"COLUMNS": "200"})


def rows_of(path):
    return json.loads(path.read_text())["rows"]


def test_every_operator_is_compared(compare):
    """Small sizes and large: a new operator needs a case here."""
    public = {name.partition("::")[2] for name in cupyops.operators() if name.startswith("cupyops::")}
    variants = {"add_scalar", "cross_entropy_probabilities", "max_pool2d_with_indices"}  # of operators that have cases
    for small in (True, False):
        assert {case.op for case in compare.cases(small)} >= public - variants


@pytest.mark.parametrize(
    ("dtype", "ops"), [("bfloat16", "relu,softmax"), ("float32", "add,scale_shift,nll_loss,max_pool2d")]
)
def test_small_cases_are_right(compare, tmp_path, dtype, ops):
    path = tmp_path / "new" / "rows.json"
    result = invoke(compare, "--ops", ops, "--dtype", dtype, "--quick", "--device", "cpu", "--json", path)
    assert result.exit_code == 0, result.output
    assert "both columns are PyTorch" in result.output
    rows = rows_of(path)
    assert {row["operator"] for row in rows} == set(ops.split(","))
    assert {row["what"] for row in rows} == {"forward", "backward"} and {row["dtype"] for row in rows} == {dtype}
    for row in rows:
        assert row["ours"] > 0 and row["ratio"] == pytest.approx(row["torch"] / row["ours"])


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (lambda x: x.relu() + 0.1, "output: error"),
        (lambda x: x.relu().detach() + 0 * x, "gradient 0: error"),
        (lambda x: x.relu() * torch.nan, "output: error nan"),
        (lambda x: x.relu().double(), "output is"),
    ],
)
def test_a_wrong_result_gets_no_time(compare, monkeypatch, tmp_path, broken, words):
    monkeypatch.setattr(compare.cupyops, "relu", broken)
    path = tmp_path / "rows.json"
    result = invoke(compare, "--ops", "relu", "--quick", "--device", "cpu", "--json", path)
    assert result.exit_code == 1
    rows = rows_of(path)
    assert rows and all(row["ours"] is None and f"WRONG: {words}" in row["note"] for row in rows)


def test_a_failure_is_a_row(compare, monkeypatch, tmp_path):
    def failing(x):
        raise cupyops.LaunchError("no such luck")

    monkeypatch.setattr(compare.cupyops, "relu", failing)
    path = tmp_path / "rows.json"
    assert invoke(compare, "--ops", "relu", "--quick", "--device", "cpu", "--json", path).exit_code == 1
    assert {row["note"] for row in rows_of(path)} == {"FAILED: no such luck"}


@pytest.mark.parametrize("arguments", [("--ops", "rellu"), ("--dtype", "int32"), ("--dtype", "half precision")])
def test_bad_options(compare, arguments):
    assert invoke(compare, *arguments, "--device", "cpu").exit_code == 2


def test_host_and_training_rows(compare):
    device = torch.device("cpu")
    host = list(compare.host_rows(device))
    assert [row.what for row in host] == ["host, no gradient", "host, gradient"]
    training = list(compare.training_rows(device, quick=True))
    assert [row.shape for row in training] == ["batch 64"]
    assert all(row.ours > 0 and row.torch > 0 for row in (*host, *training))


def test_import_row(compare):
    (row,) = compare.process_rows(torch.device("cpu"))
    assert row.ours > 0


@pytest.mark.gpu
def test_device_times(compare):
    """A call that waits for a known time is measured as that long, however late the host."""
    clock = compare.Clock(torch.device("cuda"), 0.05)
    short, long = clock([lambda: torch.cuda._sleep(200_000), lambda: torch.cuda._sleep(2_000_000)])
    assert 5 < long / short < 15


@pytest.mark.gpu
def test_quick_run(compare, tmp_path):
    path = tmp_path / "rows.json"
    result = invoke(compare, "--quick", "--device", "cuda", "--json", path)
    assert result.exit_code == 0, result.output
    assert any(row["what"] == "first call, cold" for row in rows_of(path))
