import contextlib

import pytest
import torch
from contract import Make, OperatorContract, Sample
from plan_samples import counted, plainly, warm
from quantized_layers import KINDS, by_torch, linear, stored

import cupyops
from cupyops._dispatch.core.gpu import assume_gpu, gpu
from cupyops._dispatch.core.library import ByPyTorch
from cupyops._dispatch.gemm import quantized

HALF = [torch.float16, torch.bfloat16]
STORED = {"int8": torch.int8, "float8_e4m3fn": torch.float8_e4m3fn, "uint4": torch.uint8}


class TestQuantizedLinear(OperatorContract):
    function = staticmethod(linear)
    torch_function = staticmethod(by_torch)
    kernels = {"quantized_linear_fwd"}
    dtypes = HALF
    has_backward = False
    too_large = "it is too large"
    # the kernel rounds no weight, as the reference does
    beside_reference = {"rtol": 2**-6, "atol": 2**-5}

    def samples(self, make: Make):
        """Each kind of number, in each width in which lanes read it, for each number of tiles of rows."""
        for kind in KINDS:
            for rows in (3, 11, 35):
                yield self.sample(make, rows, 288, 19, 1, kind)  # a rest of a step
                yield self.sample(make, rows, 256, 16, 4 if kind == "uint4" else 8, kind, shifted=True)
                yield self.sample(make, rows, 8, 5, 1, kind, shifted=True)
            yield self.sample(make, 2, 1024, 33, 4, kind)
        yield self.sample(make, 5, 96, 7, 3, "uint4", shifted=True)

    def small_samples(self, make: Make):
        yield self.sample(make, 3, 64, 5, 2, "uint4", shifted=True)
        yield self.sample(make, 2, 32, 7, 1, "int8", shifted=True)

    def sample(self, make: Make, rows: int, k: int, n: int, groups: int, kind: str, shifted: bool = False) -> Sample:
        scale, zero_point = make(n, groups, low=0.05, high=0.1), make(n, groups) if shifted else None
        return Sample(make(rows, k), make.integers(n, k, high=256), scale, zero_point, make(n), kind=kind)


def operands(rows, k, n, groups, kind, dtype=torch.bfloat16, of_scales=torch.float32, shifted=True):
    """x, integers from 0 to 255, scales, zero points and a bias."""
    make = Make("cpu", dtype, requires_grad=False)
    factors = [make(n, groups, low=0.05, high=0.1), make(n, groups)]
    scale, zero_point = (one.to(of_scales) for one in factors)
    return make(rows, k), make.integers(n, k, high=256), scale, zero_point if shifted else None, make(n)


def errors(y, given, kind):
    """Of y and of PyTorch's layer, each beside float64: the norms of what they are off by."""
    wide = [one.double() if one is not None and one.is_floating_point() else one for one in given]
    truth = by_torch(*wide, kind=kind)
    return (y.double() - truth).norm(), (by_torch(*given, kind=kind).double() - truth).norm()


@pytest.mark.parametrize("rows", [1, 8, 9, 17, 32, 33, 64, 65, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_rows(kind, rows):
    """Also of three dimensions; with more rows than a block takes, another block has them."""
    given = operands(rows, 96, 21, 3, kind)
    with cupyops.simulate("sm_90"), cupyops.trace() as trace:
        y = linear(*given, kind=kind)
        again = linear(given[0].view(1, rows, 96), *given[1:], kind=kind)
    assert trace.routes() == {"simulator"}
    ours, theirs = errors(y, given, kind)
    assert ours <= theirs
    assert torch.equal(again, y[None])


@pytest.mark.parametrize("groups", [1, 3])
@pytest.mark.parametrize("kind", ["int8", "uint4"])
def test_infinities_beside_zero_points(kind, groups, device):
    """Infinite times a number less its zero point: infinite of either sign, and NaN where these are equal."""
    x, weight, scale, zero_point, bias = (one.to(device) for one in operands(5, 192, 21, groups, kind))
    x[1, 5], x[2, 100], x[3, 7], x[3, 190] = torch.inf, -torch.inf, torch.inf, torch.inf
    given = x, weight, scale, zero_point.round(), bias
    with cupyops.simulate("sm_90") if device.type == "cpu" else contextlib.nullcontext():
        y = linear(*given, kind=kind)
    expected = by_torch(*given, kind=kind)
    assert torch.equal(y[1:4].nan_to_num(7.0, 8.0, 9.0), expected[1:4].nan_to_num(7.0, 8.0, 9.0))
    assert y[[0, 4]].isfinite().all()


@pytest.mark.parametrize("of_scales", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", HALF)
def test_scales_of_any_dtype(dtype, of_scales):
    given = list(operands(4, 128, 17, 4, "uint4", dtype, of_scales))
    given[2:4] = (one.repeat_interleave(2, 1)[:, ::2] for one in given[2:4])  # strides, as a cast does not keep them
    with cupyops.simulate("sm_90"), cupyops.trace() as trace:
        y = linear(*given, kind="uint4")
    assert trace.routes() == {"simulator"}
    ours, theirs = errors(y, given, "uint4")
    assert ours <= theirs


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90"])
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_that_can_be_stored(kind, dtype, arch):
    """Times 1, one at a time: each is what it is, NaN and negative zero among them."""
    count = 16 if kind == "uint4" else 256
    weight = torch.arange(count, dtype=torch.uint8)
    exact = weight.double() - 8 if kind == "uint4" else weight.view(STORED[kind]).double()
    x, scale = torch.eye(count, dtype=dtype), torch.ones(1)
    weight = weight[::2] + 16 * weight[1::2] if kind == "uint4" else weight.view(STORED[kind])
    if kind == "float8_e4m3fn":  # times 0 they are NaN everywhere
        x, weight, exact = x[~exact.isnan()][:, ~exact.isnan()], weight[~exact.isnan()], exact[~exact.isnan()]
        x, weight = (
            torch.nn.functional.pad(x, (0, 2)),
            torch.nn.functional.pad(weight.view(torch.uint8), (0, 2)).view(weight.dtype),
        )
    with cupyops.simulate(arch), cupyops.trace() as trace:
        y = cupyops.quantized_linear(x, weight[None], scale)
    assert trace.routes() == {"simulator"}
    assert torch.equal(y[:, 0].double(), exact)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize(
    ("kind", "where"),
    [*((kind, where) for kind in KINDS for where in ("x", "scale", "zero_point", "bias")), ("float8_e4m3fn", "weight")],
)
def test_nan_and_infinity(kind, where, arch):
    """In the row or column of what is not finite, and nowhere else."""
    given = dict(zip(("x", "weight", "scale", "zero_point", "bias"), operands(9, 64, 18, 2, kind)))
    weight = stored(given["weight"], kind)
    if where == "weight":
        weight.view(torch.uint8)[3, 5] = 0xFF
    else:
        given[where].view(-1)[0] = torch.inf if where == "bias" else torch.nan
    with cupyops.simulate(arch), cupyops.trace() as trace:
        y = cupyops.quantized_linear(given["x"], weight, given["scale"], given["zero_point"], given["bias"])
    assert trace.routes() == {"simulator"}
    expected = torch.zeros(9, 18, dtype=torch.bool)
    expected[(0,) if where == "x" else (slice(None), 3 if where == "weight" else 0)] = True
    assert torch.equal(~y.isfinite(), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind):
    """Those of PyTorch, of all but the weight, whatever computes the result."""
    x, weight, scale, zero_point, bias = operands(5, 64, 7, 2, kind, torch.float32)
    leaves = [one.requires_grad_() for one in (x, scale, zero_point, bias)]
    grad = torch.randn(5, 7)
    ours = torch.autograd.grad(linear(x, weight, scale, zero_point, bias, kind=kind), leaves, grad)
    wide = [one.detach().double().requires_grad_() for one in leaves]
    truth = torch.autograd.grad(by_torch(wide[0], weight, *wide[1:], kind=kind), wide, grad.double())
    for one, other in zip(ours, truth):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)
    half = [one.detach().bfloat16().requires_grad_() for one in (x, bias)]
    with cupyops.simulate("sm_90"):
        y = linear(half[0], weight, scale.detach(), zero_point.detach(), half[1], kind=kind)
    found = torch.autograd.grad(y, half, grad.bfloat16())
    for one, other in zip(found, (truth[0], truth[3])):
        torch.testing.assert_close(one.double(), other, rtol=2**-6, atol=2**-4)


def test_forms_of_scales():
    """One number, one for each row in one dimension or in two, and strides of any kind, are not copied for the kernel."""
    x, weight, scale, _, _ = operands(3, 128, 16, 4, "int8")
    with cupyops.simulate("sm_90"), cupyops.trace() as trace:
        one = [
            linear(x, weight, s, kind="int8") for s in (torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([[0.5]]))
        ]
        rows = [linear(x, weight, s, kind="int8") for s in (scale[:, 0], scale[:, :1], scale[:, :1].clone())]
        groups = [linear(x, weight, s, kind="int8") for s in (scale, scale.t().contiguous().t())]
    assert trace.routes() == {"simulator"}
    for found in (one, rows, groups):
        assert all(torch.equal(found[0], other) for other in found)
    torch.testing.assert_close(one[0], by_torch(x, weight, torch.full((16, 1), 0.5), kind="int8"))


def test_weights_that_are_views():
    """Rows further apart, off 16-byte boundaries, or not contiguous: by the kernel where it can read them."""
    x, weight, scale, _, _ = operands(3, 64, 12, 1, "int8", shifted=False)
    own = stored(weight, "int8")
    wide, odd = torch.zeros(12, 80, dtype=torch.int8), torch.zeros(12 * 64 + 8, dtype=torch.int8)
    wide[:, 16:], odd[8:] = own, own.flatten()
    given = x, weight, scale, None, None
    for view, route in (
        (wide[:, 16:], "simulator"),
        (odd[8:].view(12, 64), "simulator"),
        (own.t().contiguous().t(), "reference"),
    ):
        assert torch.equal(view, own)
        with cupyops.simulate("sm_90"), cupyops.trace() as trace:
            y = cupyops.quantized_linear(x, view, scale)
        assert trace.routes() == {route}
        ours, theirs = errors(y, given, "int8")
        assert ours <= theirs


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        ((3, 60, 5, 1, "int8"), "k is 60, no multiple of 8"),
        ((3, 48, 5, 3, "uint4"), "groups of 16, are no whole vectors"),
        ((3, 48, 5, 3, "int8"), "groups of 16, are no whole vectors"),
        ((0, 64, 5, 1, "int8"), "a size of 0"),
    ],
)
def test_what_has_no_kernel(shape, reason):
    given = operands(*shape)
    with cupyops.simulate("sm_90"), cupyops.trace() as trace:
        y = linear(*given, kind=shape[-1])
    assert [record.route for record in trace.records] == ["reference"] and reason in trace.records[0].note
    assert torch.equal(y, by_torch(*given, kind=shape[-1]))


def test_few_rows_are_ours_and_more_are_pytorch_s():
    _, weight, scale, _, _ = operands(1, 64, 16, 1, "uint4")
    cpu = torch.device("cpu")

    def chosen(rows, **card):
        problem = quantized.problem_of(rows, stored(weight, "uint4"), scale, torch.bfloat16)
        with assume_gpu(capability=9, **card):
            return quantized.PRODUCT.choose(problem, gpu(cpu))

    assert chosen(1, library=True).name == chosen(64, library=True).name == chosen(65).name == "few_rows"
    assert isinstance(chosen(65, library=True), ByPyTorch)


@pytest.mark.parametrize("kind", KINDS)
def test_calls_alike_are_replayed(kind):
    """With other values too, and with scales that are views; the bits are those of a call in full."""
    x, weight, scale, zero_point, bias = operands(3, 128, 9, 2, kind)
    given = stored(weight, kind), scale.t().contiguous().t(), zero_point, bias
    with cupyops.simulate("sm_90"):
        warm(cupyops.quantized_linear, x, *given)
        with counted() as count:
            y = cupyops.quantized_linear(x + 1, *given)
        assert count.misses == count.recorded == 0
        assert torch.equal(y, plainly(cupyops.quantized_linear, x + 1, *given))


def test_autocast():
    """The input and the bias are cast, as by autocast of a linear layer; scales stay as they are."""
    x, weight, scale, zero_point, bias = operands(3, 64, 5, 2, "uint4", torch.float32)
    with cupyops.simulate("sm_90"), torch.autocast("cpu", torch.bfloat16), cupyops.trace() as trace:
        y = linear(x, weight, scale, zero_point, bias, kind="uint4")
    assert trace.routes() == {"simulator"} and y.dtype is torch.bfloat16
    torch.testing.assert_close(
        y, by_torch(x, weight, scale, zero_point, bias, kind="uint4").bfloat16(), rtol=2**-6, atol=2**-5
    )


def test_as_dequantised_by_pytorch():
    """PyTorch's own quantised numbers stand for the same: one scale, and one zero point, for each row."""
    x, values, scale, zero_point = (
        torch.randn(4, 32), torch.randn(6, 32), torch.rand(6) / 50 + 0.01, torch.arange(-3, 3).int(),
    )  # fmt: skip
    known = torch.fake_quantize_per_channel_affine(values, scale, zero_point, 0, -128, 127)
    weight = (values / scale[:, None] + zero_point[:, None]).round().clamp(-128, 127).to(torch.int8)
    y = cupyops.quantized_linear(x, weight, scale, zero_point.float())
    torch.testing.assert_close(y, torch.nn.functional.linear(x, known))


def test_bad_input(device):
    x, weight = torch.randn(4, 8, device=device), torch.ones(5, 8, dtype=torch.int8, device=device)
    scale, bias = torch.ones(5, 2, device=device), torch.ones(5, device=device)
    packed = torch.ones(5, 4, dtype=torch.uint8, device=device)
    eight = weight.to(torch.float8_e4m3fn).requires_grad_()
    for args, words in [
        ((1.0, weight, scale), "input is 1.0"),
        ((x.long(), weight, scale), "input is .*int64.*, expected a tensor of a floating-point dtype"),
        ((x, x, scale), "weight is .*float32.*, expected 2 dimensions and int8, float8_e4m3fn or"),
        ((x, weight[0], scale), "weight is .*, expected 2 dimensions"),
        ((x, eight, scale), "weight requires a gradient, of which so few bits have none; pass weight.detach"),
        ((x[:, :7], weight, scale), r"input is .*\(4, 7\).*, expected \(\.\.\., 8\) to fit a weight of shape \(5, 8\)"),
        ((x[:, :4], packed, scale), r"input is .*\(4, 4\).*, expected \(\.\.\., 8\) to fit a weight of shape \(5, 4\)"),
        ((x, weight, scale.long()), "scale is .*int64.*, expected a tensor of a floating-point dtype"),
        ((x, weight, scale[:4]), r"scale is .*\(4, 2\).*, expected one number, \(5,\), or \(5, groups\)"),
        ((x, weight, scale.repeat(1, 2)[:, :3]), r"scale is .*\(5, 3\).*, of which 8 columns are a multiple"),
        ((x, weight, scale[:, :0]), r"scale is .*\(5, 0\)"),
        ((x, weight, scale, scale[:, :1]), r"zero_point is .*\(5, 1\).*, expected shape \(5, 2\) and torch.float32"),
        ((x, weight, scale, scale.half()), "zero_point is .*float16.*, expected shape"),
        ((x, weight, scale, None, bias.half()), r"bias is .*float16.*, expected shape \(5,\) and torch.float32"),
        ((x, weight, scale, None, bias[:4]), r"bias is .*\(4,\).*, expected shape \(5,\)"),
        ((x, weight, scale, None, 1.0), "bias is 1.0"),
    ]:
        with pytest.raises(cupyops.InputError, match=words):
            cupyops.quantized_linear(*args)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 8, 16, 32, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_a_language_model(kind, rows):
    """Of more blocks than run at once, and of few; twice the same bits, and once from a CUDA graph with other values."""
    for n, k in ((8192, 2048), (2048, 8192)):
        given = [one.cuda() for one in operands(rows, k, n, k // 128, kind)]
        with cupyops.trace() as trace:
            y = linear(*given, kind=kind)
        assert {record.kernel.partition("<")[0] for record in trace.launches()} == {"quantized_linear_fwd"}
        ours, theirs = errors(y, given, kind)
        assert ours <= theirs and torch.equal(y, linear(*given, kind=kind))
        weight = stored(given[1], kind)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = cupyops.quantized_linear(given[0], weight, *given[2:])
        given[0].mul_(0.5)
        graph.replay()
        assert torch.equal(y, linear(*given, kind=kind))


@pytest.mark.gpu
def test_a_weight_that_the_kernel_before_has_written():
    """A launch that begins while that runs does not read what was there before."""
    x, weight, scale, _, _ = (None if one is None else one.cuda() for one in operands(2, 2048, 4096, 1, "int8"))
    other = torch.randint_like(stored(weight, "int8"), -127, 128)
    expected = cupyops.quantized_linear(x, other, scale)
    for _ in range(20):
        own = torch.zeros_like(other)
        cupyops.quantized_linear(x, own, scale)
        own.copy_(other)
        assert torch.equal(cupyops.quantized_linear(x, own, scale), expected)
