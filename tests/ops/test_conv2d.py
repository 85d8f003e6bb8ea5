import contextlib
import importlib

import few_channels
import gemms
import pytest
import torch
import torch.nn.functional as F
from contract import Make, OperatorContract, Sample, misaligned, sliced, transposed

import cupyops
from cupyops._dispatch.conv import small_conv
from cupyops._dispatch.core.gpu import assume_gpu, gpu
from cupyops._dispatch.gemm import gemm

module = importlib.import_module("cupyops.ops._conv2d")

# Errors allowed, in units in the last place of the largest result: 16-bit results are rounded once; the sum of some
# hundred products in fp32 or fp64 has errors of its own.
UNITS = {torch.float16: 2, torch.bfloat16: 2, torch.float32: 8, torch.float64: 8}


def channels_last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous(memory_format=torch.channels_last).requires_grad_(tensor.requires_grad)


class TestConv2d(OperatorContract):
    function = staticmethod(cupyops.conv2d)
    torch_function = staticmethod(F.conv2d)
    kernels = {
        *("conv2d_fwd", "conv2d_bwd_weight", "gemm_sum", "conv2d_channels_last"),
        *("conv2d_direct", "conv2d_direct_bwd_weight", "conv2d_direct_sum"),
    }
    too_large = f"a dimension over {gemm.MAX_INDEX}"
    differs = {
        ("special_values", backend): "a NaN in weight: grad_x is NaN at the border too, where the tap meets padding"
        for backend in ("simulator", "gpu")
    }

    def samples(self, make: Make):
        yield from self.small_samples(make)
        yield Sample(make(2, 3, 7, 9), make(5, 3, 3, 3), make(5), stride=2, padding=1)
        yield Sample(make(1, 4, 9, 8), make(6, 2, 3, 3), make(6), (2, 1), (2, 1), (1, 2), 2)
        yield Sample(make(4, 1, 12, 12), make(32, 1, 2, 3), make(32))  # grad_weight splits k
        yield Sample(channels_last(make(2, 8, 5, 6)), channels_last(make(16, 8, 3, 3)), make(16), padding=1)  # vectors
        yield Sample(make(2, 16, 5, 7), make(24, 16, 3, 3), make(24), padding=1)  # halves are copied to channels_last
        yield Sample(channels_last(make(1, 3, 6, 5)), make(4, 3, 3, 2), padding="same")
        yield Sample(make(1, 50, 3, 3), make(2, 50, 2, 3), make(2), padding=1)  # forward splits k
        yield Sample(make(1, 3, 7, 6), make(34, 3, 3, 3), make(34), padding=(1, 3))  # float32 directly
        yield Sample(make(3, 6, 5), make(70, 3, 1, 1), make(70))

    def small_samples(self, make: Make):
        yield Sample(make(1, 2, 6, 7), make(5, 2, 3, 4), make(5), padding=1)
        yield Sample(make(2, 2, 4, 5), make(3, 2, 3, 2), make(3))
        yield Sample(make(2, 3, 8, 9), make(5, 3, 5, 5), padding=1)  # float32 directly
        yield Sample(make(1, 2, 4, 4), make(2, 1, 3, 3), stride=2, padding=(1, 2), groups=2)
        yield Sample(make(2, 5, 5), make(2, 2, 2, 2), make(2), dilation=2, padding="valid")
        yield Sample(channels_last(make(1, 2, 3, 4)), make(2, 2, 2, 2), padding="same")

    def layouts(self, make: Make):
        for sample in self.samples(make):
            for change in (transposed, sliced, misaligned):
                yield sample.map(change)
            yield sample.map(lambda t: channels_last(t) if t.dim() == 4 else t)

    def test_signature_is_torch_s(self):
        """F.conv2d is built in and shows no signature."""
        x, w, b = torch.randn(2, 4, 6, 6), torch.randn(4, 2, 3, 3), torch.randn(4)
        for call in [
            lambda f: f(x, w, b, 2, 1, 2, 2),
            lambda f: f(groups=2, dilation=(1,), padding="valid", stride=[1, 2], bias=b, weight=w, input=x),
        ]:
            torch.testing.assert_close(call(cupyops.conv2d), call(F.conv2d))


def rounded(values, unit):
    """The values, each a multiple of `unit`, if there is one."""
    return (values / unit).round() * unit if unit else values


@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("tile", gemm.TILES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_tile(device, dtype, tile, last):
    """130 channels out of 16, 144 pixels: several tiles of 128 in forward, grad_input and grad_weight.

    In float64 PyTorch's result is no better than ours: there the values are such that every sum is exact.
    """
    unit = 2**-10 if dtype is torch.float64 else 0
    memory = torch.channels_last if last else torch.contiguous_format
    shapes = ((1, 16, 12, 12), (130, 16, 3, 3))
    x, weight, bias, grad = (
        rounded(torch.randn(s, device=device), unit).to(dtype) for s in (*shapes, (130,), (1, 130, 12, 12))
    )
    inputs = [x.to(memory_format=memory), weight.to(memory_format=memory), bias]
    inputs = [one.requires_grad_() for one in inputs]
    exact = [t.detach().double().requires_grad_() for t in inputs]
    truth = F.conv2d(*exact, padding=1)
    with gemms.tiled("conv2d", dtype, tile):
        y = cupyops.conv2d(*inputs, padding=1)
        ours = [y, *torch.autograd.grad(y, inputs, grad)]
    theirs = [truth, *torch.autograd.grad(truth, exact, grad.double())]
    for a, b in zip(ours, theirs):
        assert (a.double() - b).abs().max() <= (0 if unit else UNITS[dtype]) * torch.finfo(dtype).eps * b.abs().max()


@pytest.mark.gpu
def test_few_channels():
    """In the simulator this is part of the test of every instance."""
    for form in few_channels.forms():
        for sample in few_channels.samples(Make("cuda", torch.float32)):
            few_channels.compare(TestConv2d, form, sample)


@pytest.mark.parametrize("filters", [1, 4])
def test_few_blocks_for_the_gradient_of_weight(filters):
    """Each strides over the tiles of all images, as where there are more of them than blocks."""
    x, grad_y = torch.randint(-1, 2, (5, 3, 6, 4)).float(), torch.randint(-1, 2, (5, 2, 6, 4)).float()
    sums = torch.empty(2, 3, 3, 3), torch.empty(2)
    form = small_conv.FmaWeight(module.conv2d_direct_bwd_weight, filters, blocks=4)
    problem = small_conv.direct(small_conv.Sizes(*x.shape, *grad_y.shape[1:], 1, 1), 3, x.dtype)
    with cupyops.simulate():
        launch = form.launch(problem, gpu(x.device))
        small_conv.sum_partials(launch, (grad_y, x), *sums)
    assert launch.grid[0] < 5
    assert torch.equal(sums[0], torch.nn.grad.conv2d_weight(x, (2, 3, 3, 3), grad_y, padding=1))
    assert torch.equal(sums[1], grad_y.sum((0, 2, 3)))


def test_frozen_parts(device):
    """Only the bias wants a gradient, or only weight and bias."""
    x, weight, bias = (torch.randn(s, device=device) for s in ((2, 3, 5, 5), (4, 3, 3, 3), (4,)))
    for wanted in ([bias], [weight, bias], [x, bias]):
        results = []
        for function in (cupyops.conv2d, F.conv2d):
            for t in (x, weight, bias):
                t.requires_grad_(any(t is w for w in wanted))
            results.append(torch.autograd.grad(function(x, weight, bias, padding=1).pow(2).sum(), wanted))
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


def test_special_values(device):
    x = torch.zeros(1, 1, 4, 4, device=device)
    x[0, 0, 0, 0], x[0, 0, 3, 3] = float("nan"), float("inf")
    weight = torch.tensor([[[[1.0, -2.0], [0.5, 3.0]]]], device=device)
    torch.testing.assert_close(cupyops.conv2d(x, weight), F.conv2d(x, weight), equal_nan=True)


def test_bad_input(device):
    x, weight, bias = (torch.randn(s, device=device) for s in ((2, 4, 6, 6), (6, 4, 3, 3), (6,)))
    for args, kwargs, words in [
        ((x[0, 0], weight), {}, "input is .* channels, h, w"),
        ((x, weight[0]), {}, "weight is .* kernel_h"),
        ((x, weight[:0]), {}, "weight is"),
        ((x, weight[:, :3]), {}, r"input has shape \(2, 4, 6, 6\), 4 channels, expected 3"),
        ((x, weight[:5, :2]), {"groups": 2}, "weight is .* groups=2 divides"),
        ((x, weight), {"groups": 2}, "input has shape .* expected 8"),
        ((x, weight), {"groups": 0}, "groups is 0"),
        ((x, weight), {"groups": 1.5}, "groups is 1.5"),
        ((x, weight, bias[:4]), {}, r"bias has shape \(4,\), expected \(6,\)"),
        ((x, weight), {"stride": 0}, "stride is 0"),
        ((x, weight), {"stride": (1, 2, 3)}, "stride is"),
        ((x, weight), {"dilation": 0}, "dilation is 0"),
        ((x, weight), {"padding": -1}, "padding is -1"),
        ((x, weight), {"padding": "full"}, "padding is 'full'"),
        ((x, weight), {"padding": "same", "stride": 2}, "stride is"),
        ((x, weight), {"dilation": 3}, "weight has shape .* no larger than the padded input"),
        ((x[..., :2], weight), {}, "weight has shape"),
        ((x, weight.double()), {}, "weight is torch.float64"),
        ((x, weight, bias.half()), {}, "bias is torch.float16"),
    ]:
        with pytest.raises(cupyops.InputError, match=words):
            cupyops.conv2d(*args, **kwargs)


POINTWISE = [  # images, channels, filters, height, width, with a bias
    (2, 64, 72, 9, 15, True),
    (1, 136, 264, 19, 16, False),
    (3, 16, 8, 1, 1, True),
    (1, 5, 3, 4, 4, True),
    (0, 8, 8, 3, 3, True),
]


def pointwise_layer(sizes, dtype, device):
    images, channels, filters, height, width, biased = sizes
    torch.manual_seed(channels)
    x = channels_last(torch.randn(images, channels, height, width, device=device).to(dtype))
    weight = (torch.randn(filters, channels, 1, 1, device=device) / channels**0.5).to(dtype)
    inputs = [x, weight] + [torch.randn(filters, device=device).to(dtype)] * biased
    return [one.requires_grad_() for one in inputs]


def compare_pointwise(inputs):
    """y and the gradients beside float64, the same bits twice, in channels_last."""
    exact = [t.detach().double().requires_grad_() for t in inputs]
    truth, found = F.conv2d(*exact), []
    grad = torch.linspace(-1, 1, truth.numel(), dtype=inputs[0].dtype, device=truth.device).view(truth.shape)
    for _ in range(2):
        y = cupyops.conv2d(*inputs)
        found.append([y, *torch.autograd.grad(y, inputs, grad)])
    assert y.is_contiguous(memory_format=torch.channels_last) or not y.numel()
    theirs = [truth, *torch.autograd.grad(truth, exact, grad.double())]
    for a, again, b in zip(*found, theirs):
        assert torch.equal(a, again) and a.shape == b.shape
        if b.numel():
            assert (a.double() - b).abs().max() <= UNITS[a.dtype] * torch.finfo(a.dtype).eps * b.abs().max()


@pytest.mark.parametrize("sizes", POINTWISE, ids=str)
@pytest.mark.parametrize("dtype", gemm.HALF)
def test_one_tap_is_a_product(device, dtype, sizes):
    """On every card and engine; odd numbers of channels, whose rows are no whole vectors, too."""
    simulated = cupyops.simulate() if device.type == "cpu" else contextlib.nullcontext()
    with cupyops.use_form("conv2d:product"), simulated:
        compare_pointwise(pointwise_layer(sizes, dtype, device))


@pytest.mark.parametrize("form", ["wgmma_128x256", "wgmma_128x128"])
def test_one_tap_by_wgmma(form):
    """As on Hopper: y with its bias in the epilogue, and both gradients."""
    inputs = pointwise_layer(POINTWISE[1], torch.bfloat16, "cpu")
    asked = cupyops.use_form("conv2d:product", f"linear:{form}")
    with cupyops.simulate("sm_90"), assume_gpu(**gemms.HOPPER), asked, cupyops.trace() as trace:
        compare_pointwise(inputs)
        with torch.no_grad():
            bias = torch.randn(inputs[1].shape[0]).bfloat16()
            y, exact = cupyops.conv2d(*inputs, bias), F.conv2d(*(t.double() for t in (*inputs, bias)))
    assert (y.double() - exact).abs().max() <= 2 * torch.finfo(y.dtype).eps * exact.abs().max()
    assert {record.kernel.partition("<")[0] for record in trace.launches()} == {"gemm_wgmma"}


@pytest.mark.gpu
def test_one_tap_as_called_on_a_gpu():
    """Without a gradient by wgmma on Hopper, first calls and replays; with one by cuDNN, forward and backward."""
    inputs = pointwise_layer((16, 64, 256, 56, 56, True), torch.bfloat16, "cuda")
    exact = F.conv2d(*(t.detach().double() for t in inputs))
    hopper = torch.cuda.get_device_capability()[0] == 9
    with cupyops.never_slower():
        for _ in range(6):
            with torch.no_grad(), cupyops.trace() as trace:
                y = cupyops.conv2d(*inputs)
            ran = {record.kernel.partition("<")[0] for record in trace.launches()}
            assert ("gemm_wgmma" in ran) is hopper, ran
            assert (y.double() - exact).abs().max() <= 2 * torch.finfo(y.dtype).eps * exact.abs().max()
            with cupyops.trace() as trace:
                y = cupyops.conv2d(*inputs)
                y.backward(torch.ones_like(y))
            assert not any("gemm" in record.kernel for record in trace.launches())


def test_which_convolutions_are_products():
    """Beside cuDNN where that was measured, in forward; the gradients follow."""

    def chosen(library, *sizes, forms=module.FORWARD, memory=torch.channels_last, gradient=False, **options):
        dtype = options.pop("dtype", torch.bfloat16)
        x, weight = (
            torch.empty(sizes[:4], device="meta", dtype=dtype),
            torch.empty(sizes[4:], device="meta", dtype=dtype),
        )
        window = {"stride": [1, 1], "padding": [0, 0], "dilation": [1, 1], "groups": 1} | options
        problem = module.forward_problem(x.to(memory_format=memory), weight, None, **window)
        problem = problem._replace(for_backward=gradient, transposed=forms is module.BACKWARD)
        with assume_gpu(capability=9, shared=232448, multiprocessors=132, library=library):
            return forms.choose(problem, gpu(torch.device("cpu"))).name

    layer = (32, 64, 56, 56, 256, 64, 1, 1)
    for library in (False, True):
        assert chosen(library, *layer) == chosen(library, *layer, forms=module.BACKWARD) == "product"
    assert chosen(True, 64, 128, 28, 28, 512, 128, 1, 1) == "product"
    assert chosen(False, 256, 128, 28, 28, 512, 128, 1, 1, gradient=True) == "product"
    other = [
        chosen(True, *layer, gradient=True),
        chosen(True, 64, 64, 56, 56, 256, 64, 1, 1),
        chosen(True, 64, 512, 28, 28, 256, 512, 1, 1),
        chosen(True, 256, 128, 28, 28, 512, 128, 1, 1),
        chosen(True, *layer, stride=[2, 2]),
        chosen(True, *layer, padding=[1, 1]),
        chosen(True, *layer, dtype=torch.float32),
        chosen(True, *layer, memory=torch.contiguous_format),
        chosen(True, 64, 64, 56, 56, 256, 32, 1, 1, groups=2),
        chosen(True, 64, 64, 56, 56, 256, 64, 3, 3, padding=[1, 1]),
        chosen(True, 1, 64, 7, 7, 256, 64, 1, 1),
        chosen(True, 64, 8, 56, 56, 256, 8, 1, 1),
        chosen(True, 4096, 128, 1, 1, 4096, 128, 1, 1),
    ]
    assert other == ["pytorch"] * len(other)


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    ("sizes", "last"),
    [
        ((3, 16, 1, 1, 8), True), ((3, 16, 1, 1, 1), True), ((3, 1, 4, 5, 1), True), ((0, 16, 1, 1, 8), True),
        ((3, 1, 4, 5, 8), False), ((3, 16, 4, 5, 1), False),
    ],
    ids=str,
)  # fmt: skip
def test_images_that_lie_both_ways(sizes, last, memory):
    """Of one pixel or one channel, strides do not tell: what a call asks about is what its launch then finds."""
    *image, filters = sizes
    x = torch.randn(image).half().contiguous(memory_format=memory)
    weight, bias = torch.randn(filters, image[1], 1, 1).half(), torch.randn(filters).half()
    problem = module.forward_problem(x, weight, bias, [1, 1], [0, 0], [1, 1], 1)
    if memory is torch.contiguous_format or last:
        assert (problem.last, problem.out_last) == (last, last)
    if problem.last:
        with cupyops.use_form("conv2d:product"), cupyops.simulate("sm_90"):
            compare_pointwise([one.requires_grad_() for one in (x, weight, bias)])


def test_whether_a_gradient_will_be_asked_for():
    """Forward knows, and with one the call is cuDNN's."""
    inputs = pointwise_layer((16, 64, 256, 56, 56, True), torch.bfloat16, "cpu")
    problem = module.forward_problem(*inputs, [1, 1], [0, 0], [1, 1], 1)
    assert problem.for_backward
    with torch.no_grad():
        assert not module.forward_problem(*inputs, [1, 1], [0, 0], [1, 1], 1).for_backward


def test_one_tap_by_pytorch_s_product():
    """Where that is what linear takes, a trace says so."""
    inputs = pointwise_layer((3, 64, 64, 29, 31, True), torch.bfloat16, "cpu")
    card = assume_gpu(capability=9, shared=232448, multiprocessors=132, library=True)
    with cupyops.simulate("sm_90"), card, cupyops.use_form("conv2d:product"), cupyops.trace() as trace:
        compare_pointwise(inputs)
    ran = {record.kernel.partition("<")[0] for record in trace.launches()}
    assert ran == {"torch.mm", "torch.addmm", "sum_fwd_fold", "sum_fwd_finalize"}, ran


@pytest.mark.parametrize("wanted", [("x",), ("weight",), ("bias",), ("x", "weight")])
@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_what_a_frozen_layer_keeps(dtype, memory, wanted):
    """Its input and its weight each for the gradient of the other alone; and the gradients are the same."""
    torch.manual_seed(0)
    made = {
        "x": torch.randn(2, 8, 6, 5).to(dtype, memory_format=memory),
        "weight": torch.randn(16, 8, 3, 3).to(dtype, memory_format=memory),
        "bias": torch.randn(16).to(dtype),
    }
    for name in wanted:
        made[name].requires_grad_()
    kept = []
    with (
        cupyops.simulate(),
        torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one),
    ):
        y = cupyops.conv2d(*made.values(), padding=1)
        grad = torch.randn_like(y)
        found = torch.autograd.grad(y, [made[name] for name in wanted], grad)
    read = {"x": "weight", "weight": "x", "bias": "x"}  # the sums of a bias are found beside those of the weight
    assert {one.data_ptr() for one in kept} == {made[read[name]].data_ptr() for name in wanted}
    wide = {name: one.detach().double().requires_grad_() for name, one in made.items()}
    right = torch.nn.functional.conv2d(*wide.values(), padding=1)
    true = torch.autograd.grad(right, [wide[name] for name in wanted], grad.double())
    torch.testing.assert_close([one.double() for one in found], list(true), rtol=4e-3, atol=4e-2)


@pytest.mark.parametrize("sizes, by_tf32", [
    ((1024, 1, 28, 28, 32), False), ((1024, 16, 14, 14, 32), False), ((1024, 32, 14, 14, 32), True),
    ((64, 64, 56, 56, 64), True), ((64, 64, 56, 56, 8), True),
])  # fmt: skip
def test_float32_under_pytorch_s_flags(sizes, by_tf32):
    """By default cuDNN may round to TF32, and is taken where it is faster then; kernels of ours round nothing."""
    images, channels, height, width, filters = sizes
    x, weight = torch.empty(images, channels, height, width), torch.empty(filters, channels, 3, 3)
    chosen = {}
    for precision in ("tf32", "ieee"):
        card = assume_gpu(capability=9, shared=232448, multiprocessors=132, library=True)
        with card, torch.backends.cudnn.flags(allow_tf32=precision == "tf32"):
            problem = module.forward_problem(x, weight, None, [1, 1], [1, 1], [1, 1], 1)
            chosen[precision] = module.FORWARD.choose(problem, gpu(x.device)).name
    assert (chosen["tf32"] == "pytorch") == by_tf32
    assert chosen["ieee"].startswith("direct")
