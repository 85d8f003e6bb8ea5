"""Faults that CUDA tells late: in the words of the launch, and at the launch itself where `CUPYOPS_DEBUG=1` asks for it."""

import os
import subprocess
import sys

import pytest
import torch

from cupyops._kernel.launch import faults
from cupyops.errors import InputError, LaunchError

LATE = "CUDA_ERROR_ILLEGAL_ADDRESS: an illegal memory access was encountered"


def test_a_refusal_is_told_in_the_words_of_the_launch():
    with (
        pytest.raises(LaunchError, match="^f with grid 1: CUDA_ERROR_INVALID_VALUE$") as caught,
        faults.told("f with grid 1"),
    ):
        raise RuntimeError("CUDA_ERROR_INVALID_VALUE")
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize(
    "words",
    [
        LATE,
        "CUDA_ERROR_MISALIGNED_ADDRESS: misaligned address",
        "CUDA_ERROR_ASSERT: device-side assert triggered",
        "CUDA_ERROR_LAUNCH_FAILED: unspecified launch failure",
        "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be reported later",
    ],
)
def test_what_came_to_light_late_hints_at_the_variable(words):
    late = r"(?s)a kernel has faulted, most likely an earlier one.*CUPYOPS_DEBUG=1"
    with pytest.raises(LaunchError, match=late), faults.told("f"):
        raise RuntimeError(words)


def test_our_own_errors_stay_what_they_are():
    with pytest.raises(InputError, match="^mine$"), faults.told("f"):
        raise InputError("mine")


@pytest.fixture
def synchronized(monkeypatch):
    """Stands in for CUDA: which devices were waited for; and, once said, a fault."""
    waits = []

    def synchronize(device):
        waits.append(device)
        if waits.count(device) == synchronize.fails_at:
            raise RuntimeError(f"CUDA error: an illegal memory access was encountered\n{'more ' * 50}")

    synchronize.fails_at = None
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    synchronize.waits = waits
    return synchronize


def test_without_the_variable_nothing_is_waited_for(monkeypatch, synchronized):
    monkeypatch.setattr(faults, "debug", False)
    with faults.awaited("f", 3):
        pass
    assert synchronized.waits == []


def test_with_the_variable_the_fault_is_that_of_the_launch(monkeypatch, synchronized):
    monkeypatch.setattr(faults, "debug", True)
    with faults.awaited("f", 3):
        assert synchronized.waits == [3]  # what came before is another's
    assert synchronized.waits == [3, 3]
    synchronized.fails_at = 4
    with pytest.raises(LaunchError, match="^f: the kernel ran and faulted: CUDA error"), faults.awaited("f", 3):
        pass
    synchronized.fails_at = 5
    with pytest.raises(LaunchError, match="^before f: CUDA error"), faults.awaited("f", 3):
        raise AssertionError("not launched")


def test_while_a_graph_is_captured_nothing_can_be_waited_for(monkeypatch, synchronized):
    monkeypatch.setattr(faults, "debug", True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with faults.awaited("f", 3):
        pass
    assert synchronized.waits == []


@pytest.mark.parametrize(("value", "debug"), [("1", True), ("0", False), ("", False)])
def test_the_variable(monkeypatch, value, debug):
    monkeypatch.setenv("CUPYOPS_DEBUG", value)
    assert faults.asked_for() is debug


FAULTY = """
import torch, cupyops

code = "__global__ void wild(float* x, long long far) { x[far] = 1; }"
wild = cupyops.Kernel(code, "wild")

@cupyops.operator("tests_faults::wild")
def op(x: torch.Tensor) -> torch.Tensor:
    return x + 1

@op.forward
def _(x):
    wild[2, 32](x, 2**45)
    return x.clone(), ()

try:
    op(torch.zeros(8, device="cuda"))
    torch.cuda.synchronize()
except cupyops.CupyopsError as error:
    print("AT ONCE", error, *error.__notes__)
except RuntimeError as error:
    print("LATE", error)
"""


@pytest.mark.gpu
class TestGPU:
    """Each in a process of its own: a fault is the end of CUDA there."""

    def run(self, code, debug):
        environment = os.environ | {"CUPYOPS_DEBUG": debug}
        return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True).stdout

    def test_at_once(self):
        found = self.run(FAULTY, "1")
        assert "AT ONCE wild with grid (2, 1, 1), block (32, 1, 1), 0 bytes" in found
        assert "the kernel ran and faulted" in found and "in the forward of operator tests_faults::wild" in found

    def test_late(self):
        assert "LATE" in self.run(FAULTY, "0")

    def test_a_launch_after_a_fault_hints_at_the_variable(self):
        code = FAULTY.partition("@cupyops.operator")[0] + (
            "x = torch.zeros(8, device='cuda')\n"
            "wild[2, 32](x, 0)\n"
            "torch.cuda.synchronize()\n"
            "try:\n"
            "    for far in (2**45, *[0] * 100000):\n"
            "        wild[2, 32](x, far)\n"
            "except cupyops.LaunchError as error:\n"
            "    print(error)\n"
        )
        found = self.run(code, "0")
        assert "wild with grid (2, 1, 1)" in found and "Run with CUPYOPS_DEBUG=1" in found
