"""Products of few rows, whatever their size: chosen by name, or by what is chosen where nobody asks."""

from contextlib import contextmanager

import pytest
import torch
from torch.nn import functional as F

import cupyops
from cupyops._dispatch.gpu import assume_gpu

HALF = [torch.float16, torch.bfloat16]


@contextmanager
def asked(device, operator="linear", arch="sm_90", **card):
    """Calls inside take few rows; on the CPU in the simulator, as on a card with that many multiprocessors."""
    card = {"shared": 232448, "multiprocessors": 8} | card if device.type == "cpu" else card
    with cupyops.use_form(f"{operator}:few_rows"), assume_gpu(**card):
        if device.type == "cuda":
            yield
        else:
            with cupyops.simulate(arch):
                yield


def numbers(device, dtype, *shapes):
    """Normal values, those of a weight so scaled that products are near 1."""
    torch.manual_seed(0)
    made = [torch.randn(shape, device=device) for shape in shapes]
    return [(t / t.shape[-1] ** 0.5 if i == 1 else t).to(dtype) for i, t in enumerate(made)]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 64])
def test_rows(device, dtype, rows):
    """Columns and k that fill no tile and no step."""
    x, weight, bias = numbers(device, dtype, (rows, 328), (75, 328), (75,))
    exact = F.linear(x.double(), weight.double(), bias.double())
    with asked(device), cupyops.trace() as trace:
        y = cupyops.linear(x, weight, bias)
    assert [launch.kernel.partition("<")[0] for launch in trace.launches()] == ["few_rows_mma"]
    theirs = F.linear(x, weight, bias)
    ours_off, theirs_off = ((one.double() - exact).abs().max() for one in (y, theirs))
    assert ours_off <= 2 * theirs_off
