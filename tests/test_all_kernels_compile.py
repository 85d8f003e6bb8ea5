"""Every built-in kernel compiles for every dtype, and for architectures from Turing to Blackwell. NVRTC needs no GPU.

All instances compile to PTX, which tests/simulator executes. Machine code, the compiler's last stage, is made for each
kernel for sm_75 (of bfloat16, for which that has no instructions), for sm_90, and for one of the architectures between and
behind. `python -m cupyops compile` compiles all for all.

One test for each kernel and architecture, so that pytest-xdist spreads them over processes. What is compiled is kept in
build/: as long as a kernel's text is the same, the next run has it already.
"""

import re

import kept
import pytest
import torch
from simulator.cases import operator_of

import cupyops.nn
import cupyops.optim  # noqa: F401 - makes the kernels of the optimizers
from cupyops._kernel import kernel
from cupyops._kernel.compile import compiler, source
from cupyops.cli import jobs

BUILT_IN = {path.name: source.load(path) for path in sorted(source.cuda_src().glob("*.cu"))}

# other tests make kernels too, of files and texts of their own
KERNELS = kernel.kernels(source.cuda_src())
KERNELS.sort(key=lambda k: (k.source.name, k.base, k.options))
OF_OPERATOR = pytest.mark.of_operator(lambda parameters: operator_of(parameters["tested"].source.name))


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


OTHERS = [arch for arch in jobs.ARCHS if arch not in ("sm_75", "sm_90")]


def chosen(tested, arch):
    """The template values of the instance compiled for `arch`, another from kernel to kernel; None: it has others."""
    every, turn = tested.combinations(), KERNELS.index(tested)
    if tested.arch:  # it is for that alone
        return every[turn % len(every)] if tested.arch.startswith(arch) else None
    if arch in OTHERS and turn % len(OTHERS) != OTHERS.index(arch):
        return None
    if arch == "sm_75":
        every = [values for values in every if torch.bfloat16 in values] or every
    return every[turn % len(every)]


CASES = [(tested, arch) for arch in jobs.ARCHS for tested in KERNELS if chosen(tested, arch) is not None]


def test_every_architecture_has_its_turn():
    assert {arch for _, arch in CASES} == set(jobs.ARCHS)
    assert all(len([arch for of, arch in CASES if of is tested]) == (1 if tested.arch else 3) for tested in KERNELS)


@pytest.mark.slow
@OF_OPERATOR
@pytest.mark.parametrize("tested", KERNELS, ids=[f"{k.source.name}-{k.base}" for k in KERNELS])
def test_text(tested, monkeypatch):
    """Of every instance: its parameters are those of the .cu file, and its shared memory is what any GPU has."""
    kept.texts_alone(monkeypatch)
    for values in tested.combinations():
        dtype = next((value for value in values if isinstance(value, torch.dtype)), torch.float16)
        name, arch = tested.expression(values), tested.arch or kept.arch(dtype)
        binary = compiler.build(tested.source, name, arch, tested.options)
        assert len(binary.parameters) == len(tested.declared), f"{name}: the text and the PTX disagree"
        shared = re.findall(r"\.shared \.align \d+ \.b8 [\w$]+\[(\d+)\];", binary.ptx)
        assert sum(map(int, shared)) <= 48 << 10, name


@pytest.mark.slow
@OF_OPERATOR
@pytest.mark.parametrize("tested, arch", CASES, ids=[f"{k.source.name}-{k.base}-{arch}" for k, arch in CASES])
def test_compiles(tested, arch):
    kept.CUBINS.mkdir(parents=True, exist_ok=True)
    job = jobs.Job(tested.source, tested.expression(chosen(tested, arch)), tested.arch or arch, tested.options)
    outcome = jobs.compile_one(job, kept.CUBINS)
    assert not outcome.error, outcome.error


def test_common_holds_no_kernel():
    """Headers are for device functions; a kernel lives in the .cu file of its operator."""
    for header in (source.cuda_src() / "common").glob("*.cuh"):
        assert "__global__" not in source.strip_comments(header.read_text(encoding="utf-8")), header.name
