"""attention with sinks, one more score of each row that no value goes with: in the kernels, beside float64."""

import itertools
import math

import pytest
import torch
from attentions import HOPPER, eager, sees, tensors, usual

import cupyops
from cupyops._dispatch.core.gpu import assume_gpu

ENGINES = {
    "mma": ("sm_80", 64, ("forward:mma", "backward:mma_64")),
    "mma_32": ("sm_80", 128, ("forward:mma", "backward:mma_32")),
    "mma_16": ("sm_80", 136, ("forward:mma", "backward:mma_16")),
    "wgmma": ("sm_90", 128, ("forward:wgmma", "backward:wgmma")),
    "wgmma_64": ("sm_90", 64, ("forward:wgmma", "backward:wgmma")),
    "once": ("sm_90", 128, ("forward:wgmma", "backward:wgmma_once")),
    "once_192": ("sm_90", 192, ("forward:wgmma", "backward:wgmma_once")),
}
SINKS = torch.tensor([0.7, -math.inf, 60.0, -3.0])  # as a score, none, far above all of them, below most
OPTIONS = {
    "full": {},
    "causal": {"causal": "bottom_right"},  # of which some rows see no key
    "window": {"window": (30, 4)},
    "slopes": {"alibi_slopes": torch.tensor([0.5, 0.1, 0.3, 0.02]), "causal": "bottom_right"},
    "softcap": {"softcap": 2.0, "window": (40, None)},
    "mask": {"mask": "of[q] == of[k]", "of": torch.arange(150) // 40},
}
QUERIES, KEYS = 140, 75


def compared(engine, name, dtype=torch.float16, device="cpu", sinks=SINKS, lse_grad=True):
    """Results and all gradients, beside those of float64."""
    _, width, forms = ENGINES[engine]
    shape = (1, 4, 2, QUERIES, KEYS, width, *([128] if width == 192 else []))
    given = (*tensors(shape, dtype, device), sinks.to(device))
    mine, wide = ([f(x).detach().requires_grad_() for x in given] for f in (torch.Tensor.clone, torch.Tensor.double))
    options = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in OPTIONS[name].items()}
    with cupyops.use_form(*(f"attention.{form}" for form in forms)):
        results = cupyops.attention(*mine[:3], sinks=mine[3], return_lse=True, **options)
        torch.manual_seed(1)
        grads = [torch.randn_like(x) if lse_grad or x.dim() == 4 else torch.zeros_like(x) for x in results]
        found = torch.autograd.grad(results, mine, grads)
    seen = sees(QUERIES, KEYS, options.get("causal"), options.get("window"))
    if name == "mask":
        seen = seen & (OPTIONS[name]["of"][:QUERIES, None] == OPTIONS[name]["of"][:KEYS])
    slopes = options["alibi_slopes"].double() if name == "slopes" else None
    change = lambda s: usual(options.get("softcap"), slopes, KEYS - QUERIES, s)
    exact = eager(*wide[:3], seen, None, change, wide[3])
    right = torch.autograd.grad(exact, wide, [x.double() for x in grads])
    names = ("y", "lse", "grad_q", "grad_k", "grad_v", "grad_sinks")
    for of, ours, true in zip(names, (*results, *found), (*exact, *right), strict=True):
        assert torch.equal(ours.isfinite(), true.isfinite()), (of, engine, name)
        apart, most = (ours.double() - true).nan_to_num(), true.nan_to_num(neginf=0.0).abs().max()
        bound = 2e-6 if of == "lse" else 4 * torch.finfo(dtype).eps
        assert apart.abs().max() <= bound * most, (of, engine, name, apart.abs().max(), most)
    return results, found


CASES = pytest.mark.parametrize(
    "engine, name",
    [
        (engine, name)
        for engine, name in itertools.product(ENGINES, OPTIONS)
        if name == "causal" or engine in ("mma", "once") or (engine, name) == ("wgmma", "slopes")
    ],
)


@pytest.mark.slow
@CASES
def test_sinks(engine, name):
    with cupyops.simulate(ENGINES[engine][0]), assume_gpu(**HOPPER), cupyops.trace() as trace:
        (y, lse), _ = compared(engine, name)
    assert trace.routes() == {"simulator"}
    assert not y[:, 2].any()  # beside a sink so high nothing is left in half types
    if name == "causal":
        unseen = QUERIES - KEYS
        assert not y[:, :, :unseen].any() and torch.equal(lse[0, :, :unseen], SINKS[:, None].expand(4, unseen))


@pytest.mark.parametrize("needed", range(4))
def test_one_gradient_alone(needed):
    """That of the sinks needs neither pass of backward; without theirs, nothing is added up for it."""
    given = [*tensors((1, 2, 1, 70, 45, 64), torch.float16), torch.randn(2).bfloat16()]
    given[needed].requires_grad_()
    with cupyops.simulate("sm_90"), assume_gpu(**HOPPER), cupyops.trace() as trace:
        y, lse = cupyops.attention(*given[:3], sinks=given[3], causal="bottom_right", return_lse=True)
        (found,) = torch.autograd.grad((y.sin().sum(), lse.sum()), given[needed])
    kernels = [record.kernel.partition("<")[0] for record in trace.launches()]
    assert kernels[:2] == ["attention_fwd_wgmma", "attention_bwd_prepare"] and len(kernels) == 3 - (needed == 3)
    wide = [x.detach().double().requires_grad_() for x in given]
    exact, exact_lse = eager(*wide[:3], sees(70, 45, "bottom_right"), sinks=wide[3])
    (right,) = torch.autograd.grad((exact.sin().sum(), exact_lse.sum()), wide[needed])
    assert found.dtype == given[needed].dtype
    assert (found.double() - right).abs().max() <= 4 * torch.finfo(found.dtype).eps * right.abs().max()


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_tokens_of_no_sequence(arch):
    """Their log-sum-exp is the sink, as that of rows that see no key, and so is its gradient."""
    starts = torch.tensor([2, 9, 9, 30]).int()
    sinks = torch.tensor([0.5, -1.0], requires_grad=True)
    q, k, v = (torch.randn(40, 2, 64).half().requires_grad_() for _ in range(3))
    lengths = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 21, "max_seqlen_k": 21}
    with cupyops.simulate(arch), assume_gpu(**HOPPER), cupyops.trace() as trace:
        y, lse = cupyops.attention(q, k, v, causal="top_left", sinks=sinks, return_lse=True, **lengths)
        grads = torch.randn_like(y), torch.randn_like(lse)
        found = torch.autograd.grad((y, lse), (q, k, v, sinks), grads)
    assert trace.routes() == {"simulator"}
    none = torch.ones(40, dtype=torch.bool)
    none[2:30] = False
    assert not y[none].any() and torch.equal(lse[:, none], sinks.detach()[:, None].expand(2, 12))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v, sinks)]
    exact_y, exact_lse = torch.zeros(40, 2, 64).double(), wide[3][:, None].expand(2, 40).clone()
    for a, b in ((2, 9), (9, 30)):
        part = [x[a:b].transpose(0, 1)[None] for x in wide[:3]]
        one = eager(*part, sees(b - a, b - a, "top_left"), sinks=wide[3])
        exact_y[a:b], exact_lse[:, a:b] = one[0][0].transpose(0, 1), one[1][0]
    right = torch.autograd.grad((exact_y, exact_lse), wide, [x.double() for x in grads])
    for ours, true in zip((y, lse, *found), (exact_y, exact_lse, *right), strict=True):
        assert (ours.double() - true).abs().max() <= 4e-3 * true.abs().max()


def test_recorded_calls():
    """The fourth call replays what the first did, with sinks that have changed."""
    with cupyops.simulate("sm_90"):
        for i in range(5):
            given = [*tensors((1, 2, 1, 40, 40, 64), torch.bfloat16, seed=i), torch.randn(2)]
            given = [x.detach().requires_grad_() for x in given]
            y = cupyops.attention(*given[:3], causal="top_left", sinks=given[3])
            grads = torch.autograd.grad(y.sum(), given)
            wide = [x.detach().double().requires_grad_() for x in given]
            exact = eager(*wide[:3], sees(40, 40, "top_left"), sinks=wide[3])[0]
            for ours, right in zip((y, *grads), (exact, *torch.autograd.grad(exact.sum(), wide)), strict=True):
                assert (ours.double() - right).abs().max() <= 3e-2 * right.abs().max(), i


def test_the_same_bits():
    """The gradient of a sink is added up in one order, whatever that of the blocks."""
    found = []
    for seed in (1, 2):
        with cupyops.simulate("sm_90", seed=seed), assume_gpu(**HOPPER), torch.random.fork_rng():
            found.append(compared("wgmma", "causal"))
    for one, other in zip(*found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_sinks_that_are_no_numbers():
    """NaN reaches the rows of its head alone; beside inf a row has zeros."""
    q, k, v = (torch.randn(1, 2, 20, 64).half() for _ in range(3))
    for arch in ("sm_80", "sm_90"):
        with cupyops.simulate(arch), assume_gpu(**HOPPER):
            y, lse = cupyops.attention(q, k, v, sinks=torch.tensor([math.nan, math.inf]), return_lse=True)
        assert y[:, 0].isnan().all() and lse[:, 0].isnan().all()
        assert not y[:, 1].any() and (lse[:, 1] == math.inf).all()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@CASES
def test_sinks_on_a_gpu(engine, name, dtype):
    if "wgmma" in str(ENGINES[engine]) and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wgmma is of compute capability 9.0")
    compared(engine, name, dtype, "cuda")


@pytest.mark.gpu
def test_a_long_sequence_on_a_gpu():
    """Of many tiles, the gradient of a sink beside float64, and in a graph that is replayed."""
    given = [torch.randn(1, heads, 2088, 128, device="cuda").half() for heads in (8, 2, 2)]
    given = [x.requires_grad_() for x in (*given, torch.randn(8, device="cuda"))]
    wide = [x.detach().double().requires_grad_() for x in given]

    def ours():
        y, lse = cupyops.attention(*given[:3], causal="top_left", sinks=given[3], return_lse=True)
        return y, lse, *torch.autograd.grad(y.float().sin().sum() + lse.sum(), given)

    exact = eager(*wide[:3], sees(2088, 2088, "top_left"), sinks=wide[3])
    exact = *exact, *torch.autograd.grad(exact[0].sin().sum() + exact[1].sum(), wide)
    ours()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ours()
    graph.replay()
    torch.cuda.synchronize()
    for found in (ours(), captured):
        for one, right in zip(found, exact, strict=True):
            assert (one.double() - right).abs().max() <= 4e-3 * right.abs().max()
