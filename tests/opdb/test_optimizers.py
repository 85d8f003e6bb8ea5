"""The optimizers against PyTorch's own samples of them: optim_db, which no one here wrote.

On the reference, in the simulator and on a GPU, with each of PyTorch's implementations that may be asked for: parameters and
state after several steps in two groups are PyTorch's; state dicts go both ways; what PyTorch refuses is refused.
"""

import pytest
import torch
from opdb.backends import FLOATING
from opdb.known import FUSED_SGD, OF_OPERATOR, OPTIMIZERS, OPTIMIZERS_WITHOUT_ENTRY, named
from opdb.optimizers import INFOS, compare, inputs, is_unsound, refuses, runs

import cupyops

pytestmark = OF_OPERATOR


def test_every_optimizer_is_in_the_database_or_known_not_to_be():
    assert {*OPTIMIZERS, *OPTIMIZERS_WITHOUT_ENTRY} == set(cupyops.optim.__all__)
    assert {info.optim_cls.__name__ for info in INFOS} == set(OPTIMIZERS)


@pytest.mark.parametrize("dtype", FLOATING, ids=named)
@pytest.mark.parametrize("info", INFOS, ids=named)
def test_samples(info, dtype, backend, score):
    for what, options in inputs(info, backend.device, dtype):
        if not backend.has_kernels and is_unsound(info, options, backend.device, dtype):
            for suite in ("steps", "optimizer states"):
                score.differs(suite, FUSED_SGD)
            continue
        with backend.running():
            with score.sample("steps", what):
                mine, theirs, truth = runs(info, options, backend.device, dtype)
                with cupyops.trace() as trace:
                    mine.step(1)
                score.called({record.operator for record in trace.records}, bool(trace.launches()))
                mine.step(3)
                theirs.step()
                truth.step()
                compare(mine, theirs, truth)
            with score.sample("optimizer states", what):
                go_on(info, options, backend.device, dtype)
    score.raise_if_failed()


def go_on(info, options, device, dtype):
    """Ours from PyTorch's state, then PyTorch's from ours."""
    first, theirs, truth = runs(info, options, device, dtype)
    theirs.step()
    truth.step()
    first.go_on_from(theirs)
    for run in (first, theirs, truth):
        run.step(2)
    compare(first, theirs, truth)
    theirs.go_on_from(first)
    for run in (first, theirs, truth):
        run.step(1)
    compare(first, theirs, truth)


@pytest.mark.parametrize("info", INFOS, ids=named)
def test_errors(info, backend, score):
    """With PyTorch's error, whose constructors are ours."""
    errors = list(info.optim_error_inputs_func(device=backend.device, dtype=torch.float32))
    if not errors:
        pytest.skip("the database has no errors for this device")
    for error in errors:
        with score.sample("optimizer errors", error.optimizer_error_input.desc), backend.running():
            refuses(info, error)
    score.raise_if_failed()
