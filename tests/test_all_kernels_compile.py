"""Every built-in kernel compiles for every dtype and architecture, from Turing to Blackwell. NVRTC needs no GPU.

For sm_80 all instances compile: the simulator runs their PTX. Each kernel also compiles for sm_75 and for sm_90, an instance
of bfloat16, of which CUDA's headers have code of their own there, and one of another dtype; tests/simulator makes the PTX of
all others that have code of their own for sm_90. Of the rest, where nothing but the compiler's last stage differs, each
kernel compiles for one. `python -m cupyops compile` compiles all for all.

One test for each kernel and architecture, so that pytest-xdist spreads them over processes. What is compiled is kept in
build/cubins, which `make demo` uses too: as long as a kernel's text is the same, the next run has it already.
"""

import re

import pytest
import torch
from kept import CUBINS

import cupyops.nn
import cupyops.optim  # noqa: F401 - makes the kernels of the optimizers
from cupyops import kernel
from cupyops.cli import jobs
from cupyops.compilation import cache, source

BUILT_IN = {path.name: source.load(path) for path in sorted(source.cuda_src().glob("*.cu"))}

# other tests make kernels too, of files and texts of their own
KERNELS = kernel.kernels(source.cuda_src())
KERNELS.sort(key=lambda k: (k.source.name, k.base, k.options))


def global_functions(text):
    # without __launch_bounds__(f(g(x), y)) and its kind
    plain = re.sub(r"\b__\w+__\s*\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)", " ", source.strip_comments(text))
    return set(re.findall(r"__global__[^;{}()]*\b(\w+)\s*\(", plain))


def test_every_cuda_function_has_a_kernel():
    """No `__global__` of cuda_src escapes the tests below, and no file has none."""
    declared = {name: global_functions(text.text) for name, text in BUILT_IN.items()}
    known = {name: {k.base for k in KERNELS if k.source.name == name} for name in BUILT_IN}
    assert all(declared.values())
    assert known == declared


OTHERS = [arch for arch in jobs.ARCHS if arch not in ("sm_75", "sm_80", "sm_90")]


def values_for(tested, arch):
    """The template values whose instances are compiled for `arch`: all, or a few that change from kernel to kernel."""
    every = tested.combinations()
    turn = KERNELS.index(tested)
    if arch == "sm_80":
        return every
    if arch in OTHERS:
        return [every[turn % len(every)]] if turn % len(OTHERS) == OTHERS.index(arch) else []
    bfloat16 = [values for values in every if torch.bfloat16 in values]
    others = [values for values in every if torch.bfloat16 not in values]
    return [alike[turn % len(alike)] for alike in (bfloat16, others) if alike]


CASES = [(tested, arch) for arch in jobs.ARCHS for tested in KERNELS if values_for(tested, arch)]


def test_every_instance_compiles_for_some_architecture():
    for tested in KERNELS:
        chosen = {tested.expression(values) for of, arch in CASES if of is tested for values in values_for(of, arch)}
        assert chosen == set(tested.instances())
    assert {arch for _, arch in CASES} == set(jobs.ARCHS)


@pytest.mark.parametrize("tested, arch", CASES, ids=[f"{k.source.name}-{k.base}-{arch}" for k, arch in CASES])
def test_compiles(tested, arch):
    CUBINS.mkdir(parents=True, exist_ok=True)
    for values in values_for(tested, arch):
        job = jobs.Job(tested.source, tested.expression(values), arch, tested.options)
        outcome = jobs.compile_one(job, CUBINS)
        assert not outcome.error, outcome.error
        binary = cache.read_entry(CUBINS, job.stem)
        assert len(binary.parameters) == len(tested.declared), f"{job.name}: the text and the PTX disagree"


def test_common_holds_no_kernel():
    """Headers are for device functions; a kernel lives in the .cu file of its operator."""
    for header in (source.cuda_src() / "common").glob("*.cuh"):
        assert "__global__" not in source.strip_comments(header.read_text(encoding="utf-8")), header.name
