"""Every instance of every built-in kernel compiles for every architecture, from Turing to Blackwell. NVRTC needs no GPU.

One test for each kernel and architecture, so that pytest-xdist spreads them over processes. What is compiled is kept in
build/cubins, which `make demo` uses too: as long as a kernel's text is the same, the next run has it already.
"""

import re
from pathlib import Path

import pytest

import cupyops.nn
import cupyops.optim  # noqa: F401 - makes the kernels of the optimizers
from cupyops import compiler, kernel, source
from cupyops.cli import jobs

CUBINS = Path(__file__).resolve().parent.parent / "build" / "cubins"

BUILT_IN = {path.name: source.load(path) for path in sorted(source.cuda_src().glob("*.cu"))}

# other tests make kernels too, of files and texts of their own
KERNELS = [k for k in kernel.kernels() if getattr(k.source.path, "parent", None) == source.cuda_src()]
KERNELS.sort(key=lambda k: (k.source.name, k.base, k.options))


def global_functions(text):
    plain = re.sub(r"\b__\w+__\s*\([^()]*\)", " ", source.strip_comments(text))  # __launch_bounds__(256) and its kind
    return set(re.findall(r"__global__[^;{}()]*\b(\w+)\s*\(", plain))


def test_every_cuda_function_has_a_kernel():
    """No `__global__` of cuda_src escapes the tests below, and no file has none."""
    declared = {name: global_functions(text.text) for name, text in BUILT_IN.items()}
    known = {name: {k.base for k in KERNELS if k.source.name == name} for name in BUILT_IN}
    assert all(declared.values())
    assert known == declared


@pytest.mark.parametrize("arch", jobs.ARCHS)
@pytest.mark.parametrize("tested", KERNELS, ids=lambda k: f"{k.source.name}-{k.base}")
def test_compiles(tested, arch):
    CUBINS.mkdir(parents=True, exist_ok=True)
    planned = jobs.plan([tested], [arch])
    assert planned
    for job in planned:
        outcome = jobs.compile_one(job, CUBINS)
        assert not outcome.error, outcome.error
        binary = compiler.read_entry(CUBINS, job.stem)
        assert len(binary.parameters) == len(tested.declared), f"{job.name}: the text and the PTX disagree"


def test_common_holds_no_kernel():
    """Headers are for device functions; a kernel lives in the .cu file of its operator."""
    for header in (source.cuda_src() / "common").glob("*.cuh"):
        assert "__global__" not in source.strip_comments(header.read_text(encoding="utf-8")), header.name
