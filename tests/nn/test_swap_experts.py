"""Mixtures of experts of transformers after swap: products of a half type under autocast, with no wait for the groups."""

import copy
import pickle

import pytest
import torch

import cupyops
from cupyops.nn._swap import experts

transformers = pytest.importorskip("transformers")
if not hasattr(transformers.PreTrainedModel, "set_experts_implementation"):
    pytest.skip("this transformers has no choice of experts", allow_module_level=True)

SIZES = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, vocab_size=61)
KINDS = {
    "qwen3_moe": (dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, head_dim=8), "silu"),
    "mixtral": (dict(num_local_experts=5, num_experts_per_tok=3, intermediate_size=24), "silu"),
    "olmoe": (dict(num_experts=4, num_experts_per_tok=1, intermediate_size=16), "gelu"),
}


def made(kind, device="cpu"):
    torch.manual_seed(0)
    sizes, act = KINDS[kind]
    config = transformers.AutoConfig.for_model(kind, **SIZES, **sizes, hidden_act=act, use_cache=False)
    model = transformers.AutoModelForCausalLM.from_config(config).to(device)
    return model, torch.randint(3, 61, (3, 11), generator=torch.Generator().manual_seed(1)).to(device)


def step(model, tokens, half):
    model.zero_grad()
    device = tokens.device.type
    with torch.autocast(device, half or torch.bfloat16, enabled=half is not None), cupyops.trace() as trace:
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    names = [str(record.operator) for record in trace.records]
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}, names


def far(found, exact):
    return sum((found[name] - grad).norm() / (grad.norm() + 1e-6) for name, grad in exact.items())


@pytest.mark.parametrize("kind", KINDS)
def test_as_the_loop_under_autocast(kind):
    """As near to float32 as the loop over experts, whose products are of the half type there."""
    model, tokens = made(kind)
    loop, ours = copy.deepcopy(model), copy.deepcopy(model)
    loop.set_experts_implementation("eager")
    swapped = cupyops.swap(ours)
    assert 'experts: "grouped_mm", now "cupyops"' in swapped.settings
    exact, grads, _ = step(model, tokens, None)
    loss, theirs, _ = step(loop, tokens, torch.bfloat16)
    found, mine, names = step(ours, tokens, torch.bfloat16)
    assert names.count("cupyops::grouped_mm") == 4
    assert ("cupyops::swiglu" in names) is (KINDS[kind][1] == "silu")
    assert abs(found - exact) <= 2 * abs(loss - exact) + 5e-3
    assert far(mine, grads) <= 1.25 * far(theirs, grads)
    same, whole, names = step(ours, tokens, None)  # in float32 it is transformers' own function
    assert "cupyops::grouped_mm" not in names and abs(same - exact) < 1e-5 and far(whole, grads) < 1e-3


def test_by_kernels():
    model, tokens = made("qwen3_moe")
    expected = step(model, tokens, None)
    cupyops.swap(model)
    with cupyops.simulate("sm_90"):
        found = step(model, tokens, torch.bfloat16)
    assert abs(found[0] - expected[0]) < 2e-2 and far(found[1], expected[1]) < 0.05 * len(expected[1])


def test_experts_that_no_token_chooses():
    """Their gradients are zeros."""
    model, tokens = made("qwen3_moe")
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight[2:] = 0
        model.model.layers[0].mlp.gate.weight[:2] *= 100
    cupyops.swap(model)
    _, grads, _ = step(model, tokens[:1, :3], torch.bfloat16)
    assert not any(one.isnan().any() for one in grads.values())


@pytest.mark.parametrize("rows", [0, 1, 6])
def test_rows_and_indices_of_any_kind(rows):
    model, _ = made("qwen3_moe")
    module = model.model.layers[0].mlp.experts
    x, index = torch.randn(rows, 32, requires_grad=True), torch.randint(0, 4, (rows, 2))
    weights = torch.rand(rows, 2)
    results = []
    ways = (type(module).forward, torch.int64), (experts.experts, torch.int64), (experts.experts, torch.int32)
    for function, kind in ways:
        with torch.autocast("cpu", torch.bfloat16):
            y = function(module, x, index.to(kind), weights)
        results.append((y, *torch.autograd.grad(y, (x, module.down_proj), torch.ones_like(y))))
    for found in results[1:]:
        for a, b in zip(found, results[0]):
            assert a.dtype is b.dtype and a.shape == b.shape
            assert (a - b).norm() <= 0.03 * b.norm() + 1e-6


def test_what_is_left_alone_and_put_back():
    model, tokens = made("qwen3_moe")
    model.bfloat16()

    def operators():
        with cupyops.trace() as trace:
            model(tokens)
        return {record.operator for record in trace.records}

    for options in ({"exact": True}, {"skip": ""}):
        with cupyops.swap(model, **options):
            assert "cupyops::grouped_mm" not in operators()
    swapped = cupyops.swap(model)
    assert 'experts: "grouped_mm", now "cupyops"' in swapped.settings
    assert "cupyops::grouped_mm" in operators()
    assert model.config._experts_implementation == "grouped_mm", "other models may share the configuration"
    model = pickle.loads(pickle.dumps(model))
    assert "cupyops::grouped_mm" in operators()
    model.set_experts_implementation("batched_mm")  # which is heeded at the next call
    assert "cupyops::grouped_mm" not in operators()


def test_a_gate_that_somebody_listens_to():
    model, tokens = made("qwen3_moe")
    cupyops.swap(model)
    heard = []
    model.model.layers[1].mlp.experts.act_fn.register_forward_hook(lambda *given: heard.append(1))
    _, _, names = step(model, tokens, torch.bfloat16)
    assert heard == [1] and names.count("cupyops::swiglu") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_on_a_gpu_and_in_a_graph(kind):
    model, tokens = made(kind, "cuda")
    exact, grads, _ = step(model, tokens, None)
    cupyops.swap(model)
    for _ in range(4):  # recorded, and replayed
        found, mine, _ = step(model, tokens, torch.bfloat16)
        assert abs(found - exact) < 3e-2 and far(mine, grads) < 0.05 * len(grads)
    parameters = [*model.parameters()]
    optimizer = cupyops.optim.SGD(parameters, lr=0.0)

    @cupyops.graph
    def train(tokens):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss.detach()

    for shift in range(4):
        other = tokens.roll(shift, 1)
        loss = train(other).item()
        assert abs(loss - step(model, other, torch.bfloat16)[0]) < 1e-2
