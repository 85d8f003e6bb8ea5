"""attention with dropout: the mask that the seed makes, in forward and every role of backward, beside float64."""

import numpy as np
import pytest
import torch
from attentions import CARDS, eager, sees, tensors

import cupyops
from cupyops._dispatch.core.gpu import assume_gpu

ENGINES = {
    "mma": ("sm_80", 64, ("forward:mma", "backward:mma_64")),
    "mma_32": ("sm_80", 128, ("forward:mma", "backward:mma_32")),
    "mma_16": ("sm_80", 136, ("forward:mma", "backward:mma_16")),
    "mma_once": ("sm_80", 64, ("forward:mma", "backward:mma_once")),
    "mma_once_256": ("sm_90", 256, ("forward:mma", "backward:mma_once")),
    "wgmma": ("sm_90", 128, ("forward:wgmma", "backward:wgmma")),
    "wgmma_64": ("sm_90", 64, ("forward:wgmma", "backward:wgmma")),
    "once": ("sm_90", 128, ("forward:wgmma", "backward:wgmma_once")),
    "once_64": ("sm_90", 64, ("forward:wgmma", "backward:wgmma_once")),
}
OPTIONS = {
    "full": {},
    "causal": {"causal": "bottom_right"},
    "mask": {"mask": "of[q] == of[k]", "of": torch.arange(150) // 40},
    "softcap": {"softcap": 2.0, "window": (40, 10)},
    "sinks": {"sinks": torch.tensor([0.7, 2.5]), "causal": "bottom_right"},
}
SEED = 0x123456789ABCDEF


def philox(seed, *counter):
    """Philox4x32-7, as its paper draws it, of numbers in uint64."""
    key, words = [seed % 2**32, (seed >> 32) % 2**32], list(counter)
    for _ in range(7):
        left, right = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [right >> 32 ^ words[1] ^ key[0], right % 2**32, left >> 32 ^ words[3] ^ key[1], left % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return words


def factors(shape, p, seed=SEED):
    """(batch, heads, queries, keys) of 0 and 1 / (1 - p): four of queries and keys 8 apart are the words of one draw."""
    batches, heads, queries, keys = shape
    of, q, k = np.ogrid[: batches * heads, : -(-queries // 16) * 8, : -(-keys // 16) * 8]
    numbers = (
        x + np.zeros((of.size, q.size, k.size), np.uint64) for x in (k.astype("u8"), q.astype("u8"), of.astype("u8"))
    )
    words = np.stack(philox(seed, *numbers, np.zeros(1, np.uint64))).reshape(2, 2, of.size, q.size // 8, 8, -1, 8)
    kept = torch.from_numpy(words >= p * 2**32).permute(2, 3, 0, 4, 5, 1, 6)  # of 16 queries the halves, and of 16 keys
    return (kept.double() / (1 - p)).reshape(of.size, 2 * q.size, 2 * k.size)[:, :queries, :keys].reshape(shape)


@pytest.fixture
def seeded(monkeypatch):
    """The generator of every device gives this number next."""
    monkeypatch.setattr(torch, "randint", lambda *args, device, **more: torch.full((), SEED, device=device))


def compared(engine, name, dtype=torch.float16, device="cpu", p=0.3):
    _, width, forms = ENGINES[engine]
    shape = (2, 2, 70, 40) if name == "full" else (1, 2, 140, 75)
    given, options = (*tensors((*shape[:2], 1, *shape[2:], width), dtype, device),), dict(OPTIONS[name])
    keep = factors(shape, p).to(device)
    if "sinks" in options:  # of whose column nothing is dropped
        given, keep = (*given, options.pop("sinks").to(device)), torch.nn.functional.pad(keep, (0, 1), value=1.0)
    mine, wide = ([f(x).detach().requires_grad_() for x in given] for f in (torch.Tensor.clone, torch.Tensor.double))
    options = {key: x.to(device) if isinstance(x, torch.Tensor) else x for key, x in options.items()}
    with cupyops.use_form(*(f"attention.{form}" for form in forms)):
        results = cupyops.attention(*mine[:3], dropout_p=p, return_lse=True, sinks=(*mine, None)[3], **options)
        torch.manual_seed(1)
        grads = [torch.randn_like(x) for x in results]
        found = torch.autograd.grad(results, mine, grads)
    seen = sees(*shape[2:], options.get("causal"), options.get("window"))
    if name == "mask":
        seen = seen & (OPTIONS[name]["of"][:140, None] == OPTIONS[name]["of"][:75])
    change = (lambda s: 2 * torch.tanh(s / 2)) if name == "softcap" else None
    exact = eager(*wide[:3], seen, change=change, sinks=(*wide, None)[3], drop=keep)
    right = torch.autograd.grad(exact, wide, [x.double() for x in grads])
    for ours, true in zip((*results, *found), (*exact, *right), strict=True):
        assert torch.equal(ours.isfinite(), true.isfinite())
        apart, most = (ours.double() - true).nan_to_num(), true.nan_to_num(neginf=0.0).abs().max()
        assert apart.abs().max() <= 4 * torch.finfo(dtype).eps * most, (engine, name)


CASES = pytest.mark.parametrize(
    "engine, name",
    [
        (engine, name)
        for engine in ENGINES
        for name in OPTIONS
        if engine in ("mma", "mma_once", "wgmma", "once") or name == "causal"
    ],
)


@pytest.mark.slow
@CASES
def test_the_mask_of_the_seed(engine, name, seeded):
    arch = ENGINES[engine][0]
    with cupyops.simulate(arch), assume_gpu(**CARDS[arch]):
        compared(engine, name)


@pytest.mark.gpu
@CASES
def test_the_mask_of_the_seed_on_a_gpu(engine, name, seeded):
    if engine.startswith(("wgmma", "once")) and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wgmma is of compute capability 9.0")
    compared(engine, name, torch.bfloat16 if engine == "wgmma" else torch.float16, "cuda")


def test_the_reference_drops_the_same(seeded):
    """And has every derivative, by the same mask."""
    q, k = (torch.randn(2, 2, rows, 3, dtype=torch.float64, requires_grad=True) for rows in (19, 10))
    v = torch.randn_like(k).requires_grad_()
    keep = factors((2, 2, 19, 10), 0.4)

    def function(*given):
        return cupyops.attention(*given, dropout_p=0.4, return_lse=True)

    for ours, right in zip(function(q, k, v), eager(q, k, v, sees(19, 10), drop=keep), strict=True):
        torch.testing.assert_close(ours, right)
    small = [x[:, :, :4].detach().requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(function, small) and torch.autograd.gradgradcheck(function, small)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_frequency(device, p):
    """How many are dropped, and how many neighbours together, within five sigma of what is independent."""
    q = torch.zeros(2, 4, 96, 8, device=device)
    v = torch.eye(96, device=device).expand(2, 4, 96, 96)  # y is the weights
    torch.manual_seed(0)
    y = cupyops.attention(q, q, v, dropout_p=p)
    n, dropped = y.numel(), (y == 0).double()
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 1 / 96 / (1 - p)))
    assert abs(dropped.mean().item() - p) < 5 * (p * (1 - p) / n) ** 0.5
    for dim in range(4):
        for step in (1, 8) if dim > 1 else (1,):
            size = y.shape[dim]
            both = (dropped.narrow(dim, step, size - step) * dropped.narrow(dim, 0, size - step)).mean().item()
            assert abs(both - p * p) < 5 * (3 * p * p * (1 - p * p) / n) ** 0.5


def test_the_generator_makes_the_mask(device):
    q = torch.randn(1, 2, 50, 16, device=device)
    torch.manual_seed(5)
    first, other = (cupyops.attention(q, q, q, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(5)
    assert torch.equal(cupyops.attention(q, q, q, dropout_p=0.5), first) and not torch.equal(first, other)
    torch.testing.assert_close(cupyops.attention(q, q, q, dropout_p=0.0), cupyops.attention(q, q, q))
    assert not cupyops.attention(q, q, q, dropout_p=1.0).any()
    function, grads = lambda x: cupyops.attention(x, x, x, dropout_p=0.5), []
    for call in (function, lambda x: torch.utils.checkpoint.checkpoint(function, x, use_reentrant=False)):
        torch.manual_seed(7)
        leaf = q.clone().requires_grad_()
        y = call(leaf)
        torch.manual_seed(8)  # what is computed again has the number that forward had
        grads.append(torch.autograd.grad(y.square().sum(), leaf)[0])
    torch.testing.assert_close(*grads)


def test_recorded_calls_draw_anew():
    """A plan has the seed as a tensor: each call drops others, and backward what forward did."""
    torch.manual_seed(0)
    q, k = (torch.zeros(1, 1, 32, 64).half().requires_grad_() for _ in range(2))
    v, seen = torch.eye(64)[:32].half().expand(1, 1, 32, 64), []
    for _ in range(6):
        with cupyops.simulate("sm_80"):
            value = v.clone().requires_grad_()
            y = cupyops.attention(q, k, value, dropout_p=0.5)
            (grad,) = torch.autograd.grad(y, value, torch.eye(32, 64).half().expand(1, 1, 32, 64))
        assert torch.equal(grad[0, 0, :, :32], y[0, 0, :, :32].mT)  # both are the weights
        seen.append(y.detach())
    assert all(not torch.equal(one, other) for i, one in enumerate(seen) for other in seen[:i])


def test_packed_sequences(seeded):
    """Rows and the sequence count, wherever it lies among the tokens."""
    lengths = torch.tensor([0, 20, 57])
    q, k, v = (torch.randn(57, 2, 64).half().requires_grad_() for _ in range(3))
    most = {"max_seqlen_q": 37, "max_seqlen_k": 37, "cu_seqlens_q": lengths, "cu_seqlens_k": lengths}
    with cupyops.simulate("sm_80"):
        y = cupyops.attention(q, k, v, dropout_p=0.25, causal="top_left", **most)
        grads = torch.autograd.grad(y.float().sum(), (q, k, v))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    keep, parts = factors((2, 2, 37, 37), 0.25), []
    for i, (start, end) in enumerate(((0, 20), (20, 57))):
        rows = end - start
        one = [x[start:end].transpose(0, 1)[None] for x in wide]
        parts.append(eager(*one, sees(rows, rows, "top_left"), drop=keep[i : i + 1, :, :rows, :rows])[0][0])
    exact = torch.cat(parts, 1).transpose(0, 1)
    for ours, right in zip((y, *grads), (exact, *torch.autograd.grad(exact.sum(), wide)), strict=True):
        assert (ours.double() - right).abs().max() <= 4e-3 * right.abs().max()


@pytest.mark.gpu
def test_each_replay_has_its_own_mask():
    q = torch.randn(1, 2, 256, 64, device="cuda", dtype=torch.float16)
    cupyops.attention(q, q, q, dropout_p=0.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = cupyops.attention(q, q, q, dropout_p=0.5)
    masks = []
    for _ in range(3):
        graph.replay()
        masks.append(y.clone())
    assert not torch.equal(masks[0], masks[1]) and not torch.equal(masks[1], masks[2])


def test_bad_input():
    q = torch.ones(1, 2, 4, 8)
    for bad in (-0.1, 1.5, "0.5", float("nan"), True):
        with pytest.raises(cupyops.InputError, match="dropout_p is .*expected a probability"):
            cupyops.attention(q, q, q, dropout_p=bad)
    four = {name: torch.ones(2) for name in ("a1", "b1", "c", "d")}
    with pytest.raises(cupyops.InputError, match="what dropout_p takes: an expression captures at most 4 tensors"):
        cupyops.attention(q, q, q, score="s + a1[h] + b1[h] + c[h] + d[h]", dropout_p=0.1, **four)
