"""attention's backward in one pass, by WGMMA and by mma.sync: where it is taken, how exact it is, which order it keeps."""

import math

import pytest
import torch
from attentions import A100, HOPPER, SMALLER, compare, eager, sees
from selection import slow

import cupyops
from cupyops._dispatch.attention import attention as kernels
from cupyops._dispatch.attention import launches, once, once_mma
from cupyops._dispatch.core import gpu as cards

ONCE = ("forward:wgmma", "backward:wgmma_once")
ONCE_MMA = ("forward:mma", "backward:mma_once")
FORM = next(form for form in launches.BACKWARD.list if form.name == "mma_once")


@pytest.fixture(params=["wgmma", "mma"])
def always(request, monkeypatch):
    """It counts as faster at any size, on a card that has WGMMA or on one that has not."""
    engine = request.param
    if engine == "wgmma":
        monkeypatch.setattr(once, "FASTER", dict.fromkeys(once.FASTER, (1, 1, 1)))
    else:
        monkeypatch.setattr(once_mma, "FASTER", 1)
    # assume_gpu would have calls made in full
    monkeypatch.setattr(cards, "_assumed", HOPPER if engine == "wgmma" else {**A100, "capability": 8})
    for cached in (launches.BACKWARD._chosen, launches.BACKWARD._launches):
        cached.cache_clear()
    torch.use_deterministic_algorithms(False)
    with cupyops.simulate("sm_90" if engine == "wgmma" else "sm_80"):
        yield engine
    for cached in (launches.BACKWARD._chosen, launches.BACKWARD._launches):
        cached.cache_clear()


of_wgmma = pytest.mark.parametrize("always", ["wgmma"], indirect=True)
of_mma = pytest.mark.parametrize("always", ["mma"], indirect=True)


def launched(call):
    with cupyops.trace() as trace:
        call()
    return {record.kernel.partition("<")[0] for record in trace.launches()}


def gradients(given, of=(0, 1, 2), **options):
    y = cupyops.attention(*given, **options)
    return torch.autograd.grad(y.sin().sum(), [given[i] for i in of])


def test_deterministic_algorithms(always):
    """Recorded calls of one mode are not replayed in the other; under deterministic algorithms there are two passes."""
    given = [torch.randn(1, 2, 40, 64).half().requires_grad_() for _ in range(3)]
    for _ in range(2):
        for _ in range(4):
            names = launched(lambda: gradients(given))
            assert {f"attention_bwd_once_{always}", "attention_bwd_collect"} <= names
            assert f"attention_bwd_{always}" not in names
        before = torch.get_deterministic_debug_mode()
        torch.use_deterministic_algorithms(True)
        try:
            for _ in range(4):
                names = launched(lambda: gradients(given))
                assert f"attention_bwd_{always}" in names and not {n for n in names if "once" in n or "collect" in n}
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


@pytest.mark.parametrize("of", [(0,), (1, 2), (2,)], ids=str)
def test_some_gradients(always, of):
    """Two passes leave out what is not needed; asked for, one pass gives the same."""
    given = [torch.randn(1, 1, 40, 64).half() for _ in range(3)]
    for i in of:
        given[i].requires_grad_()
    assert f"attention_bwd_once_{always}" not in launched(lambda: gradients(given, of))
    two = gradients(given, of)
    with cupyops.use_form(f"attention.backward:{always}_once"):
        once = gradients(given, of)
    for a, b in zip(once, two, strict=True):
        assert (a - b).abs().max() <= 4e-3 * b.abs().max()


def test_where_it_is_taken(monkeypatch):
    """From as many rows on as the table says, on either side."""
    monkeypatch.setattr(once, "FASTER", {64: (math.inf, 1024, math.inf)})
    q = torch.empty(1, 2, 1024, 64, dtype=torch.float16, device="meta")
    with cards.assume_gpu(**HOPPER, capability=9), cupyops.simulate("sm_90"):
        card = cards.gpu(torch.device("cpu"))
        form = launches.BACKWARD.list[0]
        for queries, high, expected in ((1024, 0, True), (1023, 0, False), (1024, None, False)):
            x = q[:, :, :queries]
            problem = kernels.problem(x, q, q, x, None, high)
            assert (form.why_not(problem, card) or form.why_slower(problem, card) is None) is expected
        assert form.why_slower(kernels.problem(q, q, q, q, None, 0)._replace(in_order="why"), card) == "why"


@pytest.mark.parametrize(
    ("widths", "rows", "bounds", "expected"),
    [
        ((192, 128), 2048, (None, 0), False),  # two passes are as fast, and have an order
        ((192, 128), 4096, (None, 0), True),
        ((192, 128), 4096, (-1000, 0), False),
        ((256, 256), 512, (None, None), True),
        ((256, 256), 512, (None, 0), False),
        ((96, 96), 2048, (-1000, 0), True),
    ],
    ids=str,
)
def test_where_wide_rows_take_it(widths, rows, bounds, expected):
    """By bounds, though kernels of wide rows have one form of them; blocks share a group where rows are wide."""
    q, v = (torch.empty(1, 4, rows, width, dtype=torch.float16, device="meta") for width in widths)
    form = launches.BACKWARD.list[0]
    with cards.assume_gpu(**HOPPER, capability=9), cupyops.simulate("sm_90"):
        card = cards.gpu(torch.device("cpu"))
        problem = kernels.with_gradients(kernels.problem(q, q[:, :1], v[:, :1], v, *bounds), q, q[:, :1], v[:, :1])
        assert form.why_not(problem, card) is None and (form.why_slower(problem, card) is None) is expected
        launch = form.launch(problem, card)
    share = 4 if widths == (96, 96) else 2
    assert launch.extra.share == share and launch.template["BOUNDS"] == 2
    assert launch.grid == -(-rows // launch.template["TILE"]) * 4 // share


@of_wgmma
@pytest.mark.parametrize("width", [*slow(64), 128])
@pytest.mark.parametrize("options", [{"dropout_p": 0.2}, {"softcap": 20.0}], ids=str)
def test_variants(always, monkeypatch, width, options):
    """Of scores and dropout it is taken where it was measured, and gives what two passes give."""
    monkeypatch.setattr(launches, "VARIANT_FASTER", {64: 1, 128: 1})
    given = [torch.randn(1, 1, 140, width).half().requires_grad_() for _ in range(3)]
    y = cupyops.attention(*given, causal="top_left", **options)
    found, names = [], []
    for deterministic in (False, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            names.append(launched(lambda: found.append(torch.autograd.grad(y.sin().sum(), given, retain_graph=True))))
        finally:
            torch.use_deterministic_algorithms(False)
    assert ["attention_bwd_collect" in some for some in names] == [True, False]
    for a, b in zip(*found, strict=True):
        assert (a - b).abs().max() <= 4e-3 * b.abs().max()


@pytest.mark.parametrize(("width", "share"), [(64, 1), (128, 2), (192, 1), (256, 2)])
def test_blocks_that_share_a_group(monkeypatch, width, share):
    """A group of heads shared by blocks: their sums are added up in memory, and a tile that ends early adds nothing."""
    monkeypatch.setattr(once, "_share", lambda problem, shape: share)
    shape = (2, 4, 1, 70, 150, width, *((128,) if width == 192 else ()))
    with cupyops.simulate("sm_90"), cupyops.trace() as trace:
        compare(shape, torch.bfloat16, forms=ONCE, causal="bottom_right")
    assert [record.kernel.startswith("attention_bwd_collect") for record in trace.launches()].count(True) == 3


@of_wgmma
@pytest.mark.parametrize("width", [64, *slow(128)])
@pytest.mark.parametrize("dtype", [*slow(torch.float16), torch.bfloat16])
def test_as_exact_as_two_passes(always, width, dtype):
    """dS is rounded once, whichever way it goes: errors against float64 are those of two passes."""
    given = [torch.randn(1, 2, 200, width).to(dtype).requires_grad_() for _ in range(3)]
    wide, grad_y = [x.detach().double().requires_grad_() for x in given], torch.randn(1, 2, 200, width).to(dtype)
    right = torch.autograd.grad(eager(*wide, sees(200, 200))[0], wide, grad_y.double())
    errors = []
    for form in ("wgmma_once", "wgmma"):
        with cupyops.use_form(f"attention.backward:{form}"):
            found = torch.autograd.grad(cupyops.attention(*given), given, grad_y)
        errors.append([((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, right, strict=True)])
    assert all(once <= 1.02 * two for once, two in zip(*errors, strict=True)), errors


@pytest.mark.parametrize("width", [64, *slow(128, 192), 256])
def test_keys_that_there_are_none_of(width):
    """A tile of keys whose rest has a score of 0, far above the log-sum-exp of each row: weights would be infinite."""
    values = 128 if width == 192 else width
    q, k, v = torch.full((1, 1, 70, width), 3.0), torch.full((1, 1, 70, width), -3.0), torch.randn(1, 1, 70, values)
    given = (q + torch.rand_like(q) / 8).half(), (k + torch.rand_like(k) / 8).half(), v.half()
    with cupyops.simulate("sm_90"):
        results = compare((1, 1, 1, 70, 70, width), torch.float16, forms=ONCE, inputs=given, scale=0.35)
    assert results[1].max() < -128 * math.log(2) and all(x.isfinite().all() for x in results)


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
def test_shapes_by_mma(card, capability, width, expected):
    """What a card has the shared memory for; where it has too little, there are two passes."""
    q = torch.empty(1, 2, 1024, width, dtype=torch.float16, device="meta")
    with cards.assume_gpu(**card, capability=capability), cupyops.simulate("sm_80"):
        on = cards.gpu(torch.device("cpu"))
        problem = kernels.with_gradients(kernels.problem(q, q, q, q, None, 0), q, q, q)
        if expected is None:
            assert "shared memory" in FORM.why_not(problem, on)
            return
        assert FORM.why_not(problem, on) is None and FORM.why_slower(problem, on) is None
        launch = FORM.launch(problem, on)
    tile, panel, shared = expected
    assert (launch.grid, launch.shared) == (2 * 1024 // tile, shared)
    assert (launch.template["BN"], launch.extra.blocks.rows) == (panel, tile)


def test_where_it_is_taken_by_mma():
    """From 512 rows on, on either side, or 1,024; never of packed sequences, nor where an order is asked for."""
    q = torch.empty(1, 2, 1024, 64, dtype=torch.float16, device="meta")
    with cards.assume_gpu(**HOPPER, capability=8), cupyops.simulate("sm_80"):
        on = cards.gpu(torch.device("cpu"))
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


@of_mma
def test_scores_of_ones_own(always):
    """Of a score or dropout one pass is as fast on Hopper alone: here there are two."""
    given = [torch.randn(1, 1, 40, 64).half().requires_grad_() for _ in range(3)]
    for options in ({"softcap": 20.0}, {"dropout_p": 0.1}):
        names = launched(lambda options=options: gradients(given, **options))
        assert "attention_bwd_mma_variant" in names and "attention_bwd_collect" not in names


@pytest.mark.parametrize("width", [64, *slow(128)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("arch", "on"), [("sm_90", HOPPER), ("sm_80", A100)])
def test_as_exact_as_two_passes_by_mma(width, dtype, arch, on):
    """P goes from warp to warp in fp32: rounded to fp16 it took a quarter more of error."""
    given = [torch.randn(1, 2, 200, width).to(dtype).requires_grad_() for _ in range(3)]
    wide, grad_y = [x.detach().double().requires_grad_() for x in given], torch.randn(1, 2, 200, width).to(dtype)
    right = torch.autograd.grad(eager(*wide, sees(200, 200))[0], wide, grad_y.double())
    errors = []
    with cupyops.simulate(arch), cards.assume_gpu(**on):
        for form in ("mma_once", "mma_64"):
            with cupyops.use_form("attention.forward:mma", f"attention.backward:{form}"):
                found = torch.autograd.grad(cupyops.attention(*given), given, grad_y)
            errors.append([((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, right, strict=True)])
    assert all(once <= 1.02 * two for once, two in zip(*errors, strict=True)), errors


@pytest.mark.parametrize(("arch", "on"), [("sm_90", HOPPER), ("sm_80", A100)])
def test_keys_that_there_are_none_of_by_mma(arch, on):
    """A tile of keys whose rest has a score of 0, far above the log-sum-exp of each row: weights would be infinite."""
    q, k, v = torch.full((1, 1, 70, 64), 3.0), torch.full((1, 1, 70, 64), -3.0), torch.randn(1, 1, 70, 64)
    given = (q + torch.rand_like(q) / 8).half(), (k + torch.rand_like(k) / 8).half(), v.half()
    with cupyops.simulate(arch):
        results = compare((1, 1, 1, 70, 70, 64), torch.float16, forms=ONCE_MMA, inputs=given, scale=0.35, on=on)
    assert results[1].max() < -128 * math.log(2) and all(x.isfinite().all() for x in results)


@pytest.mark.parametrize(("arch", "forms", "on"), [("sm_90", ONCE, None), ("sm_80", ONCE_MMA, A100)], ids=str)
def test_any_order(arch, forms, on):
    """Whatever the order of blocks, keys' gradients have the same bits, and the queries' are as near."""
    found = []
    for seed in (1, 2):
        with cupyops.simulate(arch, seed=seed), torch.random.fork_rng():
            found.append(compare((1, 2, 1, 130, 300, 64), torch.float16, forms=forms, causal="bottom_right", on=on))
    assert all(torch.equal(found[0][i], found[1][i]) for i in (0, 1, 3, 4))


@pytest.mark.gpu
@pytest.mark.parametrize(("engine", "width"), [
    *(("wgmma", width) for width in (64, 80, 128, 192, 256)), *(("mma", width) for width in (64, 80, 96, 128, 256)),
])  # fmt: skip
@pytest.mark.parametrize("causal", [None, "bottom_right"])
def test_long_sequences(engine, width, causal):
    """Many tiles that add to the same rows, beside PyTorch in float64."""
    if engine == "wgmma" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wgmma is of compute capability 9.0")
    of = zip((8, 2, 2), (width, width, 128 if width == 192 else width), strict=True)
    given = [torch.randn(1, heads, 2088, size, device="cuda").half().requires_grad_() for heads, size in of]
    wide = [x.detach().double().requires_grad_() for x in given]
    asked = [f"attention.backward:{engine}_once"] + ["attention.forward:mma"] * (engine == "mma")
    with cupyops.use_form(*asked):
        found = gradients(given, causal=causal)
    exact = eager(*wide, sees(2088, 2088, causal))[0]
    for ours, right in zip(found, torch.autograd.grad(exact.sin().sum(), wide), strict=True):
        assert (ours.double() - right).abs().max() <= 4e-3 * right.abs().max()
