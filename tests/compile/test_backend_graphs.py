"""CUDA graphs by PyTorch's cudagraph trees: what they are told of each graph, and on a GPU that replays are right."""

import copy
import itertools

import pytest
import torch
import torch._inductor.compile_fx as inductor
from torch import nn

from cupyops._compile import cudagraphs
from cupyops._compile.backend import backend


@pytest.fixture(autouse=True)
def afresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def fast(function, **given):
    return torch.compile(function, backend=backend, **({"mode": "reduce-overhead"} | given))


# -- what the trees are told -------------------------------------------------------------------------------------------


@pytest.fixture
def told(monkeypatch):
    """The calls of the trees, which are made as if CPU graphs could be captured."""
    calls = []

    def cudagraphify(run, static, **given):
        calls.append({"run": run, "static": tuple(static), **given})
        return lambda args: run(args)

    monkeypatch.setattr(inductor, "cudagraphify", cudagraphify)
    monkeypatch.setattr(cudagraphs, "unfit", lambda graph: "")
    monkeypatch.setattr("torch._dynamo.backends.cudagraphs.get_device_index", lambda graph: 0)
    return calls


def names(call, graph_inputs):
    return [graph_inputs[k] for k in call["static"]]


def test_parameters_and_buffers_stay_where_they_are(told):
    """They are not copied at each call; the input is."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    fast(model)(torch.randn(8, 4)).sum().backward()
    forward, backward = told
    count = len(list(model.parameters())) + len(list(model.buffers()))
    assert len(forward["static"]) == count and len(forward["placeholders"]) == count + 1
    assert not forward["is_backward"] and not forward["is_inference"] and backward["is_backward"]


def test_what_is_written_is_told(told):
    """The statistics of a BatchNorm, and the count of its batches."""
    fast(nn.BatchNorm1d(4))(torch.randn(8, 4))
    (call,) = told[:1]
    assert len(call["mutated_input_idxs"]) == 3
    assert set(call["mutated_input_idxs"]) <= set(call["static"])


def test_a_written_input_that_is_no_parameter_is_not_stationary(told):
    fast(lambda x, cache: cache.add_(x))(torch.ones(4), torch.zeros(4))
    (call,) = told
    assert call["static"] == () and len(call["mutated_input_idxs"]) == 1 and call["is_inference"]


def test_marked_tensors_stay_where_they_are(told):
    cache = torch.zeros(4)
    torch._dynamo.mark_static_address(cache)
    fast(lambda x, cache: cache.add_(x))(torch.ones(4), cache)
    (call,) = told
    assert len(call["static"]) == 1 and call["static"] == call["mutated_input_idxs"]


def test_all_that_forward_saved_is_stationary_in_backward(told):
    w = torch.randn(4, 4, requires_grad=True)
    fast(lambda x: (x @ w).exp())(torch.randn(2, 4, requires_grad=True)).sum().backward()
    _, backward = told
    assert backward["static"] == tuple(range(len(backward["placeholders"]) - 1))


def test_the_function_empties_its_arguments(told):
    """As the trees demand of what they capture: memory of inputs is to be free then."""
    fast(lambda x: x * 2)(torch.ones(4))
    args = [torch.ones(4)]
    assert told[0]["run"](args)[0].eq(2).all() and not args


def test_a_forward_without_a_cuda_graph_has_a_backward_without(told, monkeypatch, caplog):
    monkeypatch.setattr(cudagraphs, "unfit", lambda graph: "its reason")
    x = torch.ones(4, requires_grad=True)
    fast(lambda x: (x * 2).sum())(x).backward()
    assert not told and x.grad.eq(2).all()
    assert "no CUDA graph of the forward graph: its reason" in caplog.text


def test_a_backward_without_a_cuda_graph_ends_the_generation_of_forward(told, monkeypatch):
    asked = []

    class Manager:
        def set_to_running_backward(self):
            asked.append("backward")

    monkeypatch.setattr("torch._inductor.cudagraph_trees.get_manager", lambda *_, **__: Manager())
    held = cudagraphs.Held()
    held.device = 0
    run = held.wrap(lambda args: list(args), cudagraphs.Facts("its reason"), kind="backward")
    assert run([1]) == [1] and asked == ["backward"]


def test_cpu_tensors_are_no_cuda_graph():
    x = torch.ones(4)
    assert fast(lambda x: x * 2)(x).eq(2).all()
    graph = torch.fx.Graph()
    graph.placeholder("x").meta["val"] = x
    graph.output(())
    assert "cpu device (x)" in cudagraphs.unfit(torch.fx.GraphModule({}, graph))


def test_a_reset_of_dynamo_resets_the_trees(monkeypatch):
    asked = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("torch._inductor.cudagraph_trees.reset_cudagraph_trees", lambda: asked.append("reset"))
    backend.reset()
    assert asked == ["reset"]


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def replays():
    """How many CUDA graphs the trees of this device hold."""
    from torch._inductor.cudagraph_trees import get_manager

    manager = get_manager(0, create_if_none_exists=False)
    return 0 if manager is None else manager.new_graph_id().id


@pytest.mark.gpu
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_training_is_as_eagers(mode):
    def trained(compile):
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 10)
        ).cuda()
        called = torch.compile(model, backend=backend, mode=mode) if compile else model
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        losses = []
        for step in range(8):
            x = torch.randn(16, 3, 8, 8, generator=torch.Generator().manual_seed(step)).cuda()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(called(x), (torch.arange(16) % 10).cuda())
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses, model[1].running_mean.tolist(), model[1].num_batches_tracked.item()

    before = replays()
    ours, theirs = trained(True), trained(False)
    for one, other in zip(ours, theirs):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)
    assert (replays() - before > 1) == (mode is not None)


@pytest.mark.gpu
def test_a_cache_that_is_written_in_place():
    cache = torch.zeros(4, 64, device="cuda")
    torch._dynamo.mark_static_address(cache)

    def step(x, cache, at):
        cache.index_copy_(0, at, x)
        return cache.exp().sum(0)

    compiled, expected = fast(step), torch.zeros(4, 64, device="cuda")
    for time in range(6):
        x, at = torch.full((1, 64), float(time), device="cuda"), torch.tensor([time % 4], device="cuda")
        torch.testing.assert_close(compiled(x, cache, at).clone(), step(x, expected, at))
        torch.testing.assert_close(cache, expected)


@pytest.mark.gpu
def test_each_replay_draws_other_numbers():
    compiled = fast(lambda x: nn.functional.dropout(x, 0.5))
    masks = [(compiled(torch.ones(4096, device="cuda")) == 0).cpu() for _ in range(5)]
    assert all(not torch.equal(one, other) for one, other in itertools.pairwise(masks))


@pytest.mark.gpu
def test_the_first_output_kept_over_a_step_is_an_error_and_its_clone_is_not():
    """The trees report the outputs of the first call alone: a replay writes over later ones in silence."""
    compiled, inputs = fast(lambda x: (x * 2).softmax(-1)), [torch.randn(8, 64, device="cuda") for _ in range(5)]
    clones, outputs = [], []
    for x in inputs:
        torch.compiler.cudagraph_mark_step_begin()
        outputs.append(compiled(x))
        clones.append(outputs[-1].clone())
    with pytest.raises(RuntimeError, match="overwritten"):
        outputs[0].sum().item()
    for found, x in zip(clones, inputs):
        torch.testing.assert_close(found, (x * 2).softmax(-1))


@pytest.mark.gpu
@pytest.mark.parametrize("writes", [False, True], ids=["read", "written"])
def test_outputs_that_are_fed_back(writes):
    """A copy of what one call returned is an input of the next, which may write it."""

    def step(state, x):
        if writes:
            state.mul_(0.5)
        return (state + x).tanh(), state.sum(0)

    compiled, x = fast(step), torch.randn(16, 64, device="cuda")
    ours, theirs = torch.ones(16, 64, device="cuda"), torch.ones(16, 64, device="cuda")
    for _ in range(6):
        torch.compiler.cudagraph_mark_step_begin()
        ours, sums = compiled(ours, x)
        theirs, expected = step(theirs, x)
        torch.testing.assert_close(sums, expected)
        ours = ours.clone()  # the next call begins a generation, which takes the memory of this one
        torch.testing.assert_close(ours, theirs)


@pytest.mark.gpu
def test_a_new_generation_begins_after_backward_and_after_inference():
    """Two forwards before their backwards, and calls without gradients between steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8)).cuda()
    twin, compiled = copy.deepcopy(model), fast(model)
    for step in range(5):
        x, y = torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(step)).cuda()
        for module, call in ((model, compiled), (twin, twin)):
            module.zero_grad()
            (call(x).square().mean() + call(y).exp().mean()).backward()
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-3, atol=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x).clone(), twin(x), rtol=1e-3, atol=1e-4)


@pytest.mark.gpu
def test_each_replay_of_training_draws_one_mask_for_forward_and_backward():
    compiled, x, masks = fast(lambda x: nn.functional.dropout(x * 2, 0.5)), torch.ones(4096, device="cuda"), []
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        x.grad = None
        y = compiled(x.requires_grad_())
        masks.append((y != 0).cpu())
        y.sum().backward()
        assert torch.equal((x.grad != 0).cpu(), masks[-1])
    assert all(not torch.equal(one, other) for one, other in itertools.pairwise(masks))


@pytest.mark.gpu
def test_inputs_off_16_bytes_and_of_other_strides_in_a_graph():
    compiled = fast(lambda x, y: (x.t() * y).sum(0))
    for offset in (0, 1, 3, 0, 1):
        x = torch.randn(65 * 8 + 4, device="cuda")[offset:][: 64 * 8].view(8, 64)
        y = torch.randn(64, 16, device="cuda")[:, ::2]
        torch.testing.assert_close(compiled(x, y).clone(), (x.t() * y).sum(0))


@pytest.mark.gpu
def test_a_side_stream_and_a_capture_of_the_users_own():
    compiled, x = torch.compile(lambda x: (x * 2).softmax(-1), backend=backend), torch.randn(32, 64, device="cuda")
    want = (x * 2).softmax(-1)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            found = compiled(x)
    torch.cuda.current_stream().wait_stream(side)
    torch.testing.assert_close(found, want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = compiled(x)
    x.mul_(0.5)
    graph.replay()
    torch.testing.assert_close(found, (x * 2).softmax(-1))
    found = torch.compile(lambda x: x.exp(), backend=backend)(x)  # compiles after a capture
    torch.testing.assert_close(found, x.exp())
