"""layer_norm and rms_norm of fp32 with a result of a half type, as autocast has it in front of products."""

import contextlib

import pytest
import torch
from normalisations import compare_lowered, lowered

import cupyops
from cupyops.errors import InputError
from cupyops.testing import assume_gpu

HALF = [torch.bfloat16, torch.float16]
BOTH = [cupyops.layer_norm, cupyops.rms_norm]
# a few lanes to a row, several rows to a block, a warp and part of one, several warps, the widest that a block holds
SIZES = [4, 64, 132, 300, 768, 1028, 4096, 8192]


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
@pytest.mark.parametrize("function", BOTH, ids=lambda f: f.__name__)
def test_values_and_gradients(run, function, size):
    """Blocks take several rows; grad_y is expanded; x begins off 16-byte boundaries, and is copied."""
    context, device = run
    dtype = HALF[size % 3 % 2]
    for options in ({"rows": 23}, {"rows": 3, "offset": 1}, {"rows": 3, "expanded": True}):
        with context(), cupyops.trace() as trace:
            compare_lowered(function, size=size, dtype=dtype, device=device, **options)
        ran = {launch.kernel.partition("<")[0] for launch in trace.launches()}
        ran.discard("norm_bwd_finalize")  # of several rows of partial sums alone
        assert ran == {"norm_lowered_fwd", "norm_lowered_bwd"}


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("function", BOTH, ids=lambda f: f.__name__)
def test_bits_are_those_of_float32(run, function, dtype):
    """The result is that of the kernels for float32, rounded; the gradients are theirs for the same grad_y."""
    context, device = run
    ours, _ = lowered(function, dtype)
    generator = torch.Generator().manual_seed(0)
    for rows, size in ((9, 64), (7, 768), (3, 2052)):
        arity = 2 if function is cupyops.layer_norm else 1
        shapes = [(rows, size), *[(size,)] * arity]
        leaves = [torch.randn(s, generator=generator).to(device).requires_grad_() for s in shapes]
        grad_y = torch.randn(rows, size, generator=generator).to(device, dtype)
        with context(), cupyops.use_form("norm:block"), cupyops.never_slower(False):
            y = ours(*leaves)
            grads = torch.autograd.grad(y, leaves, grad_y)
            wide = function(leaves[0], (size,), *leaves[1:], eps=1e-5)
            wide_grads = torch.autograd.grad(wide, leaves, grad_y.float())
        assert torch.equal(y, wide.to(dtype))
        assert all(map(torch.equal, grads, wide_grads))


def test_special_values(run):
    context, device = run
    x = torch.randn(5, 64, device=device)
    x[0, 3], x[1, 4], x[2, 5], x[3] = float("nan"), float("inf"), 1e30, 0.5
    for function in BOTH:
        ours, theirs = lowered(function, torch.float16)
        parameters = [torch.ones(64, device=device)] * (2 if function is cupyops.layer_norm else 1)
        with context():
            y = ours(x, *parameters)
        expected = theirs(x.cpu(), *(one.cpu() for one in parameters))  # on a GPU PyTorch's own differs for 1e30
        torch.testing.assert_close(y.cpu(), expected.half(), equal_nan=True)


def test_partial_gradients_and_none(run):
    context, device = run
    x, weight, bias = (torch.randn(s, device=device) for s in ((6, 48), (48,), (48,)))
    grad_y = torch.randn(6, 48, device=device).bfloat16()
    ours, theirs = lowered(cupyops.layer_norm, torch.bfloat16)
    for wanted in ([0], [1], [2], [0, 2], [1, 2]):
        leaves = [t.clone().requires_grad_(i in wanted) for i, t in enumerate((x, weight, bias))]
        with context():
            found = torch.autograd.grad(ours(*leaves), [leaves[i] for i in wanted], grad_y)
        expected = torch.autograd.grad(theirs(*leaves), [leaves[i] for i in wanted], grad_y.float())
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    with context():
        torch.testing.assert_close(ours(x, None, None), theirs(x, None, None).bfloat16())
        torch.testing.assert_close(ours(x, None, bias), theirs(x, None, bias).bfloat16())
        for rows, size in ((0, 48), (3, 0)):
            assert ours(x.new_empty(rows, size), None, None).shape == (rows, size)


@pytest.mark.parametrize("size", [7, 250, 16384])
def test_rows_that_no_block_holds_take_the_reference(size):
    ours, theirs = lowered(cupyops.layer_norm, torch.bfloat16)
    x = torch.randn(2, size, requires_grad=True)
    with cupyops.simulate("sm_90"), cupyops.trace() as trace:
        y = ours(x, None, None)
        (grad,) = torch.autograd.grad(y, x, torch.ones_like(y))
    assert set(trace.routes()) == {"reference"} and y.dtype is torch.bfloat16
    assert torch.equal(y, theirs(x, None, None).bfloat16()) and grad.dtype is torch.float32


def test_plans_compile_and_second_derivatives():
    ours, theirs = lowered(cupyops.layer_norm, torch.bfloat16)
    x, weight, bias = (torch.randn(s, requires_grad=True) for s in ((4, 32), (32,), (32,)))
    expected = theirs(x, weight, bias).bfloat16()
    with cupyops.simulate():
        for _ in range(5):  # recorded, and replayed
            assert torch.equal(ours(x, weight, bias), expected)
        for dtype in HALF:  # which is in the key of the plan
            assert lowered(cupyops.layer_norm, dtype)[0](x, weight, bias).dtype is dtype
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)(x, weight, bias)
    assert torch.equal(compiled, expected)
    compiled.float().square().sum().backward()
    assert x.grad is not None and x.grad.dtype is torch.float32

    def second(function):
        y = function(x, weight, bias).float()
        (grad,) = torch.autograd.grad(y.pow(3).sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), (x, weight))

    for a, b in zip(second(ours), second(lambda *args: theirs(*args).bfloat16())):
        torch.testing.assert_close(a, b)


def test_arguments_are_checked():
    ours, _ = lowered(cupyops.layer_norm, torch.bfloat16)
    with pytest.raises(InputError, match="weight"):
        ours(torch.randn(2, 8), torch.randn(7), None)
