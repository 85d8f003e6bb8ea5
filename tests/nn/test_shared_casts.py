"""Linear layers that read one float32 tensor under autocast, and have one copy of it in the half type."""

import copy
import gc
import io
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import cupyops

HALF = torch.bfloat16


class PostNorm(nn.Module):
    """As BERT has it: what a norm gives is read by three layers, and by the next sum."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.out = nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32)
        self.q, self.k, self.v = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x):
        x = self.norm(x + self.first(x))
        y = (self.q(x) @ self.k(x).mT).softmax(-1).to(HALF) @ self.v(x)
        return x + self.out(y)


class Casts(TorchDispatchMode):
    """Counts copies of activations, from one dtype to another."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].shape[0] == 4:
            self.count += args[0].dtype is not found.dtype
        return found


def results(model, x):
    x = x.clone().requires_grad_()
    with Casts() as forward, torch.autocast("cpu", HALF):
        y = model(2 * x)
    with Casts() as backward:
        grads = torch.autograd.grad(y.float().square().mean(), [x, *model.parameters()])
    return y.detach(), grads, forward.count, backward.count


def models():
    torch.manual_seed(0)
    theirs = PostNorm()
    ours = copy.deepcopy(theirs)
    cupyops.swap(ours, only=nn.Linear)
    return ours, theirs, torch.randn(4, 5, 32)


def test_values_are_the_same_and_casts_are_fewer():
    ours, theirs, x = models()
    y, grads, forward, backward = results(ours, x)
    expected, expected_grads, more_forward, more_backward = results(theirs, x)
    assert torch.equal(y, expected)
    for a, b in zip(grads, expected_grads):  # the gradients of three readers are summed in the half type
        assert a.dtype is b.dtype
        torch.testing.assert_close(a, b, rtol=3e-2, atol=2e-2 * b.abs().max().item())
    assert more_forward - forward == 2 and more_backward - backward == 2


def test_gradients_are_as_near_to_float64():
    ours, theirs, x = models()
    truth = copy.deepcopy(theirs).double()
    leaf = x.double().requires_grad_()
    y = 2 * leaf
    y = truth.norm(y + truth.first(y))
    z = (truth.q(y) @ truth.k(y).mT).softmax(-1) @ truth.v(y)
    exact = torch.autograd.grad((y + truth.out(z)).square().mean(), [leaf, *truth.parameters()])
    for a, b, c in zip(results(ours, x)[1], results(theirs, x)[1], exact):
        assert (a - c).norm() <= 2 * (b - c).norm() + 1e-6


def test_what_has_changed_is_cast_anew():
    layer, x = cupyops.nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    y = x * 2

    def read(dtype=HALF):
        with torch.autocast("cpu", dtype):
            return layer(y)

    first = read()
    kept = y._cupyops_cast
    assert torch.equal(read(), first) and y._cupyops_cast is kept
    with torch.no_grad():
        read()
        assert y._cupyops_cast is not kept
    assert read().requires_grad and read(torch.float16).dtype is torch.float16
    with torch.no_grad():
        y.mul_(3)
    torch.testing.assert_close(read(), layer(y).to(HALF), rtol=2e-2, atol=2e-2)
    y = x * 2
    read()
    y.data = torch.ones(4, 8)
    torch.testing.assert_close(read(), layer(y).to(HALF), rtol=2e-2, atol=2e-2)
    y = x * 2
    read()
    y.mul_(x)  # another history
    (grad,) = torch.autograd.grad(read().float().sum(), x)
    torch.testing.assert_close(grad, 4 * x * layer.weight.sum(0), rtol=3e-2, atol=3e-2)


def test_it_goes_with_the_tensor_and_is_neither_pickled_nor_copied():
    layer, x = cupyops.nn.Linear(8, 8), torch.randn(4, 8, requires_grad=True)
    y = x * 2
    with torch.autocast("cpu", HALF):
        z = layer(y)
    half = weakref.ref(y._cupyops_cast.half)
    file = io.BytesIO()
    torch.save(y, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert torch.equal(again, y) and getattr(again, "_cupyops_cast", None) is None
    gc.disable()
    try:
        del y, z
        assert half() is None  # no cycle keeps it
    finally:
        gc.enable()


def test_leaves_float64_and_no_autocast_are_left_alone():
    layer = cupyops.nn.Linear(8, 8)
    x = torch.randn(4, 8)
    leaf = torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", HALF):
        layer(x), layer(leaf)
    y = leaf * 2
    layer(y)
    assert not any(hasattr(one, "_cupyops_cast") for one in (x, leaf, y))


def test_checkpoint_and_compile():
    ours, theirs, x = models()

    def run(model, call):
        leaf = x.clone().requires_grad_()
        with torch.autocast("cpu", HALF):
            y = call(model, 2 * leaf)
        return y.detach(), torch.autograd.grad(y.float().square().mean(), [leaf, *model.parameters()])

    plain = run(theirs, lambda model, x: model(x))
    again = run(ours, lambda model, x: checkpoint(model, x, use_reentrant=False))
    compiled = run(ours, lambda model, x: torch.compile(model, backend="aot_eager", fullgraph=True)(x))
    for found in (again, compiled):
        torch.testing.assert_close(found[0], plain[0], rtol=1e-2, atol=1e-2)
        for a, b in zip(found[1], plain[1]):
            torch.testing.assert_close(a, b, rtol=3e-2, atol=2e-2 * b.abs().max().item())


@pytest.mark.gpu
def test_another_stream_makes_a_copy_of_its_own():
    layer, x = cupyops.nn.Linear(8, 8, device="cuda"), torch.randn(4, 8, device="cuda", requires_grad=True)
    y = x * 2
    with torch.autocast("cuda", HALF):
        layer(y)
        first = y._cupyops_cast
        layer(y)
        assert y._cupyops_cast is first
        other = torch.cuda.Stream()
        other.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(other):
            layer(y)
        assert y._cupyops_cast is not first
    torch.cuda.synchronize()
