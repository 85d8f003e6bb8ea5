"""Patterns of Dynamo's graph that become operators of this library: they are found, and give what eager gives."""

import copy

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from compiled import compiled

import cupyops
from cupyops import ops
from cupyops._compile import calls, patterns
from cupyops._compile.backend import programs
from cupyops._operator.derivation import plans

HALF = torch.bfloat16


def relative(found, true):
    return ((found.double() - true.double()).norm() / true.double().norm().clamp_min(1e-30)).item()


def called():
    """Names of the operators of this library in the programs that were made last."""
    return [name for program in programs for name, _ in program.left if "cupyops" in name]


class Block(nn.Module):
    """Two convolutions with batch_norm and relu, and a residual connection."""

    def __init__(self):
        super().__init__()
        self.one, self.two = (nn.Conv2d(16, 16, 3, padding=1, bias=False).to(HALF) for _ in range(2))
        self.norm_one, self.norm_two = nn.BatchNorm2d(16), nn.BatchNorm2d(16)

    def forward(self, x):
        y = F.relu(self.norm_one(self.one(x)), inplace=True)
        y = self.norm_two(self.two(y))
        y += x
        return F.relu(y, inplace=True)


def trained(module, x, grad, run):
    x = x.clone().requires_grad_()
    y = run(x)
    y.backward(grad.to(y.dtype))
    return [y.detach(), x.grad, *(p.grad for p in module.parameters()), *module.buffers()]


def test_batch_norm_and_relu_with_the_running_statistics_of_eager():
    torch.manual_seed(0)
    module = Block().to(memory_format=torch.channels_last)
    eager, exact = copy.deepcopy(module), copy.deepcopy(module).double()
    x = torch.randn(8, 16, 8, 8).to(HALF).contiguous(memory_format=torch.channels_last)
    grad = torch.randn(8, 16, 8, 8)
    want, true = trained(eager, x, grad, eager), trained(exact, x.double(), grad, exact)
    programs.clear()
    with cupyops.simulate("sm_90"):
        found = trained(module, x, grad, compiled(module))
    assert called().count("cupyops.batch_norm_act.default") == 2
    for a, b, c in zip(want, found, true, strict=True):
        assert relative(b, c) <= 4 * relative(a, c) + 1e-6


@pytest.mark.parametrize("kind", ["causal", "all", "window"])
def test_a_mask_that_depends_on_no_input_is_known_while_compiling(kind):
    def attend(q, k, v):
        i = torch.arange(q.shape[2])
        distance = i[:, None] - i[None, :]
        mask = {"causal": distance >= 0, "all": distance < 100, "window": (distance >= 0) & (distance < 5)}[kind]
        k, v = (x[:, :, None].expand(2, 2, 2, 16, 16).reshape(2, 4, 16, 16) for x in (k, v))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[None, None].expand(2, -1, -1, -1))

    torch.manual_seed(0)
    tensors = [torch.randn(2, heads, 16, 16).to(HALF) for heads in (4, 2, 2)]
    results = []
    programs.clear()
    for dtype, run in ((torch.float64, attend), (HALF, attend), (HALF, compiled(attend))):
        given = [x.to(dtype).requires_grad_() for x in tensors]
        with cupyops.simulate("sm_90"):
            y = run(*given)
            y.float().square().sum().backward()
        results.append([y.detach(), *(x.grad for x in given)])
    for true, want, found in zip(*results, strict=True):
        assert relative(found, true) <= 4 * relative(want, true) + 1e-3
    assert called().count("cupyops.attention.default") == (kind != "window")


def test_a_counter_that_nothing_reads_still_counts():
    module = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())
    with cupyops.simulate("sm_90"):
        run = compiled(module)
        for _ in range(3):
            run(torch.randn(2, 4, 3, 3))
    assert module[0].num_batches_tracked == 3


def test_max_pool_takes_the_kernel_whose_backward_gathers():
    x = torch.randn(2, 4, 9, 9)
    results = []
    programs.clear()
    for run in (F.max_pool2d, compiled(lambda x, *rest: F.max_pool2d(x, *rest))):
        given = x.clone().requires_grad_()
        with cupyops.simulate("sm_90"):
            y = run(given, 3, 2, 1)
            y.square().sum().backward()
        results.append((y.detach(), given.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results))
    assert "cupyops.max_pool2d.default" in called()


def test_operators_of_this_library_are_replayed_from_plans():
    """After three calls alike neither the dispatcher nor the operator's Python runs; results stay those of eager."""
    norm = nn.BatchNorm2d(16)
    twin = copy.deepcopy(norm)
    run = compiled(lambda x: F.relu(norm(x)))
    x = torch.randn(4, 16, 8, 8).to(HALF).contiguous(memory_format=torch.channels_last).requires_grad_()
    calls._planned.cache_clear()
    with cupyops.simulate("sm_90"):
        for _ in range(5):
            y = run(x)
            x.grad = None
            y.backward(torch.ones_like(y))
            want = F.relu(twin(x.detach()))
            assert torch.equal(y, want)
            assert (
                torch.equal(norm.running_mean, twin.running_mean)
                or relative(norm.running_mean, twin.running_mean) < 1e-5
            )
    replayed = {one.name for one in plans._all if one.plans}
    assert {"cupyops.batch_norm_act.default", "cupyops.batch_norm_act_backward.default"} <= replayed


@pytest.mark.parametrize("how", ["fill_", "setitem", "through a view", "iand"])
def test_a_mask_that_is_written_in_place_is_no_constant(how):
    def attend(q, k, v, length):
        mask = torch.ones(16, 16, dtype=torch.bool)
        seen = torch.arange(16)[None, :] < length
        if how == "fill_":
            mask.masked_fill_(~seen, False)
        elif how == "setitem":
            mask[:, 1:] = seen[:, 1:]
        elif how == "through a view":
            mask[4:].logical_and_(seen)
        else:
            mask &= seen
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    tensors = [torch.randn(1, 2, 16, 16).to(HALF) for _ in range(3)]
    length = torch.tensor(7)
    with cupyops.simulate("sm_90"):
        found = compiled(attend)(*tensors, length)
    assert relative(found, attend(*tensors, length)) < 1e-2


def test_a_graph_that_cannot_be_traced_with_a_pattern_is_traced_without(monkeypatch, caplog):
    """As one that views the result of attention by strides that only PyTorch's has."""

    def attend(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).view(1, 2, -1)

    def refuse(*arguments, **options):
        raise RuntimeError("view size is not compatible")

    monkeypatch.setattr(ops, "attention", refuse)
    tensors = [torch.randn(1, 2, 16, 16).to(HALF) for _ in range(3)]
    with cupyops.simulate("sm_90"):
        found = compiled(attend)(*tensors)
    assert relative(found, attend(*tensors)) < 1e-2
    assert "compiled without patterns" in caplog.text


@pytest.mark.parametrize("name", ["batch_norm", "max_pool2d"])
def test_arguments_by_name_and_defaults(name, monkeypatch):
    """`eps` and `momentum` of batch_norm may be left out, and any argument may be named."""
    monkeypatch.setenv("CUPYOPS_STRICT", "1")
    weight, bias = torch.rand(8, requires_grad=True), torch.rand(8, requires_grad=True)

    def normalised(x):
        return F.relu(
            input=F.batch_norm(input=x, running_mean=None, running_var=None, weight=weight, bias=bias, training=True)
        )

    function = normalised if name == "batch_norm" else (lambda x: F.max_pool2d(input=x, kernel_size=2))
    x = torch.randn(2, 8, 6, 6, dtype=HALF).to(memory_format=torch.channels_last).requires_grad_()
    programs.clear()
    with cupyops.simulate("sm_90"):
        found = compiled(function)(x)
    assert relative(found, function(x)) < 1e-2
    assert any("batch_norm_act" in one or "max_pool2d" in one for one in called())


def test_a_pattern_that_fails_is_left(monkeypatch, caplog):
    def fails(node):
        raise IndexError("no such argument")

    monkeypatch.setattr(patterns, "PATTERNS", (fails,))
    x = torch.randn(1, 2, 4, 4, requires_grad=True)
    found = compiled(lambda x: F.max_pool2d(x, 2))(x)
    torch.testing.assert_close(found, F.max_pool2d(x, 2))
    assert "pattern fails fails at" in caplog.text
