import importlib

import few_channels
import pytest
import torch
from contract import DTYPES, Make, OperatorContract, Sample
from torch.nn import functional as F

import cupyops
from cupyops._dispatch import small_conv
from cupyops._dispatch.gpu import assume_gpu, gpu
from cupyops._dispatch.small_conv import FmaWeight, MmaWeight
from cupyops.testing import Tolerance

module = importlib.import_module("cupyops.ops._conv2d_relu_max_pool2d")


def in_three(input, weight, bias=None, stride=1, padding=0, dilation=1, groups=1, pool_kernel_size=2, pool_stride=None):
    """The same, layer by layer."""
    u = F.conv2d(input, weight, bias, stride, padding, dilation, groups)
    return F.max_pool2d(F.relu(u), pool_kernel_size, pool_stride)


class TestConv2dReluMaxPool2d(OperatorContract):
    function = staticmethod(cupyops.conv2d_relu_max_pool2d)
    torch_function = staticmethod(in_three)
    kernels = {
        f"conv2d_relu_max_pool2d_{form}"
        for form in ("fwd", "bwd", "bwd_weight", "fwd_mma", "bwd_mma", "bwd_weight_mma")
    } | {"conv2d_direct_sum"}

    differs = {
        ("special_values", backend): "0 times NaN is left out of the gradients: what is no maximum has no part in them"
        for backend in ("simulator", "gpu")
    } | {("autocast", "gpu"): "of values that round to neighbours another is the maximum, and has the gradient"}

    def samples(self, make: Make):
        yield from self.small_samples(make)
        yield Sample(make(1, 33, 4, 5), make(9, 33, 3, 3), make(9), padding=1)  # channels in several chunks
        yield Sample(make(1, 1, 5, 38), make(2, 1, 5, 5), None, padding=(2, 4))  # several tiles

    def small_samples(self, make: Make):
        yield Sample(make(2, 1, 6, 7), make(5, 1, 3, 3), make(5), padding=1)
        yield Sample(make(1, 3, 8, 6), make(2, 3, 5, 5), padding=(1, 2))
        yield Sample(make(2, 5, 4), make(3, 2, 3, 3), make(3))


def result(function, *tensors, **kwargs):
    leaves = [t.detach().requires_grad_() for t in tensors]
    y = function(*leaves, **kwargs)
    return y.detach(), *torch.autograd.grad(y.sum(), leaves)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_few_channels(dtype):
    """In the simulator this is part of the test of every instance."""
    name = "conv2d_relu_max_pool2d"
    for form in few_channels.forms(name):
        for sample in few_channels.samples(Make("cuda", dtype)):
            few_channels.compare(TestConv2dReluMaxPool2d, name, form, sample)


def test_blocks_stride_over_tiles():
    """Forward and backward by tensor cores: on a GPU of one multiprocessor there are fewer blocks than images."""
    args = [torch.randint(-1, 2, shape).half() for shape in ((5, 9, 4, 4), (9, 9, 3, 3), (9,))]
    with cupyops.simulate(), assume_gpu(multiprocessors=1), cupyops.trace() as trace:
        ours = result(cupyops.conv2d_relu_max_pool2d, *args, padding=1)
    grids = [record.grid[0] for record in trace.launches() if "wd_mma" in record.kernel]
    assert grids == [2, 2]
    for mine, theirs in zip(ours, result(in_three, *args, padding=1)):
        assert torch.equal(mine, theirs)  # of small integers: the sums are exact


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_few_blocks_for_the_gradient_of_weight(dtype):
    """Each strides over the tiles of all images, as where there are more of them than blocks."""
    form = {
        torch.float32: FmaWeight(module.conv2d_relu_max_pool2d_bwd_weight, pooled=True, blocks=2),
        torch.float16: MmaWeight(module.conv2d_relu_max_pool2d_bwd_weight_mma, blocks=2),
    }[dtype]
    x, weight, bias = (torch.randint(-1, 2, shape).to(dtype) for shape in ((5, 9, 6, 4), (3, 9, 3, 3), (3,)))
    y, place = torch.nn.functional.max_pool2d_with_indices(F.relu(F.conv2d(x, weight, bias, padding=1)), 2)
    row, column = place // 4 % 2, place % 2
    place = torch.where(y > 0, 2 * row + column, 4).byte()
    grad_y, sums = torch.ones_like(y), [torch.empty_like(weight), torch.empty_like(bias)]
    problem = small_conv.pooled(small_conv.Sizes(*x.shape, *y.shape[1:], 1, 1), 3, dtype)
    with cupyops.simulate():
        launch = form.launch(problem, gpu(x.device))
        small_conv.sum_partials(launch, (grad_y, place, x), *sums)
    assert launch.grid[0] < 5
    for mine, theirs in zip(sums, result(in_three, x, weight, bias, padding=1)[2:]):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_in_little_shared_memory(dtype):
    """Channels in several chunks, and FMAs where the tensor cores' filters do not fit."""
    shapes = (3, 19, 9, 10), (35, 19, 3, 3), (35,)
    args = [torch.randint(-1, 2, shape).to(dtype) for shape in shapes]  # whose sums are exact, whatever the order
    with cupyops.simulate(), cupyops.trace() as trace, assume_gpu(shared=16 << 10):
        ours = result(cupyops.conv2d_relu_max_pool2d, *args, padding=1)
    launched = {record.kernel.partition("<")[0] for record in trace.launches()}
    assert launched >= {"conv2d_relu_max_pool2d_fwd", "conv2d_relu_max_pool2d_bwd"}
    theirs, truth = (result(in_three, *(a.to(to) for a in args), padding=1) for to in (dtype, torch.float64))
    for index, numbers in enumerate(zip(ours, theirs, truth)):
        Tolerance().judge(*numbers, f"result {index}")


@pytest.mark.parametrize("where", [pytest.param("cuda", marks=pytest.mark.gpu), "simulator"])
def test_special_values(where):
    """Equal maxima, none above zero, NaN, infinity: values, and where the gradient goes (that of weight without NaN)."""
    device = "cpu" if where == "simulator" else where
    x = torch.tensor([-1.0, 0.0, 1.0], device=device)[torch.randint(0, 3, (4, 1, 8, 6), device=device)]
    x[1, 0, 3, 3], x[2, 0, 0, 1], x[3] = float("nan"), float("inf"), -1.0
    weight, bias = torch.zeros(2, 1, 3, 3, device=device), torch.tensor([0.0, -0.5], device=device)
    weight[:, :, 1, 1] = 1.0
    finite, other = (x[[0, 3]], weight, bias), (x[1:3], weight, bias)
    with cupyops.simulate() if where == "simulator" else torch.enable_grad():
        ours = [result(cupyops.conv2d_relu_max_pool2d, *args, padding=1) for args in (finite, other)]
    theirs = [result(in_three, *args, padding=1) for args in (finite, other)]
    torch.testing.assert_close(ours[0], theirs[0])
    torch.testing.assert_close(ours[1][:2], theirs[1][:2], equal_nan=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"stride": 2}, "stride 1"),
        ({"dilation": 2}, "stride 1"),
        ({"groups": 2}, "one group"),
        ({"pool_kernel_size": 3}, "pooling by 2"),
        ({"pool_stride": 1}, "pooling by 2"),
    ],
)
def test_what_pytorch_computes(change, reason):
    x, weight = torch.randn(1, 2, 9, 9), torch.randn(2, 1 if "groups" in change else 2, 3, 3)
    with cupyops.simulate(), cupyops.trace() as trace:
        y = cupyops.conv2d_relu_max_pool2d(x, weight, **change)
    assert "reference" in trace.routes() and reason in str(trace)
    torch.testing.assert_close(y, in_three(x, weight, **change))


X, W = torch.ones(1, 2, 6, 6), torch.ones(3, 2, 3, 3)


@pytest.mark.parametrize(
    ("args", "kwargs", "culprit"),
    [
        ((1.0, W), {}, "input"),
        ((X[0, 0], W), {}, "input"),
        ((X, torch.ones(3, 5, 3, 3)), {}, "input"),
        ((X, W[0]), {}, "weight"),
        ((X, W, torch.ones(2)), {}, "bias"),
        ((X, W), {"stride": 0}, "stride"),
        ((X, W), {"padding": -1}, "padding"),
        ((X, torch.ones(3, 2, 9, 9)), {}, "weight"),
        ((X, W), {"pool_kernel_size": 0}, "pool_kernel_size"),
        ((X, W), {"pool_kernel_size": 5}, "pool_kernel_size"),
        ((X, W), {"pool_stride": "2"}, "pool_stride"),
    ],
)
def test_bad_input(args, kwargs, culprit):
    with pytest.raises(cupyops.InputError, match=f"^{culprit} (is|has) "):
        cupyops.conv2d_relu_max_pool2d(*args, **kwargs)


def test_architectures_in_turn():
    """What is planned for one that has tensor cores for bfloat16 is for no other that the same process simulates."""
    args = [torch.randint(-1, 2, shape).bfloat16() for shape in [(2, 8, 8, 8), (8, 8, 3, 3), (8,)]]
    kernels = []
    for arch in ("sm_80", "sm_75", "sm_80"):
        with cupyops.simulate(arch), cupyops.trace() as trace:
            result(cupyops.conv2d_relu_max_pool2d, *args)
        kernels.append({record.kernel for record in trace.launches()})
    assert kernels[0] == kernels[2] != kernels[1]
    assert any("mma" in name for name in kernels[0]) and not any("mma" in name for name in kernels[1])
