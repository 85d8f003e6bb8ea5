"""Models that torchao has quantised, by cupyops.swap, and its tensors as arguments of quantized_linear."""

import copy

import pytest
import torch

import cupyops
from cupyops.integrations.torchao import arguments

torchao = pytest.importorskip("torchao.quantization", reason="torchao is not installed", exc_type=ImportError)
pytestmark = [pytest.mark.filterwarnings("ignore")]

CONFIGS = {
    "int8 by rows": torchao.Int8WeightOnlyConfig(),
    "int8 by tensor": torchao.Int8WeightOnlyConfig(granularity=torchao.PerTensor()),
    "int8 by groups": torchao.Int8WeightOnlyConfig(granularity=torchao.PerGroup(32)),
    "float8 by rows": torchao.Float8WeightOnlyConfig(),
    "float8 by tensor": torchao.Float8WeightOnlyConfig(granularity=torchao.PerTensor()),
    "float8 by groups": torchao.Float8WeightOnlyConfig(granularity=torchao.PerGroup(64)),
}


def quantised(config, dtype=torch.bfloat16):
    torch.manual_seed(0)
    layers = torch.nn.Linear(128, 72), torch.nn.SiLU(), torch.nn.Linear(72, 40, bias=False)
    model = torch.nn.Sequential(*layers).to(dtype)
    torchao.quantize_(model[0], config)
    return model


def layer_in_float64(layer, x):
    """By what torchao says that the weight stands for."""
    return torch.nn.functional.linear(x.double(), layer.weight.dequantize().double(), layer.bias.double())


@pytest.mark.parametrize("name", CONFIGS)
def test_swap(name):
    """Nearer to float64 than torchao's own product, by the kernel; undone, and compiled, it is what it was."""
    model, x = quantised(CONFIGS[name]), torch.randn(5, 128).bfloat16()
    theirs, truth = model(x), layer_in_float64(quantised(CONFIGS[name], torch.float32)[0], x)
    of_layer = model[0](x)
    done = cupyops.swap(model)
    assert ("0", "quantized_linear") in {(one.name, one.what) for one in done.replaced}
    with cupyops.simulate("sm_90"), cupyops.trace() as trace:
        y = model(x)
        ours = model[0](x)
    assert "cupyops::quantized_linear" in {record.operator for record in trace.records}
    assert trace.routes() == {"simulator"}
    assert (ours.double() - truth).norm() <= (of_layer.double() - truth).norm()
    torch.testing.assert_close(y, theirs, rtol=2**-6, atol=2**-6)
    compiled = torch.compile(copy.deepcopy(model), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), theirs, rtol=2**-6, atol=2**-6)
    done.undo()
    assert type(model[0]) is torch.nn.Linear and torch.equal(model(x), theirs)


@pytest.mark.parametrize("name", ["int8 by groups", "float8 by rows"])
def test_gradient_of_the_input(name):
    """The input's gradient is the dequantised layer's, so that what lies in front of a frozen model trains."""
    model, x = quantised(CONFIGS[name], torch.float32), torch.randn(5, 128, requires_grad=True)
    grad = torch.randn(5, 72)
    (theirs,) = torch.autograd.grad(layer_in_float64(model[0], x), x, grad.double())
    cupyops.swap(model)
    (ours,) = torch.autograd.grad(model[0](x), x, grad)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_what_is_kept():
    """Layers that quantise their input too are torchao's, and all are with `exact`."""
    for config, options in (
        (torchao.Int8DynamicActivationInt8WeightConfig(), {}),
        (torchao.Int8WeightOnlyConfig(), {"exact": True}),
    ):
        model = quantised(config)
        kept = {one.name: one.reason for one in cupyops.swap(model, **options).kept}
        assert kept["0"] == "its weight is a Int8Tensor, which may compute something else"


def test_a_weight_that_is_another_later():
    """The layer's own forward takes a weight of another kind."""
    model, x = quantised(CONFIGS["int8 by rows"]), torch.randn(5, 128).bfloat16()
    cupyops.swap(model, only="0")
    model[0].weight = torch.nn.Parameter(torch.ones(72, 128).bfloat16())
    assert torch.equal(model[0](x), torch.nn.functional.linear(x, model[0].weight, model[0].bias))


def test_arguments_are_what_the_tensor_holds():
    for config in CONFIGS.values():
        weight = quantised(config)[0].weight
        stored, scale, zero_point = arguments(weight)
        assert stored is weight.qdata and scale is weight.scale and zero_point is None


@pytest.mark.parametrize("symmetric", [False, True])
def test_int4_plain(symmetric):
    """Signed numbers, the lower four bits first; the weight is number * scale + zero_point, of (groups, rows)."""
    numbers = torch.randint(-8, 8, (24, 128), dtype=torch.int8)
    scale = (torch.rand(4, 24) / 10 + 0.05).bfloat16()
    offset = torch.zeros_like(scale) if symmetric else torch.randn(4, 24).bfloat16()
    packed = (numbers[:, ::2] & 15) | (numbers[:, 1::2] << 4)
    weight = torchao.Int4Tensor(packed, scale, offset, [1, 32], torch.Size([24, 128]))
    dense = numbers.double() * scale.t().double().repeat_interleave(32, 1) + offset.t().double().repeat_interleave(
        32, 1
    )
    x = torch.randn(3, 128).bfloat16()
    with cupyops.simulate("sm_90"), cupyops.trace() as trace:
        y = cupyops.quantized_linear(x, *arguments(weight))
    assert trace.routes() == {"simulator"}
    torch.testing.assert_close(y.double(), x.double() @ dense.t(), rtol=2**-8, atol=1e-4)


def test_arguments_of_anything_else():
    dynamic = quantised(torchao.Int8DynamicActivationInt8WeightConfig())[0].weight
    for weight in (dynamic, torch.ones(2, 2), None):
        with pytest.raises(cupyops.InputError, match=r"weight is of .*, expected torchao's Int8Tensor or Float8Tensor"):
            arguments(weight)
