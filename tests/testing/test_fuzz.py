"""A few drawn calls of every operator; `tools/fuzz.py` draws for as long as one likes."""

import collections

import pytest
import torch
from fuzzing import _DRAWN, FUZZED
from hypothesis import HealthCheck, given, settings
from selection import SEVEN

from cupyops.testing import Failure
from cupyops.testing.fuzz import agree, calls

QUICK = settings(deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))


def test_no_line_is_of_an_operator_that_is_gone():
    assert set(_DRAWN) <= set(FUZZED)


@pytest.mark.slow(but=SEVEN)
@pytest.mark.filterwarnings("ignore::UserWarning")  # PyTorch's, of arguments as they are drawn
@pytest.mark.parametrize(("backend", "count"), [("reference", 30), ("simulator", 8)])
@pytest.mark.parametrize("operator", FUZZED)
def test_drawn_calls(operator, backend, count):
    function, reference, strategy = FUZZED[operator]
    outcomes = collections.Counter()

    @settings(QUICK, max_examples=count)
    @given(strategy)
    def agrees(call):
        outcomes[agree(function, reference, call, backend)] += 1

    agrees()
    assert outcomes["agreed"] >= count // 4, f"few calls mean anything: {outcomes}"


def wrong_for_threes(x, dim=0):
    y = torch.softmax(x, dim)
    return y + 0.125 if x.dim() and x.shape[-1] % 3 == 0 and x.numel() else y


def right(x, dim=0):
    return torch.softmax(x, dim)


def lax(x, dim=0):
    return torch.softmax(x, max(-x.dim(), min(dim, max(x.dim() - 1, 0))))


def rough(x, dim=0):
    if not -max(x.dim(), 1) <= dim < max(x.dim(), 1):
        raise KeyError(dim)
    return torch.softmax(x, dim)


@pytest.mark.parametrize(
    ("broken", "message"),
    [(wrong_for_threes, "error 0.125"), (lax, "ours gives a result"), (rough, "ours ends in KeyError")],
)
def test_a_fault_is_found(broken, message):
    broken.__annotations__ = right.__annotations__ = {"x": torch.Tensor, "dim": int}

    @settings(QUICK, max_examples=200)
    @given(calls(broken))
    def agrees(call):
        agree(broken, right, call)

    with pytest.raises(Failure, match=message):
        agrees()
