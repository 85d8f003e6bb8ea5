"""Faults put into our kernels are noticed: some of those that tools/mutation.py puts there, of each kind and family."""

import sys
from pathlib import Path

import pytest
import torch
from kept import TEXTS

from cupyops._kernel.compile import compiler

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import mutation
from ptx_alone import ptx_alone

F32, F16 = torch.float32, torch.float16

# the operator that is run, its dtype; the file, a piece of the line, and which of those that have it; what notices
BARRIERS = [
    ("cross_entropy", F32, "common/reduce/warp_block.cuh", "__syncthreads", 0, "Race"),
    ("cross_entropy", F32, "common/reduce/warp_block.cuh", "__syncthreads", 1, "Race"),
    ("softmax", F32, "softmax/strided.cuh", "__syncthreads", 0, "Race"),
    ("softmax", F32, "softmax/strided.cuh", "__syncthreads", 1, "Race"),
    ("softmax", F32, "softmax/strided.cuh", "__syncthreads", 2, "Race"),
    ("softmax", F32, "common/hw/cluster.cuh", "__syncthreads", 0, "Race"),
    ("nll_loss", F32, "loss/losses.cuh", "__syncthreads", 0, "Race"),
    ("norm", F32, "norm/backward.cuh", "__syncthreads", 1, "Race"),
    ("norm", F32, "norm/backward.cuh", "__syncthreads", 2, "Race"),
    ("scale_shift", F32, "common/reduce/column.cuh", "__syncthreads", 1, "Race"),
    ("cross_entropy", F32, "loss/cross_entropy.cuh", "__syncthreads", 1, "Race"),
    ("gemm", F32, "gemm/gemm.cuh", "__syncthreads", 0, "Race"),
    ("gemm", F16, "gemm/gemm.cuh", "__syncthreads", 2, "Race"),
    ("gemm", F32, "gemm/layout.cuh", "__syncwarp", 0, "Race"),
    ("gemm", F16, "gemm/gemm.cuh", "wait_async<Engine::STAGES - 2>", 0, "Race"),
    ("gemm", F16, "gemm/gemm.cuh", "wait_async<STAGES - 2>", 1, "Race"),
]
BOUNDS = [
    ("silu", F32, "common/elementwise/elementwise.cuh", "i < n", 0, "OutOfBounds"),
    ("relu", F32, "relu.cu", "first + k < n) to", 0, "OutOfBounds"),
    ("softmax", F16, "common/tile/row_tile.cuh", "ALIGNED ? i < left", 0, "OutOfBounds"),
    ("norm", F32, "norm/backward.cuh", "here < count", 0, "OutOfBounds"),
    ("nll_loss", F32, "nll_loss.cu", "i < positions", 0, "OutOfBounds"),
    ("max_pool2d", F32, "pool/bands.cuh", "threadIdx.x < tail", 0, "Uninitialized"),
    ("sgd", F16, "optim/multi_tensor.cuh", "v < end", 0, "OutOfBounds"),
]


@pytest.fixture(scope="module")
def examiner(tmp_path_factory):
    """Mutants are kept where no other test looks, and have no machine code; what is unmutated may be compiled already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUPYOPS_CUBIN_PATH", str(TEXTS))
        patch.setenv("CUPYOPS_CACHE_DIR", str(tmp_path_factory.mktemp("mutants")))
        patch.setattr(compiler, "compile", ptx_alone)
        patch.setattr(compiler, "_memory", {})
        yield mutation.Examiner()


@pytest.mark.slow
@pytest.mark.parametrize("index", [0, 1])
def test_a_missing_wait_for_the_cluster_is_noticed(examiner, index):
    """Those blocks share rows as sm_90 alone."""
    waits = [m for m in mutation.all_mutants("cluster") if m.kind == "wait"]
    verdict = mutation.Examiner("sm_90").examine(waits[index], only="softmax", dtypes=[F32])
    assert len(waits) == 2 and verdict.outcome == "check", verdict


@pytest.mark.slow(but=("silu", "nll_loss"))  # a bound and a barrier
@pytest.mark.parametrize("operator, dtype, file, piece, index, by", BARRIERS + BOUNDS)
def test_a_fault_is_noticed(examiner, operator, dtype, file, piece, index, by):
    fitting = [m for m in mutation.all_mutants(Path(file).stem) if m.file == file and piece in m.source]
    verdict = examiner.examine(fitting[index], only=operator, dtypes=[dtype])
    assert verdict.outcome == ("check" if by else "number"), verdict
    assert verdict.by == by, verdict


def test_what_the_compiler_makes_no_difference_of_is_equivalent(examiner):
    """A loop over an array in registers: beyond its end nothing is defined, and the compiler leaves that out."""
    (mutant,) = [m for m in mutation.all_mutants("elementwise") if "k < W" in m.source]
    assert examiner.examine(mutant, only="relu").outcome == "equivalent"


def test_an_unmutated_kernel_is_not_noticed(examiner):
    """A change of no effect: the tool does not call everything caught."""
    (mutant,) = [m for m in mutation.all_mutants("nll_loss") if "if (t < 0)" in m.source]
    same = mutation.replace(mutant, text="< (0) +")
    assert examiner.examine(same, only="nll_loss", dtypes=[F32]).outcome in ("equivalent", "survived")


def test_mutants_of_a_text():
    text = (
        "template <typename T, bool B = (1 < 2)>\n"
        "// a < b\n"
        "for (int i = 0; i < n; ++i) x << 1;\n"
        "#if A < B\n"
        '__syncthreads(); asm volatile("cp.async.wait_all;" ::: "memory");\n'
    )
    found = list(mutation.mutants("x.cu", text))
    assert [(m.line, m.kind) for m in found] == [(1, "bound"), (3, "bound"), (5, "syncthreads"), (5, "wait")]
    assert found[1].apply(text).splitlines()[2] == "for (int i = 0; i <= n; ++i) x << 1;"
    assert found[2].apply(text).splitlines()[4] == ' asm volatile("cp.async.wait_all;" ::: "memory");'
    assert found[3].apply(text).splitlines()[4] == "__syncthreads(); "
