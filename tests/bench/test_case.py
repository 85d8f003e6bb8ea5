"""What a declaration says, and the files that hold declarations."""

import ast
import json
import sys
from pathlib import Path

import pytest
import torch

import cupyops
from cupyops.bench import Case
from cupyops.bench.case import declared, files, here, shipped
from cupyops.errors import InputError

FOLDER = Path(__file__).resolve().parents[2] / "benchmarks"
ELSEWHERE = {"clip_grad_norm_": "adamw", "sgd": "adamw"}


def case(**options):
    given = {"op": "relu", "size": "8", "dtype": torch.float32, "ours": cupyops.relu, "eager": torch.relu}
    make = lambda device, dtype: (torch.randn(8, device=device, dtype=dtype, requires_grad=True),)
    return Case(**{"make": make, **given, **options})


def test_the_unit_follows_from_the_work():
    assert case().unit == "us"
    assert case(forward_bytes=8).unit == "GB/s"
    assert case(forward_bytes=8, forward_flops=8).unit == "TFLOP/s"
    assert case(forward_bytes=8, unit="us").unit == "us"
    with pytest.raises(InputError, match=r"unit is 'km/h', expected one of GB/s, TFLOP/s, us"):
        case(unit="km/h")


def test_work_and_wants_by_way():
    one = case(forward_bytes=8, backward_bytes=12, backward_flops=3, want=(100, 90))
    assert [one.work(way) for way in ("forward", "backward", "together")] == [(8, 0), (12, 3), (20, 3)]
    assert [one.wanted(way) for way in ("forward", "backward", "together")] == [100, 90, 100]
    assert case(want=7).wanted("together") == 7
    assert case(want=7).wanted("backward") is None
    assert case(backward_bytes=None).work("backward") == (0, 0)


def test_peers():
    assert list(case().peers()) == ["eager"]
    assert list(case(liger=torch.relu, others={"triton": torch.relu}).peers()) == ["eager", "triton", "liger"]


def test_the_twin():
    small = case(size="4")
    assert case(forward_bytes=64).twin().size == "8"  # it is small itself
    assert case(forward_bytes=1e9).twin() is None
    assert case().twin() is None  # it does not say how much it moves
    assert case(forward_bytes=1e9, small=small).twin() is small
    assert case(forward_bytes=1e9, small=lambda: small).twin() is small


def test_files_by_operator_and_by_path(tmp_path):
    (tmp_path / "bench_b.py").touch()
    (tmp_path / "bench_a.py").touch()
    assert [path.name for path in files([], tmp_path)] == ["bench_a.py", "bench_b.py"]
    assert files(["b"], tmp_path) == [tmp_path / "bench_b.py"]
    assert files([str(tmp_path / "bench_a.py")], tmp_path / "absent") == [tmp_path / "bench_a.py"]
    with pytest.raises(InputError, match="no benchmark of 'c'; it has a, b"):
        files(["c"], tmp_path)
    with pytest.raises(InputError, match="is no file"):
        files(["c.py"], tmp_path)
    with pytest.raises(InputError, match="there is no folder"):
        files([], tmp_path / "absent")


COMPILED = """
import torch
from cupyops.bench import Case
FACTOR = {}.0

def times(x):
    return x * FACTOR

def cases():
    compiled = torch.compile(torch.vmap(times), backend="eager", fullgraph=True)
    make = lambda device, dtype: (torch.ones(2, 3),)
    return [Case("times", "2x3", torch.float32, make, compiled, times)]
"""


def test_what_a_file_defines_can_be_compiled(tmp_path):
    """torch.compile imports the module of a function by its name: of two files called alike, and of one that is called
    as a library is, each its own."""
    paths = [tmp_path / folder / name for folder, name in (("a", "bench_x"), ("b", "bench_x"), ("a", "json"))]
    before = json.loads
    for number, path in enumerate(paths):
        path = path.with_suffix(".py")
        path.parent.mkdir(exist_ok=True)
        path.write_text(COMPILED.format(number + 2))
    found = [case for path in paths for case in declared([path.with_suffix(".py")])]
    for number, one in enumerate(found):
        torch.testing.assert_close(one.ours(*one.make("cpu", one.dtype)), torch.full((2, 3), number + 2.0))
    assert sys.modules["json"].loads is before
    again = declared([paths[0].with_suffix(".py")])[0]
    assert again.eager.__module__ == found[0].eager.__module__ == "bench_x"


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "has no function cases"), ("1 / 0", "cannot be imported: ZeroDivisionError"), ("(", "SyntaxError")],
)
def test_a_file_that_declares_nothing(text, message, tmp_path):
    path = tmp_path / "bench_x.py"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        declared([path])


def test_only():
    path = FOLDER / "bench_relu.py"
    assert {one.size for one in declared([path], r"2\^26")} == {"2^26"}
    assert declared([path], "gelu") == []
    with pytest.raises(InputError, match="is no regular expression"):
        declared([path], "(")


def test_every_operator_has_a_declaration():
    names = {path.stem.removeprefix("bench_") for path in files([], FOLDER)}
    source = ast.parse((Path(cupyops.__file__).parent / "ops" / "__init__.py").read_text(encoding="utf-8"))
    operators = {
        alias.asname or alias.name for node in source.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert len(operators) > 20
    assert operators - names == {"mean"}  # in the file of sum
    assert set(ELSEWHERE.values()) <= names


def test_declarations_import_no_peer():
    """Liger may not be installed: its callables import it when they are called."""
    for path in files([], FOLDER):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        above = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        assert "liger_kernel" not in ast.unparse(ast.Module(above, [])), path.name


def test_where_declarations_are_looked_for(tmp_path, monkeypatch):
    """Here, if there is a folder of them; else those of the built-in operators."""
    monkeypatch.chdir(tmp_path)
    assert here() == shipped() and (shipped() / "bench_relu.py").is_file()
    (tmp_path / "benchmarks").mkdir()
    assert here() == Path("benchmarks")
