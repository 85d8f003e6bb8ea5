"""Generated code of plans: every kind of operator, replayed by a stand-in for the driver, gives the bits of plain calls."""

import gc
import weakref

import plan_driver as driver
import pytest
import torch
from plan_samples import counted, plainly, same, warm

import cupyops
from cupyops._operator.derivation import parameters, plans, replay
from cupyops._operator.derivation.public import plans_of


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def classes(count, *shape):
    return torch.randint(0, count, shape)


CASES = {
    "add": lambda: (leaf(5, 6), leaf(6)),
    "add_rms_norm": lambda: (leaf(3, 8), leaf(3, 8), (8,), leaf(8)),
    "amax": lambda: (leaf(3, 8), 1),
    "avg_pool2d": lambda: (leaf(2, 3, 6, 6), 2),
    "batch_norm": lambda: (leaf(2, 8, 4, 4), torch.zeros(8), torch.ones(8), leaf(8), leaf(8), True),
    "batch_norm_act": lambda: (
        *(leaf(2, 8, 4, 4), torch.zeros(8), torch.ones(8), leaf(8), leaf(8)),
        *(True, 0.1, 1e-5, "relu", leaf(2, 8, 4, 4)),
    ),
    "bias_gelu": lambda: (leaf(4, 8), leaf(8)),
    "conv2d": lambda: (leaf(2, 3, 6, 6), leaf(4, 3, 3, 3), leaf(4)),
    "cross_entropy": lambda: (leaf(8, 10), classes(10, 8)),
    "cross_entropy wide": lambda: (leaf(8, 100), classes(100, 8)),
    "dropout": lambda: (leaf(4, 8), 0.5),
    "embedding": lambda: (classes(8, 4, 4), leaf(8, 16)),
    "gelu": lambda: (leaf(4, 8),),
    "group_norm": lambda: (leaf(2, 8, 4, 4), 2, leaf(8), leaf(8)),
    "layer_norm": lambda: (leaf(8, 16), (16,), leaf(16), leaf(16)),
    "layer_norm odd": lambda: (leaf(3, 37), (37,), leaf(37), leaf(37)),
    "linear": lambda: (leaf(8, 16), leaf(16, 16), leaf(16)),
    "linear frozen": lambda: (leaf(8, 16), torch.randn(16, 16), torch.randn(16)),
    "linear first": lambda: (torch.randn(8, 16), leaf(16, 16), leaf(16)),
    "linear bias": lambda: (torch.randn(8, 16), torch.randn(16, 16), leaf(16)),
    "log_softmax": lambda: (leaf(4, 8), -1),
    "matmul": lambda: (leaf(8, 16), leaf(16, 4)),
    "matmul frozen": lambda: (leaf(8, 16), torch.randn(16, 4)),
    "max_pool2d": lambda: (leaf(2, 3, 6, 6), 2),
    "mean": lambda: (leaf(4, 8), 1),
    "nll_loss": lambda: (leaf(8, 10), classes(10, 8)),
    "relu": lambda: (leaf(4, 8),),
    "rms_norm": lambda: (leaf(4, 8), (8,), leaf(8)),
    "scale_shift frozen": lambda: (leaf(4, 8), torch.randn(8), leaf(8)),
    "silu": lambda: (leaf(4, 8),),
    "softmax": lambda: (leaf(4, 8), -1),
    "sum": lambda: (leaf(4, 8), -1),
    "swiglu": lambda: (leaf(4, 8), leaf(4, 8)),
    "swiglu up": lambda: (torch.randn(4, 8), leaf(4, 8)),
    "var": lambda: (leaf(4, 8), 1),
}


@pytest.fixture
def known():
    with driver.driver() as found:
        yield found


def both(function, args, grads):
    """Results and gradients, from one seed, of arguments that are as they were before any call."""
    args = tuple(
        one.detach().clone().requires_grad_(one.requires_grad) if torch.is_tensor(one) else one for one in args
    )
    torch.manual_seed(1)
    y = function(*args)
    ys = [one for one in (y if isinstance(y, tuple) else (y,)) if one.requires_grad]
    leaves = [one for one in args if torch.is_tensor(one) and one.requires_grad]
    found = torch.autograd.grad(ys, leaves, grads(ys)) if ys and torch.is_grad_enabled() else ()
    return [*(y if isinstance(y, tuple) else (y,)), *found, *[one.detach() for one in args if torch.is_tensor(one)]]


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_a_plain_call(known, name, gradient):
    function, args = getattr(cupyops, name.split()[0]), CASES[name]()
    weights = [torch.randn(64, 64) for _ in range(3)]

    def grads(ys):
        return [w.flatten()[: y.numel()].reshape(y.shape).clone() for w, y in zip(weights, ys)]

    with torch.set_grad_enabled(gradient):
        expected = plainly(both, function, args, grads)
        for _ in range(9):  # what a backward has returned of what forward saved is then saved anew
            assert same(both(function, args, grads), expected)
        known.launches.clear()
        with counted() as count:
            found = both(function, args, grads)
        assert (count.misses, count.backward_misses) == (0, 0), plans_of(function).reason
        assert known.launches and same(found, expected)
    for one in found[: len(found) - sum(map(torch.is_tensor, args))]:
        whole = one.untyped_storage().nbytes() == one.numel() * one.element_size()
        assert one._base is not None or whole or one.stride() != torch.empty_like(one).stride()


def test_what_is_saved_shares_an_allocation(known):
    args = CASES["layer_norm"]()
    warm(cupyops.layer_norm, *args)
    x, _, weight, _ = args
    y = cupyops.layer_norm(*args)
    saved = y.grad_fn.saved_tensors
    assert [tuple(one.shape) for one in saved] == [(8, 16), (16,), (2 * replay.APART // 4,)]
    assert saved[0] is x and saved[1] is weight


def test_an_error_before_the_first_launch_is_told_by_a_plain_call(known, monkeypatch):
    x = leaf(4, 8)
    warm(cupyops.relu, x)
    monkeypatch.setattr(driver.Machine, "stream", None)
    plan = next(plan for plan in plans_of(cupyops.relu).plans.values() if plan.call is not None)
    with counted() as count:
        assert torch.equal(cupyops.relu(x), torch.relu(x))
    assert count.misses == 0 and plan.recording.inner is not None


def test_a_buffer_that_another_thread_takes_first(known, monkeypatch):
    class Taken(list):
        def __bool__(self):
            return True  # there was one a moment ago

    def with_taken(self, writer, *rest, given=parameters.Buffers.__init__):
        given(self, writer, *rest)
        self.slots = writer.name(Taken())

    monkeypatch.setattr(parameters.Buffers, "__init__", with_taken)
    x = torch.randn(3, 11)
    warm(cupyops.relu, x)
    with counted() as count:
        assert torch.equal(cupyops.relu(x), torch.relu(x))
    assert count.misses == 0


def test_text_is_compiled_once_for_plans_of_one_structure(known):
    from cupyops._operator.derivation import codegen

    for size in range(3, 9):
        warm(cupyops.relu, torch.ones(size))
    assert codegen._compiled.cache_info().hits > 0


def test_a_launch_after_the_first_that_fails_says_which():
    class DriverError(RuntimeError):
        pass

    class Launched:
        class specialised:
            name = "scale<float>"

        configuration = "grid (1, 1, 1)"

    error = replay.explained(DriverError("an illegal memory access"), [Launched])
    assert isinstance(error, cupyops.LaunchError)
    assert "scale<float> with grid (1, 1, 1): an illegal memory access" in str(error) and "CUPYOPS_DEBUG=1" in str(
        error
    )
    other = ValueError("of a function of PyTorch")
    assert replay.explained(other, [Launched]) is other


def test_a_fork_forgets():
    x = torch.ones(3)
    with driver.driver():
        warm(cupyops.relu, x)
        assert plans_of(cupyops.relu).plans
        plans._everywhere[-1] = weakref.ref(set()), None, None  # as of a function that nobody holds any more
        plans._after_fork()
        assert not plans_of(cupyops.relu).plans and not plans._everywhere


def moved(args, device):
    """The arguments on a device, leaves again."""
    return tuple(
        one.detach().to(device).requires_grad_(one.requires_grad) if torch.is_tensor(one) else one for one in args
    )


@pytest.mark.gpu
@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradient"])
@pytest.mark.parametrize("name", CASES)
def test_the_bits_of_a_plain_call_on_a_gpu(name, gradient):
    """By the driver, with memory as PyTorch gives it; on a stream of its own too."""
    torch.use_deterministic_algorithms(False)
    function, args = getattr(cupyops, name.split()[0]), moved(CASES[name](), "cuda")

    def grads(ys):
        torch.manual_seed(2)
        return [torch.randn_like(y) for y in ys]

    with torch.set_grad_enabled(gradient):
        expected = plainly(both, function, args, grads)
        for _ in range(9):
            assert same(both(function, args, grads), expected)
        with counted() as count:
            found = both(function, args, grads)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                there = both(function, args, grads)
            torch.cuda.synchronize()
        assert (count.misses, count.backward_misses) == (0, 0), plans_of(function).reason
        assert same(found, expected) and same(there, expected)


@pytest.mark.gpu
def test_a_plan_inside_a_captured_graph():
    torch.use_deterministic_algorithms(False)
    x, _, weight, bias = args = moved(CASES["layer_norm"](), "cuda")
    warm(cupyops.layer_norm, *args)
    graph, grad = torch.cuda.CUDAGraph(), torch.randn(8, 16, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.autograd.grad(cupyops.layer_norm(*args), [x, weight, bias], grad)
    torch.cuda.synchronize()
    with counted() as count, torch.cuda.graph(graph):
        y = cupyops.layer_norm(*args)
        found = torch.autograd.grad(y, [x, weight, bias], grad)
    assert (count.misses, count.backward_misses) == (0, 0)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    other = plainly(cupyops.layer_norm, *args)
    assert torch.equal(y, other)
    assert same(list(found), list(torch.autograd.grad(other, [x, weight, bias], grad)))


@pytest.mark.gpu
def test_memory_that_is_given_back_is_not_held_on_a_gpu():
    """Temporaries of a plan are given back when it ends; what is saved when the graph is."""
    torch.use_deterministic_algorithms(False)
    args = moved(CASES["layer_norm"](), "cuda")
    warm(cupyops.layer_norm, *args)
    gc.collect()
    before = torch.cuda.memory_allocated()
    y = cupyops.layer_norm(*args)
    torch.autograd.grad(y.sum(), [args[0]])
    del y
    gc.collect()
    assert torch.cuda.memory_allocated() == before
