"""cupyops.reduction: the contract, every way of walking against PyTorch, special values, and what is refused."""

import math

import pytest
import torch
from form_walk import by_form

import cupyops
from cupyops._dispatch.core.gpu import gpu
from cupyops._dispatch.reduce.reduction import BLOCKS, COLUMN_THREADS, ENOUGH_BLOCKS, ROW_BLOCKS, Reduction
from cupyops._expression.declaration import namespace_of
from cupyops._expression.reduction import FORWARD
from cupyops._kernel.kernel import FLOATING

norm2 = cupyops.reduction(
    "norm2(T x) -> T y", map="x * x", reduce="a + b", identity="0", post="sqrt(a)", backward="grad_x = grad_y * x / y"
)
mean_dot = cupyops.reduction(
    "mean_dot(T x, T w, bool[] m, float c = 1.0) -> T y",
    map="m ? x * w * c : 0",
    reduce="a + b",
    identity="0",
    post="a / n",
    backward="grad_x = m ? grad_y * w * c / n : 0; grad_w = m ? grad_y * x * c / n : 0;",
    dtypes=torch.bfloat16,
)


def norm2_by_torch(x, dim=None, keepdim=False):
    return torch.sqrt(torch.sum(x * x, dim, keepdim))


def test_the_contract():
    sample = [torch.randn(3, 5, requires_grad=True)]
    report = cupyops.testing.check(norm2, sample, {"dim": 1}, backends=("reference", "simulator"), shrink=False)
    report.raise_if_failed()


def compare(x, dim, keepdim=False):
    x = x.detach().requires_grad_()
    expected = norm2_by_torch(x, dim, keepdim)
    grad_y = torch.randn_like(expected)
    (theirs,) = torch.autograd.grad(expected, x, grad_y)
    with cupyops.simulate():
        y = norm2(x, dim, keepdim)
        (ours,) = torch.autograd.grad(y, x, grad_y)
    assert y.stride() == expected.stride()
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shape, dim", [
    ((), None), ((7,), 0), ((7, 33), 1), ((7, 33), 0), ((8, 64), -1), ((64, 8), 0), ((3, 4, 8), (0, 2)),
    ((3, 4, 8), (2, 1)), ((3, 4, 8), ()), ((2, 600), 1), ((1, 1, 5), 0), ((3, 0), 1), ((0, 3), 1),
    ((40001,), None), ((3000, 2), 0),
])  # fmt: skip
def test_rows_columns_and_all(shape, dim):
    compare(torch.randn(shape), dim)
    compare(torch.randn(shape), dim, keepdim=True)


@pytest.mark.parametrize("dim", [1, (2, 3), (1, 2, 3), None])
def test_strides_as_they_come(dim):
    compare(torch.randn(2, 8, 3, 4).to(memory_format=torch.channels_last), dim)
    compare(torch.randn(4, 3, 8, 2).permute(3, 2, 1, 0)[:, ::2], dim)
    compare(torch.randn(2 * 8 * 3 * 4 + 1)[1:].view(2, 8, 3, 4), dim)


def test_more_dimensions_than_a_kernel_walks():
    x = torch.randn(4096).view([2] * 12).permute(11, 0, 9, 2, 7, 4, 5, 6, 3, 8, 1, 10)
    compare(x, (0, 2, 4, 6, 8, 10))


def launch(shape, dims, results):
    """That of a contiguous input in float32."""
    strides = torch.empty(shape, device="meta").stride()
    return FORWARD.launch(Reduction(shape, dims, results, (strides,), 4, True), gpu(torch.device("cpu")))


def test_large_ones_are_cut_into_slabs():
    """One result of many, few of many in rows and in columns: each has blocks to fill a GPU, and fixed ones."""
    for shape, dims, strides in (((1 << 26,), (0,), ()), ((2, 1 << 24), (1,), (1,)), ((1 << 24, 8), (0,), (1,))):
        found = launch(shape, dims, strides)
        form = found.template["FORM"]
        blocks, fewest = math.prod(found.grid), BLOCKS // 2 if form == "kContiguous" else ENOUGH_BLOCKS
        assert form in ("kContiguous", "kColumns") and fewest <= blocks <= ROW_BLOCKS
        assert blocks * math.prod(found.block) >= COLUMN_THREADS
    assert launch((1 << 20, 64), (1,), (1,)).extra == 0


@pytest.mark.parametrize("odd", [0, 1])
def test_columns_are_cut_into_as_many_slabs_as_keep_a_gpu_full(odd):
    """Of the blocks that run at once, the last of them included, at most an eighth are missing."""
    for tiles in range(1, 2 * ENOUGH_BLOCKS):
        columns = 8 * tiles * (16 if odd else 4) + odd  # of 4 to a vector; with one more, a tile more
        found = launch((1 << 20, columns), (0,), (1,))
        blocks, at_once = math.prod(found.grid), COLUMN_THREADS // math.prod(found.block)
        assert found.template["FORM"] == "kColumns" and found.grid[0] >= tiles
        if odd or found.grid[0] < ENOUGH_BLOCKS:
            assert blocks >= BLOCKS or -blocks % at_once <= blocks // 8
        else:
            assert found.grid[1] == 1


@pytest.mark.parametrize("form", [one.name for one in FORWARD.list])
def test_each_form(form):
    """Of two inputs, one of them broadcast; each form on what it can compute."""
    computed = 0
    for shape, dim in (((5, 133), 1), ((3, 5, 16), (0, 2)), ((40, 24), 0), ((3, 7, 5), 1)):
        x, w = torch.randn(shape, dtype=torch.bfloat16), torch.ones(shape[-1], dtype=torch.bfloat16)
        given = x, w, w.bool()
        found = by_form(f"reduction:{form}", lambda given=given, dim=dim: mean_dot(*given, dim=dim))
        if found is not None:
            computed += 1
            torch.testing.assert_close(found, x.double().mean(dim).to(found.dtype))
    assert computed


@pytest.mark.parametrize("dim", [None, 0, 2, (0, 1)])
def test_several_inputs_are_broadcast(dim):
    dtype = torch.bfloat16
    x = torch.randn(4, 6, 16, dtype=dtype, requires_grad=True)
    w = torch.randn(6, 1, dtype=dtype, requires_grad=True)
    m = torch.rand(16) > 0.3
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    expected = torch.mean(exact[0] * exact[1] * m * 2, dim)
    theirs = torch.autograd.grad(expected.sum(), exact)
    for simulated in (False, True):
        with cupyops.simulate() if simulated else torch.enable_grad():
            y = mean_dot(x, w, m, c=2.0, dim=dim)
            ours = torch.autograd.grad(y.sum(), (x, w))
        for found, wanted in zip((y, *ours), (expected, *theirs)):
            torch.testing.assert_close(found, wanted.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


OTHERS = {
    "amax": ("max(a, b)", "-INFINITY", lambda x: x.amax(1)),
    "prod": ("a * b", "1", lambda x: x.prod(1)),
    "furthest": ("fabs(a) > fabs(b) ? a : b", "0", lambda x: x.gather(1, x.abs().argmax(1, keepdim=True))[:, 0]),
    "logsumexp": (
        "max(a, b) == -INFINITY ? a : max(a, b) + log1p(exp(-fabs(a - b)))",
        "-INFINITY",
        lambda x: torch.logsumexp(x, 1),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_ways_to_put_together(name):
    reduce, identity, by_torch = OTHERS[name]
    op = cupyops.reduction(f"{name}(T x) -> T y", map="x", reduce=reduce, identity=identity, dtypes=torch.float32)
    x = torch.randn(6, 37)
    torch.testing.assert_close(op(x, 1), by_torch(x))
    with cupyops.simulate():
        torch.testing.assert_close(op(x, 1), by_torch(x))
        empty = op(x[:, :0], 1)
    assert torch.equal(op(x[:, :0], 1), empty)
    leaf = x.double().requires_grad_()
    assert torch.autograd.gradcheck(
        cupyops.operators()[f"{namespace_of(__name__)}::{name}"].reference, (leaf, [1], False)
    )


def test_nan_wins_in_max_and_loses_in_fmax():
    x = torch.tensor([[1.0, torch.nan, 2.0], [torch.nan] * 3])
    for reduce, expected in (("max(a, b)", [torch.nan, torch.nan]), ("fmax(a, b)", [2.0, -torch.inf])):
        op = cupyops.reduction("m(T x) -> T y", map="x", reduce=reduce, identity="-INFINITY", dtypes=torch.float32)
        with cupyops.simulate():
            torch.testing.assert_close(op(x, 1), torch.tensor(expected), equal_nan=True)
        torch.testing.assert_close(op(x, 1), torch.tensor(expected), equal_nan=True)


def test_a_reference_of_ones_own():
    """`prefer` of the preamble has no translation."""
    op = cupyops.reduction(
        "best(T x, float target) -> T y",
        map="x",
        reduce="nearer(a, b, target)",
        identity="INFINITY",
        preamble="""
        template <typename A> __device__ A nearer(A a, A b, A target) {
          return fabs(b - target) < fabs(a - target) ? b : a;
        }""",
        reference=lambda x, target, dim, keepdim: x.sort(dim[0])[0].select(dim[0], 0) if target < -100 else x.amax(dim),
        dtypes=torch.float32,
    )
    x = torch.randn(5, 9)
    with cupyops.simulate():
        assert torch.equal(op(x, target=-1000.0, dim=1), x.amin(1))
        assert torch.equal(op(x, 1000.0, 1), x.amax(1))
    assert torch.equal(op(x, -1000.0, 1), x.amin(1)) and torch.equal(op(x, 1000.0, (1,)), x.amax(1))


def test_axis_and_arrays():
    x = torch.randn(3, 4)
    found = norm2(x.numpy(), axis=0)
    torch.testing.assert_close(torch.from_numpy(found), norm2_by_torch(x, 0))
    torch.testing.assert_close(norm2(x, axis=-1), norm2_by_torch(x, 1))


@pytest.mark.parametrize(
    "call, said",
    [
        (lambda x: norm2(x, 2), "dim is 2 (int), expected a dimension in [-2, 1]"),
        (lambda x: norm2(x, (0, -2)), "expected each dimension once"),
        (lambda x: norm2(x, 0.5), "dim is 0.5 (float), expected an int"),
        (lambda x: norm2(x, 0, 1), "keepdim is 1 (int), expected a bool"),
        (lambda x: norm2(x.long()), "x is a tensor of shape (3, 4), torch.int64"),
        (lambda x: mean_dot(x, x, x > 0), "expected a tensor of torch.bfloat16"),
        (lambda x: mean_dot(x.bfloat16(), x[:2].bfloat16(), x > 0), "cannot be broadcast"),
    ],
)
def test_arguments_that_do_not_fit(call, said):
    with pytest.raises(cupyops.InputError) as caught:
        call(torch.randn(3, 4))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "keywords, said",
    [
        (dict(signature="f(T x) -> T y, T z"), "expected one output of a reduction, got 2"),
        (dict(signature="f(T x, float a) -> T y"), "'a' is what is reduced"),
        (dict(map="x; x"), "f.map:1: is several statements, expected one expression"),
        (dict(post="y = a / n"), "f.post:1: is an assignment, expected one expression: leave out `y =`"),
        (dict(map="x == y"), "f.map:1: 'y' is neither a parameter"),
        (dict(reduce="a + c"), "f.reduce:1: 'c' is neither a parameter"),
        (dict(identity="x"), "f.identity:1: 'x' is neither a parameter"),
        (dict(post=""), "f.post is ''"),
        (dict(backward="grad_x = q"), "mentions none of grad_y, x, y"),
        (dict(reduce="f(a, b)"), "give reference="),
    ],
)
def test_what_is_wrong_is_told_at_the_definition(keywords, said):
    given = {"signature": "f(T x) -> T y", "map": "x", "reduce": "a + b", "identity": "0"} | keywords
    with pytest.raises(cupyops.InputError) as caught:
        cupyops.reduction(given.pop("signature"), **given)
    assert said in str(caught.value)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
@pytest.mark.parametrize("shape, dim", [((1 << 22,), None), ((300, 4096), 1), ((4096, 300), 0), ((8, 31, 65), (0, 2))])
def test_on_a_gpu(dtype, shape, dim):
    x = torch.randn(shape, dtype=dtype, device="cuda", requires_grad=True)
    y = norm2(x, dim)
    (grad,) = torch.autograd.grad(y.sum(), x)
    exact = x.detach().double().requires_grad_()
    expected = norm2_by_torch(exact, dim)
    (wanted,) = torch.autograd.grad(expected.sum(), exact)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(y.double(), expected, rtol=16 * eps, atol=0)
    torch.testing.assert_close(grad.double(), wanted, rtol=32 * eps, atol=eps)
    assert torch.equal(y, norm2(x, dim))
