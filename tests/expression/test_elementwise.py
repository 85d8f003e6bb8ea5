"""cupyops.elementwise: the contract, layouts and dtypes against PyTorch, and what is refused."""

from contextlib import nullcontext

import pytest
import torch

import cupyops
from cupyops._expression.declaration import namespace_of
from cupyops._kernel.kernel import FLOATING


def define_gated(name="gated", **options):
    return cupyops.elementwise(
        f"{name}(T x, T w, float beta = 1.0) -> T y",
        "y = x * sigmoid(beta * x) * w",
        "float s = sigmoid(beta * x); grad_x = grad_y * w * s * (1 + beta * x * (1 - s)); grad_w = grad_y * x * s",
        **options,
    )


def gated_by_torch(x, w, beta=1.0):
    return x * torch.sigmoid(beta * x) * w


gated = define_gated()


def test_the_contract():
    sample = [torch.randn(3, 5, requires_grad=True), torch.randn(5, requires_grad=True)]
    report = cupyops.testing.check(
        gated, sample, {"beta": 1.5}, reference=gated_by_torch, backends=("reference", "simulator"), shrink=False
    )
    report.raise_if_failed()


def views():
    """Pairs of inputs that are walked in different ways."""
    base = torch.randn(4, 6, 16)
    yield "vectors", base, torch.randn(4, 6, 16)
    yield "misaligned", torch.randn(33)[1:], torch.randn(32)
    yield "tail", torch.randn(7, 3), torch.randn(7, 3)
    yield "channels_last", torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last), torch.randn(3, 1, 1)
    yield "transposed", base.transpose(0, 2), torch.randn(16, 6, 1)
    yield "both broadcast", torch.randn(4, 1, 8), torch.randn(3, 1)
    yield "number", torch.randn(()), torch.randn(9)
    yield "seven dimensions", torch.randn(128).view(2, 2, 2, 2, 2, 2, 2).permute(6, 1, 4, 3, 0, 5, 2), torch.randn(2, 1)
    yield "empty", torch.randn(0, 3), torch.randn(3)


@pytest.mark.parametrize("x, w", [pytest.param(x, w, id=name) for name, x, w in views()])
def test_any_layout(x, w):
    x, w = (t.detach().requires_grad_() for t in (x, w))
    expected = gated_by_torch(x, w, 0.5)
    grad_y = torch.randn_like(expected)
    theirs = torch.autograd.grad(expected, (x, w), grad_y)
    with cupyops.simulate(), cupyops.trace() as trace:
        y = gated(x, w, beta=0.5)
        ours = torch.autograd.grad(y, (x, w), grad_y)
    assert "reference" not in trace.routes()
    assert y.stride() == expected.stride()
    for found, wanted in zip((y, *ours), (expected, *theirs)):
        torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_sums_of_gradients_are_rounded_once(dtype):
    """4096 terms: a sum of terms that were rounded to a half type would be off by more than one unit."""
    x, w = torch.randn(64, 64, dtype=dtype), torch.ones(1, dtype=dtype, requires_grad=True)
    with cupyops.simulate():
        (grad,) = torch.autograd.grad(gated(x, w), w, torch.ones(64, 64, dtype=dtype))
    exact = (x.double() * torch.sigmoid(x.double())).sum()
    assert grad.dtype == dtype
    assert abs(grad.item() - exact.item()) <= torch.finfo(dtype).eps * abs(exact.item()) * (
        4 if dtype.itemsize == 8 else 1
    )


def test_masks_indices_and_several_outputs():
    op = cupyops.elementwise(
        "pick(bool[] mask, T x, int64[] i, uint8[] u, bool twice) -> T y, int64 j, bool big",
        "float v = mask ? x : -x; y = twice ? 2 * v : v; j = i / 3 + u * 2; big = y > 0.5;",
        "grad_x = grad_y * (mask ? 1 : -1) * (twice ? 2 : 1)",
        dtypes=torch.float16,
    )
    x = torch.randn(3, 16).half().requires_grad_()
    mask, i, u = torch.rand(16) > 0.5, torch.arange(-8, 8), torch.arange(240, 256).to(torch.uint8)
    expected = op(mask, x, i, u, True)
    assert torch.equal(expected[0], torch.where(mask, x, -x) * 2)
    assert torch.equal(expected[1], (torch.div(i, 3, rounding_mode="trunc") + u.long() * 2).expand(3, 16))
    assert torch.equal(expected[2], expected[0] > 0.5)
    (grad,) = torch.autograd.grad(expected[0].sum(), x)
    with cupyops.simulate():
        found = op(mask, x, i, u, True)
        (ours,) = torch.autograd.grad(found[0].sum(), x)
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(found, expected))
    assert torch.equal(ours, grad)


def test_without_backward_the_reference_is_differentiated():
    op = cupyops.elementwise("cube(T x) -> T y", "y = x * x * x", dtypes=torch.float32)
    x = torch.randn(5, requires_grad=True)
    with cupyops.simulate():
        (grad,) = torch.autograd.grad(op(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.sum(), x)
    torch.testing.assert_close(grad, 3 * x**2)
    torch.testing.assert_close(second, 6 * x)


def test_only_what_backward_names_is_kept():
    """An exponential needs its output alone."""
    op = cupyops.elementwise("e(T x) -> T y", "y = exp(x)", "grad_x = grad_y * y", dtypes=torch.float32)
    kept = []
    x = torch.randn(5, requires_grad=True)
    with cupyops.simulate(), torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = op(x)
    assert [t.data_ptr() for t in kept] == [y.data_ptr()]


def test_a_loop_a_preamble_and_a_reference():
    op = cupyops.elementwise(
        "lib::horner(T x, int terms = 4) -> T y",
        "A sum = 0; for (int i = 0; i < terms; ++i) sum = step(sum, x); y = sum;",
        "A power = 1, sum = 0; for (int i = 1; i < terms; ++i) { sum += i * power; power *= x; } grad_x = grad_y * sum;",
        preamble="template <typename A> __device__ A step(A sum, A x) { return sum * x + ONE; }",
        options=("-DONE=1",),
        reference=lambda x, terms: sum(x**power for power in range(terms)),
        dtypes=(torch.float32,),
    )
    x = torch.randn(40, requires_grad=True)
    with cupyops.simulate(), cupyops.trace() as trace:
        y = op(x, terms=3)
        (grad,) = torch.autograd.grad(y.sum(), x)
    assert trace.routes() == {"simulator"}
    torch.testing.assert_close(y, 1 + x + x**2)
    torch.testing.assert_close(grad, 1 + 2 * x)
    torch.testing.assert_close(op(x), 1 + x + x**2 + x**3)


def test_the_newest_definition_of_a_name_is_the_one():
    x = torch.ones(4)
    older = []
    for factor in (2, 3):
        with pytest.warns(UserWarning, match="in torch.ops this one is user_") if older else nullcontext():
            op = cupyops.elementwise("again(T x) -> T y", f"y = {factor} * x", dtypes=torch.float32)
        with cupyops.simulate():
            assert op(x).tolist() == [factor] * 4
        assert torch.compile(op, fullgraph=True, backend="aot_eager")(x).tolist() == [factor] * 4
        assert cupyops.operators()[f"{namespace_of(__name__)}::again"].public is op
        older.append(op)
    torch._dynamo.reset()
    assert torch.compile(older[0], fullgraph=True, backend="aot_eager")(x).tolist() == [2] * 4


def test_two_of_a_name_that_nobody_has_compiled_yet():
    """Each is an op of its own, whichever is compiled first."""
    a = cupyops.elementwise("act(T x) -> T y", "y = x + 1")
    b = cupyops.elementwise("act(T x) -> T y", "y = x * 100")
    x = torch.full((2,), 3.0)
    for op, expected in ((b, 300), (a, 4), (b, 300)):
        torch._dynamo.reset()
        assert torch.compile(op, fullgraph=True, backend="aot_eager")(x).tolist() == [expected] * 2
        assert op(x).tolist() == [expected] * 2
    both = torch.compile(lambda x: (a(x), b(x)), fullgraph=True, backend="aot_eager")
    assert [y.tolist() for y in both(x)] == [[4, 4], [300, 300]]


def test_each_module_has_a_namespace():
    """So that modules that know nothing of each other may choose the same name."""
    names = {}
    for module in ("first.module", "second"):
        names[module] = {"__name__": module, "cupyops": cupyops}
        exec('op = cupyops.elementwise("the_same(T x) -> T y", "y = 2 * x")', names[module])
    assert {"user_first_module::the_same", "user_second::the_same"} <= cupyops.operators().keys()
    assert namespace_of("__main__") == "user"


def test_promotion():
    op = define_gated("promoting", promote=True)
    x, w = torch.randn(4).half().requires_grad_(), torch.randn(3, 1, requires_grad=True)
    y = op(x, w)
    assert y.dtype == torch.float32
    grads = torch.autograd.grad(y.sum(), (x, w))
    assert [grad.dtype for grad in grads] == [torch.float16, torch.float32]
    assert op(x, torch.tensor(2.0, dtype=torch.float64)).dtype == torch.float16  # of no dimension


def test_arguments_that_do_not_go_together():
    x = torch.randn(3)
    for bad, said in (
        (lambda: gated(x, x.double()), "w is torch.float64: tensors of type T are of one dtype"),
        (lambda: gated(x, torch.randn(2)), "x of shape (3,), w of shape (2,) cannot be broadcast"),
        (lambda: gated(x, 1.0), "w is 1.0 (float), expected a tensor or an array; a number is declared as `float w`"),
        (lambda: gated(x.int(), x), "x is a tensor of shape (3,), torch.int32 on cpu, expected"),
        (lambda: gated(x, x.to("meta")), "w is on meta, but x is on cpu"),
    ):
        with pytest.raises(cupyops.InputError) as caught:
            bad()
        assert said in str(caught.value)


@pytest.mark.parametrize(
    "keywords, said",
    [
        (dict(backward="grad_z = 1"), "f.backward:1: grad_x is never assigned"),
        (dict(backward="grad_x = z"), "mentions none of grad_y, x, y"),
        (dict(backward="grad_x = grad_y * z"), "'z' is neither a parameter nor declared"),
        (dict(backward="if (x > 0) grad_x = grad_y;"), "grad_x is not assigned, or not in every case"),
        (dict(forward="float z = x", reference=torch.exp), "y is never assigned"),
        (dict(signature="f(T x) -> bool y", backward="grad_x = x"), "so there is no gradient"),
        (dict(dtypes=torch.int32), "dtypes is torch.int32"),
        (dict(preamble=3), "f.preamble is 3"),
        (dict(autocast="half"), "autocast is 'half'"),
    ],
)
def test_what_is_wrong_is_told_at_the_definition(keywords, said):
    given = {"signature": "f(T x) -> T y", "forward": "y = x"} | keywords
    with pytest.raises(cupyops.InputError) as caught:
        cupyops.elementwise(**given)
    assert said in str(caught.value)


def test_a_compile_error_shows_the_line_that_was_written():
    op = cupyops.elementwise("wrong(T x) -> T y", "float s = x;\ny = sine(s);", reference=torch.sin)
    with cupyops.simulate(), pytest.raises(cupyops.CompileError) as caught:
        op(torch.ones(3))
    assert 'wrong.forward:2: error: identifier "sine" is undefined\n      2 | y = sine(s);' in str(caught.value)


def test_it_has_the_signature_that_was_written():
    import inspect

    assert str(inspect.signature(gated)) == ("(x: torch.Tensor, w: torch.Tensor, beta: float = 1.0) -> torch.Tensor")
    assert gated.__module__ == __name__ and gated.__name__ == "gated" and "sigmoid(beta * x)" in gated.__doc__


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATING, ids=str)
def test_on_a_gpu(dtype):
    x = torch.randn(5, 1, 1000, dtype=dtype, device="cuda", requires_grad=True)
    w = torch.randn(7, 1, dtype=dtype, device="cuda", requires_grad=True)
    y = gated(x, w, beta=0.5)
    grads = torch.autograd.grad(y.sum(), (x, w))
    exact = [t.detach().double().requires_grad_() for t in (x, w)]
    expected = gated_by_torch(*exact, 0.5)
    wanted = torch.autograd.grad(expected.sum(), exact)
    tolerance = dict(rtol=4 * torch.finfo(dtype).eps, atol=64 * torch.finfo(dtype).eps)
    for ours, theirs in zip((y, *grads), (expected, *wanted)):
        torch.testing.assert_close(ours.double(), theirs, **tolerance)
