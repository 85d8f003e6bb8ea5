"""Sizes that change: their algebra, the conditions of a program, models whose batch and length are numbers of kernels."""

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from compiled import compiled, copied, programs, run
from torch import nn

import cupyops
from cupyops._compile import program as program_module
from cupyops._compile import runner
from cupyops._compile.index import Affine, Reject, Split, Variable, flatten, never, unflatten
from cupyops._compile.program import Program
from cupyops._compile.rules import RULES
from cupyops._compile.size import Conditions, Size, about, at_most, ceiling, divides, over, text_of, value_of
from cupyops._compile.sizes import Sizes, Symbols

NAMES = ("s0", "s1", "s2")


def symbols(*values, least=2):
    conditions = Conditions()
    return conditions, [conditions.symbol(name, value, least) for name, value in zip(NAMES, values)]


def at(number, values):
    """A number for other values of the symbols."""
    return eval(text_of(number), dict(zip(NAMES, values)))


# -- the algebra, beside Python's integers -----------------------------------------------------------------------------


def computed(draw, numbers):
    """Numbers and decisions of a random program."""
    pool, decisions, claims = [*numbers, 1, 2, 8, 96], [], []
    for _ in range(10):
        a, b, kind = draw.choice(pool), draw.choice(pool), draw.randrange(8)
        constant = draw.choice((0, 1, 4, 32))
        if kind < 3:
            pool.append((a + b, a - b, a * b)[kind])
        elif kind == 3:
            divisor = b if b > 0 else 3
            pool += [a // divisor, a % divisor]
        elif kind == 4:
            pool.append(ceiling(a, constant or 7))
        elif kind == 5:
            decisions += [a < b, a >= b]
        elif kind == 6:
            decisions.append(a == constant % 2)
        else:
            claims += [at_most(a, b), divides(b, a) and bool(b != 0)]
    return pool, decisions, claims


@pytest.mark.parametrize("seed", range(60))
def test_a_program_is_that_of_the_integers_wherever_its_conditions_hold(seed):
    draw = random.Random(seed)
    conditions, sizes = symbols(*(draw.randint(2, 5) for _ in NAMES))
    state = draw.getstate()
    pool, decisions, claims = computed(draw, sizes)
    holds = eval(f"lambda s0, s1, s2: {' and '.join(conditions.texts) or True}")
    assert holds(*(value_of(one) for one in sizes))
    for values in itertools.product(range(2, 6), repeat=3):
        if not holds(*values):
            continue
        draw.setstate(state)
        pool_of_integers, decisions_of_integers, claims_of_integers = computed(draw, values)
        for size, number in zip(pool, pool_of_integers, strict=True):
            assert at(size, values) == number
            if isinstance(size, Size):
                assert size.least <= number <= size.most
        assert decisions == decisions_of_integers
        assert all(true for claim, true in zip(claims, claims_of_integers, strict=True) if claim)


def test_what_follows_from_the_bounds_is_no_condition():
    conditions, (b, n, _) = symbols(4, 7, 9)
    assert b * n * 512 > n * 512 and b > 1 and n != 0 and b * 8 != 1
    assert (b * n * 512) // (n * 64) == b * 8 and (b * (n - 1) * 512) // (n - 1) == b * 512
    assert (b * n + n - 1) // n == b and (n - 1) % n == n - 1
    assert over(b * n, n * n) is None and divides(4, b * 8) and not divides(4, b * 2)
    assert about(b * n) == about(n * b) != value_of(b * n)
    assert not conditions.texts


def test_a_decision_is_a_condition_and_a_constant_is_one_too():
    conditions, (b, n, _) = symbols(4, 7, 9)
    assert b * n < 100 and not b > n and n - 2 != 0
    assert list(range(b)) == [0, 1, 2, 3]
    assert list(conditions.texts) == ["s0 * s1 <= 99", "(s0 - s1) <= 0", "(s1 - 2) != 0", "s0 == 4"]


def test_a_divisor_that_may_be_zero_is_a_condition():
    conditions, (n, b, _) = symbols(7, 2, 5, least=0)
    assert value_of(n // b) == 3 and next(iter(conditions.texts)) == "s1 > 0"  # before a condition that divides by it
    with pytest.raises(ZeroDivisionError, match="which is 0"):
        n // symbols(0, 0, 0, least=0)[1][1]


# -- indices -----------------------------------------------------------------------------------------------------------


def computing(found):
    """A `Compute` that notes what a kernel would compute."""

    def compute(expression, operator, divisor, bound):
        found.append((expression, operator, divisor))
        return Variable(f"o{len(found)}", bound, "o")

    return compute


def test_an_index_goes_through_views_without_a_division():
    _, (b, n, _) = symbols(4, 7, 9)
    i, j, k = Variable("i", b, "r"), Variable("j", n, "r"), Variable("k", 64, "c")
    index = tuple(Affine({v: 1}) for v in (i, j, k))
    position = flatten(index, (b, n, 64))
    assert position == Affine({i: n * 64, j: 64, k: 1})
    assert unflatten(position, (b * n, 64), never) == (Affine({i: n, j: 1}), index[2])
    assert unflatten(position, (b, n, 64), never) == index
    assert (position.least, position.most) == (0, b * n * 64 - 1)


def test_a_loop_over_two_sizes_is_split_into_them():
    _, (b, n, _) = symbols(4, 7, 9)
    v = Variable("v", b * n, "c")
    with pytest.raises(Split) as split:
        unflatten(Affine({v: 1}), (b, n), never)
    assert split.value.variable is v and split.value.inner == n


def test_what_does_not_divide_is_computed_and_its_bounds_hold():
    _, (b, n, _) = symbols(4, 7, 9)
    v, found = Variable("v", b * n, "c"), []
    with pytest.raises(Reject):
        Affine({v: 1}).divmod(n + 1, never)
    quotient, remainder = Affine({v: 1}, 3).divmod(n + 1, computing(found))
    assert [operator for _, operator, _ in found] == ["/", "%"]
    for values in itertools.product(range(2, 6), range(2, 6)):
        largest = values[0] * values[1] - 1 + 3
        assert at(quotient.most, values) >= largest // (values[1] + 1) and at(remainder.most, values) == values[1]


# -- programs ----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """A block of a transformer with 4 heads, written out."""

    def __init__(self, width):
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.given, self.taken = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        b, n, width = x.shape
        q, k, v = self.given(self.first(x)).view(b, n, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        hidden = torch.ones(n, n, dtype=torch.bool).triu(1)
        weights = (q @ k.transpose(-1, -2)).masked_fill(hidden, float("-inf")).softmax(-1)
        x = x + self.taken((weights @ v).transpose(1, 2).reshape(b, n, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Language(nn.Module):
    """A small GPT and its loss, of tokens against the ones that follow them."""

    def __init__(self, words=19, width=16):
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(64, width)
        self.block, self.norm, self.head = Block(width), nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens):
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1]))
        logits = self.head(self.norm(self.block(x)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Images(nn.Module):
    """Two convolutions with batch_norm, and a mean over what is left of the image."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, stride=2, bias=False)
        self.norms, self.head = nn.ModuleList([nn.BatchNorm2d(8), nn.BatchNorm2d(8)]), nn.Linear(8, 5)

    def forward(self, x):
        x = F.max_pool2d(self.norms[0](self.first(x)).relu(), 2)
        x = x + self.norms[1](self.second(x)).relu().mean((2, 3), keepdim=True)
        return F.cross_entropy(self.head(x.mean((2, 3))), torch.arange(x.shape[0]) % 5)


def trained(model, fast, x):
    """Loss, gradients and buffers after a step; the model is as before."""
    before = {name: one.clone() for name, one in model.state_dict().items()}
    model.zero_grad()
    loss = fast(x)
    loss.backward()
    found = [loss.detach(), *(p.grad.clone() for p in model.parameters()), *(b.clone() for b in model.buffers())]
    model.load_state_dict(before)
    return found


def kernels_compiled():
    return program_module.kernel_of.cache_info().misses


@pytest.fixture
def alone(monkeypatch):
    """Each program is one of sizes, and nothing is left to PyTorch in silence."""
    monkeypatch.setenv("CUPYOPS_STRICT", "1")
    failed = []
    monkeypatch.setattr(runner.log, "info", lambda text, *args, **_: failed.append(args) if "alone" in text else None)
    yield
    assert not failed


TOKENS = [(3, 7), (4, 8), (2, 9), (5, 16), (8, 4), (6, 6), (2, 33), (7, 3), (3, 31), (4, 12)]
PICTURES = [
    (3, 8, 8), (5, 8, 8), (2, 8, 8), (4, 8, 8), (8, 8, 8), (7, 8, 8), (9, 8, 8), (6, 8, 8), (15, 8, 8), (11, 8, 8),
]  # fmt: skip


@pytest.mark.parametrize(
    "make, sizes",
    [
        (Language, TOKENS),
        (Images, PICTURES),
        (Images, [(3, 10, 10), (4, 11, 13), (2, 12, 16), (5, 12, 17), (3, 14, 20)]),
    ],
    ids=["a language model", "images", "images of many sizes"],
)
def test_many_sizes_take_two_graphs_and_the_kernels_of_two_sizes(make, sizes, alone, graphs):
    torch.manual_seed(0)
    model = make()
    fast = compiled(model, dynamic=None)
    for number, size in enumerate(sizes):
        x = torch.randint(19, size) if make is Language else torch.randn(size[0], 3, *size[1:])
        if number == 2:
            made, known = len(graphs), kernels_compiled()
        with cupyops.simulate():
            got = trained(model, fast, x)
        for one, want in zip(got, trained(model, model, x), strict=True):
            torch.testing.assert_close(one, want, rtol=1e-3, atol=1e-5)
    assert len(graphs) == made == 4  # forward and backward, of the first size and of all others
    assert kernels_compiled() == known
    assert all(len(one.programs) == 1 for one in graphs)


FUNCTIONS = {
    "softmax over a size": lambda x: (x.softmax(-1), x.log_softmax(0), x.softmax(1)),
    "sums": lambda x: (
        x.sum(),
        x.sum(0),
        x.sum((0, 1)),
        x.sum(-1),
        x.mean(),
        x.mean(1),
        x.amax(-1),
        x.var(0),
        x.std(-1),
    ),
    "places": lambda x: (x.argmax(-1), x.max(1)[1], x.argmin()),
    "slices": lambda x: (
        x[:, 1:] - x[:, :-1],
        x[-1] * 2,
        x[:, ::2] + 1,
        x[..., -3:] * x[..., :3],
        x[x.shape[0] // 2 :] * 3,
    ),
    "joined": lambda x: (torch.cat([x, x * 2], 1) + 1, F.pad(x, (1, 2, -1, 3)) * 2, torch.stack([x, x], -1).sum(1)),
    "moved": lambda x: (
        x.flip(0),
        x.transpose(0, 2).contiguous(),
        x.repeat(2, 1, 1) + 1,
        x.roll(1, 1),
        x.flatten(1) * 2,
    ),
    "regrouped": lambda x: torch.cat([x, x]).reshape(x.shape[0], -1).exp() + x.reshape(-1)[: x.shape[0], None],
    "numbers": lambda x: (x / x.shape[1], x * x.shape[0] ** 0.5, x + torch.arange(x.shape[1])[:, None]),
    "halves": lambda x: (x.half() / x.shape[0], x.bfloat16() * x.shape[1]),
    "compared": lambda x: (x > x.shape[0] / 7, torch.where(x > 0, x, x.shape[1]), (x > x.shape[0] - 5).sum()),
    "norms": lambda x: (F.layer_norm(x, x.shape[1:]), F.group_norm(x, 1), F.layer_norm(x, x.shape[-1:])),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_three_sizes(name, alone):
    fast, function = compiled(FUNCTIONS[name], dynamic=True), FUNCTIONS[name]
    tolerance = 2e-2 if name == "halves" else 1e-4  # eager rounds in between
    for number, size in enumerate(((4, 6, 8), (5, 9, 7), (3, 4, 12), (6, 33, 5), (9, 5, 4))):
        x = torch.randn(size, generator=torch.Generator().manual_seed(number)).requires_grad_(name != "places")
        floats = [one for one in _listed(function(x)) if one.requires_grad]
        grads = [torch.randn(one.shape, dtype=one.dtype) for one in floats]
        if number == 2:
            known = kernels_compiled()
        with cupyops.simulate():
            found = run(fast, copied([x]), grads)
        for (what, got), (_, want) in zip(found, run(function, copied([x]), grads), strict=True):
            assert got.stride() == want.stride() or not what.startswith("result"), what
            torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)
    assert kernels_compiled() == known


def _listed(result):
    return list(result) if isinstance(result, tuple) else [result]


def test_numbers_that_change_make_no_program(alone):
    fast, x, made = compiled(lambda x, shift, scale: x * scale + shift, dynamic=True), torch.randn(6, 10), set()
    with cupyops.simulate():
        for shift, scale in ((3, 0.5), (7, -1.25), (11, 1e30), (2, 0.1)):
            torch.testing.assert_close(fast(x, shift, scale), x * scale + shift)
            made.add(programs[-1])
    assert len(made) == 1


def graph_of(function, *arguments):
    """The graph of a function of symbolic sizes, with its symbols."""
    graphs = []
    runner.listeners.append(graphs.append)
    try:
        compiled(function, dynamic=True)(*arguments)
    finally:
        runner.listeners.remove(graphs.append)
    (found,) = graphs
    return found.graph, found.symbols


@pytest.mark.parametrize("name", ["flat", "rows", "columns"])
def test_kernels_count_in_64_bits_where_the_sizes_ask_for_it(name):
    function = {"flat": lambda x: x.t() * 2, "rows": lambda x: x.softmax(-1), "columns": lambda x: (x + 1).sum(0)}[name]
    graph, symbols = graph_of(function, torch.randn(6, 64))
    rows = 2**25  # of 64 columns: 2**31 elements
    small, large = (Program(graph, Sizes(symbols, (n, 64))) for n in (rows - 1, rows))
    assert "long long" not in small.text() and "long long" in large.text()
    assert [one.serves(rows - 1, 64) for one in (small, large)] == [True, False]
    assert [one.serves(rows, 64) for one in (small, large)] == [False, True]
    assert large.serves(2**33, 64) and small.serves(2, 64)


def test_results_do_not_depend_on_the_sizes_that_came_first():
    def function(x, w):
        y = F.layer_norm(x * w, (16,), w)
        return y.sum(0), y.var(0), x.sum(), y.softmax(-1)

    x, w, bits = torch.randn(700, 16), torch.randn(16), []
    for first in (2, 40, 3000):
        fast = compiled(function, dynamic=True)
        with cupyops.simulate():
            fast(torch.randn(first, 16), w)
            bits.append(fast(x, w))
    for found in bits[1:]:
        assert all(torch.equal(one, other) for one, other in zip(found, bits[0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_long_row_is_reduced_by_many_blocks_whatever_divides_it(dtype, dynamic):
    def function(x):
        return x.amax(), x.amin(), x.sum(), (x > 0).all(), torch.empty_strided((len(x), 2), (6, 1)).copy_(x[:, :2])

    fast = compiled(function, dynamic=dynamic)
    programs.clear()
    for rows, length in (2, 70_001), (3, 66_666), (2, 9):
        x = (torch.randn(rows, length) * 100).to(dtype)
        x[-1, -1] += 1000 * (-1) ** rows  # an extreme, in the last part
        with cupyops.simulate("sm_90"):
            found = fast(x)
        expected = function(x.double() if dtype.is_floating_point else x)
        torch.testing.assert_close(found, tuple(one.to(two.dtype) for one, two in zip(expected, found)))
        assert found[-1].stride() == (6, 1)
        kernels = [unit.kernel for program in programs for unit in program.schedule.units if hasattr(unit, "kernel")]
        columns = [value_of(kernel.trace.columns) for kernel in kernels if hasattr(kernel, "trace")]
        assert length == 9 or columns and max(columns) <= 8192


def test_many_long_rows_whose_number_changes_are_not_cut():
    graph, symbols = graph_of(lambda x: x.sum(), torch.randn(6, 64))
    units = [Program(graph, Sizes(symbols, (rows, 70_000))).schedule.units for rows in (2, 130)]
    assert [sum(hasattr(unit, "kernel") for unit in one) for one in units] == [3, 2]


def rule_of_exp(monkeypatch, first):
    """Have the rule of exp do something with the number of rows first."""
    exp = torch.ops.aten.exp.default
    rule = RULES[exp]

    def new(build, result, x):
        first(x.shape[0])
        return rule(build, result, x)

    monkeypatch.setitem(RULES, exp, new)


def test_a_size_that_is_needed_as_a_constant_gets_a_program_for_it(monkeypatch):
    from cupyops._compile.rules import RULES

    rule = RULES[torch.ops.aten.exp.default]
    monkeypatch.setitem(
        RULES, torch.ops.aten.exp.default, lambda build, result, x: (int(x.shape[0]), rule(build, result, x))[1]
    )
    fast, graphs = compiled(lambda x: x.exp() + 1, dynamic=True), []
    runner.listeners.append(graphs.append)
    with cupyops.simulate():
        for rows, columns in ((4, 8), (5, 8), (4, 16), (5, 24)):
            x = torch.randn(rows, columns)
            torch.testing.assert_close(fast(x), x.exp() + 1)
    runner.listeners.remove(graphs.append)
    assert len(graphs[0].programs) == 2


def test_what_cannot_compute_with_sizes_gets_a_program_of_constants(monkeypatch, caplog):
    from cupyops._compile.rules import RULES

    rule = RULES[torch.ops.aten.exp.default]
    monkeypatch.setitem(
        RULES, torch.ops.aten.exp.default, lambda build, result, x: (x.shape[0] ** 2, rule(build, result, x))[1]
    )
    fast, graphs = compiled(lambda x: x.exp() + 1, dynamic=True), []
    runner.listeners.append(graphs.append)
    with cupyops.simulate(), caplog.at_level("INFO", "cupyops.compile"):
        for rows in (4, 5, 4):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(fast(x), x.exp() + 1)
    runner.listeners.remove(graphs.append)
    assert len(graphs[0].programs) == 2 and "alone: unsupported operand" in caplog.text


def test_symbols_are_found_in_shapes_and_in_numbers():
    graph, symbols = graph_of(lambda x, k: x * k, torch.randn(5, 7), 3)
    assert isinstance(symbols, Symbols) and sorted(symbols.values([*_inputs(graph, (5, 7), 3)])) == [3, 5, 7]
    assert all(least == 2 for (least, _), value in zip(symbols.bounds.values(), symbols.hinted()) if value != 3)


def _inputs(graph, shape, number):
    sizes = iter(shape)
    for node in graph.graph.find_nodes(op="placeholder"):
        meta = node.meta["val"]
        yield (
            torch.empty(shape)
            if isinstance(meta, torch.Tensor)
            else number
            if meta.node.hint == number
            else next(sizes)
        )


def test_a_number_in_memory_is_overwritten_by_one_thread():
    fast, ours, theirs = compiled(lambda t, scale: t.mul_(scale).add_(1), dynamic=True), torch.ones(()), torch.ones(())
    with cupyops.simulate():
        for scale in (0.5, 3.25, -2.0):
            torch.testing.assert_close(fast(ours, scale), theirs.mul_(scale).add_(1))
    torch.testing.assert_close(ours, theirs)
