"""The modules of cupyops.nn against PyTorch's own samples of them: module_db, which no one here wrote.

On the reference, in the simulator and on a GPU, in training and in evaluation: results, strides, the gradients of arguments
and parameters and the buffers afterwards are PyTorch's; state dicts go both ways; what PyTorch refuses is refused.
"""

import pytest
import torch
from opdb.backends import FLOATING, NOT_DRAWN, drawn
from opdb.known import MODULES, MODULES_WITHOUT_ENTRY, NOT_FINITE, OF_OPERATOR, TRAPS, named
from opdb.modules import DERIVATIVES, INFOS, WITH_ERRORS, Pair, modes, refuses, samples, strided

import cupyops
from cupyops.errors import InputError

pytestmark = [
    OF_OPERATOR,
    pytest.mark.filterwarnings("ignore:reduction.+mean. divides"),
    pytest.mark.filterwarnings("ignore:Using padding='same'"),
]


def test_every_module_is_in_the_database_or_known_not_to_be():
    assert {*MODULES, *MODULES_WITHOUT_ENTRY} == {name for name in cupyops.nn.__all__ if name[0].isupper()}
    assert {info.module_cls.__name__ for info in INFOS} == set(MODULES)


@pytest.mark.parametrize("dtype", FLOATING, ids=named)
@pytest.mark.parametrize("info", INFOS, ids=named)
def test_samples(info, dtype, backend, score):
    if dtype not in info.dtypes:
        pytest.skip("PyTorch does not test the module in this dtype")
    for training in modes(info):
        given = samples(info, backend.device, dtype, training)
        assert given, "the database has no sample"
        chosen, left = drawn(given, backend.most.get(dtype))
        for sample in chosen:
            compare(info, sample, dtype, training, backend, score)
        for suite in ("modules", "module layouts", "module states"):
            score.leave_out(suite, NOT_DRAWN, len(left))
    score.raise_if_failed()


def compare(info, sample, dtype, training, backend, score):
    pair = lambda: Pair(info, sample, backend.device, dtype, training)
    with backend.running():
        with score.sample("modules", sample.desc):
            pair().compare()
            args, kwargs = (one := pair()).arguments()
            with cupyops.trace() as trace, torch.no_grad():
                one.ours(*args, **kwargs)
            score.called({record.operator for record in trace.records}, bool(trace.launches()))
        with score.sample("module layouts", sample.desc):
            pair().compare(strided)
        with score.sample("module states", sample.desc):
            pair().states()


@pytest.mark.parametrize("info", WITH_ERRORS, ids=named)
def test_errors(info, backend, score):
    """With an InputError, or the error of PyTorch's constructor, which is ours too."""
    for training in modes(info):
        options = {"device": backend.device, "dtype": torch.float32, "requires_grad": False, "training": training}
        for error in info.module_error_inputs_func(info, **options):
            if backend.has_kernels and "index out of range" in error.error_regex:
                score.leave_out("module errors", TRAPS, 1)
                continue
            with score.sample("module errors", error.error_regex), backend.running():
                refuses(info, error, (InputError, error.error_type), backend.device)
    score.raise_if_failed()


@pytest.mark.slow
@pytest.mark.parametrize("suite", DERIVATIVES)
@pytest.mark.parametrize("info", INFOS, ids=named)
def test_derivatives(info, suite, backend, score):
    """PyTorch's checks of derivatives, in float64."""
    for training in modes(info):
        given = samples(info, backend.device, torch.float64, training)
        chosen, left = drawn(given, backend.most_derivatives)
        for sample in chosen:
            pair = Pair(info, sample, backend.device, torch.float64, training)
            if not pair.is_finite():
                score.leave_out(suite, NOT_FINITE, 1)
                continue
            with score.sample(suite, sample.desc), backend.running():
                pair.derivative(DERIVATIVES[suite], info)
        score.leave_out(suite, NOT_DRAWN, len(left))
    score.raise_if_failed()
