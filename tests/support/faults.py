"""A fault of the GPU, such as a read of memory that is not there, ends the process in which it happened.

Nothing runs on a device in that process afterwards, so each of its later tests would fail, within no time; of several
processes it would take nearly all tests from the others.
"""

import contextlib
import gc
import os
import sys

import pytest


def faulted():
    """Whether nothing runs on the GPU any more."""
    import torch

    try:
        torch.cuda.synchronize()
        return torch.ones(1, device="cuda").item() != 1
    except RuntimeError:
        return True


class Watch:
    """After each test that fails it looks whether the GPU is still there."""

    def __init__(self, faulted=faulted):
        self.faulted, self.failed = faulted, False

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report):
        self.failed = self.failed or report.failed

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid):
        failed, self.failed = self.failed, False
        if not failed:
            return
        self.give_back()
        if "PYTEST_XDIST_WORKER" in os.environ:
            if self.faulted():
                os._exit(1)  # xdist starts another process in its place, which goes on behind this test
        elif self.faulted():
            pytest.exit(f"{nodeid} has left the GPU with a fault; nothing runs there in this process any more", 1)

    @staticmethod
    def give_back():
        """Memory that the traceback holds, tens of GiB where a large test found no room: the other processes want it."""
        sys.last_value = sys.last_traceback = None
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_available():
            gc.collect()
            with contextlib.suppress(RuntimeError):  # of a GPU with a fault
                torch.cuda.empty_cache()
