"""cupyops.swap: modules of torch.nn become those of cupyops.nn, nothing else changes, and it can be undone."""

import copy
import io
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import cupyops
from cupyops.nn._swap.classes import twins

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*torch.jit.script.*deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
]


def convnet():
    layers = nn.Conv2d(2, 4, 3, padding=1, padding_mode="reflect"), nn.ReLU(inplace=True), nn.MaxPool2d(2)
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(36, 5), nn.LayerNorm(5), nn.GELU("tanh"), nn.LogSoftmax(1))


class Residual(nn.Module):
    """One module at two places, and a head whose weight is another's."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.norms = nn.ModuleDict({"a": nn.LayerNorm(4), "b": nn.LayerNorm(4, elementwise_affine=False)})
        self.act = nn.SiLU()
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.first.weight

    def forward(self, x):
        x = x + self.act(self.norms["a"](self.first(x)))
        return self.head(self.norms["b"](self.again(x)))


MODELS = {
    "convnet": (convnet, lambda: torch.randn(3, 2, 6, 6)),
    "residual": (Residual, lambda: torch.randn(3, 4)),
    "root": (lambda: nn.Linear(4, 3), lambda: torch.randn(2, 4)),
    "transformer": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), 2, enable_nested_tensor=True
        ),
        lambda: torch.randn(2, 5, 8),
    ),
}


@pytest.fixture(params=MODELS)
def model_and_input(request):
    make, inputs = MODELS[request.param]
    return make().double(), inputs().double()


def run(model, x):
    """The output, and the gradients of input and parameters."""
    x = x.clone().requires_grad_()
    model.zero_grad()
    y = model(x.clone())
    y.square().sum().backward()
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def types(model):
    return {name: type(module) for name, module in model.named_modules(remove_duplicate=False)}


def test_every_module_with_a_twin_is_found():
    names = {ours.__name__ for ours in twins().values()}
    assert names == {name for name in cupyops.nn.__all__ if hasattr(nn, name)}
    assert all(theirs is getattr(nn, ours.__name__) for theirs, ours in twins().items())


# --- results -----------------------------------------------------------------------------------------------------


def test_same_results_and_undo(model_and_input):
    model, x = model_and_input
    before, classes, expected = repr(model), types(model), run(model, x)
    swap = cupyops.swap(model)
    assert swap.replaced
    for one in swap.replaced:
        module = model.get_submodule(one.name)
        assert type(module) is one.by and one.type is classes[one.name] and issubclass(one.by, one.type)
    assert repr(model) == before
    torch.testing.assert_close(run(model, x), expected)
    swap.undo()
    assert types(model) == classes and all(map(torch.equal, run(model, x), expected))


def test_runs_the_operators(model_and_input):
    model, x = model_and_input
    with cupyops.swap(model) as swap, cupyops.trace() as trace:
        model(x)
    ran = " ".join(record.operator.replace("_", "") for record in trace.records)
    ours = {one.by for one in swap.replaced} - {cupyops.nn.Dropout}  # which passes its input on where p is 0
    names = {"MultiheadAttention": "scaleddotproductattention"}
    assert all(names.get(one.__name__, one.__name__.lower()) in ran for one in ours), str(trace)


def test_in_the_simulator():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.LayerNorm(4), nn.Dropout(0.0)).double()
    x = torch.randn(2, 3, dtype=torch.float64)
    expected = run(model, x)
    with cupyops.swap(model), cupyops.simulate(), cupyops.trace() as trace:
        torch.testing.assert_close(run(model, x), expected)
    assert trace.routes() == {"simulator"}
    assert {record.operator.split()[0] for record in trace.records} == {
        f"cupyops::{n}" for n in ("linear", "relu", "layer_norm")
    }


@pytest.mark.gpu
def test_on_the_gpu():
    model, x = convnet().cuda(), torch.randn(3, 2, 6, 6, device="cuda")
    expected = run(model, x)
    with cupyops.swap(model), cupyops.trace() as trace:
        torch.testing.assert_close(run(model, x), expected, rtol=1e-4, atol=1e-4)
    assert "kernel" in trace.routes() and trace.launches()


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("fastpath", [False, True])
def test_transformer_in_eval_mode(norm_first, fastpath):
    """By PyTorch's fused kernel, which passes our modules by, and module by module; with padding too."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True, norm_first=norm_first)
    model = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), enable_nested_tensor=not norm_first).double().eval()
    x, padding = torch.randn(2, 5, 8, dtype=torch.float64), torch.arange(5) > torch.tensor([[4], [2]])
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(fastpath)
    try:
        with torch.no_grad():
            expected = model(x), model(x, src_key_padding_mask=padding)
            with cupyops.swap(model) as swap, cupyops.trace() as trace:
                torch.testing.assert_close((model(x), model(x, src_key_padding_mask=padding)), expected)
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    assert ("cupyops::linear" in {record.operator for record in trace.records}) is not fastpath
    reasons = {one.type: one.reason for one in swap.kept}
    assert "set_fastpath_enabled(False)" in reasons[nn.TransformerEncoderLayer]
    assert nn.MultiheadAttention not in reasons
    attended = "cupyops::scaled_dot_product_attention" in {record.operator for record in trace.records}
    assert attended is not fastpath


def test_compiled_before_and_after():
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    x = torch.randn(2, 3)
    expected = model(x)
    seen = []

    def backend(graph, inputs):
        seen.append(any("cupyops.linear" in str(node.target) for node in graph.graph.nodes))
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    torch.testing.assert_close(compiled(x), expected)
    with cupyops.swap(compiled) as swap:
        assert [one.name for one in swap.replaced] == ["_orig_mod.0", "_orig_mod.1"]
        torch.testing.assert_close(compiled(x), expected)
    torch.testing.assert_close(compiled(x), expected)
    assert seen == [False, True]  # the first graph serves again when the classes are back


# --- what stays --------------------------------------------------------------------------------------------------


def test_everything_else_stays():
    model = Residual()
    model.act.mine = "kept"
    model.norms["a"].weight.requires_grad_(False)
    model.first.eval()
    model.first.weight.data = model.first.weight.data.half()
    calls = []
    model.first.register_forward_hook(lambda *_: calls.append("forward"))
    model.first.register_forward_pre_hook(lambda *_: calls.append("before"))
    model.head.register_full_backward_hook(lambda *_: calls.append("backward"))
    model.act.register_state_dict_post_hook(lambda *_: calls.append("state"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    modules, state = dict(model.named_modules(remove_duplicate=False)), model.state_dict()
    parameters = [*model.parameters(), *(p for group in optimizer.param_groups for p in group["params"])]
    calls.clear()

    cupyops.swap(model)
    assert all(modules[name] is one for name, one in model.named_modules(remove_duplicate=False))
    assert model.first is model.again and model.head.weight is model.first.weight
    after = [*model.parameters(), *(p for group in optimizer.param_groups for p in group["params"])]
    assert all(map(lambda a, b: a is b, after, parameters))
    assert model.act.mine == "kept" and not model.first.training and model.act.training
    assert not model.norms["a"].weight.requires_grad and model.first.weight.dtype == torch.float16
    assert list(model.state_dict()) == list(state) and calls == ["state"]
    model.float()
    calls.clear()
    model(torch.randn(2, 4)).sum().backward()
    assert calls == ["before", "forward"] * 2 + ["backward"]
    optimizer.step()


def test_memory_format_stays():
    model = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    cupyops.swap(model)
    assert model.weight.is_contiguous(memory_format=torch.channels_last)


def test_a_shared_module_is_told_under_each_name():
    swap = cupyops.swap(Residual())
    assert [one.name for one in swap.replaced][:2] == ["first", "again"]


def test_state_dict_both_ways():
    torch.manual_seed(1)
    theirs, ours = convnet(), convnet()
    cupyops.swap(ours)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(3, 2, 6, 6)
    torch.testing.assert_close(ours(x), theirs(x))
    theirs.load_state_dict(ours.state_dict())


def test_copies(model_and_input):
    model, x = model_and_input
    cupyops.swap(model)
    expected = model(x)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert types(other) == types(model)
        torch.testing.assert_close(other(x), expected)


# --- parametrizations --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_parametrized(make):
    model = nn.Sequential(make(nn.Linear(3, 3)), nn.ReLU()).eval()
    x = torch.randn(2, 3)
    expected, names = run(model, x), list(model.state_dict())
    other = copy.deepcopy(model)  # shares its class with the original
    swap = cupyops.swap(model)
    assert isinstance(model[0], cupyops.nn.Linear) and not isinstance(other[0], cupyops.nn.Linear)
    assert parametrize.is_parametrized(model[0], "weight") and list(model.state_dict()) == names
    with cupyops.trace() as trace:
        torch.testing.assert_close(run(model, x), expected)
    assert {"cupyops::linear", "cupyops::relu"} <= {record.operator for record in trace.records}
    assert not swap.kept
    torch.testing.assert_close(run(copy.deepcopy(model), x), expected)
    swap.undo()
    assert not isinstance(model[0], cupyops.nn.Linear) and isinstance(model[0], nn.Linear)
    torch.testing.assert_close(run(model, x), expected)


def test_parametrized_and_no_more():
    """Whatever a module's class was made into meanwhile, undo finds the way back."""
    model = parametrizations.weight_norm(nn.Linear(3, 3))
    swap = cupyops.swap(model)
    parametrize.remove_parametrizations(model, "weight")
    assert type(model) is cupyops.nn.Linear
    swap.undo()
    assert type(model) is nn.Linear

    model = nn.Linear(3, 3)
    swap = cupyops.swap(model)
    parametrizations.orthogonal(model)
    swap.undo()
    assert not isinstance(model, cupyops.nn.Linear) and parametrize.is_parametrized(model, "weight")
    parametrize.remove_parametrizations(model, "weight")
    assert type(model) is nn.Linear


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_parametrizations_by_hooks():
    model = nn.utils.weight_norm(nn.Linear(3, 3))
    prune.l1_unstructured(model, "bias", 1)
    x = torch.randn(2, 3)
    expected = model(x)
    assert cupyops.swap(model).replaced
    torch.testing.assert_close(model(x), expected)


# --- what is kept ------------------------------------------------------------------------------------------------


class Transposed(nn.Linear):
    def forward(self, input):
        return input @ self.weight


class Leaf(nn.Module):
    def forward(self, x):
        return x


def test_kept_and_why():
    patched = nn.Linear(2, 2)
    patched.forward = lambda x: x
    convolution = nn.Conv2d(1, 1, 1)
    convolution._conv_forward = lambda *_: None
    model = nn.ModuleDict(
        {
            "subclass": Transposed(2, 2),
            "parametrized_subclass": parametrizations.weight_norm(Transposed(2, 2)),
            "lazy": nn.LazyLinear(2),
            "patched": patched,
            "convolution": convolution,
            "sigmoid": nn.Sigmoid(),
            "leaf": Leaf(),
            "script": torch.jit.script(nn.Linear(2, 2)),
            "quantized": torch.ao.nn.qat.Linear(2, 2, qconfig=torch.ao.quantization.default_qat_qconfig),
            "empty": nn.Sequential(),
            "ours": cupyops.nn.ScaleShift(),
        }
    )
    classes = types(model)
    swap = cupyops.swap(model)
    assert not swap.replaced and types(model) == classes
    reasons = {one.name: one.reason for one in swap.kept}
    assert {name: reason for name, reason in reasons.items() if "." not in name} == {
        "subclass": "a subclass of torch.nn.Linear, which may compute something else",
        "parametrized_subclass": "a subclass of torch.nn.Linear, which may compute something else",
        "lazy": "lazy: swap after the first call, which makes its parameters",
        "patched": "its forward was replaced on the object itself",
        "convolution": "its _conv_forward was replaced on the object itself",
        "sigmoid": "cupyops.nn has no Sigmoid",
        "leaf": "no module of torch.nn",
        "script": "a ScriptModule, whose code is fixed",
        "quantized": "quantized, or prepared for it",
    }


def test_lazy_after_the_first_call():
    model = nn.LazyLinear(2)
    model(torch.ones(1, 3))
    cupyops.swap(model)
    assert type(model) is cupyops.nn.Linear


def test_twice():
    model = convnet()
    first = cupyops.swap(model)
    second = cupyops.swap(model)
    assert not second.replaced and second.kept == first.kept
    second.undo()
    assert type(model[1]) is cupyops.nn.ReLU
    first.undo()
    first.undo()
    assert not any(one.__module__.startswith("cupyops") for one in types(model).values())


def test_undone_also_after_an_error():
    model = convnet()
    with pytest.raises(ZeroDivisionError), cupyops.swap(model):
        raise ZeroDivisionError
    assert type(model[1]) is nn.ReLU


# --- only and skip -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({"only": nn.Linear}, {"0.0", "1.0"}),
        ({"only": cupyops.nn.Linear}, {"0.0", "1.0"}),
        ({"only": "1"}, {"1.0", "1.1"}),
        ({"only": ["0.1", nn.Softmax]}, {"0.1", "2"}),
        ({"only": nn.Sequential}, {"0.0", "0.1", "1.0", "1.1", "2"}),
        ({"skip": "1"}, {"0.0", "0.1", "2"}),
        ({"skip": (nn.Linear, "2")}, {"0.1", "1.1"}),
        ({"only": "1", "skip": nn.Linear}, {"1.1"}),
        ({"only": []}, set()),
    ],
)
def test_choices(choice, expected):
    parts = [nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(2)]
    swap = cupyops.swap(nn.Sequential(*parts, nn.Softmax(1)), **choice)
    assert {one.name for one in swap.replaced} == expected
    assert {one.name for one in swap.kept} == {"0.0", "0.1", "1.0", "1.1", "2"} - expected
    assert {one.reason for one in swap.kept} <= {"only does not name it", "skip names it"}


def test_a_shared_module_is_skipped_by_either_name():
    model = Residual()
    assert {one.name for one in cupyops.swap(model, skip="again").kept} == {"first", "again"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2),), "model is Tensor, expected a torch.nn.Module"),
        ((nn.Linear,), "model is type, expected"),
    ],
)
def test_models_that_are_none(arguments, message):
    with pytest.raises(cupyops.InputError, match=message):
        cupyops.swap(*arguments)


def test_script_modules_are_refused():
    with pytest.raises(cupyops.InputError, match="ScriptModule, whose code is fixed; swap before"):
        cupyops.swap(torch.jit.script(nn.Linear(2, 2)))


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"only": "layer.l"}, "only names 'layer.l', but the model has no module of that name; is it 'layer.0'?"),
        (
            {"skip": ["zzz"]},
            "skip names 'zzz', but the model has no module of that name; see model.named_modules\\(\\)$",
        ),
        ({"skip": int}, "skip has <class 'int'>, expected a type of module or the name of one"),
        ({"only": [3]}, "only has 3, expected"),
    ],
)
def test_wrong_choices_change_nothing(choice, message):
    model = nn.ModuleDict({"layer": nn.Sequential(nn.Linear(2, 2))})
    with pytest.raises(cupyops.InputError, match=message.replace("?", r"\?")):
        cupyops.swap(model, **choice)
    assert type(model["layer"][0]) is nn.Linear


def test_printed():
    text = str(cupyops.swap(nn.Sequential(nn.Linear(2, 2), nn.Sigmoid())))
    assert text.splitlines() == [
        "1 replaced, 1 kept",
        "modules  type              outcome",
        "-" * 58,
        "0        torch.nn.Linear   now cupyops.nn.Linear",
        "1        torch.nn.Sigmoid  kept: cupyops.nn has no Sigmoid",
    ]
    assert "(the model)  torch.nn.Linear" in str(cupyops.swap(nn.Linear(2, 2)))


def test_modules_of_a_class_are_one_line():
    text = str(cupyops.swap(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))))
    assert text.splitlines()[-1] == "0 and 2 more  torch.nn.Linear  now cupyops.nn.Linear"


def test_an_undone_swap_keeps_nothing_alive():
    model = nn.Linear(2, 2)
    swap, gone = cupyops.swap(model), weakref.ref(model)
    swap.undo()
    del model
    assert gone() is None
