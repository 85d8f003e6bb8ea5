"""What `torch.compile(backend="cupyops")` must hold besides numbers: failures, sizes, threads, gradients, resets."""

import functools
import operator
import os
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from compiled import copied, programs
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.utils import checkpoint as checkpoints

import cupyops
from cupyops._compile import debug, options, runner
from cupyops._compile.backend import backend
from cupyops._compile.decompositions import decompositions
from cupyops._compile.lowering import Lowering
from cupyops._compile.program import Program
from cupyops._compile.rules import RULES
from cupyops._kernel.launch import faults
from cupyops.errors import CompileError, InputError


@pytest.fixture(autouse=True)
def afresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def simulated():
    """Kernels run, in the simulator; what backend leaves to PyTorch by mistake is an error."""
    with cupyops.simulate("sm_90"), warnings.catch_warnings():
        warnings.filterwarnings("error", message="backend cupyops")
        yield


def fast(function, **given):
    return torch.compile(function, backend=backend, **given)


def same(got, want):
    torch.testing.assert_close(got, want)


def rand(*shape, grad=True):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_(grad)


# -- rules -------------------------------------------------------------------------------------------------------------


def test_no_decomposition_hides_a_rule():
    """But that of `detach`, which decomposes only what AOTAutograd traces."""
    assert RULES.keys() & decompositions().keys() == {torch.ops.aten.detach.default}


# -- options and names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mode, given, words",
    [
        ("max-autotune", None, ["mode is 'max-autotune'", '"reduce-overhead"']),
        (None, {"cudagraph": True}, ["no option 'cudagraph'; there are", "did you mean cudagraphs?", "exact"]),
        (None, {"cudagraphs": 1}, ["options['cudagraphs'] is 1", "expected True or False"]),
    ],
)
def test_wrong_options_are_named(mode, given, words):
    with pytest.raises(InputError) as told:
        options.Options.of(mode, given)
    assert all(word in str(told.value) for word in words)


def test_options_of_the_modes():
    assert options.Options.of("reduce-overhead", None) == options.Options(cudagraphs=True)
    assert options.Options.of("default", {"exact": True}) == options.Options(exact=True)
    assert options.Options.of(None, None) == options.Options()


def test_exact_rounds_halves_after_each_operator(simulated):
    """Between operators that share a kernel values are float32 by default; `exact` rounds them as eager does."""

    def function(x):
        return (x + 1) * x - x * x

    x = torch.linspace(0.01, 3, 256).bfloat16()
    exact = fast(function, options={"exact": True})(x)
    assert torch.equal(exact, function(x))
    torch._dynamo.reset()
    assert not torch.equal(fast(function)(x), exact)


# -- failures ----------------------------------------------------------------------------------------------------------


def warned(call):
    """The backend's warnings during a call in the simulator."""
    with cupyops.simulate("sm_90"), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        call()
    return [str(one.message) for one in told if "backend cupyops" in str(one.message)]


def test_a_failure_of_lowering_is_one_warning_and_pytorchs_result(monkeypatch):
    def fail(*_):
        raise ValueError("no such thing")

    monkeypatch.setattr(Lowering, "_by_rule", fail)
    compiled = fast(lambda x: x * 2)
    said = warned(lambda: [same(compiled(torch.ones(4)), torch.full((4,), 2.0)) for _ in range(3)])
    assert len(said) == 1
    for word in ("ValueError: no such thing", "aten.mul.Tensor", "float32[4]", "CUPYOPS_STRICT=1", "aot_graphs"):
        assert word in said[0]


def test_a_failure_is_an_error_where_it_is_asked_for(monkeypatch):
    monkeypatch.setenv("CUPYOPS_STRICT", "1")
    monkeypatch.setattr(Lowering, "_by_rule", lambda *_: 1 / 0)
    with cupyops.simulate("sm_90"), pytest.raises(BackendCompilerFailed, match="ZeroDivisionError"):
        fast(lambda x: x * 2)(torch.ones(4))


def test_a_kernel_that_nvrtc_refuses_is_one_warning_and_pytorchs_result(monkeypatch):
    monkeypatch.setattr("cupyops._compile.program.INCLUDE", '#include "compiled/elements.cuh"\nnonsense;\n')
    compiled = fast(lambda x: (x * 2.125).sum())
    said = warned(lambda: [same(compiled(torch.ones(4)), torch.tensor(8.5)) for _ in range(3)])
    assert len(said) == 1 and "CompileError" in said[0] and "nonsense" in said[0]


def test_tensors_that_no_kernel_knows_are_pytorchs(graphs):
    compiled = fast(lambda x: x.abs() * 2)
    with cupyops.simulate("sm_90"):
        same(compiled(torch.tensor([3 + 4j])), torch.tensor([10.0]))
    assert graphs[0].reason is None


def test_several_streams_in_a_graph_are_pytorchs():
    graph = torch.fx.Graph()

    def record():
        pass

    record.namespace = "streams"
    graph.call_function(record)
    graph.output(())
    assert "several streams" in runner.Runner(torch.fx.GraphModule({}, graph), "forward", exact=False).reason


# -- logs, traces, debugging -------------------------------------------------------------------------------------------


def test_a_log_says_what_became_of_each_graph(simulated, caplog):
    with caplog.at_level("INFO", logger="cupyops.compile"):
        fast(lambda x, w: (x @ w).relu().sum())(rand(4, 4), rand(4, 4)).backward()
    said = [record.getMessage() for record in caplog.records if record.levelname == "INFO"]
    assert any("forward graph" in one and "by PyTorch: aten.mm.default" in one for one in said), said
    assert any("backward graph" in one and "by PyTorch: aten.mm.default x 2" in one for one in said), said


def test_a_trace_names_kernels_and_what_pytorch_ran():
    compiled = fast(lambda x: x.exp() * 2)
    with cupyops.trace() as trace:
        compiled(torch.ones(4))
        with cupyops.simulate("sm_90"):
            compiled(torch.ones(4))
    said = [(one.operator, one.route, one.note) for one in trace.records]
    assert said[0] == ("torch.compile: inference", "reference", "tensors on cpu")
    assert ("torch.compile: inference", "simulator", "") in said


def test_output_code_has_kernels_and_the_function(simulated):
    fast(lambda x: x.exp() * 2)(torch.ones(4))
    text = programs[-1].text()
    assert "__global__ void" in text and "def run(args):" in text


@pytest.fixture
def debugging(monkeypatch):
    monkeypatch.setattr(faults, "debug", True)


def test_debugging_compares_results_and_written_inputs(debugging, simulated):
    def function(x, y):
        y.add_(x.sum(0))
        return F.dropout(x, 0.5), x.softmax(-1), (x > 0), x.argmax(-1)

    compiled = fast(function)
    for _ in range(2):
        x, y = rand(4, 8, grad=False), torch.zeros(8)
        compiled(x, y)
        same(y, x.sum(0))


@pytest.mark.parametrize("where", ["output", "input"])
def test_debugging_names_the_first_result_that_differs(where, debugging, simulated, monkeypatch):
    plain = Program.run

    def wrong(self, args):
        given = list(args)
        found = plain(self, args)
        with torch.no_grad():
            (found[1] if where == "output" else given[0]).view(-1)[3] += 1
        return found

    monkeypatch.setattr(Program, "run", wrong)

    def function(x):
        return x.exp(), x.sin() * 2

    named = r"output 1 \(mul\)" if where == "output" else r"the input arg0_1, afterwards,"
    with pytest.raises(CompileError, match=named + r" of an? inference graph.*at index \(0, 3\)"):
        fast(function)(rand(2, 8, grad=False))


@pytest.mark.parametrize(
    "want, got, differs",
    [
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, float("nan")]), False),
        (torch.tensor([1.0, float("inf")]), torch.tensor([1.0, 3e38]), True),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, float("nan")]), True),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.01]), True),
        (torch.tensor([1.0, 2.0]).half(), torch.tensor([1.0, 2.01]).half(), False),
        (torch.tensor([float("inf")]).half(), torch.tensor([65504.0]).half(), False),
        (torch.arange(4), torch.tensor([0, 1, 2, 4]), True),
        (torch.zeros(2), torch.zeros(3), True),
        (None, None, False),
        (3, None, True),
    ],
)
def test_what_debugging_takes_for_a_difference(want, got, differs):
    assert bool(debug._difference(want, got, floats=False)) == differs


# -- sizes that change -------------------------------------------------------------------------------------------------


def counted(function, **given):
    """(the compiled function, a list with one entry for each graph that Dynamo makes)."""
    made = []

    def counting(graph, inputs):
        made.append(graph)
        return backend(graph, inputs)

    return torch.compile(function, backend=counting, **given), made


def attention(x, w):
    q = (x @ w).view(x.shape[0], -1, 2, 4).transpose(1, 2)
    return (F.softmax(q @ q.transpose(-1, -2), -1) @ q).mean(2) / x.shape[0]


def test_ten_batch_sizes_are_at_most_two_graphs(simulated):
    compiled, made = counted(attention)
    for batch in (4, 2, 3, 5, 6, 7, 8, 9, 10, 11):
        x, w = rand(batch, 3, 8), rand(8, 8)
        x.grad = w.grad = None
        both = copied([x, w])
        same(compiled(x, w), attention(*both))
        compiled(x, w).sum().backward()
        attention(*both).sum().backward()
        same((x.grad, w.grad), tuple(one.grad for one in both))
    assert len(made) <= 2


@pytest.mark.parametrize("size", [0, 1, 2])
def test_small_sizes_after_large_ones(size, simulated):
    def function(x):
        return x.sum(0) + x.shape[0], F.softmax(x, -1)

    compiled = fast(function)
    for rows in (7, 5, size):
        same(compiled(rand(rows, 6, grad=False)), function(rand(rows, 6, grad=False)))


def mixture(x):
    n, m = x.shape
    padded = F.pad(x, (0, -m % 8))
    return torch.cat([x, x * 2]).view(-1) / n + torch.arange(2 * n * m), padded.sum(0), x.mean(0) * m


@pytest.mark.parametrize("how", ["dynamic", "marked"])
def test_dynamic_sizes_in_a_single_graph(how, simulated):
    compiled, made = counted(mixture, dynamic=True if how == "dynamic" else None, fullgraph=True)
    for n in (3, 5, 4):
        x = rand(n, 6, grad=False)
        if how == "marked":
            torch._dynamo.mark_dynamic(x, 0)
        same(compiled(x), mixture(x))
    assert len(made) == 1


@torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)
def test_numbers_that_data_decides(simulated):
    def function(x, n):
        kept = x[x > 0] * 2
        return kept.sum() + x.nonzero().sum(), torch.zeros(n.item()) + kept.exp().mean(), x * n.item()

    compiled = fast(function, fullgraph=True)
    for n in (3, 5):
        x = rand(40, grad=False)
        same(compiled(x, torch.tensor(n)), function(x, torch.tensor(n)))


def test_python_numbers_and_lists_that_change(simulated):
    def function(x, shift, scale, sizes):
        return [one.sum() * scale + shift for one in x.split(sizes)]

    compiled = fast(function)
    for given in ((1, 0.5, [2, 6]), (2, 0.25, [3, 5]), (3, 1.5, [4, 4]), (3, 2.5, [7, 1])):
        x = rand(8, grad=False)
        same(compiled(x, *given), function(x, *given))


def test_a_cache_that_grows(simulated):
    w = rand(4, 4, grad=False)

    def step(x, cache):
        cache = torch.cat([cache, x])
        return (x[-1] @ w) @ cache.t(), cache

    compiled, made = counted(step)
    ours = theirs = rand(1, 4, grad=False)
    for token in range(5):
        x = rand(1, 4, grad=False) + token
        got, ours = compiled(x, ours)
        want, theirs = step(x, theirs)
        same((got, ours), (want, theirs))
    assert len(made) <= 3


def runner_of_sizes(monkeypatch, serves):
    """A runner whose programs serve sizes as `serves` says, and the list of the sizes for which one was made."""
    graph = torch.fx.Graph()
    graph.output(())
    found, made = runner.Runner(torch.fx.GraphModule({}, graph), "forward", exact=False), []

    class Made:
        kernels = left = conditions = ()

        def __init__(self, graph, sizes, exact):
            (size,) = sizes.values.values()
            made.append(size)
            self.serves = lambda other: serves(size, other)

        def compile(self, arch):
            pass

        def text(self):
            return ""

    monkeypatch.setattr(runner, "Program", Made)
    monkeypatch.setattr(found.symbols, "places", {"s": (0, None)})
    monkeypatch.setattr(found.symbols, "bounds", {"s": (0, 1 << 40)})
    return found, made


def test_a_program_serves_the_sizes_that_its_conditions_allow(simulated, monkeypatch):
    found, made = runner_of_sizes(monkeypatch, lambda size, other: size % 2 == other % 2)
    first = [found._program([size]) for size in (4, 6, 7, 8, 9, 4)]
    assert made == [4, 7] and [found.programs.index(one) for one in first] == [0, 0, 1, 0, 1, 0]


def test_sizes_that_never_return_do_not_compile_at_each_call(simulated, monkeypatch):
    found, made = runner_of_sizes(monkeypatch, operator.eq)
    for size in range(1000):
        found._program([size])
    assert made == list(range(runner.AT_ONCE))
    assert found._program([500]) is not None and made[-1] == 500


def test_a_graph_has_a_limited_number_of_programs(simulated, monkeypatch):
    found, made = runner_of_sizes(monkeypatch, operator.eq)
    monkeypatch.setattr(runner, "MOST_KNOWN", 120)
    for _ in range(3):
        for size in range(100):
            found._program([size])
    assert len(made) == runner.MOST_PROGRAMS and len(found._known) <= 120 and len(found._seen) <= 120


# -- gradients ---------------------------------------------------------------------------------------------------------


def test_backward_twice_hooks_and_a_third_time(simulated):
    compiled, x, heard = fast(lambda x: (x.sin() * x).sum()), rand(8), []
    x.register_hook(heard.append)
    y = compiled(x)
    y.register_hook(lambda grad: grad * 2)
    y.backward(retain_graph=True)
    y.backward()
    same(x.grad, 4 * (x.cos() * x + x.sin()).detach())
    assert len(heard) == 2
    with pytest.raises(RuntimeError, match="a second time"):
        y.backward()


def test_what_is_saved_and_changed_before_backward(simulated):
    x, w = rand(4, 4), rand(4, 4)
    y = fast(lambda x, w: (x @ w).exp())(x, w)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_double_backward_says_that_there_is_none(simulated):
    x = rand(4)
    (grad,) = torch.autograd.grad(fast(lambda x: (x**3).sum())(x), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        grad.sum().backward()


@pytest.mark.parametrize("grad", ["partial", "expanded", "strided"])
def test_gradients_as_autograd_gives_them(grad, simulated):
    def function(x):
        return x * 2, x.exp()

    x, twin = copied([rand(4, 6)] * 2)
    for one, called in ((x, fast(function)), (twin, function)):
        first, second = called(one)
        if grad == "partial":
            second.sum().backward()
        elif grad == "expanded":
            torch.autograd.backward([first, second], [torch.ones(1, 6).expand(4, 6), torch.ones(()).expand(4, 6)])
        else:
            torch.autograd.backward([first, second], [torch.ones(6, 4).t(), torch.ones(8, 6)[::2]])
    same(x.grad, twin.grad)


def block(x, w):
    return torch.sigmoid(F.gelu(x @ w)) * x


@pytest.mark.parametrize("selective", [False, True])
def test_checkpointing(selective, simulated):
    def policy(context, called, *args, **kwargs):
        keep = called is torch.ops.aten.mm.default
        return checkpoints.CheckpointPolicy.MUST_SAVE if keep else checkpoints.CheckpointPolicy.PREFER_RECOMPUTE

    more = {"context_fn": functools.partial(checkpoints.create_selective_checkpoint_contexts, policy)}
    given = more if selective else {}

    def function(x, w):
        return checkpoints.checkpoint(block, x, w, use_reentrant=False, **given).sum()

    ours, theirs = copied([rand(8, 8), rand(8, 8)]), copied([rand(8, 8), rand(8, 8)])
    fast(function, fullgraph=True)(*ours).backward()
    block(*theirs).sum().backward()
    for one, other in zip(ours, theirs):
        same(one.grad, other.grad)


def test_checkpointing_draws_the_same_numbers_again(simulated):
    def function(x):
        return checkpoints.checkpoint(lambda x: F.dropout(x.sin(), 0.5), x, use_reentrant=False)

    x = rand(256)
    compiled = fast(function, fullgraph=True)
    kept = []
    for _ in range(2):
        x.grad = None
        y = compiled(x)
        y.sum().backward()
        kept.append(y != 0)
        same(x.grad, kept[-1].float() * 2 * x.cos().detach())
    assert not torch.equal(*kept)


def test_transforms_of_torch_func_inside(simulated):
    def function(x):
        each = torch.func.vmap(torch.func.grad(lambda t: (t.sin() * t).sum()))(x)
        return each, torch.func.jvp(torch.exp, (x,), (x,))[1], torch.func.jacrev(lambda t: t**2)(x[0])

    x = rand(3, 4, grad=False)
    same(fast(function, fullgraph=True)(x), (x.cos() * x + x.sin(), x.exp() * x, torch.diag(2 * x[0])))


def test_compiled_autograd(simulated, graphs):
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)), rand(4, 8)
    model(x).sum().backward()
    want = [one.grad.clone() for one in model.parameters()]
    model.zero_grad()
    with torch._dynamo.compiled_autograd._enable(fast):
        fast(model)(x).sum().backward()
    for one, grad in zip(model.parameters(), want):
        same(one.grad, grad)
    assert any(one.kind == "inference" for one in graphs)  # the backward of the whole, as one graph


@pytest.mark.parametrize("kind", [torch.optim.AdamW, functools.partial(torch.optim.SGD, momentum=0.9)])
def test_compiled_optimizers(kind, simulated):
    ours, theirs = copied([rand(5, 3), rand(4)]), copied([rand(5, 3), rand(4)])
    one, other = kind(ours, lr=0.1), kind(theirs, lr=0.1)
    step = fast(one.step)
    for _ in range(3):
        for p, q in zip(ours, theirs):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        step()
        other.step()
    for p, q in zip(ours, theirs):
        same(p.detach(), q.detach())


def test_autocast_and_a_scaler(simulated):
    def trained(compile):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
        called = fast(model) if compile else model
        optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("cpu", init_scale=256.0)
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = called(torch.ones(4, 8)).float().square().mean()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return torch.cat([one.detach().flatten() for one in model.parameters()])

    torch.testing.assert_close(trained(True), trained(False), rtol=2e-2, atol=2e-2)


# -- Python around it --------------------------------------------------------------------------------------------------


def test_graph_breaks_and_exceptions(simulated):
    def function(x, fail):
        y = x * 2
        torch._dynamo.graph_break()
        if fail:
            raise KeyError("the user's own")
        return y.sum() + 1

    compiled, x = fast(function), rand(8, grad=False)
    with pytest.raises(KeyError, match="the user's own"):
        compiled(x, True)
    same(compiled(x, False), function(x, False))


def test_a_failed_call_leaves_written_inputs_as_they_were(simulated):
    """An index out of range is PyTorch's error; the next call is right."""

    def function(x, total, index):
        total.add_(x.sum())
        return x[index] * 2

    compiled, x = fast(function), rand(8, grad=False)
    for index, fails in ((torch.tensor([1]), False), (torch.tensor([9]), True), (torch.tensor([2]), False)):
        total = torch.zeros(())
        if fails:
            with pytest.raises((RuntimeError, IndexError)):
                compiled(x, total, index)
            assert total == 0
        else:
            same(compiled(x, total, index), x[index] * 2)


def test_threads_compile_and_run_at_once(simulated):
    wrong = []

    def work(number):
        def function(x):
            return (x * number).relu().sum(0) + number

        try:
            compiled = fast(function, fullgraph=True)
            for rows in (3, 4, 5):
                x = rand(rows, 16, grad=False)
                same(compiled(x), function(x))
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in (1, 2, 3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert not wrong


def test_a_fork_runs_what_was_compiled_before_and_compiles_anew(simulated):
    compiled, x = fast(lambda x: (x * 3).sum()), torch.ones(8)
    same(compiled(x), torch.tensor(24.0))
    child = os.fork()
    if not child:
        status = 1
        try:
            fine = compiled(x) == 24 and fast(lambda x: (x * 5).sum())(x) == 40
            status = 0 if fine else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_reset_forgets_and_compiles_again(simulated, graphs):
    function = fast(lambda x: x * 2)
    for times in (1, 2):
        same(function(torch.ones(4)), torch.full((4,), 2.0))
        assert len(graphs) == times
        torch._dynamo.reset()


@pytest.mark.parametrize("operator", ["cond", "while_loop"])
def test_control_flow_keeps_its_bodies(operator, simulated):
    from torch._higher_order_ops.while_loop import while_loop

    def function(x):
        if operator == "cond":
            return torch.cond(x.sum() > 0, lambda x: x * 2 + 1, lambda x: x - 1, (x,)) * 3
        return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, x * 2), (torch.tensor(0), x))[1] + 1

    compiled = fast(function, fullgraph=True)
    for x in (torch.ones(4), -torch.ones(4)):
        same(compiled(x), function(x))


def test_on_the_cpu_alone_pytorch_runs_the_graph(graphs):
    compiled, x = fast(lambda x: (x.exp() * 2).sum(0)), rand(4, 8)
    twin = copied([x])[0]
    compiled(x).sum().backward()
    (twin.exp() * 2).sum().backward()
    same(x.grad, twin.grad)
    assert all(not one.programs and one.reason is None for one in graphs)
