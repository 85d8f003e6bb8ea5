"""attention's backward in one pass by mma.sync: where it is taken, which order it keeps, how exact it is."""

import math

import pytest
import torch
from attentions import A100, HOPPER, SMALLER, compare, eager, sees
from selection import slow

import cupyops
from cupyops._dispatch import attention as kernels
from cupyops._dispatch import attention_once_mma
from cupyops._dispatch import gpu as cards
from cupyops._dispatch.attentions import BACKWARD
from cupyops._dispatch.gpu import assume_gpu, gpu

FORM = next(form for form in BACKWARD.list if form.name == "mma_once")
ONCE = ("forward:mma", "backward:mma_once")


def launched(call):
    with cupyops.trace() as trace:
        call()
    return {record.kernel.partition("<")[0] for record in trace.launches()}


@pytest.fixture
def always(monkeypatch):
    """It counts as faster at any size, on a card that has no WGMMA."""
    monkeypatch.setattr(attention_once_mma, "FASTER", 1)
    monkeypatch.setattr(cards, "_assumed", {**A100, "capability": 8})  # assume_gpu would have calls made in full
    for cached in (BACKWARD._chosen, BACKWARD._launches):
        cached.cache_clear()
    with cupyops.simulate("sm_80"):
        yield
    for cached in (BACKWARD._chosen, BACKWARD._launches):
        cached.cache_clear()


def gradients(given, of=(0, 1, 2), **options):
    y = cupyops.attention(*given, **options)
    return torch.autograd.grad(y.sin().sum(), [given[i] for i in of])


def test_deterministic_algorithms(always):
    """Recorded calls of one mode are not replayed in the other; under deterministic algorithms there are two passes."""
    given = [torch.randn(1, 2, 40, 64).half().requires_grad_() for _ in range(3)]
    before = torch.get_deterministic_debug_mode()
    for _ in range(2):
        for mode, expected, other in (
            (False, {"attention_bwd_once_mma", "attention_bwd_collect"}, "attention_bwd_mma"),
            (True, {"attention_bwd_mma"}, "attention_bwd_collect"),
        ):
            torch.use_deterministic_algorithms(mode)
            try:
                for _ in range(4):
                    names = launched(lambda: gradients(given))
                    assert expected <= names and other not in names
            finally:
                torch.set_deterministic_debug_mode(before)


def test_recorded_calls(always):
    """The sums are zero again at each call, those that are replayed too."""
    for _ in range(5):
        given = [torch.randn(1, heads, 70, 64).half().requires_grad_() for heads in (2, 1, 1)]
        wide = [x.detach().double().requires_grad_() for x in given]
        exact = eager(*wide, sees(70, 70, "top_left"))[0]
        right = torch.autograd.grad(exact.sin().sum(), wide)
        for ours, true in zip(gradients(given, causal="top_left"), right, strict=True):
            assert (ours.double() - true).abs().max() <= 4e-3 * true.abs().max()


@pytest.mark.parametrize("of", [(0,), (1, 2)], ids=str)
def test_some_gradients(always, of):
    """Two passes leave out what is not needed; asked for, one pass gives the same."""
    given = [torch.randn(1, 1, 40, 64).half() for _ in range(3)]
    for i in of:
        given[i].requires_grad_()
    assert "attention_bwd_once_mma" not in launched(lambda: gradients(given, of))
    two = gradients(given, of)
    with cupyops.use_form("attention.backward:mma_once"):
        once = gradients(given, of)
    for a, b in zip(once, two, strict=True):
        assert (a - b).abs().max() <= 4e-3 * b.abs().max()


@pytest.mark.parametrize(
    ("card", "capability", "width", "expected"),
    [
        (HOPPER, 9, 64, (128, 128, 198656)), (HOPPER, 9, 96, (128, 64, 148480)), (HOPPER, 9, 128, (128, 64, 181248)),
        (HOPPER, 9, 256, (64, 64, 222208)), (A100, 8, 64, (128, 64, 115712)), (A100, 8, 96, (128, 64, 148480)),
        (A100, 8, 128, (128, 32, 123392)), (A100, 8, 256, (64, 32, 143872)), (SMALLER, 8, 64, (128, 32, 74240)),
        (SMALLER, 12, 64, (128, 32, 74240)), (SMALLER, 8, 96, None), (SMALLER, 12, 128, None),
    ],
    ids=str,
)  # fmt: skip
def test_shapes(card, capability, width, expected):
    """What a card has the shared memory for; where it has too little, there are two passes."""
    q = torch.empty(1, 2, 1024, width, dtype=torch.float16, device="meta")
    with assume_gpu(**card, capability=capability), cupyops.simulate("sm_80"):
        on = gpu(torch.device("cpu"))
        problem = kernels.with_gradients(kernels.problem(q, q, q, q, None, 0), q, q, q)
        if expected is None:
            assert "shared memory" in FORM.why_not(problem, on)
            return
        assert FORM.why_not(problem, on) is None and FORM.why_slower(problem, on) is None
        launch = FORM.launch(problem, on)
    tile, panel, shared = expected
    assert (launch.grid, launch.shared) == (2 * 1024 // tile, shared)
    assert (launch.template["BN"], launch.extra["blocks"].rows) == (panel, tile)


def test_where_it_is_taken():
    """From 512 rows on, on either side, or 1,024; never of packed sequences, nor where an order is asked for."""
    q = torch.empty(1, 2, 1024, 64, dtype=torch.float16, device="meta")
    with assume_gpu(**HOPPER, capability=8), cupyops.simulate("sm_80"):
        on = gpu(torch.device("cpu"))
        causal, window = (None, 0), (-9, 0)
        for rows, bounds, expected in (
            (512, causal, True),
            (511, causal, False),
            (1024, window, True),
            (1023, window, False),
        ):
            for x, y in ((q[:, :, :rows], q), (q, q[:, :, :rows])):
                problem = kernels.problem(x, y, y, x, *bounds)
                assert (FORM.why_slower(problem, on) is None) is expected
        problem = kernels.problem(q, q, q, q, None, 0)
        assert FORM.why_slower(problem._replace(in_order="why"), on) == "why"
        assert "packed" in FORM.why_not(kernels.packed(problem, 2, 600, 600, None, 0), on)


def test_scores_of_ones_own(always):
    """Of a score or dropout one pass is as fast on Hopper alone: here there are two."""
    given = [torch.randn(1, 1, 40, 64).half().requires_grad_() for _ in range(3)]
    for options in ({"softcap": 20.0}, {"dropout_p": 0.1}):
        names = launched(lambda options=options: gradients(given, **options))
        assert "attention_bwd_mma_variant" in names and "attention_bwd_collect" not in names


@pytest.mark.parametrize("width", [64, *slow(128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("arch", "on"), [("sm_90", HOPPER), ("sm_80", A100)])
def test_as_exact_as_two_passes(width, dtype, arch, on):
    """P goes from warp to warp in fp32: rounded to fp16 it took a quarter more of error."""
    given = [torch.randn(1, 2, 200, width).to(dtype).requires_grad_() for _ in range(3)]
    wide, grad_y = [x.detach().double().requires_grad_() for x in given], torch.randn(1, 2, 200, width).to(dtype)
    right = torch.autograd.grad(eager(*wide, sees(200, 200))[0], wide, grad_y.double())
    errors = []
    with cupyops.simulate(arch), assume_gpu(**on):
        for form in ("mma_once", "mma_64"):
            with cupyops.use_form("attention.forward:mma", f"attention.backward:{form}"):
                found = torch.autograd.grad(cupyops.attention(*given), given, grad_y)
            errors.append([((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, right, strict=True)])
    assert all(once <= 1.02 * two for once, two in zip(*errors, strict=True)), errors


@pytest.mark.parametrize(("arch", "on"), [("sm_90", HOPPER), ("sm_80", A100)])
def test_keys_that_there_are_none_of(arch, on):
    """A tile of keys whose rest has a score of 0, far above the log-sum-exp of each row: weights would be infinite."""
    q, k, v = torch.full((1, 1, 70, 64), 3.0), torch.full((1, 1, 70, 64), -3.0), torch.randn(1, 1, 70, 64)
    given = (q + torch.rand_like(q) / 8).half(), (k + torch.rand_like(k) / 8).half(), v.half()
    with cupyops.simulate(arch):
        results = compare((1, 1, 1, 70, 70, 64), torch.float16, forms=ONCE, inputs=given, scale=0.35, on=on)
    assert results[1].max() < -128 * math.log(2) and all(x.isfinite().all() for x in results)


def test_any_order():
    """Whatever the order of blocks, keys' gradients have the same bits, and the queries' are as near."""
    found = []
    for seed in (1, 2):
        with cupyops.simulate("sm_80", seed=seed), torch.random.fork_rng():
            found.append(compare((1, 2, 1, 130, 300, 64), torch.float16, forms=ONCE, causal="bottom_right", on=A100))
    assert all(torch.equal(found[0][i], found[1][i]) for i in (0, 1, 3, 4))


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("causal", [None, "bottom_right"])
def test_long_sequences(width, causal):
    """Many tiles that add to the same rows, beside PyTorch in float64."""
    given = [torch.randn(1, heads, 2088, width, device="cuda").half().requires_grad_() for heads in (8, 2, 2)]
    wide = [x.detach().double().requires_grad_() for x in given]
    with cupyops.use_form("attention.forward:mma", "attention.backward:mma_once"):
        found = gradients(given, causal=causal)
    exact = eager(*wide, sees(2088, 2088, causal))[0]
    for ours, right in zip(found, torch.autograd.grad(exact.sin().sum(), wide), strict=True):
        assert (ours.double() - right).abs().max() <= 4e-3 * right.abs().max()
