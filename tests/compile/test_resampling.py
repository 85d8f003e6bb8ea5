"""interpolate, roll, the bias of a convolution, and numbers that a graph computes on the CPU."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from compiled import assert_as_eager, compiled
from torch._functorch.aot_autograd import aot_module_simplified

import cupyops
from cupyops._compile import decompositions, fold
from cupyops._compile.backend import programs

CASES = [
    ((2, 3, 5), {"mode": "linear", "size": 9}),
    ((2, 3, 5), {"mode": "nearest", "scale_factor": 2.0}),
    ((2, 3, 5, 4), {"mode": "nearest", "scale_factor": 2}),
    ((2, 3, 5, 4), {"mode": "nearest-exact", "size": (3, 9)}),
    ((2, 3, 5, 4), {"mode": "bilinear", "size": (8, 7)}),
    ((2, 3, 5, 4), {"mode": "bilinear", "scale_factor": (1.7, 2.2), "align_corners": True}),
    ((2, 3, 5, 4), {"mode": "bilinear", "size": (2, 9)}),
    ((2, 3, 2, 3), {"mode": "bilinear", "size": (9, 21), "align_corners": True}),
    ((2, 17, 5, 4), {"mode": "bilinear", "scale_factor": 4}),
    ((2, 3, 7, 1), {"mode": "nearest", "scale_factor": (0.37, 5.3)}),
    ((2, 3, 1, 2), {"mode": "bilinear", "size": (33, 2)}),
    ((2, 3, 5, 4), {"mode": "bicubic", "scale_factor": 0.6, "align_corners": False}),
    ((1, 2, 3, 4, 2), {"mode": "trilinear", "size": (5, 4, 3)}),
]


def gradients(function, x):
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = function(x)
    (y * torch.arange(y.numel(), dtype=y.dtype).view(y.shape)).sum().backward()
    return y.detach(), x.grad


@pytest.mark.parametrize("last", [False, True], ids=["", "channels_last"])
@pytest.mark.parametrize(
    ("shape", "options"), CASES, ids=lambda value: value.get("mode", "") if isinstance(value, dict) else ""
)
def test_interpolate_with_a_gradient(shape, options, last):
    """Elements of the gradient gather what they are sums of; other modes, and sums of many, stay calls."""
    if last and len(shape) != 4:
        shape = (2, 3, 5, 4)
        options = {"mode": "nearest", "size": (6, 6)}
    torch.manual_seed(0)
    x = torch.randn(shape).contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    programs.clear()
    with cupyops.simulate():
        found = gradients(compiled(lambda x: F.interpolate(x.relu(), **options).sigmoid()), x)
    for one, want in zip(found, gradients(lambda x: F.interpolate(x.relu(), **options).sigmoid(), x.double())):
        torch.testing.assert_close(one.double(), want, rtol=1e-5, atol=1e-5)
    left = [name for program in programs for name, _ in program.left]
    whole = "linear" not in options["mode"] or options.get("size") == (33, 2)
    assert left == ["cupyops.interpolate.default", "cupyops.interpolate_backward.default"] * whole


@pytest.mark.parametrize(
    ("shifts", "dims"), [(3, None), ((2, -1), (1, 2)), ((0, 7), (0, 1)), ((0, 0), (1, 2)), ((1, 1), (1, 1))]
)
def test_roll_is_part_of_a_kernel(shifts, dims):
    x = torch.randn(2, 6, 5)
    programs.clear()

    def function(x):
        return (torch.roll(x * 2, shifts, dims) + 1).relu()

    with cupyops.simulate():
        found = gradients(compiled(function), x)
    torch.testing.assert_close(found, gradients(function, x))
    assert not any(program.left for program in programs)


def test_numbers_of_the_cpu_are_constants(monkeypatch):
    """A value that the CPU computes from constants alone becomes a constant on the device that reads it."""

    def step(x):
        return x / torch.sqrt(torch.tensor(12.0) * 3).to(x.dtype)

    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return graph

    x = torch.randn(4)
    torch._dynamo.reset()

    def by(graph, inputs):
        return aot_module_simplified(graph, inputs, fw_compiler=keep)

    torch.compile(step, backend=by, fullgraph=True)(x)
    (graph,) = graphs
    on_a_gpu = next(node for node in graph.graph.nodes if node.target is torch.ops.aten.div.Tensor)
    on_a_gpu.meta["val"] = torch.empty(4, device="meta")  # as if the GPU divided
    values = []
    monkeypatch.setattr(fold, "_put", lambda graph, node, value, *rest: values.append(value.item()))
    fold.apply(graph)
    assert values == [6.0]
    monkeypatch.undo()
    fold.apply(graph)
    (number,) = graph.graph.find_nodes(op="get_attr")
    assert number.meta["val"].device.type == "meta"
    assert not graph.graph.find_nodes(op="call_function", target=torch.ops.aten.sqrt.default)


@pytest.mark.parametrize("last", [False, True], ids=["", "channels_last"])
@pytest.mark.parametrize(
    ("module", "shape"),
    [
        (nn.Conv2d(8, 16, 3, padding=1), (2, 8, 6, 6)),
        (nn.Conv2d(8, 8, 3, padding=1, groups=8), (2, 8, 6, 6)),
        (nn.Conv1d(4, 6, 3), (2, 4, 9)),
        (nn.ConvTranspose2d(8, 4, 2, stride=2), (2, 8, 5, 5)),
    ],
    ids=["conv2d", "depthwise", "conv1d", "transposed"],
)
def test_the_bias_of_a_convolution_is_part_of_kernels(module, shape, last, monkeypatch):
    """It is added where the result is used, and its gradient is a sum beside others."""
    monkeypatch.setattr(decompositions, "BIAS_APART", ("cpu",))
    torch.manual_seed(0)
    x = torch.randn(shape)
    if last and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    parameters = [one.detach().requires_grad_() for one in module.parameters()]

    def function(x, weight, bias):
        return F.gelu(torch.func.functional_call(module, {"weight": weight, "bias": bias}, (x,)))

    forward, backward = assert_as_eager(function, [x.requires_grad_(), *parameters], dynamo=False)
    (node,) = [node for node, _ in forward.lowering.left]
    assert node.args[2] is None
    (node,) = [node for node, _ in backward.lowering.left]
    assert node.args[-1] == [True, True, False]
