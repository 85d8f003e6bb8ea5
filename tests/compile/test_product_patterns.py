"""Products and what follows them in one operator: found in the graphs of a model, right, and left alone elsewhere."""

import copy

import pytest
import torch
import torch.nn.functional as F
from compiled import assert_as_eager, compiled

import cupyops
from cupyops._compile import patterns
from cupyops._compile.backend import programs
from cupyops._compile.patterns import losses
from cupyops._dispatch.gemm import epilogues
from cupyops.testing import assume_gpu

HALF = torch.bfloat16
HOPPER = {"capability": 9, "multiprocessors": 132, "shared": 232448, "library": True}
FUNCTIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


def tensors(*shapes, dtype=HALF):
    torch.manual_seed(0)
    return [torch.randn(shape).div(shape[-1] ** 0.25).to(dtype).requires_grad_() for shape in shapes]


def names(made):
    """Names of the operators of this library in programs, in order."""
    called = [name for program in made for name, _ in program.left]
    return [name.removeprefix("cupyops.").removesuffix(".default") for name in called if name.startswith("cupyops.")]


def layer(activation):
    def run(x, weight, bias, down):
        return F.linear(FUNCTIONS[activation](F.linear(x, weight, bias)), down)

    return run


SHAPES = (2, 8, 32), (48, 32), (48,), (16, 48)


@pytest.mark.parametrize("activation", FUNCTIONS)
def test_an_activation_of_a_layer(activation):
    made = assert_as_eager(layer(activation), tensors(*SHAPES))
    assert names(made) == ["linear_act"]
    assert not made[0].kernels


@pytest.mark.parametrize("dtype", [torch.float16, HALF])
def test_without_a_bias_and_of_a_matrix(dtype):
    def run(x, weight, down):
        return F.gelu(x @ weight.T) @ down

    assert names(assert_as_eager(run, tensors((16, 32), (48, 32), (48, 16), dtype=dtype), dynamo=False)) == [
        "linear_act"
    ]


def test_without_a_gradient_nothing_is_kept():
    given = [x.detach() for x in tensors(*SHAPES)]
    (program,) = assert_as_eager(layer("gelu"), given)
    (node,) = [node for node, _ in program.lowering.left if "linear_act" in str(node.target)]
    assert names([program]) == ["linear_act"] and node.args[-1] is False


def test_under_autocast_with_parameters_of_float32():
    def run(*args):
        with torch.autocast("cpu", HALF):
            return layer("gelu")(*args)

    made = assert_as_eager(run, tensors(*SHAPES, dtype=torch.float32), factor=8)
    assert names(made) == ["linear_act", *["product_in_full"] * 3]


LEFT = {
    "what follows the activation is computed with it": lambda x, w, b, d: F.gelu(F.linear(x, w, b)) * 2.5,
    "something stands between": lambda x, w, b, d: F.linear(F.gelu(F.linear(x, w, b) + 1), d),
    "relu of a product that backward reads": lambda x, w, b, d: (
        F.linear(F.relu(z := F.linear(x, w, b)), d).sum() + z.sin().sum()
    ),
    "another activation": lambda x, w, b, d: F.linear(torch.tanh(F.linear(x, w, b)), d),
    "a bias for each row": lambda x, w, b, d: F.gelu(torch.addmm(x.new_ones(16, 48), x.view(16, 32), w.T)) @ d.T,
    "a product that is added to half of itself": lambda x, w, b, d: (
        F.gelu(torch.addmm(b, x.view(16, 32), w.T, beta=0.5)) @ d.T
    ),
    "a weight that lies the other way": lambda x, w, b, d: F.gelu(x.view(16, 32) @ w.view(32, 48)) @ d.T,
}


@pytest.mark.parametrize("why", LEFT)
def test_what_is_no_activation_of_a_layer(why):
    assert "linear_act" not in names(assert_as_eager(LEFT[why], tensors(*SHAPES), dynamo=False))


def test_a_product_with_another_reader_is_kept_for_it():
    def run(x, w, b, d):
        z = F.linear(x, w, b)
        return F.linear(F.gelu(z), d), z.sin()

    assert names(assert_as_eager(run, tensors(*SHAPES), dynamo=False)) == ["linear_act"]


def test_float32_sizes_that_change_and_exact_rounding_are_left_alone():
    assert names(assert_as_eager(layer("gelu"), tensors(*SHAPES, dtype=torch.float32))) == []
    assert names(assert_as_eager(layer("gelu"), tensors(*SHAPES), dynamic=True)) == []
    assert names(assert_as_eager(layer("gelu"), tensors(*SHAPES), options={"exact": True})) == []


def test_a_maximum_whose_gradient_compares_values_leaves_them_as_rounded_as_backward_finds_them():
    def run(x, w, b, d):
        return F.linear(F.gelu(F.linear(x, w, b)), d).amax(-1)

    assert names(assert_as_eager(run, tensors(*SHAPES), dynamo=False)) == []


def gated(activation):
    def run(x, gate, up, down):
        return F.linear(FUNCTIONS[activation](F.linear(x, gate)) * F.linear(x, up), down)

    return run


GATED = (2, 8, 32), (48, 32), (48, 32), (16, 48)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_a_gate_of_two_layers(activation):
    made = assert_as_eager(gated(activation), tensors(*GATED))
    assert names(made) == ["gated_linear"]
    assert not made[0].kernels
    assert names(assert_as_eager(gated(activation), [x.detach() for x in tensors(*GATED)])) == ["gated_linear"]


def test_a_gate_that_is_the_second_factor_and_computed_first():
    def run(x, gate, up, down):
        up = F.linear(x, up)
        return F.linear(up * F.silu(F.linear(x, gate)), down)

    assert names(assert_as_eager(run, tensors(*GATED))) == ["gated_linear"]


@pytest.mark.parametrize("swapped", [False, True])
def test_a_gate_of_the_halves_of_one_layer(swapped):
    def run(x, both, down):
        gate, up = F.linear(x, both).chunk(2, -1)
        return F.linear(up * F.silu(gate) if not swapped else gate * F.silu(up), down)

    made = assert_as_eager(run, tensors((2, 8, 32), (96, 32), (16, 48)))
    assert names(made) == ([] if swapped else ["gated_linear"])
    assert bool(made[0].kernels) == swapped


NO_GATE = {
    "a layer with a bias": lambda x, g, u, d: F.linear(F.silu(F.linear(x, g, g[:, 0])) * F.linear(x, u), d),
    "layers of two inputs": lambda x, g, u, d: F.linear(F.silu(F.linear(x, g)) * F.linear(x + 1, u), d),
    "the gate is read by something else": lambda x, g, u, d: (
        F.linear((a := F.silu(F.linear(x, g))) * F.linear(x, u), d).sum() + a.sum()
    ),
    "a product is read by something else": lambda x, g, u, d: (
        F.linear(F.silu(F.linear(x, g)) * (y := F.linear(x, u)), d).sum() + y.sin().sum()
    ),
    "a gate of itself": lambda x, g, u, d: F.linear(F.silu(y := F.linear(x, g)) * y, d),
    "what follows the product is computed with it": lambda x, g, u, d: F.silu(F.linear(x, g)) * F.linear(x, u) * 2.5,
    "relu": lambda x, g, u, d: F.linear(F.relu(F.linear(x, g)) * F.linear(x, u), d),
    "a gate that is broadcast": lambda x, g, u, d: F.linear(F.silu(F.linear(x, g[:1])) * F.linear(x, u), d),
}


@pytest.mark.parametrize("why", NO_GATE)
def test_what_is_no_gate(why):
    assert "gated_linear" not in names(assert_as_eager(NO_GATE[why], tensors(*GATED), dynamo=False))


@pytest.mark.parametrize(
    "m, k, n, activation, worth",
    [
        (25216, 768, 3072, "gelu", True),
        (16384, 768, 3072, "relu", True),
        (16384, 768, 3072, "gelu_tanh", False),
        (16384, 768, 3072, "silu", False),
        (8192, 768, 3072, "gelu", False),
        (16384, 764, 3072, "gelu", False),
    ],
)
def test_on_a_gpu_layers_that_were_measured(monkeypatch, m, k, n, activation, worth):
    monkeypatch.setattr(epilogues.library, "is_wanted", lambda tensor: True)
    x, weight = (torch.empty(shape, dtype=HALF, device="meta") for shape in ((m, k), (n, k)))
    with assume_gpu(**HOPPER):
        assert epilogues.is_activation_worth_it(x, weight, activation) == worth
    with assume_gpu(**HOPPER | {"capability": 8}):
        assert not epilogues.is_activation_worth_it(x, weight, activation)


@pytest.mark.parametrize("function, shapes", [(layer("gelu"), SHAPES), (gated("silu"), GATED)])
def test_backward_is_given_as_much_as_without(monkeypatch, function, shapes):
    def given():
        forward, _ = assert_as_eager(function, tensors(*shapes), dynamo=False)
        results = forward.lowering.graph.graph.output_node().args[0]
        return sorted((tuple(one.meta["val"].shape), one.meta["val"].dtype) for one in results)

    found = given()
    monkeypatch.setattr(patterns, "OF_CALLS", ())
    assert given() == found


def test_outside_the_simulator_pytorch_runs_its_own_calls():
    given = tensors(*SHAPES)
    found = cupyops.explain_compile(layer("gelu"), *given)
    assert {call.operator for graph in found.graphs for call in graph.left} <= {"aten.addmm.default", "aten.mm.default"}


def test_a_step_again_and_again_is_the_same_by_recorded_plans():
    given, run = tensors(*GATED), compiled(gated("silu"))
    programs.clear()
    found = []
    with cupyops.simulate("sm_90"):
        for _ in range(5):
            y = run(*given)
            found.append([y.detach(), *torch.autograd.grad(y.float().square().sum(), given)])
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other))
    assert names(programs) == ["gated_linear"]


# --- the loss of a head -----------------------------------------------------------------------------------------------

HEAD = (2, 8, 32), (96, 32), (96,)
TARGET = (torch.arange(16) * 37 % 96).view(2, 8)
LOSSES = {
    "as nanoGPT": lambda x, w, b, t: F.cross_entropy(F.linear(x, w).view(-1, 96), t.view(-1)),
    "of float32, with a bias": lambda x, w, b, t: F.cross_entropy(F.linear(x, w, b).float().view(-1, 96), t.view(-1)),
    "shifted": lambda x, w, b, t: F.cross_entropy(
        F.linear(x, w)[..., :-1, :].contiguous().float().view(-1, 96), t[..., 1:].contiguous().view(-1)
    ),
    "shifted after a view": lambda x, w, b, t: F.cross_entropy(
        F.linear(x.view(16, 32), w).view(2, 8, 96)[..., :-1, :].reshape(-1, 96), t[..., 1:].reshape(-1)
    ),
    "some targets are ignored": lambda x, w, b, t: F.cross_entropy(
        F.linear(x, w).flatten(0, 1), t.flatten(), ignore_index=37, label_smoothing=0.1, reduction="sum"
    ),
}


@pytest.fixture
def little_scratch(monkeypatch):
    monkeypatch.setattr(losses, "SCRATCH", 96 * 2 * 4)


@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_of_a_head(little_scratch, name):
    made = assert_as_eager(lambda x, w, b: LOSSES[name](x, w, b, TARGET), tensors(*HEAD))
    assert names(made)[0] == "fused_linear_cross_entropy"


def test_the_loss_of_a_head_under_autocast(little_scratch):
    def run(x, w, b):
        with torch.autocast("cpu", HALF):
            logits = F.linear(x, w, b)
        return F.cross_entropy(logits.view(-1, 96).float(), TARGET.view(-1))

    assert names(assert_as_eager(run, tensors(*HEAD, dtype=torch.float32)))[0] == "fused_linear_cross_entropy"


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_of_language(little_scratch, tied):
    """Its loss and the gradients of a head whose weight the embedding may have too."""

    def run(weight, head):
        x = F.embedding(TARGET, weight)
        return LOSSES["as nanoGPT"](torch.tanh(x), weight if tied else head, None, TARGET.roll(1, 1))

    made = assert_as_eager(run, tensors((96, 32), (96, 32)))
    assert names(made)[0] == "fused_linear_cross_entropy"


def written(x, w, b, t):
    logits = F.linear(x, w).view(-1, 96)
    logits[:, 3] = -100.0
    return F.cross_entropy(logits, t.view(-1))


NO_LOSS = {
    "logits that are returned": lambda x, w, b, t: (y := F.linear(x, w), F.cross_entropy(y.view(-1, 96), t.view(-1)))[
        ::-1
    ],
    "logits that are scaled": lambda x, w, b, t: F.cross_entropy(F.linear(x, w).view(-1, 96) * 2, t.view(-1)),
    "logits that are written": written,
    "weights of the classes": lambda x, w, b, t: F.cross_entropy(F.linear(x, w).view(-1, 96), t.view(-1), b.detach()),
    "a loss of each": lambda x, w, b, t: F.cross_entropy(F.linear(x, w).view(-1, 96), t.view(-1), reduction="none"),
    "some classes": lambda x, w, b, t: F.cross_entropy(F.linear(x, w)[..., 1:].reshape(-1, 95), t.view(-1) % 95),
    "probabilities": lambda x, w, b, t: F.cross_entropy(
        F.linear(x, w).view(-1, 96), F.one_hot(t.view(-1), 96).to(x.dtype)
    ),
    "classes in another place": lambda x, w, b, t: F.cross_entropy(F.linear(x, w).transpose(1, 2), t),
}


@pytest.mark.parametrize("why", NO_LOSS)
def test_what_is_no_loss_of_a_head(little_scratch, why):
    made = assert_as_eager(lambda x, w, b: NO_LOSS[why](x, w, b, TARGET), tensors(*HEAD))
    assert "fused_linear_cross_entropy" not in names(made)


def test_logits_that_are_few_or_of_float32_or_without_a_gradient_are_left_alone(monkeypatch):
    def loss(x, w, b):
        return LOSSES["as nanoGPT"](x, w, b, TARGET)

    assert "fused_linear_cross_entropy" not in names(assert_as_eager(loss, tensors(*HEAD)))
    monkeypatch.setattr(losses, "SCRATCH", 1)
    assert "fused_linear_cross_entropy" not in names(assert_as_eager(loss, tensors(*HEAD, dtype=torch.float32)))
    assert "fused_linear_cross_entropy" not in names(assert_as_eager(loss, [x.detach() for x in tensors(*HEAD)]))
    assert "fused_linear_cross_entropy" not in names(assert_as_eager(loss, tensors(*HEAD), dynamic=True))


# --- gradients of float32 ---------------------------------------------------------------------------------------------


def test_the_gradient_of_a_parameter_of_float32_is_not_rounded_on_the_way():
    """It is the product of the operands, which alone were rounded; and by plans the same."""
    (x, weight), run = tensors((64, 32), (48, 32), dtype=torch.float32), compiled(lambda x, w: F.linear(x, w))
    grad = torch.randn(64, 48).to(HALF)
    programs.clear()
    for _ in range(5):
        with cupyops.simulate("sm_90"), torch.autocast("cpu", HALF):
            (found,) = torch.autograd.grad(run(x.detach(), weight), weight, grad)
        torch.testing.assert_close(found, grad.float().T @ x.detach().to(HALF).float(), rtol=1e-5, atol=1e-5)
    assert names(programs) == ["product_in_full"]


NOT_IN_FULL = {
    "a half type": lambda x, w: F.linear(x.to(HALF), w.to(HALF)).to(HALF),
    "something is done with it": lambda x, w: F.linear(x.to(HALF), (w * 2).to(HALF)),
}


@pytest.mark.parametrize("why", NOT_IN_FULL)
def test_what_is_no_gradient_of_float32(why):
    dtype = HALF if why == "a half type" else torch.float32
    x, weight = tensors((64, 32), (48, 32), dtype=dtype)
    assert names(assert_as_eager(NOT_IN_FULL[why], [x.detach(), weight], dynamo=False, factor=8)) == []


# --- whole models -----------------------------------------------------------------------------------------------------


class Transformer(torch.nn.Module):
    """A block as of GPT-2 or of a vision transformer, with patches of images or tokens before it, and a head behind."""

    def __init__(self, images):
        super().__init__()
        self.norm, self.act = torch.nn.LayerNorm(32), torch.nn.GELU("none" if images else "tanh")
        self.qkv, self.project = torch.nn.Linear(32, 96), torch.nn.Linear(32, 32)
        self.up, self.down = torch.nn.Linear(32, 64), torch.nn.Linear(64, 32)
        self.first = torch.nn.Conv2d(3, 32, 4, 4) if images else torch.nn.Embedding(96, 32)
        self.head = torch.nn.Linear(32, 96, bias=False)

    def forward(self, x, target):
        x = self.first(x)
        if x.dim() == 4:
            x = x.flatten(2).transpose(1, 2)
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, 16).permute(2, 0, 3, 1, 4).unbind()
        x = x + self.project(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        x = x + self.down(self.act(self.up(self.norm(x))))
        return F.cross_entropy(self.head(x).view(-1, 96), target.view(-1))


@pytest.mark.parametrize("images", [False, True])
def test_a_transformer_under_autocast(little_scratch, images):
    torch.manual_seed(0)
    model = Transformer(images)
    given = (torch.randn(2, 3, 8, 16), TARGET) if images else (TARGET.flip(1), TARGET)

    def run(*parameters):
        with torch.autocast("cpu", HALF):
            return torch.func.functional_call(model, dict(zip(dict(model.named_parameters()), parameters)), given)

    parameters = [p.detach().clone().requires_grad_() for p in model.parameters()]
    exact = [p.double().detach().requires_grad_() for p in parameters]
    true = torch.func.functional_call(
        copy.deepcopy(model).double(),
        dict(zip(dict(model.named_parameters()), exact)),
        (given[0].double() if images else given[0], TARGET),
    )
    true = torch.autograd.grad(true, exact)
    theirs = torch.autograd.grad(run(*parameters), parameters)
    programs.clear()
    with cupyops.simulate("sm_90"):
        ours = torch.autograd.grad(compiled(run)(*parameters), parameters)
    for a, b, c in zip(theirs, ours, true, strict=True):
        norm = c.norm().clamp_min(1e-3)
        assert (b.double() - c).norm() / norm <= 4 * (a.double() - c).norm() / norm + 1e-6
    found = names(programs)
    assert sorted({name for name in found if not name.endswith("_backward")}) == [
        "attention",
        "fused_linear_cross_entropy",
        "linear_act",
        "product_in_full",
    ]


def test_a_llama_of_transformers():
    """Its logits are a result, so that its loss is not fused with its head."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed: no model to compile")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, vocab_size=96, use_cache=False
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).to(HALF)
    exact = copy.deepcopy(model).double()
    true = torch.autograd.grad(exact(input_ids=TARGET, labels=TARGET).loss, list(exact.parameters()))
    theirs = torch.autograd.grad(model(input_ids=TARGET, labels=TARGET).loss, list(model.parameters()))
    programs.clear()
    with cupyops.simulate("sm_90"):
        loss = compiled(model)(input_ids=TARGET, labels=TARGET).loss
        ours = torch.autograd.grad(loss, list(model.parameters()))
    for a, b, c in zip(theirs, ours, true, strict=True):
        assert (b.double() - c).norm() <= 4 * (a.double() - c).norm() + 1e-6 * c.norm()
    assert names(programs).count("gated_linear") == 2 and "fused_linear_cross_entropy" not in names(programs)
