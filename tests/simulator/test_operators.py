"""Every instance of every kernel of cuda_src, executed with all checks on, and compared with PyTorch in float64.

The calls are in cases.py: each operator's own samples, forward and backward, and what they leave out.
"""

import functools
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
import torch
from contract import DTYPES, Make, first, misaligned
from simulator import cases
from simulator.cases import CPU, FILES, KERNELS
from torch import nn

import cupyops

# PyTorch says so once in a process, of a sample of conv2d
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")

EXAMPLES = cases.TESTS.parent / "examples"
CONTRACTS = [contract for found in cases.contracts().values() for contract in found]


@pytest.fixture(autouse=True)
def kept_binaries(monkeypatch):
    """Kernels come from the folder that the tests of compilation fill, and go there."""
    monkeypatch.setenv("CUPYOPS_CUBIN_PATH", str(cases.CUBINS))


@contextmanager
def simulated(**options):
    """`simulate`, where kernels run, and no operator's reference."""
    with cupyops.simulate(**options), cupyops.trace() as trace:
        yield trace
    assert "reference" not in trace.routes(), str(trace)
    assert {record.route for record in trace.launches()} == {"simulator"}, str(trace)


def compiled(contract, dtype=torch.float32):
    """An instance of the contract, whose kernels have been compiled."""
    (file,) = {k.source.name for k in KERNELS if k.base in contract.kernels}
    for job in cases.instances(file, dtype):
        cases.ptx(job, "sm_80")
    return contract()


# --- every instance ---


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
@pytest.mark.parametrize("file", FILES)
def test_every_instance(file, dtype):
    """On sm_80; and on sm_90, if the text of some instance is another there."""
    jobs = cases.instances(file, dtype)
    differ = [job.name for job in jobs if cases.ptx(job, "sm_80") != cases.ptx(job, "sm_90")]
    for arch in ("sm_80", "sm_90") if differ else ("sm_80",):
        with simulated(arch=arch) as trace:
            for call in cases.calls(file):
                call(dtype)
        assert {record.kernel for record in trace.launches()} == {job.name for job in jobs}, arch


def test_no_instance_is_left_out():
    """The tests above are of every kernel and every value of its template, each once."""
    tested = [(job.source.name, job.name) for file in FILES for dtype in DTYPES for job in cases.instances(file, dtype)]
    declared = {(k.source.name, name) for k in KERNELS for name in k.instances()}
    assert len(tested) == len(declared) and set(tested) == declared


def test_some_text_differs_between_architectures():
    """Else nothing above runs as sm_90."""
    assert any(cases.ptx(j, "sm_80") != cases.ptx(j, "sm_90") for j in cases.instances("relu.cu", torch.bfloat16))


# --- layouts, order ---


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.__name__)
def test_layouts(contract):
    """Inputs transposed, strided, channels_last, off by one element. In a half type, whose results are rounded once."""
    test = compiled(contract, torch.float16)
    with simulated():
        for sample in test.layouts(Make(CPU, torch.float16)):
            test.compare(sample, f"layout {sample!r}", strides=True)


@pytest.mark.parametrize("kind", ["expanded", "strided", "misaligned"])
@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.__name__)
def test_grad_layouts(contract, kind):
    test = compiled(contract)
    with simulated():
        test.test_grad_layouts(CPU, kind)


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.__name__)
def test_partial_gradients(contract):
    test = compiled(contract)
    with simulated():
        test.test_partial_gradients(CPU)


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda c: c.__name__)
def test_the_order_changes_nothing(contract):
    """The same bits whatever the order of blocks, and of diverged threads."""
    test = compiled(contract)
    for sample in test.samples(Make(CPU, torch.float32)):
        sizes = [t.numel() for t in (*sample.args, *sample.kwargs.values()) if isinstance(t, torch.Tensor)]
        if not 0 < min(sizes) <= max(sizes) < 5000:
            continue
        results = []
        for seed in (None, 1, 2):
            torch.manual_seed(0)
            call = sample.leaves()
            with simulated(seed=seed, check=seed == 1):
                y = first(call.call(test.function))
                grads = torch.autograd.grad(y, call.tensors(), torch.randn_like(y)) if call.tensors() else ()
            results.append((y, *grads))
        for result in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], result)), repr(sample)
