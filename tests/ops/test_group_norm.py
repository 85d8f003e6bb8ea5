import pytest
import torch
from contract import DTYPES, Make, OperatorContract, Sample, assert_as_good_as_torch, misaligned, sliced, transposed

import cupyops
from cupyops._util.strides import suggested_format
from cupyops.ops._group_norm import group_norm_alike

NAN, INF = float("nan"), float("inf")
F = torch.nn.functional


LAST = torch.channels_last


def alike(x, num_groups, weight=None, bias=None, eps=1e-5):
    """Ours, laid out as x is."""
    return group_norm_alike(x, num_groups, weight, bias, eps)


def alike_by_torch(x, num_groups, weight=None, bias=None, eps=1e-5):
    """PyTorch's of channels_last loses digits on a CPU, and ends the process where x wants no gradient."""
    y = F.group_norm(x.flatten(2), num_groups, weight, bias, eps).reshape(x.shape)
    return y.contiguous(memory_format=suggested_format(x))


class TestGroupNorm(OperatorContract):
    function = staticmethod(cupyops.group_norm)
    torch_function = staticmethod(F.group_norm)
    kernels = {
        "group_norm_fwd_sub_warp", "group_norm_fwd_persistent", "group_norm_fwd_shared_memory",
        "group_norm_fwd_partials", "group_norm_fwd_two_pass", "group_norm_bwd_sub_warp", "group_norm_bwd_persistent",
        "group_norm_bwd_shared_memory", "group_norm_bwd_partials", "group_norm_bwd_two_pass",
        "group_norm_bwd_parameters",
    }  # fmt: skip
    too_large = "2^31 elements of a group"

    def compare(self, sample: Sample, what: str, strides: bool = False, grad_kind: str = "random"):
        """Of a constant gradient over a long channel what is summed cancels, down to the rounding of the mean."""
        long = sample.args[0].numel() > 4000
        super().compare(sample, what, strides, "strided" if long and grad_kind == "expanded" else grad_kind)

    def samples(self, make: Make):
        width = 16 // make.dtype.itemsize
        yield from self.small_samples(make)
        yield from self.unaligned_samples(make, width)
        yield from self.sub_warp_samples(make)
        yield Sample(make(3, 4, 2, width), 2, make(4), make(4))  # whole vectors, one or two in a thread
        yield Sample(make(2, 3, width + 1), 1, make(3), make(3))  # a thread for a small plane
        yield Sample(make(1, 4, 33 * width), 1, make(4), make(4))  # two
        yield Sample(make(1, 2, 140 * width), 1, make(2), make(2))  # four
        yield Sample(make(1, 2, 513 * width), 1, make(2), make(2))  # eight
        yield Sample(make(40, 12, 1), 3, make(12), make(12))  # planes of one element
        yield Sample(make(1, 2, 4200 * width), 1, make(2), make(2))  # several blocks
        yield Sample(make(1, 2, 260 * width), 2, make(2), make(2))  # a block has one channel
        yield Sample(make(1, 2, 1100 * width), 1, make(2), make(2))  # the second block of a cluster has
        yield Sample(make(5, 2, 9 * width + 1), 2, make(2), make(2))  # four threads for a plane
        yield Sample(make(0, 4, 3), 2, make(4), make(4))

    def unaligned_samples(self, make: Make, width: int):
        """Groups some of whose vectors have elements of two channels."""
        yield Sample(make(7, 8, 4 * width + max(1, width // 4)), 2, make(8), make(8))  # several rows of a warp
        yield Sample(make(1, width, 5, 7), 1)  # a vector or two in a thread
        for plane in (129, 257, 1025):  # two, four and eight
            yield Sample(make(1, width, plane), 1, make(width), make(width))
        for plane in (33, 140, 1400):  # groups that begin and end within a vector
            yield Sample(make(2, 3, plane * width + 1), 1, make(3), make(3))

    def sub_warp_samples(self, make: Make):
        """Groups of vectors of 8 bytes, and of no whole ones, that leave a part of a block empty."""
        for groups in (1, 2, 4):
            yield Sample(make(5, 4, 7, 7), groups, make(4), make(4))
        yield Sample(make(1, 2, 7, 7), 1)
        yield Sample(make(17, 4, 31), 2, make(4))  # more than a block; one parameter
        yield Sample(make(300, 1, 38), 1, make(1), make(1))  # fewer vectors than threads have room for
        for channels, plane in ((28, 9), (14, 9), (9, 9)):  # sixteen threads, of fewer than the channels
            yield Sample(make(3, channels, plane), 1, make(channels), make(channels))
        for channels in (10, 5):  # a warp
            yield Sample(make(2, channels, 25), 1, make(channels), make(channels))

    def small_samples(self, make: Make):
        yield Sample(make(2, 6, 5, 7), 3, make(6), make(6))
        yield Sample(make(3, 4, 2, 8), 2, make(4), make(4), eps=0.1)  # a channel is whole vectors
        yield Sample(make(2, 6, 3), 2)

    def layouts(self, make: Make):
        yield from super().layouts(make)
        x = make(2, 6, 4, 5).detach().to(memory_format=torch.channels_last)
        yield Sample(x.requires_grad_(), 3, make(6), make(1).detach().expand(6).requires_grad_())


class TestChannelsLast(OperatorContract):
    """Read and written as they lie, in a result alike."""

    function = staticmethod(alike)
    torch_function = staticmethod(alike_by_torch)
    kernels = {
        "group_norm_fwd_nhwc_partials", "group_norm_fwd_nhwc_finalize", "group_norm_fwd_nhwc",
        "group_norm_bwd_nhwc_partials", "group_norm_bwd_nhwc_finalize", "group_norm_bwd_nhwc",
        "group_norm_bwd_parameters",
    }  # fmt: skip
    too_large = "2^31 elements of a group"

    def samples(self, make: Make):
        """Groups that end in another tile of columns; several splits of the pixels; a tile that is not full; volumes."""
        yield from self.small_samples(make)
        for shape, groups in (((3, 24, 5, 13), 1), ((1, 96, 4, 33), 6), ((1, 560, 23, 19), 8)):
            yield Sample(last(make, *shape), groups, make(shape[1]), make(shape[1]))
        yield Sample(last(make, 1, 16, 3, 6, 7), 2)

    def small_samples(self, make: Make):
        yield Sample(last(make, 2, 16, 8, 9), 2, make(16), make(16))
        yield Sample(last(make, 1, 8, 12, 11), 2, make(8), eps=0.1)

    def layouts(self, make: Make):
        yield from self.samples(make)
        for change in (transposed, sliced, misaligned):
            yield Sample(
                change(last(make, 2, 16, 8, 9)), 2, change(make(16)), make(1).detach().expand(16).requires_grad_()
            )

    @pytest.mark.gpu
    def test_more_than_2_31(self):
        """The same images over and over: 2^32 elements of a half type whose sums do not overflow."""
        torch.manual_seed(0)
        count, parameters = 4096, [torch.randn(64, device="cuda").bfloat16().requires_grad_() for _ in range(2)]
        few, grad_y = (torch.randn(4, 64, 64, 64, device="cuda").bfloat16().to(memory_format=LAST) for _ in range(2))
        many = lambda one: one.movedim(1, -1).expand(count, 4, 64, 64, 64).flatten(0, 1).movedim(-1, 1)
        x = many(few).requires_grad_()
        assert x.is_contiguous(memory_format=LAST) and x.numel() == 1 << 32
        with cupyops.trace() as trace:
            y = alike(x, 32, *parameters)
        assert {one.kernel.partition("<")[0] for one in trace.launches()} <= self.kernels
        found = y.detach(), *torch.autograd.grad(y, (x, *parameters), many(grad_y))
        truth = gradients(alike_by_torch, grad_y.double(), few.double(), 32, *(one.double() for one in parameters))
        for at in (0, count // 2 - 1, count // 2, count - 1):
            for ours, exact in zip(found[:2], truth):
                torch.testing.assert_close(ours[4 * at : 4 * at + 4].double(), exact, rtol=8e-3, atol=8e-3)
        for ours, exact in zip(found[2:], truth[2:]):
            torch.testing.assert_close(ours.double() / count, exact, rtol=1e-2, atol=5e-2)


def last(make: Make, *shape: int):
    """Of channels_last."""
    x = make(*shape).detach().to(memory_format=LAST if len(shape) == 4 else torch.channels_last_3d)
    return x.requires_grad_(make.requires_grad)


def gradients(function, grad_y, x, *args):
    leaves = [t.detach().requires_grad_() for t in (x, *args[1:])]
    y = function(leaves[0], args[0], *leaves[1:])
    return y, *torch.autograd.grad(y, leaves, grad_y.to(y.dtype))


# one for each form of the kernels
SHAPES = [(2, 6, 5, 7), (2, 4, 16, 16), (2, 32, 5, 7), (2, 4, 7, 7), (2, 8, 7, 7), (2, 128, 7, 7), (1, 2, 4400 * 4 + 1)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values(device, dtype, shape):
    """What is not finite stays in its group."""
    x, grad_y = (torch.randn(shape).to(device, dtype) for _ in range(2))
    weight, bias = (torch.randn(shape[1]).to(device, dtype) for _ in range(2))
    for value in (NAN, INF, -INF):
        x[0, 0].view(-1)[3] = value
        with cupyops.simulate():
            ours, theirs = (gradients(f, grad_y, x, 2, weight, bias) for f in (cupyops.group_norm, F.group_norm))
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a.isnan(), b.isnan())


@pytest.mark.parametrize("at", [0, -1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_of_a_channel(device, dtype, shape, at):
    """They stay there, whichever others a vector has elements of: in y, and in what is summed."""
    x, grad_y = (torch.randn(shape).to(device, dtype) for _ in range(2))
    weight, bias = (torch.randn(shape[1]).to(device, dtype) for _ in range(2))
    for value in (NAN, INF):
        grad_y[0, 1].view(-1)[at] = value
        weight[1] = value
        with cupyops.simulate():
            ours, theirs = (gradients(f, grad_y, x, 2, weight, bias) for f in (cupyops.group_norm, F.group_norm))
        for a, b in zip((ours[0], *ours[2:]), (theirs[0], *theirs[2:])):
            torch.testing.assert_close(a.isfinite(), b.isfinite())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_mean_far_from_zero(dtype, shape):
    """E[x^2] - mean^2 would have no correct digit here."""
    x = (1000 + torch.randn(shape, dtype=torch.float64)).to(dtype)
    with cupyops.simulate():
        y = cupyops.group_norm(x, 2)
    truth = F.group_norm(x.double() - 1000, 2)
    torch.testing.assert_close(y.double(), truth, rtol=0, atol=4000 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
def test_special_values_of_channels_last(device, dtype):
    """What is not finite stays in its group; a mean far from zero costs no digits."""
    x = (100 + torch.randn(2, 16, 12, 9)).to(device, dtype).to(memory_format=LAST)
    grad_y, weight, bias = (torch.randn(shape).to(device, dtype) for shape in (x.shape, 16, 16))
    truth = gradients(alike_by_torch, grad_y.double(), x.double(), 2, weight.double(), bias.double())
    with cupyops.simulate():
        ours, theirs = (gradients(f, grad_y, x, 2, weight, bias) for f in (alike, alike_by_torch))
    for a, b, c, what in zip(ours, theirs, truth, ("y", "grad_x", "grad_weight", "grad_bias")):
        assert_as_good_as_torch(a, b, c, what)
    assert all(one.is_contiguous(memory_format=LAST) for one in ours[:2])
    for value in (NAN, INF, -INF):
        x[0, 0, 3, 3] = value
        with cupyops.simulate():
            ours, theirs = (gradients(f, grad_y, x, 2, weight, bias) for f in (alike, alike_by_torch))
        for a, b in zip(ours, theirs):
            torch.testing.assert_close(a.isnan(), b.isnan())


def test_channels_last_that_no_kernel_reads_as_it_lies():
    """Short groups, and channels that are no whole vectors: copied, and the result is channels_last as well."""
    for shape, groups in (((2, 16, 3, 4), 4), ((2, 6, 30, 30), 2)):
        x = torch.randn(shape).to(memory_format=LAST)
        with cupyops.simulate(), cupyops.trace() as trace:
            y = alike(x, groups)
        assert y.is_contiguous(memory_format=LAST) and not any("nhwc" in one.kernel for one in trace.launches())
        torch.testing.assert_close(y, F.group_norm(x, groups))


def check_cluster(shape, kernels):
    x, grad_y = (Make("cpu", torch.float16)(*shape).detach() for _ in range(2))
    weight, bias = (Make("cpu", torch.float16)(shape[1]).detach() for _ in range(2))
    with cupyops.simulate("sm_90"), cupyops.trace() as trace:
        ours = gradients(cupyops.group_norm, grad_y, x, 1, weight, bias)
    assert {record.kernel for record in trace.launches()} >= kernels
    theirs = gradients(F.group_norm, grad_y, x, 1, weight, bias)
    truth = gradients(F.group_norm, grad_y.double(), x.double(), 1, weight.double(), bias.double())
    for a, b, c, what in zip(ours, theirs, truth, ("y", "grad_x", "grad_weight", "grad_bias")):
        assert_as_good_as_torch(a, b, c, what)


def test_small_planes_of_a_cluster():
    check_cluster((1, 13001, 3), {"group_norm_fwd_shared_memory<__half>", "group_norm_bwd_shared_memory<__half>"})


@pytest.mark.parametrize(
    "shape", [(1, 8, 2559), (1, 300, 121), (1, 2, 16404), (3, 3, 13001), (1, 9, 4333), (2, 1, 39001)], ids=str
)
def test_unaligned_planes_of_a_cluster(shape):
    """A block ends in a vector of two channels, or where a channel does; blocks have one channel; heads and tails."""
    check_cluster(shape, {"group_norm_fwd_persistent<__half, 8, false>", "group_norm_bwd_persistent<__half, 8, false>"})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("beyond", [1, 2, 3, -1])
@pytest.mark.parametrize("vectors", [31, 32, 33, 64, 129])
def test_each_end_of_a_group_counts(dtype, beyond, vectors):
    """Of groups that begin and end anywhere in a vector, whoever has what is not whole vectors."""
    x = torch.randn(9, 1, vectors * 16 // dtype.itemsize + beyond)
    x[:, :, :2], x[:, :, -2:] = 30, -20
    x, grad_y = x.to(dtype), torch.randn_like(x).to(dtype)
    weight, bias = torch.randn(1).to(dtype), torch.randn(1).to(dtype)
    with cupyops.simulate():
        ours = gradients(cupyops.group_norm, grad_y, x, 1, weight, bias)
    truth = gradients(F.group_norm, grad_y.double(), x.double(), 1, weight.double(), bias.double())
    for found, expected in zip(ours[:2], truth):  # in which a sum shows that misses one
        close = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(
            found.double(), expected, rtol=close, atol=close * expected.detach().abs().max().item()
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("vectors", "forward", "backward"), [
    (49, (8, 7), (16, 4)), (61, (16, 7), (16, 4)), (105, (16, 7), (32, 4)), (421, (64, 7), (128, 4)),
    (801, (128, 7), (128, 7)),
])  # fmt: skip
def test_short_groups_of_whole_vectors(device, dtype, vectors, forward, backward):
    """A part of a warp, or several, have one; blocks are not full."""
    channels = 16 // dtype.itemsize  # of as many elements as a group has vectors
    x, weight, bias = (torch.randn(shape).to(device, dtype) for shape in ((9, channels, vectors), channels, channels))
    grad_y = torch.randn_like(x)
    with cupyops.simulate(), cupyops.trace() as trace:
        ours = gradients(cupyops.group_norm, grad_y, x, 1, weight, bias)
    theirs = gradients(F.group_norm, grad_y, x, 1, weight, bias)
    truth = gradients(F.group_norm, grad_y.double(), x.double(), 1, weight.double(), bias.double())
    for a, b, c, what in zip(ours, theirs, truth, ("y", "grad_x", "grad_weight", "grad_bias")):
        assert_as_good_as_torch(a, b, c, what)
    of_type = "__half" if dtype is torch.float16 else "float"
    names = {(one.kernel, one.block[0]) for one in trace.launches()}
    for way, (threads, each) in (("fwd", forward), ("bwd", backward)):
        unrolled = threads if threads == 8 or (way, threads) == ("bwd", 128) else 0
        assert (f"group_norm_{way}_sub_warp<{of_type}, 16, {unrolled}, {each}>", threads) in names


def test_many_images_of_few_channels():
    """Parts of the images are added first, the last of which has fewer."""
    x, weight, bias = torch.randn(2100, 4, 2), torch.randn(4), torch.randn(4)
    grad_y = torch.randn_like(x)
    with cupyops.simulate(), cupyops.trace() as trace:
        ours = gradients(cupyops.group_norm, grad_y, x, 2, weight, bias)
    truth = gradients(F.group_norm, grad_y.double(), x.double(), 2, weight.double(), bias.double())
    torch.testing.assert_close([one.double() for one in ours], list(truth), rtol=1e-4, atol=1e-4)
    assert [one.grid for one in trace.launches() if "parameters" in one.kernel] == [(1, 3, 1), (1, 1, 1)]


@pytest.mark.parametrize("plane", [(2, 1), (3, 1), (8, 1), (16, 1), (1, 3), (2, 4), (3, 5), (2, 49)], ids=str)
def test_groups_that_are_nearly_constant(plane):
    """The mean's rounding, which weighs times rstd, is in neither y nor the gradient."""
    x = 1000 + torch.randn(100, *plane) / 16
    grad_y, weight, bias = torch.randn_like(x), torch.randn(plane[0]), torch.zeros(plane[0])
    with cupyops.simulate():
        ours = gradients(cupyops.group_norm, grad_y, x, 1, weight, bias)
    truth = gradients(F.group_norm, grad_y.double(), x.double(), 1, weight.double(), bias.double())
    rstd = torch.rsqrt(x.double().var((1, 2), keepdim=True, correction=0) + 1e-5)
    scale = weight.abs().max() * torch.finfo(torch.float32).eps
    for a, b, allowed in zip(ours, truth, (8 * scale, 16 * scale * rstd * grad_y.abs().amax((1, 2), keepdim=True))):
        assert ((a.double() - b).abs() <= allowed).all()


@pytest.mark.parametrize(("dtype", "step"), [(torch.float16, 0.5), (torch.bfloat16, 4.0)], ids=str)
@pytest.mark.parametrize(("images", "channels"), [(50, 4), (6, 144)])
@pytest.mark.parametrize("groups", [1, 2])
def test_short_groups_of_half_types_that_are_nearly_constant(dtype, step, images, channels, groups):
    """But for a bit of some: their sums are exact."""
    x = (1000 + step * (torch.rand(images, channels, 49) < 0.05)).to(dtype)
    x[..., 0] = 1000 + step
    grad_y, weight, bias = (torch.randn(s).to(dtype) for s in (x.shape, (channels,), (channels,)))
    with cupyops.simulate():
        ours = gradients(cupyops.group_norm, grad_y, x, groups, weight, bias)
    theirs = gradients(F.group_norm, grad_y, x, groups, weight, bias)
    truth = gradients(F.group_norm, grad_y.double(), x.double(), groups, weight.double(), bias.double())
    for a, b, c, what in zip(ours, theirs, truth, ("y", "grad_x", "grad_weight", "grad_bias")):
        assert_as_good_as_torch(a, b, c, what)


def test_a_constant_group_is_the_bias():
    weight, bias = torch.randn(4), torch.randn(4)
    with cupyops.simulate():
        y = cupyops.group_norm(torch.full((2, 4, 5), 0.7), 2, weight, bias)
    assert torch.equal(y, bias[:, None].expand(2, 4, 5))


@pytest.mark.parametrize(("dtype", "plane"), [(torch.float32, 33), (torch.bfloat16, 66)], ids=str)
def test_a_variance_that_overflows(dtype, plane):
    x = Make("cpu", dtype)(2, 2, plane)
    with torch.no_grad():
        x[1, 1, 3] = 1e30
    with cupyops.simulate():
        y = cupyops.group_norm(x, 2)
        (grad,) = torch.autograd.grad(y.sum(), x)
    assert not y[1, 1].any() and not grad[1, 1].any() and y[1, 0].any()


def test_double_backward_of_a_bias_without_weight():
    x, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2, 4, 3), (4,)))
    assert torch.autograd.gradgradcheck(lambda x, bias: cupyops.group_norm(x, 2, None, bias), (x, bias))


@pytest.mark.parametrize("simulated", [False, True])
def test_bias_without_weight(simulated):
    """PyTorch's own backward raises."""
    x, bias = (torch.randn(s, requires_grad=True) for s in ((2, 4, 3), (4,)))
    with cupyops.simulate() if simulated else torch.enable_grad():
        found = torch.autograd.grad(cupyops.group_norm(x, 2, None, bias).square().sum(), (x, bias))
    y = F.group_norm(x, 2, torch.ones(4), bias)
    torch.testing.assert_close(found, torch.autograd.grad(y.square().sum(), (x, bias)))


def test_half_input_with_float_parameters_on_a_cpu():
    x, weight = torch.randn(3, 4, 5).half(), torch.randn(4)
    torch.testing.assert_close(cupyops.group_norm(x, 2, weight), F.group_norm(x, 2, weight))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(
    "shape", [(32, 512, 32, 32), (32, 512, 31, 33), (8, 256, 128, 128), (2, 64, 1000), (1, 32, 3, 333, 333)], ids=str
)
def test_large(shape, last, dtype):
    """As good as PyTorch, of every size of group."""
    args = [torch.randn(s, device="cuda").to(dtype) for s in (shape, shape)]
    if last and len(shape) == 4:
        args = [one.to(memory_format=LAST) for one in args]
    weight, bias = (torch.randn(shape[1], device="cuda").to(dtype) for _ in range(2))
    functions = alike if last else cupyops.group_norm, F.group_norm
    ours, theirs = (gradients(f, *args, 32, weight, bias) for f in functions)
    truth = gradients(F.group_norm, *[t.double() for t in args], 32, weight.double(), bias.double())
    for a, b, c, what in zip(ours, theirs, truth, ("y", "grad_x", "grad_weight", "grad_bias")):
        assert_as_good_as_torch(a, b, c, what)


X = torch.ones(2, 4, 3)


@pytest.mark.parametrize(("args", "kwargs", "culprit"), [
    (([[1.0, 2.0]], 1), {}, "input"), ((torch.ones(2, 4, dtype=torch.int64), 2), {}, "input"),
    ((torch.ones(4), 2), {}, "input"), ((torch.ones(1, 2), 2), {}, "input"), ((X, 3), {}, "num_groups"),
    ((X, 0), {}, "num_groups"), ((X, 2.0), {}, "num_groups"), ((X, True), {}, "num_groups"),
    ((X, 2, [1.0] * 4), {}, "weight"), ((X, 2, torch.ones(3)), {}, "weight"),
    ((X, 2, torch.ones(4, 1)), {}, "weight"), ((X, 2, torch.ones(4).half()), {}, "weight"),
    ((X, 2, torch.ones(4, device="meta")), {}, "weight"), ((X, 2), {"bias": torch.ones(())}, "bias"),
    ((X, 2), {"bias": torch.ones(4).double()}, "bias"), ((X, 2), {"eps": "1"}, "eps"),
])  # fmt: skip
def test_bad_input(args, kwargs, culprit):
    with pytest.raises(cupyops.InputError, match=f"^{culprit} is "):
        cupyops.group_norm(*args, **kwargs)
