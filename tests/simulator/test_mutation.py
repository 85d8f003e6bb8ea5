"""Faults put into our kernels are noticed: some of those that tools/mutation.py puts there, of each kind and family."""

import sys
from pathlib import Path

import pytest

from cupyops import compiler

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import mutation  # noqa: E402

# file, a piece of the line, kind, which of those that fit, how it is to be caught
CASES = [
    ("common/reduce.cuh", "__syncthreads", "syncthreads", 0, "Race"),
    ("common/reduce.cuh", "__syncthreads", "syncthreads", 1, "Race"),
    ("common/softmax.cuh", "__syncthreads", "syncthreads", 0, "Race"),
    ("common/softmax.cuh", "__syncthreads", "syncthreads", 1, "Race"),
    ("common/softmax.cuh", "__syncthreads", "syncthreads", 2, "Race"),
    ("common/losses.cuh", "__syncthreads", "syncthreads", 0, "Race"),
    ("layer_norm.cu", "__syncthreads", "syncthreads", 1, "Race"),
    ("layer_norm.cu", "__syncthreads", "syncthreads", 2, "Race"),
    ("scale_shift.cu", "__syncthreads", "syncthreads", 1, "Race"),
    ("cross_entropy.cu", "__syncthreads", "syncthreads", 1, "Race"),
    ("common/gemm.cuh", "__syncthreads", "syncthreads", 0, "Race"),
    ("common/gemm.cuh", "__syncthreads", "syncthreads", 4, "Race"),
    ("common/gemm_layout.cuh", "__syncwarp", "syncwarp", 0, "Race"),
    ("common/gemm.cuh", "wait_async<Engine::STAGES - 2>", "wait", 0, "Race"),
    ("common/elementwise.cuh", "i < n", "bound", 0, "OutOfBounds"),
    ("common/rows.cuh", "i < tile.left", "bound", 0, "OutOfBounds"),
    ("layer_norm.cu", "p < count", "bound", 1, ""),
    ("max_pool2d.cu", "if (h < 0 ||", "bound", 0, ""),
]


@pytest.fixture(scope="module")
def examiner(tmp_path_factory):
    """Mutants are kept where no other test looks, and have no machine code."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUPYOPS_CACHE_DIR", str(tmp_path_factory.mktemp("mutants")))
        patch.setattr(compiler, "compile", mutation.ptx_alone)
        patch.setattr(compiler, "_memory", {})
        yield mutation.Examiner()


@pytest.mark.parametrize("file, piece, kind, index, by", CASES)
def test_a_fault_is_noticed(examiner, file, piece, kind, index, by):
    every = mutation.all_mutants(Path(file).stem)
    mutant = [m for m in every if m.file == file and m.kind == kind and piece in m.source][index]
    verdict = examiner.examine(mutant)
    assert verdict.outcome in ("check", "number"), verdict
    assert verdict.by == by, verdict
