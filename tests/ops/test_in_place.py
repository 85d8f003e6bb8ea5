"""relu and silu with inplace=True: the values, versions, gradients and refusals of PyTorch's own."""

import copy

import pytest
import torch
from torch.nn import functional as F

import cupyops

CASES = [
    pytest.param(ours, theirs, id=theirs.__name__) for ours, theirs in [(cupyops.relu, F.relu), (cupyops.silu, F.silu)]
]
VIEWS = {
    "itself": lambda x: x,
    "transposed": lambda x: x.mT,
    "channels_last": lambda x: x.view(2, 3, 2, 4).to(memory_format=torch.channels_last),
    "every other column": lambda x: x[:, ::2],
    "off by one": lambda x: x.flatten()[1:],
    "a column": lambda x: x[:, 2],
    "empty": lambda x: x[:0],
}


@pytest.fixture(params=["reference", "simulator"])
def where(request):
    if request.param == "reference":
        yield request.param
        return
    with cupyops.simulate():
        yield request.param


@pytest.fixture(params=VIEWS)
def view(request):
    return VIEWS[request.param]


@pytest.mark.parametrize(("ours", "theirs"), CASES)
def test_values_and_versions(where, view, ours, theirs):
    base = torch.randn(6, 8)
    expected = base.clone()
    x, other = view(base), view(expected)
    before, strides = x._version, x.stride()
    with cupyops.trace() as trace:
        assert ours(x, inplace=True) is x
    theirs(other, inplace=True)
    torch.testing.assert_close(base, expected)
    torch.testing.assert_close(x, other)
    assert x._version > before and x.stride() == strides
    assert trace.routes() == {"reference" if where == "reference" else "kernel" if x.numel() == 0 else "simulator"}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("ours", "theirs"), CASES)
def test_on_a_gpu(view, ours, theirs, dtype):
    base = torch.randn(6, 8, device="cuda").to(dtype)
    expected = base.clone()
    with cupyops.trace() as trace:
        ours(view(base), inplace=True)
    theirs(view(expected), inplace=True)
    torch.testing.assert_close(base, expected)
    assert trace.routes() == {"kernel"}


@pytest.mark.parametrize(("ours", "theirs"), CASES)
def test_gradients(where, view, ours, theirs):
    """Through the view and its base."""
    leaf = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)

    def gradients(function):
        x = leaf * 2
        y = function(view(x), inplace=True)
        (grad,) = torch.autograd.grad((y**2).sum() + (x**3).sum(), leaf, create_graph=True)
        return grad, torch.autograd.grad(grad.sin().sum(), leaf)[0]

    torch.testing.assert_close(gradients(ours), gradients(theirs))


@pytest.mark.parametrize(("ours", "theirs"), CASES)
def test_a_leaf_that_requires_a_gradient_is_refused(where, ours, theirs):
    leaf = torch.randn(3, requires_grad=True)
    before = leaf.detach().clone()
    for x in (leaf, leaf[1:]):
        with pytest.raises(RuntimeError, match="leaf"):
            theirs(x, inplace=True)
        with pytest.raises(RuntimeError, match="leaf"):
            ours(x, inplace=True)
    assert torch.equal(leaf, before), "nothing has been changed"
    with torch.no_grad():
        assert ours(leaf, inplace=True) is leaf
    torch.testing.assert_close(leaf.detach(), theirs(before))


@pytest.mark.parametrize(("ours", "theirs"), CASES)
def test_what_is_expanded_is_refused(where, ours, theirs):
    with pytest.raises(RuntimeError, match="single memory location"):
        theirs(torch.ones(1).expand(3), inplace=True)
    with pytest.raises((RuntimeError, cupyops.InputError), match="single memory location|one place in memory"):
        ours(torch.ones(1).expand(3), inplace=True)


@pytest.mark.parametrize(("ours", "theirs"), CASES)
def test_what_another_operator_keeps_is_stale(where, ours, theirs):
    """As after PyTorch's own."""
    for function in (ours, theirs):
        x = torch.randn(3, requires_grad=True) * 1
        z = x.sin()
        function(x, inplace=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            z.sum().backward()


@pytest.mark.parametrize(("ours", "theirs"), CASES)
def test_inference_tensors(where, ours, theirs):
    with torch.inference_mode():
        x = torch.randn(3)
        expected = theirs(x)
        assert torch.equal(ours(x, inplace=True), x)
        torch.testing.assert_close(x, expected)


@pytest.mark.parametrize(("ours", "theirs"), CASES)
@pytest.mark.parametrize("gradient", [False, True], ids=["plain", "gradient"])
def test_compiled(where, ours, theirs, gradient):
    def of(function):
        def call(x):
            y = x * 2
            function(y[1:], inplace=True)
            return function(y.sin(), inplace=True)

        return call

    x = torch.randn(4, 3, requires_grad=gradient)
    found, expected = torch.compile(of(ours), fullgraph=True, backend="aot_eager")(x), of(theirs)(x)
    torch.testing.assert_close(found, expected)
    if gradient:
        torch.testing.assert_close(*(torch.autograd.grad(y.sum(), x)[0] for y in (found, expected)))


@pytest.mark.parametrize(("ours", "theirs"), CASES)
def test_transforms(where, ours, theirs):
    x = torch.randn(3, 4)
    for transform in (torch.func.vmap, lambda f: torch.func.grad(lambda x: f(x).sum())):
        found, expected = (transform(lambda x, f=f: f(x * 1, inplace=True))(x) for f in (ours, theirs))
        torch.testing.assert_close(found, expected)


def test_modules(where):
    Linear, ReLU, SiLU = torch.nn.Linear, torch.nn.ReLU, torch.nn.SiLU
    theirs = torch.nn.Sequential(Linear(3, 4), ReLU(inplace=True), Linear(4, 4), SiLU(inplace=True))
    ours = copy.deepcopy(theirs)
    cupyops.swap(ours)
    assert all(isinstance(ours[i], (cupyops.nn.ReLU, cupyops.nn.SiLU)) and ours[i].inplace for i in (1, 3))
    x = torch.randn(2, 3)
    found, expected = ours(x), theirs(x)
    torch.testing.assert_close(found, expected)
    for y in (found, expected):
        y.sum().backward()
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a.grad, b.grad)


def test_integers():
    x = torch.tensor([-1, 2])
    assert cupyops.relu(x, inplace=True) is x and x.tolist() == [0, 2]
