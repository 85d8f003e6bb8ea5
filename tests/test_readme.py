"""The README says what is so: its kernels run. tests/docs compares its figures, and runs its code and its commands."""

import re
import sys
import tomllib
from pathlib import Path

import torch

import cupyops
from cupyops._kernel import kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

import docs_site

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


def test_what_is_slower_is_what_it_names():
    slower = {name.split()[0] for x, name in read(docs_site.RESULTS).slowest_rows() if x < 1 / 1.05}
    assert slower == {"linear", "matmul", "conv2d"}  # "matrix products and a large convolution"


def test_it_is_short():
    assert len(TEXT.splitlines()) <= 150
