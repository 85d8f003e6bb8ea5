"""The operators against PyTorch's own samples of them (`torch.testing._internal`'s op_db), which no one here wrote.

On the reference, in the simulator and on a GPU: results, strides and every gradient equal to PyTorch's in the same dtype,
from contiguous and from non-contiguous inputs; every input that PyTorch calls an error is refused; PyTorch's own checks of
derivatives pass. How many samples that is, docs/conformance.md says.

Left out, each for its reason:
- samples with `out=`: no function here has that argument (the database has only some that PyTorch
  refuses, and any other fails the test);
- where time is short, all but some samples, drawn at random: `Backend.most`, `Backend.most_derivatives`;
- what is in `REFUSED`: PyTorch computes something there, and the function here says no.
"""

import pytest
import torch
from opdb import derivatives
from opdb.backends import DTYPES, NOT_DRAWN, drawn
from opdb.comparison import Comparison, call_of, mine, route_of, theirs, wants_gradient
from opdb.database import DIFFERENTIABLE, OPS, WITH_ERRORS, kinds_of_samples, not_random
from opdb.known import FUNCTIONS, OF_OPERATOR, REFUSED, WITHOUT_ENTRY, kernel_dtypes, known_difference, named

import cupyops
from cupyops.errors import InputError

# what PyTorch says of its own functions, where they are called as references
pytestmark = [
    OF_OPERATOR,
    pytest.mark.filterwarnings("ignore:reduction.+mean. divides"),  # of kl_div
    pytest.mark.filterwarnings("ignore:Using padding='same'"),
    pytest.mark.filterwarnings("ignore:.* does not have a deterministic implementation"),
]


def test_every_function_is_in_the_database_or_known_not_to_be():
    public = {n for n, f in vars(cupyops.ops).items() if not n.startswith("_") and callable(f)}
    assert {*FUNCTIONS.values(), *WITHOUT_ENTRY} == public
    assert {info.name for info in OPS} == set(FUNCTIONS)


@pytest.mark.parametrize("dtype", DTYPES, ids=named)
@pytest.mark.parametrize("info", OPS, ids=named)
def test_samples(info, dtype, backend, score):
    """Where PyTorch supports the dtype: every sample. Where it does not: a refusal, or what PyTorch computes even so."""
    supported = dtype in info.supported_dtypes(backend.device.type)
    if backend.kernels_only and not (supported and dtype in kernel_dtypes(info)):
        pytest.skip(f"there is no kernel for {named(info)} in {named(dtype)}: the reference runs")
    try:
        kinds = list(kinds_of_samples(info, backend.device, dtype))
    except NotImplementedError as error:  # the database's own making, as of a softmax of integers
        assert not supported
        pytest.skip(f"the database has no sample for this dtype: {error}")
    for suite, samples in kinds:
        assert samples, "the database has no sample for this dtype"
        chosen, left = drawn(samples, backend.most.get(dtype))
        with backend.running():
            for sample in chosen:
                if (named(info), dtype) in REFUSED:
                    refuse(info, sample, score, suite, REFUSED[named(info), dtype])
                elif supported:
                    compare(info, sample, score, suite)
                else:
                    refuse_or_compare(info, sample, score)
        leave_out(left, score, (suite, "gradients", "non-contiguous") if supported else ("other dtypes",))
    score.raise_if_failed()
    if backend.has_kernels and supported and dtype in kernel_dtypes(info):
        assert score.counts["launching"], "no kernel was launched"


def compare(info, sample, score, suite):
    """One sample, as it is and with every tensor non-contiguous."""
    plain, strided = Comparison(info, sample), Comparison(info, sample.noncontiguous())
    with score.sample(suite, plain.what):
        plain.forward()
        score.called(*route_of(info, sample))
    if wants_gradient(sample):
        with score.sample("gradients", plain.what):
            plain.gradients()
    with score.sample("non-contiguous", strided.what):
        strided.forward()
        strided.gradients()


def refuse(info, sample, score, suite, reason):
    """PyTorch computes it and we do not."""
    for name, one in ((suite, sample), ("non-contiguous", sample.noncontiguous())):
        assert theirs(info, call_of(one)) is not None
        assert_raises(InputError, mine, info, one)
        score.differs(name, reason)


def refuse_or_compare(info, sample, score):
    """PyTorch does not claim to support the dtype: an error, and never a number of our own."""
    for one in (sample, sample.noncontiguous()):
        comparison = Comparison(info, one)
        with score.sample("other dtypes", comparison.what):
            try:
                mine(info, comparison.call.relaid())
            except (RuntimeError, TypeError, ValueError):
                continue
            comparison.forward()
            comparison.gradients()


def leave_out(samples, score, suites):
    """Count what was not drawn, in every suite that it would have been in."""
    for suite in suites:
        wanted = [sample for sample in samples if suite != "gradients" or wants_gradient(sample)]
        score.leave_out(suite, NOT_DRAWN, len(wanted))


@pytest.mark.parametrize("info", WITH_ERRORS, ids=named)
def test_error_inputs(info, backend, score):
    """What PyTorch refuses is refused, with an InputError; a TypeError may stay one."""
    for error in info.error_inputs(backend.device):
        if "out" in error.sample_input.kwargs:
            score.leave_out("error inputs", "no function here has an argument `out`", 1)
            continue
        with score.sample("error inputs", error.sample_input.summary()), backend.running():
            assert_raises(error.error_type, theirs, info, error.sample_input)
            allowed = (InputError, TypeError) if issubclass(TypeError, error.error_type) else InputError
            assert_raises(allowed, mine, info, error.sample_input)
    score.raise_if_failed()


def assert_raises(kinds, function, info, sample):
    """As pytest.raises, with an error of a kind that a score counts."""
    try:
        function(info, call_of(sample))
    except kinds:
        return
    raise AssertionError(f"no error, expected {kinds}")


@pytest.mark.slow
@pytest.mark.parametrize("suite", derivatives.SUITES)
@pytest.mark.parametrize("info", DIFFERENTIABLE, ids=named)
def test_derivatives(info, suite, backend, score):
    """PyTorch's checks of derivatives, of the function here; in float64, as PyTorch has them."""
    samples = not_random(info.sample_inputs(backend.device, torch.float64, requires_grad=True))
    chosen, left = drawn(samples, backend.most_derivatives)
    difference = known_difference(suite, backend.name)
    for sample in chosen:
        with score.sample(suite, sample.summary(), difference), backend.running():
            derivatives.SUITES[suite](info, sample)
    score.leave_out(suite, NOT_DRAWN, len(left))
    score.raise_if_failed()
    assert difference is None or score.counts["suites"][suite]["differs"], (
        "it differs no more: take it from DIFFERENCES"
    )
