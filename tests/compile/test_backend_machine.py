"""Machines as they are: no C compiler, a broken cache entry, a full disk, a folder that cannot be written, two processes."""

import errno
import os
import sys
import textwrap

import pytest
import torch
from processes import run_python, together
from torch import nn

import cupyops
from cupyops._compile.backend import backend
from cupyops._kernel.compile import cache as disk

TRAINING = """
    import shutil, torch, torch.nn.functional as F, cupyops
    assert not any(shutil.which(name) for name in ("cc", "gcc", "g++", "clang", "c++", "nvcc"))

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.convolution, self.norm = torch.nn.Conv2d(1, 4, 3, padding=1), torch.nn.BatchNorm2d(4)
            self.head = torch.nn.Linear(64, 10)

        def forward(self, x):
            return self.head(F.max_pool2d(F.relu(self.norm(self.convolution(x))), 2).flatten(1))

    def trained(compiled):
        torch.manual_seed(0)
        net, x, target = Net(), torch.randn(8, 1, 8, 8), torch.arange(8)
        loss_of = lambda x: F.cross_entropy(net(x), target)
        step = torch.compile(loss_of, backend="cupyops", fullgraph=True) if compiled else loss_of
        optimizer, losses = torch.optim.SGD(net.parameters(), 0.1), []
        for _ in range(2):
            loss = step(x)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return torch.tensor(losses)

    with cupyops.simulate(), cupyops.trace() as trace:
        ours = trained(True)
    torch.testing.assert_close(ours, trained(False))
    print("launches:", len(trace.launches()), trace.routes())
"""


def test_training_without_a_c_compiler(tmp_path):
    """PATH holds nothing, CC is a name of nothing, and the home cannot be written: kernels are kept in memory."""
    environ = {
        "PATH": "",
        "CC": "/nowhere/cc",
        "HOME": "/proc/nowhere",
        "CUPYOPS_CACHE_DIR": "/proc/nowhere/cache",
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "CUPYOPS_STRICT": "1",
        "OMP_NUM_THREADS": "1",
    }
    done = run_python("-c", textwrap.dedent(TRAINING), cwd=tmp_path, env=environ, bare=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "launches: " in done.stdout and "simulator" in done.stdout


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The kernels' cache, empty."""
    torch._dynamo.reset()
    monkeypatch.setenv("CUPYOPS_CACHE_DIR", str(tmp_path / "cache"))
    yield tmp_path / "cache"
    torch._dynamo.reset()


def assert_runs(number):
    """Kernels that nobody has compiled before give the right result."""
    compiled, x = torch.compile(lambda x: (x * number).sum(0), backend=backend), torch.ones(4, 8)
    with cupyops.simulate("sm_90"), cupyops.trace() as trace:
        assert compiled(x).eq(4 * number).all()
    assert trace.routes() == {"simulator"}


def test_a_full_disk(folder, monkeypatch):
    def full(temporary, final):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(disk.os, "replace", full)
    with pytest.warns(UserWarning, match="cannot be written"):
        assert_runs(17)


def test_a_broken_entry_of_the_cache_is_made_anew(folder, monkeypatch):
    monkeypatch.setenv("CUPYOPS_STRICT", "1")
    assert_runs(19)
    entries = [path for path in folder.rglob("*") if path.is_file()]
    assert entries
    for path in entries:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    from cupyops._compile.program import kernel_of

    kernel_of.cache_clear()
    torch._dynamo.reset()
    assert_runs(19)


def _data_parallel(rank, size, store):
    """A replica's gradients are the mean of all: buckets are reduced by hooks, as backward's graph gives them."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size)
    try:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 2))
        twin = [one.detach().clone().requires_grad_() for one in model.parameters()]
        batches = torch.randn(size, 4, 8)
        copies = dict(zip(dict(model.named_parameters()), twin))
        loss = sum(torch.func.functional_call(model, copies, (x,)).square().sum() for x in batches) / size
        loss.backward()
        replica = nn.parallel.DistributedDataParallel(torch.compile(model, backend=backend))
        with cupyops.simulate("sm_90"), cupyops.trace() as trace:
            replica(batches[rank]).square().sum().backward()
        for one, other in zip(model.parameters(), twin):
            torch.testing.assert_close(one.grad, other.grad)
        assert "simulator" in trace.routes(), trace
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed")
def test_two_processes_of_data_parallel_training(tmp_path):
    together(_data_parallel, [2], tmp_path, preloaded=("torch._dynamo", "cupyops._compile.backend"))
