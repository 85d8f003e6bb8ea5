import math
from dataclasses import replace
from functools import partial

import pytest
import torch
from attentions import CALLS, compare, eager, sees, usual
from contract import Make, OperatorContract, Sample
from selection import slow

import cupyops
from cupyops._dispatch.attention import attention as kernels
from cupyops._dispatch.attention.wgmma import WgmmaForward
from cupyops._dispatch.core.gpu import assume_gpu, gpu
from cupyops.testing import check


def by_torch(
    query,
    key,
    value,
    *,
    causal=None,
    window=None,
    scale=None,
    return_lse=False,
    score=None,
    mask=None,
    softcap=None,
    alibi_slopes=None,
    sinks=None,
    dropout_p=0.0,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    max_seqlen_q=None,
    max_seqlen_k=None,
    **captured,
):
    """As models have it that know no fused attention: scores in memory, softmax in fp32, weights rounded."""
    assert cu_seqlens_q is cu_seqlens_k is max_seqlen_q is max_seqlen_k is None  # which test_attention_packed.py has
    if query.shape[1] and not key.shape[1]:
        raise ValueError("no heads of keys")
    if query.device.type in ("cpu", "cuda") and torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x if x.dtype == torch.float64 else x.to(dtype) for x in (query, key, value))
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        seen = sees(query.shape[2], key.shape[2], causal, window)
        assert score is None and mask is None and not captured  # which test_attention_variants.py has
        change = partial(usual, softcap, alibi_slopes, 0 if causal == "top_left" else key.shape[2] - query.shape[2])
        y, lse = eager(query, key, value, seen, scale, change, sinks)
    return (y, lse) if return_lse else y


class TestAttention(OperatorContract):
    function = staticmethod(cupyops.attention)
    torch_function = staticmethod(by_torch)
    kernels = {"attention_fwd_mma", "attention_bwd_mma", "attention_bwd_prepare"}
    dtypes = [torch.float16, torch.bfloat16]
    differs = {
        ("special_values", "gpu"): "beside a mask NaN of a query may reach the gradients of keys that it does not see",
    }

    def samples(self, make: Make):
        for d in (16, 128):
            yield Sample(make(1, 2, 33, d), make(1, 1, 70, d), make(1, 1, 70, d), return_lse=True)
            yield Sample(
                make(1, 1, 70, d), make(1, 1, 33, d), make(1, 1, 33, d), causal="bottom_right", return_lse=True
            )
            yield Sample(make(2, 1, 35, d), make(2, 1, 40, d), make(2, 1, 40, d), causal="top_left", window=(5, 0))
        # of which TMA reads nothing
        yield Sample(make(1, 2, 5, 8), make(1, 1, 0, 8), make(1, 1, 0, 8), return_lse=True)
        yield Sample(make(1, 2, 20, 8), make(1, 2, 18, 8), make(1, 2, 18, 8), window=(3, 4), scale=0.5, return_lse=True)
        of_kv = make(1, 1, 33, 16), make(1, 1, 33, 16)
        yield Sample(make(1, 2, 40, 16), *of_kv, causal="bottom_right", sinks=make(2), return_lse=True)

    def small_samples(self, make: Make):  # not so small that of a few elements one is badly rounded by chance
        yield Sample(make(1, 2, 17, 8), make(1, 1, 19, 8), make(1, 1, 19, 8), causal="bottom_right")
        yield Sample(make(2, 2, 4, 8), make(2, 2, 3, 8), make(2, 2, 3, 8), window=(1, 0), return_lse=True)
        yield Sample(make(2, 2, 5, 8), make(2, 1, 6, 8), make(2, 1, 6, 8), sinks=make(2), return_lse=True)
        # of few scores, however often it is repeated
        yield Sample(make(1, 1, 16, 64), make(1, 1, 2, 64), make(1, 1, 2, 64))


FORMS = ["forward:mma backward:mma_64", "forward:mma backward:mma_32", "forward:wgmma backward:wgmma"]
FORMS += ["forward:mma backward:mma_once", "forward:wgmma backward:wgmma_once"]
HALF = [torch.float16, torch.bfloat16]


@pytest.fixture(params=FORMS)
def forms(request):
    """Each engine, on the CPU in the simulator."""
    asked = tuple(request.param.split())
    with cupyops.simulate("sm_90" if "wgmma" in request.param else "sm_80"):
        yield asked


@pytest.mark.parametrize("causal", [*slow(None), "bottom_right"])
def test_low_scores(forms, causal):
    """S % 128 == 64, a mask, and log-sum-exps below -88.7, where exp(-lse) would be no finite number."""
    q, k, v = (torch.randn(1, 1, 64, 128) for _ in range(3))
    q, k = q.abs() * 2, -k.abs() * 2 - 1  # every score is low
    given = tuple(x.half() for x in (q, k, v))
    results = compare((1, 1, 1, 64, 64, 128), torch.float16, forms=forms, inputs=given, scale=0.35, causal=causal)
    assert results[1].max() < -88.7 and all(x.isfinite().all() for x in results)


@pytest.mark.parametrize("causal", [*slow("top_left"), "bottom_right"])
@pytest.mark.parametrize("rows", [(130, 5), (5, 130), (70, 66)], ids=str)
def test_diagonals(forms, rows, causal):
    """More queries than keys, of which some see none; more keys than queries."""
    results = compare((1, 1, 1, *rows, 128), torch.bfloat16, forms=forms, causal=causal)
    none = rows[0] - rows[1] if causal == "bottom_right" else 0
    y, lse, grad_q = results[:3]
    for i in range(max(0, none)):
        assert not y[:, :, i].any() and not grad_q[:, :, i].any() and (lse[:, :, i] == -math.inf).all()


@pytest.mark.parametrize("window", [(300, 0), (None, 3), (5, None), *slow((0, 0), (40, 0))], ids=str)
def test_windows(forms, window):
    """Narrower than a panel, as wide as all, of one side; some queries see none on the other diagonal."""
    compare((1, 1, 1, 150, 100, 128), torch.float16, forms=forms, window=window)
    compare((1, 1, 1, 40, 150, 128), torch.float16, forms=forms, window=window, causal="top_left")


@pytest.mark.parametrize("widths", [(40, 96), (64, 8), *slow((128, 64), (16, 40))], ids=str)
def test_values_of_another_width(forms, widths):
    if max(widths) > 64 or "backward:mma_32" not in forms:  # a form for wide rows
        results = compare((1, 2, 1, 70, 45, *widths), torch.float16, forms=forms, causal="bottom_right")
        assert results[0].shape == (1, 2, 70, widths[1]) and results[0].transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("widths", [(192, 128), *slow((256, 256), (8, 136))], ids=str)
def test_wide_rows(widths, arch):
    """By mma.sync in as much shared memory as every card has, or by wgmma: MLA's widths, with a window, and packed."""
    shared = 101376 if arch == "sm_80" else 232448
    with cupyops.simulate(arch), assume_gpu(shared=shared), cupyops.trace() as trace:
        results = compare((1, 2, 1, 70, 45, *widths), torch.bfloat16, causal="bottom_right", window=(30, 0))
        q, k, v = (torch.randn(n, 2, width).half() for n, width in ((40, widths[0]), (30, widths[0]), (30, widths[1])))
        starts = torch.tensor([0, 13, 30]).int()
        y = cupyops.attention(
            q, k, v, cu_seqlens_q=starts, cu_seqlens_k=starts, max_seqlen_q=17, max_seqlen_k=17, score="s * 2"
        )
    assert trace.routes() == {"simulator"} and results[0].shape == (1, 2, 70, widths[1])
    parts = [[x[a:b].transpose(0, 1)[None].double() for x in (q, k, v)] for a, b in ((0, 13), (13, 30))]
    exact = [
        eager(*part, sees(*[part[0].shape[2]] * 2), change=lambda s: s * 2)[0][0].transpose(0, 1) for part in parts
    ]
    torch.testing.assert_close(y[:30].double(), torch.cat(exact), rtol=4e-3, atol=4e-3)


def test_what_nobody_sees(forms):
    """Keys to the right of every query have no gradient; a window may leave out whole tiles of keys."""
    results = compare((1, 1, 1, 10, 300, 128), torch.float16, forms=forms, causal="top_left", window=(2, 0))
    assert not results[3][:, :, 10:].any() and not results[4][:, :, 10:].any()


def test_without_the_gradient_of_lse(forms):
    compare((2, 2, 2, 33, 40, 128), torch.bfloat16, forms=forms, lse_grad=False)


def test_the_gradient_of_lse_alone():
    given = [torch.randn(1, 2, 40, 64).half().requires_grad_() for _ in range(3)]
    with cupyops.simulate():
        _, lse = cupyops.attention(*given, causal="top_left", return_lse=True)
        grads = torch.autograd.grad(lse.sin().sum(), given)
    wide = [x.detach().double().requires_grad_() for x in given]
    exact = torch.autograd.grad(eager(*wide, sees(40, 40, "top_left"))[1].sin().sum(), wide[:2])
    for ours, right in zip(grads, exact):
        assert (ours.double() - right).abs().max() <= 2e-3 * right.abs().max()
    assert not grads[2].any()


def test_no_rows():
    with cupyops.simulate("sm_90"):
        for queries, keys in ((0, 5), (5, 0), (0, 0)):
            q, k = (
                torch.randn(1, 2, queries, 8).half().requires_grad_(),
                torch.randn(1, 1, keys, 8).half().requires_grad_(),
            )
            y, lse = cupyops.attention(q, k, k, return_lse=True)
            grads = torch.autograd.grad(y.sum(), (q, k))
            assert not y.any() and (lse == -math.inf).all() and not any(g.any() for g in grads)
            assert (y.shape, lse.shape) == (q.shape, q.shape[:3])


def test_layouts_without_copies():
    """Heads of a packed projection, transposed heads, keys shared by all of a batch: what is read lies where it was."""
    packed = torch.randn(2, 33, 3, 2, 64).half()
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    shared = k[:1].expand(2, -1, -1, -1)
    for given in ((q, k, v), (q.contiguous(), k, v), (q, shared, v), (q[..., 8:], k[..., 8:], v[..., 8:])):
        with cupyops.simulate("sm_90"), assume_gpu(shared=232448), cupyops.trace() as trace:
            y = cupyops.attention(*given)
        exact = eager(*(x.double() for x in given), sees(33, 33))[0]
        torch.testing.assert_close(y.double(), exact, rtol=2e-3, atol=2e-3)
        name = "attention_fwd_mma" if given[1] is shared else "attention_fwd_wgmma"  # TMA reads nothing expanded
        assert [record.kernel.partition("<")[0] for record in trace.launches()] == [name]
        assert y.stride() == torch.empty_like(given[0]).stride()


def test_the_same_bits():
    """Whatever the order of blocks: two passes have no atomics."""
    found = []
    for seed in (1, 2):
        with cupyops.simulate("sm_90", seed=seed), torch.random.fork_rng():
            found.append(compare((1, 4, 2, 150, 140, 64), torch.float16, causal="top_left"))
    assert all(torch.equal(a, b) for a, b in zip(*found))


def test_each_call_counts_its_own_tiles():
    """Blocks draw tiles that differ in length from a counter, zero at each call, recorded ones too; others need none."""
    q, k, v = (torch.randn(1, 2, 300, 128).half() for _ in range(3))
    with cupyops.simulate("sm_90"), assume_gpu(shared=232448, multiprocessors=2):
        found = [cupyops.attention(q, k, v, causal="top_left") for _ in range(2)]
    problem = kernels.problem(q, k, v, q, None, 0)
    form = WgmmaForward()
    draws = [form.launch(problem, replace(gpu(q.device), multiprocessors=count)).extra.draws for count in (2, 132)]
    full = form.launch(problem._replace(high=None), replace(gpu(q.device), multiprocessors=2)).extra.draws
    assert torch.equal(*found) and draws == [True, False] and not full


def test_recorded_calls():
    """The fourth call replays what the first did, in a memory that is another."""
    with cupyops.simulate("sm_90"):
        for i in range(5):
            given = [torch.randn(1, 2, 40, 64).half().requires_grad_() for _ in range(3)]
            y = cupyops.attention(*given, causal="top_left")
            grads = torch.autograd.grad(y.sum(), given)
            wide = [x.detach().double().requires_grad_() for x in given]
            exact = eager(*wide, sees(40, 40, "top_left"))[0]
            for ours, right in zip((y, *grads), (exact, *torch.autograd.grad(exact.sum(), wide))):
                torch.testing.assert_close(
                    ours.double(), right, rtol=4e-3, atol=4e-3, msg=lambda text, i=i: f"{i}: {text}"
                )


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"causal": "bottom_right"}, {"window": (3, 2), "return_lse": True}], ids=str)
def test_hazards_of_the_kernels(options):
    """Those of the contract are of float32, which the kernels do not serve."""
    make = Make("cpu", torch.float16)
    given = make(1, 2, 17, 8), make(1, 1, 19, 8), make(1, 1, 19, 8)
    # beside a mask NaN of a query may reach the gradients of keys that it does not see
    left_out = {"skip": "special_values"} if options else {}
    report = check(
        cupyops.attention, given, options, reference=by_torch, backends="simulator", shrink=False, **left_out
    )
    # of scores that leave one key alone dP - delta is a difference of equal sums in another order, times what is huge
    unknown = [row for row in report.failures if (row.hazard, row.reason[:5]) != ("special_values", "huge ")]
    assert not unknown, f"\n{report}"


@pytest.mark.parametrize(
    "change, message",
    [
        (
            dict(query=torch.ones(2, 3, 8)),
            r"query is a tensor of shape \(2, 3, 8\).*expected \(batch, heads, queries, head_dim\)",
        ),
        (
            dict(key=torch.ones(1, 2, 5, 4)),
            r"key is a tensor of shape \(1, 2, 5, 4\).*expected \(1, kv_heads, keys, 8\)",
        ),
        (dict(value=torch.ones(1, 2, 4, 8)), r"value is a tensor .*expected \(1, 2, 5\) and head_dim, as key has it"),
        (
            dict(key=torch.ones(1, 3, 5, 8), value=torch.ones(1, 3, 5, 8)),
            "key has 3 heads, expected a divisor of the 4 of query",
        ),
        (dict(key=torch.ones(1, 2, 5, 8).double()), "key is torch.float64, but query is torch.float32"),
        (dict(query=torch.ones(1, 4, 5, 8).int()), "query is a tensor .*expected a tensor of a floating-point dtype"),
        (dict(causal=True), "causal is True .*expected one of None, 'top_left', 'bottom_right'"),
        (dict(window=3), r"window is 3 .*expected \(left, right\), each an int of at least 0 or None"),
        (dict(window=(-1, 0)), r"window is \(-1, 0\)"),
        (dict(scale="1"), "scale is '1' .*expected a number"),
    ],
    ids=str,
)
def test_bad_arguments(change, message):
    given = dict(query=torch.ones(1, 4, 5, 8), key=torch.ones(1, 2, 5, 8), value=torch.ones(1, 2, 5, 8))
    with pytest.raises(cupyops.InputError, match=message):
        cupyops.attention(**(given | change))


@pytest.mark.parametrize(
    "given, reason",
    [
        (lambda: (torch.ones(1, 1, 4, 12).half(),) * 3, "head_dim 12 is no multiple of 8 up to 256"),
        (lambda: (torch.ones(1, 1, 4, 264).half(),) * 3, "head_dim 264 is no multiple"),
        (lambda: (torch.ones(1, 1, 4, 8),) * 3, "no kernel for torch.float32"),
    ],
)
def test_what_kernels_do_not_serve(given, reason):
    with cupyops.simulate(), cupyops.trace() as trace:
        cupyops.attention(*given())
    (record,) = trace.records
    assert record.route == "reference" and reason in record.note


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("engine", CALLS)
def test_forms_on_a_gpu(engine, dtype):
    if engine.startswith("wgmma") and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wgmma is of compute capability 9.0")
    for call in CALLS[engine]:
        call(dtype, "cuda")


@pytest.mark.gpu
def test_streams_and_graphs_share_no_counter():
    """Tiles that differ in length, on two streams at once, and in a graph that is replayed beside them: the same bits."""
    q, k, v = (torch.randn(2, 16, 4096, 128, device="cuda").half() for _ in range(3))
    expected = cupyops.attention(q, k, v, causal="top_left")
    streams = [torch.cuda.Stream() for _ in range(2)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = cupyops.attention(q, k, v, causal="top_left")
    torch.cuda.synchronize()
    found = []
    for _ in range(10):
        graph.replay()
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(cupyops.attention(q, k, v, causal="top_left"))
    torch.cuda.synchronize()
    assert torch.equal(captured, expected) and all(torch.equal(one, expected) for one in found)


@pytest.mark.gpu
@pytest.mark.parametrize("widths", [(128, 64), (40, 96), (64, 8), (192, 128), (256, 256)], ids=str)
def test_values_of_another_width_on_a_gpu(widths):
    compare((1, 2, 1, 270, 145, *widths), torch.bfloat16, "cuda", causal="bottom_right")


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("causal", [None, "bottom_right"])
def test_long_sequences(width, causal):
    """Many tiles and panels of each block, beside PyTorch in float64."""
    given = [torch.randn(1, heads, 2088, width, device="cuda").half().requires_grad_() for heads in (8, 2, 2)]
    wide = [x.detach().double().requires_grad_() for x in given]
    results = cupyops.attention(*given, causal=causal, return_lse=True)
    exact = eager(*wide, sees(2088, 2088, causal))
    results, exact = (
        (y, lse, *torch.autograd.grad(y.sin().sum() + lse.sum(), tensors))
        for (y, lse), tensors in ((results, given), (exact, wide))
    )
    for ours, right in zip(results, exact, strict=True):
        assert (ours.double() - right).abs().max() <= 4e-3 * right.abs().max()


def test_the_order_of_tiles_does_not_matter():
    """Which heads are worked on side by side depends on the L2 cache alone; results are the same bits."""
    torch.manual_seed(0)
    given = [torch.randn(2, heads, 150, 16).half().requires_grad_() for heads in (6, 2, 2)]
    grad, found = torch.randn(2, 6, 150, 16).half(), []
    for l2 in (1, 4 * 2 * 150 * 64, 4 * 7 * 150 * 64, 32 << 20):
        with cupyops.simulate("sm_80"), assume_gpu(l2=l2):
            y = cupyops.attention(*given, causal="top_left")
            found.append((y, *torch.autograd.grad(y, given, grad)))
    wide = [x.detach().double().requires_grad_() for x in given]
    right = torch.nn.functional.scaled_dot_product_attention(*wide, is_causal=True, enable_gqa=True)
    expected = right, *torch.autograd.grad(right, wide, grad.double())
    for one in found:
        for a, b, c in zip(one, found[0], expected):
            assert torch.equal(a, b)
            torch.testing.assert_close(a.double(), c, rtol=1e-2, atol=1e-2)
