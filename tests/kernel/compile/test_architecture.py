"""Specific targets: which device runs what, and a kernel that asks for one."""

import pytest
import torch

import cupyops
from cupyops._kernel.compile import architecture, compiler
from cupyops.cli import jobs

# without the architecture's own features the branch is another, so that what has been compiled shows
CODE = """
__global__ void own(int* x) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  x[threadIdx.x] = 90;
#endif
}
"""


@pytest.mark.parametrize(("own", "device", "expected"), [
    (None, "sm_80", "sm_80"), (None, "sm_90a", "sm_90a"), ("sm_90a", "sm_90", "sm_90a"),
    ("sm_90a", "sm_90a", "sm_90a"), ("sm_90a", "sm_80", None), ("sm_90a", "sm_100", None),
    ("sm_100a", "sm_103", None), ("sm_100f", "sm_100", "sm_100f"), ("sm_100f", "sm_103", "sm_100f"),
    ("sm_103f", "sm_100", None), ("sm_100f", "sm_120", None),
])  # fmt: skip
def test_what_is_compiled_for_a_device(own, device, expected):
    assert architecture.target(own, device) == expected


@pytest.mark.parametrize("arch", ["sm_90", "sm_80a", "sm_90f", "90a", "sm_90a ", "", 90, ("sm_90a",)])
def test_what_is_no_specific_target(arch):
    with pytest.raises(cupyops.InputError, match="expected a specific target such as"):
        cupyops.Kernel(CODE, "own", arch=arch)


@pytest.mark.parametrize("arch", ["sm_90", "sm_90a"])
def test_it_runs_on_its_own_architecture(arch):
    own, x = cupyops.Kernel(CODE, "own", arch="sm_90a"), torch.zeros(2, dtype=torch.int32)
    with cupyops.simulate(arch):
        own[1, 2](x)
        assert own.globals() == {}
    assert x.tolist() == [90, 90]
    assert own.instance().binary(arch).arch == "sm_90a"


def test_without_one_a_kernel_is_compiled_for_the_device():
    own, x = cupyops.Kernel(CODE, "own"), torch.zeros(2, dtype=torch.int32)
    with cupyops.simulate("sm_90"):
        own[1, 2](x)
    assert x.tolist() == [0, 0]


@pytest.mark.parametrize("arch", ["sm_80", "sm_100"])
def test_another_device_is_refused(arch):
    own, x = cupyops.Kernel(CODE, "own", arch="sm_90a"), torch.zeros(2, dtype=torch.int32)
    with cupyops.simulate(arch):
        with pytest.raises(cupyops.LaunchError, match=f"^own: the kernel is for sm_90a alone, .* not run on {arch};"):
            own[1, 2](x)
        with pytest.raises(cupyops.LaunchError, match="for sm_90a alone"):
            cupyops.warmup(own)


def test_compiled_ahead_it_is_found(tmp_path, monkeypatch):
    own, plain = cupyops.Kernel(CODE, "own", arch="sm_90a"), cupyops.Kernel(CODE, "own")
    assert [job.arch for job in jobs.plan([own], ["sm_80", "sm_90", "sm_90a"])] == ["sm_90a"]
    assert [job.arch for job in jobs.plan([own, plain], ["sm_90", "sm_80"])] == ["sm_90a", "sm_90", "sm_80"]
    assert jobs.plan([own], ["sm_80", "sm_100"]) == []
    (job,) = jobs.plan([own], ["sm_90a"])
    assert not jobs.compile_one(job, tmp_path).error
    monkeypatch.setenv("CUPYOPS_CUBIN_PATH", str(tmp_path))
    monkeypatch.setattr(compiler, "_memory", {})
    assert own.instance().binary("sm_90").origin == "precompiled"


@pytest.mark.gpu
def test_on_the_gpu():
    own, x = cupyops.Kernel(CODE, "own", arch="sm_90a"), torch.zeros(2, dtype=torch.int32, device="cuda")
    if torch.cuda.get_device_capability() == (9, 0):
        own[1, 2](x)
        assert x.tolist() == [90, 90]
    else:
        with pytest.raises(cupyops.LaunchError, match="for sm_90a alone"):
            own[1, 2](x)
