"""attention with a score and a mask of C: values and gradients beside PyTorch's in float64, in both engines."""

import math
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from attentions import CARDS, HOPPER, compare, eager, sees, usual
from selection import slow
from torch.utils.flop_counter import FlopCounterMode

import cupyops
from cupyops._dispatch.core.gpu import assume_gpu
from cupyops._expression.indexed import Formula
from cupyops._expression.scores import scores, spelled
from cupyops._expression.shifts import LOG2E, shift
from cupyops.simulator.arithmetic import quotient

ENGINES = {
    "mma": ("sm_80", "forward:mma", "backward:mma_64"),
    "mma_32": ("sm_80", "forward:mma", "backward:mma_32"),
    "mma_once": ("sm_80", "forward:mma", "backward:mma_once"),
    "wgmma": ("sm_90", "forward:wgmma", "backward:wgmma"),
    "wgmma_once": ("sm_90", "forward:wgmma", "backward:wgmma_once"),
}
QUERIES, KEYS, HEADS = 140, 75, 2
torch.manual_seed(0)
SLOPES, BIAS, TABLE = torch.rand(HEADS), torch.randn(1, HEADS, QUERIES, KEYS), torch.randn(5, HEADS)
DOCUMENTS = torch.arange(QUERIES) // 40
ROWS, COLUMNS = torch.arange(QUERIES)[:, None], torch.arange(KEYS)


# name: (what attention is given, scores -> scores, which keys are seen), for tensors on a device
VARIANTS = {
    "cap": lambda to: (
        {"score": "tanh(s / cap) * cap", "cap": 2.0},
        lambda s: torch.tanh(s / 2) * 2,
        None,
    ),
    "slopes": lambda to: (
        {"score": "s - slopes[h] * abs(q - k)", "mask": "k <= q", "slopes": to(SLOPES)},
        lambda s: s - to(SLOPES.double())[:, None, None] * to((ROWS - COLUMNS).abs()),
        ROWS >= COLUMNS,
    ),
    "bias": lambda to: (
        {"score": "s + bias[b, h, q, k]", "bias": to(BIAS.half())},
        lambda s: s + to(BIAS.half().double()),
        None,
    ),
    "table": lambda to: (
        {"score": "s * t + table[(k - q) / 16 + 2, h]", "table": to(TABLE), "t": to(torch.tensor(0.5))},
        lambda s: (
            s / 2 + to(TABLE.double()[((COLUMNS - ROWS) / 16).trunc().long().add(2).clamp(0, 4)].permute(2, 0, 1))
        ),
        None,
    ),
    "documents": lambda to: (
        {"mask": "ids[q] == ids[k]", "ids": to(DOCUMENTS)},
        lambda s: s,
        DOCUMENTS[:, None] == DOCUMENTS[None, :KEYS],
    ),
    "window": lambda to: (
        {"mask": "k <= q && q - k < window && (q + k) % 3 != 0", "window": 30},
        lambda s: s,
        (ROWS >= COLUMNS) & (ROWS - COLUMNS < 30) & ((ROWS + COLUMNS) % 3 != 0),
    ),
    "steep": lambda to: (  # infinite derivatives where a key is not seen, and beyond the last row
        {"score": "s + sqrt(q - k) - log(n - q)", "mask": "q > k", "n": QUERIES},
        lambda s: (
            s
            + to(
                torch.where(ROWS > COLUMNS, (ROWS - COLUMNS).clamp(0), 1).double().sqrt()
                - (QUERIES - ROWS).double().log()
            )
        ),
        ROWS > COLUMNS,
    ),
    "powers": lambda to: (
        {"score": "s > 0 ? s * s : fmax(2 * s, -3.0) + exp(s)"},
        lambda s: torch.where(s > 0, s * s, torch.fmax(2 * s, torch.full_like(s, -3)) + s.exp()),
        None,
    ),
}


def compared(name, engine, dtype, width, device="cpu", **options):
    variant, change, seen = VARIANTS[name](lambda x: x.to(device))
    shape = (1, HEADS, 1, QUERIES, KEYS, width)
    return compare(
        shape, dtype, device, forms=ENGINES[engine][1:], variant=variant, change=change, seen=seen, **options
    )


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name, engine):
    width = 64 if engine == "mma" or (engine, name) == ("wgmma_once", "slopes") else 128
    with cupyops.simulate(ENGINES[engine][0]):
        compared(name, engine, torch.float16 if width == 64 else torch.bfloat16, width)


@pytest.mark.slow
def test_beside_bounds():
    """The mask's own bounds, those of causal and of window: the narrowest hold."""
    with cupyops.simulate("sm_80"):
        compared("slopes", "mma", torch.float16, 64, window=(20, 5))
        compared("window", "mma", torch.float16, 64, causal="bottom_right")
        compared("cap", "mma", torch.float16, 64, window=(9, 0), scale=0.3, lse_grad=False)


def test_rows_that_see_no_key():
    """0 and -inf, and no gradient; a score may hide keys as well as a mask."""
    q, k, v = (torch.randn(1, 1, 40, 64).half().requires_grad_() for _ in range(3))
    for given in ({"mask": "k < q"}, {"mask": "k * q < q * q"}, {"score": "k < q ? s : -INFINITY"}):
        with cupyops.simulate("sm_80"):
            y, lse = cupyops.attention(q, k, v, return_lse=True, **given)
            grads = torch.autograd.grad((y, lse), (q, k, v), (torch.ones_like(y), torch.ones_like(lse)))
        assert not y[:, :, 0].any() and lse[0, 0, 0] == -math.inf and not grads[0][:, :, 0].any()
        assert all(x.isfinite().all() for x in (y, lse[:, :, 1:], *grads))


@pytest.mark.parametrize(
    "mask, numbers, bounds, left",
    [
        ("k <= q && q - k < window", {"window": 5}, (-4, 0), False),
        ("q >= k", {}, (None, 0), False),
        ("k - q == 3", {}, (3, 3), False),
        ("-2 < k - q - w", {"w": 4}, (3, None), False),
        ("(q + 1 > k) && k % 2 == 0", {}, (None, 0), True),
        ("q - k < window", {"window": 2.5}, (None, None), True),
        ("q + k < 5", {}, (None, None), True),
        ("k <= q || q == 0", {}, (None, None), True),
        ("k <= q && k > q - w && k >= q - 3", {"w": 9}, (-3, 0), False),
        ("q != k", {}, (None, None), True),
        ("k < 7", {}, (None, None), True),
    ],
)
def test_bounds_of_a_mask(mask, numbers, bounds, left):
    """What bounds k - q is no part of the kernels: blocks out of bounds are skipped, and a plain kernel may do."""
    names = [f"{name}:{'int' if isinstance(value, int) else 'A'}" for name, value in numbers.items()]
    found = scores(spelled(None, mask, names), ())
    assert found.bounds(None, None, [float(value) for value in numbers.values()]) == bounds
    assert found.changes == left
    scope = {"q": ROWS, "k": COLUMNS, **numbers}
    expected = eval(
        mask.replace("&&", "&").replace("||", "|").replace(" & ", ") & (").replace(" | ", ") | (").join("()"), scope
    )
    distance = COLUMNS - ROWS
    within = (distance >= (bounds[0] if bounds[0] is not None else -999)) & (
        distance <= (bounds[1] if bounds[1] is not None else 999)
    )
    assert torch.equal(expected, within) if not left else not (expected & ~within).any()


def test_a_mask_of_bounds_is_a_plain_kernel():
    q, k, v = (torch.randn(1, 1, 40, 64).half() for _ in range(3))
    with cupyops.simulate("sm_90"), assume_gpu(**HOPPER), cupyops.trace() as trace:
        y = cupyops.attention(q, k, v, mask="k <= q && q - k < window", window=6)
        assert torch.equal(y, cupyops.attention(q, k, v, causal="top_left", window=(5, 0)))
    assert {record.kernel.partition("<")[0] for record in trace.launches()} == {"attention_fwd_wgmma"}


def test_every_derivative():
    """Of captured tensors too; and the second ones."""
    q, k, v = (torch.randn(1, h, n, 3, dtype=torch.float64, requires_grad=True) for h, n in ((2, 4), (1, 5), (1, 5)))
    slopes, bias, table, t = (
        torch.rand(shape, dtype=torch.float64, requires_grad=True) for shape in ((2,), (1, 1, 4, 5), (3, 2), ())
    )

    def function(q, k, v, slopes, bias, table, t):
        return cupyops.attention(
            q, k, v, return_lse=True, mask="k <= q + 1", slopes=slopes, bias=bias, table=table, t=t,
            score="tanh(s * t) - slopes[h] * abs(q - k) + bias[b, h, q, k] * table[k - q, h]",
        )  # fmt: skip

    given = q, k, v, slopes, bias, table, t
    assert torch.autograd.gradcheck(function, given)
    assert torch.autograd.gradgradcheck(lambda *args: function(*args)[0], given)


def test_recorded_calls():
    """The fourth call replays what the first did; numbers, tensors and their gradients are those of each call."""
    score, mask = "s * t - slopes[h] * abs(q - k)", "k <= q && (q - k) % 4 < w"
    for i in range(6):
        given = [torch.randn(1, 2, 40, 64).half().requires_grad_() for _ in range(3)]
        slopes = torch.rand(2).requires_grad_()
        more = {"t": 0.5, "w": 3 if i < 5 else 2}
        with cupyops.simulate("sm_90"), assume_gpu(**HOPPER):
            y = cupyops.attention(*given, score=score, mask=mask, slopes=slopes, **more)
            grads = torch.autograd.grad(y.float().square().sum(), (*given, slopes))
        wide = [x.detach().double().requires_grad_() for x in (*given, slopes)]
        distance = torch.arange(40)[:, None] - torch.arange(40)
        exact = eager(
            *wide[:3],
            (distance >= 0) & (distance % 4 < more["w"]),
            change=lambda s, wide=wide, distance=distance: s * 0.5 - wide[3][:, None, None] * distance.abs(),
        )[0]
        for ours, right in zip((y, *grads), (exact, *torch.autograd.grad(exact.square().sum(), wide))):
            assert (ours.double() - right).abs().max() <= 4e-3 * right.abs().max(), i


def test_compiled_and_transformed():
    q, k, v = (torch.randn(2, 2, 6, 4) for _ in range(3))
    slopes = torch.rand(2)

    def function(q, k, v, slopes):
        return cupyops.attention(q, k, v, score="s - slopes[h] * abs(q - k)", mask="k <= q + n", slopes=slopes, n=1)

    distance = torch.arange(6) - torch.arange(6)[:, None]
    expected = eager(q, k, v, distance <= 1, change=lambda s: s - slopes[:, None, None] * distance.abs())[0]
    torch.testing.assert_close(torch.compile(function, fullgraph=True)(q, k, v, slopes), expected)
    stacked = torch.func.vmap(function, in_dims=(0, None, None, None))(torch.stack([q, q]), k, v, slopes)
    torch.testing.assert_close(stacked[1], expected)
    exported = torch.export.export(_Module(function), (q, k, v, slopes)).module()
    torch.testing.assert_close(exported(q, k, v, slopes), expected)


@pytest.mark.parametrize("more", [*slow({}), {"t": 2.0}], ids=str)
def test_compiled_kernels_of_any_length(more):
    """One graph for all sizes, with gradients; with captured numbers and without."""
    score = "s * t - slopes[h] * abs(q - k)" if more else "s - slopes[h] * abs(q - k)"

    def function(q, k, v, slopes):
        return cupyops.attention(q, k, v, score=score, mask="(q + k) % 3 != 1", slopes=slopes, **more)

    compiled = torch.compile(function, dynamic=True, fullgraph=True)
    with cupyops.simulate("sm_80"):
        for rows in (20, 33):
            given = [torch.randn(1, 2, rows, 16).half().requires_grad_() for _ in range(3)]
            slopes = torch.rand(2)
            both = [
                (y, *torch.autograd.grad(y.sum(), given)) for y in (f(*given, slopes) for f in (compiled, function))
            ]
            for ours, right in zip(*both, strict=True):
                assert torch.equal(ours, right)


class _Module(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


@pytest.mark.parametrize("engine", ["mma", "wgmma"])
def test_softcap_slopes_and_sinks(engine):
    """As flash-attn has them: slopes on the bottom right diagonal, per batch too; a sink in each row's denominator."""
    q, k, v = (torch.randn(2, h, n, 64).half().requires_grad_() for h, n in ((2, 70), (1, 45), (1, 45)))
    slopes, sinks = torch.rand(2, 2), torch.randn(2).requires_grad_()
    given = {"softcap": 1.5, "alibi_slopes": slopes, "causal": "bottom_right"}
    arch = ENGINES[engine][0]
    with cupyops.simulate(arch), assume_gpu(**CARDS[arch]), cupyops.trace() as trace:
        results = cupyops.attention(q, k, v, sinks=sinks, return_lse=True, **given)
        grads = [torch.randn_like(x) for x in results]
        found = torch.autograd.grad(results, (q, k, v, sinks), grads)
    assert f"attention_fwd_{engine}_variant" in {record.kernel.partition("<")[0] for record in trace.launches()}
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, sinks)]
    change = partial(usual, 1.5, slopes.double(), 45 - 70)
    exact = eager(*wide[:3], sees(70, 45, "bottom_right"), None, change, wide[3])
    right = torch.autograd.grad(exact, wide, [x.double() for x in grads])
    for ours, true in zip((*results, *found), (*exact, *right), strict=True):
        assert (ours.double() - true).abs().max() <= 4e-3 * true.abs().max()


def _off(low):
    """tanh, off by at most 2^-11 of itself, the most that its hardware may be: here up, there down, as its last bits say."""

    def function(x):
        exact = np.tanh(x.astype(np.float64))
        return (exact * (1 + np.where(x.view(np.uint32) % 2 == low, -1, 1) * 2.0**-11)).astype(np.float32)

    return function


@pytest.mark.parametrize("low", [0, 1])
@pytest.mark.parametrize("dtype", [*slow(torch.float16), torch.bfloat16], ids=str)
@pytest.mark.parametrize("engine", ["mma", "wgmma"])
def test_softcap_is_as_right_as_half_types_can_be(engine, dtype, low, monkeypatch):
    """By a tanh that is as far off as its hardware may be: no farther from float64 than PyTorch in bf16, whose scores are
    rounded more than that; in fp16 no farther than float64 by the same tanh, and results that are rounded."""
    monkeypatch.setitem(quotient._APPROXIMATE, "tanh", _off(low))
    torch.manual_seed(3)
    given = [(3 * torch.randn(1, 1, 150, 64)).to(dtype) for _ in range(3)]  # scores that come near the cap
    cap = 20.0 + low + 2 * (engine == "mma")

    def by(kind, function):
        mine = [x.to(kind).requires_grad_() for x in given]
        y = function(*mine)
        return [x.double() for x in (y, *torch.autograd.grad(y, mine, torch.ones_like(y)))]

    def plain(q, k, v, tanh=torch.tanh):
        return (cap * tanh(q @ k.mT * 64**-0.5 / cap)).softmax(-1) @ v

    class OffBy(torch.autograd.Function):
        """The same tanh, in forward and in its derivative."""

        @staticmethod
        def forward(ctx, x):
            y = torch.from_numpy(_off(low)(x.float().numpy())).double()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, grad):
            return grad * (1 - ctx.saved_tensors[0] ** 2)

    arch = ENGINES[engine][0]
    with cupyops.simulate(arch), assume_gpu(**CARDS[arch]), cupyops.trace() as trace:
        ours = by(dtype, lambda *three: cupyops.attention(*three, softcap=cap))
    assert f"attention_fwd_{engine}_variant" in {record.kernel.partition("<")[0] for record in trace.launches()}
    half = dtype if dtype is torch.bfloat16 else torch.float64
    near = by(half, plain) if half is dtype else by(half, lambda *three: plain(*three, OffBy.apply))
    rounding = 0.0 if half is dtype else torch.finfo(dtype).eps
    for found, other, right in zip(ours, near, by(torch.float64, plain), strict=True):
        assert (found - right).norm() <= (other - right).norm() + rounding * right.norm()
        assert (found - right).abs().max() <= 1.5 * (other - right).abs().max() + rounding * right.abs().max()


def test_every_derivative_of_sinks():
    q, k = (torch.randn(1, 2, n, 3, dtype=torch.float64, requires_grad=True) for n in (5, 3))
    sinks = torch.tensor([0.3, -math.inf], dtype=torch.float64)

    def function(q, k, sink):
        return cupyops.attention(
            q, k, k, sinks=torch.stack([sink, sinks[1]]), causal="bottom_right", softcap=0.7, return_lse=True
        )

    one = sinks[0].clone().requires_grad_()
    y, lse = function(q, k, one)
    assert lse[0, 1, 0] == -math.inf and lse[0, 0, 0] == one and not y[:, :, :2].any()
    both = lambda *args: [part[:, :, 2:] for part in function(*args)]  # rows that see a key
    assert torch.autograd.gradcheck(both, (q, k, one)) and torch.autograd.gradgradcheck(both, (q, k, one))


def test_autocast_leaves_what_is_captured():
    """Under autocast queries are rounded, and a captured tensor is what it was, as sinks are."""
    q = torch.randn(1, 1, 6, 8)
    far = torch.tensor([1.0, 1000.37])
    with torch.autocast("cpu", torch.bfloat16):
        y = cupyops.attention(q, q, q, score="far[0] * s * 0 + far[1]", far=far, return_lse=True)[1]
        sink = torch.tensor([1000.37])
        lse = cupyops.attention(q, q, q, sinks=sink, return_lse=True)[1]
    torch.testing.assert_close(y, torch.full_like(y, 1000.37 + math.log(6)), rtol=1e-7, atol=0)
    assert torch.equal(lse, sink.expand(lse.shape))


@pytest.mark.parametrize(
    "given, message",
    [
        ({"softcap": 0.0}, "softcap is 0.0 .*expected a number greater than 0"),
        ({"softcap": 2.0, "score": "s"}, "softcap is given beside score; write it into the score"),
        ({"alibi_slopes": torch.ones(3)}, "alibi_slopes is a tensor .*expected size 2, the heads"),
        ({"alibi_slopes": torch.ones(1, 1, 2)}, r"alibi_slopes is a tensor .*expected \(heads,\) or \(batch, heads\)"),
        ({"sinks": torch.ones(3)}, r"sinks is a tensor .*expected \(2,\), the heads of query"),
        ({"sinks": torch.ones(2).int()}, "sinks is a tensor .*floating-point"),
        ({"score": "s * x"}, r"attention.score:1: 'x' is none of .*; give it as a keyword, x=...\n.*score = s \* x"),
        ({"score": "s * x", "x": 2.0, "y": 3}, "y is named in neither score nor mask"),
        ({"x": 2.0}, "x is no argument of attention, and there is neither score nor mask to name it"),
        ({"score": "s * x[h]", "x": 2.0}, "x is no tensor with dimensions"),
        ({"score": "s * x", "x": torch.ones(2)}, r"x is a tensor with dimensions; give indices, as x\[h\]"),
        ({"score": "s * x[h, q]", "x": torch.ones(2)}, "x has 1 dimensions, and 2 indices here"),
        ({"score": "s * x[h][q]", "x": torch.ones(2, 3)}, r"write x\[h, q\]"),
        ({"score": "s * (s + 1)[h]"}, "what has an index is no tensor with dimensions"),
        (
            {"score": "s * x[h]", "x": torch.ones(3)},
            "x is a tensor of shape .*expected size 2, the heads, or 1 in dimension 0",
        ),
        ({"score": "s * x[h + 0.5]", "x": torch.ones(2)}, "an index of x is no integer"),
        ({"score": "s * x[h]", "x": torch.ones(0)}, "x is a tensor of shape .*that has elements"),
        ({"score": "s * x", "x": torch.tensor(1j)}, "x is a tensor .*expected a tensor of floating-point numbers"),
        ({"score": "s * x", "x": "2"}, "x is '2' .*expected a number or a tensor"),
        ({"score": "s * n", "n": 2**40}, "n is .*expected an integer of 32 bits"),
        ({"score": "s * tanh", "tanh": 2.0}, "the keyword tanh is a name that expressions have for something else"),
        ({"score": "s * f(q)"}, "the function 'f' is not translated to PyTorch"),
        ({"score": "s = 2; s"}, "expected one expression, without statements"),
        ({"score": "s ** 2"}, "C has no"),
        ({"score": "s *"}, "not C that can be read"),
        ({"score": 3}, "score is 3 .*expected an expression of C"),
        ({"mask": torch.ones(4, 4)}, r"mask is a tensor .*expected an expression of C that names it, such as mask="),
        ({"score": ""}, "score is ''.*expected an expression of C"),
        ({"mask": "s > 0"}, "'s' is none of b, h, q, k"),
        (
            {
                "score": "s + a[h] + b1[h] + c[h] + d[h] + e[h]",
                **{n: torch.ones(2) for n in ("a", "b1", "c", "d", "e")},
            },
            "at most 4 tensors",
        ),
    ],
    ids=str,
)
def test_bad_expressions(given, message):
    q = torch.ones(1, 2, 4, 8)
    with pytest.raises(cupyops.InputError, match=f"(?s){message}"):
        cupyops.attention(q, q, q, **given)


def test_what_kernels_do_not_differentiate():
    q = torch.randn(1, 1, 4, 8).half()
    with cupyops.simulate(), cupyops.trace() as trace:
        cupyops.attention(q, q, q, score="lgamma(s * s + 1)")
    (record,) = trace.records
    assert record.route == "reference" and "lgamma" in record.note


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", VARIANTS)
def test_variants_on_a_gpu(name, engine, dtype):
    if engine.startswith("wgmma") and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wgmma is of compute capability 9.0")
    for width in (64, 128) if engine != "mma_32" else (128,):
        compared(name, engine, dtype, width, "cuda")


@pytest.mark.slow
def test_wide_rows_by_both_engines():
    """Scores, a mask and dropout, where on Hopper each gradient has a kernel: what mma.sync gives, to its rounding."""
    found = []
    for forms, arch in (("forward:wgmma backward:wgmma", "sm_90"), ("forward:mma backward:mma_16", "sm_80")):
        torch.manual_seed(0)
        given = [torch.randn(1, 2, 140, width).half().requires_grad_() for width in (192, 192, 128)]
        asked = (f"attention.{form}" for form in forms.split())
        with cupyops.simulate(arch), assume_gpu(**CARDS[arch]), cupyops.use_form(*asked):
            y = cupyops.attention(*given, score="s * 0.5 + q * 0.01", mask="(q + k) % 5 != 0", dropout_p=0.2)
            found.append((y, *torch.autograd.grad(y.sin().sum(), given)))
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 2e-3 * b.abs().max()


@pytest.mark.parametrize(
    "score, added",
    [
        ("s + bias[h]", "+ log2e * in_reach_(bias[h])"),
        ("s - slopes[h] * abs(q - k)", "- (log2e * (slopes[h])) * (abs(q - k))"),
        ("k + (s - 2) - n", "+ log2e * in_reach_(k) - log2e * in_reach_(2) - log2e * in_reach_(n)"),
        ("n - (k - s)", "+ log2e * in_reach_(n) - log2e * in_reach_(k)"),
        ("s", None),
        ("-s + n", None),
        ("n - s", None),
        ("s * 2 + n", None),
        ("s + s", None),
        ("s + fmax(s, 0.0)", None),
        ("k < q ? s : n", None),
    ],
)
def test_what_a_score_adds(score, added):
    """A sum in which the score is once, as it is, has the derivative 1; what is added is found for units of log2."""
    found = shift(Formula.of("score", score))
    text = None if found is None else found.clean.removeprefix("score = ").removesuffix(";")
    assert (text and text.replace(LOG2E, "log2e")) == added


@pytest.mark.parametrize("within", ["a mode", "torch.compile"])
@pytest.mark.parametrize("what", ["slopes", "mask"])
def test_gradients_of_what_is_captured_where_the_op_is_called(within, what):
    """In PyTorch they are differentiated inside the registered backward."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 2, 16, 32, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    more = (torch.rand(2) if what == "slopes" else torch.randn(1, 2, 16, 16, dtype=torch.bfloat16)).requires_grad_()

    def call(more):
        if what == "slopes":
            return cupyops.attention(query, key, value, alibi_slopes=more)
        return cupyops.scaled_dot_product_attention(query, key, value, attn_mask=more)

    given = (query, key, value, more)
    with cupyops.simulate():
        expected = torch.autograd.grad(call(more).float().square().sum(), given)
        if within == "a mode":
            with FlopCounterMode(display=False):
                found = torch.autograd.grad(call(more).float().square().sum(), given)
        else:
            compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
            found = torch.autograd.grad(compiled(more).float().square().sum(), given)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("lowest", [torch.finfo(torch.bfloat16).min, -1e9])
@pytest.mark.parametrize("what", ["mask", "bias of float32", "a number"])
@pytest.mark.parametrize("engine", ["mma", *slow("wgmma")])
def test_rows_of_the_lowest_number(engine, what, lowest):
    """Such a number times log2(e) is none any more; a row of it alone has equal weights, as PyTorch has it."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, 1, 70, 64, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    added = torch.zeros(70, 70, dtype=torch.bfloat16)
    added[3:5], added[7, :5], added[9, 9:] = lowest, lowest, -math.inf
    if what == "a number":
        added = torch.where(torch.arange(70)[:, None] < 2, torch.tensor(lowest, dtype=torch.bfloat16), 0.0)
    grad = torch.randn_like(query)

    def call():
        if what == "mask":
            return cupyops.scaled_dot_product_attention(query, key, value, attn_mask=added)
        if what == "a number":
            return cupyops.attention(query, key, value, score="q < 2 ? low : s", low=lowest)
        return cupyops.attention(query, key, value, score="s + bias[q, k]", bias=added.float())

    card, arch = (assume_gpu(**HOPPER), "sm_90") if engine == "wgmma" else (nullcontext(), "sm_80")
    with card, cupyops.simulate(arch), cupyops.trace() as trace:
        y = call()
        found = y, *torch.autograd.grad(y, (query, key, value), grad)
    assert any(f"_{engine}" in record.kernel for record in trace.launches())
    wide = [x.detach().float().requires_grad_() for x in (query, key, value)]
    right = torch.nn.functional.scaled_dot_product_attention(*wide, attn_mask=added.float())
    expected = right, *torch.autograd.grad(right, wide, grad.float())
    assert all(one.isfinite().all() for one in found)
    for ours, true in zip(found, expected if what != "a number" else expected[:1]):  # no gradient goes to its scores
        bound = 4 * torch.finfo(torch.bfloat16).eps * true.abs().max().item()
        torch.testing.assert_close(ours.float(), true, rtol=0, atol=bound)
