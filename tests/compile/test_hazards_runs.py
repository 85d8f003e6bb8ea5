"""Hazards of randomness, of shapes and of runs: seeds, checkpoints, sizes that change, control flow, autocast, threads."""

import functools
import threading

import pytest
import torch
import torch.nn.functional as F
from compiled import compiled, traced
from torch.utils.checkpoint import checkpoint

import cupyops

HALF = torch.bfloat16


def rand(*shape, grad=False):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + 11)).requires_grad_(grad)


def close(found, wanted):
    found, wanted = ([one] if isinstance(one, torch.Tensor) else list(one) for one in (found, wanted))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def trained(call, *arguments, seed=3):
    """Results and gradients for a seed."""
    given = [
        one.detach().clone().requires_grad_(one.requires_grad) if isinstance(one, torch.Tensor) else one
        for one in arguments
    ]
    torch.manual_seed(seed)
    results = call(*given)
    results = list(results) if isinstance(results, (tuple, list)) else [results]
    sum(one.float().sum() for one in results if one.requires_grad).backward()
    return [
        *(one.detach() for one in results),
        *(one.grad for one in given if isinstance(one, torch.Tensor) and one.requires_grad),
    ]


# -- randomness --------------------------------------------------------------------------------------------------------


DRAWS = {
    "dropout": lambda x: F.dropout(F.gelu(x) * 2, 0.3) + 1,
    "two dropouts": lambda x: F.dropout(F.dropout(x, 0.5).exp(), 0.2) * x,
    "dropout with p = 0 and 1": lambda x: (F.dropout(x, 0.0) * 2, F.dropout(x, 0.5), F.dropout(x, 1.0) + x),
    "draws in turn": lambda x: (x + torch.rand(8, 6), torch.randn(6) * x, x * torch.randint(0, 9, (6,)), F.dropout(x)),
    "draws like another": lambda x: (
        x * torch.rand_like(x) + torch.randn_like(x) + torch.bernoulli(torch.full_like(x, 0.5))
    ),
    "permutations": lambda x: x[torch.randperm(8)] * 2 + torch.randperm(6),
    "multinomial": lambda x: x[torch.multinomial(x.detach().softmax(-1)[0], 4)] * 2,
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_seed_gives_eagers_numbers_and_each_call_others(name):
    """Forward and backward have one mask."""
    fast, x = compiled(DRAWS[name]), rand(8, 6, grad=True)
    with cupyops.simulate():
        first, second = trained(fast, x), trained(fast, x)
        other = trained(fast, x, seed=4)
        torch.manual_seed(3)
        once, then = fast(x), fast(x)
    close(first, trained(DRAWS[name], x))
    assert all(torch.equal(a, b) for a, b in zip(first, second))
    once, then = (one if isinstance(one, tuple) else (one,) for one in (once, then))
    assert any(not torch.equal(a, b) for a, b in zip(first, other))
    assert any(not torch.equal(a, b) for a, b in zip(once, then))


@pytest.mark.parametrize("p", [0.0, 0.4, 0.9])
def test_a_checkpoint_computes_again_with_forwards_state(p):
    torch.manual_seed(0)
    layer = torch.nn.Linear(6, 6)

    def block(x):
        return F.dropout(F.gelu(layer(x)), p) * 2 + F.dropout(x, 0.25 if p else 0.0)

    def function(x):
        y = checkpoint(block, x, use_reentrant=False, preserve_rng_state=True)
        return checkpoint(block, y, use_reentrant=False).sum() + F.dropout(y, p).sum()

    fast, x = compiled(function), rand(4, 6, grad=True)
    with cupyops.simulate():
        found = trained(fast, x)
    close(found, trained(function, x))


def test_a_selective_checkpoint():
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    layer = torch.nn.Linear(6, 6)

    def policy(context, op, *args, **kwargs):
        saved = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    def function(x):
        contexts = functools.partial(create_selective_checkpoint_contexts, policy)
        return checkpoint(lambda y: F.silu(layer(y)).exp(), x, use_reentrant=False, context_fn=contexts).sum()

    fast, x = compiled(function), rand(4, 6, grad=True)
    with cupyops.simulate():
        close(trained(fast, x), trained(function, x))


@pytest.mark.parametrize("budget", [0.0, 0.5, 1.0])
def test_any_budget_of_memory_gives_the_same_gradients(budget):
    from torch._functorch import config

    def function(x, w):
        for _ in range(3):
            x = F.dropout(F.gelu(x @ w), 0.2) * 2
        return x.amax(-1) + F.softmax(x, -1).sum(-1)

    fast, x, w = compiled(function), rand(5, 8, grad=True), rand(8, 8, grad=True)
    with cupyops.simulate(), config.patch(activation_memory_budget=budget):
        close(trained(fast, x, w), trained(function, x, w))


# -- shapes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_sizes_of_0_1_and_2_after_large_ones(dynamic):
    def function(x, w):
        y = F.layer_norm(F.gelu(x * w), (6,))
        return y, y.sum(0), y.mean(-1), torch.cat([x, y])

    fast, w = compiled(function, dynamic=dynamic), rand(6)
    with cupyops.simulate():
        for n in (33, 2, 1, 0, 7, 64, 1):
            x = rand(n, 6)
            close(fast(x, w), function(x, w))


@pytest.mark.parametrize("dynamic", [None, True])
def test_inputs_whose_sizes_meet_and_broadcast(dynamic):
    fast = compiled(lambda a, b: (a * b).sum(0) + a.amax(0), dynamic=dynamic)
    with cupyops.simulate():
        for a, b in ((4, 4), (5, 5), (5, 1), (1, 5), (1, 1), (9, 9)):
            x, y = rand(a, 3), rand(b, 3)
            close(fast(x, y), (x * y).sum(0) + x.amax(0))


def test_python_numbers_and_lists_that_change():
    def function(x, n, s, sizes):
        return x * s + n, x.repeat(n, 1), x.view(sizes).sum(-1), F.pad(x, (n, 0)), x.roll(n, 0), torch.full((n,), s) + s

    fast, x = compiled(function, dynamic=None), rand(4, 6)
    with cupyops.simulate():
        for n, s, sizes in ((2, 0.5, [4, 6]), (3, 1.5, [2, 12]), (5, -2.25, [8, 3]), (1, 0.0, [24, 1])):
            close(fast(x, n, s, sizes), function(x, n, s, sizes))


@pytest.mark.parametrize(
    "name,function",
    [
        ("item", lambda x: x * x.sum().item() + x.argmax().item()),
        ("nonzero", lambda x: (x > 0).nonzero().sum(0) * 2),
        ("masks", lambda x: (x[x > 0] * 2).sum() + x[x[:, 0] > 0].exp().sum(0)),
        ("unique", lambda x: (x > 0).int().unique() + 1),
        ("split by tensors", lambda x: x.repeat_interleave(torch.tensor([1, 0, 2, 3]), 0) * 2),
    ],
)
@torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True)
def test_sizes_and_scalars_that_data_decides(name, function):
    fast = compiled(lambda x: function(x * 2) + 1, dynamic=None, fullgraph=False)
    with cupyops.simulate():
        for seed in range(3):
            x = rand(4, 5 + seed % 2) * (1 - 2 * (seed % 2))
            close(fast(x), function(x * 2) + 1)


def test_dynamic_sizes_in_shapes_ranges_pads_means_and_gradients():
    def function(x):
        n = x.shape[0]
        padded = F.pad(x, (0, 0, 0, -n % 4))
        return (
            torch.cat([x, x * 2]).sum(0),
            x.view(-1) * 2,
            x * torch.arange(n)[:, None],
            padded.view(-1, 4, 6).sum(1),
            x.sum() / n,
            x[-1] * x.mean(0),
            x[n // 2 :].exp().sum(0),
        )

    fast = compiled(function, dynamic=True)
    with cupyops.simulate():
        for n in (5, 8, 3, 13):
            x = rand(n, 6, grad=True)
            close(trained(fast, x), trained(function, x))


# -- graphs and runs ---------------------------------------------------------------------------------------------------


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context, grad):
        (x,) = context.saved_tensors
        return grad * x * 3  # not the derivative, so that it is seen which one runs


def test_autograd_functions_keep_their_backward():
    function = lambda x: (Squared.apply(x * 2) + x).exp().sum()
    fast, x = compiled(function), rand(3, 4, grad=True) * 0.3
    x = x.detach().requires_grad_()
    with cupyops.simulate():
        close(trained(fast, x), trained(function, x))


def test_cond_runs_the_branch_that_data_says():
    def function(x):
        y = torch.cond(x.sum() > 0, lambda x: x.sin() * 2, lambda x: x.exp() - 1, (x * 1.5,))
        return y * 2

    fast = compiled(function)
    with cupyops.simulate():
        for x in (torch.ones(4), -torch.ones(4)):
            close(fast(x), function(x))


def test_while_loops_run():
    from torch._higher_order_ops.while_loop import while_loop

    def function(x):
        n, y = while_loop(
            lambda n, y: n < 3, lambda n, y: (n + 1, y * 2 + 1), (torch.zeros((), dtype=torch.int64), x + 1)
        )
        return y * 2

    fast, x = compiled(function), rand(4)
    with cupyops.simulate():
        close(fast(x), function(x))


def test_maps_and_scans_run():
    from torch._higher_order_ops.map import map
    from torch._higher_order_ops.scan import scan

    def function(x):
        carry, each = scan(lambda carry, row: (carry * 0.5 + row, (carry * row).sin()), x[0] * 0, x)
        return map(lambda row: row.softmax(0) * 2, x + 1) * 3, carry + 1, each * 2

    fast, x = compiled(function), rand(3, 4)
    with cupyops.simulate():
        close(fast(x), function(x))


def test_custom_operators_that_write_their_arguments():
    @torch.library.custom_op("cupyops_tests::double_", mutates_args=("x",))
    def double_(x: torch.Tensor) -> None:
        x.mul_(2)

    def function(x):
        y = x * 3
        torch.ops.cupyops_tests.double_(y)
        torch.ops.cupyops_tests.double_(x)
        return y + x

    fast = compiled(function)
    a, b = rand(5), rand(5)
    b.copy_(a)
    with cupyops.simulate():
        close([fast(b), b], [function(a), a])


def test_transforms_of_functions():
    from torch.func import grad, jacrev, vmap

    def function(x):
        return (
            grad(lambda y: (y.sin() * y).sum())(x),
            vmap(lambda row: row.softmax(0) * 2)(x),
            jacrev(lambda y: y.exp().sum(0))(x),
        )

    fast, x = compiled(function), rand(3, 4)
    with cupyops.simulate():
        close(fast(x), function(x))


def test_autocast_on_off_and_nested_with_a_weight_used_twice():
    def function(x, w):
        with torch.autocast("cpu", dtype=HALF):
            y = F.relu(x @ w)
            with torch.autocast("cpu", enabled=False):
                z = (y.float() @ w).softmax(-1)
            return (y @ w).float().sum() + z.sum(0).mean(), y

    fast, x, w = compiled(function), rand(4, 6, grad=True), rand(6, 6, grad=True)
    with cupyops.simulate():
        found = trained(fast, x, w)
    for a, b in zip(found, trained(function, x, w), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=5e-2)


def test_tied_weights_get_one_gradient():
    class Tied(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Embedding(7, 6)
            self.head = torch.nn.Linear(6, 7, bias=False)
            self.head.weight = self.table.weight

        def forward(self, i):
            return F.cross_entropy(self.head(F.gelu(self.table(i))), i)

    torch.manual_seed(0)
    model, i = Tied(), torch.tensor([0, 3, 3, 6])
    model(i).backward()
    want, model.table.weight.grad = model.table.weight.grad, None
    fast = compiled(model)
    with cupyops.simulate():
        fast(i).backward()
    close(model.head.weight.grad, want)


def test_a_failed_call_leaves_all_as_it_was_and_the_next_is_right():
    def function(x, i):
        y = x * 2
        return F.embedding(i, y) + y[:2]

    fast, x, good = compiled(function), rand(5, 4), torch.tensor([0, 4])
    before = x.clone()
    with cupyops.simulate():
        for _ in range(2):
            with pytest.raises(Exception, match="(?i)trap|index"):
                fast(x, torch.tensor([0, 9]))
            assert torch.equal(x, before)
            close(fast(x, good), function(x, good))


def test_graph_breaks_and_exceptions_inside():
    def function(x):
        y = x.sin() * 2
        torch._dynamo.graph_break()
        if y.sum() > 1e9:
            raise ValueError("too large")
        return y.exp()

    fast = compiled(function, fullgraph=False)
    with cupyops.simulate():
        close(fast(rand(4)), function(rand(4)))
        with pytest.raises(ValueError, match="too large"):
            compiled(lambda x: function(x) if x.sum() < 100 else _fail(), fullgraph=False)(torch.full((4,), 1e3))


def _fail():
    raise ValueError("too large")


def test_threads_compile_and_run_at_once():
    fast = compiled(lambda x: F.softmax(x * 2, -1).sum(0))
    failures = []

    def work(n):
        try:
            with cupyops.simulate():
                for k in range(2):
                    x = rand(n + 2, 4 + k)
                    close(fast(x), F.softmax(x * 2, -1).sum(0))
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


def test_the_same_bits_twice_and_no_refusal_of_the_deterministic_mode():
    def function(x, w, i):
        y = F.layer_norm(x, (64,), w)
        return y.sum(0), F.softmax(y, -1).mean(), F.embedding(i, y).sum(0), y.var(0), y.std()

    fast, x, w, i = compiled(function), rand(600, 64, grad=True), rand(64, grad=True), torch.arange(300) % 50
    torch.use_deterministic_algorithms(True)
    try:
        with cupyops.simulate():
            first, second = trained(fast, x, w, i), trained(fast, x, w, i)
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    close(first, trained(function, x, w, i))


def test_views_into_one_flat_parameter():
    def function(flat, x):
        w, b = flat[1:25].view(4, 6), flat[25:31]
        return F.relu(x @ w + b).sum()

    fast, flat, x = compiled(function), rand(31, grad=True), rand(3, 4)
    with cupyops.simulate():
        close(trained(fast, flat, x), trained(function, flat, x))


def test_parameters_that_are_views_of_one_storage_at_odd_addresses():
    storage, x = rand(64), rand(5, 4)
    w, b = storage[1:25].view(4, 6).requires_grad_(), storage[27:33].requires_grad_()
    function = lambda x, w, b: (F.gelu(x @ w + b) * b).sum()
    fast = compiled(function)
    with cupyops.simulate():
        loss = fast(x, w, b)
        loss.backward()
    found = [loss, w.grad, b.grad]
    w.grad = b.grad = None
    want = function(x, w, b)
    want.backward()
    close(found, [want, w.grad, b.grad])


def test_compiled_autograd():
    from torch._dynamo import compiled_autograd

    function, x = lambda x: (x.sin() * 2).exp().sum(), rand(4, grad=True)
    fast = compiled(function)
    with cupyops.simulate(), compiled_autograd._enable(lambda graph: torch.compile(graph, backend="eager")):
        found = trained(fast, x)
    close(found, trained(function, x))


def test_what_autograd_cannot_differentiate_twice_says_so():
    function, x = lambda x: x.sin().sum(), rand(4, grad=True)
    fast = compiled(function)
    with cupyops.simulate():
        (grad,) = torch.autograd.grad(fast(x), x, create_graph=True)
        with pytest.raises(RuntimeError, match="double backward|twice"):
            grad.sum().backward()


def test_graphs_without_any_kernel_and_without_inputs_run():
    with cupyops.simulate():
        assert torch.equal(compiled(lambda: torch.arange(4) * 2)(), torch.arange(4) * 2)
        assert torch.equal(traced(lambda x: [x.cumsum(0)])(torch.ones(3))[0], torch.tensor([1.0, 2.0, 3.0]))
        assert compiled(lambda x: (x.shape[0], None))(torch.ones(3)) == (3, None)
