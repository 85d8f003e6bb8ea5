"""The README says what is so: its kernels run, its figures are those measured. tests/docs runs its code and its commands."""

import re
import sys
import tomllib
from pathlib import Path

import torch

import cupyops
from cupyops._kernel import kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import docs_site
import pictures

from cupyops.bench import model_table
from cupyops.bench.results import mean
from cupyops.bench.table import read

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
FLAT = " ".join(TEXT.split())
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
    both = [x for x, name in results.slowest_rows() if not name.startswith("lion")]
    said = re.search(r"Over (\d+) cases, .*? is ([\d.]+) times .*? (\d+) cases are more than 5% slower", FLAT)
    assert said.groups() == (str(len(both)), f"{mean(both):.2f}", str(sum(x < 1 / 1.05 for x in both)))
    slower = {name.split()[0] for x, name in results.slowest_rows() if x < 1 / 1.05}
    assert slower == {"linear", "matmul", "conv2d"}  # "matrix products and a large convolution"
    small, small_torch, grad, grad_torch = re.search(
        r"takes the host ([\d.]+) us where `torch.relu` takes ([\d.]+), or ([\d.]+) instead of ([\d.]+) with", FLAT
    ).groups()
    host = [results.host[call][who] for call in ("no gradient", "gradient") for who in ("ours", "torch")]
    assert [small, small_torch, grad, grad_torch] == [f"{us:.1f}" for us in host]


def test_the_figures_of_whole_models_are_those_measured():
    measured = {label.split()[0].rstrip(","): bars for label, bars in pictures.models()}
    names = ["Llama", "Qwen3-MoE", "GPT-2", "BERT", "ViT-B/16", "ResNet-50"]
    said = re.search(
        r"step of Llama runs ([\d.]+) times .*? with ([\d.]+) GiB where that takes ([\d.]+): .*? Qwen3-MoE gains ([\d.]+), "
        r"GPT-2 ([\d.]+), BERT ([\d.]+), ViT ([\d.]+) and ResNet-50 ([\d.]+); as a .*? ResNet-50 gains ([\d.]+\d)",
        FLAT,
    ).groups()
    assert set(measured) == set(names)
    assert [said[0], *said[3:8]] == [f"{measured[name][0].value:.2f}" for name in names]
    assert said[8] == f"{measured['ResNet-50'][1].value:.2f}"
    figures, _ = model_table.read(pictures.RESULTS / "h100_models.csv")
    peaks = {one.variant: one.peak_gib for one in figures if one.model == "llama"}
    assert said[1:3] == (f"{peaks['swap']:.1f}", f"{peaks['eager']:.1f}")


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 150
