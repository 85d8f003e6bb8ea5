"""Graphs in AOTAutograd's cache: a later process traces no model again, and what it is served is what it would have made."""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch._functorch import config
from torch.testing._internal.two_tensor import TwoTensor

import cupyops
from cupyops._compile import cudagraphs
from cupyops._compile.backend import backend
from cupyops._compile.lowering import name_of
from cupyops._compile.rules import RULES
from cupyops._compile.saved import Saved
from tests.support.processes import run_python


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """AOTAutograd's cache, on and empty. Returns its folder."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    counters.clear()
    with config.patch(enable_autograd_cache=True), cupyops.simulate("sm_90"):
        yield tmp_path / "aotautograd"
    torch._dynamo.reset()


def again(function, *args, **given):
    """The results and gradients of a compiled function, after what this process knows of it has been forgotten."""
    torch._dynamo.reset()
    counters.clear()
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) if torch.is_tensor(x) else x for x in args]
    y = torch.compile(function, backend=backend, **given)(*inputs)
    loss = y.float().square().sum()
    if loss.requires_grad:
        loss.backward()
    return y.detach(), [x.grad if torch.is_tensor(x) else x for x in inputs]


def was(state):
    return counters["aot_autograd"][f"autograd_cache_{state}"]


def normed(x, weight):
    return F.gelu(F.layer_norm(x, (x.shape[-1],), weight)).to(torch.bfloat16) * 2


def tensors(*shape):
    torch.manual_seed(0)
    return torch.randn(*shape, requires_grad=True), torch.rand(shape[-1], requires_grad=True)


def test_the_second_time_graphs_are_served_and_run_as_kernels(graphs):
    first = again(normed, *tensors(6, 16))
    assert (was("miss"), was("saved"), was("hit")) == (1, 1, 0)
    made = {one.kind: one.programs[0].text() for one in graphs}
    graphs.clear()
    second = again(normed, *tensors(6, 16))
    assert (was("miss"), was("hit")) == (0, 1)
    assert {one.kind: one.programs[0].text() for one in graphs} == made
    assert set(made) == {"forward", "backward"}
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    want = normed(*tensors(6, 16))
    torch.testing.assert_close(second[0], want)


def called(x, weight):
    """Function whose program has numbers, views, a call of ours, draws, a product and a write."""
    with torch.no_grad():
        weight.mul_(2.0)
    mixed = F.dropout(x.view(-1, 4) @ weight.view(4, 4), 0.5).sort(-1).values
    attended = F.scaled_dot_product_attention(*[x.view(1, 2, 6, 8)] * 3, is_causal=True)
    return torch.cat([mixed, F.softmax(attended.reshape(24, 4), -1)], 1) * x.shape[0]


def scaled(x, weight):
    """A constant besides. PyTorch 2.11 keeps none that is on a GPU and that backward reads."""
    return called(x * torch.tensor([1.0, 2.0] * 8), weight)


@torch.compiler.nested_compile_region
def region(x):
    return F.gelu(x) * 2


def nested(x, weight):
    """Graphs in the graph; and backward of a checkpoint draws as forward did."""
    drawn = torch.utils.checkpoint.checkpoint(lambda x: F.dropout(F.gelu(x), 0.5), x, use_reentrant=False)
    return region(region(drawn)).sin() * weight


def nothing(*args, **given):
    raise AssertionError("a program that is kept needs no lowering and no graph")


@pytest.mark.parametrize("function", [normed, called, scaled, nested])
def test_a_kept_program_runs_without_its_graph(function, graphs, monkeypatch):
    def drawn():
        torch.manual_seed(3)
        return again(function, *tensors(6, 16))

    first = drawn()
    texts = [program.text() for one in graphs for program in one.programs]
    graphs.clear()
    with monkeypatch.context() as patch:
        patch.setattr("cupyops._compile.program.Lowering", nothing)
        patch.setattr("cupyops._compile.compiler.Runner", nothing)
        second = drawn()
    assert was("hit") == 1 and texts == [program.text() for one in graphs for program in one.programs]
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    for one in graphs:
        (program,) = one.programs
        assert "graph" not in vars(one) and len(program.lowering.graph.graph.nodes) == one.nodes
        assert [name_of(node.target) for node, _ in program.lowering.left] == [name for name, _ in program.left]


def test_cuda_graphs_of_a_kept_program_are_told_the_same(graphs, monkeypatch):
    told = []

    def cudagraphify(run, still, **given):
        told.append((run, [*still], given))
        return lambda args: run(args)

    monkeypatch.setattr("torch._inductor.compile_fx.cudagraphify", cudagraphify)
    monkeypatch.setattr(cudagraphs, "unfit", lambda graph: "")
    monkeypatch.setattr("torch._dynamo.backends.cudagraphs.get_device_index", lambda graph: 0)
    again(scaled, *tensors(6, 16), mode="reduce-overhead")
    made, told[:] = list(told), []
    again(scaled, *tensors(6, 16), mode="reduce-overhead")
    assert was("hit") == 1 and len(told) == len(made) == 2
    for (run, still, given), (_, still_before, before) in zip(told, made, strict=True):
        assert "graph" not in vars(run) and still == still_before
        constants, constants_before = given.pop("constants"), before.pop("constants")
        torch.testing.assert_close(constants, constants_before)
        assert given == before
        texts = [one for program in run.programs for text in program.texts for one in text.constants.values()]
        assert all(any(one is other for other in texts) for one in constants)
    assert len(constants) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
@pytest.mark.parametrize("function", [normed, called])
def test_kept_programs_on_a_gpu(function, mode, monkeypatch):
    """Each of four calls, the later ones by the driver or as CUDA graphs, gives the bits that the first process gave."""

    def steps():
        torch._dynamo.reset()
        counters.clear()
        fast, found = torch.compile(function, backend=backend, mode=mode), []
        for step in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            given = [one.detach().cuda().requires_grad_() for one in tensors(6, 16)]
            torch.manual_seed(step)
            y = fast(*given)
            y.float().square().sum().backward()
            found.append([one.detach().clone() for one in (y, *given, *(x.grad for x in given))])
        return found

    first = steps()
    monkeypatch.setattr("cupyops._compile.program.Lowering", nothing)
    torch.testing.assert_close(steps(), first, rtol=0, atol=0)
    assert was("hit") == 1


def test_explain_and_debug_read_the_graph_of_a_kept_program(monkeypatch, graphs):
    with torch.no_grad():
        x, weight = tensors(6, 16)
        first = cupyops.explain_compile(normed, x, weight)
        torch._dynamo.reset()
        again(normed, x, weight)
        torch._dynamo.reset()
        assert str(cupyops.explain_compile(normed, x, weight)) == str(first)
        assert first.graphs[0].kernels[0].text in graphs[-1].programs[0].text()
        monkeypatch.setattr("cupyops._kernel.launch.faults.debug", True)
        found, _ = again(normed, x, weight)
        assert was("hit") == 1 and "graph" in vars(graphs[-1])
        torch.testing.assert_close(found, normed(x, weight))


def test_sizes_that_no_kept_program_serves(graphs, monkeypatch):
    rule = RULES[torch.ops.aten.exp.default]
    constant = lambda build, result, x: (int(x.shape[0]), rule(build, result, x))[1]
    monkeypatch.setitem(RULES, torch.ops.aten.exp.default, constant)
    states = []
    for rows in (4, 4, 5):
        y, _ = again(lambda x: x.exp() * 2, torch.ones(rows, 8), dynamic=True)
        torch.testing.assert_close(y, torch.ones(rows, 8).exp() * 2)
        states.append((len(graphs[-1].programs), "graph" in vars(graphs[-1])))
    assert states == [(1, True), (1, False), (2, True)]


def test_broken_programs_are_made_again(graphs, monkeypatch, caplog):
    prepare = Saved.prepare_for_serialization

    def breaking(self):
        prepare(self)
        self.programs = self.programs[:100]

    monkeypatch.setattr(Saved, "prepare_for_serialization", breaking)
    first = again(normed, *tensors(6, 16))
    with caplog.at_level("INFO", "cupyops.compile"):
        second = again(normed, *tensors(6, 16))
    assert was("hit") == 1 and caplog.text.count("programs are made again") == 2
    assert all(one.programs for one in graphs)
    torch.testing.assert_close(second, first, rtol=0, atol=0)


def test_a_graph_without_gradient(graphs):
    x, weight = (one.detach() for one in tensors(6, 16))
    first = again(normed, x, weight)
    second = again(normed, x, weight)
    assert was("hit") == 1 and graphs[-1].kind == "inference" and graphs[-1].programs
    torch.testing.assert_close(second[0], first[0], rtol=0, atol=0)


@pytest.mark.parametrize("rows", [4, 9], ids=["the sizes it was made with", "other sizes"])
def test_sizes_that_change(graphs, rows):
    for n in (4, rows):
        y, grads = again(normed, *tensors(n, 16), dynamic=True)
    assert was("hit") == 1
    x, weight = tensors(rows, 16)
    want = normed(x, weight)
    want.float().square().sum().backward()
    torch.testing.assert_close(y, want)
    torch.testing.assert_close(grads, [x.grad, weight.grad])
    assert graphs[-1].programs and graphs[-1].reason is None


def test_writes_into_an_input_and_views(graphs):
    def moving(mean, x):
        mean.mul_(0.5).add_(x.mean(0))
        return x.t() - mean[:, None]

    for _ in range(2):
        torch._dynamo.reset()
        mean, x = torch.ones(8), torch.arange(24.0).view(3, 8)
        y = torch.compile(moving, backend=backend)(mean, x)
        want = torch.ones(8)
        torch.testing.assert_close(y, moving(want, x))
        torch.testing.assert_close(mean, want)
    assert was("hit") == 1


def test_forward_and_backward_keep_one_way_of_rounding(graphs):
    def largest(x):
        return (x * 1.1 + 0.3).amax(1)

    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(1)).requires_grad_()
    first, second = again(largest, x), again(largest, x)
    assert was("hit") == 1 and all(one.exact for one in graphs)
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    torch.testing.assert_close(second[1][0].count_nonzero(), torch.tensor(5))


def test_backward_may_run_twice():
    """The gradient of gelu is written where a value of forward lay, which is copied first where backward is to run again."""
    given = [one.detach().requires_grad_() for one in tensors(6, 16)]
    want = torch.autograd.grad(normed(*given).float().square().sum(), given)
    for _ in range(2):
        torch._dynamo.reset()
        y = torch.compile(normed, backend=backend)(*given).float().square().sum()
        torch.testing.assert_close(torch.autograd.grad(y, given, retain_graph=True), want, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(torch.autograd.grad(y, given), want, rtol=1e-2, atol=1e-2)
    assert was("hit") == 1


def test_a_pattern_of_ours_in_the_graph_is_served(graphs):
    """Patterns put functions of this package into Dynamo's graph, which PyTorch's key takes only if it is told to."""

    def attended(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    torch.manual_seed(0)
    given = [torch.randn(1, 2, 8, 16, requires_grad=True) for _ in range(3)]
    first, second = again(attended, *given), again(attended, *given)
    assert was("hit") == 1
    assert any("attention" in str(node.target) for one in graphs for node in one.graph.graph.nodes)
    torch.testing.assert_close(second, first)


def test_patches_of_an_image_are_served():
    conv = nn.Conv2d(3, 8, 4, 4).to(torch.bfloat16)
    x = torch.randn(2, 3, 8, 8, dtype=torch.bfloat16)
    first, second = again(conv, x), again(conv, x)
    assert was("hit") == 1
    torch.testing.assert_close(second[0], first[0], rtol=0, atol=0)


def test_other_options_and_settings_are_another_entry():
    x, weight = tensors(6, 16)
    again(normed, x, weight)
    again(normed, x, weight, options={"exact": True})
    assert was("hit") == 0
    with cupyops.never_slower(True):
        again(normed, x, weight)
    assert was("hit") == 0
    with cupyops.simulate("sm_80"):
        again(normed, x, weight)
    assert was("hit") == 0
    with cupyops.use_form("softmax:two_pass"):
        again(normed, x, weight)
    assert was("hit") == 0
    again(normed, x, weight, options={"exact": True})
    assert was("hit") == 1


def test_a_broken_entry_is_made_again(own_cache):
    first = again(normed, *tensors(6, 16))
    entries = [path for path in own_cache.rglob("*") if path.is_file()]
    assert len(entries) == 1
    entries[0].write_bytes(entries[0].read_bytes()[:100])
    second = again(normed, *tensors(6, 16))
    assert was("hit") == 0
    torch.testing.assert_close(second, first, rtol=0, atol=0)


def test_a_graph_that_cannot_be_pickled_is_compiled_each_time(own_cache, monkeypatch, caplog):
    def refuse(*args):
        raise TypeError("cannot pickle it")

    monkeypatch.setattr("cupyops._compile.saved.GraphPickler.dumps", refuse)
    with caplog.at_level("INFO", "cupyops.compile"):
        first = again(normed, *tensors(6, 16))
    assert "cannot pickle it" in caplog.text and not [path for path in own_cache.rglob("*") if path.is_file()]
    second = again(normed, *tensors(6, 16))
    assert was("hit") == 0
    torch.testing.assert_close(second, first, rtol=0, atol=0)


def test_tensor_subclasses_are_compiled_each_time(own_cache):
    """Whose entries AOTAutograd would have to hold with another description of their graphs."""
    given = [TwoTensor(torch.ones(4, 16) * k, torch.arange(16.0).repeat(4, 1)).requires_grad_() for k in (1, 2)]
    for _ in range(2):
        y = torch.compile(lambda a, b: F.gelu(a * b), backend=backend)(*given)
        found = torch.autograd.grad(y.sum(), given, retain_graph=True)
        torch._dynamo.reset()
    want = torch.autograd.grad(F.gelu(given[0] * given[1]).sum(), given)
    for one, other in zip(found, want, strict=True):
        torch.testing.assert_close((one.a, one.b), (other.a, other.b))
    assert not own_cache.exists() or not [path for path in own_cache.rglob("*") if path.is_file()]


@pytest.mark.parametrize("off", ["enable_autograd_cache", "force_disable_caches"])
def test_without_the_cache_nothing_is_pickled(own_cache, monkeypatch, off):
    monkeypatch.setattr("cupyops._compile.saved.GraphPickler.dumps", None)
    where = config if off == "enable_autograd_cache" else torch.compiler.config
    with where.patch(**{off: off == "force_disable_caches"}):
        again(normed, *tensors(6, 16))
    assert not own_cache.exists()


@pytest.mark.slow
def test_a_second_process(tmp_path):
    program = """
import torch, cupyops
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.LayerNorm(16), torch.nn.Dropout(0.5))
torch.manual_seed(0)
x = torch.ones(4, 8, requires_grad=True)
for parameter in model.parameters():
    torch.nn.init.constant_(parameter, 0.25)
with cupyops.simulate("sm_90"):
    y = torch.compile(model, backend="cupyops")(x)
    y.square().sum().backward()
print(y.tolist(), x.grad.tolist())
print(torch._dynamo.utils.counters["aot_autograd"]["autograd_cache_hit"])
"""
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "of processes")}
    first, second = (run_python("-c", program, env=env, timeout=240) for _ in range(2))
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    (values, hits), (same, later) = first.stdout.splitlines(), second.stdout.splitlines()
    assert values == same and (hits, later) == ("0", "1")
