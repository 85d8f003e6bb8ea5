import contextlib
import functools
import subprocess
import sys

import pytest
import torch
from contract import Make, OperatorContract, Sample, assert_as_good_as_torch, placed
from torch.nn import functional as F

import cupyops
from cupyops.ops._cross_entropy import cross_entropy_fp32
from cupyops.testing import assume_gpu


@functools.wraps(F.cross_entropy)
def torch_cross_entropy(input, target, weight=None, **options):
    """PyTorch's, which refuses a weight that wants a gradient, as the contract's float64 truth gives it."""
    return F.cross_entropy(input, target, None if weight is None else weight.detach(), **options)


KERNELS = {
    "cross_entropy_fwd_two_pass",
    "cross_entropy_fwd_strided",
    "cross_entropy_bwd_two_pass",
    "cross_entropy_bwd_strided",
}


class TestCrossEntropy(OperatorContract):
    """Targets that are classes."""

    function = staticmethod(cupyops.cross_entropy)
    torch_function = staticmethod(torch_cross_entropy)
    kernels = KERNELS | {"cross_entropy_fwd_registers", "cross_entropy_fwd_persistent", "cross_entropy_fwd_weight"}

    differs = {("indices", "gpu"): "one sample that is ignored: the mean is NaN, and 0 in PyTorch on a GPU alone"}

    def samples(self, make: Make):
        yield from self.small_samples(make)
        for reduction in ("none", "mean", "sum"):  # a warp per row, several blocks, ends of rows off 16 bytes
            yield Sample(
                make(19, 101), make.integers(19, high=101), weights(make, 101), ignore_index=7, reduction=reduction
            )
        yield Sample(make(300, 5), make.integers(300, high=5))  # a thread per row
        yield Sample(make(5, 40), make.integers(5, high=40), weights(make, 40))
        yield Sample(make(5, 40).detach(), make.integers(5, high=40))  # no gradient in forward: a warp per row, a block
        yield Sample(make(3, 1031).detach(), make.integers(3, high=1031), weights(make, 1031))
        yield Sample(make(3, 1031), make.integers(3, high=1031), weights(make, 1031), label_smoothing=0.2)  # a block
        yield Sample(make(2, 16411), make.integers(2, high=16411))  # several blocks of the backward per row
        yield Sample(make(2, 70, 5, 9), make.integers(2, 5, 9, high=70), label_smoothing=0.1)  # slices of classes

    def small_samples(self, make: Make):
        yield Sample(make(4, 7), make.integers(4, high=7), weights(make, 7))
        yield Sample(make(5), make.integers(high=5))
        yield Sample(make(2, 18), make.integers(2, high=18))
        for reduction in ("none", "mean", "sum"):
            yield Sample(
                make(5, 3),
                make.integers(5, high=3),
                weights(make, 3),
                ignore_index=2,
                reduction=reduction,
                label_smoothing=0.3,
            )
        yield Sample(make(2, 3, 5), make.integers(2, 5, high=3), reduction="none")
        yield Sample(make(2, 3, 2, 2), make.integers(2, 2, 2, high=3), weights(make, 3), label_smoothing=1.0)

    def layouts(self, make: Make):
        yield from super().layouts(make)
        yield Sample(channels_last(make(2, 3, 4, 5)), make.integers(2, 4, 5, high=3), label_smoothing=0.1)
        yield Sample(
            channels_last(make(2, 21, 4, 5)), make.integers(2, 5, 4, high=21).transpose(1, 2), reduction="none"
        )
        yield Sample(make(2, 5, 21).detach().transpose(1, 2).requires_grad_(), make.integers(2, 5, high=21))


class TestProbabilities(OperatorContract):
    """Targets that are probabilities; they get a gradient too."""

    function = staticmethod(cupyops.cross_entropy)
    torch_function = staticmethod(torch_cross_entropy)
    kernels = KERNELS

    differs = {
        ("special_values", backend): "a probability of -inf: the kernel adds up p * x and p apart, and inf - inf is NaN"
        for backend in ("simulator", "gpu")
    }

    def samples(self, make: Make):
        yield from self.small_samples(make)
        for reduction in ("none", "mean", "sum"):
            yield Sample(make(19, 101), probabilities(make, 19, 101), weights(make, 101), reduction=reduction)
        yield Sample(make(300, 5), probabilities(make, 300, 5).detach())
        yield Sample(make(3, 1031), probabilities(make, 3, 1031), weights(make, 1031), label_smoothing=0.2)
        yield Sample(make(2, 70, 5, 9), probabilities(make, 2, 70, 5, 9), label_smoothing=0.1)

    def small_samples(self, make: Make):
        yield Sample(make(2, 18), probabilities(make, 2, 18))
        yield Sample(make(5), probabilities(make, 5))
        for reduction in ("none", "mean", "sum"):
            yield Sample(
                make(5, 3), probabilities(make, 5, 3), weights(make, 3), reduction=reduction, label_smoothing=0.3
            )
        yield Sample(make(2, 18).detach(), probabilities(make, 2, 18))
        yield Sample(make(2, 3, 2, 2), probabilities(make, 2, 3, 2, 2), weights(make, 3), label_smoothing=1.0)

    def layouts(self, make: Make):
        yield from super().layouts(make)
        yield Sample(channels_last(make(2, 3, 4, 5)), probabilities(make, 2, 3, 4, 5), label_smoothing=0.1)
        yield Sample(
            channels_last(make(2, 21, 4, 5)), channels_last(probabilities(make, 2, 21, 4, 5)), reduction="none"
        )
        yield Sample(make(2, 3, 4, 5), channels_last(probabilities(make, 2, 3, 4, 5)), reduction="sum")


def weights(make, classes):
    return make(classes, low=0.1).detach()


def probabilities(make, *shape):
    return make(*shape).detach().softmax(1 if len(shape) > 1 else 0).requires_grad_(make.requires_grad)


def channels_last(tensor):
    return tensor.detach().contiguous(memory_format=torch.channels_last).requires_grad_(tensor.requires_grad)


def assert_same(device, x, target, weight=None, tolerances=(None, None), **options):
    """Loss and gradients are PyTorch's."""
    results = []
    for function in (cupyops.cross_entropy, F.cross_entropy):
        leaf = x.detach().to(device).requires_grad_()
        y = function(leaf, target.to(device), None if weight is None else weight.to(device), **options)
        results.append((y.detach(), torch.autograd.grad(y.sum(), leaf)[0]))
    torch.testing.assert_close(*results, rtol=tolerances[0], atol=tolerances[1], equal_nan=True)


REDUCTIONS = ["none", "mean", "sum"]
SHAPES = [
    (3, 5),
    (3, 40),
    (2, 1040),
    (2, 5, 3),
    (2, 70, 3),
]  # a thread, a warp, a block to a row; an inner, with slices


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_everything_ignored(device, shape, label_smoothing):
    target = torch.full((*shape[:1], *shape[2:]), -100)
    for reduction in REDUCTIONS:
        assert_same(device, torch.randn(shape), target, reduction=reduction, label_smoothing=label_smoothing)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_special_values(device, shape, value):
    classes = torch.zeros((*shape[:1], *shape[2:]), dtype=torch.long)
    even = torch.full(shape, 1 / shape[1])
    for where in (0, 1, slice(None)):  # of the target's class, of another, of all of them
        x = torch.randn(shape)
        x[:1, where] = value
        for target in (classes, even):
            assert_same(device, x, target, reduction="none")
            assert_same(device, x, target, reduction="none", label_smoothing=0.1)


@pytest.mark.parametrize("shape", SHAPES)
def test_large_logits_keep_their_differences(device, shape):
    """log_softmax(x + c) = log_softmax(x): no digits are lost to a common offset, forward or backward."""
    offset, x = 2.0**14, torch.randn(shape).mul(64).round().div(64)  # exact in fp32, with the offset and without
    classes = torch.zeros((*shape[:1], *shape[2:]), dtype=torch.long, device=device)
    for target in (classes, torch.full(shape, 1 / shape[1], device=device)):
        for label_smoothing in (0.0, 0.1):
            results = []
            for logits in (x, x + offset):
                leaf = logits.to(device).requires_grad_()
                y = cupyops.cross_entropy(leaf, target, label_smoothing=label_smoothing)
                results.append((y.detach(), *torch.autograd.grad(y, leaf)))
            torch.testing.assert_close(*results, rtol=1e-5, atol=1e-7)


# a few threads, a warp, a block, on sm_90 a cluster to a row; with several rows to a block, more than one block
WRITTEN = [(5, 17), (5, 24), (70, 40), (5, 1001), (3, 4096), (2, 12289), (5, 30001)]


def simulated_loss(x, target, weight=None, arch="sm_80", **options):
    """The loss by the kernels of `arch`, and their names."""
    with cupyops.simulate(arch), cupyops.trace() as trace:
        y = cupyops.cross_entropy(x, target, weight, **options)
    return y, [record.kernel.partition("<")[0] for record in trace.launches()]


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("shape", WRITTEN)
def test_gradient_in_forward(arch, shape):
    """As good as PyTorch's for a grad_y of 1, which leaves it as it is, and for others, which write it anew."""
    shared = 101376 if shape[1] != 30001 else 24000 if arch == "sm_90" else 200_000
    with assume_gpu(multiprocessors=2, shared=shared, shared_total=shared + 1024):
        check_gradient_in_forward(arch, shape)


def check_gradient_in_forward(arch, shape):
    dtype = torch.bfloat16 if arch == "sm_90" else torch.float32
    x, target = torch.randn(shape).to(dtype), torch.randint(shape[1], shape[:1])
    x = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(shape) if shape[1] == 40 else x  # off 16 bytes
    target[1] = 7
    ours = functools.partial(simulated_loss, arch=arch)
    for weight, reduction, factor in [(None, "mean", 1), (torch.rand(shape[1]), "mean", 3), (None, "none", 1)]:
        options = dict(reduction=reduction, ignore_index=7)
        grads = []
        for function, to in (ours, dtype), (F.cross_entropy, dtype), (F.cross_entropy, torch.float64):
            leaf = x.to(to).detach().requires_grad_()
            y = function(leaf, target, None if weight is None else weight.to(dtype).to(to), **options)
            if function is ours:
                y, kernels = y
                assert {"cross_entropy_fwd_registers", "cross_entropy_fwd_persistent"} & {*kernels}
            # of several losses one is weighed otherwise: its row alone is written anew
            grad_y = (
                torch.full_like(y, factor) if y.dim() == 0 else torch.ones_like(y).index_fill(0, torch.tensor(0), 5)
            )
            with cupyops.simulate(arch):
                grads.append(torch.autograd.grad(y, leaf, grad_y)[0])
        assert_as_good_as_torch(*grads, f"{weight is None} {options}")
        assert not grads[0][target == 7].any()


def test_gradient_in_forward_is_handed_out_once():
    """While the graph is kept each backward gives a tensor of its own, which may be changed; the last the one written."""
    x, target = torch.randn(4, 40, requires_grad=True), torch.tensor([1, 2, 39, 0])
    (expected,) = torch.autograd.grad(F.cross_entropy(x, target), x)
    y, _ = simulated_loss(x, target)
    written = y.grad_fn.saved_tensors[-1]
    with cupyops.simulate():
        for _ in range(2):
            (grad,) = torch.autograd.grad(y, x, retain_graph=True)
            torch.testing.assert_close(grad, expected)
            assert grad.data_ptr() != written.data_ptr()
            grad.zero_()
        (twice,) = torch.autograd.grad(2 * y, x, retain_graph=True)
        (grad,) = torch.autograd.grad(y, x)
    torch.testing.assert_close((twice, grad), (2 * expected, expected))
    assert grad.data_ptr() == written.data_ptr()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        torch.autograd.grad(y, x)


def test_gradients_of_two_losses_add_up():
    x, target = torch.randn(4, 40, requires_grad=True), torch.tensor([1, 2, 39, 0])
    for _ in range(2):  # into x.grad as well
        first_loss, second_loss = simulated_loss(x, target)[0], simulated_loss(x, target, reduction="sum")[0]
        with cupyops.simulate():
            (first_loss + second_loss).backward()
    expected = torch.autograd.grad(F.cross_entropy(x, target) * 2 + F.cross_entropy(x, target, reduction="sum") * 2, x)
    torch.testing.assert_close(x.grad, *expected)


@pytest.mark.parametrize("what", ["no_grad", "no gradient", "smoothing", "probabilities", "compiled"])
def test_no_gradient_in_forward(what):
    x, target, options = torch.randn(4, 40, requires_grad=True), torch.tensor([1, 2, 39, 0]), {}
    function = simulated_loss
    if what == "no gradient":
        x = x.detach()
    elif what == "smoothing":
        options = dict(label_smoothing=0.1)
    elif what == "probabilities":
        target = torch.softmax(x.detach(), 1)
    elif what == "compiled":
        with cupyops.simulate(), cupyops.trace() as trace:
            torch.compile(cupyops.cross_entropy, backend="aot_eager")(x, target).backward()
        function = lambda *_: (None, [record.kernel for record in trace.launches()])
    with torch.set_grad_enabled(what != "no_grad"):
        _, kernels = function(x, target, **options)
    assert kernels and not any("fwd_registers" in kernel or "fwd_persistent" in kernel for kernel in kernels)


def test_one_hot_probabilities_are_classes(device):
    x, classes = torch.randn(6, 40, device=device), torch.arange(6, device=device)
    one_hot = F.one_hot(classes, 40).float()
    for label_smoothing in (0.0, 0.2):
        options = dict(label_smoothing=label_smoothing)
        torch.testing.assert_close(
            cupyops.cross_entropy(x, one_hot, **options), cupyops.cross_entropy(x, classes, **options)
        )


def test_gradient_of_weight_with_probabilities(device):
    x, p = torch.randn(4, 3, device=device), torch.rand(4, 3, device=device)
    grads = []
    for function in (cupyops.cross_entropy, F.cross_entropy):
        weight = torch.ones(3, device=device, requires_grad=True)
        grads += torch.autograd.grad(function(x, p, weight), weight)
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_probabilities_of_another_dtype(device, dtype):
    x, p = torch.randn(4, 3, device=device), torch.rand(4, 3, device=device).to(dtype)
    torch.testing.assert_close(cupyops.cross_entropy(x, p), F.cross_entropy(x, p))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_integer_targets(device, dtype):
    x, target = torch.randn(4, 3, device=device), torch.tensor([2, 0, 1, 2], device=device)
    torch.testing.assert_close(cupyops.cross_entropy(x, target.to(dtype)), F.cross_entropy(x, target))


def test_deprecated_arguments(device):
    x, target = torch.randn(4, 3, device=device), torch.tensor([2, 0, 1, 2], device=device)
    for options in (dict(size_average=False), dict(reduce=False), dict(size_average=True, reduce=True)):
        with pytest.warns(UserWarning, match="deprecated"):
            y = cupyops.cross_entropy(x, target, **options)
        with pytest.warns(UserWarning, match="deprecated"):
            torch.testing.assert_close(y, F.cross_entropy(x, target, **options))


@pytest.mark.parametrize(
    "message, change",
    [
        ("input", dict(input=torch.ones(4, 3, dtype=torch.long))),
        ("input", dict(input=torch.tensor(1.0))),
        ("input", dict(input=[1.0])),
        ("target", dict(target=None)),
        ("target has batch size 5, but input has 4", dict(target=torch.zeros(5, dtype=torch.long))),
        ("target has batch size 5, but input has 4", dict(target=torch.zeros(5, 3))),
        ("target", dict(target=torch.zeros(4))),
        ("target", dict(target=torch.zeros(4, 2))),
        ("target", dict(target=torch.zeros(4, 3, dtype=torch.long))),
        ("target", dict(target=torch.zeros(4, dtype=torch.bool))),
        ("target", dict(target=torch.zeros(4, 3, dtype=torch.complex64))),
        ("target", dict(target=torch.zeros(4, dtype=torch.long, device="meta"))),
        ("weight", dict(weight=torch.ones(4))),
        ("weight", dict(weight=torch.ones(3, 1))),
        ("weight", dict(weight=torch.ones(3, dtype=torch.long))),
        ("weight", dict(weight=torch.ones(3).double())),
        ("weight", dict(weight=torch.ones(3, requires_grad=True))),
        ("weight", dict(weight=torch.ones(3, device="meta"))),
        ("reduction", dict(reduction="average")),
        ("ignore_index", dict(ignore_index=None)),
        ("ignore_index", dict(ignore_index=1, target=torch.zeros(4, 3))),
        ("label_smoothing", dict(label_smoothing=-0.1)),
        ("label_smoothing", dict(label_smoothing=1.5)),
        ("label_smoothing", dict(label_smoothing=float("nan"))),
        ("label_smoothing", dict(label_smoothing="a lot")),
    ],
)
def test_bad_arguments(device, message, change):
    call = dict(input=torch.randn(4, 3), target=torch.zeros(4, dtype=torch.long)) | change
    with pytest.raises(cupyops.InputError, match=message):
        cupyops.cross_entropy(**{name: placed(value, device) for name, value in call.items()})


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bad", [5000, -1])
def test_target_out_of_range_on_a_gpu(shape, bad):
    """It says which, and stops the kernel: after that the process has no use of the GPU, so it is one of its own."""
    program = f"""
import torch, cupyops
target = torch.zeros({(*shape[:1], *shape[2:])}, dtype=torch.long, device="cuda")
target.view(-1)[1] = {bad}
cupyops.cross_entropy(torch.zeros({shape}, device="cuda"), target)
torch.cuda.synchronize()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (
        done.returncode != 0
        and f"target[1] is {bad}, expected ignore_index or a class in [0, {shape[1]})" in done.stdout
    )


@pytest.mark.parametrize("shape", [(37, 100), (5, 5000), (2, 40000), (4, 7, 30), (600, 10), (7,)], ids=str)
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_fp32_of_half_logits(device, shape, label_smoothing):
    """The loss of logits.float(), and the gradient of the logits, with no copy of them; by any gradient of the loss."""
    sizes = shape if len(shape) > 1 else (1, *shape)
    target = torch.randint(0, sizes[1], (sizes[0], *sizes[2:]), device=device)
    if target.numel() > 1:
        target.view(-1)[1] = -100
    target = target if len(shape) > 1 else target[0]
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.randn(shape, device=device).to(dtype).requires_grad_()
        wide = x.detach().double().requires_grad_()
        for reduction in ("none", "mean", "sum"):
            options = {"reduction": reduction, "label_smoothing": label_smoothing}
            exact = F.cross_entropy(wide, target, **options)
            for scale in (1.0, 0.013):  # forward writes the gradient for 1, backward finds it again for others
                with cupyops.simulate("sm_90") if device.type == "cpu" else contextlib.nullcontext():
                    y = cross_entropy_fp32(x, target, **options)
                    (grad,) = torch.autograd.grad(y, x, torch.full_like(y, scale))
                (right,) = torch.autograd.grad(exact, wide, torch.full_like(exact, scale), retain_graph=True)
                assert y.dtype is torch.float32 and grad.dtype is dtype
                torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)
                torch.testing.assert_close(grad.double(), right, rtol=1e-2, atol=1e-6)


def test_autocast_asks_for_fp32_without_a_cast(device):
    x = torch.randn(6, 50, device=device).bfloat16().requires_grad_()
    target = torch.randint(0, 50, (6,), device=device)
    with torch.autocast(device.type, torch.bfloat16), cupyops.trace() as trace:
        y = cupyops.cross_entropy(x, target)
    assert y.dtype is torch.float32 and {r.operator for r in trace.records if r.operator} == {
        "cupyops::cross_entropy_fp32"
    }
    torch.testing.assert_close(y, F.cross_entropy(x.float(), target))
    weight = torch.rand(50, device=device)  # which is to stay what it is
    with torch.autocast(device.type, torch.bfloat16):
        y = cupyops.cross_entropy(x, target, weight)
    torch.testing.assert_close(y, F.cross_entropy(x.float(), target, weight))


@pytest.mark.parametrize("options", [{}, {"reduction": "none"}, {"label_smoothing": 0.1}])
def test_graphs_of_dynamic_sizes(options):
    """One for all sizes; that a default is a number and no symbol costs tracing it once more."""
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, t: cupyops.cross_entropy(x, t, **options), backend=counter, dynamic=True)
    with cupyops.simulate():
        for rows in (4, 6, 33, 70, 130):
            x, target = torch.randn(rows, 7, requires_grad=True), torch.randint(7, (rows,))
            y = compiled(x, target)
            torch.testing.assert_close(y, F.cross_entropy(x, target, **options))
            y.sum().backward()
    assert counter.frame_count <= 2
    torch._dynamo.reset()


@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("weighed", [False, True])
def test_decomposition_of_a_smoothed_loss(weighed, reduction):
    """PyTorch's own changes a tensor in place, which a decomposed program may not."""
    weight = torch.rand(7) if weighed else None

    class Loss(torch.nn.Module):
        def forward(self, x, target):
            return cupyops.cross_entropy(x, target, weight, label_smoothing=0.1, reduction=reduction)

    x, target = torch.randn(5, 7), torch.tensor([3, -100, 0, 6, 1])
    expected = F.cross_entropy(x, target, weight, label_smoothing=0.1, reduction=reduction)
    for opened in (cupyops.simulate, contextlib.nullcontext):
        with opened():
            program = torch.export.export(Loss(), (x, target))
            taken = program.run_decompositions({**torch.export.default_decompositions(), **cupyops.decompositions()})
        assert not [node for node in taken.graph.nodes if str(node.target).startswith("cupyops")]
        torch.testing.assert_close(taken.module()(x, target), expected)
