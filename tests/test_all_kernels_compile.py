"""Every instance of every built-in kernel compiles for every architecture, from Turing to Blackwell. NVRTC needs no GPU.

One test for each kernel and architecture, so that pytest-xdist spreads them over processes. No cache is read or written.
"""

import re

import pytest

import cupyops.nn
import cupyops.optim  # noqa: F401 - makes the kernels of the optimizers
from cupyops import compiler, kernel, source
from cupyops.cli.jobs import ARCHS

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


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("tested", KERNELS, ids=lambda k: f"{k.source.name}-{k.base}")
def test_compiles(tested, arch):
    if arch not in compiler.supported_archs():
        pytest.fail(f"this NVRTC does not know {arch}")
    for name in tested.instances():
        binary, cubin = compiler.compile(tested.source, name, arch, tested.options)
        assert cubin[:4] == b"\x7fELF", name
        assert len(binary.parameters) == len(tested.declared), f"{name}: the text and the PTX disagree"


def test_common_holds_no_kernel():
    """Headers are for device functions; a kernel lives in the .cu file of its operator."""
    for header in (source.cuda_src() / "common").glob("*.cuh"):
        assert "__global__" not in source.strip_comments(header.read_text(encoding="utf-8")), header.name
