"""A residual sum of float32 and the norm behind it with a result of a half type, as they are in front of products."""

import contextlib

import pytest
import torch
from normalisations import added as ours
from normalisations import added_by_torch as theirs
from normalisations import compare_added as compare
from normalisations import leaves_to_add as leaves_of

import cupyops
from cupyops.testing import assume_gpu

HALF = [torch.bfloat16, torch.float16]
EPS = 1e-5
# a few lanes to a row, several rows to a block, a warp and part of one, several warps, the widest that a block holds
SIZES = [4, 64, 132, 300, 768, 1028, 4096, 8192]
CENTRED = pytest.mark.parametrize("centred", [True, False], ids=["layer_norm", "rms_norm"])


@pytest.fixture(params=["simulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def run(request):
    """A context in which the kernels run, and the device of the tensors."""
    if request.param == "gpu":
        return contextlib.nullcontext, "cuda"

    def simulated():
        stack = contextlib.ExitStack()
        stack.enter_context(assume_gpu(multiprocessors=2, shared=232448))
        stack.enter_context(cupyops.simulate("sm_90"))
        return stack

    return simulated, "cpu"


@pytest.mark.parametrize("size", SIZES)
@CENTRED
def test_values_and_gradients(run, centred, size):
    """As good as PyTorch's in float32, rounded where the result is; blocks take several rows."""
    context, device = run
    dtype = HALF[size % 3 % 2]
    for rows in (23, 3):
        with context(), cupyops.trace() as trace:
            compare(rows, size, dtype, device, centred)
        ran = {launch.kernel.partition("<")[0] for launch in trace.launches()} - {"norm_bwd_finalize"}
        assert ran == {"norm_lowered_add_fwd", "norm_lowered_add_bwd"}


@pytest.mark.parametrize("dtype", HALF, ids=str)
@CENTRED
def test_bits_are_those_of_the_two_operators(run, centred, dtype):
    context, device = run
    function = cupyops.layer_norm if centred else cupyops.rms_norm
    for rows, size in ((9, 64), (7, 768), (3, 2052)):
        leaves, _ = leaves_of(rows, size, dtype, device, centred)
        with context(), cupyops.use_form("norm:block"), cupyops.never_slower(False), torch.no_grad():
            y, summed = ours(*leaves, centred=centred)
            assert torch.equal(summed, leaves[0] + leaves[1])
            assert torch.equal(y, function(summed, (size,), *leaves[2:], eps=EPS).to(dtype))


def gradients(function, leaves, wanted, grads, only=(0, 1)):
    """Of some of the leaves, by some of both results."""
    given = [one.detach().clone().requires_grad_(at in wanted) for at, one in enumerate(leaves)]
    y, summed = function(*given)
    results = (y.to(grads[0].dtype), summed)
    asked = [at for at in only if results[at].requires_grad]
    return torch.autograd.grad([results[at] for at in asked], [given[at] for at in wanted], [grads[at] for at in asked])


def test_what_is_not_wanted(run):
    context, device = run
    leaves, grads = leaves_of(6, 48, torch.bfloat16, device, True)
    for wanted in ([0], [1], [2], [3], [0, 3], [1, 2]):
        with context():
            found = gradients(ours, leaves, wanted, grads)
        torch.testing.assert_close(found, gradients(theirs, leaves, wanted, grads), rtol=2e-2, atol=2e-2)
    for only in ([0], [1]):  # one of the results alone is read
        with context():
            found = gradients(ours, leaves, [0, 1], grads, only)
        torch.testing.assert_close(found, gradients(theirs, leaves, [0, 1], grads, only), rtol=2e-2, atol=2e-2)


def test_without_parameters_and_without_rows(run):
    context, device = run
    (residual, x, _, bias), _ = leaves_of(6, 48, torch.float16, device, True)
    with context(), torch.no_grad():
        for parameters in ((None, None), (None, bias)):
            found, expected = ours(residual, x, *parameters), theirs(residual, x, *parameters)
            torch.testing.assert_close(found[0], expected[0].half())
            assert torch.equal(found[1], expected[1])
        for shape in ((0, 48), (3, 0)):
            y, summed = ours(residual.new_empty(shape), x.new_empty(shape))
            assert y.shape == summed.shape == shape


def test_views_off_boundaries_and_transposed(run):
    context, device = run
    generator = torch.Generator().manual_seed(3)
    flat = torch.randn(5 * 64 + 1, generator=generator).to(device)
    residual, x = flat[1:].view(5, 64), flat[:-1].view(64, 5).T.to(torch.bfloat16)
    with context():
        y, summed = ours(residual, x)
    expected = theirs(residual, x)
    torch.testing.assert_close(y, expected[0].bfloat16())
    assert torch.equal(summed, expected[1])


def test_special_values(run):
    context, device = run
    residual = torch.randn(5, 64, device=device)
    x = torch.zeros(5, 64, device=device, dtype=torch.float16)
    residual[0, 3], x[1, 4], residual[2, 5], residual[3] = float("nan"), float("inf"), 1e30, 0.5
    with context():
        y, summed = ours(residual, x)
    expected = theirs(residual.cpu(), x.cpu())
    torch.testing.assert_close(y.cpu(), expected[0].half(), equal_nan=True)
    torch.testing.assert_close(summed.cpu(), expected[1], equal_nan=True)


@pytest.mark.parametrize("size", [7, 250, 16384])
def test_rows_that_no_block_holds_take_the_reference(size):
    leaves, grads = leaves_of(2, size, torch.bfloat16, "cpu", True)
    with cupyops.simulate("sm_90"), cupyops.trace() as trace:
        results = ours(*leaves)
        found = torch.autograd.grad(results, leaves, grads)
    assert set(trace.routes()) == {"reference"} and results[0].dtype is torch.bfloat16
    assert [one.dtype for one in found] == [one.dtype for one in leaves]


@CENTRED
def test_plans_compile_and_second_derivatives(centred):
    leaves, grads = leaves_of(4, 32, torch.bfloat16, "cpu", centred)
    y, summed = theirs(*leaves, centred=centred)
    with cupyops.simulate():
        for _ in range(5):  # recorded, and replayed
            found = ours(*leaves, centred=centred)
            assert torch.equal(found[1], summed)
            torch.testing.assert_close(found[0], y.bfloat16())
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)(*leaves, centred=centred)
    torch.testing.assert_close(compiled, (y.bfloat16(), summed))
    found = torch.autograd.grad(compiled, leaves, grads)
    expected = torch.autograd.grad((y.bfloat16(), summed), leaves, grads)
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)

    def second(function):
        y, summed = function(*leaves, centred=centred)
        total = y.float().pow(3).sum() + summed.pow(3).sum()
        (grad,) = torch.autograd.grad(total, leaves[0], create_graph=True)
        return torch.autograd.grad(grad.square().sum(), (leaves[0], leaves[2]))

    def rounded(*args, **options):
        y, summed = theirs(*args, **options)
        return y.bfloat16(), summed

    for a, b in zip(second(ours), second(rounded)):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * b.abs().max().item())
