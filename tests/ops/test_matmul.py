import gemms
import pytest
import torch
from contract import Make, OperatorContract, Sample, misaligned

import cupyops
from cupyops._dispatch.core.gpu import gpu
from cupyops._dispatch.gemm import gemm
from cupyops.ops import _matmul

# Errors allowed, in units in the last place of the largest result: 16-bit results are rounded once; the sum of some
# hundred products in fp32 or fp64 has errors of its own.
UNITS = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 8, torch.float64: 8}


class TestMatmul(OperatorContract):
    function = staticmethod(cupyops.matmul)
    torch_function = staticmethod(torch.matmul)
    kernels = {"gemm_fwd", "gemm_sum"}

    def samples(self, make: Make):
        yield from self.small_samples(make)
        yield Sample(make(70, 33), make(33, 129))  # several tiles, tails in every direction
        yield Sample(make(3, 300), make(300, 5))  # k split
        yield Sample(make(16, 32), make(32, 24))  # whole vectors
        yield Sample(make(2, 1, 3, 4, 5), make(1, 2, 1, 5, 2))  # batches broadcast in turns
        yield Sample(make(2, 1, 3, 4), make(5, 4, 2))
        yield Sample(make(1, 1), make(1, 1))

    def small_samples(self, make: Make):
        yield Sample(make(3, 4), make(4, 5))
        yield Sample(make(3), make(3))
        yield Sample(make(2, 3, 4), make(4))
        yield Sample(make(4), make(2, 4, 3))
        yield Sample(make(2, 2, 3), make(3, 2))
        yield Sample(make(2, 3), make(2, 3, 2))
        yield Sample(make(2, 2, 3), make(2, 3, 2))


# Rows contiguous, columns contiguous, neither.
ORDERS = [lambda t: t, lambda t: t.mT.contiguous().mT, lambda t: t.repeat_interleave(2, -1)[..., ::2]]


@pytest.mark.parametrize("tile", gemm.TILES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_tile_and_every_order(device, dtype, tile):
    """Every tile; A and B with rows or columns contiguous, or neither; aligned and not."""
    for m, k, n in [(136, 40, 72), (5, 37, 131)]:
        for order_a in ORDERS:
            for order_b in ORDERS:
                a = order_a(torch.randn(m, k, dtype=dtype, device=device))
                b = order_b(torch.randn(k, n, dtype=dtype, device=device))
                exact = a.double() @ b.double()
                with gemms.tiled("matmul", dtype, tile):
                    error = (cupyops.matmul(a, b).double() - exact).abs().max()
                assert error <= UNITS[dtype] * torch.finfo(dtype).eps * exact.abs().max(), (m, k, n, error)


def test_special_values(device):
    a = torch.tensor([[float("nan"), 1.0], [float("inf"), 0.0], [0.0, -1.0], [3.0, 4.0]], device=device)
    b = torch.tensor([[1.0, 0.0, -1.0], [2.0, -2.0, 0.5]], device=device)
    torch.testing.assert_close(cupyops.matmul(a, b), torch.matmul(a, b), rtol=0, atol=0, equal_nan=True)


def test_one_element_repeated(device):
    """Operands of stride 0."""
    a = torch.randn(1, 1, device=device).expand(5, 40)
    b = torch.randn(1, 7, device=device).expand(40, 7)
    torch.testing.assert_close(cupyops.matmul(a, b), torch.matmul(a, b))


def test_long_batch(device):
    """More matrices than a grid has blocks in y."""
    a, b = torch.randn(70000 if device.type == "cuda" else 70, 1, 2, device=device), torch.randn(2, 2, device=device)
    b = b.expand(a.shape[0], 2, 2)
    torch.testing.assert_close(cupyops.matmul(a, b), torch.matmul(a, b))


def test_other_dtypes_are_pytorch_s():
    a = torch.arange(6).view(2, 3)
    assert torch.equal(cupyops.matmul(a, a.T), torch.matmul(a, a.T))
    c = torch.randn(2, 3, dtype=torch.complex64)
    assert torch.equal(cupyops.matmul(c, c.mH), torch.matmul(c, c.mH))


def test_bad_input(device):
    a = torch.randn(3, 4, device=device)
    for wrong, words in [
        (torch.randn(3, 4), r"other has shape \(3, 4\).*\(3, 4\)"),
        (torch.randn(5), r"other has shape \(5,\), expected \(4,\)"),
        (torch.tensor(1.0), "other is .* at least 1 dimension"),
        (torch.randn(4, 3).double(), "other is torch.float64"),
    ]:
        with pytest.raises(cupyops.InputError, match=words):
            cupyops.matmul(a, wrong.to(device))
    with pytest.raises(cupyops.InputError, match="batch dimensions"):
        cupyops.matmul(torch.randn(2, 3, 4, device=device), torch.randn(3, 4, 2, device=device))
    with pytest.raises(cupyops.InputError, match="other"):
        cupyops.matmul(a, 2.0)
    with torch.autocast(device.type, dtype=torch.bfloat16), pytest.raises(cupyops.InputError, match="torch.float64"):
        cupyops.matmul(a, torch.randn(4, 3, device=device).double())


def test_mixed_dtypes_under_autocast(device):
    a, b = torch.randn(3, 4, device=device), torch.randn(4, 2, device=device, dtype=torch.bfloat16)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert torch.equal(cupyops.matmul(a, b), torch.matmul(a, b))


def test_divisors_are_exact():
    """umulhi and a shift, as the kernels divide, against Python's own division."""
    for value in [1, 2, 3, 7, 9, 64, 641, 784, 2**16 + 1, 2**30, 2**31 - 1]:
        d, magic, shift = gemm.divisor(value)
        for n in [0, 1, value - 1, value, value + 1, 2 * value - 1, 2**31 - 1, *range(0, 2**31, 2**31 // 97)]:
            if 0 <= n < 2**31:
                assert (((n * magic) >> 32) + n) >> shift == n // d, (n, value)


def test_small_problems_are_split_and_large_ones_are_not():
    fp32, bf16 = torch.float32, torch.bfloat16
    assert gemm.choose(32, 10, 64, 1, gemm.TILES, fp32, 132)[1] == 1
    tile, splits, share = gemm.choose(32, 10, 50176, 1, gemm.TILES, fp32, 132)
    assert tile < 128 and splits > 100 and splits * share >= 50176 > (splits - 1) * share
    assert gemm.choose(4096, 4096, 4096, 1, gemm.TILES, fp32, 132)[:2] == (128, 1)
    assert gemm.choose(4096, 4096, 4096, 1, gemms.ALL, bf16, 132)[:2] == (gemm.WIDE, 1)
    assert gemm.choose(4096, 4096, 4096, 1, gemm.TILES, bf16, 132)[:2] == (128, 1)
    assert gemm.choose(64, 10, 256, 1, gemms.ALL, bf16, 132)[1] == 1


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("change", [lambda t: t, misaligned])
@pytest.mark.parametrize("where", [pytest.param("cuda", marks=pytest.mark.gpu), "simulator"])
def test_wide_tile(where, change, order):
    """Whole vectors apart; one element past a 16-byte boundary they are copied, since the wide tile reads vectors alone."""
    device = "cpu" if where == "simulator" else where
    a, b = (change(ORDERS[order](torch.randn(shape, device=device).half())) for shape in ((136, 72), (72, 264)))
    exact = a.double() @ b.double()
    runs = cupyops.simulate() if where == "simulator" else torch.enable_grad()
    with runs, gemms.tiled("matmul", torch.float16, gemm.WIDE):
        error = (cupyops.matmul(a, b).double() - exact).abs().max()
    assert error <= 2 * torch.finfo(torch.float16).eps * exact.abs().max()


def test_odd_rows_are_copied_where_that_pays(device):
    """Rows of an odd length, in either order, and operands of no contiguous dimension."""
    for order_a in ORDERS:
        for order_b in ORDERS:
            a, b = order_a(torch.randn(431, 397, device=device)), order_b(torch.randn(397, 429, device=device))
            exact = a.double() @ b.double()
            error = (cupyops.matmul(a, b).double() - exact).abs().max()
            assert error <= UNITS[torch.float32] * torch.finfo(torch.float32).eps * exact.abs().max()
            problem = _matmul._problem(a.shape, a.stride(), b.shape, b.stride(), a.dtype)
            assert problem.worth_padding == (True, True)
            copies = gemm.prepared(problem, _matmul.PRODUCT.launch(problem, gpu(device)), a, b)
            for copy, of in zip(copies, (a, b)):
                assert torch.equal(copy, of) and cupyops.aligned(copy) and max(copy.stride()) % 4 == 0


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("form, layout", gemms.WGMMA, ids=lambda one: getattr(one, "name", None))
def test_every_form_on_hopper(form, layout, dtype):
    """As tests/simulator has them."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wgmma is of compute capability 9.0")
    gemms.compare_wgmma(form, layout, dtype, "cuda")
