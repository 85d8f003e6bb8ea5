"""attention of packed sequences: each beside PyTorch's attention in float64 of that sequence alone."""

import contextlib
import itertools
import math
from functools import partial

import pytest
import torch
from attentions import HOPPER, eager, sees, usual
from plan_driver import driver
from selection import slow

import cupyops
from cupyops._dispatch.attention import attention
from cupyops._dispatch.core.gpu import assume_gpu

QUERIES, KEYS, HEADS = (5, 0, 130, 37, 1, 3), (7, 9, 60, 37, 0, 200), (4, 2)
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.9])


def starts(lengths, dtype=torch.int32):
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def exact(q, k, v, options, change=None, seen=None):
    """Sequence by sequence."""
    found = []
    for (a, b), (c, d) in ((at(i, QUERIES), at(i, KEYS)) for i in range(len(QUERIES))):
        one = (x.transpose(0, 1)[None] for x in (q[a:b], k[c:d], v[c:d]))
        bounds = sees(b - a, d - c, **options)
        bounds = bounds if seen is None else bounds & seen(torch.arange(b - a)[:, None], torch.arange(d - c))
        y, lse = eager(*one, bounds, change=None if change is None else partial(change, d - c - b + a))
        found.append((y[0].transpose(0, 1), lse[0]))
    return torch.cat([y for y, _ in found]), torch.cat([lse for _, lse in found], 1)


def at(i, lengths):
    return sum(lengths[:i]), sum(lengths[: i + 1])


def packed(queries=QUERIES, keys=KEYS, dtype=torch.int32, device="cpu"):
    return {
        "cu_seqlens_q": starts(queries, dtype).to(device),
        "cu_seqlens_k": starts(keys, dtype).to(device),
        "max_seqlen_q": max(queries),
        "max_seqlen_k": max(keys),
    }


def tensors(dtype, width=64, device="cpu", left_over=0):
    """Views of packed projections."""
    torch.manual_seed(0)
    q = torch.randn(sum(QUERIES) + left_over, HEADS[0], width)
    kv = torch.randn(sum(KEYS) + left_over, 2, HEADS[1], width)
    return [x.to(device, dtype).requires_grad_() for x in (q, kv[:, 0], kv[:, 1])]


def compare(dtype, forms=(), device="cpu", width=64, more=None, change=None, seen=None, **options):
    given = tensors(dtype, width, device)
    card = assume_gpu(**HOPPER) if device == "cpu" else contextlib.nullcontext()
    with card, cupyops.use_form(*forms):
        results = cupyops.attention(*given, **packed(device=device), **options, **(more or {}), return_lse=True)
        grads = [torch.randn_like(x) for x in results]
        results = (*results, *torch.autograd.grad(results, given, grads))
    wide = [x.detach().cpu().double().requires_grad_() for x in given]
    truth = exact(*wide, options, change, seen)
    right = torch.autograd.grad(truth, wide, [x.cpu().double() for x in grads])
    for name, ours, true in zip(("y", "lse", "grad_q", "grad_k", "grad_v"), results, (*truth, *right), strict=True):
        ours = ours.cpu()
        assert torch.equal(ours.isfinite(), true.isfinite()), name
        bound = 2e-6 if name == "lse" else 4 * torch.finfo(dtype).eps
        apart, most = (ours.double() - true).nan_to_num().abs().max(), true.nan_to_num(neginf=0.0).abs().max()
        off = 2**-11 * (more or {}).get("softcap", 0.0) if name == "lse" else 0.0  # the hardware's tanh, of every score
        assert apart <= bound * most + off, f"{name}: {apart:.3g} of {most:.3g}"


CASES = {
    "full": {},
    "bottom_right": {"causal": "bottom_right"},
    "top_left": {"causal": "top_left"},
    "window": {"window": (20, 9)},
    "window of one side": {"window": (None, 3)},
    "slopes": {
        "causal": "bottom_right",
        "more": {"softcap": 2.0, "alibi_slopes": SLOPES},
        "change": lambda apart, s: usual(2.0, SLOPES.double(), apart, s),
    },
    "expression": {
        "causal": "top_left",
        "more": {"score": "s * (b + 1) - q + k", "mask": "(q + k) % 3 != 0"},
        "seen": lambda q, k: (q + k) % 3 != 0,
        "change": None,
    },
}


def with_sequence(case):
    """The case of an expression that counts the sequences; the others as they are."""
    if case != "expression":
        return CASES[case]
    count = iter(range(len(QUERIES)))

    def change(apart, s):
        q, k = (torch.arange(size) for size in s.shape[2:])
        return s * (next(count) + 1) - q[:, None] + k

    return CASES[case] | {"change": change}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("form", ["mma_64", "mma_32", "wgmma"])
def test_kernels(case, form):
    width = 64 if form == "mma_64" else 128
    with cupyops.simulate("sm_90" if form == "wgmma" else "sm_80"), cupyops.trace() as trace:
        compare(torch.float16, (f"attention.backward:{form}",), width=width, **with_sequence(case))
    method = form.partition("_")[0]
    ran = [record.kernel.partition("<")[0] for record in trace.launches() if "variant" in record.kernel]
    assert ran == [f"attention_fwd_{method}_variant", *[f"attention_bwd_{method}_variant"] * 2]


@pytest.mark.parametrize("width", [64, *slow(96, 192)])
def test_widths_on_hopper(width):
    """A panel of TMA ends with its sequence, whatever its width; lengths of one row, none, and more than a panel."""
    with cupyops.simulate("sm_90"), cupyops.trace() as trace:
        compare(torch.bfloat16, width=width, causal="bottom_right", window=(90, 0))
    assert any(record.kernel.startswith("attention_fwd_wgmma_variant") for record in trace.launches())


def test_what_lies_alike():
    """The stride of a single batch does not matter: a gradient as autograd gives it is not copied."""
    x, y = torch.empty(1, 30, 2, 8).transpose(1, 2), torch.empty(30, 2, 8).transpose(0, 1)[None]
    assert x.stride() != y.stride() and attention.alike(x, y)
    assert not attention.alike(x, torch.empty(1, 2, 30, 8)) and not attention.alike(x.mT, y.mT)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("engine", [*slow("mma"), "wgmma"])
@pytest.mark.parametrize("widths", [(192, 128), *slow((192, 192), (128, 64), (40, 200)), (40, 72)], ids=str)
def test_values_of_another_width(widths, engine, device):
    """Of rows that are narrower than a kernel's some panels are never copied: on a GPU nothing lies before these tensors."""
    if device == "cuda" and engine == "wgmma" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wgmma is of compute capability 9.0")
    lengths, forms = (37, 130, 3), ("attention.forward:wgmma", "attention.backward:wgmma") if engine == "wgmma" else ()
    sizes = [size * (50 if device == "cuda" else 1) for size in lengths]
    torch.manual_seed(0)
    width, values = widths
    given = [torch.randn(sum(sizes), 2, size).bfloat16().to(device).requires_grad_() for size in (width, width, values)]
    grad = torch.randn(sum(sizes), 2, values).bfloat16().to(device)
    simulated = cupyops.simulate("sm_90" if engine == "wgmma" else "sm_80")
    card = assume_gpu(**HOPPER) if engine == "wgmma" else contextlib.nullcontext()
    with contextlib.ExitStack() as stack, cupyops.trace() as trace:
        for one in (simulated, card, cupyops.use_form(*forms)) if device == "cpu" else (cupyops.use_form(*forms),):
            stack.enter_context(one)
        y = cupyops.attention(*given, **packed(sizes, sizes, device=device), causal="top_left")
        found = y, *torch.autograd.grad(y, given, grad)
    if engine == "wgmma" or device == "cpu":
        names = {record.kernel.partition("<")[0] for record in trace.launches()}
        assert {f"attention_fwd_{engine}_variant", f"attention_bwd_{engine}_variant"} <= names
    wide, parts = [x.detach().double().requires_grad_() for x in given], []
    for i, length in enumerate(sizes):
        a, b = at(i, sizes)
        one = (x[a:b].transpose(0, 1)[None] for x in wide)
        parts.append(eager(*one, sees(length, length, causal="top_left").to(device))[0][0].transpose(0, 1))
    right = (torch.cat(parts), *torch.autograd.grad(torch.cat(parts), wide, grad.double()))
    for ours, true in zip(found, right, strict=True):
        assert (ours.double() - true).abs().max() <= 4 * torch.finfo(torch.bfloat16).eps * true.abs().max()


@pytest.mark.parametrize("arch", [*slow("sm_80"), "sm_90"])
def test_nothing_leaks(arch):
    """NaN in one sequence stays there, though neighbours share tiles with it."""
    lengths, bad = (70, 33, 150), slice(70, 103)
    given = [torch.randn(253, 2, 64).half() for _ in range(3)]
    for x in given:
        x[bad] = math.nan
    given = [x.requires_grad_() for x in given]
    with cupyops.simulate(arch), assume_gpu(**HOPPER):
        y = cupyops.attention(*given, **packed(lengths, lengths), causal="top_left")
        found = y, *torch.autograd.grad(y, given, torch.ones_like(y))
    assert all(x[:70].isfinite().all() and x[103:].isfinite().all() and x[bad].isnan().all() for x in found)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_what_no_sequence_has(dtype):
    """Tokens before the first sequence, after the last, and of one beyond the longest that was promised: cleared."""
    x, lse = (
        torch.full((1, 2, 300, 24), math.nan).half().transpose(1, 2).contiguous().transpose(1, 2),
        torch.zeros(1, 2, 300),
    )
    starts, kept = torch.tensor([40, 90, 90, 250, 700], dtype=dtype), torch.zeros(300, dtype=torch.bool)
    for begin, end in ((40, 90), (90, 150), (250, 300)):
        kept[begin:end] = True
    with cupyops.simulate():
        attention.clear(x, starts, 60, lse)
    assert x[:, :, kept].isnan().all() and not x[:, :, ~kept].any()
    assert not lse[:, :, kept].any() and (lse[:, :, ~kept] == -math.inf).all()


def test_recorded_calls():
    """Plans write the maps of tensors that lie elsewhere each time."""
    with driver("sm_90"):
        for _ in range(5):
            given = [torch.randn(n, 2, 64).half() for n in (90, 90, 90)]
            starts = torch.tensor([0, 37, 90]).int()
            options = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 53, "max_seqlen_k": 53}
            y = cupyops.attention(*given, **options)
            for a, b in ((0, 37), (37, 90)):
                one = (x[a:b].transpose(0, 1)[None].double() for x in given)
                right = eager(*one, sees(b - a, b - a))[0][0].transpose(0, 1)
                assert (y[a:b] - right).abs().max() <= 4e-3 * right.abs().max()


@pytest.mark.parametrize("case", CASES)
def test_reference(case):
    given = tensors(torch.float64, 4)
    options = {name: value for name, value in CASES[case].items() if name in ("causal", "window")}
    function = partial(cupyops.attention, **packed(), **options, **CASES[case].get("more", {}), return_lse=True)
    found = function(*given)
    case = with_sequence(case)
    right = exact(*given, options, case.get("change"), case.get("seen"))
    torch.testing.assert_close(found, right)


def test_every_derivative():
    q, k = (torch.randn(n, 1, 2, dtype=torch.float64, requires_grad=True) for n in (5, 6))
    function = partial(cupyops.attention, **packed((2, 3), (4, 2)), causal="bottom_right")
    assert torch.autograd.gradcheck(lambda q, k: function(q, k, k, return_lse=True)[0], (q, k))
    assert torch.autograd.gradgradcheck(lambda q, k: function(q, k, k), (q, k))


def test_tokens_that_are_left_over():
    """Beyond the last sequence: zeros, and -inf, and no gradient; as a buffer of one size has it for any batch."""
    for simulated in (False, True):
        given = tensors(torch.float16, left_over=40)
        with cupyops.simulate("sm_80") if simulated else contextlib.nullcontext():
            y, lse = cupyops.attention(*given, **packed(dtype=torch.int64), return_lse=True)
            grads = torch.autograd.grad((y, lse), given, (torch.ones_like(y), torch.ones_like(lse)))
        assert not y[sum(QUERIES) :].any() and (lse[:, sum(QUERIES) :] == -math.inf).all()
        assert not any(g[-40:].any() for g in grads) and all(g.isfinite().all() for g in grads)


def test_compiled():
    given = [x.detach() for x in tensors(torch.float32, 8)]
    function = torch.compile(partial(cupyops.attention, causal="top_left", **packed()), fullgraph=True)
    torch.testing.assert_close(function(*given), cupyops.attention(*given, causal="top_left", **packed()))


def test_sinks():
    given, sinks = tensors(torch.float64, 4), torch.randn(4, dtype=torch.float64)
    found = cupyops.attention(*given, **packed(), sinks=sinks)
    y, lse = exact(*given, {})
    torch.testing.assert_close(found, y * torch.sigmoid(lse - sinks[:, None]).nan_to_num().T[..., None])


@pytest.mark.parametrize(
    "change, message",
    [
        ({"cu_seqlens_k": None}, r"cu_seqlens_k is None .*expected \(sequences \+ 1,\)"),
        ({"cu_seqlens_q": torch.tensor([0.0, 3.0])}, "cu_seqlens_q is a tensor .*int32 or int64"),
        ({"cu_seqlens_q": torch.tensor([0, 1, 3])}, r"cu_seqlens_q is a tensor .*expected \(2,\), as many sequences"),
        ({"cu_seqlens_q": torch.tensor([0, 4])}, r"cu_seqlens_q\[1\] is 4, expected one of 3 tokens"),
        ({"max_seqlen_k": None}, "max_seqlen_k is None .*expected an int, the rows of the longest"),
        ({"max_seqlen_k": 4}, "the length of sequence 0 by cu_seqlens_k is 5, expected at most max_seqlen_k"),
        ({"query": torch.ones(1, 2, 3, 8)}, r"query is a tensor .*expected \(tokens, heads, head_dim\)"),
    ],
    ids=str,
)
def test_bad_arguments(change, message):
    given = {"query": torch.ones(3, 2, 8), "key": torch.ones(5, 2, 8), "value": torch.ones(5, 2, 8)}
    with pytest.raises(cupyops.InputError, match=message):
        cupyops.attention(**(given | packed((3,), (5,)) | change))


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_on_a_gpu(case, width, dtype):
    given = with_sequence(case)
    if "alibi_slopes" in given.get("more", {}):
        given = given | {"more": given["more"] | {"alibi_slopes": SLOPES.cuda()}}
    for _ in range(5):  # recorded calls too
        compare(dtype, device="cuda", width=width, **(with_sequence(case) | {"more": given.get("more")}))


STARTS = {
    "none at the front": ([2, 6], [2, 6]),
    "none at the end": ([0, 4], [0, 3]),
    "no token at all": ([3, 3], [3, 3]),
    "empty sequences": ([2, 2, 5, 5, 5], [1, 4, 4, 6, 6]),
    "none on both sides": ([1, 3, 5], [2, 2, 5]),
}


@pytest.mark.parametrize("by", ["reference", *slow("kernels")])
@pytest.mark.parametrize("nan", [False, True])
@pytest.mark.parametrize("case", STARTS)
def test_tokens_of_no_sequence(case, nan, by):
    """They see nothing and are seen by none; and NaN stays in its sequence, in the gradients too."""
    torch.manual_seed(0)
    tokens, (at_q, at_k) = 8, STARTS[case]
    given = [torch.randn(tokens, heads, 16, dtype=torch.half) for heads in (2, 1, 1)]
    spoilt = torch.zeros(tokens, dtype=torch.bool), torch.zeros(tokens, dtype=torch.bool)
    if nan:  # in the tokens of none, and in all of the first sequence
        for side, at in zip(spoilt, (at_q, at_k)):
            side[: at[1]], side[at[-1] :] = True, True
        given = [x.masked_fill(spoilt[min(i, 1)][:, None, None], math.nan) for i, x in enumerate(given)]
    given = [x.requires_grad_() for x in given]
    lengths = [int(max(b - a for a, b in itertools.pairwise(at))) for at in (at_q, at_k)]
    with cupyops.simulate() if by == "kernels" else contextlib.nullcontext():
        results = cupyops.attention(
            *given,
            cu_seqlens_q=torch.tensor(at_q),
            cu_seqlens_k=torch.tensor(at_k),
            max_seqlen_q=lengths[0],
            max_seqlen_k=lengths[1] + 3,  # at least
            causal="bottom_right",
            return_lse=True,
        )
        grads = [torch.randn_like(x) for x in results]
        found = torch.autograd.grad(results, given, grads)

    expected = torch.zeros(tokens, 2, 16).double(), torch.full((2, tokens), -math.inf).double()
    wanted = [torch.zeros_like(x, dtype=torch.double) for x in given]
    for (a, b), (c, d) in zip(itertools.pairwise(at_q), itertools.pairwise(at_k)):
        wide = [x.detach().double().requires_grad_() for x in (given[0][a:b], given[1][c:d], given[2][c:d])]
        y, lse = eager(*(x.transpose(0, 1)[None] for x in wide), sees(b - a, d - c, causal="bottom_right"))
        y, lse = y[0].transpose(0, 1), lse[0]
        expected[0][a:b], expected[1][:, a:b] = y.detach(), lse.detach()
        if a < b and c < d:
            parts = torch.autograd.grad((y, lse), wide, (grads[0][a:b].double(), grads[1][:, a:b].double()))
            for x, part, first, end in zip(wanted, parts, (a, c, c), (b, d, d)):
                x[first:end] = part
    for name, ours, true in zip(("y", "lse", "grad_q", "grad_k", "grad_v"), (*results, *found), (*expected, *wanted)):
        clean = ~spoilt[0 if name in ("y", "lse", "grad_q") else 1]
        ours, true = (x[:, clean] if name == "lse" else x[clean] for x in (ours, true))
        torch.testing.assert_close(ours.double(), true.double(), rtol=2e-3, atol=2e-3, msg=lambda why: f"{name}: {why}")
