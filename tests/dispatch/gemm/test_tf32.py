"""Products of float32 under PyTorch's flags of TF32: the kernels multiply exactly, and PyTorch's own function obeys them."""

import pytest
import torch
import torch.nn.functional as F

import cupyops
from cupyops._dispatch.core.gpu import assume_gpu, gpu
from cupyops._dispatch.gemm import tf32
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


@pytest.mark.parametrize(
    ("sizes", "copied"),
    [((4096, 4096, 4096), False), ((4097, 4096, 4096), False), ((4096, 4095, 4096), True), ((4096, 4096, 4095), True)],
)
def test_which_products_are_of_copies(allowed, sizes, copied):
    m, n, k = sizes
    problem = _linear.problem((m, k), (k, 1), False, (n, k), (k, 1), True, False, torch.float32)
    names = []
    for library in (True, False):
        with assume_gpu(**HOPPER, library=library):
            names.append(_linear.PRODUCT.choose(tf32.asked(problem), gpu(torch.device("cpu"))).name)
    assert names[0] == ("pytorch_in_vectors" if allowed and copied else "pytorch")
    assert names[1].startswith("fma")
    small = tf32.asked(_linear.problem((129, 65), (65, 1), False, (257, 65), (65, 1), True, False, torch.float32))
    with assume_gpu(**HOPPER, library=True):
        assert _linear.PRODUCT.choose(small, gpu(torch.device("cpu"))).name != "pytorch_in_vectors"


@pytest.mark.parametrize("sizes", [(37, 45, 261), (36, 44, 261), (36, 45, 260), (3, 5, 5, 7), (1, 1, 1)], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_copies(allowed, monkeypatch, sizes, biased):
    """Forward and backward, rows of any length; without the flag, PyTorch's product as it is."""
    monkeypatch.setattr(tf32, "LEAST", 1)
    *batch, n, k = sizes
    inputs = leaves((*batch, k), (n, k), *[(n,)] * biased)
    exact = [one.detach().double().requires_grad_() for one in inputs]
    truth = F.linear(*exact)
    grad = torch.randn(truth.shape)
    with cupyops.simulate("sm_90"), assume_gpu(**HOPPER, library=True), cupyops.use_form("linear:pytorch_in_vectors"):
        y = cupyops.linear(*inputs)
        assert y.is_contiguous()
        found = [y, *torch.autograd.grad(y, inputs[:2], grad)]
    for ours, theirs in zip(found, [truth, *torch.autograd.grad(truth, exact[:2], grad.double())]):
        assert (ours - theirs).abs().max() <= STRICT * theirs.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(4097, 4099, 4091), (4096, 4097, 4100)], ids=str)
def test_products_of_copies_on_a_gpu(allowed, sizes):
    """As called: with the flag as exact as PyTorch's own, without it exact."""
    m, n, k = sizes
    inputs = leaves((m, k), (n, k), (n,), device="cuda")
    exact = [one.detach().double().requires_grad_() for one in inputs]
    truth = F.linear(*exact)
    grad = torch.randn(truth.shape, device="cuda")
    wanted = [truth, *torch.autograd.grad(truth, exact, grad.double())]
    with cupyops.never_slower():
        for _ in range(4):
            found = []
            for function in (cupyops.linear, F.linear):
                y = function(*inputs)
                found.append([y, *torch.autograd.grad(y, inputs, grad)])
            for ours, theirs, true in zip(*found, wanted):
                error = (theirs - true).abs().max()
                assert (ours - true).abs().max() <= 1.5 * error + STRICT * true.abs().max()
