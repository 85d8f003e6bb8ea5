import dataclasses
import functools

import pytest
import torch
from contract import Make, OperatorContract, Sample
from torch.nn.attention import SDPBackend, sdpa_kernel

import cupyops
from cupyops._dispatch.attention import attention as kernels
from cupyops._dispatch.attention.library import slower
from cupyops._dispatch.core.gpu import gpu
from cupyops._util import observed
from cupyops.testing import assume_gpu

SDPA = torch.nn.functional.scaled_dot_product_attention
HALF = [torch.float16, torch.bfloat16]


@functools.wraps(SDPA)
def torch_sdpa(query, key, value, *args, **kwargs):
    """PyTorch's, of copies: on a GPU its kernels fault on views that begin at any address, and on such gradients.

    Of what has no elements its function may make None, or end the process; nothing is to be summed.
    """

    def aligned(x):
        return x.clone() if x is not None and x.is_cuda and x.data_ptr() % 16 else x

    if not (query.numel() and key.numel() and value.numel()):
        return query.new_zeros((*query.shape[:-1], value.shape[-1])) + 0 * (query.sum() + key.sum() + value.sum())
    y = SDPA(*map(aligned, (query, key, value)), *args, **kwargs)
    if y.is_cuda and y.requires_grad:
        y.register_hook(aligned)
    return y


class TestScaledDotProductAttention(OperatorContract):
    function = staticmethod(cupyops.scaled_dot_product_attention)
    torch_function = staticmethod(torch_sdpa)
    kernels = {"attention_bwd_prepare"}
    dtypes = HALF

    def samples(self, make: Make):
        yield Sample(make(2, 3, 20, 16), make(2, 3, 33, 16), make(2, 3, 33, 16))
        yield Sample(make(1, 4, 33, 64), make(1, 2, 33, 64), make(1, 2, 33, 64), is_causal=True, enable_gqa=True)
        yield Sample(make(1, 1, 33, 80), make(1, 1, 70, 80), make(1, 1, 70, 80), is_causal=True, scale=0.3)
        yield Sample(make(3, 5, 8), make(3, 7, 8), make(3, 7, 8))

    def small_samples(self, make: Make):  # not so small that of a few elements one is badly rounded by chance
        yield Sample(make(1, 2, 17, 8), make(1, 2, 19, 8), make(1, 2, 19, 8))
        yield Sample(make(2, 2, 4, 8), make(2, 1, 3, 8), make(2, 1, 3, 8), is_causal=True, enable_gqa=True)
        # of few scores, however often it is repeated
        yield Sample(make(1, 1, 16, 64), make(1, 1, 2, 64), make(1, 1, 2, 64))

    def test_layouts(self, device):
        """On a GPU of what the kernels take: PyTorch's of float32 adds in the order in which blocks come."""
        for sample in self.layouts(Make(device, torch.float16 if device.type == "cuda" else torch.float32)):
            self.compare(sample, f"layout {sample!r}", strides=device.type == "cpu")

    @pytest.mark.parametrize("kind", ["expanded", "strided", "misaligned"])
    def test_grad_layouts(self, device, kind, *dtype):
        """On a GPU of what the kernels take: PyTorch's fault on gradients that begin at any address."""
        super().test_grad_layouts(device, kind, *([torch.float16] if device.type == "cuda" else dtype))


def test_other_things_are_pytorchs():
    """Dropout, other widths: PyTorch's function computes them, and the trace says why."""
    q, k = torch.randn(1, 2, 5, 8).half(), torch.randn(1, 2, 6, 8).half()
    bias = torch.randn(5, 6).half().requires_grad_()
    for given, options, reason in [
        ((q, k, k, bias), {"dropout_p": 0.5}, "dropout"),
        ((q, k, k), {"dropout_p": 0.5}, "dropout"),
        ((q, k, k[..., :4]), {}, "head_dim 4 is no multiple of 8 up to 256"),
        ((q[0, 0], k[0, 0], k[0, 0]), {}, "2 dimensions"),
        ((q, k[:, :1], k[:, :1]), {}, "heads that are broadcast"),
    ]:
        with cupyops.simulate(), cupyops.trace() as trace:
            torch.manual_seed(3)
            y = cupyops.scaled_dot_product_attention(*given, **options)
        torch.manual_seed(3)
        assert torch.equal(y, SDPA(*given, **options)), reason
        assert [(record.route, record.note) for record in trace.records] == [("reference", reason)]
    y = cupyops.scaled_dot_product_attention(q, k, k, bias)
    (ours,) = torch.autograd.grad(y.sum(), bias)
    (theirs,) = torch.autograd.grad(SDPA(q, k, k, bias).sum(), bias)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"is_causal": True, "scale": 0.4}], ids=str)
@pytest.mark.parametrize("arch, shared", [("sm_80", 101376), ("sm_90", 232448)])
def test_kernels(arch, shared, options):
    """By the kernels of attention, also of three dimensions and of heads that are shared: values, gradients, and theirs."""
    for q, k, gqa in [((2, 4, 33, 64), (2, 2, 40, 64), True), ((3, 33, 24), (3, 33, 24), False)]:
        given = [torch.randn(shape).half().requires_grad_() for shape in (q, k, k)]
        wide = [x.detach().double().requires_grad_() for x in given]
        with cupyops.simulate(arch), assume_gpu(shared=shared), cupyops.trace() as trace:
            y = cupyops.scaled_dot_product_attention(*given, **options, enable_gqa=gqa)
            grads = torch.autograd.grad(y.sin().sum(), given)
        assert trace.routes() == {"simulator"}
        exact = SDPA(*wide, **options, enable_gqa=gqa)
        for ours, right in zip((y, *grads), (exact, *torch.autograd.grad(exact.sin().sum(), wide)), strict=True):
            assert (ours.double() - right).abs().max() <= 4e-3 * right.abs().max()


MASKS = {  # of (2, 4, 33, 40) scores
    "bool": lambda: (torch.rand(33, 40) > 0.4) & (torch.arange(33) != 3)[:, None],  # query 3 sees no key
    "of keys": lambda: torch.rand(2, 1, 1, 40) > 0.3,
    "of a head, expanded": lambda: (torch.rand(4, 33, 1) > 0.3).expand(-1, -1, 40),
    "one": lambda: torch.ones(1, 1, dtype=torch.bool),
    "summand": lambda: torch.randn(2, 4, 33, 40).half(),
    "summand of -inf": lambda: torch.zeros(1, 33, 40).masked_fill(torch.rand(1, 33, 40) > 0.4, -torch.inf).half(),
    "transposed": lambda: torch.randn(40, 33).half().mT,
    "of a batch": lambda: torch.randn(2, 1, 1, 1).half(),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("arch, shared", [("sm_80", 101376), ("sm_90", 232448)])
def test_masks(arch, shared, name):
    """Masks of bools and of summands, with their gradient, as they lie: by kernels that are compiled for their kind."""
    torch.manual_seed(0)
    mask = MASKS[name]()
    given = [torch.randn(shape).half().requires_grad_() for shape in ((2, 4, 33, 64), (2, 2, 40, 64), (2, 2, 40, 64))]
    if mask.is_floating_point() and not mask.isinf().any():
        mask.requires_grad_()
        given.append(mask)
    wide = [x.detach().double().requires_grad_() for x in given]
    masks = [
        one[3] if len(one) > 3 else mask.to(one[0].dtype) if mask.is_floating_point() else mask for one in (given, wide)
    ]
    with cupyops.simulate(arch), assume_gpu(shared=shared), cupyops.trace() as trace:
        y = cupyops.scaled_dot_product_attention(*given[:3], masks[0], enable_gqa=True)
        grads = torch.autograd.grad(y.sin().sum(), given)
    kernel = "attention_fwd_wgmma_variant" if arch == "sm_90" else "attention_fwd_mma_variant"
    assert kernel in {record.kernel.partition("<")[0] for record in trace.launches()}
    exact = SDPA(*wide[:3], masks[1], enable_gqa=True)
    exact = torch.where(exact.isnan(), 0.0, exact)
    for ours, right in zip((y, *grads), (exact, *torch.autograd.grad(exact.sin().sum(), wide)), strict=True):
        assert (ours.double() - right).abs().max() <= 4e-3 * right.abs().max() + 1e-3 * (ours is grads[-1]), name


@pytest.mark.parametrize(("masked", "options"), [(True, {}), (False, {"is_causal": True})], ids=["mask", "causal"])
def test_second_derivative(masked, options):
    shapes = [(1, 2, 5, 8)] * 3 + [(5, 5)] * masked
    given = [torch.randn(shape).half().requires_grad_() for shape in shapes]
    wide = [x.detach().double().requires_grad_() for x in given]

    def penalty(function, tensors):
        y = function(*tensors, **options)
        return sum(g.square().sum() for g in torch.autograd.grad(y.sin().sum(), tensors, create_graph=True))

    with cupyops.simulate(), cupyops.trace() as trace:
        ours = torch.autograd.grad(penalty(cupyops.scaled_dot_product_attention, given), given)
    assert trace.launches()
    with sdpa_kernel(SDPBackend.MATH):
        exact = torch.autograd.grad(penalty(SDPA, wide), wide)
    for a, b in zip(ours, exact):
        torch.testing.assert_close(a.double(), b, rtol=0.02, atol=0.02)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(key=torch.ones(1, 2, 5, 4)), r"key is a tensor .*expected head_dim 8, the last dimension of query"),
        (dict(value=torch.ones(1, 2, 4, 8)), r"value is a tensor .*expected 5 rows, as many as key has"),
        (dict(query=torch.ones(8)), r"query is a tensor of shape \(8,\).*expected \(..., rows, head_dim\)"),
        (dict(key=torch.ones(1, 2, 5, 8).half()), "key is torch.float16, but query is torch.float32"),
        (dict(attn_mask=torch.ones(5, 5), is_causal=True), "attn_mask is a tensor .*expected None beside is_causal"),
        (dict(attn_mask=[1]), r"attn_mask is \[1\]"),
        (dict(dropout_p=1.5), r"dropout_p is 1.5 .*expected a probability in \[0, 1\]"),
        (dict(key=torch.ones(1, 3, 5, 8), enable_gqa=True), "key has 3 heads, expected a divisor of the 2 of query"),
    ],
    ids=str,
)
def test_bad_arguments(change, message):
    given = {name: torch.ones(1, 2, 5, 8) for name in ("query", "key", "value")} | change
    with pytest.raises(cupyops.InputError, match=message):
        cupyops.scaled_dot_product_attention(**given)


HOPPER = {"capability": 9, "multiprocessors": 132, "shared": 232448, "library": True}


@pytest.mark.parametrize(
    "shape, kv_heads, value_width, causal, taken, taken_with_gradients, taken_in_order",
    [
        ((4, 16, 4096, 128), 16, 128, True, True, True, True),
        ((4, 16, 4096, 128), 16, 128, False, False, False, True),
        ((4, 32, 4096, 64), 32, 64, False, True, True, True),
        ((16, 16, 1024, 128), 16, 128, True, True, True, True),
        ((16, 16, 1024, 128), 4, 128, True, True, True, True),
        ((16, 16, 1024, 96), 16, 96, False, True, True, False),
        ((16, 8, 1024, 256), 2, 256, True, True, True, True),
        ((32, 8, 512, 256), 8, 256, True, False, False, True),
        ((16, 16, 1024, 128), 4, 128, False, False, False, False),
        ((32, 16, 512, 128), 16, 128, False, False, False, True),
        ((16, 32, 1024, 64), 32, 64, False, False, True, True),
        ((4, 16, 4096, 192), 16, 128, True, True, True, True),
        ((16, 16, 1024, 192), 16, 128, True, True, True, True),
        ((4, 16, 4096, 80), 16, 80, True, False, False, False),
        ((128, 12, 197, 64), 12, 64, False, False, True, False),
        ((128, 12, 160, 64), 12, 64, False, False, False, False),
    ],
)
def test_where_kernels_are_taken(shape, kv_heads, value_width, causal, taken, taken_with_gradients, taken_in_order):
    """As measured on an H100, beside cuDNN, or flash attention where a fixed order is asked for."""
    with assume_gpu(**HOPPER):
        card = gpu(torch.device("cpu"))
    batch, heads, rows, width = shape
    shapes = shape, (batch, kv_heads, rows, width), (batch, kv_heads, rows, value_width)
    q, k, v = (torch.empty(one, dtype=torch.bfloat16, device="meta") for one in shapes)

    def are_taken(*given, mask=None, card=card):
        reason = slower(*given, mask, causal, card)
        assert reason is None or isinstance(reason, observed.Faster)
        return reason is None

    assert are_taken(q, k, v) is taken
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    with torch.no_grad():
        assert are_taken(q, k, v) is taken
    for is_in_order, expected in ((False, taken_with_gradients), (True, taken_in_order)):
        torch.use_deterministic_algorithms(is_in_order)
        assert are_taken(q, k, v) is expected
        assert not are_taken(q, k.detach(), v)
    assert not are_taken(q, k, v, mask=q)
    assert are_taken(q, k, v, card=dataclasses.replace(card, library=False))
    assert not are_taken(q, k, v, card=dataclasses.replace(card, capability=8))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("first, room", [(1, 0), (0, 1), (0, 0)])
def test_views_that_begin_anywhere(dtype, first, room):
    """PyTorch's own kernels read beside them, or refuse them; ours and the copies that PyTorch's are given do not."""
    torch.use_deterministic_algorithms(False)
    for width in (16, 64):
        given = [torch.randn(2 * 3 * 33 * (width + room) + 8, device="cuda").to(dtype) for _ in range(3)]
        views = [x[first : -8 + first].view(2, 3, 33, width + room)[..., room:].requires_grad_() for x in given]
        copies = [x.detach().clone(memory_format=torch.contiguous_format).requires_grad_() for x in views]
        expected = SDPA(*copies, is_causal=True)
        wanted = torch.autograd.grad(expected.sin().sum(), copies)
        with cupyops.never_slower():
            for _ in range(4):
                y = cupyops.scaled_dot_product_attention(*views, is_causal=True)
                found = torch.autograd.grad(y.sin().sum(), views)
                for a, b in zip((y, *found), (expected, *wanted)):
                    torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)


@pytest.mark.gpu
def test_addresses_that_change():
    """Calls alike are PyTorch's own where the tensors begin at multiples of 16 bytes, and only there."""
    flat = torch.randn(1000, device="cuda")
    with cupyops.never_slower():
        for first in (0, 0, 0, 0, 1, 2, 1, 0, 1):
            x = flat[first : first + 2 * 8 * 16].view(1, 2, 8, 16)
            y = cupyops.scaled_dot_product_attention(x, x, x)
            torch.testing.assert_close(y, SDPA(x.clone(), x.clone(), x.clone()))


def test_masks_that_pytorch_gets_copies_of():
    """Of those alone whose keys do not lie side by side; what is expanded over batches and heads is there once."""
    x = torch.empty(2, 3, 8, 16, dtype=torch.half, device="meta")
    queries = torch.empty(1, 1, 8, 1, dtype=torch.bool, device="meta")
    for mask, shape in [
        (queries.expand(2, 3, 8, 8), (1, 1, 8, 8)),
        (queries.expand(2, 3, 8, 8)[:, :, :0], (1, 1, 0, 8)),
        (queries.new_empty(2, 1, 8, 8).mT.expand(-1, 3, -1, -1), (2, 1, 8, 8)),
        (queries.new_empty(8, 8).mT, (8, 8)),
    ]:
        copy = kernels.taken_mask(mask)
        assert copy is not mask and copy.shape == shape and copy.is_contiguous()
    for mask in (queries, queries.new_empty(8, 8), queries.new_empty(2, 1, 1, 8).expand(2, 3, 8, 8)):
        assert kernels.taken_mask(mask) is mask
    with assume_gpu(**HOPPER):
        card = dataclasses.replace(gpu(torch.device("cpu")), library=True)
    assert isinstance(slower(x, x, x, mask, False, card), observed.Faster)
    assert not isinstance(slower(x, x, x, mask.mT, False, card), observed.Faster)


@pytest.mark.gpu
def test_a_mask_of_queries_alone_holds_no_scores_in_memory():
    """As transformers makes it while a graph is captured: by PyTorch alone 64 MiB for each array of them."""
    seen = torch.rand(1, 1, 2048, 1, device="cuda") > 0.2
    mask = seen.expand(2, 4, 2048, 2048)
    q, k, v = (torch.randn(2, 4, 2048, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    expected = torch.where(seen, SDPA(q, k, v), 0)
    with cupyops.never_slower():
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            y = cupyops.scaled_dot_product_attention(q, k, v, mask)
            assert torch.cuda.max_memory_allocated() - before < 2**25
            torch.testing.assert_close(torch.where(seen, y, 0), expected, rtol=2e-2, atol=2e-2)
