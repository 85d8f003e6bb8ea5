"""Attention of queries, keys and values that lie in one tensor: its gradient is written there, by the kernels, once."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

import cupyops
from cupyops.ops._packed_attention import packed_attention, parts_of
from cupyops.testing import assume_gpu

B, H, N, D = 2, 3, 37, 64
ROW = 3 * H * D
LAYOUTS = {  # strides of a part, and where they begin
    "thirds": ([N * ROW, D, ROW, 1], [0, H * D, 2 * H * D]),
    "value before key": ([N * ROW, D, ROW, 1], [0, 2 * H * D, H * D]),
    "by heads": ([N * ROW, 3 * D, ROW, 1], [0, D, 2 * D]),
    "one after the other": ([H * N * D, N * D, D, 1], [0, B * H * N * D, 2 * B * H * N * D]),
}


@pytest.fixture(params=["simulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def run(request):
    """A context in which the kernels run, and the device of the tensors."""
    if request.param == "gpu":
        return lambda: cupyops.never_slower(False), "cuda"

    def simulated():
        stack = contextlib.ExitStack()
        stack.enter_context(cupyops.simulate("sm_90"))
        stack.enter_context(assume_gpu(multiprocessors=2, shared=232448))
        return stack

    return simulated, "cpu"


def by_torch(whole, sizes, strides, offsets, is_causal, scale):
    return F.scaled_dot_product_attention(*parts_of(whole, sizes, strides, offsets), is_causal=is_causal, scale=scale)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_values_and_gradient(run, layout, is_causal):
    context, device = run
    torch.manual_seed(0)
    strides, offsets = LAYOUTS[layout]
    more = [B, H, N, D], strides, offsets, is_causal, 0.2 if is_causal else None
    for dtype in (torch.bfloat16, torch.float16):
        whole = torch.randn(B, N, ROW, device=device).to(dtype).requires_grad_()
        grad = torch.randn(B, H, N, D, device=device).to(dtype)
        exact = whole.detach().double().requires_grad_()
        y = by_torch(exact, *more)
        expected = y, *torch.autograd.grad(y, exact, grad.double())
        theirs = by_torch(whole, *more)
        theirs = theirs, *torch.autograd.grad(theirs, whole, grad)
        for _ in range(4 if device == "cuda" else 1):  # recorded, and replayed
            with context(), cupyops.trace() if device == "cpu" else contextlib.nullcontext() as trace:
                y = packed_attention(whole, *more)
                found = y, *torch.autograd.grad(y, whole, grad)
            for a, b, c in zip(found, theirs, expected):
                assert a.dtype is dtype and (a - c).norm() <= 1.5 * (b - c).norm() + 2e-3 * c.norm()
        assert trace is None or {one.kernel.partition("_")[0] for one in trace.launches()} == {"attention"}


def test_a_view_of_a_larger_tensor(run):
    """What begins elsewhere in its memory."""
    context, device = run
    torch.manual_seed(1)
    strides, offsets = LAYOUTS["thirds"]
    more = [B, H, N, D], strides, offsets, True, None
    rows = torch.randn(2 * B, N, ROW, device=device, dtype=torch.bfloat16)
    for start in (0, B, 1, B):
        whole = rows[start : start + B].detach().requires_grad_()
        with context():
            y = packed_attention(whole, *more)
            (found,) = torch.autograd.grad(y.float().sum(), whole)
        z = by_torch(whole, *more)
        (expected,) = torch.autograd.grad(z.float().sum(), whole)
        torch.testing.assert_close(y, z, rtol=2e-2, atol=2e-2)
        assert (found - expected).norm() <= 0.02 * expected.norm()


def test_what_no_kernel_serves():
    """Parts that begin between vectors, and float64: PyTorch's."""
    torch.manual_seed(2)
    whole = torch.randn(1, 3, 18, dtype=torch.float64, requires_grad=True)
    more = [1, 1, 3, 6], [54, 6, 18, 1], [0, 6, 12], False, None
    with cupyops.simulate(), cupyops.trace() as trace:
        torch.testing.assert_close(packed_attention(whole, *more), by_torch(whole, *more))
        packed_attention(whole.bfloat16(), *more)
    assert not trace.launches()


def test_parts_that_leave_out_elements(run):
    """Whose gradient is 0, also where memory was something else before."""
    context, device = run
    torch.manual_seed(5)
    whole = torch.randn(1, 5, 40, device=device, dtype=torch.bfloat16, requires_grad=True)
    with context():
        y = packed_attention(whole, [1, 1, 5, 8], [200, 8, 40, 1], [0, 8, 16], False, None)
        (found,) = torch.autograd.grad(y.float().sum(), whole)
    assert found[..., 16:24].ne(0).all() and found[..., 24:].eq(0).all()


def test_parts_that_share_elements(run):
    """Whose gradient is the sum of theirs."""
    context, device = run
    torch.manual_seed(6)
    whole = torch.randn(2, 4, 24, device=device, dtype=torch.bfloat16, requires_grad=True)
    more = [2, 1, 4, 8], [48, 8, 24, 1], [0, 8, 16], False, None  # the second batch begins amid the first
    with context():
        y = packed_attention(whole, *more)
        (found,) = torch.autograd.grad(y.float().square().sum(), whole)
    (expected,) = torch.autograd.grad(by_torch(whole.double(), *more).square().sum(), whole)
    assert (found - expected).norm() <= 0.02 * expected.norm()


def test_second_derivatives_and_transforms():
    torch.manual_seed(3)
    sizes, strides, offsets = [1, 1, 4, 8], [96, 8, 24, 1], [0, 8, 16]
    whole = torch.randn(1, 4, 24, requires_grad=True)
    results = []
    for function in (by_torch, packed_attention):
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            (grad,) = torch.autograd.grad(
                function(whole, sizes, strides, offsets, True, None).square().sum(), whole, create_graph=True
            )
            results.append([grad, *torch.autograd.grad(grad.square().sum(), whole)])
    torch.testing.assert_close(*results)
    batch = torch.randn(3, 1, 4, 24)
    each = torch.stack([by_torch(one, sizes, strides, offsets, True, None) for one in batch])
    found = torch.vmap(lambda one: packed_attention(one, sizes, strides, offsets, True, None))(batch)
    torch.testing.assert_close(found, each)
