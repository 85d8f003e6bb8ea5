"""Models whose modules have been swapped, and operators whose sizes and outputs hang on data, where PyTorch records."""

import contextlib
import pickle

import pytest
import torch
import toys
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim

import cupyops
from cupyops import Kernel

simulated = pytest.mark.parametrize("context", [contextlib.nullcontext, cupyops.simulate], ids=["reference", "kernels"])


def convnet():
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.GroupNorm(2, 4)
    head = nn.Flatten(), nn.Linear(16, 8), nn.LayerNorm(8), nn.GELU(), nn.Softmax(-1), nn.RMSNorm(8)
    model = nn.Sequential(*layers, *head).eval()
    cupyops.swap(model)
    return model, torch.randn(2, 3, 4, 4)


MODULES = {
    "Linear": (lambda: cupyops.nn.Linear(8, 4), (5, 8)),
    "BatchNorm1d": (lambda: cupyops.nn.BatchNorm1d(8), (5, 8)),
    "BatchNorm2d": (lambda: cupyops.nn.BatchNorm2d(3), (5, 3, 4, 6)),
    "BatchNorm2d.eval": (lambda: cupyops.nn.BatchNorm2d(3).eval(), (5, 3, 4, 6)),
    "GroupNorm": (lambda: cupyops.nn.GroupNorm(2, 4), (5, 4, 3, 7)),
    "LayerNorm": (lambda: cupyops.nn.LayerNorm(8), (5, 8)),
    "Conv2d": (lambda: cupyops.nn.Conv2d(3, 4, 3), (5, 3, 6, 7)),
    "MaxPool2d": (lambda: cupyops.nn.MaxPool2d(2), (5, 3, 6, 8)),
}


@simulated
@pytest.mark.parametrize("name", MODULES)
def test_a_batch_of_any_size(name, context):
    make, shape = MODULES[name]
    module, x = make(), torch.randn(shape)
    with context():
        program = torch.export.export(module, (x,), dynamic_shapes=({0: Dim("batch")},))
        larger = torch.cat([x, x, x])
        torch.testing.assert_close(program.module()(larger), module(larger))


@simulated
@pytest.mark.parametrize("gradient", [False, True])
def test_cross_entropy_compiles_once(context, gradient):
    torch._dynamo.reset()
    compiled = torch.compile(cupyops.cross_entropy, backend="aot_eager", dynamic=True, fullgraph=True)
    with context(), torch._dynamo.config.patch(error_on_recompile=True):
        for rows in (4, 6, 9):
            x = torch.randn(rows, 7 + rows, requires_grad=gradient)
            target = torch.randint(7, (rows,))
            torch.testing.assert_close(compiled(x, target), nn.functional.cross_entropy(x, target))


@simulated
def test_decomposed(context):
    model, x = convnet()
    with context():
        program = torch.export.export(model, (x,), dynamic_shapes=({0: Dim("batch")},))
        ours = {node.target for node in program.graph.nodes if str(node.target).startswith("cupyops.")}
        assert len(ours) == 10
        table = {**torch.export.default_decompositions(), **cupyops.decompositions()}
        program = program.run_decompositions(table)
        assert not any("cupyops" in str(node.target) for node in program.graph.nodes)
        torch.testing.assert_close(program.module()(torch.cat([x, x])), model(torch.cat([x, x])))


def test_onnx():
    pytest.importorskip("onnxscript")
    evaluator = pytest.importorskip("onnx.reference").ReferenceEvaluator
    model, x = convnet()
    exported = torch.onnx.export(model, (x,), dynamo=True, verbose=False).model_proto
    (found,) = evaluator(exported).run(None, {exported.graph.input[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), model(x), rtol=1e-4, atol=1e-4)


@simulated
def test_fx(context):
    """Modules are leaves, as PyTorch's are; functions are looked into no further either."""
    model, x = convnet()
    graph = torch.fx.symbolic_trace(model)
    inside = dict(model.named_modules())
    called = {type(inside[node.target]) for node in graph.graph.nodes if node.op == "call_module"}
    assert {cupyops.nn.Conv2d, cupyops.nn.Linear, cupyops.nn.RMSNorm} <= called
    alone = torch.fx.symbolic_trace(cupyops.nn.Linear(3, 2)).graph.nodes
    assert cupyops.linear in [node.target for node in alone]
    with context():
        for one in (graph, pickle.loads(pickle.dumps(graph))):
            torch.testing.assert_close(one(x), model(x))


class Scaled(Tensor):
    """A weight that takes F.linear into its own hands."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            return 100 + super().__torch_function__(func, types, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs or {})


@simulated
def test_a_weight_that_intercepts_linear(context):
    weight, x = torch.randn(4, 8).as_subclass(Scaled), torch.randn(2, 8)
    expected = nn.functional.linear(x, weight)
    assert (expected > 50).all()
    with context():
        assert torch.equal(cupyops.linear(x, weight), expected)
        layer = cupyops.nn.Linear(8, 4, bias=False)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        assert torch.equal(layer(x), expected)
        compiled = torch.compile(cupyops.linear, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x, weight), expected)


@simulated
@pytest.mark.parametrize("packed", [False, True])
def test_gates_that_intercept_linear(context, packed):
    """So does what is made of linear."""
    gate, up, x = torch.randn(4, 8).as_subclass(Scaled), torch.randn(4, 8).as_subclass(Scaled), torch.randn(2, 8)
    expected = nn.functional.silu(nn.functional.linear(x, gate)) * nn.functional.linear(x, up)
    assert (expected > 2000).all()
    with context():
        found = cupyops.gated_linear(x, *([torch.cat([gate, up])] if packed else [gate, up]))
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(cupyops.linear_act(x, gate, None, "silu"), nn.functional.linear(x, gate))


def test_swap_leaves_it_alone():
    model = nn.Sequential(nn.Linear(8, 4, bias=False), nn.Linear(4, 2))
    model[0].weight = nn.Parameter(torch.randn(4, 8).as_subclass(Scaled), requires_grad=False)
    report = cupyops.swap(model)
    assert type(model[0]) is nn.Linear and type(model[1]) is cupyops.nn.Linear
    assert "its weight is a Scaled, which may compute something else" in str(report)


class Linears(torch.overrides.TorchFunctionMode):
    """Takes F.linear into its own hands."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return 1.0 if func is nn.functional.linear else func(*args, **(kwargs or {}))


@simulated
def test_a_mode_that_intercepts_linear(context):
    x, weight = torch.randn(2, 8), torch.randn(4, 8)
    with context():
        for _ in range(5):
            cupyops.linear(x, weight)
        with Linears():
            assert cupyops.linear(x, weight) == 1.0


SQUARE = """
__global__ void square(const float* x, float* y, float* slope, int n) {
  if (threadIdx.x < n) { y[threadIdx.x] = 2 * x[threadIdx.x] * x[threadIdx.x]; slope[threadIdx.x] = 4 * x[threadIdx.x]; }
}
__global__ void times(const float* a, const float* b, float* y, int n) {
  if (threadIdx.x < n) y[threadIdx.x] = a[threadIdx.x] * b[threadIdx.x];
}
"""


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_graph_meets_sizes_that_the_kernels_refuse(backend):
    square, times = Kernel(SQUARE, "square"), Kernel(SQUARE, "times")

    @cupyops.operator(toys.fresh("square"))
    def op(x: Tensor) -> Tensor:
        return 2 * x * x

    @op.forward
    def forward(x):
        y, slope = torch.empty_like(x), torch.empty_like(x)
        square[1, 32](x, y, slope, x.numel())
        return y, (slope,)

    @op.backward
    def backward(saved, grad_y):
        grad_x = torch.empty_like(grad_y)
        times[1, 32](grad_y, saved[0], grad_x, grad_x.numel())
        return grad_x

    @op.unsupported
    def unsupported(x):
        return "more than 16" if x.numel() > 16 else None

    torch._dynamo.reset()
    compiled = torch.compile(op, backend=backend, dynamic=True, fullgraph=True)
    with cupyops.simulate(), torch._dynamo.config.patch(error_on_recompile=True):
        for n in (5, 9, 40, 7):
            x = torch.randn(n, requires_grad=True)
            y = compiled(x)
            torch.testing.assert_close(y, 2 * x * x)
            torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], 4 * x)
    toys.forget(op)


TWICE = """
template <int N> __global__ void twice(const float* x, float* y) {
  if (threadIdx.x < N) y[threadIdx.x] = 2 * x[threadIdx.x];
}
"""


def test_data_dependent_outputs():
    """Of an operator without kernels; tests/operator/test_kinds.py has one with."""

    @cupyops.operator(toys.fresh("nonzero"))
    def op(x: Tensor) -> Tensor:
        return x.nonzero()

    class Module(nn.Module):
        def forward(self, x):
            return op(x)

    torch._dynamo.reset()
    with cupyops.simulate():
        x = torch.tensor([0.0, 1.0, 0.0, 2.0])
        compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
        program = torch.export.export(Module(), (x,)).module()
        for value in (x, 1 - x, torch.zeros(4)):
            for function in (op, compiled, program):
                assert torch.equal(function(value), value.nonzero())
        assert torch.equal(compiled(torch.ones(7)), torch.ones(7).nonzero())
    toys.forget(op)


def test_a_fake_of_a_wrong_form():
    op, _ = toys.exponential()
    op.fake(lambda x: x)
    with toys.executor(), FakeTensorMode() as mode, pytest.raises(cupyops.InputError, match=r"return y, \(\)"):
        op(mode.from_tensor(torch.ones(3)))
    toys.forget(op)


def test_a_template_integer_from_a_shape():
    twice = Kernel(TWICE, "twice<N>")

    @cupyops.operator(toys.fresh("twice"))
    def op(x: Tensor) -> Tensor:
        return 2 * x

    @op.forward
    def forward(x):
        y = torch.empty_like(x)
        twice[1, 32](x, y, N=x.shape[0])
        return y, ()

    torch._dynamo.reset()
    with cupyops.simulate(), torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(op, backend="aot_eager", dynamic=True, fullgraph=True)
        for n in (5, 8):
            assert torch.equal(compiled(torch.ones(n)), torch.full((n,), 2.0))
    toys.forget(op)


@simulated
def test_flops_of_a_model(context):
    from torch.utils.flop_counter import FlopCounterMode

    model, x = convnet()
    twin = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 8))
    counts = []
    for one in (model, twin):
        with context(), FlopCounterMode(display=False) as counter:
            one(x).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0
