import copy

import pytest
import torch
from contract import DTYPES, Make, OperatorContract, Sample, assert_as_good_as_torch
from selection import slow

import cupyops

NAN, INF = float("nan"), float("inf")
F = torch.nn.functional
IN_TRAINING = {"training": True}


def running(make: Make, channels: int):
    return make(channels).detach(), make(channels, low=0.5, high=2).detach()


class TestBatchNorm(OperatorContract):
    """In training without running statistics, which a call changes: those are below."""

    function = staticmethod(cupyops.batch_norm)
    torch_function = staticmethod(F.batch_norm)
    kernels = {
        "batch_norm_fwd_nchw_cluster", "batch_norm_fwd_nchw_partials", "batch_norm_fwd_nchw",
        "batch_norm_bwd_nchw_cluster", "batch_norm_bwd_nchw_partials", "batch_norm_bwd_nchw",
        "batch_norm_bwd_finalize", "batch_norm_fwd_nhwc_cluster", "batch_norm_fwd_nhwc_partials",
        "batch_norm_fwd_nhwc_finalize", "batch_norm_fwd_nhwc", "batch_norm_bwd_nhwc_cluster",
        "batch_norm_bwd_nhwc_partials", "batch_norm_bwd_nhwc_inline", "batch_norm_bwd_nhwc",
    }  # fmt: skip
    too_large = "2^31 vectors of a channel"
    differs = {
        (
            "special_values",
            "simulator",
        ): "an infinite weight: PyTorch on a CPU makes NaN, of inf - inf; on a GPU it does not",
        ("output_strides", "gpu"): "of (n, c) transposed the output is contiguous, as PyTorch's on a CPU",
    }

    def samples(self, make: Make):
        width = 16 // make.dtype.itemsize
        yield from self.small_samples(make)
        yield Sample(make(3, 2, 2, width), *running(make, 2), make(2), make(2))  # whole vectors
        yield Sample(make(3, 2, 5, 3), *running(make, 2), make(2), make(2))
        yield Sample(make(3, 2, 2, width), None, None, make(2), make(2), **IN_TRAINING)
        # a cluster, or several blocks
        yield Sample(make(5, 2, 900 * width), None, None, make(2), make(2), **IN_TRAINING)
        yield Sample(make(3, 1, 2900 * width), None, None, make(1), make(1), **IN_TRAINING)  # several blocks
        yield Sample(make(3, 1, 2900 * width + 1), None, None, make(1), make(1), **IN_TRAINING)
        yield Sample(make(17, 3, 5), None, None, make(3), make(3), **IN_TRAINING)  # small planes
        yield Sample(make(17, 8, 3), None, None, make(8), make(8), **IN_TRAINING)  # of whole vectors together
        # of many pixels, tiles of channels cut
        yield Sample(make(17, 9, 35), None, None, make(9), make(9), **IN_TRAINING)
        yield Sample(make(16, 8, 33), None, None, make(8), make(8), **IN_TRAINING)
        yield Sample(make(512, 66), None, None, make(66), make(66), **IN_TRAINING)  # several rows in one
        yield Sample(make(1024, 67), *running(make, 67), make(67), make(67))
        yield Sample(make(6, 8), *running(make, 8), make(8), make(8))
        yield Sample(make(5, 600), None, None, make(600), make(600), **IN_TRAINING)
        yield Sample(make(90, 8), None, None, make(8), make(8), **IN_TRAINING)
        if make.device.type == "cpu":  # PyTorch's CUDA kernels refuse a bias alone
            yield Sample(make(4, 3, 7), None, None, None, make(3), **IN_TRAINING)
        yield Sample(make(0, 3, 4), None, None, make(3), make(3), **IN_TRAINING)

    def small_samples(self, make: Make):
        yield Sample(make(4, 3, 5, 7), None, None, make(3), make(3), True, 0.1, 1e-3)
        yield Sample(make(6, 5), *running(make, 5), make(5), make(5), eps=0.1)
        yield Sample(make(9, 5), None, None, make(5), **IN_TRAINING)

    def layouts(self, make: Make):
        for one in super().layouts(make):
            # of (n, c) transposed PyTorch's output is contiguous on a CPU, as ours always, and not on a GPU
            if make.device.type == "cpu" or one.args[0].dim() > 2 or one.args[0].is_contiguous():
                yield one
        for parameters in ((None, None), running(make, 8)):
            x = make(2, 8, 4, 5).detach().to(memory_format=torch.channels_last).requires_grad_()
            yield Sample(x, *parameters, make(8), make(8), parameters[0] is None)
        x = make(2, 3, 4, 2, 5).detach().to(memory_format=torch.channels_last_3d)
        yield Sample(x.requires_grad_(), None, None, make(3), make(3), **IN_TRAINING)


def everything(function, x, grad_y, mean, var, weight, bias, training=True, momentum=0.1):
    """y, the gradients, and the running statistics afterwards."""
    mean, var = (t.clone() for t in (mean, var))
    leaves = [t.detach().requires_grad_() for t in (x, weight, bias)]
    y = function(leaves[0], mean, var, *leaves[1:], training, momentum)
    return y, *torch.autograd.grad(y, leaves, grad_y.to(y.dtype)), mean, var


def tensors(shape, dtype, parameters, device="cpu", shift=0.0):
    x = (torch.randn(shape, dtype=torch.float64) + shift).to(device, dtype)
    channels = [torch.randn(shape[1]).to(device, parameters) for _ in range(3)]
    return (
        x, torch.randn(shape).to(device, dtype), channels[0], (torch.rand(shape[1]) + 0.5).to(channels[0]),
        *channels[1:],
    )  # fmt: skip


NAMES = ("y", "grad_x", "grad_weight", "grad_bias", "running_mean", "running_var")
# for the forms of the kernels
SHAPES = [(4, 3, 5, 7), (2, 2, 2500), (17, 2, 5), (18, 8, 3), (17, 5, 37), (9, 5), (70, 16)]


def compare(args, **options):
    ours = everything(cupyops.batch_norm, *args, **options)
    theirs = everything(F.batch_norm, *args, **options)
    truth = everything(F.batch_norm, *[t.double() for t in args], **options)
    for a, b, c, what in zip(ours, theirs, truth, NAMES):
        assert a.dtype == b.dtype
        assert_as_good_as_torch(a, b, c, what)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, *slow(torch.bfloat16)], ids=str)
def test_float_parameters_beside_a_half_type(dtype, shape, training):
    """As under autocast."""
    with cupyops.simulate(), cupyops.trace() as trace:
        everything(cupyops.batch_norm, *tensors(shape, dtype, torch.float32), training=training)
    assert trace.routes() == {"simulator"}, str(trace)
    with cupyops.simulate():
        compare(tensors(shape, dtype, torch.float32), training=training)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_running_statistics(dtype, shape):
    with cupyops.simulate():
        compare(tensors(shape, dtype, dtype), momentum=0.3)


@pytest.mark.parametrize("shape", [(3, 40), (8, 40), (2, 40, 2), (2, 40, 4)], ids=str)
def test_variance_of_short_channels_far_from_zero(shape):
    """No part's mean is rounded before the variance is had of them: that is exact but for its own rounding."""
    x, mean, var = 1000 + torch.randn(shape), torch.zeros(40), torch.zeros(40)
    with cupyops.simulate():
        cupyops.batch_norm(x, mean, var, training=True, momentum=1.0)
    truth = x.double().transpose(0, 1).reshape(40, -1).var(1)
    torch.testing.assert_close(var.double(), truth, rtol=4 * torch.finfo(torch.float32).eps, atol=0)


@pytest.mark.parametrize("momentum", [0.0, 1.0])
def test_extreme_momentum(device, momentum):
    args = tensors((6, 3, 5), torch.float32, torch.float32, device)
    ours, theirs = (everything(f, *args, momentum=momentum)[4:] for f in (cupyops.batch_norm, F.batch_norm))
    torch.testing.assert_close(ours, theirs)


def test_statistics_that_are_views():
    """Only what they show is changed."""
    base = torch.zeros(2, 6)
    with cupyops.simulate():
        cupyops.batch_norm(torch.randn(4, 3, 5), base[0, ::2], base[1, ::2], training=True)
    assert base[:, ::2].all() and not base[:, 1::2].any()


def test_one_statistic_alone():
    mean, x = torch.zeros(3), torch.randn(4, 3, 5)
    with cupyops.simulate():
        cupyops.batch_norm(x, mean, None, training=True)
    torch.testing.assert_close(mean, x.mean((0, 2)) / 10)


def test_statistics_know_that_they_were_changed():
    mean, var = torch.zeros(3), torch.ones(3)
    with cupyops.simulate():
        cupyops.batch_norm(torch.randn(4, 3, 5), mean, var, training=True)
        versions = mean._version, var._version
        assert min(versions) > 0
        cupyops.batch_norm(torch.randn(4, 3, 5), mean, var)
    assert (mean._version, var._version) == versions


@pytest.mark.parametrize("simulated", [False, True])
def test_backward_after_another_forward(simulated):
    """The statistics have moved on; no gradient depends on them."""
    x, weight = torch.randn(4, 3, 5, requires_grad=True), torch.randn(3, requires_grad=True)
    mean, var = torch.zeros(3), torch.ones(3)

    def run(function):
        y, _ = (function(x, mean, var, weight, training=True) for _ in range(2))
        return torch.autograd.grad(y.square().sum(), (x, weight))

    with cupyops.simulate() if simulated else torch.enable_grad():
        torch.testing.assert_close(run(cupyops.batch_norm), run(F.batch_norm))


@pytest.mark.parametrize("simulated", [False, True])
def test_double_backward_updates_once(simulated):
    make = Make("cpu", torch.float64)
    x, weight, bias = make(5, 3, 2), make(3), make(3)
    mean, var = torch.zeros(3).double(), torch.ones(3).double()
    with cupyops.simulate() if simulated else torch.enable_grad():
        y = cupyops.batch_norm(x, mean, var, weight, bias, True)
        after = mean.clone(), var.clone()
        (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        grad.sum().backward()
        assert torch.equal(mean, after[0]) and torch.equal(var, after[1])
        function = lambda x, weight, bias: cupyops.batch_norm(x, mean.clone(), var.clone(), weight, bias, True)
        assert torch.autograd.gradgradcheck(function, (x, weight, bias))


@pytest.mark.parametrize("gradient", [False, True], ids=["plain", "gradient"])
@pytest.mark.parametrize("simulated", [False, True])
def test_compiled(simulated, gradient):
    """The statistics are updated, once, and through the module too."""
    module = cupyops.nn.BatchNorm2d(3)
    other = copy.deepcopy(module)
    x = torch.randn(4, 3, 5, 2, requires_grad=gradient)
    with cupyops.simulate() if simulated else torch.enable_grad():
        compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
        for _ in range(2):
            found, expected = compiled(x), other(x)
            torch.testing.assert_close(found, expected)
        if gradient:
            found, expected = (torch.autograd.grad(y.square().sum(), x) for y in (found, expected))
            torch.testing.assert_close(found, expected)
    for a, b in zip(module.buffers(), other.buffers()):
        torch.testing.assert_close(a, b)


def test_autocast_leaves_it_alone(device):
    module = cupyops.nn.BatchNorm2d(3).to(device)
    with torch.autocast(torch.device(device).type, torch.bfloat16):
        assert module(torch.randn(2, 3, 4, 5, device=device)).dtype == torch.float32
        assert module(torch.randn(2, 3, 4, 5, device=device).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(device, dtype, shape):
    """What is not finite stays in its channel."""
    args = tensors(shape, dtype, dtype, device)
    for value in (NAN, INF, -INF):
        args[0][0, 0] = value
        ours = everything(cupyops.batch_norm, *args)[:5]
        theirs = everything(F.batch_norm, *(t.cpu() for t in args))[:5]  # cuDNN's NaNs differ with the shape
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a.isfinite().cpu(), b.isfinite())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_mean_far_from_zero(dtype, shape):
    """E[x^2] - mean^2 would have no correct digit here."""
    x = tensors(shape, dtype, dtype, shift=1000.0)[0]
    with cupyops.simulate():
        y = cupyops.batch_norm(x, None, None, training=True)
    truth = F.batch_norm(x.double() - 1000, None, None, training=True)
    torch.testing.assert_close(y.double(), truth, rtol=0, atol=4000 * torch.finfo(dtype).eps)


@pytest.mark.gpu
@pytest.mark.parametrize("last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("shape", [(64, 32, 28, 28), (16, 512, 7, 7), (8, 3, 112, 113)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large(dtype, shape, training, last):
    args = list(tensors(shape, dtype, torch.promote_types(dtype, torch.float32), "cuda"))
    if last:
        args[:2] = (t.to(memory_format=torch.channels_last) for t in args[:2])
    compare(args, training=training)


@pytest.mark.parametrize("shape", [(5, 6, 4, 3), (9, 6)], ids=str)
def test_variances_of_any_size(shape):
    """Each channel by itself: together, that of the smallest variance would decide."""
    x, grad_y, mean, _, weight, bias = tensors(shape, torch.float32, torch.float32)
    var = torch.tensor([0, 1e-30, 1e-8, 1e-3, 1, 1e20])
    with cupyops.simulate():
        ours = everything(cupyops.batch_norm, x, grad_y, mean, var, weight, bias, training=False)
    args = x, grad_y, mean, var, weight, bias
    theirs = everything(F.batch_norm, *args, training=False)
    truth = everything(F.batch_norm, *[t.double() for t in args], training=False)
    for a, b, c, what in list(zip(ours, theirs, truth, NAMES))[:2]:
        for channel in range(6):
            assert_as_good_as_torch(a[:, channel], b[:, channel], c[:, channel], f"{what} of channel {channel}")


X, ONES = torch.ones(2, 3, 4), torch.ones(3)


@pytest.mark.parametrize(
    ("args", "kwargs", "culprit"),
    [
        (([[1.0, 2.0]], None, None), IN_TRAINING, "input"),
        ((torch.ones(2, 3, dtype=torch.int64), ONES, ONES), {}, "input"),
        ((torch.ones(3), ONES, ONES), {}, "input"),
        ((torch.ones(1, 3), None, None), IN_TRAINING, "input"),
        ((torch.ones(1, 3, 1, 1), None, None), IN_TRAINING, "input"),
        ((X, None, ONES), {}, "running_mean"),
        ((X, ONES, None), {}, "running_var"),
        ((X, torch.ones(2), ONES), {}, "running_mean"),
        ((X, ONES, torch.ones(3, 1)), {}, "running_var"),
        ((X, ONES, ONES.clone().requires_grad_()), {}, "running_var"),
        ((X, ONES, ONES, [1.0] * 3), {}, "weight"),
        ((X, ONES, ONES, torch.ones(4)), {}, "weight"),
        ((X, ONES, ONES, ONES.double()), {}, "weight"),
        ((X.half(), ONES, ONES, ONES, ONES.half()), {}, "weight"),
        ((X.half(), ONES.half(), ONES.half(), ONES.half(), ONES), {}, "bias"),
        ((X, ONES, ONES, torch.ones(3, device="meta")), {}, "weight"),
        ((X, ONES, ONES), {"bias": torch.ones(())}, "bias"),
        ((X, None, None), {**IN_TRAINING, "eps": 0.0}, "eps"),
        ((X, ONES, ONES), {"eps": -1.0}, "eps"),
        ((X, ONES, ONES), {"eps": "1"}, "eps"),
        ((X, None, None), {**IN_TRAINING, "momentum": None}, "momentum"),
    ],
)
def test_bad_input(args, kwargs, culprit):
    with pytest.raises(cupyops.InputError, match=f"^{culprit} is "):
        cupyops.batch_norm(*args, **kwargs)
