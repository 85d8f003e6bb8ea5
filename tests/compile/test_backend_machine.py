"""Machines as they are: no C compiler, a broken cache entry, a full disk, a folder that cannot be written, two processes."""

import copy
import errno
import os
import sys
import textwrap

import pytest
import torch
from processes import run_python, together
from torch import nn

import cupyops
from cupyops._compile.backend import backend, programs
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


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x):
        return x + nn.functional.gelu(self.inner(x))


class Net(nn.Module):
    """A class of its own: Dynamo starts no graph in a forward of torch.nn, as the one of a Sequential within DDP."""

    def __init__(self):
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def _replica_of_a_compiled_model(net):
    return nn.parallel.DistributedDataParallel(torch.compile(net, backend=backend))


def _compiled_replica(net):
    """Dynamo cuts the graph where a bucket ends, so that its reduction runs beside the backward of the others."""
    return torch.compile(nn.parallel.DistributedDataParallel(net, bucket_cap_mb=0.0003), backend=backend)


def _sharded(net):
    from torch.distributed.fsdp import fully_shard

    mesh = torch.distributed.init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(net, mesh=mesh)


def _compiled_shards(net):
    return torch.compile(_sharded(net), backend=backend)


def _shards_of_compiled_blocks(net):
    for block in net.blocks:
        block.compile(backend=backend)
    return _sharded(net)


PARALLEL = {_replica_of_a_compiled_model: 2, _compiled_replica: 4, _compiled_shards: 4, _shards_of_compiled_blocks: 2}


def _data_parallel(rank, size, store):
    """Two steps' gradients are the sum of the means over the processes: `PARALLEL` has the least number of programs."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=size)
    torch.distributed._DEFAULT_FIRST_BUCKET_BYTES = 1  # else all of this small model is in the first bucket
    try:
        for wrapped, least in PARALLEL.items():
            torch.manual_seed(0)
            torch._dynamo.reset()
            programs.clear()
            net, batches = Net(), torch.randn(size, 4, 8)
            twin = copy.deepcopy(net)
            for _ in range(2):
                (sum(twin(x).square().sum() for x in batches) / size).backward()
            model = wrapped(net)
            with cupyops.simulate("sm_90"), cupyops.trace() as trace:
                for _ in range(2):
                    model(batches[rank]).square().sum().backward()
            for one, other in zip(net.parameters(), twin.parameters(), strict=True):
                grad = one.grad.full_tensor() if hasattr(one.grad, "full_tensor") else one.grad
                torch.testing.assert_close(grad, other.grad)
            assert len(programs) >= least and "simulator" in trace.routes(), (wrapped, len(programs), trace)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed")
def test_two_processes_of_data_parallel_training(tmp_path):
    """DDP with its buckets and FSDP2 with its hooks, around what is compiled and within it."""
    together(_data_parallel, [2], tmp_path, preloaded=("torch._dynamo", "cupyops._compile.backend"))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_tensors_on_a_device_that_is_not_current(mode):
    """Programs run where their tensors are, with and without CUDA graphs, and leave the current device as it was."""
    torch._dynamo.reset()
    for current, other in ((0, 1), (1, 0)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8)).to(f"cuda:{other}")
        fast, x = torch.compile(copy.deepcopy(model), backend="cupyops", mode=mode), torch.randn(16, 32)
        with torch.cuda.device(current):
            for _ in range(4):
                both = []
                for one in (model, fast):
                    loss = one(x.to(f"cuda:{other}")).square().mean()
                    both.append([loss, *torch.autograd.grad(loss, list(one.parameters()))])
                torch.testing.assert_close(both[1], both[0])
                assert torch.cuda.current_device() == current
