"""Writes of a few elements into an input: one call that goes there directly, where nothing reads what the input was."""

import pytest
import torch
from compiled import compiled, programs
from torch._dynamo.backends.cudagraphs import find_input_mutations
from torch.fx.experimental.proxy_tensor import make_fx

import cupyops
from cupyops._compile import inplace

PLACES = torch.tensor([4, 1])


def rand(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def cached(cache, new, places):
    cache.index_copy_(1, places, new * 2)
    return (cache * 3).sum(-1)


def assigned(cache, new, places):
    cache[:, places] = new
    return cache.exp()


def added(cache, new, places):
    cache.index_add_(1, places, new, alpha=2)
    return cache + 1


def scattered(cache, new, places):
    cache.scatter_add_(1, places[None, :, None].expand_as(new), new)
    return cache.amax(-1)


def filled(cache, new, places):
    cache.index_fill_(1, places, -1.0)
    return cache @ new.mT


def old_value_too(cache, new, places):
    before = cache * 2
    cache.index_copy_(1, places, new)
    return before + cache


def twice(cache, new, places):
    cache.index_copy_(1, places, new)
    cache.index_copy_(1, places + 1, new)
    return cache + 1


def returned(cache, new, places):
    cache.index_copy_(1, places, new)
    return cache


def source_is_the_cache(cache, new, places):
    cache.index_copy_(1, places, cache[:, :2] + new)
    return cache.sum()


def read_by_a_view(cache, new, places):
    first = cache[0].sin()
    cache.index_copy_(1, places, new)
    return first, cache[1].cos()


def written_again(cache, new, places):
    cache.index_copy_(1, places, new)
    y = cache + 1
    cache.mul_(2)
    return y


def a_view_is_returned(cache, new, places):
    later = cache.index_copy(1, places, new)
    cache.copy_(later)
    return later[0]


DIRECT = [cached, assigned, added, scattered, filled]
WITH_A_COPY = [old_value_too, source_is_the_cache, read_by_a_view, written_again, twice, a_view_is_returned]


def run(function, cache):
    """(results, cache afterwards, calls that stay PyTorch's) of two calls, beside eager's; by kernels in the simulator."""
    given = torch.empty_strided(cache.shape, cache.stride()).copy_(cache), rand(2, 2, 6), PLACES
    eager = given[0].as_strided(cache.shape, cache.stride()).clone(memory_format=torch.preserve_format), *given[1:]
    programs.clear()
    fast = compiled(function)
    for _ in range(2):
        want = function(*eager)
        with cupyops.simulate():
            found = fast(*given)
        torch.testing.assert_close(found, want)
        torch.testing.assert_close(given[0], eager[0])
    (program,) = programs
    return [name for name, _ in program.left]


@pytest.mark.parametrize("function", DIRECT)
def test_one_call_writes_into_the_input(function):
    left = [name for name in run(function, rand(2, 8, 6)) if "mm" not in name]
    assert len(left) == 1 and left[0].split(".")[1].endswith("_"), left


def at_one_place(cache, new, places):
    cache.index_copy_(1, places[:1], new[:, :1].exp())
    return cache @ new.mT


def counted_from_the_end(cache, new, places):
    cache[:, places - 7] = new.half().float()
    return cache + 1


def written_twice_over(cache, new, places):
    """The whole cache is written in another order, and read by kernels that must not share one with the write."""
    order = torch.arange(7, -1, -1)
    cache.index_copy_(1, order, (new.sum(1, keepdim=True) + 1).expand_as(cache) * cache.shape[1])
    return cache * 2, cache[:, order] + 1


BY_KERNELS = [cached, assigned, at_one_place, counted_from_the_end, written_twice_over]
TRANSPOSED = [assigned, counted_from_the_end]  # the others' copy would lie otherwise


@pytest.mark.parametrize(
    ("function", "cache"),
    [(one, rand(2, 8, 6)) for one in BY_KERNELS] + [(one, rand(2, 6, 8).mT) for one in TRANSPOSED],
)
def test_kernels_write_into_the_input(function, cache):
    """Equal places would be a race: where all is to be deterministic, PyTorch writes several."""
    torch.use_deterministic_algorithms(False)
    assert [name for name in run(function, cache) if "mm" not in name] == []


def test_a_place_that_there_is_not():
    run = compiled(at_one_place)
    with cupyops.simulate(), pytest.raises(Exception, match="(?i)trap|index"):
        run(rand(2, 8, 6), rand(2, 2, 6), torch.tensor([8, 1]))


@pytest.mark.parametrize("function", DIRECT)
def test_an_input_whose_copy_would_lie_otherwise(function):
    run(function, rand(2, 6, 8).mT)


@pytest.mark.parametrize("function", WITH_A_COPY)
def test_what_reads_the_old_value_gets_it(function):
    assert not any(name.split(".")[1].endswith("_") for name in run(function, rand(2, 8, 6)))


def test_an_input_that_is_returned():
    assert run(returned, rand(2, 8, 6))


def test_training_keeps_values_for_backward():
    """Backward reads a cache as it was in forward."""

    def step(cache, w):
        cache.index_copy_(0, PLACES, torch.ones(2, 6))
        return (cache * w).sum()

    w, cache = rand(8, 6).requires_grad_(), rand(8, 6)
    after = cache.index_copy(0, PLACES, torch.ones(2, 6))
    fast = compiled(step)
    with cupyops.simulate():
        fast(cache, w).backward()
    assert torch.equal(cache, after)
    torch.testing.assert_close(w.grad, after)


def test_a_view_that_backward_reads_is_no_part_of_the_cache():
    """The cache may be written again before backward runs."""

    def step(cache, w, value):
        cache.index_copy_(0, PLACES, value)
        return (cache.mT @ w).sum()

    w, cache = rand(8, 6).requires_grad_(), rand(8, 6)
    first, second = torch.ones(2, 6), torch.zeros(2, 6)
    expected = cache.index_copy(0, PLACES, first).mT.sum(0)[:, None].expand(8, 6)
    fast = compiled(step)
    with cupyops.simulate():
        y = fast(cache, w, first)
        fast(cache, w, second)
        y.backward()
    torch.testing.assert_close(w.grad, expected)


def test_cuda_graphs_hear_which_inputs_are_written():
    traced = make_fx(torch.func.functionalize(cached), tracing_mode="fake")(rand(2, 8, 6), rand(2, 2, 6), PLACES)
    inplace.apply(traced)
    assert not traced.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    assert set(find_input_mutations(traced.graph)) == {0}
