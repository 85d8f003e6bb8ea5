"""Every built-in kernel compiles for every dtype and architecture, from Turing to Blackwell. NVRTC needs no GPU.

For sm_80 all instances compile: the simulator runs their PTX. For sm_75 one instance for each kernel and dtype: for half
types alone, of which CUDA's headers have code of its own, where the sources have none; for sm_90 all of bfloat16, whose PTX
is another. Where nothing but the compiler's last stage differs, one for each kernel, its dtype changing from one
architecture to the next.
`python -m cupyops compile` compiles all for all.

One test for each kernel and architecture, so that pytest-xdist spreads them over processes. What is compiled is kept in
build/cubins, which `make demo` uses too: as long as a kernel's text is the same, the next run has it already.
"""

import re
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from architectures import own_code

import cupyops.nn
import cupyops.optim  # noqa: F401 - makes the kernels of the optimizers
from cupyops import kernel
from cupyops.cli import jobs
from cupyops.compilation import cache, source

HALF = {torch.float16, torch.bfloat16}
CUBINS = Path(__file__).resolve().parent.parent / "build" / "cubins"

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


def values_for(tested, arch):
    """The template values whose instances are compiled for `arch`."""
    by_dtype = defaultdict(list)
    for values in tested.combinations():
        by_dtype[tuple(value for value in values if isinstance(value, torch.dtype))].append(values)
    turn = jobs.ARCHS.index(arch)
    for number, (dtypes, alike) in enumerate(by_dtype.items()):
        if arch == "sm_80" or (arch == "sm_90" and torch.bfloat16 in dtypes):
            yield from alike
        elif number == turn % len(by_dtype) or (
            arch == "sm_75" and (HALF & {*dtypes} or own_code(tested.source, 75, 80))
        ):
            yield alike[(turn + number) % len(alike)]


def test_every_instance_compiles_for_some_architecture():
    for tested in KERNELS:
        chosen = {tested.expression(values) for arch in jobs.ARCHS for values in values_for(tested, arch)}
        assert chosen == set(tested.instances())


@pytest.mark.parametrize("arch", jobs.ARCHS)
@pytest.mark.parametrize("tested", KERNELS, ids=lambda k: f"{k.source.name}-{k.base}")
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
