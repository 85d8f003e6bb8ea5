"""Products of few rows, whatever their size: chosen by name, or by what is chosen where nobody asks."""

from contextlib import contextmanager

import few_rows_calls
import pytest
import torch
from torch.nn import functional as F

import cupyops
from cupyops._dispatch.core.gpu import assume_gpu, gpu
from cupyops._dispatch.gemm import epilogues, few_rows, linear
from cupyops.ops import _matmul

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
HOPPER = {"capability": 9, "multiprocessors": 132, "shared": 232448}


@contextmanager
def asked(device, operator="linear", arch="sm_90", seed=None, **card):
    """Calls inside take few rows, on the CPU in the simulator."""
    with few_rows_calls.asked(device, operator, **card):
        if device.type == "cuda":
            yield
        else:
            with cupyops.simulate(arch, seed=seed):
                yield


def numbers(device, dtype, *shapes):
    """Normal values, those of a weight so scaled that products are near 1."""
    torch.manual_seed(0)
    made = [torch.randn(shape, device=device) for shape in shapes]
    return [(t / t.shape[-1] ** 0.5 if i == 1 else t).to(dtype) for i, t in enumerate(made)]


def assert_close(y, x, weight, bias=None):
    """The error is at most twice PyTorch's own, or what rounding the result once makes of it."""
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    own, of_pytorch = ((one.double() - exact).abs().max() for one in (y, F.linear(x, weight, bias)))
    assert own <= 2 * max(of_pytorch, exact.abs().max() * torch.finfo(x.dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 9, 16, 17, 31, 32, 33, 64])
def test_rows(device, dtype, rows):
    """Columns and k that fill no tile and no step."""
    x, weight, bias = numbers(device, dtype, (rows, 328), (75, 328), (75,))
    with asked(device), cupyops.trace() as trace:
        y = cupyops.linear(x, weight, bias)
    (launch,) = trace.launches()
    assert launch.kernel.startswith("few_rows_fma<" if dtype is torch.float32 else "few_rows_mma<")
    assert_close(y, x, weight, bias)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, k", [(1, 8), (32, 16), (33, 24), (65, 1032), (200, 64)])
def test_sizes(device, dtype, n, k):
    x, weight = numbers(device, dtype, (3, k), (n, k))
    with asked(device):
        assert_close(cupyops.linear(x, weight), x, weight)


def test_k_of_one_vector_of_float32(device):
    x, weight = numbers(device, torch.float32, (3, 4), (5, 4))
    with asked(device):
        assert_close(cupyops.linear(x, weight), x, weight)


@pytest.mark.parametrize("dtype, k", [(torch.bfloat16, 4104), (torch.float32, 2052)])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_clusters(dtype, k, rows):
    """Two blocks share the k of a tile where that is long and tiles are few."""
    x, weight, bias = numbers("cpu", dtype, (rows, k), (40, k), (40,))
    with asked(x.device, multiprocessors=16), cupyops.trace() as trace:
        y = cupyops.linear(x, weight, bias)
    groups = -(-rows // 8) if dtype is torch.float32 else 1
    assert trace.launches()[0].grid[0] == 2 * 2 * groups
    assert_close(y, x, weight, bias)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_without_clusters(dtype):
    x, weight = numbers("cpu", dtype, (5, 4104), (64, 4104))
    with asked(x.device, arch="sm_80"), cupyops.trace() as trace:
        y = cupyops.linear(x, weight)
    assert trace.launches()[0].grid[0] == 2
    assert_close(y, x, weight)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_instance_and_what_follows(device, dtype):
    """Activations, residuals and gates, forward and backward."""
    for call in few_rows_calls.calls(dtype, device.type):
        with cupyops.simulate("sm_90") if device.type == "cpu" else cupyops.never_slower(False):
            call()


@pytest.mark.parametrize("dtype", DTYPES)
def test_special_values_stay_in_their_rows_and_columns(device, dtype):
    x, weight, bias = numbers(device, dtype, (5, 136), (40, 136), (40,))
    x[1, 3], x[2, 130], x[4, 0] = float("nan"), float("inf"), -0.0
    weight[7, 135], weight[9, 5], bias[11], bias[12] = float("inf"), float("nan"), float("-inf"), float("nan")
    expected = F.linear(x.double(), weight.double(), bias.double()).to(dtype)
    with asked(device):
        y = cupyops.linear(x, weight, bias)
    finite = expected.isfinite()
    assert torch.equal(y.isnan(), expected.isnan()) and torch.equal(
        y[~finite].nan_to_num(), expected[~finite].nan_to_num()
    )
    torch.testing.assert_close(y[finite], expected[finite])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_views(device, dtype):
    """Rows that are longer than what is read of them, and operands that begin off a 16-byte boundary, which are copied."""
    wide_x, wide = numbers(device, dtype, (6, 80), (70, 96))
    x, weight = wide_x[::2, 8:72], wide[::2, 16:80]
    with asked(device):
        assert_close(cupyops.linear(x, weight), x, weight)
    flat_x, flat = numbers(device, dtype, (3 * 64 + 1,), (35 * 64 + 1,))
    x, weight = flat_x[1:].view(3, 64), flat[1:].view(35, 64)
    with asked(device):
        assert_close(cupyops.linear(x, weight), x, weight)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_in_any_order(dtype):
    x, weight, bias = numbers("cpu", dtype, (9, 712), (40, 712), (40,))
    found = []
    for seed in (None, 1, 2):
        with asked(x.device, seed=seed):
            found.append(cupyops.linear(x, weight, bias))
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [(), (1, 1)])
def test_matmul(device, dtype, batch):
    """Columns that are contiguous, as of a transposed weight."""
    x, weight = numbers(device, dtype, (*batch, 5, 72), (70, 72))
    with asked(device, "matmul"), cupyops.trace() as trace:
        y = cupyops.matmul(x, weight.T.expand(*batch, 72, 70))
    assert trace.launches()[0].kernel.startswith("few_rows")
    assert_close(y, x, weight)


REFUSED = [
    ((65, 64), (8, 64), torch.float16, "more than 64 rows"),
    ((3, 12), (8, 12), torch.float16, "whole vectors"),
    ((3, 6), (8, 6), torch.float32, "whole vectors"),
    ((3, 64), (8, 64), torch.float64, "not for torch.float64"),
]


@pytest.mark.parametrize("of_x, of_weight, dtype, words", REFUSED)
def test_what_it_refuses(of_x, of_weight, dtype, words):
    x, weight = numbers("cpu", dtype, of_x, of_weight)
    with asked(x.device), pytest.raises(cupyops.InputError, match=words):
        cupyops.linear(x, weight)


def test_what_else_it_refuses():
    """Weights and rows along which vectors do not run, and GPUs before Ampere."""
    x, weight = numbers("cpu", torch.float16, (3, 64), (8, 64))
    for one in ((x, weight.T.contiguous().T), (x.T.contiguous().T, weight)):
        with asked(x.device), pytest.raises(cupyops.InputError, match="must be contiguous, and whole vectors"):
            cupyops.linear(*one)
    with asked(x.device, capability=7), pytest.raises(cupyops.InputError, match="of compute capability 8.0"):
        cupyops.linear(x, weight)


@pytest.fixture
def of_any_size(monkeypatch):
    """Weights of any size are multiplied by these kernels where nobody asks for a form."""
    lists = linear.PRODUCT, epilogues.LINEAR_ACT, epilogues.GATED_LINEAR

    def forget():
        for forms in lists:
            forms._chosen.cache_clear(), forms._launches.cache_clear()

    monkeypatch.setattr(few_rows, "LEAST_WEIGHT", 0)
    forget()
    yield
    forget()


def test_a_plan_is_recorded(of_any_size, monkeypatch):
    """The author's Python runs for the first three of calls alike; a plan repeats them."""
    counted = []
    run = few_rows.run
    monkeypatch.setattr(few_rows, "run", lambda *args: counted.append(1) or run(*args))
    _, weight, bias = numbers("cpu", torch.float16, (3, 104), (43, 104), (43,))
    with cupyops.simulate("sm_90"):
        for _ in range(6):
            x = torch.randn(3, 104).half()
            assert_close(cupyops.linear(x, weight, bias), x, weight, bias)
    assert len(counted) == 3


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["linear", "linear_act", "gated_linear"])
def test_hazards(of_any_size, operator):
    x, weight, bias = (t.requires_grad_() for t in numbers("cpu", torch.float32, (3, 40), (34, 40), (34,)))
    given = {"linear": [x, weight, bias], "linear_act": [x, weight, bias, "silu"], "gated_linear": [x, weight]}
    with cupyops.simulate("sm_90"), cupyops.trace() as trace:
        getattr(cupyops, operator)(*given[operator])
    assert trace.launches()[0].kernel.startswith("few_rows_fma<")
    cupyops.testing.check(getattr(cupyops, operator), given[operator]).raise_if_failed()


def chosen(forms, m, n, k, dtype, **card):
    problem = linear.problem((m, k), (k, 1), False, (n, k), (k, 1), True, False, dtype)
    with assume_gpu(**{**HOPPER, "library": True, **card}):
        return forms.choose(problem, gpu(torch.device("cpu"))).name


@pytest.mark.parametrize("forms", [linear.PRODUCT, _matmul.PRODUCT, epilogues.LINEAR_ACT])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_chosen(forms, dtype):
    """The rows that are measured beside cuBLAS take the form; without PyTorch's products, all that it has kernels for."""
    most = 8 if dtype is torch.float32 else 16
    assert {chosen(forms, rows, 2048, 2048, dtype) for rows in (1, most)} == {"few_rows"}
    assert chosen(forms, most + 1, 2048, 2048, dtype) != "few_rows"
    assert chosen(forms, 1, 128256, 2048, dtype) != "few_rows"
    assert chosen(forms, 1, 256, 256, dtype) != "few_rows"
    assert chosen(forms, 1, 2048, 2048, dtype, capability=7) != "few_rows"
    assert chosen(forms, 64, 2048, 2048, dtype, library=False) == "few_rows"
    assert chosen(forms, 65, 2048, 2048, dtype, library=False) != "few_rows"


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_chosen_of_gates(dtype):
    most = 8 if dtype is torch.float32 else 16
    assert chosen(epilogues.GATED_LINEAR, most, 8192, 2048, dtype) == "few_rows"
    assert chosen(epilogues.GATED_LINEAR, most + 1, 8192, 2048, dtype) != "few_rows"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shared", [101376, 166912, 232448])
def test_shared_memory_of_every_card(dtype, shared):
    """The smallest is Ada's, the largest Hopper's."""
    with assume_gpu(**HOPPER | {"shared": shared}):
        card = gpu(torch.device("cpu"))
        for rows in (1, 9, 17, 33):
            for gated in (False, True):
                assert few_rows.launch_of(rows, (64,), 8192, dtype, card, gated).shared <= shared
