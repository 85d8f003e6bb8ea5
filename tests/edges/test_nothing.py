"""Every public operator of tensors without elements: where nothing comes out of a call, nothing is launched."""

import edges
import pytest

import cupyops
from cupyops.testing.call import gradients, tensors_of

pytestmark = [
    pytest.mark.parametrize("operator", edges.PUBLIC),
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


def test_nothing_is_launched_for_nothing(operator):
    tried = 0
    for edge, call in ((one, call) for one in edges.every_edge(operator) for call in empty_calls(one)):
        with cupyops.simulate(), cupyops.trace() as trace:
            try:
                outputs = tensors_of(call.of(edge.function))
            except cupyops.InputError:  # as of lengths that are past what is left
                continue
            found = gradients(outputs, call, [y.detach() for y in outputs if y.requires_grad])
        results = [*outputs, *(gradient for gradient in found if gradient is not None)]
        assert any(tensor.numel() for tensor in results) or not trace.launches(), f"{call!r}\n{trace}"
        tried += 1
    assert tried
