"""Every public operator of tensors without elements: PyTorch's values, and where nothing comes out, nothing is launched."""

import pytest
import samples
import torch

import cupyops
from cupyops.testing.call import gradients, tensors_of

pytestmark = [
    pytest.mark.parametrize("operator", samples.DIFFERENTIABLE),
    pytest.mark.filterwarnings("ignore:var.*degrees of freedom"),
]


def empty_calls(edge):
    """The call with each size zero, where PyTorch takes it; then with each input alone wanting a gradient."""
    for size in sorted({size for tensor in edge.inputs for size in tensor.shape if size}):
        for numbers in (True, False):
            call = edge.sample.resized(size, 0, numbers)
            try:
                call.leaves().of(edge.theirs)
            except (RuntimeError, ValueError, TypeError, IndexError, ArithmeticError, AssertionError):
                continue
            count = len(call.tensors())
            for alone in (None, *range(count)):
                leaves = call.leaves()
                for place, tensor in enumerate(leaves.tensors()):
                    tensor.requires_grad_(alone in (None, place))
                yield leaves


def results_of(function, call):
    """Outputs and gradients of a call, whose tensors want gradients as they do now; None for what has none."""
    leaves = call.leaves()
    for given, leaf in zip(call.tensors(), leaves.tensors(), strict=True):
        leaf.requires_grad_(given.requires_grad)
    outputs = tensors_of(leaves.of(function))
    return [*outputs, *gradients(outputs, leaves, [torch.ones_like(y) for y in outputs if y.requires_grad])]


def test_nothing_is_launched_for_nothing(operator):
    """Memory that nobody writes shows: the simulator fills it with a pattern."""
    tried = 0
    for edge, call in ((one, call) for one in samples.every_edge(operator) for call in empty_calls(one)):
        with cupyops.simulate(), cupyops.trace() as trace:
            try:
                found = results_of(edge.function, call)
            except cupyops.InputError:  # as of lengths that are past what is left
                continue
        left = [tensor for tensor in found if tensor is not None and tensor.numel()]
        assert left or not trace.launches(), f"{call!r}\n{trace}"
        for place, (one, other) in enumerate(zip(found, results_of(edge.theirs, call))):
            if one is not None and other is not None and one.numel():
                close = torch.allclose(one.double(), other.double(), rtol=1e-5, atol=1e-5, equal_nan=True)
                assert close, f"{call!r}: result {place}: {one}, PyTorch {other}"
        tried += 1
    assert tried
