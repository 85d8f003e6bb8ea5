import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from contract import Make, OperatorContract, Sample
from decoding import by_cache

import cupyops
from cupyops._dispatch.attention import decode as kernels
from cupyops._dispatch.core.cards import card
from cupyops._dispatch.core.gpu import assume_gpu, gpu
from cupyops._warmup.explanation import explain

HALF = [torch.float16, torch.bfloat16]
DTYPES = [*HALF, torch.float32]


class TestDecodeAttention(OperatorContract):
    function = staticmethod(cupyops.decode_attention)
    torch_function = staticmethod(by_cache)
    kernels = {"decode_attention_fwd_mma", "decode_attention_fwd_fma", "decode_attention_combine"}
    dtypes = DTYPES
    has_backward = False
    too_large = "too many rows"
    differs = {
        ("empty", "reference"): "of a cache without rows the sample's lengths are out of range, which is an error"
    }

    def samples(self, make: Make):  # without gradients, of which there are no kernels
        make = Make(make.device, make.dtype, requires_grad=False)
        for d in (16, 128, 256):
            yield Sample(make(2, 1, 4, d), make(2, 37, 2, d), make(2, 37, 2, d), return_lse=True)
        yield Sample(make(1, 1, 2, 64), make(1, 1100, 1, 64), make(1, 1100, 1, 64))  # several splits
        lengths = torch.tensor([70, 2, 0], device=make.device)
        shapes = (3, 3, 6, 24), (3, 75, 1, 24), (3, 75, 1, 24)  # 18 rows of a head
        yield Sample(*(make(*s) for s in shapes), lengths, window=20, softcap=2.0, return_lse=True)
        mask = torch.arange(1100, device=make.device).remainder(7) < 3  # one for both queries of each sequence
        mask = torch.stack([mask, ~mask])[:, None].expand(2, 2, 1100)
        yield Sample(make(2, 2, 6, 64), make(2, 1100, 2, 64), make(2, 1100, 2, 64), mask=mask, return_lse=True)
        table = torch.tensor([[4, 1, 0], [2, 3, 5]], device=make.device)
        yield Sample(
            make(2, 1, 2, 8), make(6, 16, 2, 8), make(6, 16, 2, 8), lengths[:2].clamp(max=40), table, scale=0.3
        )

    def small_samples(self, make: Make):
        plain = Make(make.device, make.dtype, requires_grad=False)  # which is repeated, until it has 2^31 elements
        yield Sample(plain(1, 1, 18, 16), plain(1, 5, 1, 16), plain(1, 5, 1, 16), return_lse=True)
        lengths = torch.tensor([5, 17], device=make.device)
        yield Sample(make(2, 1, 2, 8), make(2, 18, 2, 8), make(2, 18, 2, 8), lengths, window=9)
        yield Sample(make(2, 2, 4, 8), make(2, 19, 2, 8), make(2, 19, 2, 8), softcap=2.0, return_lse=True)
        mask = torch.arange(19, device=make.device).expand(2, 2, 19) % 3 != torch.arange(2, device=make.device)[:, None]
        yield Sample(make(2, 2, 2, 8), make(2, 19, 2, 8), make(2, 19, 2, 8), mask=mask)


def compare(dtype, shape, rows, lengths=None, block_size=0, device="cpu", **options):
    """(y, lse) by kernels beside float64, where what no sequence has is NaN. shape: (batch, queries, heads, kv_heads, d)."""
    batch, queries, heads, kv_heads, d = shape
    torch.manual_seed(0)
    q = torch.randn(batch, queries, heads, d, dtype=torch.float64)
    k, v = (torch.randn(batch, rows, kv_heads, d, dtype=torch.float64) for _ in range(2))
    q, k, v = (x.to(dtype).double() for x in (q, k, v))
    of = torch.full((batch,), rows) if lengths is None else torch.tensor(lengths)
    expected = by_cache(q, k, v, of, return_lse=True, **options)
    for b, length in enumerate(of.tolist()):
        k[b, length:] = v[b, length:] = math.nan
    mask = options.get("mask")
    if mask is not None:  # what no query sees may be anything
        k[~mask.any(1)] = v[~mask.any(1)] = math.nan
        options["mask"] = mask.to(device)
    table = None
    if block_size:
        count = -(-rows // block_size)
        table = torch.randperm(batch * count + 3)[: batch * count].view(batch, count)
        pages = torch.full((2, batch * count + 3, block_size, kv_heads, d), math.nan, dtype=torch.float64)
        for b in range(batch):
            for n in range(count):
                part = slice(n * block_size, (n + 1) * block_size)
                pages[0, table[b, n], : len(k[b, part])], pages[1, table[b, n], : len(v[b, part])] = (
                    k[b, part],
                    v[b, part],
                )
            table[b, -(-int(of[b]) // block_size) :] = -1  # nobody comes to these
        if mask is not None:
            options["mask"] = F.pad(mask, (0, count * block_size - rows), value=True).to(device)
        k, v = pages
    given = [x.to(device, dtype) for x in (q, k, v)]
    told = None if lengths is None and not block_size else of  # the last blocks may have room for more
    integers = [None if x is None else x.to(device) for x in (told, table)]
    y, lse = cupyops.decode_attention(*given, *integers, return_lse=True, **options)
    bound = 4 * torch.finfo(dtype).eps
    assert torch.equal(lse.isfinite().cpu(), expected[1].isfinite())
    assert (y.cpu().double() - expected[0]).abs().max() <= bound * max(1.0, expected[0].abs().max())
    apart = (lse.cpu().double() - expected[1]).nan_to_num(0, 0, 0).abs().max()
    assert apart <= 4e-6 * max(1.0, expected[1].nan_to_num(neginf=0).abs().max())
    return y, lse


CALLS = {
    "one row": ((1, 1, 1, 1, 64), 1, None),
    "a group of 8": ((2, 1, 8, 1, 128), 70, [70, 33]),
    "a group of 5, 3 queries": ((1, 3, 5, 1, 80), 50, None),
    "17 rows": ((2, 17, 1, 1, 64), 40, [40, 9]),
    "a group of 64": ((1, 1, 64, 1, 128), 150, None),
    "a group of 40, wide": ((1, 1, 40, 1, 256), 90, None),
    "wide": ((2, 1, 2, 2, 256), 90, [90, 0]),
    "of 8": ((3, 2, 4, 2, 8), 33, [33, 16, 1]),
    "splits": ((2, 1, 4, 2, 128), 1700, [1700, 40]),
}
LITTLE = 101376  # bytes of shared memory of a block
FORMS = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@FORMS
@pytest.mark.parametrize("options", [{}, {"window": 7}, {"softcap": 1.5, "scale": 0.7}, {"window": 0}], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_calls(name, options, dtype):
    if dtype == torch.bfloat16 and options:
        return  # of its kernel, which is that of float16, the values are seen without them
    with cupyops.simulate("sm_90" if name == "wide" else "sm_80"), cupyops.trace() as trace:
        compare(dtype, *CALLS[name], **options)
    ran = [record.kernel.partition("<")[0] for record in trace.launches()]
    method = "fma" if dtype == torch.float32 else "mma"
    splits = name == "splits" and "window" not in options
    assert ran == [f"decode_attention_fwd_{method}", *["decode_attention_combine"] * splits]


MASKS = {
    "each query its own": lambda seen: seen > 0.5,
    "few keys": lambda seen: seen > 0.99,
    "the first third": lambda seen: torch.arange(seen.shape[2]) < seen.shape[2] // 3 + (seen[:, :, :1] > 0.5),
    "padding on the left": lambda seen: (
        (torch.arange(seen.shape[2]) > 0.5 * seen.shape[2] * seen[:, :1, :1]) & (seen >= 0)
    ),
    "nothing of the first sequence": lambda seen: (seen > 0.5) & (torch.arange(len(seen)) > 0)[:, None, None],
}
LONG = ((2, 1, 2, 1, 64), 5000, [4000, 5000])  # a warp has more steps than it looks at in one go


@FORMS
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", [*CALLS, "long"])
def test_masks(name, mask, dtype):
    """Beside float64, where what is masked is NaN; with lengths too."""
    shape, rows, lengths = (CALLS | {"long": LONG})[name]
    if dtype == torch.bfloat16 and mask != "few keys":
        return
    torch.manual_seed(1)
    chosen = MASKS[mask](torch.rand(shape[0], shape[1], rows))
    card = assume_gpu(multiprocessors=1) if name == "long" else nullcontext()
    with cupyops.simulate("sm_90" if name == "wide" else "sm_80"), card, cupyops.trace() as trace:
        compare(dtype, shape, rows, lengths, mask=chosen)
    assert {record.kernel.rpartition(", ")[2] for record in trace.launches() if "_fwd_" in record.kernel} == {"true>"}


def test_a_paged_cache_with_a_mask():
    with cupyops.simulate():
        compare(torch.float16, (2, 3, 4, 2, 64), 130, [130, 17], 16, mask=torch.rand(2, 3, 130) > 0.6)


@FORMS
@pytest.mark.parametrize("block_size", [16, 48])
def test_paged(block_size, dtype):
    """Entries that no sequence comes to name no block; blocks are not in order."""
    with cupyops.simulate(), cupyops.trace() as trace:
        compare(dtype, (2, 1, 4, 2, 64), 130, [130, 17], block_size)
        compare(dtype, (2, 2, 4, 2, 64), 1200, [1200, 700], block_size, window=1100)
    assert trace.launches() and "reference" not in trace.routes()


def test_where_pytorch_s_own_is_as_fast():
    """One query of whole caches on Hopper, and on what nobody measured; with anything that it has not, kernels."""
    q, k = torch.empty(2, 1, 4, 64, dtype=torch.float16), torch.empty(2, 300, 2, 64, dtype=torch.float16)
    wide = [x.new_empty(*x.shape[:3], 256) for x in (q, k)]
    lengths = torch.tensor([300, 20])

    def chosen(name, q, k, *more, **options):
        (found,) = explain(cupyops.decode_attention, (q, k, k, *more), options, card(name))
        return [one.chosen.name for one in found.choices], len(found.launches)

    assert chosen("H100", q, k) == chosen("A100", q, k) == chosen("A100", *wide) == (["pytorch"], 0)
    for given, options in (
        (wide, {}),
        ((q.float(), k.float()), {}),
        ((q, k), {"return_lse": True}),
        ((q, k, lengths), {}),
        ((q, k), {"window": 9}),
        ((q, k), {"softcap": 2.0}),
        ((q.expand(2, 2, 4, 64), k), {}),
    ):
        names, launches = chosen("H100", *given, **options)
        assert names[-1] in ("mma", "fma") and launches, (given, options)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_pytorch_s_own(heads):
    q = torch.randn(2, 1, 4, 64, device="cuda", dtype=torch.float16, requires_grad=True)
    k, v = (torch.randn(2, 70, heads, 64, device="cuda", dtype=torch.float16, requires_grad=True) for _ in range(2))
    with cupyops.never_slower(), cupyops.trace() as trace:
        y = cupyops.decode_attention(q, k, v, scale=0.3)
    assert y.is_contiguous() and "decode" not in "".join(record.kernel for record in trace.launches())
    ours = cupyops.decode_attention(q, k, v, torch.full((2,), 70, device="cuda"), scale=0.3)
    expected = by_cache(*(x.double() for x in (q, k, v)), scale=0.3)
    assert (y - expected).abs().max() <= 2e-3 and (ours - expected).abs().max() <= 2e-3
    grads = [torch.autograd.grad(one.sum(), (q, k, v)) for one in (y, ours)]
    for one, other in zip(*grads):
        assert (one - other).abs().max() <= 4e-3 * max(1.0, other.abs().max().item())


@pytest.mark.gpu
@FORMS
@pytest.mark.parametrize("name", CALLS)
def test_on_the_gpu(name, dtype):
    with cupyops.never_slower(False), cupyops.trace() as trace:
        for options in ({}, {"window": 7}, {"softcap": 1.5, "scale": 0.7}, {"block_size": 48}):
            compare(dtype, *CALLS[name], device="cuda", **options)
    assert trace.routes() == {"kernel"}


@pytest.mark.gpu
@FORMS
def test_long_on_the_gpu(dtype):
    with cupyops.never_slower(False):
        for d in (64, 128, 256):
            compare(dtype, (3, 1, 8, 2, d), 20000, [20000, 12345, 1], device="cuda")
            compare(dtype, (3, 2, 8, 2, d), 5000, [5000, 4097, 16], 256, device="cuda", window=3000)


@pytest.mark.parametrize("width", [40, 64, 128, 256])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_splits_do_not_matter(device, width):
    """However many there are; and each number of them gives the same bits twice."""
    found = []
    with cupyops.simulate(), cupyops.never_slower(False):
        for multiprocessors in (1, 2, 64, 1, 2, 64):
            with assume_gpu(multiprocessors=multiprocessors):
                found.append(compare(torch.float16, (1, 1, 2, 1, width), 1600, device=device))
    for n in range(3):
        assert all(map(torch.equal, found[n], found[n + 3]))
        torch.testing.assert_close(found[n], found[0], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("width", "rows", "shared"),
    [(64, 16, LITTLE), (128, 16, LITTLE), (256, 16, LITTLE), (256, 16, 232448), (128, 32, LITTLE), (128, 32, 232448)],
)
def test_pipeline(width, rows, shared, dtype):
    """More steps than a warp asks for ahead, of which the last are none; in as much shared memory as there is."""
    heads = 3 if rows == 16 else 20
    with cupyops.simulate("sm_90"), assume_gpu(multiprocessors=2, shared=shared), cupyops.trace() as trace:
        compare(dtype, (1, 2, heads, 1, width), 1170, [1165])
        compare(dtype, (1, 2, heads, 1, width), 1170, [1021], 48, window=900)
        compare(dtype, (1, 2, heads, 1, width), 1170, [1165], mask=torch.rand(1, 2, 1170) > 0.9)
    found = {tuple(record.kernel[:-1].split(", ")[-3:-1]) for record in trace.launches() if "_fwd_" in record.kernel}
    tuned = kernels._TUNED[width, 4 if dtype == torch.float32 else rows]
    assert found == {tuple(map(str, tuned[-1 if shared == LITTLE else 0]))}


def test_how_many_splits():
    """One sequence alone keeps all multiprocessors busy; many need few splits."""
    form = next(form for form in kernels.FORWARD.list if form.name == "mma")
    card = gpu(torch.device("cpu"))

    def splits(batches, rows, window=-1):
        strides = ((1024, 1024, 128),) * 3
        sizes = batches, 1, 32, 8, 128, rows, window, 0, 0, 0
        return form.splits(kernels.Problem(*sizes, torch.float16, *strides), card)

    with assume_gpu(multiprocessors=132):
        card = gpu(torch.device("cpu"))
    assert splits(1, 131072) * 8 >= 0.9 * 2 * 132
    assert splits(1, 100) == splits(1, 131072, 50) == 1
    assert splits(64, 131072) <= 8


def test_gradients_are_pytorch_s():
    q = torch.randn(1, 1, 2, 4, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(1, 5, 1, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    lengths = torch.tensor([3])
    function = lambda *given: cupyops.decode_attention(*given, lengths, softcap=2.0, return_lse=True)
    assert torch.autograd.gradcheck(function, (q, k, v)) and torch.autograd.gradgradcheck(function, (q, k, v))
    poisoned = [x.detach().clone() for x in (k, v)]
    for x in poisoned:
        x[:, 3:] = math.nan
        x.requires_grad_()
    grads = torch.autograd.grad(function(q, *poisoned)[0].sum(), (q, *poisoned))
    assert all(g.isfinite().all() for g in grads)


def test_a_graph_serves_every_length():
    """What is launched does not depend on the values of lengths: a recorded plan gives each its own result."""
    q, k, v = torch.randn(2, 1, 2, 64).half(), *(torch.randn(2, 40, 1, 64).half() for _ in range(2))
    lengths = torch.zeros(2, dtype=torch.int32)
    with cupyops.simulate():
        for length in (1, 7, 40, 12, 33):
            lengths.fill_(length)
            expected = by_cache(q.double(), k.double(), v.double(), lengths)
            torch.testing.assert_close(
                cupyops.decode_attention(q, k, v, lengths).double(), expected, rtol=2e-3, atol=2e-3
            )


@pytest.mark.gpu
def test_cuda_graph():
    q, k, v = (torch.randn(2, n, 8, 128, device="cuda").half() for n in (1, 2000, 2000))
    lengths = torch.full((2,), 5, dtype=torch.int32, device="cuda")
    with cupyops.never_slower(False):
        for _ in range(3):
            cupyops.decode_attention(q, k, v, lengths)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = cupyops.decode_attention(q, k, v, lengths)
        for length in (1, 700, 2000):
            lengths.fill_(length)
            graph.replay()
            torch.testing.assert_close(y, by_cache(q, k, v, lengths), rtol=2e-3, atol=2e-3)


def test_layouts_without_copies():
    """Slices of larger caches, heads before rows: read where they are. Rows off a boundary are PyTorch's."""
    q = torch.randn(2, 1, 4, 64).half()
    large = torch.randn(2, 60, 2, 2, 64).half()
    by_heads = torch.randn(2, 2, 50, 64).half().transpose(1, 2)
    with cupyops.simulate(), cupyops.trace() as trace:
        for k, v in ((large[:, :50, 0], large[:, :50, 1]), (by_heads, by_heads)):
            y = cupyops.decode_attention(q, k, v)
            torch.testing.assert_close(y.double(), by_cache(q.double(), k.double(), v.double()), rtol=2e-3, atol=2e-3)
    assert trace.launches() and "reference" not in trace.routes()
    odd = torch.randn(2, 50, 2, 72).half()[..., 4:68]  # copied
    with cupyops.simulate():
        y = cupyops.decode_attention(q, odd, odd)
    torch.testing.assert_close(y.double(), by_cache(q.double(), odd.double(), odd.double()), rtol=2e-3, atol=2e-3)


BAD = {
    "q": (lambda q, k, n: (q[0], k, k), r"^q is .*expected \(batch, queries, heads, head_dim\)"),
    "k_cache": (lambda q, k, n: (q, k[..., :-1], k), "^k_cache is .*as q has it"),
    "batch": (lambda q, k, n: (q, k[:1], k[:1]), "^k_cache is "),
    "v_cache": (lambda q, k, n: (q, k, k[:, :-1]), "^v_cache is .*as k_cache has it"),
    "heads": (lambda q, k, n: (q[:, :, :3], k, k), "^k_cache has 2 heads, expected a divisor of the 3 of q"),
    "lengths": (lambda q, k, n: (q, k, k, n[:1]), r"^kv_lengths is .*expected shape \(2,\)"),
    "kind": (lambda q, k, n: (q, k, k, n.float()), "^kv_lengths is .*expected int32 or int64"),
    "length": (lambda q, k, n: (q, k, k, n + 5), r"^kv_lengths, element 1, is 10, expected one in \[0, 10\)"),
    "table": (lambda q, k, n: (q, k, k, n, n), r"^block_table is .*expected \(2, blocks of a sequence\)"),
    "block": (lambda q, k, n: (q, k, k, n, n.view(2, 1)), r"^block_table, element 1, is 5, expected one in \[0, 2\)"),
    "dtype": (lambda q, k, n: (q, k.half(), k.half()), "^k_cache is torch.float16, but q is torch.float32"),
    "mask": (lambda q, k, n: (q, k, k, n, None, torch.ones(2, 9).bool()), r"^mask is .*expected shape \(2, 1, 9\)"),
    "bytes": (lambda q, k, n: (q, k, k, n, None, torch.ones(2, 1, 9)), "^mask is .*expected bool"),
    "both": (
        lambda q, k, n: (q, k, k, n, None, torch.ones(2, 1, 9).bool(), 3),
        r"^window is 3 \(int\), expected None with a mask",
    ),
}


@pytest.mark.parametrize("bad", BAD)
def test_bad_input(bad):
    q, k, lengths = torch.randn(2, 1, 4, 8), torch.randn(2, 9, 2, 8), torch.tensor([1, 5])
    make, message = BAD[bad]
    given = make(q, k, lengths)
    named = dict(zip(("mask", "window"), given[5:]))
    with pytest.raises(cupyops.InputError, match=message):
        cupyops.decode_attention(*given[:5], **named)


@pytest.mark.parametrize(
    ("name", "value"), [("window", -1), ("window", 2.0), ("softcap", 0.0), ("scale", "1"), ("softcap", math.inf)]
)
def test_bad_options(name, value):
    q, k = torch.randn(2, 1, 4, 8), torch.randn(2, 9, 2, 8)
    with pytest.raises(cupyops.InputError, match=f"^{name} is "):
        cupyops.decode_attention(q, k, k, **{name: value})


@pytest.mark.parametrize("length", [2**32 + 2, -(2**32) + 2, 2**31 + 1])
def test_lengths_beyond_32_bits(length):
    """They are out of range, by kernels all rows or none; and no other length."""
    q, k = torch.randn(1, 1, 2, 32), torch.randn(1, 16, 2, 32)
    call = lambda n: cupyops.decode_attention(q, k, k, torch.tensor([n]))
    with cupyops.simulate():
        torch.testing.assert_close(call(length), call(16 if length > 0 else 0))
