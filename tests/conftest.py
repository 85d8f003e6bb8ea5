"""Fixtures and the gpu marker. A test marked gpu is skipped, with the reason, where there is no GPU."""

import pytest
import torch

GPU = torch.cuda.is_available()

torch.backends.cudnn.allow_tf32 = False  # PyTorch's float32 convolution is to be float32 where we compare with it

DEVICES = [pytest.param("cpu", id="cpu"), pytest.param("cuda", id="cuda", marks=pytest.mark.gpu)]


def pytest_collection_modifyitems(items):
    if not GPU:
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="no CUDA GPU on this machine"))


@pytest.fixture(params=DEVICES)
def device(request):
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def same_every_time():
    """One seed; and every `torch.empty` filled with NaN, so that what a kernel leaves out is seen."""
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
