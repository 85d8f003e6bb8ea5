"""The README says what is so: its Python runs, its output is the real one, its table is the registry's."""

import contextlib
import io
import re
import tomllib
import types
from pathlib import Path

import pytest
import torch

import cupyops
from cupyops import kernel, source

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language):
    return [match.group(2) for match in BLOCK.finditer(TEXT) if match.group(1) == language]


@pytest.fixture
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


def test_the_python_runs_and_prints_what_the_readme_shows(on_the_cpu):
    """All blocks as one program, from top to bottom; a text block right after one is what it prints."""
    namespace, printed = {"__name__": "readme"}, None
    torch._dynamo.reset()
    for match in BLOCK.finditer(TEXT):
        language, body = match.groups()
        if language == "text":
            assert printed == body
        elif language == "python":
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(compile(body, f"README.md, line {TEXT.count(chr(10), 0, match.start()) + 1}", "exec"), namespace)
            printed = output.getvalue()
    assert namespace["squareplus"].name == "mylib::squareplus"


def test_the_kernels_of_the_readme_run():
    """In the simulator, for every dtype that they declare, and they compute what the example's reference says."""
    (body,) = [block for block in blocks("python") if "squareplus_fwd = cupyops.Kernel(" in block]
    namespace = {"__name__": "readme"}
    exec(body, namespace)
    squareplus = namespace["squareplus"]
    for dtype in kernel.FLOATING:
        x = torch.linspace(-3, 3, 300).to(dtype).requires_grad_()
        with cupyops.simulate(), cupyops.trace() as trace:
            y = squareplus(x, 4.0)
            y.sum().backward()
        assert trace.routes() == {"simulator"} and len(trace.launches()) == 2
        exact = x.detach().double().requires_grad_()
        truth = squareplus.reference(exact, 4.0)
        truth.sum().backward()
        torch.testing.assert_close(y.detach(), truth.detach().to(dtype))
        torch.testing.assert_close(x.grad, exact.grad.to(dtype))


def operator_rows():
    """(function, as in PyTorch, dtypes of its kernels) for each operator of the library."""
    for name, function in sorted(vars(cupyops.ops).items()):
        if name.startswith("_") or isinstance(function, types.ModuleType):
            continue
        alike = re.search(r"as `(torch\.[\w.]+)`", function.__doc__)
        found = {
            d for k in kernel.kernels(source.cuda_src()) if k.source.name == f"{name}.cu" for d in k.domain.get("T", ())
        }
        dtypes = [d for d in ("float16", "bfloat16", "float32", "float64") if getattr(torch, d) in found]
        shown = ", ".join("bf16" if d == "bfloat16" else f"fp{d[-2:]}" for d in dtypes)
        yield f"| `{name}` | {f'`{alike.group(1)}`' if alike else ''} | {shown} |".replace("|  |", "| |")


@pytest.mark.parametrize("row", list(operator_rows()))
def test_the_table_has_each_operator(row):
    assert any(line.startswith(row) for line in TEXT.splitlines()), f"the README lacks this row:\n{row} ... |"


def test_the_table_has_no_other_operator():
    table = TEXT.partition("| function | as in PyTorch |")[2].partition("\n\n")[0]
    listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert listed == [re.match(r"\| `(\w+)`", row).group(1) for row in operator_rows()]


def test_the_modules_named_are_those_there_are():
    import cupyops.nn

    (named,) = re.findall(r"^`cupyops\.nn` has these modules: (.*?)\.$", TEXT, re.MULTILINE | re.DOTALL)
    named = re.findall(r"`(\w+)`", named)
    there = {n for n, v in vars(cupyops.nn).items() if isinstance(v, type) and issubclass(v, torch.nn.Module)}
    assert sorted(named) == sorted(there)


def test_commands_and_files_that_it_names_are_there():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for target in re.findall(r"\bmake (\w[\w-]*)", "\n".join([*blocks("sh"), *re.findall(r"`[^`\n]+`", TEXT)])):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"make {target}"
    for extra in re.findall(r"cupyops\[(\w+)\]", TEXT):
        assert extra in project["optional-dependencies"]
    for path in re.findall(r"`((?:examples|tests|cuda_src)/[\w./]+)`", TEXT):
        assert (ROOT / path).exists(), path
    for link in re.findall(r"\]\(([A-Z]+(?:\.md)?)\)", TEXT):
        assert (ROOT / link).is_file(), link
