from dataclasses import replace

import byte_products
import pytest
import torch
from byte_products import HOPPER, by_torch, of_numbers, of_numbers_by_torch, operands, types_of
from contract import Make, OperatorContract, Sample

import cupyops
from cupyops._dispatch.core import gpu as gpus
from cupyops._dispatch.core.gpu import assume_gpu, gpu
from cupyops._dispatch.core.library import ByPyTorch
from cupyops._dispatch.gemm import scaled
from cupyops._dispatch.gemm.scaled import E4M3, E5M2, PAIRS
from cupyops._operator.derivation.public import plans_of

RESULTS = [torch.bfloat16, torch.float16, torch.float32]


class TestScaledMm(OperatorContract):
    function = staticmethod(of_numbers)
    torch_function = staticmethod(of_numbers_by_torch)
    kernels = set()  # apart from Hopper none
    has_backward = False
    differs = {
        (name, backend): reason
        for backend in ("reference", "simulator", "gpu")
        for name, reason in (
            ("opcheck", "PyTorch's own check multiplies tensors of 8-bit numbers, which PyTorch cannot"),
            ("autocast", "scales of half types are an error, as in PyTorch"),
        )
    }

    # on a GPU fast sums are off by 2^-10 of the sum of absolute products, which is below 4 here
    beside_reference = {"rtol": 2**-6, "atol": 2**-8}

    def samples(self, make: Make):
        """Nothing takes a gradient. Results are of the dtype of `make`; on a GPU, which sums in fewer bits, of bfloat16."""
        of = Make(make.device, torch.float32, requires_grad=False)
        out = make.dtype if make.dtype in RESULTS else torch.float32
        out = torch.bfloat16 if make.device.type == "cuda" else out
        for m, k, n, (a, b) in ((5, 16, 7, PAIRS[0]), (40, 24, 33, PAIRS[1]), (1, 8, 16, PAIRS[2])):
            both, types = (of(m, k), of(n, k)), types_of(a, b, out)
            yield Sample(*both, of(low=0.5), of(low=0.5), of(n), types=types)
            yield Sample(*both, of(m, 1, low=0.5), of(1, n, low=0.5), types=types, use_fast_accum=True)


@pytest.mark.parametrize("by_row", [False, True])
@pytest.mark.parametrize("out", [*RESULTS, E4M3, E5M2])
@pytest.mark.parametrize("pair", PAIRS)
def test_as_pytorch_s(pair, out, by_row):
    """PyTorch's own function, which takes all of these on a CPU."""
    given, bias = operands(24, 48, 32, *pair, by_row), torch.randn(32).to(out if out in RESULTS[:2] else torch.bfloat16)
    for more in ({}, {"bias": bias}):
        found, theirs = (f(*given, out_dtype=out, **more) for f in (cupyops.scaled_mm, torch._scaled_mm))
        assert found.dtype is out and found.is_contiguous()
        rounding = max(torch.finfo(out).eps, 2e-5)  # it may scale operands, which rounds them in fp32
        torch.testing.assert_close(found.float(), theirs.float(), rtol=rounding, atol=rounding)


@pytest.mark.parametrize("pair", PAIRS)
def test_the_result_is_by_default_of_the_first_operand_s_dtype(pair):
    given = operands(16, 32, 16, *pair, False)
    assert cupyops.scaled_mm(*given).dtype is pair[0] is torch._scaled_mm(*given).dtype


@pytest.mark.parametrize("simulated", [False, True])
@pytest.mark.parametrize("out", [E4M3, E5M2])
def test_results_of_8_bits(out, simulated):
    """They are scaled, then rounded; the largest number is the limit, and NaN stays."""
    a, b, *scales = operands(20, 48, 24, E4M3, E4M3, True)
    a[3, 5] = torch.nan
    scales[0][7], bias, factor = 1e6, torch.randn(24), torch.tensor([3.0])
    with cupyops.simulate("sm_90"), assume_gpu(**HOPPER if simulated else {}):
        y = cupyops.scaled_mm(a, b, *scales, bias, factor, out)
    assert y[3].isnan().all() and not y[[*range(3), *range(4, 20)]].isnan().any()
    assert (y[7].float().abs() == torch.finfo(out).max).all()
    rest = [row for row in range(20) if row not in (3, 7)]
    truth = by_torch(*(one.double() for one in (a, b, *scales, bias, factor)), out_dtype=out)[rest]
    torch.testing.assert_close(y[rest].double(), truth, rtol=torch.finfo(out).eps, atol=1e-2)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("m", [1, 40, 300])
def test_operands_that_are_views(m, fast):
    """Strided, transposed, of rows that are no whole vectors, off 16-byte boundaries: copied where TMA cannot read them."""
    a, b, *scales = operands(m, 77, 50, E4M3, E5M2, True)
    wide = torch.zeros(m, 200).to(E4M3)
    odd = torch.zeros(50 * 77 + 1).to(E5M2)
    wide[:, 3:157:2], odd[1:].view(50, 77)[:] = a, b.T
    views = [(wide[:, 3:157:2], odd[1:].view(50, 77).T), (a.T.contiguous().T, b.contiguous()), (a[:, :64], b[:64])]
    views.append((wide[:, 16:80], b[:64]))
    for x, y in views:
        with cupyops.simulate("sm_90"), assume_gpu(**HOPPER), cupyops.trace() as trace:
            found = cupyops.scaled_mm(x, y, scales[0].expand(m, 2)[:, :1], scales[1], out_dtype=torch.float32)
        assert [record.route for record in trace.records] == ["simulator"] and trace.launches()
        truth = by_torch(*(one.double() for one in (x, y, *scales)), out_dtype=torch.float32)
        torch.testing.assert_close(found.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 16, 8), (4, 0, 8), (4, 16, 0)])
def test_sizes_of_0(device, shape):
    a, b, *scales = operands(*shape, E4M3, E4M3, False, device)
    y = cupyops.scaled_mm(a, b, *scales, out_dtype=torch.bfloat16)
    assert y.shape == (shape[0], shape[2]) and not y.any()


@pytest.mark.parametrize("where", ["a", "b", "scale_a", "scale_b", "bias"])
def test_nan_and_infinity(where):
    """In the row or column of what is not finite, and nowhere else, whatever form computes it."""
    a, b, *scales = operands(70, 64, 40, E4M3, E5M2, True)
    given = dict(a=a, b=b, scale_a=scales[0], scale_b=scales[1], bias=torch.randn(40))
    given[where].flatten()[0] = torch.nan if where in "ab" else torch.inf
    truth = by_torch(**{name: one.double() for name, one in given.items()}, out_dtype=torch.float32)
    with cupyops.simulate("sm_90"), assume_gpu(**HOPPER):
        for fast in (False, True):
            y = cupyops.scaled_mm(**given, out_dtype=torch.float32, use_fast_accum=fast)
            torch.testing.assert_close(y.double(), truth, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_gradient_is_refused():
    """PyTorch has no derivative of its function either."""
    a, b, scale_a, scale_b = operands(16, 32, 16, E4M3, E4M3, False)
    for name, given in [
        ("scale_b", (a, b, scale_a, scale_b.clone().requires_grad_())),
        ("a", (torch.randn(16, 32, requires_grad=True).to(E4M3), b, scale_a, scale_b)),
        ("bias", (a, b, scale_a, scale_b, torch.ones(16, requires_grad=True))),
    ]:
        with pytest.raises(cupyops.InputError, match=f"{name} requires a gradient, but scaled_mm has no derivative"):
            cupyops.scaled_mm(*given, out_dtype=torch.float32)
        with torch.no_grad():
            assert not cupyops.scaled_mm(*given, out_dtype=torch.float32).requires_grad


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_and_exported(backend):
    given = operands(5, 16, 8, E4M3, E4M3, True)

    def function(*values):
        return cupyops.scaled_mm(*values, out_dtype=torch.float32) + 1

    expected = function(*given)
    compiled = torch.compile(function, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(*given), expected)

    class Model(torch.nn.Module):
        def forward(self, *values):
            return function(*values)

    torch.testing.assert_close(torch.export.export(Model(), given).module()(*given), expected)


def test_vmap():
    """The reference."""
    a, b, *scales = operands(6, 32, 8, E4M3, E4M3, False)
    stacked = torch.stack([a, a.flip(0)])
    found = torch.func.vmap(lambda x: cupyops.scaled_mm(x, b, *scales, out_dtype=torch.float32))(stacked)
    each = [cupyops.scaled_mm(x, b, *scales, out_dtype=torch.float32) for x in stacked]
    torch.testing.assert_close(found, torch.stack(each))


@pytest.mark.parametrize(
    ("size", "pair", "out"),
    [((6, 32, 8), PAIRS[0], torch.bfloat16), ((5, 24, 7), PAIRS[1], torch.float16), ((9, 16, 8), PAIRS[0], E4M3)],
)
def test_calls_alike_are_recorded(monkeypatch, size, pair, out):
    """Operands that are copied, and results that are rounded once more, too; a plan sees new numbers."""
    monkeypatch.setattr(gpus, "_SIMULATED", replace(gpus._SIMULATED, **HOPPER))
    bias, factor = torch.randn(size[2]), torch.tensor(2.0)
    if (before := plans_of(cupyops.scaled_mm)) is not None:
        before.forget()  # what other tests have made it see
    with cupyops.simulate("sm_90"):
        for turn in range(6):
            a, b, *scales = operands(*size, *pair, True)
            given = a.roll(turn, 0), b, *(one * (turn + 1) for one in scales), bias, factor
            y = cupyops.scaled_mm(*given, out_dtype=out)
            truth = by_torch(*(one.double() for one in given), out_dtype=out)
            torch.testing.assert_close(y.double(), truth, rtol=torch.finfo(out).eps, atol=1e-2)
    plans = plans_of(cupyops.scaled_mm)
    assert any(plans.table[size[:2]]) and not plans.reason
    plans.forget()


@pytest.mark.parametrize("by_row", [False, True])
def test_on_the_device_meta(by_row):
    """Which has no autocast."""
    given = operands(6, 32, 16, E4M3, E4M3, by_row, "cpu")
    y, known = (
        cupyops.scaled_mm(*[one.to(device) for one in given], out_dtype=torch.float32) for device in ("meta", "cpu")
    )
    assert y.is_meta and (y.shape, y.dtype, y.stride()) == (known.shape, known.dtype, known.stride())


def test_autocast_changes_nothing():
    given = operands(16, 32, 16, E4M3, E5M2, False)
    expected = cupyops.scaled_mm(*given, out_dtype=torch.float32)
    with torch.autocast("cpu"):
        assert torch.equal(cupyops.scaled_mm(*given, out_dtype=torch.float32), expected)


def test_which_form():
    """PyTorch's where it may be taken and nothing is measured; what PyTorch does not take is computed by kernels."""
    a, b, *_ = operands(64, 4096, 4096, E4M3, E4M3, False)
    cpu = torch.device("cpu")

    def chosen(rows, by_row=True, fast=False, out=torch.bfloat16, why=""):
        problem = scaled.problem_of(a[:1].expand(rows, -1), b, by_row, out, fast, why)
        with assume_gpu(capability=9, shared=232448, multiprocessors=132, library=True):
            return scaled.PRODUCT.choose(problem, gpu(cpu))

    assert chosen(64).name == chosen(1, fast=True).name == "wgmma_64x64"
    assert chosen(128).name == chosen(256, fast=True).name == "wgmma_64x128"
    assert chosen(4096).name == "wgmma_256x128" and chosen(4096, why="of another dtype", by_row=False).name[0] == "w"
    for other in (chosen(4096, by_row=False), chosen(4096, out=torch.float32), chosen(384), chosen(4096, fast=True)):
        assert isinstance(other, ByPyTorch)


def test_pytorch_is_not_given_what_it_takes_otherwise():
    """Not a scale of the result, which it divides by on a CPU and leaves out on a GPU; on a CPU it is never asked."""
    a, b, *_ = operands(16, 32, 16, E4M3, E4M3, False)
    assert "compute capability" in scaled.why_not_pytorch(a, b, False, None, None, torch.bfloat16)


def test_bad_input(device):
    a, b, *scales = operands(4, 16, 5, E4M3, E4M3, False, device)
    rows = torch.ones(4, 1, device=device), torch.ones(1, 5, device=device)
    half = torch.ones(5, device=device).double()
    for args, more, words in [
        (
            (a.float(), b, *scales),
            {},
            "a is a tensor .*float32.*, expected 2 dimensions and float8_e4m3fn or float8_e5m2",
        ),
        ((a[0], b, *scales), {}, "a is a tensor of shape .* expected 2 dimensions"),
        ((a, b.T, *scales), {}, r"b has shape \(5, 16\), expected \(16, n\) to fit a of shape \(4, 16\)"),
        ((a.to(E5M2), b.to(E5M2), *scales), {}, "a and b are both float8_e5m2, expected float8_e4m3fn of one"),
        ((a, b, rows[0], scales[1]), {}, r"scale_b is .*, of one element as the other scale, or of shape \(1, 5\)"),
        ((a, b, rows[0][:3], rows[1]), {}, r"scale_a is .*\(3, 1\).*, or of shape \(4, 1\)"),
        ((a, b, rows[0], rows[1].T), {}, r"scale_b is .*\(5, 1\).*, or of shape \(1, 5\)"),
        ((a, b, scales[0].half(), scales[1]), {}, "scale_a is .*float16.*, expected float32"),
        ((a, b, 1.0, scales[1]), {}, "scale_a is 1.0"),
        (
            (a, b, *scales),
            {"bias": half},
            r"bias is .*float64.*, expected shape \(5,\) and float16, bfloat16 or float32",
        ),
        ((a, b, *scales), {"bias": half[:4].float()}, r"bias is .*\(4,\).*, expected shape \(5,\)"),
        ((a, b, *scales), {"scale_result": rows[0]}, "scale_result is .*, expected float32 of one element"),
        ((a, b, *scales), {"out_dtype": torch.float64}, "out_dtype is torch.float64 .*, expected one of"),
        ((a, b, *scales), {"use_fast_accum": 2}, "use_fast_accum is 2"),
    ]:
        with pytest.raises(cupyops.InputError, match=words):
            cupyops.scaled_mm(*args, **more)


def _needs_hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("wgmma is of compute capability 9.0")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", RESULTS)
def test_on_hopper(dtype):
    """As tests/simulator has them."""
    _needs_hopper()
    with cupyops.trace() as trace:
        for call in byte_products.calls(dtype, "cuda"):
            call()
    assert {launch.kernel.partition("<")[0] for launch in trace.launches()} == {"scaled_mm_wgmma"}


@pytest.mark.gpu
@pytest.mark.parametrize("fast", [False, True])
def test_many_tiles_of_each_block(fast):
    """Twice the same bits, beside PyTorch's own function, whose sums are as exact."""
    _needs_hopper()
    a, b, *scales = operands(4000, 2064, 2064, E4M3, E4M3, True, "cuda")
    truth = by_torch(*(one.double() for one in (a, b, *scales)), out_dtype=torch.bfloat16)
    theirs = torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16, use_fast_accum=fast)
    for form in scaled.TILES:
        if form.split > 1:
            continue
        with cupyops.use_form(f"scaled_mm:{form.name}"):
            found = [cupyops.scaled_mm(a, b, *scales, out_dtype=torch.bfloat16, use_fast_accum=fast) for _ in range(2)]
        assert torch.equal(*found)
        ours, known = ((y.double() - truth).norm() for y in (found[0], theirs))
        assert ours <= 1.05 * known, (form.name, ours, known)


@pytest.mark.gpu
def test_in_a_cuda_graph():
    _needs_hopper()
    a, b, *scales = operands(96, 144, 80, E4M3, E4M3, True, "cuda")
    cupyops.scaled_mm(a, b, *scales, out_dtype=torch.bfloat16)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = cupyops.scaled_mm(a, b, *scales, out_dtype=torch.bfloat16)
    for factor in (1.0, 2.0):
        scales[0].mul_(factor)
        graph.replay()
        truth = by_torch(*(one.double() for one in (a, b, *scales)), out_dtype=torch.bfloat16)
        torch.testing.assert_close(y.double(), truth, rtol=2**-7, atol=2e-2)
