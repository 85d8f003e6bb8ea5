"""cupyops.nn against torch.nn: constructors, state_dict, repr, values and gradients of each module."""

import contextlib
import copy
import inspect
import io
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import nn

import cupyops


def channels_last(x):
    return x.to(memory_format=torch.channels_last)


@dataclass
class Case:
    """A module by name, its arguments, and what it is called with."""

    name: str
    inputs: Any  # makes the positional inputs on the CPU in float32
    args: tuple = ()
    kwargs: dict = field(default_factory=dict)

    def make(self, package, device="cpu"):
        return getattr(package, self.name)(*self.args, **self.kwargs).to(device)

    def __str__(self):
        shown = [
            *map(repr, self.args),
            *(f"{k}={v!r}" for k, v in self.kwargs.items() if not isinstance(v, torch.Tensor)),
        ]
        return f"{self.name}({', '.join(shown)})"


def normal(*shape):
    return lambda: (torch.randn(shape),)


def scores(shape, classes, log=False, skip=None):
    def make():
        x = torch.randn(shape[0], classes, *shape[1:])
        target = torch.randint(classes, shape)
        if skip is not None:
            target.view(-1)[::3] = skip
        return (x.log_softmax(1) if log else x), target

    return make


def divergence(*shape):
    return lambda: (torch.randn(shape), torch.rand(shape))


IMAGES = normal(2, 4, 7, 9)
WEIGHT = torch.tensor([0.5, 2.0, 1.0, 0.0, 3.0])
CASES = [
    Case("Linear", normal(3, 5), (5, 4)),
    Case("Linear", normal(2, 3, 5), (5, 4), {"bias": False}),
    Case("Dropout", normal(3, 5), (1.0,)),  # all dropped: of the same seed the masks differ
    Case("Conv2d", IMAGES, (4, 6, 3)),
    Case("Conv2d", lambda: (channels_last(torch.randn(2, 4, 7, 9)),), (4, 6, 3), {"padding": 1, "stride": 2}),
    Case("Conv2d", IMAGES, (4, 6, (3, 5)), {"padding": "same", "bias": False, "groups": 2}),
    Case("Conv2d", IMAGES, (4, 8, 3), {"padding": "valid", "dilation": (2, 1)}),
    *[
        Case(
            "Conv2d",
            IMAGES,
            (4, 6, 3),
            {"padding": padding, "padding_mode": mode, "stride": 1 if padding == "same" else 2},
        )
        for mode in ("reflect", "replicate", "circular")
        for padding in ((2, 1), "same")
    ],
    Case("Embedding", lambda: (torch.randint(6, (3, 5)),), (6, 4)),
    Case("Embedding", lambda: (torch.randint(6, (7,)),), (6, 4, 2), {"max_norm": 1.0, "scale_grad_by_freq": True}),
    Case("ReLU", normal(3, 5)),
    Case("ReLU", normal(3, 5), (), {"inplace": True}),
    Case("GELU", normal(3, 5)),
    Case("GELU", normal(3, 5), (), {"approximate": "tanh"}),
    Case("SiLU", normal(3, 5)),
    Case("SiLU", normal(3, 5), (), {"inplace": True}),
    Case("AvgPool2d", IMAGES, (2,)),
    Case("AvgPool2d", IMAGES, (3, 2, 1), {"ceil_mode": True, "count_include_pad": False}),
    Case("MaxPool2d", IMAGES, (2,)),
    Case("MaxPool2d", IMAGES, (3,), {"stride": 2, "padding": 1, "ceil_mode": True}),
    Case("MaxPool2d", IMAGES, ((2, 3),), {"dilation": 2, "return_indices": True}),
    Case("Softmax", normal(3, 5), (1,)),
    Case("Softmax", normal(3, 5, 2), (), {"dim": -2}),
    Case("LogSoftmax", normal(3, 5), (1,)),
    Case("LogSoftmax", normal(3, 5, 2), (), {"dim": 0}),
    Case("KLDivLoss", divergence(3, 5), (), {"reduction": "batchmean"}),
    Case("KLDivLoss", divergence(2, 3, 4), (), {"reduction": "none", "log_target": True}),
    Case("NLLLoss", scores((6,), 5, log=True)),
    Case("NLLLoss", scores((6,), 5, log=True, skip=2), (), {"weight": WEIGHT, "ignore_index": 2, "reduction": "sum"}),
    Case("NLLLoss", scores((2, 3, 4), 5, log=True), (), {"reduction": "none"}),
    Case("CrossEntropyLoss", scores((6,), 5)),
    Case("CrossEntropyLoss", scores((6,), 5, skip=-100), (), {"weight": WEIGHT, "label_smoothing": 0.1}),
    Case("CrossEntropyLoss", scores((2, 3, 4), 5, skip=1), (), {"ignore_index": 1, "reduction": "none"}),
    Case("CrossEntropyLoss", lambda: (torch.randn(6, 5), torch.rand(6, 5)), (), {"label_smoothing": 0.2}),
    Case("BatchNorm1d", normal(6, 5), (5,)),
    Case("BatchNorm1d", normal(3, 4, 7), (4,), {"affine": False}),
    Case("BatchNorm2d", IMAGES, (4,), {"momentum": 0.3, "eps": 1e-3}),
    Case("BatchNorm2d", lambda: (channels_last(torch.randn(2, 4, 7, 9)),), (4,), {"track_running_stats": False}),
    Case("BatchNorm3d", normal(2, 3, 4, 2, 3), (3,)),
    Case("GroupNorm", IMAGES, (2, 4)),
    Case("GroupNorm", normal(3, 6), (3, 6), {"affine": False, "eps": 1e-3}),
    Case("LayerNorm", normal(3, 5), (5,)),
    Case("LayerNorm", normal(3, 4, 5), ((4, 5),), {"eps": 1e-3, "bias": False}),
    Case("LayerNorm", normal(3, 5), (5,), {"elementwise_affine": False}),
    Case("RMSNorm", normal(3, 5), (5,)),
    Case("RMSNorm", normal(3, 4, 5), ((4, 5),), {"eps": 1e-3, "elementwise_affine": False}),
]
each = pytest.mark.parametrize("case", CASES, ids=str)
OPERATORS = {
    "Linear": "linear", "Conv2d": "conv2d", "ReLU": "relu", "GELU": "gelu", "SiLU": "silu", "MaxPool2d": "max_pool2d",
    "AvgPool2d": "avg_pool2d",
    "Softmax": "softmax", "LogSoftmax": "log_softmax", "NLLLoss": "nll_loss", "CrossEntropyLoss": "cross_entropy",
    "KLDivLoss": "kl_div", "LayerNorm": "layer_norm", "RMSNorm": "rms_norm", "GroupNorm": "group_norm",
    "Embedding": "embedding",
    "BatchNorm1d": "batch_norm", "BatchNorm2d": "batch_norm", "BatchNorm3d": "batch_norm", "Dropout": "dropout",
}  # fmt: skip


@pytest.fixture(autouse=True)
def exact_convolutions():
    """cuDNN would round fp32 inputs to tf32."""
    before, torch.backends.cudnn.allow_tf32 = torch.backends.cudnn.allow_tf32, False
    yield
    torch.backends.cudnn.allow_tf32 = before


def run(module, inputs):
    """The output and the gradients of inputs and parameters, all of them named."""
    leaves = [x.detach().clone().requires_grad_(x.is_floating_point()) for x in inputs]
    arguments = [x.clone() if x.requires_grad else x for x in leaves]  # an in-place module may not write to a leaf
    output = module(*arguments)
    first = output[0] if isinstance(output, tuple) else output
    torch.manual_seed(3)
    first.backward(torch.randn_like(first))
    found = {f"output {i}": y.detach() for i, y in enumerate(output if isinstance(output, tuple) else (output,))}
    found |= {f"grad of input {i}": x.grad for i, x in enumerate(leaves)}
    return found | {f"grad of {name}": p.grad for name, p in module.named_parameters()}


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, a in ours.items():
        b = theirs[name]
        assert (a is None) == (b is None), name
        if a is not None:
            torch.testing.assert_close(a, b, msg=lambda text, name=name: f"{name}: {text}")
            assert a.stride() == b.stride(), name


def test_every_module_has_a_case():
    elsewhere = {"MultiheadAttention"}  # which is called with more than tensors: test_multihead_attention.py
    assert {case.name for case in CASES} | elsewhere == {name for name in cupyops.nn.__all__ if hasattr(nn, name)}


@each
def test_values_and_gradients(case, device):
    torch.manual_seed(1)
    ours, theirs = case.make(cupyops.nn, device), case.make(nn, device)
    theirs.load_state_dict(ours.state_dict())
    inputs = [x.to(device) for x in case.inputs()]
    assert_same(run(ours, inputs), run(theirs, inputs))


@each
def test_state_dict_both_ways(case):
    ours, theirs = case.make(cupyops.nn), case.make(nn)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert all(torch.equal(a, b) for a, b in zip(ours.state_dict().values(), theirs.state_dict().values()))
    theirs.load_state_dict(ours.state_dict())


@each
def test_same_start(case):
    """The same seed gives the same weights as torch.nn."""
    states = []
    for package in (cupyops.nn, nn):
        torch.manual_seed(5)
        states.append(case.make(package).state_dict())
    assert all(torch.equal(a, b) for a, b in zip(states[0].values(), states[1].values()))


@each
def test_repr_and_kind(case):
    ours, theirs = case.make(cupyops.nn), case.make(nn)
    assert repr(ours) == repr(theirs)
    assert isinstance(ours, type(theirs))


@pytest.mark.parametrize("name", OPERATORS)
def test_constructor_is_torch_s(name):
    ours, theirs = (inspect.signature(getattr(package, name).__init__) for package in (cupyops.nn, nn))
    assert ours == theirs


@each
def test_runs_the_operator(case):
    with cupyops.trace() as trace:
        case.make(cupyops.nn)(*case.inputs())
    assert any(record.operator.startswith(f"cupyops::{OPERATORS[case.name]}") for record in trace.records), str(trace)


@each
@pytest.mark.gpu
def test_runs_the_kernels(case):
    inputs = [x.cuda().requires_grad_(x.is_floating_point()) for x in case.inputs()]
    with cupyops.trace() as trace:
        output = case.make(cupyops.nn, "cuda")(*[x.clone() if x.requires_grad else x for x in inputs])
        (output[0] if isinstance(output, tuple) else output).sum().backward()
    assert "reference" not in trace.routes(), str(trace)


@each
def test_copies(case):
    module, inputs = case.make(cupyops.nn), case.inputs()
    expected = module(*[x.clone() for x in inputs])
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert type(other) is type(module)
        torch.testing.assert_close(other(*[x.clone() for x in inputs]), expected)


@each
def test_compile(case, device):
    # with deterministic algorithms on, PyTorch's padding imports a module as it runs, which Dynamo cannot follow
    torch.use_deterministic_algorithms(False)
    torch._dynamo.reset()
    module = case.make(cupyops.nn, device)
    inputs = [x.to(device) for x in case.inputs()]
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*[x.clone() for x in inputs]), module(*[x.clone() for x in inputs]))


@each
@pytest.mark.parametrize("grown", [False, True], ids=["other values", "a larger batch"])
@pytest.mark.parametrize("backend", ["reference", "simulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_jit_trace(case, grown, backend):
    """What is recorded is the reference, and the statistics that it updates."""
    torch.use_deterministic_algorithms(
        False
    )  # else PyTorch's padding calls what cannot be traced on a GPU, its own too
    device = "cuda" if backend == "gpu" else "cpu"
    module, inputs = case.make(cupyops.nn, device), [x.to(device) for x in case.inputs()]
    other = copy.deepcopy(module)
    with cupyops.simulate() if backend == "simulator" else contextlib.nullcontext():
        traced = torch.jit.trace(module, [x.clone() for x in inputs], check_trace=False)
    module.load_state_dict(other.state_dict())
    inputs = [x.roll(1, 0) for x in inputs]
    inputs = [torch.cat([x, x]) for x in inputs] if grown else inputs
    torch.testing.assert_close(traced(*[x.clone() for x in inputs]), other(*[x.clone() for x in inputs]))
    torch.testing.assert_close(module.state_dict(), other.state_dict())


@each
@pytest.mark.filterwarnings("ignore")  # the exporter's own, of what it does to the model
def test_onnx_export(case):
    """The exporter that traces takes the reference, too. It needs a package of its own to write what it has."""
    module, inputs = case.make(cupyops.nn).eval(), tuple(case.inputs())
    with cupyops.simulate(), cupyops.trace() as trace, contextlib.suppress(torch.onnx.errors.OnnxExporterError):
        torch.onnx.export(module, inputs, io.BytesIO(), dynamo=False)
    assert trace.routes() <= {"reference"}
    if case.name != "Dropout":  # which does nothing here
        assert {record.note for record in trace.records} == {"torch.jit.trace"}


def test_factory_arguments():
    layer = cupyops.nn.Conv2d(1, 2, 3, device="meta", dtype=torch.float16)
    assert layer.weight.is_meta and layer.weight.dtype == torch.float16
    layer = cupyops.nn.ScaleShift(3, device="meta", dtype=torch.float64)
    assert layer.bias.is_meta and layer.bias.dtype == torch.float64


def test_swap_in_a_model(device):
    """A trained torch.nn model, its weights loaded into the cupyops twin: the same output."""

    def model(package):
        layers = package.Conv2d(1, 4, 3, padding=1), package.ReLU(), package.MaxPool2d(2), nn.Flatten()
        return nn.Sequential(*layers, package.Linear(36, 5), package.LogSoftmax(dim=1)).to(device)

    theirs, ours = model(nn), model(cupyops.nn)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 1, 6, 6, device=device)
    torch.testing.assert_close(ours(x), theirs(x))


# --- AddRMSNorm and ScaleShift, which torch.nn has not ---


def test_add_rms_norm(device):
    layer = cupyops.nn.AddRMSNorm(5, eps=0.1).to(device)
    torch.nn.init.normal_(layer.weight)
    norm = torch.nn.RMSNorm(5, eps=0.1).to(device)
    norm.load_state_dict(layer.state_dict())
    x, residual = (torch.randn(3, 5, device=device) for _ in range(2))
    torch.testing.assert_close(layer(x, residual), (norm(x + residual), x + residual))


# --- BatchNorm, which keeps statistics ---


@pytest.mark.parametrize("momentum", [0.1, None])
def test_running_statistics(device, momentum):
    ours, theirs = (package.BatchNorm2d(3, momentum=momentum).to(device) for package in (cupyops.nn, nn))
    for _ in range(3):
        x = torch.randn(2, 3, 4, 5, device=device)
        torch.testing.assert_close(ours(x), theirs(x))
    assert ours.num_batches_tracked == 3
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value)
    before = {name: value.clone() for name, value in ours.state_dict().items()}
    ours.eval(), theirs.eval()
    torch.testing.assert_close(ours(x), theirs(x))
    assert all(torch.equal(value, before[name]) for name, value in ours.state_dict().items())


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_batch_norm_refuses_other_dimensions(dims):
    module = getattr(cupyops.nn, f"BatchNorm{dims}d")(3)
    with pytest.raises(ValueError, match=f"expected {'2D or 3D' if dims == 1 else f'{dims + 2}D'} input"):
        module(torch.zeros([2, 3] + [4] * (dims + 1)))


# --- FusedLinearCrossEntropyLoss, which torch.nn has not ---


@pytest.mark.parametrize("bias", [False, True])
def test_linear_cross_entropy_is_a_layer_and_a_loss(bias, device):
    head, x = nn.Linear(5, 7, bias=bias, device=device), torch.randn(4, 5, device=device, requires_grad=True)
    options = {"weight": torch.rand(7, device=device), "ignore_index": 2, "label_smoothing": 0.1}
    target = torch.tensor([0, 2, 6, 3], device=device)
    y = cupyops.nn.FusedLinearCrossEntropyLoss(**options)(x, head.weight, target, head.bias)
    expected = nn.CrossEntropyLoss(**options)(head(x), target)
    torch.testing.assert_close(y, expected)
    leaves = [x, *head.parameters()]
    torch.testing.assert_close(torch.autograd.grad(y, leaves), torch.autograd.grad(expected, leaves))


# --- ScaleShift, which torch.nn has not ---


@pytest.mark.parametrize(
    ("features", "shape", "shown"),
    [
        (None, (), "scalar"),
        ((), (), "scalar"),
        (5, (5,), "5"),
        ((4, 5), (4, 5), "(4, 5)"),
        (torch.Size([5]), (5,), "5"),
    ],
)
@pytest.mark.parametrize("bias", [True, False])
def test_scale_shift(device, features, shape, shown, bias):
    layer = cupyops.nn.ScaleShift(features, bias=bias).to(device)
    assert layer.weight.shape == shape and torch.all(layer.weight == 1)
    assert (layer.bias is None) is not bias and (not bias or (layer.bias.shape == shape and torch.all(layer.bias == 0)))
    assert repr(layer) == f"ScaleShift({shown}, bias={bias})"
    assert list(layer.state_dict()) == (["weight", "bias"] if bias else ["weight"])
    x = torch.randn(3, 4, 5, device=device)
    assert torch.equal(layer(x), x)
    with torch.no_grad():
        for p in layer.parameters():
            p.normal_()
    plain = nn.Module()
    plain.register_parameter("weight", nn.Parameter(layer.weight.detach().clone()))
    plain.register_parameter("bias", nn.Parameter(layer.bias.detach().clone()) if bias else None)
    plain.forward = lambda x: x * plain.weight + (plain.bias if bias else 0)
    assert_same(run(layer, [x]), run(plain, [x]))
    layer.reset_parameters()
    assert torch.equal(layer(x), x)


@pytest.mark.parametrize("activation", ["relu", None])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_batch_norm_act(device, momentum, activation):
    """The state is BatchNorm2d's; in training and not, with a residual and without."""
    ours = cupyops.nn.BatchNormAct2d(8, momentum=momentum, activation=activation).to(device)
    theirs = nn.BatchNorm2d(8, momentum=momentum).to(device)
    torch.nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    for training in (True, True, False):
        for added in ((), (torch.randn(2, 8, 4, 5, device=device),)):
            x = torch.randn(2, 8, 4, 5, device=device)
            ours.train(training), theirs.train(training)
            expected = sum(added, theirs(x))
            expected = expected.relu() if activation else expected
            torch.testing.assert_close(ours(x, *added), expected)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())
    assert repr(ours).endswith(f", activation={activation!r})")
    with pytest.raises(cupyops.InputError, match="activation is 'gelu'"):
        cupyops.nn.BatchNormAct2d(8, activation="gelu")
