"""Slips in what the roles return are told at the first call, and nothing looks at the calls after a good one."""

import pytest
import torch
import toys
from torch import Tensor
from toys import Nothing, executor, forget, fresh

import cupyops
from cupyops import InputError


@pytest.fixture(autouse=True)
def kernels():
    """CPU tensors take the route of kernels, which here are plain PyTorch."""
    before = set(cupyops.operators())
    with executor():
        yield
    forget(*(op for name, op in cupyops.operators().items() if name not in before))


def doubled(forward, backward=lambda saved, grad_y: 2 * grad_y, **options):
    """y = 2 x, with these roles."""

    @cupyops.operator(fresh("doubled"), **options)
    def op(x: Tensor) -> Tensor:
        return x.mul_(2) if options else 2 * x

    op.forward(forward)
    op.backward(backward)
    return op


def split(forward):
    """(2 x, 3 x), with this forward."""

    @cupyops.operator(fresh("split"))
    def op(x: Tensor) -> tuple[Tensor, Tensor]:
        return 2 * x, 3 * x

    op.forward(forward)
    op.backward(lambda saved, grad_y, grad_z: 2 * grad_y + 3 * grad_z)
    return op


def good(x):
    return 2 * x.detach(), ()


SLIPS = {
    "bare": (lambda x: 2 * x, r"forward returned a tensor, expected \(y, saved\): return y, \(\)"),
    "nothing": (lambda x: None, r"forward returned None, expected \(y, saved\)"),
    "one in a tuple": (lambda x: (2 * x,), r"forward returned \(a tensor,\), expected \(y, saved\)"),
    "three": (lambda x: (2 * x, x, x), r"forward returned \(a tensor, a tensor, a tensor\), expected \(y, saved\)"),
    "no output": (lambda x: (None, ()), r"forward returned \(None, \(\)\), expected \(y, saved\)"),
    "saved bare": (lambda x: (2 * x, x), r"saved a tensor, expected a tuple of tensors: return y, \(saved,\)"),
    "saved a number": (lambda x: (2 * x, (3,)), r"forward saved \(int,\), expected a tuple of tensors$"),
    "shape": (
        lambda x: (2 * x.sum(), ()),
        r"y of shape \(\), torch.float32; the reference returns shape \(2,\), torch.float32",
    ),
    "dtype": (lambda x: (2 * x.double(), ()), r"y of shape \(2,\), torch.float64; the reference returns"),
}


@pytest.mark.parametrize("through", ["eager", "gradient", "dispatcher"])
@pytest.mark.parametrize("slip", SLIPS)
def test_a_slip_in_forward_is_told(slip, through):
    """Two elements: what is returned bare would unpack."""
    forward, message = SLIPS[slip]
    op = doubled(forward)
    x = torch.ones(2, requires_grad=through == "gradient")
    for _ in range(2):  # until it is mended
        with Nothing() if through == "dispatcher" else torch.enable_grad(), pytest.raises(InputError) as caught:
            op(x)
        assert caught.match(f"{op.name}: .*{message}") and not getattr(caught.value, "__notes__", ())


@pytest.mark.parametrize(
    ("forward", "message"),
    [
        (
            lambda x: (2 * x, 3 * x),
            r"returned \(a tensor, a tensor\), expected \(\(y0, y1\), saved\): return \(y0, y1\)",
        ),
        (lambda x: ((2 * x,), ()), r"returned \(\(a tensor,\), \(\)\), expected \(\(y0, y1\), saved\)"),
        (lambda x: ((2 * x, 3 * x[:1]), ()), r"returned y1 of shape \(1,\), .* the reference returns shape \(2,\)"),
    ],
)
@pytest.mark.parametrize("grad", [False, True])
def test_several_outputs(forward, message, grad):
    with pytest.raises(InputError, match=message):
        split(forward)(torch.ones(2, requires_grad=grad))


def test_in_place():
    with pytest.raises(InputError, match=r"forward returned a tensor, expected \(y, saved\) or None: return y, \(\)"):
        doubled(lambda x: x.mul_(2), mutates=("x",))(torch.ones(2))
    with pytest.raises(InputError, match="forward saved a tensor"):
        doubled(lambda x: (x.mul_(2), x), mutates=("x",))(torch.ones(2))


@pytest.mark.parametrize("returned", [None, (None, ())])
def test_in_place_nothing_need_be_returned(returned):
    def forward(x):
        x.data.mul_(2)
        return returned

    op, x = doubled(forward, mutates=("x",)), torch.ones(2)
    op(x)
    assert op(x).tolist() == [4.0, 4.0] and x._version == 2


def test_on_a_dry_run_the_form_alone_is_checked():
    op = doubled(lambda x: 2 * x)
    with pytest.raises(Exception, match="forward returned a tensor"):
        torch.compile(op, backend="aot_eager", fullgraph=True)(torch.ones(2))


def test_a_good_call_is_the_last_of_its_dtypes_that_is_looked_at():
    asked = []

    @cupyops.operator(fresh())
    def op(x: Tensor) -> Tensor:
        asked.append(x.dtype)
        return 2 * x

    op.forward(lambda x: (2.0 * x, ()) if x.is_floating_point() else (2 * x[:1], ()))
    for _ in range(3):
        op(torch.ones(2))
        op(torch.ones(2, dtype=torch.float64))
    assert asked == [torch.float32, torch.float64]
    for _ in range(2):  # what is wrong goes on being told
        with pytest.raises(InputError, match="forward returned y of shape"):
            op(torch.ones(2, dtype=torch.int32))

    op.forward(lambda x: 2 * x)  # a cell run again
    with pytest.raises(InputError, match="forward returned a tensor"):
        op(torch.ones(2))


def test_the_reference_sees_no_values():
    """One that needs them says nothing of shapes; what it draws is drawn for nobody."""
    seen = []

    @cupyops.operator(fresh())
    def op(x: Tensor) -> Tensor:
        seen.append(x.is_meta)
        torch.rand(1)
        return x[: int(x.max())]

    op.forward(lambda x: (x[:1].clone(), ()))
    before = torch.get_rng_state()
    assert op(torch.ones(2)).tolist() == [1.0]
    assert seen == [True] and torch.equal(torch.get_rng_state(), before)


GRADIENTS = {
    "none": (lambda saved, grad_y: None, "backward returned None, expected a gradient for x; .* return \\(None,\\)"),
    "shape": (
        lambda saved, grad_y: 2 * grad_y.sum(),
        r"backward returned a gradient of shape \(\), torch.float32 for x, which is of shape \(2,\), torch.float32",
    ),
    "dtype": (lambda saved, grad_y: 2 * grad_y.double(), r"of shape \(2,\), torch.float64 for x, which is of shape"),
    "kind": (lambda saved, grad_y: (2.0,), "backward returned float for x, expected its gradient"),
}


@pytest.mark.parametrize("slip", GRADIENTS)
def test_a_slip_in_backward_is_told(slip):
    backward, message = GRADIENTS[slip]
    op = doubled(good, backward)
    for _ in range(2):
        with pytest.raises(InputError, match=f"{op.name}: .*{message}"):
            op(torch.ones(2, requires_grad=True)).sum().backward()


def test_a_reference_backward_that_returns_nothing():
    op, _ = toys.exponential()
    op.reference_backward(lambda saved, grad_y, y: None)
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(InputError, match=r"reference_backward returned None, expected a gradient for x"):
        torch.autograd.grad(op(x).sum(), x, create_graph=True)


def test_no_gradient_on_purpose():
    op = doubled(good, lambda saved, grad_y: (None,))
    x = torch.ones(2, requires_grad=True)
    (2 * op(x) + x).sum().backward()
    assert x.grad.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("first", ["kernels", "differentiable"])
def test_gradients_are_looked_at_until_the_kernels_have_given_good_ones(first):
    op = doubled(good)
    x = torch.ones(2, requires_grad=True)
    torch.autograd.grad(op(x).sum(), x, create_graph=first == "differentiable")
    assert op.definition.gives_gradients == (first == "kernels")

    op.backward(lambda saved, grad_y: grad_y[:1])  # a cell run again
    with pytest.raises(InputError, match=r"a gradient of shape \(1,\), torch.float32 for x"):
        op(x).sum().backward()


def test_our_own_operators_are_not_looked_at():
    """Their tests do that; a program that calls them alone should not wait for what PyTorch imports for it."""
    definition = cupyops.operators()["cupyops::relu"].definition
    assert definition.launch_forward is definition.forward is not None


def test_gradients_of_refused_sizes_are_laid_out_as_a_graph_counts_on():
    """A graph with symbolic sizes is made for kernels; where they refuse, the reference may lay gradients out otherwise."""

    @cupyops.operator(fresh())
    def product(x: Tensor, k: Tensor) -> Tensor:
        return x @ k.mT

    @product.forward
    def forward(x, k):
        return x @ k.mT, ()

    @product.backward
    def backward(saved, grad_y, x, k):
        return grad_y @ k, grad_y.mT @ x

    @product.unsupported
    def unsupported(x, k):
        return None if isinstance(x.shape[2], torch.SymInt) or x.shape[2] != 7 else "seven columns"

    compiled = torch.compile(lambda x, k: product(x, k), dynamic=True, backend="aot_eager")
    with cupyops.simulate():
        for columns in (8, 7, 8):
            x, k = torch.randn(2, 3, columns, requires_grad=True), torch.randn(2, 5, columns, requires_grad=True)
            grads = torch.autograd.grad(compiled(x, k), (x, k), torch.ones(2, 3, 5))
            assert all(grad.is_contiguous() for grad in grads)
            for ours, theirs in zip(grads, torch.autograd.grad(x @ k.mT, (x, k), torch.ones(2, 3, 5))):
                torch.testing.assert_close(ours, theirs)
