"""`python -m cupyops check`: arguments, exit codes, files, and what the terminal shows."""

from __future__ import annotations

import json
import sys
from xml.etree import ElementTree

import pytest
import torch
from processes import run_python
from typer.testing import CliRunner

import cupyops
from cupyops import InputError
from cupyops.cli import sample
from cupyops.cli.app import app
from cupyops.testing import hazards
from cupyops.testing.target import target

MINE = '''
import torch

def good(x, scale=1.0):
    return torch.relu(x) * scale

def bad(x, scale=1.0):
    """Wrong from three elements on. [bold]no markup[/bold]"""
    if x.numel() >= 3:
        return torch.relu(x) * scale + 0.5
    return torch.relu(x) * scale

def shouts(x, scale=1.0):
    raise RuntimeError("[red]a < b[/red] \\x1b[31m")

def picky(a, b, c, d):
    return a + b + c + d

class Ops:
    twice = staticmethod(lambda x: 2 * x)

number = 3
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working folder with a user's module, where Python looks for modules, as it does with -m."""
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    (tmp_path / "mine.py").write_text(MINE)
    yield tmp_path
    sys.modules.pop("mine", None)


def command(*words):
    return CliRunner().invoke(app, ["check", *map(str, words)])


def against(name, *words):
    """A check of a function of the user's module, of its plain call alone."""
    return command(f"mine:{name}", "--reference", "mine:good", "--only", "accuracy", *words)


def report_of(*words):
    result = command(*words, "--json", "r.json")
    assert result.exit_code in (0, 1), result.output
    with open("r.json") as file:
        return json.load(file)


def test_a_sound_operator(folder):
    result = command("cupyops:relu", "--only", "accuracy", "--backend", "reference")
    assert result.exit_code == 0
    lines = result.output.splitlines()
    assert lines[0] == "cupyops::relu((4, 33):(33, 1))  seed 0"
    assert lines[2].split()[:3] == ["accuracy", "reference", "pass"]
    assert lines[-1] == "1 passed, 0 failed, 0 not applicable"


def test_a_broken_function(folder):
    result = against("bad")
    assert result.exit_code == 1
    lines = result.output.splitlines()
    assert [line.partition(":")[0] for line in lines[-5:-1]] == ["expected", "found", "smallest", "reproduce"]
    assert lines[-3] == "smallest:  (3, 1):(1, 1)"
    assert lines[-1] == "0 passed, 1 failed, 0 not applicable"
    line = lines[-2].partition(":")[2].strip()
    again = eval(line, {"cupyops": cupyops, "torch": torch, "mine": sys.modules["mine"]})
    assert [row.verdict for row in again.rows] == ["fail"]


def test_where_nothing_could_be_tried(folder):
    """That is no success."""
    result = command("cupyops:relu", "--only", "indices", "--backend", "reference")
    assert result.exit_code == 1
    assert result.output.splitlines()[-1] == "0 passed, 0 failed, 1 not applicable"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["mine"], "'mine' names no function: expected MODULE:NAME, such as cupyops:relu"),
        (["cupyops.relu"], "or file.py:name; did you mean cupyops:relu?"),
        (["mine:"], "'mine:' names no function: expected MODULE:NAME"),
        ([":good"], "':good' names no function: expected MODULE:NAME"),
        (["absent.module:f"], "MODULE 'absent.module' cannot be found, neither in "),
        (["mine:god"], "'mine:god': mine has no 'god'; name one of its functions; did you mean good?"),
        (["mine:Ops.absent"], "'mine:Ops.absent': mine has no 'absent'"),
        (["mine.cu:good"], "MODULE is 'mine.cu', which is CUDA; give the Python module"),
        (["mime.py:good"], "did you mean mine.py?"),
        (["broken:f"], "cannot import broken: ZeroDivisionError: division by zero"),
        (["unread:f"], "cannot import unread: SyntaxError"),
        (["mine:number"], "'mine:number' is int, expected an operator or a function"),
        (["mine:good"], "'mine:good' is no operator of cupyops: give --reference MODULE:NAME"),
        (["torch:relu"], "'torch:relu' is no operator of cupyops: give --reference MODULE:NAME"),
        (["cupyops:relu", "--reference", "mine:number"], "'mine:number' is int, expected an operator or a function"),
        (["cupyops:relu", "--reference", "mine:picky", "--arg", "ones(3)"], "the reference refuses: TypeError"),
        (["cupyops:relu", "--only", "accurate"], "only is 'accurate', expected one of accuracy\n"),
        (
            ["cupyops:relu", "--skip", "nothing"],
            "skip is 'nothing', expected one of the names that cupyops.testing.hazards() lists",
        ),
        (["cupyops:relu", "--backend", "cuda"], "backends is 'cuda', expected one of reference, simulator, gpu"),
        (
            ["mine:picky", "--reference", "mine:picky"],
            "picky takes none of the usual calls: give its arguments with --arg",
        ),
        (
            ["cupyops:relu", "--arg", "randn(3", "--only", "accuracy"],
            "--arg is 'randn(3', expected one of: randn(3,5), ",
        ),
        (
            ["cupyops:softmax", "--arg", "randn(3)", "--arg", "dim=4"],
            "the reference refuses: InputError: dim is 4 (int), ",
        ),
        (["cupyops:relu", "--json", "absent/r.json", "--only", "accuracy"], "absent/r.json"),
        (["cupyops:relu", "--junit", "absent/r.xml", "--only", "accuracy"], "absent/r.xml"),
    ],
)
def test_bad_arguments(folder, words, message):
    (folder / "broken.py").write_text("1 / 0")
    (folder / "unread.py").write_text("def f(:")
    result = command(*words)
    assert result.exit_code == 2, result.output
    assert message in result.output and "Traceback" not in result.output


def test_a_report_that_can_no_longer_be_written_is_shown_all_the_same(folder, monkeypatch):
    """What is noticed before the run, tests/test_cli_outputs.py has."""
    monkeypatch.setattr("cupyops.cli.outputs.files", lambda *args: None)
    result = against("bad", "--json", "absent/r.json")
    assert result.exit_code == 2
    assert "0 passed, 1 failed" in result.output


def value(text, seed=0):
    return sample.call(target(cupyops.relu), [text], seed).args[0]


@pytest.mark.parametrize(("text", "expected"), [
    ("3", 3), ("-2.5e-3", -2.5e-3), ("true", True), ("False", False), ("none", None), ("None", None),
    ("(2, 3)", (2, 3)), ("[1,(2,)]", [1, (2,)]), ("torch.float16", torch.float16), ("sum", "sum"),
    ("'sum'", "sum"), ('"dim=1"', "dim=1"), (" 4", 4),
])  # fmt: skip
def test_arguments_that_are_no_tensors(text, expected):
    found = value(text)
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(("text", "shape", "dtype"), [
    ("randn(3,5)", (3, 5), torch.float32), ("randn()", (), torch.float32), ("randn(0, 3)", (0, 3), torch.float32),
    ("rand(4):float64", (4,), torch.float64), ("randn(2):bfloat16", (2,), torch.bfloat16),
    ("randint(0,10,3,2)", (3, 2), torch.int64), ("randint(2,3,4):uint8", (4,), torch.uint8),
    ("zeros(2,2):bool", (2, 2), torch.bool), ("ones(3):int32", (3,), torch.int32),
    ("full(2,3,0.5)", (2, 3), torch.float32), ("full(7)", (), torch.int64), ("arange(5)", (5,), torch.int64),
    ("arange(1,2,0.25)", (4,), torch.float32), (" randn(3) ", (3,), torch.float32),
])  # fmt: skip
def test_arguments_that_are_tensors(text, shape, dtype):
    found = value(text)
    assert (found.shape, found.dtype, found.requires_grad) == (shape, dtype, dtype.is_floating_point)


def test_the_values_of_tensors():
    assert torch.equal(value("randn(3,5)", seed=4), torch.randn(3, 5, generator=torch.Generator().manual_seed(4)))
    assert not torch.equal(value("randn(3,5)"), value("randn(3,5)", seed=1))
    assert value("rand(100)").min() >= 0 and value("rand(100)").max() < 1
    assert set(value("randint(3,6,100)").tolist()) == {3, 4, 5}
    assert value("full(2,-1.5)").tolist() == [-1.5, -1.5] and value("ones(2):int8").tolist() == [1, 1]
    assert value("arange(2,8,3)").tolist() == [2, 5]
    first, second = sample.call(target(cupyops.relu), ["randn(3)", "randn(3)"], 0).args
    assert not torch.equal(first, second)


@pytest.mark.parametrize(("text", "message"), [
    ("", "expected one of: "), ("dim=", "expected one of: "), ("rnd(3)", "expected one of: "),
    ("1 + 1j +", "expected one of: "), ("{[]: 1}", "expected one of: "), ("torch.relu", "expected one of: "),
    ("__import__('os')", "expected one of: "), ("randn(-1)", "negative dimension"), ("randn(a)", "malformed"),
    ("randn(3", "expected one of"), ("randn(3)x", "expected one of: "),
    ("randn(3.5)", "invalid combination of arguments"), ("randn(3):float33", "no attribute 'float33'"),
    ("randn(3):relu", "--arg is 'randn(3):relu'"), ("randint(5)", "out of range"),
    ("randint(5,2,3)", "random_ expects"), ("full()", "out of range"),
    ("x=randn(-1)", "--arg is 'x=randn(-1)': "),
])  # fmt: skip
def test_arguments_that_are_wrong(text, message):
    with pytest.raises(InputError) as caught:
        value(text)
    assert str(caught.value).startswith(f"--arg is {text!r}") and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_words_with_a_name_are_keyword_arguments():
    call = sample.call(target(cupyops.relu), ["randn(3)", "dim=1", "reduction=sum", "weight=ones(2)", "2"], 0)
    assert [type(one) for one in call.args] == [torch.Tensor, int]
    assert {name: type(one) for name, one in call.kwargs.items()} == {
        "dim": int,
        "reduction": str,
        "weight": torch.Tensor,
    }


@pytest.mark.parametrize(("name", "call"), [
    ("relu", "(4, 33):(33, 1)"), ("softmax", "(4, 33):(33, 1), 1"), ("layer_norm", "(4, 33):(33, 1), (33,)"),
    ("scale_shift", "(4, 33):(33, 1), (4, 33):(33, 1)"), ("max_pool2d", "(2, 3, 8, 9):(216, 72, 9, 1), 3"),
])  # fmt: skip
def test_without_arguments_a_usual_call_is_made(name, call):
    assert repr(sample.call(target(getattr(cupyops, name)), (), 0)) == call


def test_arguments_reach_the_function(folder):
    plain = ["mine:good", "--reference", "mine:good", "--only", "accuracy"]
    found = report_of(*plain, "--arg", "randn(2,3):float64", "--arg", 2)
    assert found["call"] == "(2, 3):(3, 1), 2" and found["passed"]
    found = report_of(*plain, "--arg", "ones(2)", "--arg", "scale=0.5")
    assert found["call"] == "(2,):(1,), scale=0.5"


def rows(found):
    return [(row["hazard"], row["backend"]) for row in found["rows"]]


def test_only_skip_and_backend(folder):
    chosen = ["--only", "strided", "--only", "accuracy", "--only", "empty", "--skip", "empty"]
    found = report_of("cupyops:relu", *chosen, "--backend", "simulator", "--backend", "reference")
    assert rows(found) == [(name, where) for where in ("simulator", "reference") for name in ("accuracy", "strided")]
    found = report_of("mine:good", "--reference", "mine:good", *[w for n in list(hazards())[2:] for w in ("--skip", n)])
    assert rows(found) == [("accuracy", "reference"), ("dtypes", "reference")]


def test_seed_and_no_shrink(folder):
    found = report_of("mine:bad", "--reference", "mine:good", "--only", "accuracy", "--seed", 9, "--no-shrink")
    assert found["seed"] == 9 and found["rows"][0]["smallest"] == "(4, 33):(33, 1)"
    assert found["rows"][0]["reproduction"].endswith("seed=9)")


def test_reference(folder):
    assert command("cupyops:relu", "--reference", "torch:relu", "--only", "accuracy").exit_code == 0
    assert command("cupyops:relu", "--reference", "torch:neg", "--only", "accuracy").exit_code == 1
    twice = ["mine:Ops.twice", "--only", "accuracy"]
    assert command(*twice, "--reference", "mine:Ops.twice").exit_code == 0


def test_a_built_in_function_has_its_plain_name(folder):
    """Python's qualified name of torch.relu is that of a class inside PyTorch."""
    result = command("torch:relu", "--reference", "torch:relu", "--only", "accuracy")
    assert result.exit_code == 0 and result.output.startswith("relu((4, 33):(33, 1))  seed 0")


def test_json_and_junit(folder):
    result = against("bad", "--json", "r.json", "--junit", "r.xml")
    assert result.exit_code == 1
    found = json.loads((folder / "r.json").read_text())
    assert found["name"] == "bad" and not found["passed"] and found["rows"][0]["smallest"] == "(3, 1):(1, 1)"
    suite = ElementTree.parse(folder / "r.xml").getroot()
    assert (suite.attrib["tests"], suite.attrib["failures"]) == ("1", "1")
    assert found["rows"][0]["reproduction"] in suite[0][0].text


def test_a_module_by_its_path(folder):
    (folder / "deep").mkdir()
    (folder / "deep" / "theirs.py").write_text("def twice(x):\n    return 2 * x\n")
    path = "deep/theirs.py:twice"
    before = list(sys.path)
    try:
        assert command(path, "--reference", path, "--only", "accuracy").exit_code == 0
    finally:
        sys.path[:] = before
        sys.modules.pop("theirs", None)


MANY = ["accuracy", "strided", "deterministic_algorithms", "saved_tensors_freed", "cuda_graph_first_call"]


def test_eighty_columns(folder, monkeypatch):
    """The longest names stand there whole, the reason is folded in a column of its own."""
    monkeypatch.setenv("COLUMNS", "80")
    only = [word for name in MANY for word in ("--only", name)]
    lines = command("mine:bad", "--reference", "mine:good", *only).output.splitlines()
    end = next(number for number, line in enumerate(lines) if line.startswith("accuracy (reference)"))
    table = lines[1:end]
    assert max(map(len, table)) <= 80
    assert table[0].split() == ["hazard", "backend", "verdict", "s", "reason"]
    column = table[0].index("reason")
    firsts = [line.split()[:3] for line in table[1:] if line[:column].strip()]
    assert [(first[0], first[1]) for first in firsts] == [(name, "reference") for name in MANY]
    assert [first[2] for first in firsts] == ["fail", "pass", "pass", "n/a", "n/a"]
    reason = " ".join(" ".join(line[column:] for line in table[1:]).split())
    assert "output: error 0.5 where" in reason and "there is no torch.autograd.Function of Python" in reason
    assert max(map(len, lines)) > 80  # what is to be copied is left whole


FEW = ["accuracy", "strided", "transposed", "negative_bit", "conjugate_bit", "cuda_graph"]


def few(name, *more):
    """The lines of a check in 80 columns that leaves out all but a few hazards."""
    left_out = [word for hazard in hazards() if hazard not in FEW for word in ("--skip", hazard)]
    return command(f"mine:{name}", "--reference", "mine:good", *left_out, *more).output.splitlines()


def test_hazards_are_counted_by_family(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = few("bad")
    assert [line.rstrip() for line in lines[1:5]] == [
        "hazards   reference", "values    1 fail", "layouts   3 pass, 1 n/a", "launches  1 n/a",
    ]  # fmt: skip
    assert lines[6].startswith("accuracy (reference) ") and lines[8].startswith("found:     output: error 0.5 where")
    assert lines[-1] == "3 passed, 1 failed, 2 not applicable"


def test_verbose_lists_each(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = few("bad", "--verbose")
    named = [line.split()[0] for line in lines[2:] if line.startswith(" ") and line[1] != " "]
    assert named == FEW


def test_what_the_calls_own_error_leaves_untried_is_one_row(folder, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    lines = few("shouts", "--verbose")
    rows = [" ".join(line.split()) for line in lines[2:6]]
    assert rows[0].startswith("accuracy reference fail")
    assert rows[1].startswith("strided and 2 more reference n/a") and "the call itself fails: RuntimeError" in rows[1]
    assert rows[2].startswith("conjugate_bit reference n/a") and "the call itself" not in rows[2]
    assert lines[-1] == "0 passed, 1 failed, 5 not applicable"


def test_what_a_function_says_is_no_markup(folder):
    output = against("shouts").output
    assert output.count("RuntimeError: [red]a < b[/red]") == 2
    assert "the call itself fails" not in output


def test_as_a_program_in_the_folder_of_the_module(tmp_path):
    (tmp_path / "mine.py").write_text(MINE)
    words = ["-m", "cupyops", "check", "mine:bad", "--reference", "mine:good", "--only", "accuracy"]
    done = run_python(*words, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr == ""
    assert "reproduce: cupyops.testing.check(mine.bad, [" in done.stdout


NEVER = """
import torch
import cupyops

kernel = cupyops.Kernel('extern "C" __global__ void f(float* y, int n) {}', "f")

@cupyops.operator("cli_check::never", dtypes=torch.float64)
def never(x: torch.Tensor) -> torch.Tensor:
    return 2 * x

@never.forward
def _(x):
    return torch.empty_like(x), ()

def interrupted(x):
    raise KeyboardInterrupt
"""


@pytest.fixture
def never(folder):
    (folder / "never.py").write_text(NEVER)
    yield folder
    sys.modules.pop("never", None)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the table would have a column more")
def test_no_kernel_at_work_is_1_unless_none_is_asked_for(never):
    words = "never.py:never", "--arg", "randn(3)", "--only", "accuracy"
    result = command(*words)
    assert result.exit_code == 1 and "no kernel was seen at work: no kernel for torch.float32" in result.output
    assert command(*words, "--backend", "reference").exit_code == 0


def test_interrupted_is_130_and_leaves_what_there_is(never):
    words = "never.py:interrupted", "--reference", "torch:relu", "--arg", "randn(3)", "--only", "accuracy"
    result = command(*words, "--json", "found.json", "--junit", "found.xml")
    assert result.exit_code == 130 and "not passed: interrupted" in result.output
    assert json.loads((never / "found.json").read_text())["interrupted"] is True
    assert ElementTree.parse(never / "found.xml").getroot().get("tests") == "0"


def test_values_to_be_kept_and_memory(folder):
    words = "mine:good", "--reference", "mine:good", "--arg", "randn(3)", "--keep", "x", "--keep", "0"
    assert command(*words, "--only", "special_values").exit_code == 1  # there are no other values to try
    result = command(*words[:-4], "--only", "many_rows", "--memory", "0.001", "--verbose")
    assert "of check(memory=)" in " ".join(result.output.split())
