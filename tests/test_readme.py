"""The README says what is so: its kernels run, its table is the registry's. tests/docs runs its Python and its commands."""

import re
import sys
import tomllib
from pathlib import Path

import pytest
import torch

import cupyops
from cupyops._kernel import kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import docs_site

from cupyops.bench.results import mean
from cupyops.bench.table import read

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language):
    return [match.group(2) for match in BLOCK.finditer(TEXT) if match.group(1) == language]


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
    """(function, as in PyTorch, dtypes of its kernels) for each operator of the library, as the site has them."""
    for row in docs_site.rows():
        yield f"| {row.function} | {row.twin} | {row.dtypes} |".replace("|  |", "| |")


@pytest.mark.parametrize("row", list(operator_rows()))
def test_the_table_has_each_operator(row):
    assert any(line.startswith(row) for line in TEXT.splitlines()), f"the README lacks this row:\n{row} ... |"


def test_the_table_has_no_other_operator():
    table = TEXT.partition("| function | as in PyTorch |")[2].partition("\n\n")[0]
    listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert listed == [re.match(r"\| `(\w+)`", row).group(1) for row in operator_rows()]


def test_the_modules_named_are_those_there_are():
    (named,) = re.findall(r"^`cupyops\.nn` has these modules: (.*?)\.$", TEXT, re.MULTILINE | re.DOTALL)
    named = re.findall(r"`(\w+)`", named)
    assert sorted(named) == sorted(docs_site.modules())


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


def test_the_figures_are_those_of_the_benchmark():
    results = read(docs_site.RESULTS)
    rows = {row.name: row for row in results.rows}
    _, _, text = TEXT.partition("## How fast")
    table = [line.strip("| ").split("|") for line in text.partition("\n## ")[0].splitlines() if line.startswith("| ")]
    for name, *told in table[1:]:
        figures = [rows[name.strip()].figures.get(who, {}) for who in ("ours", "eager", "compile", "liger")]
        sums = [f"{sum(f.us for f in ways.values()):,.0f}" if ways else "" for ways in figures]
        assert [cell.strip() for cell in told] + [""] * (4 - len(told)) == sums, name
    assert len(table) > 10
    both = [x for x, name in results.slowest_rows() if not name.startswith("lion")]
    assert f"{len(both)} cases" in text and f"{mean(both):.2f} times as fast" in text
    for way, us in results.host.items():
        assert all(f"{us[who]:.1f}" in text for who in us), way
