"""torch.jit.trace and torch.onnx.export(dynamo=False) record what PyTorch's operators do: the reference, and no launch."""

import pytest
import torch
from processes import run_python
from torch import Tensor
from toys import executor, exponential, forget, fresh, product

import cupyops
from cupyops import Kernel, LaunchError

PUT = "__global__ void put(float* x, int n) { if (threadIdx.x < n) x[threadIdx.x] = 7; }"


def traced(function, *inputs):
    return torch.jit.trace(function, inputs, check_trace=False)


@pytest.mark.parametrize("gradient", [False, True])
def test_an_operator_is_recorded_by_its_reference(gradient):
    op, calls = product()
    x, w = torch.ones(3, requires_grad=gradient), torch.full((3,), 2.0)
    with executor():
        op(x, w)
        assert calls.count_of("reference") == 0
        graph = traced(lambda x, w: op(x, w, None, 3.0), x, w)
        assert calls.count_of("reference") == 1
        op(x, w)
        assert calls.count_of("reference") == 1
    assert graph(torch.tensor([1.0, 2.0, 3.0]), w).tolist() == [2.0, 4.0, 6.0]
    forget(op)


def test_a_traced_function_has_the_gradient_of_the_reference():
    op, _ = exponential()
    with executor():
        graph = traced(op, torch.ones(3))
    x = torch.arange(3.0, requires_grad=True)
    graph(x).sum().backward()
    torch.testing.assert_close(x.grad, x.detach().exp())
    forget(op)


def test_an_open_trace_says_so():
    op, _ = product()
    with executor(), cupyops.trace() as trace:
        traced(op, torch.ones(3), torch.ones(3))
    assert [(record.route, record.note) for record in trace.records] == [("reference", "torch.jit.trace")]
    forget(op)


def test_in_place():
    @cupyops.operator(fresh("double_"), mutates=("x",))
    def op(x: Tensor) -> Tensor:
        return x.mul_(2)

    @op.forward
    def _(x):
        raise AssertionError("launched")

    with executor():
        graph = traced(lambda x: op(x * 1) + 1, torch.ones(3))
        assert graph(torch.arange(3.0)).tolist() == [1.0, 3.0, 5.0]
        graph = traced(op, torch.ones(3))
    x = torch.arange(3.0)
    assert graph(x).tolist() == [0.0, 2.0, 4.0] == x.tolist()
    forget(op)


def test_updates():
    @cupyops.operator(fresh("counting"), updates=("count",))
    def op(x: Tensor, count: Tensor | None = None) -> Tensor:
        if count is not None:
            with torch.no_grad():
                count.add_(x.sum())
        return x + 1

    @op.forward
    def _(x, count):
        raise AssertionError("launched")

    count = torch.zeros(())
    with executor():
        graph = traced(op, torch.ones(3), count)
    count.zero_()
    assert graph(torch.arange(3.0), count).tolist() == [1.0, 2.0, 3.0] and count == 3
    forget(op)


@pytest.mark.parametrize("modes", [torch.no_grad, torch.enable_grad])
def test_under_a_dispatch_mode_too(modes):
    """Which would put the registered op into the graph, of which TorchScript knows nothing."""
    from torch.utils.flop_counter import FlopCounterMode

    op, calls = product()
    with executor(), FlopCounterMode(display=False), modes():
        graph = traced(op, torch.ones(3), torch.ones(3))
    assert calls.count_of("reference") == 1 and "product" not in str(graph.graph)
    forget(op)


@pytest.mark.parametrize(
    ("function", "twin"),
    [
        (lambda x: cupyops.layer_norm(x, x.shape[1:]), lambda x: torch.nn.functional.layer_norm(x, x.shape[1:])),
        (lambda x: cupyops.rms_norm(x, (x.shape[-1],)), lambda x: torch.nn.functional.rms_norm(x, (x.shape[-1],))),
        (
            lambda x: cupyops.softmax(x, x.shape[0] - 1),
            lambda x: torch.nn.functional.softmax(x, 1),
        ),
        (lambda x: cupyops.sum(x, (x.shape[0] - 2,)), lambda x: torch.sum(x, 0)),
    ],
    ids=["layer_norm", "rms_norm", "softmax", "sum"],
)
def test_sizes_of_tensors_as_arguments(function, twin):
    """While a trace is recorded they are tensors themselves."""
    graph = traced(function, torch.randn(2, 5))
    x = torch.randn(2, 5)
    torch.testing.assert_close(graph(x), twin(x))


@pytest.mark.parametrize("grid", [lambda x: 1, lambda x: cupyops.ceil_div(x.shape[0], 32)], ids=["number", "size"])
@pytest.mark.parametrize("warm", [False, True])
def test_a_launch_is_refused(warm, grid, device):
    put = Kernel(PUT, "put")

    def function(x):
        y = torch.zeros_like(x)
        put[grid(x), 32](y, 8)
        return y

    with cupyops.simulate():
        x = torch.zeros(8, device=device)
        for _ in range(2 * warm):  # the generated launch
            function(x)
        with pytest.raises(LaunchError, match=r"torch\.jit\.trace .* make it an operator"):
            traced(function, x)
        assert function(x).tolist() == [7.0] * 8


def test_it_is_no_matter_of_warnings():
    """PyTorch warns of each size that Python compares; of our own checks it need not."""
    code = """
import warnings, torch, cupyops
with warnings.catch_warnings(record=True) as seen:
    torch.jit.trace(cupyops.nn.BatchNorm2d(3), torch.randn(2, 3, 4, 5), check_trace=False)
    torch.jit.trace(cupyops.nn.Conv2d(3, 4, 2, padding="same"), torch.randn(2, 3, 4, 5), check_trace=False)
    torch.jit.trace(lambda x: x if x.shape[0] == 2 else -x, torch.ones(2), check_trace=False)
found = [one for one in seen if issubclass(one.category, torch.jit.TracerWarning)]
assert [one.filename for one in found] == ["<string>"], found
"""
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr
