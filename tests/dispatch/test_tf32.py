"""Products of float32 under PyTorch's flags of TF32: the kernels multiply exactly, and PyTorch's own function obeys them."""

import pytest
import torch
import torch.nn.functional as F

import cupyops
from cupyops._dispatch.gpu import assume_gpu, gpu
from cupyops.ops import _linear, _matmul

HOPPER = {"capability": 9, "multiprocessors": 132, "shared": 232448}
STRICT = 2e-6  # of the largest; a factor rounded to the 11 bits of TF32 is off by 5e-4 at most, 2e-4 in the mean
FLAGS = [False, True]


@pytest.fixture(params=FLAGS, ids=["strict", "tf32"])
def allowed(request):
    """The flag of cuBLAS and of cuDNN, as before when the test ends."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32
    matmul.allow_tf32 = cudnn.allow_tf32 = request.param
    yield request.param
    matmul.allow_tf32, cudnn.allow_tf32 = before


def chosen(forms, m, n, k, library):
    problem = _linear.problem((m, k), (k, 1), False, (n, k), (k, 1), True, False, torch.float32)
    with assume_gpu(**HOPPER, library=library):
        return forms.choose(problem, gpu(torch.device("cpu"))).name


@pytest.mark.parametrize("forms", [_linear.PRODUCT, _matmul.PRODUCT], ids=["linear", "matmul"])
def test_which_form(allowed, forms):
    """The flags choose nothing here: cuBLAS reads them when it is called."""
    assert chosen(forms, 4096, 4096, 4096, library=True) == "pytorch"
    assert chosen(forms, 4097, 4095, 4088, library=True) == "pytorch"
    assert chosen(forms, 64, 128, 3136, library=True).startswith("fma")
    for sizes in ((4096, 4096, 4096), (4097, 4095, 4088), (64, 128, 3136), (1, 1, 1)):
        assert chosen(forms, *sizes, library=False).startswith("fma")


def leaves(*shapes, device="cpu"):
    torch.manual_seed(0)
    return [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]


def gated(x, gate, up):
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


PRODUCTS = {
    "linear": (cupyops.linear, F.linear, [(37, 261), (45, 261), (45,)]),
    "matmul": (cupyops.matmul, torch.matmul, [(2, 33, 130), (2, 130, 35)]),
    "linear_act": (
        lambda x, w, b: cupyops.linear_act(x, w, b, "silu"),
        lambda x, w, b: F.silu(F.linear(x, w, b)),
        [(9, 77), (21, 77), (21,)],
    ),
    "gated_linear": (cupyops.gated_linear, gated, [(9, 77), (21, 77), (21, 77)]),
    "conv2d": (cupyops.conv2d, F.conv2d, [(2, 5, 9, 11), (7, 5, 3, 3), (7,)]),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_kernels_are_strict(allowed, name):
    """Forward and gradients, at odd sizes, in float64's neighbourhood: TF32 would be a hundred times as far off."""
    ours, theirs, shapes = PRODUCTS[name]
    inputs = leaves(*shapes)
    with cupyops.simulate("sm_90"), cupyops.trace() as trace:
        found = both_ways(ours, inputs)
    assert trace.launches() and not any(record.kernel.startswith("torch.mm") for record in trace.launches())
    expected = both_ways(theirs, [one.detach().double().requires_grad_() for one in inputs])
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).abs().max() <= STRICT * b.abs().max()


def both_ways(function, inputs):
    y = function(*inputs)
    torch.manual_seed(1)
    return y, *torch.autograd.grad(y, inputs, torch.randn(y.shape, dtype=torch.float32, device=y.device).to(y.dtype))


@pytest.mark.gpu
def test_recorded_plans_follow_the_flags():
    """A plan that was recorded under one setting has the bits of PyTorch under the other."""
    x, weight = leaves((512, 1024), (768, 1024), device="cuda")
    before, found = torch.backends.cuda.matmul.allow_tf32, {}
    try:
        with cupyops.never_slower(), torch.no_grad():
            for flag in (False, True, False, True):
                torch.backends.cuda.matmul.allow_tf32 = flag
                for _ in range(6):
                    y = cupyops.linear(x, weight)
                assert torch.equal(y, F.linear(x, weight))
                found[flag] = y
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    truth = F.linear(x.double(), weight.double())
    assert (found[False] - truth).abs().max() <= STRICT * truth.abs().max()
    if torch.cuda.get_device_capability()[0] >= 8:
        assert (found[True] - truth).abs().max() > STRICT * truth.abs().max()
