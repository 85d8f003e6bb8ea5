"""Fixtures and the markers. A test marked gpu is skipped, with the reason, where there is no GPU; slow: see selection.py."""

import gc
import sys

import faults
import kept
import pytest
import selection
import torch
import torch._functorch.config
from selection import pytest_addoption as pytest_addoption
from selection import pytest_runtest_call as pytest_runtest_call

import cupyops

GPU = torch.cuda.is_available()

torch._functorch.config.enable_autograd_cache = False  # every run traces, whatever an earlier one has left on disk
torch.backends.cudnn.allow_tf32 = False  # PyTorch's float32 convolution is to be float32 where we compare with it
# oneDNN 3.12's float16 convolution reads memory that nobody has written, on CPUs with AMX: now and then a NaN
torch.backends.mkldnn.enabled = False

if not GPU:  # PyTorch would note each seed, with the stack, for GPUs that may yet come: a millisecond each time
    torch.cuda.manual_seed_all = torch.mtia.manual_seed_all = torch.xpu.manual_seed_all = lambda seed: None

# folders of tests whose kernels nobody loads: their text will do
SIMULATING = (
    "ops", "nn", "optim", "dispatch", "testing", "expression", "examples", "edges", "derivation", "integrations",
)  # fmt: skip
DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]


def pytest_configure(config):
    selection.configure(config)
    # of several processes the first only hears of failures
    if GPU and (hasattr(config, "workerinput") or not getattr(config.option, "numprocesses", None)):
        config.pluginmanager.register(faults.Watch())


def pytest_collection_modifyitems(config, items):
    selection.select(config, items)
    if not GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA GPU on this machine"))


def pytest_collection_finish():
    """What is there by now stays: no later garbage collection is to look through modules and thousands of tests again."""
    gc.collect()
    gc.freeze()
    if not GPU:  # the simulator makes many objects and few cycles: to look for those was a quarter of its time
        gc.set_threshold(100_000)


def pytest_runtest_teardown(item, nextitem):
    """Nor through what the files before have left: tests that ask for a collection would wait seconds for it."""
    if not GPU and nextitem is not None and nextitem.path != item.path:
        gc.collect()
        gc.freeze()


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def room_on_the_gpu(request, tmp_path_factory):
    """Tests of more than 2^31 elements run one at a time, whatever the number of processes: each takes tens of GiB."""
    if not GPU or "more_than_2" not in request.node.name:
        yield
        # the others may have put something in its place
        on_the_gpu = request.node.get_closest_marker("gpu") is not None
        if GPU and on_the_gpu and torch.cuda.memory_reserved() > 2**30:  # all processes have one GPU in common
            torch.cuda.empty_cache()
        return
    import fcntl

    with open(tmp_path_factory.getbasetemp().parent / "large_tensors.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        torch.cuda.empty_cache()
        yield
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def kept_kernels(request, monkeypatch):
    """Kernels that these tests simulate are compiled once for all of them, and without machine code."""
    if not GPU and request.path.parent.name in SIMULATING:
        kept.texts_alone(monkeypatch)


@pytest.fixture(autouse=True, scope="session")
def own_kernels():
    """Tests are of our kernels, also where PyTorch's own function is faster."""
    with cupyops.never_slower(False):
        yield


@pytest.fixture(autouse=True)
def same_every_time():
    """One seed; and every `torch.empty` filled with NaN, so that what a kernel leaves out is seen."""
    torch.manual_seed(0)
    vars(sys).pop("ps1", None)  # left by IPython: no test is in an interactive session, in which nothing is replayed
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def random_numbers_go_on():
    """A capture that CUDA refuses to end leaves PyTorch's random numbers inside it, where later tests find them."""
    yield
    if GPU and torch.cuda.is_initialized():
        before = torch.cuda.default_generators[torch.cuda.current_device()].get_offset()
        torch.rand(1, device="cuda")
        after = torch.cuda.default_generators[torch.cuda.current_device()].get_offset()
        assert before != after, "the test leaves PyTorch's random numbers inside a CUDA graph's capture"
